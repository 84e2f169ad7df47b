"""Page tables in FlashInfer's form, and the sequences of a step as all kinds of layers see them. numpy only."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from radixkv.attention.cascade import SharedBlocks, shared_blocks
from radixkv.attention.interface import AttentionBatch
from radixkv.attention.step_tables import Int64s

__all__ = ["PageTable", "StepSequences"]

Int32s = npt.NDArray[np.int32]

# From so many pages per request on, copying the rows of a table one by one beats one gather through an index.
_COPY_ROWS_FROM = 64


@dataclass
class PageTable:
    """Which pages some requests of a launch read: `indptr`, `indices` and `last_page_len` of FlashInfer's `plan`.

    The page ids stay in the step's block tables until `write` puts them where they are sent from.

    Attributes:
        entries: int64 `[B]`: whose block tables.
        first_pages: int64 `[B]`: the first logical page of each that is read.
        counts: int64 `[B]`: pages, at least one.
        last_page_len: int32 `[B]`: tokens in the last page, 1 .. page size.
        indptr: int32 `[B + 1]`.
    """

    entries: Int64s
    first_pages: Int64s
    counts: Int64s
    last_page_len: Int32s
    indptr: Int32s = field(init=False)

    def __post_init__(self) -> None:
        self.indptr = np.zeros(len(self.counts) + 1, np.int32)
        np.cumsum(self.counts, out=self.indptr[1:])

    @classmethod
    def between(cls, entries: Int64s, starts: Int64s, stops: Int64s, page_size: int) -> PageTable:
        """Pages that hold the positions `starts .. stops` of some entries; a first page may hold earlier ones, too."""
        first = starts // page_size
        last = (stops - 1) // page_size
        return cls(entries, first, last + 1 - first, (stops - last * page_size).astype(np.int32))

    @property
    def num_pages(self) -> int:
        """Length of `indices`."""
        return int(self.indptr[-1])

    def write(self, block_tables: Int32s, out: Int32s) -> None:
        """Write `indices`, int32 `[num_pages]`."""
        if self.num_pages >= _COPY_ROWS_FROM * len(self.entries):
            bounds = self.indptr.tolist()
            for row, (entry, first) in enumerate(
                zip(self.entries.tolist(), self.first_pages.tolist(), strict=True)
            ):
                start, stop = bounds[row], bounds[row + 1]
                out[start:stop] = block_tables[entry, first : first + stop - start]
            return
        columns = np.arange(self.num_pages) + np.repeat(self.first_pages - self.indptr[:-1], self.counts)
        out[:] = block_tables[np.repeat(self.entries, self.counts), columns]


class StepSequences:
    """The sequences of a step that have queries, worked out once for all kinds of layers.

    Args:
        batch: The step.

    Attributes:
        entries: int64 `[n]`: those with at least one query, ascending. Others read nothing and are left out.
        starts: int64 `[S + 1]`, first query row of each entry.
        queries: int64 `[S]`, query rows of each entry.
        contexts: int64 `[S]`, tokens of each entry.
        firsts: int64 `[S]`, position of each entry's first query.
        num_leading: So many of `entries` in front have one query each.
    """

    def __init__(self, batch: AttentionBatch) -> None:
        self.batch = batch
        self.starts = batch.query_starts.astype(np.int64)
        self.contexts = batch.context_lens.astype(np.int64)
        self.queries = np.diff(self.starts)
        self.firsts = self.contexts - self.queries
        self.entries = np.flatnonzero(self.queries > 0)
        single = self.queries[self.entries] == 1
        self.num_leading = len(single) if single.all() else int(single.argmin())
        self._shared: dict[tuple[bool, int | None], list[SharedBlocks]] = {}

    @property
    def only_decodes(self) -> bool:
        """Whether every sequence has one query."""
        return self.num_leading == len(self.entries)

    @cached_property
    def _longest(self) -> int:
        """Longest context."""
        return int(self.contexts.max(initial=0))

    def shared(self, single: bool, window: int | None) -> list[SharedBlocks]:
        """The tree of leading blocks that sequences of one class share.

        Args:
            single: Those with one query, or those with several: each class is attended by launches of its own.
            window: Of the layers. A sequence takes part if its whole context lies in the window of its last query,
                so that what it shares is seen by all its queries as a whole.
        """
        if window is not None and window >= self._longest:
            window = None
        key = single, window
        found = self._shared.get(key)
        if found is None:
            chosen = (self.queries == 1) if single else (self.queries > 1)
            if window is not None:
                chosen &= self.contexts <= window
            limits = np.where(chosen, self.firsts // self.batch.block_size, 0)
            found = self._shared[key] = shared_blocks(self.batch.block_tables, limits)
        return found
