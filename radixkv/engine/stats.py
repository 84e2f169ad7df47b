"""Counters of an engine."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["EngineStats"]


@dataclass(frozen=True)
class EngineStats:
    """A snapshot; it does not change when the engine goes on. Counters run since the engine was made.

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
        cow_copies: Blocks copied because somebody else held them (copy-on-write).
        block_utilisation: Share of the slots in blocks of running sequences that hold a token, now; 1.0 if
            nothing runs.
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
    cow_copies: int = 0
    block_utilisation: float = 1.0

    @property
    def hit_rate(self) -> float:
        """`hit_tokens / prompt_tokens`; 0.0 before the first request."""
        return self.hit_tokens / self.prompt_tokens if self.prompt_tokens else 0.0
