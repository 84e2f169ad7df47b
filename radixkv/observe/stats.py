"""Counters of a prefix cache."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from radixkv.observe.histogram import SHARES, Histogram, HistogramStats
from radixkv.observe.prefill_cost import PrefillCost
from radixkv.observe.requests import RequestStats

__all__ = ["CacheStats", "RequestStats", "StatsRecorder", "difference", "hash_of", "plain"]


def difference(later: Any, earlier: Any, keep: frozenset[str] = frozenset()) -> dict[str, Any]:
    """The fields of a difference of two snapshots of the same kind.

    Args:
        later: A dataclass of numbers, histograms, and mappings of names to numbers.
        earlier: A snapshot of the same thing, taken before.
        keep: Fields that say how things stand, and do not count: those of the later one are kept.

    Raises:
        ValueError: A counter was lower in the later one.
    """
    values: dict[str, Any] = {}
    for each in fields(later):
        now, then = getattr(later, each.name), getattr(earlier, each.name)
        if each.name in keep or now is None or then is None:
            values[each.name] = now
            continue
        if isinstance(now, Mapping):
            more = {name: count - then.get(name, 0) for name, count in now.items()}
            values[each.name] = {name: count for name, count in more.items() if count}
            back = any(count < 0 for count in more.values()) or not now.keys() >= then.keys()
        else:
            values[each.name] = now - then
            back = isinstance(now, (int, float)) and now < then
        if back:
            raise ValueError(
                f"{each.name} went from {then} to {now}: subtract the earlier snapshot from the later one, both taken "
                "since the last reset_stats()"
            )
    return values


def plain(stats: Any) -> dict[str, Any]:
    """The fields of a snapshot as numbers, lists and dicts, fit for JSON."""
    values: dict[str, Any] = {}
    for each in fields(stats):
        value = getattr(stats, each.name)
        if isinstance(value, Mapping):
            value = dict(value)
        values[each.name] = value.to_dict() if isinstance(value, HistogramStats) else value
    return values


def hash_of(stats: Any) -> int:
    """A hash for a snapshot, its mappings included: equal ones have equal hashes."""
    values = (getattr(stats, each.name) for each in fields(stats))
    return hash(tuple(frozenset(value.items()) if isinstance(value, Mapping) else value for value in values))


@dataclass(frozen=True)
class CacheStats:
    """A snapshot; it does not change when the cache goes on. `later - earlier` is what came between two of them.

    Attributes:
        requests: Prompts served (rows of a batch count one by one).
        prompt_tokens: Their tokens, padding left out.
        hit_tokens: Prompt tokens whose prefill was skipped.
        computed_tokens: Prompt tokens that went through the model.
        prefill_seconds_saved: Estimate: each hit token at the cost of a computed one as measured by then (by the
            first measurement, if it was hit before). Prefills of less than 32 tokens do not set that rate: they
            cost mostly the fixed part of a forward. 0.0 on devices whose work is asynchronous, where nothing is
            measured so as not to synchronise.
        prefill_seconds: Time in the forwards that computed prompts.
        lookup_seconds: Time in matching prompts against the tree.
        gather_seconds: Time in copying cached KV to where the model reads it.
        commit_seconds: Time in storing new KV.
        stored_tokens: Tokens whose KV was written to the pool.
        evicted_blocks: Blocks evicted to make room.
        cow_copies: Hits that ended inside a block, whose matched rows were copied; with `decode="paged"`, all blocks
            that were copied before more was written to them.
        bypasses: Calls passed through untouched, by reason.
        evicted_tokens: Tokens whose KV was in the evicted blocks.
        full_hits: Requests that hit all but what must be computed in any case: the last token, as a rule. A prompt of
            a single token is one.
        partial_hits: Requests that hit something, but less.
        no_hits: Requests that hit nothing.
        misses: Requests that were no full hit, by the reason (`radixkv.observe.MISS_REASONS`).
        prefill_flops_saved: Estimate: floating-point operations of a prefill of what was hit (see
            `radixkv.observe.PrefillCost` for the formula); None for a cache without a model.
        resumed_tokens: Tokens that preempted requests of an engine still found when they went on, cached or in host
            memory. They are no hits, and not among the prompt tokens a second time.
        recomputed_tokens: Tokens that were computed again after a preemption.
        hit_shares: How many requests hit which share of their tokens.
        contiguous: Sessions with `decode="paged"` that kept their KV, or the rest of it, in a buffer of their own after
            all, by reason.
    """

    requests: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    computed_tokens: int = 0
    prefill_seconds_saved: float = 0.0
    prefill_seconds: float = 0.0
    lookup_seconds: float = 0.0
    gather_seconds: float = 0.0
    commit_seconds: float = 0.0
    stored_tokens: int = 0
    evicted_blocks: int = 0
    cow_copies: int = 0
    bypasses: dict[str, int] = field(default_factory=dict)
    evicted_tokens: int = 0
    full_hits: int = 0
    partial_hits: int = 0
    no_hits: int = 0
    misses: dict[str, int] = field(default_factory=dict)
    prefill_flops_saved: int | None = None
    resumed_tokens: int = 0
    recomputed_tokens: int = 0
    hit_shares: HistogramStats = field(default_factory=HistogramStats)
    contiguous: dict[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        """One line for people; `to_dict()` has everything."""
        text = (
            f"{self.requests:,} requests, {self.hit_tokens:,} of {self.prompt_tokens:,} prompt tokens hit "
            f"({self.hit_rate:.1%}): {self.full_hits:,} full, {self.partial_hits:,} partial, {self.no_hits:,} none"
        )
        for what, counts in (("misses", self.misses), ("bypasses", self.bypasses)):
            if counts:
                text += f"; {what}: " + ", ".join(
                    f"{reason} {num:,}" for reason, num in sorted(counts.items())
                )
        return text

    @property
    def hit_rate(self) -> float:
        """`hit_tokens / prompt_tokens`, never above 1; 0.0 before the first request."""
        return self.hit_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    def __sub__(self, earlier: CacheStats) -> CacheStats:
        """What came between two snapshots of one cache.

        Raises:
            ValueError: `earlier` is the later one, or `reset_stats()` came between.
        """
        if not isinstance(earlier, CacheStats):
            return NotImplemented
        return CacheStats(**difference(self, earlier))

    def __hash__(self) -> int:
        return hash_of(self)

    def to_dict(self) -> dict[str, Any]:
        """All of it, with `hit_rate`, as numbers, lists and dicts, fit for JSON."""
        return {**plain(self), "hit_rate": self.hit_rate}


_SUMS = (
    "prefill_seconds", "lookup_seconds", "gather_seconds", "commit_seconds", "stored_tokens", "cow_copies",
    "resumed_tokens", "recomputed_tokens",
)  # fmt: skip
_SECONDS = tuple(name for name in _SUMS if name.endswith("_seconds"))
# Shorter prefills cost mostly the fixed part of a forward and would overstate the price of a token.
_MIN_RATE_TOKENS = 32
_MOST_RECENT = 1000


class StatsRecorder:
    """Thread-safe counters behind `CacheStats`. They only ever rise; a reset is a snapshot to subtract.

    Attributes:
        cost: What a prefill costs, if the model is known.
    """

    def __init__(self) -> None:
        # Reentrant: the garbage collector may end a session in the middle of any line of this very thread.
        self._lock = threading.RLock()
        self.cost: PrefillCost | None = None
        self._requests = self._prompt = self._hit = self._flops = 0
        self._sums: dict[str, float] = dict.fromkeys(_SUMS, 0)
        self._rate_tokens = 0
        self._rate_seconds = 0.0
        self._saved = 0.0
        self._unpriced = 0  # hit tokens from before anything was measured
        self._bypasses: Counter[str] = Counter()
        self._contiguous: Counter[str] = Counter()
        self._misses: Counter[str] = Counter()
        self._outcomes: Counter[str] = Counter()
        self._shares = Histogram(SHARES)
        self._base = CacheStats()
        self._last: tuple[RequestStats, ...] = ()
        self._recent: deque[RequestStats] = deque(maxlen=_MOST_RECENT)

    def reset(self, evicted_blocks: int = 0, evicted_tokens: int = 0) -> None:
        """Let `snapshot` start from zero, and forget the records; the numbers given are those it will be given next."""
        with self._lock:
            self._base = self.totals(evicted_blocks, evicted_tokens)
            self._last = ()
            self._recent.clear()

    def add(self, **amounts: float) -> None:
        """Add to the sums named."""
        with self._lock:
            for name, amount in amounts.items():
                self._sums[name] += amount

    def record_requests(self, requests: Sequence[RequestStats]) -> None:
        """Count the prompts of one call."""
        with self._lock:
            for request in requests:
                hit, total = request.hit_tokens, request.prompt_tokens
                self._requests += 1
                self._prompt += total
                self._hit += hit
                self._outcomes[request.outcome] += 1
                if request.miss_reason is not None:
                    self._misses[request.miss_reason] += 1
                if hit and self.cost is not None:
                    self._flops += self.cost.flops(hit)
                self._shares.add(hit / total if total else 0.0)
                self._unpriced += hit
            self._price()
            self._last = tuple(requests)
            self._recent.extend(requests)

    def record_prefill(self, tokens: int, seconds: float) -> None:
        """Count the time in which `tokens` were computed."""
        with self._lock:
            self._sums["prefill_seconds"] += seconds
            if tokens >= _MIN_RATE_TOKENS:
                self._rate_tokens += tokens
                self._rate_seconds += seconds
                self._price()

    def record_bypass(self, reason: str) -> None:
        """Count a call passed through."""
        with self._lock:
            self._bypasses[reason] += 1

    def record_contiguous(self, reason: str) -> None:
        """Count a session whose KV does not stay in the pool."""
        with self._lock:
            self._contiguous[reason] += 1

    @property
    def last_requests(self) -> tuple[RequestStats, ...]:
        """The prompts of the most recent call, one entry for each row."""
        return self._last

    def recent_requests(self, num: int) -> tuple[RequestStats, ...]:
        """The latest records, the newest last."""
        with self._lock:
            return tuple(self._recent)[max(0, len(self._recent) - num) :]

    def snapshot(self, evicted_blocks: int, evicted_tokens: int = 0) -> CacheStats:
        """What was counted since the last reset."""
        with self._lock:
            return self.totals(evicted_blocks, evicted_tokens) - self._base

    def totals(self, evicted_blocks: int, evicted_tokens: int = 0) -> CacheStats:
        """What was ever counted."""
        with self._lock:
            sums = {name: float(x) if name in _SECONDS else int(x) for name, x in self._sums.items()}
            values: dict[str, Any] = dict(sums)
            return CacheStats(
                **values,
                requests=self._requests,
                prompt_tokens=self._prompt,
                hit_tokens=self._hit,
                computed_tokens=self._prompt - self._hit,
                prefill_seconds_saved=self._saved,
                evicted_blocks=evicted_blocks,
                evicted_tokens=evicted_tokens,
                bypasses=dict(self._bypasses),
                full_hits=self._outcomes["full"],
                partial_hits=self._outcomes["partial"],
                no_hits=self._outcomes["none"],
                misses=dict(self._misses),
                prefill_flops_saved=None if self.cost is None else self._flops,
                hit_shares=self._shares.snapshot(),
                contiguous=dict(self._contiguous),
            )

    def _price(self) -> None:
        """Turn hit tokens into seconds, once there is a price."""
        if self._rate_tokens and self._unpriced:
            self._saved += self._unpriced * self._rate_seconds / self._rate_tokens
            self._unpriced = 0
