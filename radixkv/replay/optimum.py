"""What a cache could hit if it knew the future."""

from __future__ import annotations

from heapq import heappop, heappush
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from radixkv.core.block_states import Index, put
from radixkv.core.eviction import PriorityPolicy
from radixkv.core.tokens import TokenArray
from radixkv.replay.paths import BlockPaths

__all__ = ["OptimalPolicy", "ceiling", "token_ceiling"]


class OptimalPolicy(PriorityPolicy):
    """Evicts the leaf block that is used again last (Belady, 1966), from next uses that a replay tells it.

    A block is never used again before the blocks above it are, so that the block used last of all is a leaf, and to
    evict it is the best that any policy can do.

    `expect` must be called before each request.

    Args:
        num_blocks: Blocks of the pool.
    """

    name: ClassVar[str] = "optimal"

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self._uses: npt.NDArray[np.int64] = np.empty(0, np.int64)

    def expect(self, next_uses: npt.NDArray[np.int32]) -> None:
        """When the blocks of the coming request are used again after it, root first.

        A last block that is partly filled has no next use: nobody can hit it as a whole.
        """
        self._uses = np.append(-next_uses.astype(np.int64), np.iinfo(np.int64).min)

    def on_request(self, index: Index, num_hit: int, tokens: TokenArray, seed: int, now: int) -> None:
        """Give the blocks hit their next use, as `expect` said."""
        put(self.priority, index, self._uses[:num_hit])

    def on_insert(self, index: Index, first: int, tokens: TokenArray, seed: int, now: int) -> None:
        """Give the new blocks their next use, as `expect` said."""
        put(self.priority, index, self._uses[first : -(-len(tokens) // self.block_size)])


def ceiling(paths: BlockPaths, capacity: int) -> int:
    """How many blocks any cache of this capacity can hit at most, whatever its policy.

    The cache holds `capacity` blocks between two requests, and the running request takes no room in it. A block kept
    from one request that has it to the next that can hit it is one hit, and takes one place all that time. The
    greatest number of such stays that never need more than `capacity` places at once comes of giving up,
    whenever there are too many, the one that ends last (Carlisle and Lloyd, 1995; for caches, Belady, 1966). As
    blocks whose stays end together are worth the same, only their number is kept.

    No tree and no policy takes part, so that this also checks the optimum that a replay finds. It is exact if every
    request can hit all its blocks. If a request must leave its last block out, the bound may be a little too high: a
    tree cannot keep a block without those above it.

    Args:
        paths: The blocks of the trace.
        capacity: In blocks.
    """
    stays = np.zeros(paths.never, np.int64)  # that end with each request
    ends: list[int] = []  # a heap of those ends, negated, some with no stays left
    kept = hits = 0
    for request in range(len(paths.lengths)):
        num = int(stays[request])
        hits += num
        kept -= num
        stays[request] = 0
        uses, counts = np.unique(paths.next_uses(request), return_counts=True)
        for end, count in zip(uses.tolist(), counts.tolist(), strict=True):
            if end < paths.never:
                stays[end] += count
                kept += count
                heappush(ends, -end)
        while kept > capacity:
            last = -ends[0]
            gone = min(kept - capacity, int(stays[last]))
            stays[last] -= gone
            kept -= gone
            if not stays[last]:
                heappop(ends)
    return hits


def token_ceiling(unlimited: npt.NDArray[np.int64], block_size: int, num_blocks: int) -> int:
    """How many tokens any cache can hit at most, token by token, if it can hit at most so many whole blocks.

    A request hits some whole blocks, at most `block_size - 1` tokens inside of the next one, and never more than in a
    cache without a limit. Say that it hits `u` tokens there, of `n` whole blocks and `m` tokens more. Then with `b`
    whole blocks it hits at most `b * block_size + block_size - 1` tokens for `b < n`, and `u` for `b = n`. So each of
    the first `n - 1` blocks is worth `block_size` tokens, and the last one is worth `m + 1`, which is no more. What
    `num_blocks` blocks can hit at most is found by giving the first ones to all requests, then the last ones that are
    worth most.

    This is a bound, no cache that exists: it takes it that a cached block can always be found that parts from the
    request at the very last token. It is at most `block_size - 1` tokens a request above the whole blocks.

    Args:
        unlimited: `int64[num_requests]`, tokens that each request hits in a cache without a limit.
        block_size: Tokens in a block.
        num_blocks: Whole blocks that all requests together can hit at most; see `ceiling`.
    """
    whole, inside = np.divmod(unlimited, block_size)
    some = whole > 0
    tokens = int(inside[~some].sum()) + (block_size - 1) * int(some.sum())
    num_first = int((whole[some] - 1).sum())
    tokens += block_size * min(num_blocks, num_first)
    last = np.sort(inside[some] + 1)[::-1]
    return tokens + int(last[: max(0, num_blocks - num_first)].sum())
