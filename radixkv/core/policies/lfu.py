"""Least frequently used, plain and with ageing."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from radixkv.core.block_states import BlockIds, Index, fill, get, put
from radixkv.core.errors import CacheCorruptionError
from radixkv.core.policies.ranked import RankedPolicy
from radixkv.core.tokens import TokenArray


class LFUPolicy(RankedPolicy):
    """Least frequently used: the leaf block with the fewest uses since it was inserted goes.

    The insertion is the first use, every request that hits the block one more. Victim: fewest uses. Ties: oldest last
    use; among blocks of one path the deeper one. Nothing is forgotten while a block stays, so what was popular once
    stays for ever: on traffic that drifts it does much worse than LRU. `lfu-aged` mends that.

    Costs: a match is one vectorised addition over the blocks it hit; filing and cutting are logarithmic in the number
    of leaves.

    Source: the column `lfu` of the reference values; Robinson and Devarakonda, "Data cache management using
    frequency-based replacement", SIGMETRICS 1990, for what is wrong with it.

    Args:
        num_blocks: Blocks of the pool.
    """

    name = "lfu"

    def on_request(self, index: Index, num_hit: int, tokens: TokenArray, seed: int, now: int) -> None:
        """Count a use of the blocks hit."""
        put(self.rank, index, get(self.rank, index) + 1)
        fill(self.priority, index, now)

    def on_use(self, index: Index, now: int) -> None:
        """Note the time of use; ties go by it."""
        fill(self.priority, index, now)

    def on_insert(self, index: Index, first: int, tokens: TokenArray, seed: int, now: int) -> None:
        """New blocks have one use."""
        fill(self.rank, index, 1)
        fill(self.priority, index, now)

    def on_replace(self, old: int, new: int) -> None:
        """The fuller block takes over the uses of the one that goes."""
        self.rank[new] = self.rank[old]


class AgedLFUPolicy(RankedPolicy):
    """Least frequently used with dynamic ageing (LFU-DA): a use counts for less the longer ago it was.

    With each use a block gets the key `uses + age`, where `age` is the highest key that was ever evicted (0 at first).
    So blocks that are not used any more are overtaken by new ones as the cache turns over, at a pace that follows
    the turnover and needs no constant.

    Victim: lowest key. Ties: oldest last use; among blocks of one path the deeper one.

    Costs: as LFU, and one maximum over the blocks of each cut.

    Source: Arlitt, Cherkasova, Dilley, Friedrich and Jin, "Evaluating content management techniques for Web proxy
    caches", ACM SIGMETRICS Performance Evaluation Review 27(4), 2000.

    Args:
        num_blocks: Blocks of the pool.

    Attributes:
        age: The highest key evicted so far.
    """

    name = "lfu-aged"

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self.age = 0
        self._uses: npt.NDArray[np.int64] = np.zeros(num_blocks, np.int64)

    def on_request(self, index: Index, num_hit: int, tokens: TokenArray, seed: int, now: int) -> None:
        """Count a use of the blocks hit, and give them the key of now."""
        uses = get(self._uses, index) + 1
        put(self._uses, index, uses)
        put(self.rank, index, uses + self.age)
        fill(self.priority, index, now)

    def on_use(self, index: Index, now: int) -> None:
        """Note the time of use; ties go by it."""
        fill(self.priority, index, now)

    def on_insert(self, index: Index, first: int, tokens: TokenArray, seed: int, now: int) -> None:
        """New blocks have one use, on top of the age."""
        fill(self._uses, index, 1)
        fill(self.rank, index, self.age + 1)
        fill(self.priority, index, now)

    def on_replace(self, old: int, new: int) -> None:
        """The fuller block takes over the uses and the higher of the two keys."""
        self._uses[new] = self._uses[old]
        self.rank[new] = max(self.rank[old], self.rank[new])

    def on_evict(self, ids: BlockIds) -> None:
        """Raise `age` to the highest key evicted."""
        self.age = max(self.age, int(self.rank[ids].max()))

    def check_all(self) -> None:
        """Verify that no key is above `age` and the uses of its block. For tests.

        Raises:
            CacheCorruptionError: One is.
        """
        if (self.rank > self.age + self._uses).any():
            raise CacheCorruptionError(f"lfu-aged: a key is above age {self.age} + uses")
