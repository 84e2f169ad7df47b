"""One replay: a trace through the tree and the pool of a cache, one request at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from radixkv.core.block_pool import BlockPool
from radixkv.core.errors import InvalidRequestError
from radixkv.core.eviction import EvictionPolicy, Retention, make_policy
from radixkv.core.radix_tree import RadixTree
from radixkv.replay.optimum import OptimalPolicy, ceiling
from radixkv.replay.trace import Request, Trace

__all__ = ["OPTIMA", "OPTIMAL", "OPTIMAL_PIN", "Policy", "Run", "run", "run_unlimited"]

OPTIMA = ("optimal", "optimal-pin")
"""Names of the optimum: while the running request takes no room, and while it takes as much as in any cache."""
OPTIMAL, OPTIMAL_PIN = OPTIMA

#: A policy by name, or what makes one for a pool of so many blocks, such as its class.
Policy = str | Callable[[int], EvictionPolicy]

_STEP = 64  # requests between two calls of `step`


@dataclass
class Run:
    """What one replay counted.

    Attributes:
        hit_tokens: Prompt tokens served from the cache.
        hit_blocks: Whole blocks served from it (and the last block of a request, where a trace names blocks).
        evicted_blocks: Blocks evicted to make room; None if no tree took part.
        peak_blocks: Most blocks in use at once.
        hits: `int64[num_requests]`, hit tokens of each request; only of a cache without a limit.
    """

    hit_tokens: int = 0
    hit_blocks: int = 0
    evicted_blocks: int | None = None
    peak_blocks: int = 0
    hits: npt.NDArray[np.int64] | None = field(default=None, repr=False, compare=False)


def run(trace: Trace, policy: Policy, capacity: int, step: Callable[[int], None] | None = None) -> Run:
    """Replay a trace.

    The optimum of a trace of tokens is found in whole blocks, of which `hit_tokens` counts the tokens; see
    `token_ceiling` for the tokens inside of blocks.

    Args:
        trace: The trace; every request of it must fit (`Trace.require_room`).
        policy: A policy, or one of `OPTIMA`.
        capacity: Blocks of the pool.
        step: Called now and then with the number of requests done since the last call.
    """
    if policy == OPTIMAL:
        if trace.by_blocks:
            room = capacity + trace.blocks_of(trace.longest)
            return _Blocks(trace, OptimalPolicy(room), room, step).run(keep=capacity)
        hits = ceiling(trace.paths, capacity)
        if step is not None:
            step(len(trace))
        return Run(hits * trace.block_size, hits)
    if policy == OPTIMAL_PIN:
        kind = _Blocks if trace.by_blocks else _Tokens
        return kind(trace, OptimalPolicy(capacity), capacity, step).run()
    clock = _TraceClock()
    made = _make(policy, capacity, clock)
    if trace.by_blocks:
        return _Blocks(trace, made, capacity, step, clock).run()
    return _Tokens(trace, made, capacity, step, clock).run()


def run_unlimited(trace: Trace, step: Callable[[int], None] | None = None) -> Run:
    """Replay a trace through a cache that never evicts: the most that can be hit, and the room that takes."""
    most = trace.paths.num_distinct + trace.blocks_of(trace.longest)
    if not trace.by_blocks:
        most += len(trace)  # one partly filled block for each request
        return _Tokens(trace, make_policy("lru", most), most, step).run(keep_hits=True)
    return run(trace, "lru", most, step)


class _TraceClock:
    """The time of the request that runs, in seconds: for policies that keep blocks for a time."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def _make(policy: Policy, capacity: int, clock: _TraceClock) -> EvictionPolicy:
    made = policy if isinstance(policy, str) else policy(capacity)
    if not isinstance(made, (str, EvictionPolicy)):
        raise InvalidRequestError(
            f"{policy!r} is no policy: called with a number of blocks, it gave {made!r}"
        )
    made = make_policy(made, capacity)
    made.use_clock(clock)
    return made


