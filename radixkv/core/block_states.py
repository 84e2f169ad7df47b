"""Which blocks, and in what state: what makes one call on many blocks cheap.

Blocks that are allocated together mostly have consecutive ids, and so have the blocks of a path, in a few
runs. A run is a slice of a per-block array, and "are these all in that state?" and "put them all into that
state" are one memcmp and one memcpy with a row of equal states: several times cheaper than numpy's
comparisons and assignments, whose fixed costs outweigh the work on a few hundred blocks. Scattered ids take
the way of numpy, with an array of ids.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

BlockIds = npt.NDArray[np.int32]

Run = tuple[int, int]  # first id, and the one behind the last

# What selects blocks in a per-block array: a few runs of consecutive ids, or an array of ids.
Index = list[Run] | npt.NDArray[np.intp]

ID_BYTES = 4

# The state of a block is one number, so that one call reads or changes it for many: 2 for each reference,
# the tree's included, and 1 if it is cached.
REFERENCE = 2
CACHED = 1
IDLE = REFERENCE + CACHED  # cached, and held by nobody but the tree
FREE = 0

# The states that whole runs are in at the usual turns of a request, and rows of blocks in that state. Longer
# runs go through numpy, whose fixed costs do not matter there.
ROW = 8192
ROWS = {s: np.full(ROW, s, np.int32).tobytes() for s in (FREE, REFERENCE, IDLE, REFERENCE + IDLE)}
ROW_VIEWS = {state: memoryview(row) for state, row in ROWS.items()}

MOST_RUNS = 8  # with more, one call on an array of ids is cheaper than one call for each run
HEAD = 1024
FEW = 24  # ids; if they are scattered, looking for runs among so few costs more than it saves


class BlockStates:
    """The state of every block, and the runs that ids form.

    Args:
        num_blocks: Blocks in the pool; all are free at first.
    """

    __slots__ = ("_bytes", "_known_bytes", "_known_runs", "_num_blocks", "_ramp_bytes", "array", "ramp")

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self.array = np.zeros(num_blocks, np.int32)
        self.ramp = np.arange(num_blocks, dtype=np.int32)
        self._bytes = memoryview(_buffer(self.array)).cast("B")
        self._ramp_bytes = memoryview(_buffer(self.ramp)).cast("B")
        self._known_bytes = b""
        self._known_runs: list[Run] = []

    def index(self, ids: BlockIds) -> Index:
        """What selects these blocks in a per-block array.

        A negative id is never taken to count from the end: like others out of range, it makes an array that
        numpy refuses with an IndexError.
        """
        n = len(ids)
        if not n:
            return []
        first = ids.item(0)
        stop: int = first + n
        if (
            ids.item(-1) == stop - 1
            and first >= 0
            and stop <= self._num_blocks
            and ids.tobytes().startswith(self._ramp_bytes[first * ID_BYTES : stop * ID_BYTES])
        ):
            return [(first, stop)]
        if n == len(self._known_bytes) // ID_BYTES and ids.tobytes() == self._known_bytes:
            return self._known_runs
        if n > FEW:
            # If the first ids of many are scattered, the others need not be looked at.
            ends = ((ids[1:HEAD] - ids[: HEAD - 1][: n - 1]) != 1).nonzero()[0]
            if n > HEAD and len(ends) < MOST_RUNS:
                ends = ((ids[1:] - ids[:-1]) != 1).nonzero()[0]
            if len(ends) < MOST_RUNS:
                runs, start = [], 0
                for end in (*(ends + 1).tolist(), n):
                    first = ids.item(start)
                    runs.append((first, first + end - start))
                    start = end
                if all(first >= 0 and stop <= self._num_blocks for first, stop in runs):
                    return runs
        return ids.view(np.uint32).astype(np.intp)

    def remember(self, ids: BlockIds, runs: list[Run]) -> None:
        """Note the runs of these ids, all of them: who inserts a table often releases it next."""
        if len(runs) > MOST_RUNS:
            return
        self._known_bytes = ids.tobytes()
        self._known_runs = runs

    def all_are(self, index: Index, state: int) -> bool:
        """Whether all these blocks are in a state that has a row."""
        if not isinstance(index, list):
            return bool(np.count_nonzero(self.array[index] == state) == len(index))
        row = ROWS[state]
        for start, stop in index:
            if stop - start <= ROW:
                if not row.startswith(self._bytes[start * ID_BYTES : stop * ID_BYTES]):
                    return False
            elif np.count_nonzero(self.array[start:stop] != state):
                return False
        return True

    def set_all(self, index: Index, state: int) -> None:
        """Put all these blocks into a state that has a row."""
        if not isinstance(index, list):
            self.array[index] = state
            return
        row = ROW_VIEWS[state]
        for start, stop in index:
            if stop - start <= ROW:
                self._bytes[start * ID_BYTES : stop * ID_BYTES] = row[: (stop - start) * ID_BYTES]
            else:
                self.array[start:stop] = state


def get(array: npt.NDArray[Any], index: Index) -> npt.NDArray[Any]:
    """The values of these blocks in a per-block array; a view if they are one run."""
    if not isinstance(index, list):
        return array[index]
    if len(index) == 1:
        start, stop = index[0]
        return array[start:stop]
    if not index:
        return array[:0]
    return np.concatenate([array[start:stop] for start, stop in index])


def put(array: npt.NDArray[Any], index: Index, values: npt.NDArray[Any]) -> None:
    """Set these blocks to as many values in a per-block array."""
    if not isinstance(index, list):
        array[index] = values
        return
    at = 0
    for start, stop in index:
        array[start:stop] = values[at : at + stop - start]
        at += stop - start


def fill(array: npt.NDArray[Any], index: Index, value: float) -> None:
    """Set all of these blocks to one value in a per-block array."""
    if isinstance(index, list):
        for start, stop in index:
            array[start:stop] = value
    else:
        array[index] = value


def leading(runs: list[Run] | None, n: int) -> list[Run] | None:
    """The runs of the first `n` blocks, at least 1."""
    if runs is None:
        return None
    if len(runs) == 1:
        start = runs[0][0]
        return [(start, start + n)]
    out = []
    for start, stop in runs:
        stop = min(stop, start + n)
        out.append((start, stop))
        n -= stop - start
        if not n:
            break
    return out


def trailing(runs: list[Run] | None, n: int) -> list[Run] | None:
    """The runs of the last `n` blocks, at least 1."""
    if runs is None:
        return None
    if len(runs) == 1:
        stop = runs[0][1]
        return [(stop - n, stop)]
    out = []
    for start, stop in reversed(runs):
        start = max(start, stop - n)
        out.append((start, stop))
        n -= stop - start
        if not n:
            break
    return out[::-1]


def joined(pieces: list[list[Run] | None]) -> list[Run] | None:
    """The runs of several pieces together; None if they are unknown or too many to be worth it."""
    if len(pieces) == 1:
        return pieces[0]
    if len(pieces) > MOST_RUNS:
        return None
    out: list[Run] = []
    for runs in pieces:
        if runs is None:
            return None
        out += runs
    return out if len(out) <= MOST_RUNS else None


def disjoint(runs: list[Run]) -> bool:
    """Whether no block is in two of these runs."""
    if len(runs) < 2:
        return True
    last = -1
    for start, stop in sorted(runs):
        if start < last:
            return False
        last = stop
    return True


def _buffer(array: npt.NDArray[Any]) -> Any:
    return array  # numpy 1.26 does not tell type checkers that arrays are buffers
