"""`simulate`: a trace against capacities and policies."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from radixkv.core.errors import InvalidRequestError
from radixkv.core.eviction import policy_names
from radixkv.replay.capacities import ladder, parse_capacity
from radixkv.replay.kv_size import KVSize, kv_size
from radixkv.replay.optimum import ceiling, token_ceiling
from radixkv.replay.processes import require_processes, run_all
from radixkv.replay.reading import Progress, check_options, read_trace
from radixkv.replay.runs import OPTIMA, OPTIMAL, OPTIMAL_PIN, Policy, Run, run_unlimited
from radixkv.replay.trace import Trace

__all__ = ["PolicyResult", "ReplayResult", "default_policies", "simulate"]

#: The policy that the docs recommend, if it is there.
_BEST = "hit-density"


@dataclass(frozen=True)
class PolicyResult:
    """One policy at one capacity. Shares and rates are 0 to 1.

    Attributes:
        policy: Its name.
        capacity_blocks: Blocks of the pool; the running request lies in it, too.
        capacity_tokens: The same in tokens.
        capacity_bytes: The same in bytes of KV; None if the model is not known.
        requests: Requests replayed.
        prompt_tokens: Their tokens.
        hit_tokens: Of these, tokens served from the cache. Of "optimal" in a trace of tokens: a bound that no cache of
            this capacity exceeds (see `token_ceiling`).
        computed_tokens: The others.
        hit_rate: `hit_tokens / prompt_tokens`.
        prefill_skipped: The same share, under the name that `radixkv demo` gives it.
        hit_blocks: Whole blocks served from the cache, which the optimum is measured in.
        evicted_blocks: Blocks evicted to make room; None where no tree was run (the optimum of tokens).
        share_of_optimum: `hit_blocks` as a share of what any policy could hit at most; None if that is 0.
        share_of_optimal_pin: The same as a share of what "optimal-pin" hit; None if that was not asked for, does not
            apply, or is 0. It is a bound only where a trace names blocks, and is given only there.
    """

    policy: str
    capacity_blocks: int
    capacity_tokens: int
    capacity_bytes: int | None
    requests: int
    prompt_tokens: int
    hit_tokens: int
    computed_tokens: int
    hit_rate: float
    prefill_skipped: float
    hit_blocks: int
    evicted_blocks: int | None
    share_of_optimum: float | None
    share_of_optimal_pin: float | None


@dataclass(frozen=True)
class ReplayResult:
    """What `simulate` found.

    Attributes:
        trace: The trace in numbers, as in the JSON document.
        results: By capacity, then in the order of the policies.
        kv_size: What a token takes, if the model is known.
    """

    trace: dict[str, Any]
    results: list[PolicyResult]
    kv_size: KVSize | None = None

    def to_dict(self) -> dict[str, Any]:
        """The document of `radixkv replay --format json`."""
        return {"trace": self.trace, "results": [asdict(result) for result in self.results]}


def default_policies() -> list[str]:
    """What is compared if nobody says otherwise: LRU, the policy that the docs recommend, and the optimum."""
    return ["lru", *(name for name in policy_names() if name == _BEST), OPTIMAL]


def simulate(
    trace: Any,
    *,
    capacity: int | str | Iterable[int | str] | None = None,
    policy: Policy | Iterable[Policy] | None = None,
    block_size: int | None = None,
    tokenizer: Any = None,
    model_config: Any = None,
    limit: int | None = None,
    skip_bad: bool = False,
    jobs: int = 1,
    progress: Progress | None = None,
) -> ReplayResult:
    """Replay a trace through the tree and pool of a cache, once for each capacity and policy.

    Requests run one at a time, in the order of the trace, and what they generate is ignored.

    Args:
        trace: A `Trace`, or what `read_trace` reads: a path, "-", a file, or an iterable of requests.
        capacity: One or several: blocks, or texts such as `"512000tok"`, `"40GiB"` and `"unlimited"`. None: round
            numbers up to what the trace would fill.
        policy: One or several: names of `radixkv.core.policy_names()`, `"optimal"`, `"optimal-pin"`, or classes of
            policies. None: see `default_policies`.
        block_size: Tokens in a block: with hash ids, those of the trace (default 512), else those of the
            cache (default 16). A `Trace` has one already, which this must agree with.
        tokenizer: For traces of texts that are yet to be read; see `read_trace`.
        model_config: The model that the KV is of, for sizes in bytes; see `kv_size`.
        limit: Read at most this many requests.
        skip_bad: Leave out requests that make no sense, or are longer than the smallest capacity.
        jobs: Processes that replay at the same time. They import the script that calls this, which must therefore do
            so below `if __name__ == "__main__":`; policies that are no names must be importable.
        progress: Called now and then with what is being done, how much of it is done, and of how much.

    Raises:
        InvalidRequestError: The trace cannot be read, an option makes no sense, or a request is longer than a
            capacity; the message says which.
    """
    policies = _policies(policy)
    if isinstance(jobs, bool) or not isinstance(jobs, int) or jobs < 1:
        raise InvalidRequestError(f"jobs must be an integer of at least 1, got {jobs!r}")
    if jobs > 1:
        require_processes(policies)
    check_options(block_size, limit)
    size = None if model_config is None else kv_size(model_config)
    given = None if capacity is None else _listed(capacity)
    for text in given or ():
        parse_capacity(text, 1, size, 1)  # nonsense is better found before the trace is read
    if not isinstance(trace, Trace):
        trace = read_trace(
            trace,
            block_size=block_size,
            tokenizer=tokenizer,
            limit=limit,
            skip_bad=skip_bad,
            progress=progress,
        )
    else:
        _require_read_so(trace, block_size, tokenizer)
        if limit is not None and limit < len(trace):
            trace = Trace(
                trace.name, trace.shape, trace.block_size, trace.requests[:limit], trace.num_skipped
            )

    steps = None if progress is None else _Steps(progress, len(trace))
    # Without a capacity, how many blocks there are to fill must be known before anything else.
    unlimited = run_unlimited(trace, steps)
    if given is None:
        capacities = ladder(trace.blocks_of(trace.longest), unlimited.peak_blocks)
    else:
        capacities = [parse_capacity(c, trace.block_size, size, unlimited.peak_blocks) for c in given]
        capacities = list(dict.fromkeys(capacities))
    if skip_bad and (fitting := trace.fitting(min(capacities))) is not trace:
        trace = fitting
        unlimited = run_unlimited(trace, steps)
    trace.require_room(min(capacities))

    # A pool that is larger than what is ever needed at once does the same as one that is just large enough.
    pools = {blocks: min(blocks, unlimited.peak_blocks) for blocks in capacities}
    todo = [(number, pool) for pool in dict.fromkeys(pools.values()) for number in range(len(policies))]
    if steps is not None:
        steps.expect(len(todo) * len(trace))
    runs = dict(zip(todo, run_all(trace, policies, todo, jobs, steps), strict=True))
    best = {
        # With tokens, that is what the optimum is.
        pool: runs[policies.index(OPTIMAL), pool].hit_blocks
        if OPTIMAL in policies and not trace.by_blocks
        else ceiling(trace.paths, pool)
        for pool in dict.fromkeys(pools.values())
    }
    if unlimited.hits is not None and OPTIMAL in policies:
        for pool, num_blocks in best.items():
            found = runs[policies.index(OPTIMAL), pool]
            found.hit_tokens = token_ceiling(unlimited.hits, trace.block_size, num_blocks)
    results = []
    for blocks, pool in pools.items():
        pinned = None
        if trace.by_blocks and OPTIMAL_PIN in policies:
            pinned = runs[policies.index(OPTIMAL_PIN), pool].hit_blocks
        for number, which in enumerate(policies):
            found = runs[number, pool]
            bound = None if which == OPTIMAL else pinned
            results.append(_result(trace, which, blocks, size, found, best[pool], bound))
    return ReplayResult(_describe(trace, unlimited, size), results, size)


def _listed(capacity: int | str | Iterable[int | str]) -> list[int | str]:
    if isinstance(capacity, (int, str, np.integer)):
        capacity = [capacity]
    if not isinstance(capacity, Iterable) or not (listed := list(capacity)):
        raise InvalidRequestError(f"capacity is a number, a text or several of them, got {capacity!r}")
    return [int(c) if isinstance(c, np.integer) else c for c in listed]


def _require_read_so(trace: Trace, block_size: int | None, tokenizer: Any) -> None:
    """A trace that is read already: what says how to read it must agree with how it was."""
    if block_size is not None and block_size != trace.block_size:
        raise InvalidRequestError(
            f"block_size is {block_size}, but the trace was read with {trace.block_size}: give it to read_trace"
        )
    if tokenizer is not None:
        raise InvalidRequestError("the trace is read already: give the tokenizer to read_trace")


def _policies(policy: Policy | Iterable[Policy] | None) -> list[Policy]:
    if policy is None:
        return list(default_policies())
    if not isinstance(policy, str) and not callable(policy) and not isinstance(policy, Iterable):
        raise InvalidRequestError(f"a policy is a name or a class, got {policy!r}")
    chosen = [policy] if isinstance(policy, str) or callable(policy) else list(policy)
    known = [*policy_names(), *OPTIMA]
    for which in chosen:
        if isinstance(which, str) and which not in known:
            raise InvalidRequestError(f"unknown policy {which!r}: there is {', '.join(known)}")
        if not isinstance(which, str) and not callable(which):
            raise InvalidRequestError(f"a policy is a name or a class, got {which!r}")
    if not chosen:
        raise InvalidRequestError("no policy is given")
    return list(dict.fromkeys(chosen))


class _Steps:
    """Adds up what several runs have done."""

    def __init__(self, progress: Progress, total: int) -> None:
        self._progress = progress
        self._done = 0
        self._total = total

    def expect(self, more: int) -> None:
        """So many requests more are to come."""
        self._total = self._done + more

    def __call__(self, done: int) -> None:
        """So many more are done."""
        self._done += done
        self._progress("Replaying", self._done, max(self._done, self._total))


def _result(
    trace: Trace, policy: Policy, blocks: int, size: KVSize | None, run: Run, best: int, pinned: int | None
) -> PolicyResult:
    tokens = trace.prompt_tokens
    return PolicyResult(
        policy=policy if isinstance(policy, str) else getattr(policy, "name", repr(policy)),
        capacity_blocks=blocks,
        capacity_tokens=blocks * trace.block_size,
        capacity_bytes=None if size is None else blocks * trace.block_size * size.bytes_per_token,
        requests=len(trace),
        prompt_tokens=tokens,
        hit_tokens=run.hit_tokens,
        computed_tokens=tokens - run.hit_tokens,
        hit_rate=run.hit_tokens / tokens,
        prefill_skipped=run.hit_tokens / tokens,
        hit_blocks=run.hit_blocks,
        evicted_blocks=run.evicted_blocks,
        share_of_optimum=run.hit_blocks / best if best else None,
        share_of_optimal_pin=run.hit_blocks / pinned if pinned else None,
    )


def _describe(trace: Trace, unlimited: Run, size: KVSize | None) -> dict[str, Any]:
    """The trace in numbers."""
    return {
        "name": trace.name,
        "shape": trace.shape,
        "requests": len(trace),
        "skipped": trace.num_skipped,
        "block_size": trace.block_size,
        "prompt_tokens": trace.prompt_tokens,
        "blocks": trace.num_blocks,
        "distinct_blocks": trace.paths.num_distinct,
        "longest_request_blocks": trace.blocks_of(trace.longest),
        "unlimited": {
            "blocks": unlimited.peak_blocks,
            "hit_tokens": unlimited.hit_tokens,
            "hit_blocks": unlimited.hit_blocks,
            "hit_rate": unlimited.hit_tokens / trace.prompt_tokens,
        },
        "bytes_per_token": None if size is None else size.bytes_per_token,
    }
