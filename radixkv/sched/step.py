"""One step: what a model is to compute, and what must be moved before."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from radixkv.core.block_states import BlockIds
from radixkv.sched.plan import Plan

if TYPE_CHECKING:
    from radixkv.sched.request import Sequence


class BlockMoves(NamedTuple):
    """Copy whole block `src[i]` to `dst[i]`, for all i; no block is in both.

    Attributes:
        src: `int32[...]`, block ids.
        dst: `int32[...]`, block ids.
    """

    src: BlockIds
    dst: BlockIds

    @property
    def num_blocks(self) -> int:
        """Blocks to move."""
        return len(self.src)


NO_MOVES = BlockMoves(np.empty(0, np.int32), np.empty(0, np.int32))


@dataclass(eq=False)
class Step:
    """What the scheduler wants done now, in this order: `swap_out`, `swap_in`, `copies`, then the forward.

    Entry i is one sequence. Entries that decode come first, in order of arrival, then chunks of prompts. S is the
    number of entries, T the number of tokens of all, N the number of tokens to sample. A step may have no entries
    at all and still have moves, or sequences that ended. The arrays must not be written to.

    Attributes:
        number: Counts the steps, from 0.
        rows: `int32[S]`, the sequence's row, the same as long as it runs.
        num_decodes: The first so many entries decode: their query length is 1.
        query_lens: `int32[S]`, tokens to compute.
        query_starts: `int32[S + 1]`, where each entry starts in the arrays of length T.
        context_lens: `int32[S]`, tokens that have KV after this step, the queries included.
        token_ids: `int64[T]`.
        positions: `int64[T]`, of the tokens in their sequences.
        slot_mapping: `int64[T]`, the slot to write each token's KV to.
        block_tables: `int32[S, W]`; entries beyond the blocks of a sequence are arbitrary.
        sampling: `int32[N]`, the entry whose last logits each token is to be sampled from, ascending. An entry is
            named more than once where several sequences fork from it in this step.
        swap_out: From the pool to the host tier.
        swap_in: From the host tier to the pool.
        copies: Within the pool: copy-on-write.
        admitted: Sequences that start in this step.
        resumed: Sequences that go on in this step after a pause.
        preempted: Sequences whose blocks were taken back for it.
        finished: Sequences that ended with "capacity" when it was made.
        plan: The scheduler's own notes.
    """

    number: int
    rows: npt.NDArray[np.int32]
    num_decodes: int
    query_lens: npt.NDArray[np.int32]
    query_starts: npt.NDArray[np.int32]
    context_lens: npt.NDArray[np.int32]
    token_ids: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    slot_mapping: npt.NDArray[np.int64]
    block_tables: BlockIds
    sampling: npt.NDArray[np.int32]
    swap_out: BlockMoves = NO_MOVES
    swap_in: BlockMoves = NO_MOVES
    copies: BlockMoves = NO_MOVES
    plan: Plan = field(default_factory=Plan, repr=False)

    @property
    def num_seqs(self) -> int:
        """S, the number of entries."""
        return len(self.rows)

    @property
    def num_tokens(self) -> int:
        """T, the number of tokens to compute."""
        return len(self.token_ids)

    @property
    def sampling_seqs(self) -> list[Sequence]:
        """The sequence that gets each sampled token."""
        return self.plan.sampling_seqs

    @property
    def admitted(self) -> list[Sequence]:
        """Sequences that start in this step."""
        return self.plan.admitted

    @property
    def resumed(self) -> list[Sequence]:
        """Sequences that go on in this step after a pause."""
        return self.plan.resumed

    @property
    def preempted(self) -> list[Sequence]:
        """Sequences whose blocks were taken back for this step."""
        return self.plan.preempted

    @property
    def finished(self) -> list[Sequence]:
        """Sequences that ended with "capacity" when this step was made."""
        return self.plan.finished

    def has_row(self, row: int) -> bool:
        """Whether the sequence of that `row` is in this step."""
        return bool((self.rows == row).any())

    def select(self, entry: int) -> Step:
        """One `entry` of this step as a step of its own, without moves: to find out which of them a model fails on."""
        start, stop = self.query_starts[entry], self.query_starts[entry + 1]
        only, tokens = slice(entry, entry + 1), slice(start, stop)
        return Step(
            number=self.number,
            rows=self.rows[only],
            num_decodes=int(entry < self.num_decodes),
            query_lens=self.query_lens[only],
            query_starts=np.array([0, stop - start], np.int32),
            context_lens=self.context_lens[only],
            token_ids=self.token_ids[tokens],
            positions=self.positions[tokens],
            slot_mapping=self.slot_mapping[tokens],
            block_tables=self.block_tables[only],
            sampling=np.zeros(int((self.sampling == entry).any()), np.int32),
            plan=self.plan,
        )

    def sequences_of(self, entry: int) -> list[Sequence]:
        """The sequence that an `entry` computes, behind those that wait to fork from it."""
        if entry < self.num_decodes:
            return [self.plan.sampling_seqs[entry]]
        seq = self.plan.chunks[entry - self.num_decodes].seq
        return [*seq._followers, seq]

    def __repr__(self) -> str:
        return (
            f"Step({self.number}, decodes={self.num_decodes}, entries={self.num_seqs}, "
            f"tokens={self.num_tokens}, samples={len(self.sampling)})"
        )


@dataclass(frozen=True)
class Completed:
    """What `Scheduler.complete` made of a step.

    Attributes:
        finished: Sequences that ended, in order of their entries; not those aborted meanwhile.
        forked: Sequences that share the blocks of another since now, as n completions of one prompt do.
        ignored: Indices into `step.sampling` whose sequences were aborted meanwhile; their tokens were dropped.
    """

    finished: list[Sequence]
    forked: list[Sequence]
    ignored: list[int]
