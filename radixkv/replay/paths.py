"""Which requests share which blocks, and when each block is used again: what only a replay can know."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

import numpy as np
import numpy.typing as npt

from radixkv.core.block_keys import block_keys
from radixkv.core.tokens import TokenArray

__all__ = ["BlockPaths"]


class BlockPaths:
    """The whole blocks of all requests, numbered: one number stands for a block and everything before it.

    Blocks are told apart by 64-bit keys: two of a million distinct blocks get the same with a probability of
    3e-8. The tree of a replay compares tokens; only the optimum and the count of distinct blocks rest on this.

    Args:
        requests: int64 tokens of each request, or ids of its blocks with a block size of 1.
        block_size: Tokens in a block. A last block that is not full is left out.
        leave_one: Whether a request has to compute at least one token, so that its last block, if that is full, is
            cached but never hit by this request.

    Attributes:
        lengths: `int64[num_requests]`, whole blocks of each request.
        num_usable: `int64[num_requests]`, how many of them the request can hit at most.
    """

    def __init__(self, requests: Iterable[TokenArray], block_size: int, *, leave_one: bool) -> None:
        keys, lengths, usable = [], [], []
        for tokens in requests:
            num_whole = len(tokens) // block_size
            keys.append(block_keys(tokens[: num_whole * block_size], block_size, 0))
            lengths.append(num_whole)
            usable.append((len(tokens) - leave_one) // block_size)
        self.lengths = np.array(lengths, np.int64)
        self.num_usable = np.array(usable, np.int64)
        self._ends = np.cumsum(self.lengths)
        distinct, numbers = np.unique(np.concatenate(keys), return_inverse=True)
        self._numbers = numbers.astype(np.int32)
        self._num_distinct = len(distinct)

    @property
    def num_distinct(self) -> int:
        """Distinct whole blocks: what a cache without a limit would hold at the end."""
        return self._num_distinct

    @property
    def never(self) -> int:
        """Stands for "is not used again" among next uses: later than every request."""
        return len(self.lengths)

    def numbers(self, request: int) -> npt.NDArray[np.int32]:
        """Numbers of the whole blocks of a request, root first."""
        end = int(self._ends[request])
        return self._numbers[end - int(self.lengths[request]) : end]

    def next_uses(self, request: int) -> npt.NDArray[np.int32]:
        """For each whole block of a request, the number of the next request that could hit it; see `never`.

        A request that has a block, but cannot hit it, computes it and caches it again: to have kept it until then
        is worth nothing, so that this, too, is `never`.
        """
        end = int(self._ends[request])
        return self._next_uses[end - int(self.lengths[request]) : end]

    @cached_property
    def _next_uses(self) -> npt.NDArray[np.int32]:
        result = np.empty(len(self._numbers), np.int32)
        upcoming = np.full(self._num_distinct, self.never, np.int32)
        for request in range(len(self.lengths) - 1, -1, -1):
            end = int(self._ends[request])
            numbers = self.numbers(request)
            result[end - len(numbers) : end] = upcoming[numbers]
            usable = int(self.num_usable[request])
            upcoming[numbers[:usable]] = request
            upcoming[numbers[usable:]] = self.never
        return result
