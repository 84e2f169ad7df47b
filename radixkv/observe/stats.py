"""Counters of a prefix cache."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

__all__ = ["CacheStats", "RequestStats", "StatsRecorder"]


@dataclass(frozen=True)
class RequestStats:
    """One prompt: `prompt_tokens = hit_tokens + computed_tokens`, always.

    Attributes:
        prompt_tokens: Tokens of the prompt, padding left out.
        hit_tokens: Of these, tokens whose prefill was skipped.
        computed_tokens: Of these, tokens that went through the model for this prompt.
    """

    prompt_tokens: int
    hit_tokens: int
    computed_tokens: int


@dataclass(frozen=True)
class CacheStats:
    """A snapshot; it does not change when the cache goes on.

    Attributes:
        requests: Prompts served (rows of a batch count one by one).
        prompt_tokens: Their tokens, padding left out.
        hit_tokens: Prompt tokens whose prefill was skipped.
        computed_tokens: Prompt tokens that went through the model.
        prefill_seconds_saved: Estimate: hit tokens at the measured cost of a computed token; 0.0 on
            devices whose work is asynchronous, where nothing is measured so as not to synchronise.
        prefill_seconds: Time in the forwards that computed prompts.
        lookup_seconds: Time in matching prompts against the tree.
        gather_seconds: Time in copying cached KV to where the model reads it.
        commit_seconds: Time in storing new KV.
        stored_tokens: Tokens whose KV was written to the pool.
        evicted_blocks: Blocks evicted to make room.
        cow_copies: Hits that ended inside a block, whose matched rows were copied.
        bypasses: Calls passed through untouched, by reason.
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

    @property
    def hit_rate(self) -> float:
        """`hit_tokens / prompt_tokens`; 0.0 before the first request."""
        return self.hit_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


_SUMS = (
    "prefill_seconds", "lookup_seconds", "gather_seconds", "commit_seconds", "stored_tokens", "cow_copies",
)  # fmt: skip
# Shorter prefills cost mostly the fixed part of a forward and would overstate the price of a token.
_MIN_RATE_TOKENS = 32


class StatsRecorder:
    """Thread-safe counters behind `CacheStats`."""

    def __init__(self) -> None:
        # Reentrant: the garbage collector may end a session in the middle of any line of this very thread.
        self._lock = threading.RLock()
        self.reset()

    def reset(self) -> None:
        with self._lock:
            self._requests = 0
            self._prompt = 0
            self._hit = 0
            self._sums: dict[str, float] = dict.fromkeys(_SUMS, 0)
            self._rate_tokens = 0
            self._rate_seconds = 0.0
            self._bypasses: Counter[str] = Counter()
            self._last: tuple[RequestStats, ...] = ()

    def add(self, **amounts: float) -> None:
        """Add to the sums named."""
        with self._lock:
            for name, amount in amounts.items():
                self._sums[name] += amount

    def record_requests(self, requests: Sequence[RequestStats]) -> None:
        """Count the prompts of one call."""
        with self._lock:
            self._requests += len(requests)
            self._prompt += sum(request.prompt_tokens for request in requests)
            self._hit += sum(request.hit_tokens for request in requests)
            self._last = tuple(requests)

    def record_prefill(self, tokens: int, seconds: float) -> None:
        """Count the time in which `tokens` were computed."""
        with self._lock:
            self._sums["prefill_seconds"] += seconds
            if tokens >= _MIN_RATE_TOKENS:
                self._rate_tokens += tokens
                self._rate_seconds += seconds

    def record_bypass(self, reason: str) -> None:
        """Count a call passed through."""
        with self._lock:
            self._bypasses[reason] += 1

    @property
    def last_requests(self) -> tuple[RequestStats, ...]:
        return self._last

    def snapshot(self, evicted_blocks: int) -> CacheStats:
        with self._lock:
            sums = self._sums
            token_seconds = self._rate_seconds / self._rate_tokens if self._rate_tokens else 0.0
            return CacheStats(
                requests=self._requests,
                prompt_tokens=self._prompt,
                hit_tokens=self._hit,
                computed_tokens=self._prompt - self._hit,
                prefill_seconds_saved=self._hit * token_seconds,
                prefill_seconds=float(sums["prefill_seconds"]),
                lookup_seconds=float(sums["lookup_seconds"]),
                gather_seconds=float(sums["gather_seconds"]),
                commit_seconds=float(sums["commit_seconds"]),
                stored_tokens=int(sums["stored_tokens"]),
                evicted_blocks=evicted_blocks,
                cow_copies=int(sums["cow_copies"]),
                bypasses=dict(self._bypasses),
            )
