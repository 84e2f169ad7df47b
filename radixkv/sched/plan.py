"""What the scheduler notes of a step that is not complete yet: how to end it, and how to take it back."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from radixkv.core.block_states import BlockIds
from radixkv.core.tokens import TokenArray

if TYPE_CHECKING:
    from radixkv.sched.decodes import Decodes
    from radixkv.sched.request import Sequence


class Chunk(NamedTuple):
    """The part of a sequence's known tokens that a step computes."""

    seq: Sequence
    start: int
    num_tokens: int
    num_samples: int  # tokens sampled behind it: one for the sequence, and for each that forks from it


def next_chunk(seq: Sequence, start: int, budget: int) -> Chunk:
    """What a sequence that has computed `start` tokens computes in this step."""
    left = len(seq._tokens) - start
    return Chunk(seq, start, min(left, budget), 0 if left > budget else 1 + len(seq._followers))


class Entered(NamedTuple):
    """A sequence that got a row and blocks in this step."""

    seq: Sequence
    is_first: bool  # it was never admitted before


class Copied(NamedTuple):
    """A shared block that a row goes on in a copy of."""

    row: int
    place: int
    old: int
    new: int


class Leaving(NamedTuple):
    """A sequence that is being copied to the host tier; it has its row and its blocks until that is done."""

    seq: Sequence
    src: BlockIds
    dst: BlockIds


class Plan:
    """Notes of one step; see `Scheduler`."""

    __slots__ = (
        "aborted",
        "admitted",
        "chunks",
        "copied",
        "decodes",
        "disturbed",
        "entered",
        "finished",
        "grown",
        "held",
        "keep",
        "leaving",
        "let_go",
        "num_pledged",
        "preempted",
        "resumed",
        "sampling_seqs",
        "short",
        "swap_in",
        "tails",
        "unshared",
    )

    def __init__(self) -> None:
        self.decodes: Decodes | None = None  # who decodes
        self.keep: npt.NDArray[np.intp] | None = None  # if not all of them are in the step: which
        self.chunks: list[Chunk] = []
        self.sampling_seqs: list[Sequence] = []
        self.admitted: list[Sequence] = []
        self.resumed: list[Sequence] = []
        self.preempted: list[Sequence] = []
        self.finished: list[Sequence] = []
        self.entered: list[Entered] = []
        self.held: BlockIds | None = None  # the match of a sequence that is about to enter
        self.grown: list[tuple[npt.NDArray[np.intp], BlockIds]] = []  # rows, and the block that each got
        self.copied: list[Copied] = []
        self.let_go: dict[int, int] = {}  # references on shared blocks that go when the step is complete
        self.unshared: list[int] = []  # rows found to be the last holder of their last block
        self.tails: list[tuple[int, int]] = []  # cached block of which leading rows are used, and its copy
        self.leaving: list[Leaving] = []
        self.swap_in: list[tuple[BlockIds, BlockIds]] = []  # host blocks, blocks
        self.num_pledged = 0  # of the blocks that become free when the step is complete: wanted already
        self.short = False  # somebody who runs did not get a block
        self.disturbed = False  # some sequence ended while the step was out
        # Aborted meanwhile, with the tokens they had; their rows and blocks go when the step ends.
        self.aborted: list[tuple[Sequence, TokenArray]] = []

    @property
    def num_leaving_blocks(self) -> int:
        """Blocks that become free when the step is complete."""
        return sum(len(leaving.src) for leaving in self.leaving)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to do and nothing to tell."""
        return not (
            self.chunks
            or self.finished
            or self.leaving
            or self.preempted
            or (self.decodes is not None and (self.keep is None or len(self.keep)))
        )
