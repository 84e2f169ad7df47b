"""How a step is cut into FlashInfer launches for one kind of layers.

Each sequence's *own part* is attended in one launch, or in two when decodes stand beside prompts; leading blocks that
several sequences share may be attended once for all of them in further launches, whose results are merged into those
of the own parts by log-sum-exp. numpy only.

**The cost rule.** Everything is weighed in bytes that device memory could have read meanwhile. None of it has been
measured on a GPU by this project yet: the constants are estimates from the kernels' sources and from what others
report (FlashInfer issue 595, and its blog post on cascade inference), for an H100 or H200.

* One more launch, with its merge and what both leave idle at their ends, costs about 14 us, in which such a GPU reads
  60 MB.
* A prefix that is read by several thread blocks comes from the second-level cache for all but the first of them, as
  long as it is no larger than some 40 MB; that is about 2.5 times as fast as memory. Hence flat decoding over shared
  pages is better than the number of bytes suggests, and a cascade gains less.
* fa2 reads the keys once for each tile of queries: 16, 64 or 128 rows of the packed query group. Sharing saves the
  reads of all tiles but those that the queries of all sequences fill together: much for decodes, little for prompts,
  whose tiles are full anyway.
* A tile as wide as prompts want it makes decodes in the same launch compute-bound. Decodes get a launch of their own
  if they read more than that launch is worth.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from radixkv.attention.cascade import Segment, SharedBlocks, cascade
from radixkv.attention.flashinfer_kinds import query_tile
from radixkv.attention.flashinfer_tables import PageTable, StepSequences
from radixkv.attention.interface import AttentionSpec
from radixkv.attention.step_tables import Int64s

__all__ = ["FlashInferCosts", "Launch", "StepCut", "cut_step"]


@dataclass(frozen=True)
class FlashInferCosts:
    """What the rule weighs; see the module. Estimates, not measured.

    Attributes:
        launch_bytes: Bytes that could be read during one more launch and merge.
        split_bytes: Bytes that decodes beside prompts must read for a launch of their own.
        cache_bytes: Up to this size a prefix that is read again comes from the second-level cache,
        cache_share: which takes this share of the time.
        cascade: Whether shared parts are attended once at all.
    """

    launch_bytes: int = 60_000_000
    split_bytes: int = 24_000_000
    cache_bytes: int = 40_000_000
    cache_share: float = 0.4
    cascade: bool = True


@dataclass
class Launch:
    """Consecutive query rows and the pages that they read.

    Attributes:
        table: One request for each sequence, or for each shared part.
        row_starts: int32 `[B + 1]` from 0: which of the rows belong to which request.
        first_row: Where they begin among the rows of the step.
        decode: Whether each request has one row, to be run by the decode kernel.
        shared: Whether the pages lie wholly before all queries: no causal mask, no window.
        mask: bool `[rows]`, which rows take part; the others are attended to no purpose, to keep the rows of the
            launch consecutive. None: all.
    """

    table: PageTable
    row_starts: npt.NDArray[np.int32]
    first_row: int
    decode: bool = False
    shared: bool = False
    mask: npt.NDArray[np.bool_] | None = None

    @property
    def stop_row(self) -> int:
        """One past the last row."""
        return self.first_row + int(self.row_starts[-1])


@dataclass
class StepCut:
    """A step for one kind of layers.

    Attributes:
        own: Launches that tile the rows of the step. Empty if it has none.
        shared: Launches whose results are merged into those of `own`.
        order: int32 `[T]`: the rows of the step in the order of the launches; None: as they are.
    """

    own: list[Launch] = field(default_factory=list)
    shared: list[Launch] = field(default_factory=list)
    order: npt.NDArray[np.int32] | None = None

    @property
    def launches(self) -> list[Launch]:
        """All of them."""
        return [*self.own, *self.shared]


def cut_step(
    sequences: StepSequences, spec: AttentionSpec, costs: FlashInferCosts, itemsize: int = 2
) -> StepCut:
    """Cut a step for one kind of layers.

    Args:
        sequences: The step.
        spec: The kind.
        costs: The cost rule.
        itemsize: Bytes of one element of K and V.
    """
    if not len(sequences.entries):
        return StepCut()
    return _Cutter(sequences, spec, costs, itemsize).cut()


class _Cutter:
    def __init__(
        self, sequences: StepSequences, spec: AttentionSpec, costs: FlashInferCosts, itemsize: int
    ) -> None:
        self.sequences, self.spec, self.costs = sequences, spec, costs
        self.size = sequences.batch.block_size
        self.token_bytes = spec.num_kv_heads * (spec.key_dim + spec.value_dim) * itemsize
        self.row_bytes = spec.num_heads * (spec.value_dim * itemsize + 4)
        # The first position that any query of each entry sees.
        self.lows = np.zeros_like(sequences.firsts)
        if spec.window is not None:
            np.maximum(sequences.firsts + 1 - spec.window, 0, out=self.lows)

    def cut(self) -> StepCut:
        sequences = self.sequences
        classes: list[list[Segment]] = []
        if self.costs.cascade and len(sequences.entries) > 1:
            classes = [self._segments(single) for single in (True, False)]
        segments = [segment for found in classes for segment in found]
        own_starts = self.lows.copy()
        for segment in segments:
            own_starts[segment.entries] = segment.stop
        entries, order = self._order(segments)
        num_decodes = len(entries) if sequences.only_decodes else self._num_split(entries, own_starts)
        row_starts = np.zeros(len(entries) + 1, np.int64)
        np.cumsum(sequences.queries[entries], out=row_starts[1:])
        cut = StepCut(order=order)
        for first, stop in ((0, num_decodes), (num_decodes, len(entries))):
            if first < stop:
                cut.own.append(self._own(entries[first:stop], own_starts, row_starts[first : stop + 1]))
                cut.own[-1].decode = stop == num_decodes
        if segments:
            rows = np.zeros(len(sequences.queries) + 1, np.int64)
            rows[entries] = row_starts[:-1]
            for found in classes:
                cut.shared += [self._round(group, rows) for group in _rounds(found, len(rows))]
        return cut

    # -- own parts --------------------------------------------------------------------------------------------

    def _own(self, entries: Int64s, own_starts: Int64s, row_starts: Int64s) -> Launch:
        stops = self.sequences.contexts[entries]
        table = PageTable.between(entries, own_starts[entries], stops, self.size)
        return Launch(table, (row_starts - row_starts[0]).astype(np.int32), int(row_starts[0]))

    def _num_split(self, entries: Int64s, own_starts: Int64s) -> int:
        """How many decodes in front get a launch of their own."""
        several = self.sequences.queries[entries] > 1
        count = int(several.argmax())
        front = entries[:count]
        tokens = int((self.sequences.contexts[front] - own_starts[front]).sum())
        return count if count and tokens * self.token_bytes >= self.costs.split_bytes else 0

    def _order(self, segments: list[Segment]) -> tuple[Int64s, npt.NDArray[np.int32] | None]:
        """Entries in an order in which those of each segment are neighbours, and that of the rows; None: as they are.

        Segments are a forest, parents first; by the last segment of each entry, whole trees are neighbours.
        """
        entries, queries = self.sequences.entries, self.sequences.queries
        if not segments:
            return entries, None
        number = np.cumsum(queries > 0) - 1
        if all(number[s.entries[-1]] - number[s.entries[0]] == len(s.entries) - 1 for s in segments):
            return entries, None
        last = np.full(len(queries), len(segments))
        for index, segment in enumerate(segments):
            last[segment.entries] = index
        ordered = entries[np.lexsort((last[entries], queries[entries] > 1))]
        lens = queries[ordered]
        ends = np.cumsum(lens)
        rows = np.arange(ends[-1]) + np.repeat(self.sequences.starts[ordered] - (ends - lens), lens)
        return ordered, rows.astype(np.int32)

    # -- shared parts -----------------------------------------------------------------------------------------

    def _segments(self, single: bool) -> list[Segment]:
        """Parts that sequences of one class attend once for all."""
        nodes = self.sequences.shared(single, self.spec.window)
        if not nodes:
            return []
        # Several parts of one depth share a launch: each must be worth a piece of it, and all together the whole.
        found = self._chosen(nodes, self.costs.launch_bytes // 8)
        if found:
            saved = sum(self._saved(s.entries, s.stop - s.start) for s in found)
            if saved < self.costs.launch_bytes * len(_rounds(found, len(self.sequences.queries))):
                found = self._chosen(nodes, self.costs.launch_bytes)
        return found

    def _chosen(self, nodes: list[SharedBlocks], least: float) -> list[Segment]:
        def pays(entries: Int64s, tokens: int) -> bool:
            return self._saved(entries, tokens) >= least

        return cascade(nodes, self.lows, self.size, pays).segments

    def _saved(self, entries: Int64s, tokens: int) -> float:
        """Bytes that attending some tokens once for some entries saves, launches not counted."""
        queries = self.sequences.queries[entries]
        packed = queries * self.spec.group
        total = int(packed.sum())
        tile = query_tile(total // len(entries), self.spec.value_dim)
        flat = int((-(-packed // tile)).sum())
        together = -(-total // query_tile(total, self.spec.value_dim))
        size = tokens * self.token_bytes
        share = self.costs.cache_share if size <= self.costs.cache_bytes else 1.0
        # Partial results are written, and read again by the merge with what they are merged into.
        return size * share * (flat - together) - 4 * self.row_bytes * int(queries.sum())

    def _round(self, segments: list[Segment], rows: Int64s) -> Launch:
        """One launch for some parts of different sequences.

        Rows between two parts are given a page of the part before them, and are masked out: one page is read in vain.
        """
        queries = self.sequences.queries
        parts = [(int(rows[s.entries].min()), int(queries[s.entries].sum()), s) for s in segments]
        parts.sort(key=lambda part: part[0])
        first_row = parts[0][0]
        requests: list[tuple[int, int, int, int]] = []  # entry, first page, pages, tokens in the last one
        row_starts, taking_part = [0], []
        for row, count, segment in parts:
            entry, page = int(segment.entries[0]), segment.start // self.size
            gap = row - first_row - row_starts[-1]
            if gap:
                requests.append((entry, page, 1, 1))
                row_starts.append(row - first_row)
                taking_part.append(np.zeros(gap, bool))
            requests.append((entry, page, segment.stop // self.size - page, self.size))
            row_starts.append(row - first_row + count)
            taking_part.append(np.ones(count, bool))
        columns = np.array(requests, np.int64).T
        table = PageTable(columns[0], columns[1], columns[2], columns[3].astype(np.int32))
        mask = np.concatenate(taking_part)
        return Launch(
            table,
            np.array(row_starts, np.int32),
            first_row,
            shared=True,
            mask=None if mask.all() else mask,
        )


def _rounds(segments: list[Segment], num_entries: int) -> list[list[Segment]]:
    """Segments in as few groups as their entries allow, first come first placed: one group for each depth."""
    rounds: list[tuple[npt.NDArray[np.bool_], list[Segment]]] = []
    for segment in segments:
        place = next((one for one in rounds if not one[0][segment.entries].any()), None)
        if place is None:
            place = np.zeros(num_entries, bool), []
            rounds.append(place)
        place[0][segment.entries] = True
        place[1].append(segment)
    return [found for _, found in rounds]
