"""Whether a step is the next one of the decodes of the last step. numpy only."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from radixkv.attention.interface import AttentionBatch
from radixkv.attention.step_tables import Int64s

__all__ = ["MAX_KEPT_STEPS", "DecodeSteps"]

# A plan that only grows drifts away from what would be planned anew: parts that became long enough for another way.
MAX_KEPT_STEPS = 32


class DecodeSteps:
    """Consecutive decode steps of the same sequences.

    Whoever plans may keep a plan over such steps. Nothing the caller says is trusted: the blocks in use are
    compared with a copy of those of the last step.

    Args:
        batch: The first step; `only_decodes` holds for it.

    Attributes:
        contexts: int64 `[S]`, of the latest step.
        last_slots: int64 `[S]`, slot of each entry's last token in the latest step.
    """

    def __init__(self, batch: AttentionBatch) -> None:
        self._size = batch.block_size
        self.contexts = batch.context_lens.astype(np.int64)
        used = -(-self.contexts // self._size)
        self._width = int(used.max())
        # Wide enough for all steps that it will be asked for.
        room = self._width + MAX_KEPT_STEPS // self._size + 2
        self._tables = np.zeros((len(self.contexts), room), batch.block_tables.dtype)
        self._tables[:, : self._width] = batch.block_tables[:, : self._width]
        self._used = np.arange(room) < used[:, None]
        self._rows = np.arange(len(self.contexts))
        self._starts = batch.query_starts.copy()
        blocks, offsets = np.divmod(self.contexts - 1, self._size)
        self.last_slots = self._tables[self._rows, blocks].astype(np.int64) * self._size + offsets

    @staticmethod
    def only_decodes(batch: AttentionBatch) -> bool:
        """Whether every entry of a step has one query."""
        entries = batch.num_entries
        return entries > 0 and np.array_equal(batch.query_starts, np.arange(entries + 1))

    def advance(self, batch: AttentionBatch) -> int | None:
        """Compare a step with the latest one, and take it as the latest if it follows.

        It follows if each context is as long as before, or each is one token longer, all blocks then in use are
        still the same, and no block became shared that was not.

        Returns:
            Tokens that each context grew by, 0 or 1; None if the step does not follow. After a None this object
            is of no more use.
        """
        starts = batch.query_starts
        if batch.block_size != self._size or len(batch.context_lens) != len(self.contexts):
            return None
        if len(starts) != len(self._starts) or not (starts == self._starts).all():
            return None
        grown = int(batch.context_lens[0]) - int(self.contexts[0])
        if grown not in (0, 1):
            return None
        contexts = self.contexts + grown
        if not (batch.context_lens == contexts).all():
            return None
        width, tables = self._width, batch.block_tables
        if tables.shape[1] < width:
            return None
        differ = tables[:, :width] != self._tables[:, :width]
        differ &= self._used[:, :width]
        if differ.any():
            return None
        if grown:
            self.contexts = contexts
            blocks, offsets = np.divmod(contexts - 1, self._size)
            begun = np.flatnonzero(offsets == 0)
            if len(begun) and not self._begin_blocks(begun, blocks, tables):
                return None
            self.last_slots = self._tables[self._rows, blocks].astype(np.int64) * self._size + offsets
        return grown

    def _begin_blocks(self, rows: Int64s, last: Int64s, tables: npt.NDArray[np.int32]) -> bool:
        """Take over the new last blocks of some entries; False if the blocks before them became shared ones.

        Args:
            rows: int64 `[n]`: the entries.
            last: int64 `[S]`: the last block of every entry.
            tables: The block tables of the step.
        """
        blocks = last[rows]
        used = int(blocks.max()) + 1
        if used > self._tables.shape[1]:
            return False
        self._tables[rows, blocks] = tables[rows, blocks]
        self._used[rows, blocks] = True
        self._width = max(self._width, used)
        full = (
            blocks - 1
        )  # not below 0: a context that grew by one token and begins a block has one before it
        same = self._tables.take(full, axis=1) == self._tables[rows, full]
        # Others share a block only once it is full for them, too.
        same &= last[:, None] > full
        return bool(np.count_nonzero(same) == len(rows))
