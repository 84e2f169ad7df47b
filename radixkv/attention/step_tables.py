"""Positions, slots and shared blocks of a step, worked out once for all kinds of layers. numpy only."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from radixkv.attention.cascade import SharedBlocks, shared_blocks
from radixkv.attention.interface import AttentionBatch

__all__ = ["Int64s", "StepTables"]

Int64s = npt.NDArray[np.int64]


@dataclass
class StepTables:
    """What the plans of all kinds of layers have in common.

    Attributes:
        batch: The step.
        starts: int64 `[S + 1]`, first query row of each entry.
        contexts: int64 `[S]`, tokens of each entry.
        queries: int64 `[S]`, query rows of each entry.
        firsts: int64 `[S]`, position of each entry's first query.
    """

    batch: AttentionBatch
    starts: Int64s = field(init=False)
    contexts: Int64s = field(init=False)
    queries: Int64s = field(init=False)
    firsts: Int64s = field(init=False)

    def __post_init__(self) -> None:
        self.starts = self.batch.query_starts.astype(np.int64)
        self.contexts = self.batch.context_lens.astype(np.int64)
        self.queries = np.diff(self.starts)
        self.firsts = self.contexts - self.queries

    @cached_property
    def shared(self) -> list[SharedBlocks]:
        """The tree of shared leading blocks; entries without queries read nothing and share nothing."""
        limits = np.where(self.queries > 0, self.firsts // self.batch.block_size, 0)
        return shared_blocks(self.batch.block_tables, limits)

    @cached_property
    def breaks(self) -> npt.NDArray[np.int32]:
        """int32 `[S, W]`: breaks between blocks 0 .. j of each table, where the next id is not one more."""
        used = int(-(-self.contexts.max(initial=1) // self.batch.block_size))
        tables = self.batch.block_tables[:, :used]
        counts = np.zeros(tables.shape, np.int32)
        np.cumsum(tables[:, 1:] != tables[:, :-1] + 1, axis=1, out=counts[:, 1:])
        return counts

    def slots(self, entry: int, start: int, stop: int) -> Int64s:
        """int64 `[stop - start]`: slots of some positions of an entry."""
        return self.slots_at(entry, np.arange(start, stop, dtype=np.int64))

    def slots_at(self, entries: int | Int64s, positions: Int64s) -> Int64s:
        """int64: slots of any positions, computed in 64 bits: those of a large pool pass 2**31."""
        size = self.batch.block_size
        blocks = self.batch.block_tables[entries, positions // size].astype(np.int64)
        return blocks * size + positions % size

    def breaks_in(self, entries: Int64s, starts: Int64s, stops: Int64s) -> npt.NDArray[np.int32]:
        """int32 `[n]`: at how many places some positions of each of some entries leave consecutive slots."""
        size, breaks = self.batch.block_size, self.breaks
        return breaks[entries, (stops - 1) // size] - breaks[entries, starts // size]

    def is_run(self, entry: int, start: int, stop: int) -> bool:
        """Whether some positions of an entry lie in consecutive slots."""
        size, breaks = self.batch.block_size, self.breaks
        return bool(breaks[entry, (stop - 1) // size] == breaks[entry, start // size])

    def first_slot(self, entry: int, position: int) -> int:
        """Slot of one position."""
        size = self.batch.block_size
        return int(self.batch.block_tables[entry, position // size]) * size + position % size

    def runs(self, entry: int, start: int, stop: int) -> list[tuple[int, int]]:
        """Some positions, cut where their slots are not consecutive."""
        if self.is_run(entry, start, stop):
            return [(start, stop)]
        size = self.batch.block_size
        first, last = start // size, (stop - 1) // size
        table = self.batch.block_tables[entry, first : last + 1].astype(np.int64)
        cuts = ((np.flatnonzero(np.diff(table) != 1) + 1 + first) * size).tolist()
        return list(zip([start, *cuts], [*cuts, stop], strict=True))
