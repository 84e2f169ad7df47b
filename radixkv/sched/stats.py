"""Counters of a scheduler."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SchedulerStats:
    """A snapshot; it does not change when the scheduler goes on.

    What a step did is counted when it is complete, once; a failed step leaves no trace, except for preemptions by
    recompute and ends for lack of room, which stand.

    Attributes:
        steps: Completed steps.
        computed_tokens: Tokens that went through the model.
        admissions: Requests admitted for the first time.
        prompt_tokens: Their prompt tokens, counted once for a request with n completions.
        hit_tokens: Of these, tokens that were cached when they were first admitted.
        preemptions_recompute: Pauses of a sequence whose blocks were dropped.
        preemptions_swap: Pauses of a sequence whose own blocks were copied to the host tier.
        swapped_out_blocks: Blocks copied to the host tier.
        swapped_in_blocks: Blocks copied back.
        recomputed_tokens: Tokens computed that had been computed before, because their KV was given up.
        resumed_tokens: Tokens that paused sequences still found, cached or in the host tier, when they went on. They
            are no hits.
        cow_copies: Blocks copied before they were written to, because others hold them too.
        held_slots: Slots of the blocks that running sequences hold now; a shared block is counted once.
        filled_slots: Of these, slots with the KV of a token.
    """

    steps: int = 0
    computed_tokens: int = 0
    admissions: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    preemptions_recompute: int = 0
    preemptions_swap: int = 0
    swapped_out_blocks: int = 0
    swapped_in_blocks: int = 0
    recomputed_tokens: int = 0
    resumed_tokens: int = 0
    cow_copies: int = 0
    held_slots: int = 0
    filled_slots: int = 0

    def __str__(self) -> str:
        """One line for people."""
        return (
            f"steps: {self.steps:,}; admissions: {self.admissions:,}; {self.hit_tokens:,} of {self.prompt_tokens:,} "
            f"prompt tokens hit ({self.hit_rate:.1%}); computed tokens: {self.computed_tokens:,}; "
            f"preemptions: {self.preemptions:,}"
        )

    @property
    def preemptions(self) -> int:
        """Pauses of sequences that ran, by recompute and by swap."""
        return self.preemptions_recompute + self.preemptions_swap

    @property
    def hit_rate(self) -> float:
        """`hit_tokens / prompt_tokens`; 0.0 before the first request."""
        return self.hit_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def block_utilisation(self) -> float:
        """`filled_slots / held_slots`; 1.0 while nobody runs."""
        return self.filled_slots / self.held_slots if self.held_slots else 1.0


class Counters:
    """The counters behind `SchedulerStats`."""

    __slots__ = tuple(f for f in SchedulerStats.__dataclass_fields__ if not f.endswith("_slots"))

    steps: int
    computed_tokens: int
    admissions: int
    prompt_tokens: int
    hit_tokens: int
    preemptions_recompute: int
    preemptions_swap: int
    swapped_out_blocks: int
    swapped_in_blocks: int
    recomputed_tokens: int
    resumed_tokens: int
    cow_copies: int

    def __init__(self) -> None:
        for name in self.__slots__:
            setattr(self, name, 0)

    def snapshot(self, held_slots: int, filled_slots: int) -> SchedulerStats:
        """The counters as `SchedulerStats`, with the slots as they are now."""
        values = {name: getattr(self, name) for name in self.__slots__}
        return SchedulerStats(**values, held_slots=held_slots, filled_slots=filled_slots)
