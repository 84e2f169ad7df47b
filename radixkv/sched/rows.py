"""What the scheduler knows of the sequences that run, in arrays with one row for each."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from radixkv.core.block_states import BlockIds
from radixkv.core.tokens import TokenArray

if TYPE_CHECKING:
    from radixkv.sched.request import Sequence

_FIRST_WIDTH = 16


class Rows:
    """Arrays by row, made once: a decode step is a few numpy calls, however many sequences decode.

    A sequence has a row from its admission until it pauses or ends. The lowest free row is taken first.

    Attributes:
        tables: `int32[num_rows, width]`, block ids; the width doubles when a sequence needs more.
        num_blocks: `int64[num_rows]`, how many ids of the row of `tables` count; what lies beyond is arbitrary.
        computed: `int64[num_rows]`, tokens whose KV is written.
        known: `int64[num_rows]`, tokens, prompt and output.
        limit: `int64[num_rows]`, the number of known tokens at which the sequence ends with "length".
        last: `int64[num_rows]`, the last known token.
        base: `int64[num_rows]`, how many tokens were known when the row was taken; `Sequence` has those.
        outputs: `int64[num_rows, width]`, the tokens that became known since.
        max_blocks: `int64[num_rows]`, blocks that the sequence holds when it is as long as it may become.
        shared: `bool[num_rows]`, whether others may hold the partly filled last block too.
        num_shared: How many are.
        seqs: The sequence of each row.
    """

    def __init__(self, num_rows: int) -> None:
        self.tables: BlockIds = np.zeros((num_rows, _FIRST_WIDTH), np.int32)
        self.outputs: TokenArray = np.zeros((num_rows, _FIRST_WIDTH), np.int64)
        self.num_blocks = np.zeros(num_rows, np.int64)
        self.computed = np.zeros(num_rows, np.int64)
        self.known = np.zeros(num_rows, np.int64)
        self.limit = np.zeros(num_rows, np.int64)
        self.last = np.zeros(num_rows, np.int64)
        self.base = np.zeros(num_rows, np.int64)
        self.max_blocks = np.zeros(num_rows, np.int64)
        self.shared: npt.NDArray[np.bool_] = np.zeros(num_rows, np.bool_)
        self.num_shared = 0
        self.seqs: list[Sequence | None] = [None] * num_rows
        self._free = list(range(num_rows))

    @property
    def num_free(self) -> int:
        """Rows that no sequence has."""
        return len(self._free)

    def take(self, seq: Sequence, tokens: TokenArray) -> int:
        """Give a sequence a row, with its known tokens and no blocks."""
        row = heapq.heappop(self._free)
        self.seqs[row] = seq
        self.num_blocks[row] = self.computed[row] = 0
        self.known[row] = self.base[row] = len(tokens)
        self.last[row] = tokens[-1]
        return row

    def give_back(self, row: int) -> None:
        """The sequence needs its row no more."""
        self.seqs[row] = None
        self.set_shared(row, False)
        self.num_blocks[row] = 0
        heapq.heappush(self._free, row)

    def set_shared(self, row: int, shared: bool) -> None:
        """Note whether others may hold the partly filled last block of a row too."""
        self.num_shared += shared - self.shared.item(row)
        self.shared[row] = shared

    def table(self, row: int) -> BlockIds:
        """`int32[num_blocks]`, a view: the blocks of a row."""
        return self.tables[row, : self.num_blocks.item(row)]

    def set_table(self, row: int, blocks: BlockIds) -> None:
        """Replace the blocks of a row."""
        self.need_width(len(blocks))
        self.tables[row, : len(blocks)] = blocks
        self.num_blocks[row] = len(blocks)

    def new_tokens(self, row: int) -> TokenArray:
        """`int64[...]`, a view: the tokens that became known since the row was taken."""
        return self.outputs[row, : self.known.item(row) - self.base.item(row)]

    def append(self, row: int, token: int) -> None:
        """One more token is known."""
        known = self.known.item(row)
        at = known - self.base.item(row)
        self.need_outputs(at + 1)
        self.outputs[row, at] = token
        self.last[row] = token
        self.known[row] = known + 1

    def need_width(self, width: int) -> None:
        """Make the block tables at least so wide."""
        have = self.tables.shape[1]
        if width > have:
            self.tables = _widened(self.tables, max(width, 2 * have))

    def need_outputs(self, width: int) -> None:
        """Make room for so many new tokens in each row."""
        have = self.outputs.shape[1]
        if width > have:
            self.outputs = _widened(self.outputs, max(width, 2 * have))


def _widened(array: npt.NDArray, width: int) -> npt.NDArray:
    wider = np.zeros((len(array), width), array.dtype)
    wider[:, : array.shape[1]] = array
    return wider
