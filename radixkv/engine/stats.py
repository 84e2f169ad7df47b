"""Counters of an engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from radixkv.observe.histogram import HistogramStats
from radixkv.observe.stats import difference, hash_of, plain

__all__ = ["EngineStats"]


@dataclass(frozen=True)
class EngineStats:
    """A snapshot; it does not change when the engine goes on. Counters run since the engine was made.

    `later - earlier` is what came between two snapshots. What says how things stand (running, waiting, swapped,
    used blocks and their peak, utilisation) is that of the later one.

    Attributes:
        running: Sequences that are being computed now.
        waiting: Sequences that wait for room, those that were preempted by recompute among them.
        swapped: Sequences whose blocks lie in host memory.
        finished: Completions that came to an end, whatever the reason.
        steps: Steps that computed tokens: one forward each, or one for each sequence where the model cannot be
            flattened.
        prompt_tokens: Tokens of the prompts of all requests admitted.
        hit_tokens: Of these, tokens whose prefill was skipped. Tokens that a preempted request finds of itself
            are no hits.
        generated_tokens: New tokens.
        preemptions: Times that a running sequence gave its blocks back, by either way.
        preemptions_recompute: Of these, by dropping the blocks.
        preemptions_swap: Of these, by copying them to host memory.
        swapped_out_blocks: Blocks copied to host memory.
        swapped_in_blocks: Blocks copied back.
        swapped_out_bytes: In bytes.
        swapped_in_bytes: In bytes.
        recomputed_tokens: Tokens whose KV was computed again after a preemption.
        resumed_tokens: Tokens that preempted sequences still found, cached or in host memory, when they went on.
        cow_copies: Blocks copied because somebody else held them (copy-on-write).
        block_utilisation: Share of the slots in blocks of running sequences that hold a token, now; 1.0 if
            nothing runs.
        used_blocks: Blocks that sequences, pins and other users of the cache hold now; what is merely cached is not
            among them.
        peak_used_blocks: The most there were at the beginning of any step.
        finished_by_reason: Completions by `Completion.finish_reason`.
        ttft: Seconds from adding a request to its first new token.
        latency: Seconds from adding a request to the end of each of its completions; not of those that were
            aborted or failed.
    """

    running: int = 0
    waiting: int = 0
    swapped: int = 0
    finished: int = 0
    steps: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    preemptions_recompute: int = 0
    preemptions_swap: int = 0
    swapped_out_blocks: int = 0
    swapped_in_blocks: int = 0
    swapped_out_bytes: int = 0
    swapped_in_bytes: int = 0
    recomputed_tokens: int = 0
    resumed_tokens: int = 0
    cow_copies: int = 0
    block_utilisation: float = 1.0
    used_blocks: int = 0
    peak_used_blocks: int = 0
    finished_by_reason: dict[str, int] = field(default_factory=dict)
    ttft: HistogramStats = field(default_factory=HistogramStats)
    latency: HistogramStats = field(default_factory=HistogramStats)

    def __str__(self) -> str:
        """One line for people; `to_dict()` has everything."""
        text = (
            f"{self.running:,} running, {self.waiting:,} waiting, {self.swapped:,} swapped, {self.finished:,} "
            f"finished; steps: {self.steps:,}; {self.hit_tokens:,} of {self.prompt_tokens:,} prompt tokens hit "
            f"({self.hit_rate:.1%}); new tokens: {self.generated_tokens:,}; preemptions: {self.preemptions:,}"
        )
        if self.ttft.count:
            text += f"; mean time to first token: {self.ttft.mean:.3g} s"
        return text

    @property
    def hit_rate(self) -> float:
        """`hit_tokens / prompt_tokens`; 0.0 before the first request."""
        return self.hit_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    def __sub__(self, earlier: EngineStats) -> EngineStats:
        """What came between two snapshots of one engine.

        Raises:
            ValueError: `earlier` is the later one.
        """
        if not isinstance(earlier, EngineStats):
            return NotImplemented
        return EngineStats(**difference(self, earlier, _STANDING))

    def __hash__(self) -> int:
        return hash_of(self)

    def to_dict(self) -> dict[str, Any]:
        """All of it, with `hit_rate`, as numbers, lists and dicts, fit for JSON."""
        return {**plain(self), "hit_rate": self.hit_rate}


_STANDING = frozenset(
    ("running", "waiting", "swapped", "block_utilisation", "used_blocks", "peak_used_blocks")
)
