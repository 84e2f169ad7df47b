"""The parts of a plan of the torch backend: which query rows read which slots in one call of a kernel."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from radixkv.attention.padded_rows import PaddedRows
from radixkv.attention.step_tables import Int64s

__all__ = ["Call", "Chunk", "PaddedCall", "Round", "Rows"]


@dataclass(slots=True)
class Rows:
    """Some query rows: `start .. stop`, or those of `index` if that is given.

    Attributes:
        start: First row.
        stop: One past the last.
        index: int64, the rows where they are not consecutive.
    """

    start: int
    stop: int
    index: Int64s | None = None

    def __len__(self) -> int:
        return self.stop - self.start if self.index is None else len(self.index)

    def numbers(self) -> Int64s:
        """int64: the rows one by one."""
        return np.arange(self.start, self.stop, dtype=np.int64) if self.index is None else self.index

    @classmethod
    def of(cls, ranges: Sequence[tuple[int, int]]) -> Rows:
        """The rows of several ranges, in that order."""
        if all(before[1] == after[0] for before, after in itertools.pairwise(ranges)):
            return cls(ranges[0][0], ranges[-1][1])
        index = np.concatenate([np.arange(start, stop, dtype=np.int64) for start, stop in ranges])
        return cls(int(index.min()), int(index.max()) + 1, index)


@dataclass(slots=True)
class Chunk:
    """Some rows of a call on the diagonal, with the keys that they see.

    Row j of the chunk sees the keys up to number `before + j`, counted from the chunk's first key, and at most the
    last `window` of them.

    Attributes:
        start: First row, counted from the first row of the call.
        stop: One past the last.
        first_key: First key, counted from the first key of the call.
        num_keys: `before` plus the number of rows.
        before: Keys before the first row's own.
    """

    start: int
    stop: int
    first_key: int
    num_keys: int
    before: int


@dataclass(slots=True)
class Call:
    """Some rows read the same keys.

    Attributes:
        rows: The query rows.
        slot: First slot of the keys, if they lie in consecutive slots.
        slots: int64 `[num_keys]` if they do not.
        num_keys: Keys read.
        lows: int64 `[rows]`: the first key that each row sees; None if all see all.
        chunks: None if the rows see all keys; else the cut of a call whose rows are the last keys themselves.
    """

    rows: Rows
    slot: int
    slots: Int64s | None
    num_keys: int
    lows: Int64s | None = None
    chunks: list[Chunk] | None = None


@dataclass(slots=True)
class PaddedCall:
    """Some single rows, each of which reads its own keys, copied together.

    Attributes:
        rows: n query rows.
        group: The rows of this and other calls, with what they read.
        number: Which of the calls of `group` this is.
    """

    rows: Rows
    group: PaddedRows
    number: int


@dataclass(slots=True)
class Round:
    """Calls on disjoint rows.

    Attributes:
        calls: In the order in which their results are put together.
        rows: The rows of all calls in that order.
    """

    calls: list[Call | PaddedCall]
    rows: Rows
