"""Eviction by priorities that requests give, for a time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from radixkv.core.block_states import BlockIds, Index, fill, get, put
from radixkv.core.eviction import Retention
from radixkv.core.policies.ranked import RankedPolicy, Value
from radixkv.core.tokens import TokenArray

if TYPE_CHECKING:
    from radixkv.core.node import Node

ORDINARY = 0
NOTHING_SAID = -math.inf  # time at which blocks expire that nobody has said anything about
SPARE = 1024  # old entries that are left in the heap in any case


class RetentionPolicy(RankedPolicy):
    """Priorities with a time to live, given by the requests; among equals LRU.

    A request that is matched or inserted with `retention=Retention(priority, ttl)` gives its blocks that priority for
    `ttl` seconds from then on, or for as long as they are cached. Everything else, and what has expired, has
    priority 0: positive ones stay longer, negative ones go first. So a system prompt can outlast a quiet night, and a
    batch job can leave no trace. It does not pin: when all else is gone, or in use, a block goes whatever its
    priority (`pin` holds blocks for certain).

    Where requests differ about a block, the highest priority that has not expired counts, and of equal ones the one
    that lasts longest: nobody can take away what another was given. What is lower than a block's priority only counts
    for the blocks that the request itself brought in. As a block cannot go while others hang below it, the priority
    of a prefix is in effect at least that of what follows.

    Victim: lowest priority in effect. Ties: oldest last use; among blocks of one path the deeper one.

    Costs: a match is a few vectorised operations over the blocks it hit; filing, cutting and expiring are logarithmic
    in the number of leaves.

    Source: TensorRT-LLM has the same as `KvCacheRetentionConfig` (NVIDIA, 2025): for ranges of tokens of a request
    and for its decoded tokens, a priority of 0 to 100, 35 if nothing is said, and a duration after which it is 35
    again; blocks go by priority, then LRU. There the newest priority replaces the one before, and the time starts
    when the last request that uses the block lets go of it; here it starts when it is given.

    Args:
        num_blocks: Blocks of the pool.
        clock: Seconds. Where it goes back, time stands still until it has caught up.
    """

    name = "priority"
    retains = True

    def __init__(self, num_blocks: int, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(num_blocks)
        self._clock = clock
        self._time = clock()  # of the last eviction: all blocks are seen at one moment
        self._expires: npt.NDArray[np.float64] = np.full(num_blocks, NOTHING_SAID)
        self._is_own: npt.NDArray[np.bool_] = np.zeros(num_blocks, np.bool_)  # of one request alone so far
        # Filed leaves whose last block will expire, by serial number, and a heap of when. What has gone stays in the
        # heap for a while, as two numbers: leaves that are no more, with all their tokens, are not kept alive by it.
        self._mortal: dict[int, tuple[float, Node]] = {}
        self._expiring: list[tuple[float, int]] = []

    def use_clock(self, clock: Callable[[], float]) -> None:
        """Take the time from elsewhere, as a replay does."""
        self._clock = clock
        self._time = clock()

    def value(self, block: int) -> Value:
        """Priority in effect (0 if it has expired) and last use of a block."""
        live = self._expires.item(block) > self._time
        return self.rank.item(block) if live else ORDINARY, self.priority.item(block)

    def above(self, ids: BlockIds, bound: Value) -> npt.NDArray[np.bool_]:
        """Which of these blocks come after a leaf that is filed under `bound`."""
        rank, last = bound
        ranks = np.where(self._expires[ids] > self._time, self.rank[ids], ORDINARY)
        return (ranks > rank) | ((ranks == rank) & (self.priority[ids] > last))

    def on_request(self, index: Index, num_hit: int, tokens: TokenArray, seed: int, now: int) -> None:
        """Note the time of use; the blocks hit are no longer one request's alone."""
        fill(self._is_own, index, False)
        fill(self.priority, index, now)

    def on_use(self, index: Index, now: int) -> None:
        """Note the time of use."""
        fill(self.priority, index, now)

    def on_insert(self, index: Index, first: int, tokens: TokenArray, seed: int, now: int) -> None:
        """New blocks are one request's own, of priority 0 until `retain` says otherwise."""
        fill(self.rank, index, ORDINARY)
        fill(self._expires, index, NOTHING_SAID)
        fill(self._is_own, index, True)
        fill(self.priority, index, now)

    def on_share(self, index: Index) -> None:
        """These blocks are no longer one request's alone."""
        fill(self._is_own, index, False)

    def on_replace(self, old: int, new: int) -> None:
        """The fuller block takes over what lasts of the one that goes, as if it had been asked for."""
        # As if the new one were the old one, and had been asked for.
        now = max(self._time, self._clock())
        ends = self._expires.item(old), self._expires.item(new)
        ranks = [
            self.rank.item(block) if end > now else ORDINARY
            for block, end in zip((old, new), ends, strict=True)
        ]
        if ends[1] == NOTHING_SAID or (ranks[0], ends[0]) > (ranks[1], ends[1]):
            self.rank[new], self._expires[new] = self.rank[old], ends[0]
        self._is_own[new] = False

    def retain(self, index: Index, retention: Retention) -> None:
        """Raise, lengthen, or (for blocks of this request alone) set the priority of these blocks."""
        priority, now = retention.priority, max(self._time, self._clock())
        end = math.inf if retention.ttl is None else now + retention.ttl
        ranks, expires = get(self.rank, index), get(self._expires, index)
        live = np.where(expires > now, ranks, ORDINARY)
        longer = (live == priority) & ((expires <= now) | (expires < end))
        takes = (priority > live) | longer | get(self._is_own, index)
        put(self.rank, index, np.where(takes, priority, ranks))
        put(self._expires, index, np.where(takes, end, expires))

    def begin(self) -> None:
        """See what time it is, and file anew the leaves whose last block has expired."""
        self._time = now = max(self._time, self._clock())
        expiring, mortal = self._expiring, self._mortal
        while expiring and expiring[0][0] <= now:
            end, serial = heappop(expiring)
            known = mortal.get(serial)
            if known is not None and known[0] == end:
                leaf = known[1]
                self.refile(leaf, leaf.entry[3])

    def file(self, leaf: Node, block: int) -> None:
        """File a leaf, and note when its last block expires."""
        super().file(leaf, block)
        end = self._expires.item(block)
        if self._time < end < math.inf:
            self._mortal[leaf.serial] = end, leaf
            heappush(self._expiring, (end, leaf.serial))
            if len(self._expiring) > 2 * len(self._mortal) + SPARE:  # mostly filed anew since
                self._expiring = [(end, serial) for serial, (end, _) in self._mortal.items()]
                heapify(self._expiring)

    def unfile(self, leaf: Node) -> None:
        """Take a leaf out."""
        self._mortal.pop(leaf.serial, None)
        super().unfile(leaf)

    def refile(self, leaf: Node, block: int) -> None:
        """File a leaf anew, also where only the time of expiry is another one."""
        self.unfile(leaf)  # also if its value is the same: it may last longer now
        self.file(leaf, block)