class _Replay:
    """A pool, a tree on it, and the count of what they did."""

    def __init__(
        self,
        trace: Trace,
        policy: EvictionPolicy,
        num_blocks: int,
        step: Callable[[int], None] | None,
        clock: _TraceClock | None = None,
    ) -> None:
        self.trace = trace
        self.policy = policy
        self.pool = BlockPool(num_blocks)
        self.tree = RadixTree(self.pool, self._tree_block_size(), policy)
        self.counted = Run()
        self._step = step
        self._clock = clock

    def _tree_block_size(self) -> int:
        return 1

    def begin(self, request: Request) -> Retention | None:
        """A request begins: what it says of how long to keep its blocks, if the policy asks."""
        if self._clock is not None and request.timestamp is not None:
            self._clock.now = request.timestamp / 1000
        return request.retention if self.policy.retains else None

    def done(self, number: int) -> None:
        """Request `number` is done."""
        if self._step is not None and (number + 1) % _STEP == 0:
            self._step(_STEP)

    def finish(self) -> Run:
        """The whole trace is done."""
        if self._step is not None:
            self._step(len(self.trace) % _STEP)
        self.counted.evicted_blocks = self.tree.num_evicted_blocks_total
        return self.counted


class _Blocks(_Replay):
    """Requests that name blocks: ids are the tokens of a tree with blocks of one token."""

    def run(self, keep: int | None = None) -> Run:
        """Replay.

        Args:
            keep: Evict down to so many blocks after each request; None: only when there is no room.
        """
        trace, tree, pool, counted = self.trace, self.tree, self.pool, self.counted
        paths = trace.paths
        usable = paths.num_usable.tolist()
        size, by_blocks = trace.block_size, trace.by_blocks
        optimal = self.policy if isinstance(self.policy, OptimalPolicy) else None
        for number, request in enumerate(trace.requests):
            if optimal is not None:
                optimal.expect(paths.next_uses(number))
            ids = request.tokens() if by_blocks else paths.numbers(number).astype(np.int64)
            retention = self.begin(request)
            match = tree.match(ids, partial=False, retention=retention)  # no part of a block of one token
            hits = min(match.num_tokens, usable[number])
            own = tree.allocate(len(ids) - match.num_tokens)
            counted.peak_blocks = max(counted.peak_blocks, pool.num_held)
            result = tree.insert(ids, np.concatenate((match.take(), own)), retention=retention)
            pool.release(result.blocks)
            if keep is not None and tree.num_cached_blocks > keep:
                tree.evict(tree.num_cached_blocks - keep)
            counted.hit_blocks += hits
            counted.hit_tokens += min(hits * size, request.num_tokens)
            self.done(number)
        return self.finish()


class _Tokens(_Replay):
    """Requests that are tokens: what `PrefixCache` does when they are looked up, computed and stored."""

    def _tree_block_size(self) -> int:
        return self.trace.block_size

    def run(self, *, keep_hits: bool = False) -> Run:
        """Replay.

        Args:
            keep_hits: Note what each request hit.
        """
        counted, size = self.counted, self.trace.block_size
        optimal = self.policy if isinstance(self.policy, OptimalPolicy) else None
        if keep_hits:
            counted.hits = np.zeros(len(self.trace), np.int64)
        for number, request in enumerate(self.trace.requests):
            if optimal is not None:
                optimal.expect(self.trace.paths.next_uses(number))
            hits = self._serve(request)
            counted.hit_tokens += hits
            counted.hit_blocks += hits // size
            if counted.hits is not None:
                counted.hits[number] = hits
            self.done(number)
        return self.finish()

    def _serve(self, request: Request) -> int:
        """Look one request up, and store it; the tokens hit."""
        tree, pool = self.tree, self.pool
        retention, tokens = self.begin(request), request.tokens()
        # The last token is always computed: the model has to say what follows it.
        match = tree.match(tokens, max_tokens=len(tokens) - 1, retention=retention)
        hits = match.num_tokens
        match.release()
        # What matched was read by then. To store the request, only whole blocks can be kept as they are.
        known = tree.match(tokens, partial=False, again=True, retention=retention)
        if known.num_tokens == len(tokens):
            known.release()
            return hits
        held = known.take()
        own = tree.allocate(self.trace.blocks_of(request) - len(held))
        self.counted.peak_blocks = max(self.counted.peak_blocks, pool.num_held)
        result = tree.insert(tokens, np.concatenate((held, own)), retention=retention)
        pool.release(result.blocks)
        return hits
