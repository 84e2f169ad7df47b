"""The sequences that decode, as arrays that go on from step to step."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from radixkv.core.block_states import BlockIds
from radixkv.sched.request import Sequence
from radixkv.sched.rows import Rows

# Block tables are made a little wider than they must be, so that they are not made anew at every border.
_SPARE_BLOCKS = 4


class Decodes:
    """A set of decoding sequences in order of arrival, and what a step needs of each.

    As long as the set is the same, the next step's positions and slots are these plus one, and only who crosses a
    border between blocks needs more. Arrays that were handed out in a step are not written to again, except for
    block tables, behind the blocks that the step reads.

    Attributes:
        seqs: The sequences.
        rows: `intp[S]`, their rows.
        rows32: The same as int32, as steps have it.
        positions: `int64[S]`, where each one's next token goes.
        slots: `int64[S]`, the slots of those; wrong for those whose next token starts a block, until `grow`.
        tables: `int32[S, W]`, their block tables.
        ones: `int32[S]`.
        starts: `int32[S + 1]`, counting up from 0.
        base: `int64[S]`, as in `Rows`.
        steps_left: In fewer steps nobody reaches its limit of tokens.
    """

    __slots__ = (
        "_rows",
        "_steps_to_wider_outputs",
        "base",
        "block_size",
        "ones",
        "positions",
        "rows",
        "rows32",
        "seqs",
        "slots",
        "starts",
        "steps_left",
        "tables",
    )

    def __init__(self, rows: Rows, seqs: list[Sequence], block_size: int) -> None:
        n = len(seqs)
        self._rows = rows
        self.tables: BlockIds
        self.block_size = block_size
        self.seqs = list(seqs)
        self.rows = at = np.fromiter([seq.row for seq in seqs], np.intp, n)
        self.rows32 = at.astype(np.int32)
        self.positions = rows.computed[at]
        self.base = rows.base[at]
        self.ones = np.ones(n, np.int32)
        self.starts = np.arange(n + 1, dtype=np.int32)
        num_blocks = rows.num_blocks[at]
        self._widen(int(num_blocks.max()))
        last = self.tables[self.starts[:n], num_blocks - 1].astype(np.int64)
        self.slots = last * block_size + self.positions % block_size
        known = rows.known[at]
        self.steps_left = int((rows.limit[at] - known).min())
        self._steps_to_wider_outputs = rows.outputs.shape[1] - int((known - self.base).max())

    def at_border(self) -> npt.NDArray[np.intp]:
        """Who needs a block for its next token, as indices."""
        return (self.positions % self.block_size == 0).nonzero()[0]

    def grow(self, who: npt.NDArray[np.intp], blocks: BlockIds) -> npt.NDArray[np.intp]:
        """Give each of these a block for its next token; their rows."""
        rows = self._rows
        at = self.rows[who]
        num_blocks = rows.num_blocks[at]
        width = int(num_blocks.max()) + 1
        rows.need_width(width)
        rows.tables[at, num_blocks] = blocks
        rows.num_blocks[at] = num_blocks + 1
        if width > self.tables.shape[1]:
            self._widen(width)
        else:
            # In place: steps that were made before do not read so far.
            self.tables[who, num_blocks] = blocks
        self.slots[who] = blocks.astype(np.int64) * self.block_size
        return at

    def put_copy(self, i: int, index: int, block: int) -> None:
        """Sequence i goes on in a copy of its last block."""
        self.tables = self.tables.copy()
        self.tables[i, index] = block
        self.slots[i] = block * self.block_size + self.positions.item(i) % self.block_size

    def append(self, tokens: npt.NDArray[np.int64]) -> None:
        """All of them have computed one token and sampled one."""
        rows, at, positions = self._rows, self.rows, self.positions
        if self._steps_to_wider_outputs <= 0:
            have = rows.outputs.shape[1]
            rows.need_outputs(have + 1)
            self._steps_to_wider_outputs += rows.outputs.shape[1] - have
        known = positions + 1
        rows.computed[at] = known
        rows.outputs[at, known - self.base] = tokens
        rows.last[at] = tokens
        rows.known[at] = known + 1
        self.positions = known
        self.slots = self.slots + 1
        self.steps_left -= 1
        self._steps_to_wider_outputs -= 1

    def _widen(self, width: int) -> None:
        width = min(width + _SPARE_BLOCKS, self._rows.tables.shape[1])
        self.tables = self._rows.tables[self.rows, :width]


def append_some(rows: Rows, at: npt.NDArray[np.intp], tokens: npt.NDArray[np.int64]) -> None:
    """Like `Decodes.append`, for some rows."""
    known = rows.known[at]
    new = known - rows.base[at]
    rows.need_outputs(int(new.max()) + 1)
    rows.computed[at] = known
    rows.outputs[at, new] = tokens
    rows.last[at] = tokens
    rows.known[at] = known + 1
