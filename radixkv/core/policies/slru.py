"""Segmented least recently used."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from radixkv.core.block_states import BlockIds, Index, fill, get, put
from radixkv.core.errors import CacheCorruptionError, InvalidRequestError
from radixkv.core.policies.ranked import RankedPolicy
from radixkv.core.tokens import TokenArray

if TYPE_CHECKING:
    from radixkv.core.node import Node

MIN_HITS = 2
PROTECTED_SHARE = 0.8


class SLRUPolicy(RankedPolicy):
    """Segmented LRU: what was hit at least twice is protected from what comes once.

    Blocks start on probation. With the second hit since its insertion a block becomes protected, as long as it is
    cached. No more than a share of the pool is protected: when there are more, those used longest ago (of one path
    the deepest) go back on probation, as if they had just been used there, and need one more hit to come back.

    Victim: the leaf block on probation that was used, or sent back, longest ago; protected ones only if there is no
    other. Ties: the deeper block first. Robust against scans of prompts that never return; but where conversations
    go on, every first turn looks like a scan.

    Costs: a match is a few vectorised operations over the blocks it hit; sending back is the same, amortised;
    filing and cutting are logarithmic in the number of leaves.

    Source: Karedla, Love and Wherry, "Caching strategies to improve disk system performance", IEEE Computer 27(3),
    1994, where one hit is enough and the share is a parameter; it is 0.8 in the W-TinyLFU of Einziger, Friedman and
    Manes, "TinyLFU: a highly efficient cache admission policy", ACM Transactions on Storage 13(4), 2017.

    Args:
        num_blocks: Blocks of the pool.
        min_hits: Hits that make a block protected, at least 1.
        protected_share: Largest share of the pool that is protected, in [0, 1].
    """

    name = "slru"

    def __init__(
        self, num_blocks: int, min_hits: int = MIN_HITS, protected_share: float = PROTECTED_SHARE
    ) -> None:
        super().__init__(num_blocks)
        if min_hits < 1 or not 0 <= protected_share <= 1:
            raise InvalidRequestError(
                f"slru: min_hits must be at least 1, protected_share in [0, 1], got {min_hits}, {protected_share}"
            )
        self._min_hits = min_hits
        self._max_protected = int(protected_share * num_blocks)
        self._num_protected = 0
        self._hits: npt.NDArray[np.int64] = np.zeros(num_blocks, np.int64)
        # Protected blocks by use, oldest first: time, and ids with the root first. Blocks used again since, or
        # gone, stay in until they come up; now and then all those are thrown out.
        self._uses: deque[tuple[int, npt.NDArray[np.intp]]] = deque()
        self._num_listed = 0
        self._leaves: dict[int, Node] = {}  # filed leaves by last block

    def on_request(self, index: Index, num_hit: int, tokens: TokenArray, seed: int, now: int) -> None:
        """Count a hit of each block, and protect those that have enough."""
        hits = get(self._hits, index) + 1
        put(self._hits, index, hits)
        self._protect(index, hits, now)

    def on_use(self, index: Index, now: int) -> None:
        """Note the time of use, without counting a hit."""
        self._protect(index, get(self._hits, index), now)

    def on_insert(self, index: Index, first: int, tokens: TokenArray, seed: int, now: int) -> None:
        """New blocks start on probation, without a hit."""
        fill(self._hits, index, 0)
        fill(self.rank, index, 0)
        fill(self.priority, index, now)

    def on_evict(self, ids: BlockIds) -> None:
        """The blocks that go are not protected any more."""
        self._num_protected -= int(np.count_nonzero(self.rank[ids]))
        self.rank[ids] = 0

    on_drop = on_evict

    def on_replace(self, old: int, new: int) -> None:
        """The fuller block takes over the hits of the one that goes."""
        self.on_drop(np.array([old], np.int32))
        self._hits[new] = hits = self._hits[old]
        self._protect([(new, new + 1)], np.array([hits]), self.priority.item(new))

    def file(self, leaf: Node, block: int) -> None:
        """File a leaf, and note it by its last block."""
        super().file(leaf, block)
        self._leaves[block] = leaf

    def unfile(self, leaf: Node) -> None:
        """Take a leaf out."""
        del self._leaves[leaf.entry[3]]
        super().unfile(leaf)

    def check_all(self) -> None:
        """Verify the count of protected blocks, and that each is listed under its last use. For tests.

        Raises:
            CacheCorruptionError: The count is wrong or too high, or one is not listed.
        """
        protected = np.flatnonzero(self.rank)
        if len(protected) != self._num_protected or self._num_protected > self._max_protected:
            raise CacheCorruptionError(
                f"slru: {len(protected)} protected, counted {self._num_protected}, at most {self._max_protected}"
            )
        listed = {(now, block) for now, ids in self._uses for block in ids.tolist()}
        if not listed.issuperset((self.priority.item(b), b) for b in protected.tolist()):
            raise CacheCorruptionError("slru: a protected block is not listed under its last use")

    def _protect(self, index: Index, hits: npt.NDArray[np.int64], now: int) -> None:
        fill(self.priority, index, now)
        is_protected = hits >= self._min_hits
        if not is_protected.any():
            return
        if isinstance(index, list):
            index = np.concatenate([np.arange(start, stop) for start, stop in index])
        ids = index[is_protected]
        self._num_protected += len(ids) - int(np.count_nonzero(self.rank[ids]))
        self.rank[ids] = 1
        self._uses.append((now, ids))
        self._num_listed += len(ids)
        if self._num_protected > self._max_protected:
            self._send_back(now)
        if self._num_listed > 2 * self._num_protected + 1024:
            self._uses = deque((at, kept) for at, ids in self._uses if len(kept := self._still(at, ids)))
            self._num_listed = sum(len(ids) for _, ids in self._uses)

    def _still(self, at: int, ids: npt.NDArray[np.intp]) -> npt.NDArray[np.intp]:
        """Those that are protected and were last used then."""
        return ids[(self.priority[ids] == at) & (self.rank[ids] == 1)]

    def _send_back(self, now: int) -> None:
        while (excess := self._num_protected - self._max_protected) > 0:
            at, ids = self._uses.popleft()
            self._num_listed -= len(ids)
            ids = self._still(at, ids)
            if excess < len(ids):
                self._uses.appendleft((at, ids[:-excess]))
                self._num_listed += len(ids) - excess
                ids = ids[-excess:]
            self.rank[ids] = 0
            self._hits[ids] = self._min_hits - 1
            self.priority[ids] = now
            self._num_protected -= len(ids)
            for block in ids.tolist():
                leaf = self._leaves.get(block)
                if leaf is not None:
                    self.refile(leaf, block)
