"""Carrying out a step: moving blocks, running the model, sampling."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from radixkv.engine.records import Stream
from radixkv.engine.runner import ModelRunner
from radixkv.engine.sampler import Sampler, TokenLogprobs
from radixkv.sched import Sequence, Step
from radixkv.store.host_tier import HostTier
from radixkv.store.kv_store import KVStore

__all__ = ["Drawn", "Executor"]


@dataclass
class Drawn:
    """What a step brought.

    Attributes:
        tokens: `[N]` int64, one for each entry of `step.sampling`; 0 where there is an error.
        finished: Why sequences end with that token, by index into `step.sampling`.
        logprobs: `[N]`, where they were asked for.
        errors: What went wrong in sampling, by index into `step.sampling`.
        failed: What the model raised, by entry of the step.
    """

    tokens: npt.NDArray[np.int64]
    logprobs: list[TokenLogprobs | None]
    finished: dict[int, str] = field(default_factory=dict)
    errors: dict[int, Exception] = field(default_factory=dict)
    failed: dict[int, Exception] = field(default_factory=dict)


class Executor:
    """Carries out steps of the scheduler on one model.

    Args:
        store: The pool's memory.
        tier: Host memory for swapped blocks, or None.
        runner: Runs the model.
        sampler: Chooses tokens.
    """

    def __init__(self, store: KVStore, tier: HostTier | None, runner: ModelRunner, sampler: Sampler) -> None:
        self._store = store
        self._tier = tier
        self._runner = runner
        self._sampler = sampler

    def run(
        self, step: Step, streams: Mapping[Sequence, Stream], patience: AbstractContextManager[None]
    ) -> Drawn:
        """Do what the step says, up to the new tokens.

        If the model raises, the sequences of the step are run one by one, so that those it fails on are known and
        the others lose nothing.

        Args:
            step: From `Scheduler.schedule`.
            streams: The sequences that are not finished.
            patience: Entered while the model runs, and only then; what is raised from within it loses nothing.
        """
        try:
            self._move(step)
            failed: dict[int, Exception] = {}
            with patience:
                try:
                    logits = self._runner.execute(step)
                except Exception as error:
                    logits, failed = self._one_by_one(step, error)
            drawn = self._sample(step, streams, logits, failed)
        finally:
            # Whether the step is completed or taken back now, blocks that a copy reads or writes may change hands.
            if self._tier is not None:
                self._tier.fence()
        drawn.failed = failed
        return drawn

    def _move(self, step: Step) -> None:
        if self._tier is not None:
            if step.swap_out.num_blocks:
                self._tier.swap_out(*step.swap_out)
            if step.swap_in.num_blocks:
                self._tier.swap_in(*step.swap_in)
        if step.copies.num_blocks:
            self._store.copy_blocks(*step.copies)

    def _one_by_one(self, step: Step, first: Exception) -> tuple[Tensor, dict[int, Exception]]:
        """The logits as `ModelRunner.execute` gives them, of no meaning where it raised, and the errors by entry."""
        if step.num_seqs == 0:
            raise first
        failed: dict[int, Exception] = {}
        wanted = np.unique(step.sampling).tolist()
        rows: dict[int, Tensor] = {}
        for entry in range(step.num_seqs):
            try:
                logits = self._runner.execute(step.select(entry))
                if entry in wanted:
                    rows[entry] = logits[0]
            except Exception as error:
                failed[entry] = error
        empty = torch.zeros_like(next(iter(rows.values()), torch.zeros(self._runner.vocab_size)))
        if not wanted:
            return empty.new_zeros((0, len(empty))), failed
        return torch.stack([rows.get(entry, empty) for entry in wanted]), failed

    def _sample(
        self,
        step: Step,
        streams: Mapping[Sequence, Stream],
        logits: Tensor,
        failed: Mapping[int, Exception],
    ) -> Drawn:
        sequences = step.sampling_seqs
        drawn = Drawn(np.zeros(len(step.sampling), np.int64), [None] * len(sequences))
        _, rows = np.unique(step.sampling, return_inverse=True)
        which = [
            i
            for i, (sequence, entry) in enumerate(zip(sequences, step.sampling.tolist(), strict=True))
            if sequence in streams and entry not in failed
        ]
        if not which:
            return drawn

        def known(k: int) -> Any:
            return sequences[which[k]].all_tokens()

        sampled = self._sampler.sample(
            logits, [streams[sequences[i]].sampler for i in which], rows[which], known
        )
        drawn.tokens[which] = sampled.token_ids
        drawn.finished = {which[k]: reason for k, reason in sampled.finished.items()}
        drawn.errors = {which[k]: error for k, error in sampled.errors.items()}
        for k, i in enumerate(which):
            drawn.logprobs[i] = sampled.logprobs[k]
        return drawn
