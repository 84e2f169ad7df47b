"""How the torch backend cuts a step into calls of a kernel: which query rows read which slots at once.

numpy only. A step becomes *rounds*. Every query row lies in exactly one call of round 0, which holds its own token,
and in at most one call of each further round; the results of the rounds are merged by log-sum-exp.

The cost rule. Measured on one core of a Sapphire Rapids machine (torch 2.13, fp32): a kernel call with its views
costs about 14 us plus 10 us for the merge, a copy through an index runs at 13 GB/s (K and V read and written), and
the kernel itself reads views at 20 to 40 GB/s. So a call is worth as much as copying 57,344 elements of K and V
(`Costs.call`: 112 tokens of one KV head of 256, 56 tokens of eight heads of 64), and hence:

* Leading blocks that several sequences share are attended once for all if that saves reading `Costs.share`
  elements. Levels that do not save as much are left to the sequences.
* Decoding sequences with fewer own elements than a call is worth are copied together into padded calls of up to
  `Costs.copy` elements, which stay in the second-level cache: for 64 sequences of 48 tokens that was 1.5 to 2 times
  faster than one call with one copy, and than 64 calls. All others are read in place, one call each.
* A context in several runs of consecutive slots is read run by run if the copy of it would cost more than the
  further calls, and copied otherwise, `Costs.copy` elements at a time; runs shorter than a call is worth are
  copied together with their neighbours.
* Rows of a prompt go `Costs.rows` at a time, each time with just the keys that they see: the triangle above the
  diagonal is computed for that many rows only. On the CPU 64 rows were 1.2 to 1.35 times faster than the kernel's
  own causal mode (544 tokens; 4 heads of 256 on one KV head, and 8 of 64). A long unshared prefix
  (`Costs.prefix` tokens) gets a call of its own for all rows, so that masks stay small.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from radixkv.attention.cascade import Segment, cascade
from radixkv.attention.decode_steps import MAX_KEPT_STEPS
from radixkv.attention.interface import AttentionSpec
from radixkv.attention.padded_rows import PaddedRows
from radixkv.attention.step_tables import Int64s, StepTables
from radixkv.attention.torch_calls import Call, Chunk, PaddedCall, Round, Rows
from radixkv.attention.torch_growth import Growth

__all__ = ["Costs", "Plan", "plan_rounds", "plan_step"]


@dataclass(frozen=True)
class Costs:
    """What the planner weighs; see the module for where the defaults come from.

    Attributes:
        call: Elements of K and V whose copy costs as much as one more call and merge.
        share: Elements that a shared part must save.
        copy: Elements copied at a time.
        rows: Query rows of a prompt in one call.
        prefix: Tokens from which the part before a prompt's first row is attended in a call of its own.
    """

    call: int = 57_344
    share: int = 114_688
    copy: int = 262_144
    rows: int = 64
    prefix: int = 1024


@dataclass(slots=True)
class Plan:
    """A step cut for one kind of layers.

    Attributes:
        rounds: Empty if there are no query rows.
        growth: For a step of decodes: what makes it the plan of the next one.
    """

    rounds: list[Round]
    growth: Growth | None


def plan_step(tables: StepTables, spec: AttentionSpec, costs: Costs, decodes: bool = False) -> Plan:
    """Cut a step for one kind of layers; `decodes`: each entry has one query, and the plan may be kept."""
    planner = _Planner(tables, spec, costs, decodes)
    return Plan(planner.plan(), planner.growth)


def plan_rounds(tables: StepTables, spec: AttentionSpec, costs: Costs) -> list[Round]:
    """Cut a step for one kind of layers. Empty if there are no query rows."""
    return plan_step(tables, spec, costs).rounds


class _Planner:
    def __init__(self, tables: StepTables, spec: AttentionSpec, costs: Costs, decodes: bool) -> None:
        self.tables, self.costs, self.window = tables, costs, spec.window
        self.keep = decodes
        elements = spec.num_kv_heads * (spec.key_dim + spec.value_dim)
        # Tokens whose copy costs as much as a call, and those copied at a time.
        self.call_tokens = costs.call // elements
        self.copy_tokens = max(1, costs.copy // elements)
        self.share_tokens = -(-costs.share // elements)
        self.base: list[Call | PaddedCall] = []
        self.parts: list[Call | PaddedCall] = []
        self.growth: Growth | None = None

    def plan(self) -> list[Round]:
        tables = self.tables
        active = tables.queries > 0
        if not active.any():
            return []
        lows = np.zeros_like(tables.firsts)
        if self.window is not None:
            np.maximum(tables.firsts + 1 - self.window, 0, out=lows)
        shared = tables.shared if len(active) > 1 else []
        cut = cascade(shared, lows, tables.batch.block_size, self._pays)
        if self.keep:
            self.growth = Growth(self.window, cut.own_starts, tables.contexts)
        for segment in cut.segments:
            self._shared_part(segment)
        single = np.flatnonzero(active & (tables.queries == 1))
        if len(single):
            self._decodes(single, cut.own_starts[single])
        for entry in np.flatnonzero(active & (tables.queries > 1)).tolist():
            self._prompt(entry, int(cut.own_starts[entry]))
        self.base.sort(key=lambda call: call.rows.start)
        return [_round(self.base), *_rounds(self.parts, tables.batch.num_tokens)]

    def _pays(self, entries: Int64s, tokens: int) -> bool:
        return (len(entries) - 1) * tokens >= self.share_tokens

    def _shared_part(self, segment: Segment) -> None:
        tables = self.tables
        entries = segment.entries
        rows = Rows.of(
            list(zip(tables.starts[entries].tolist(), tables.starts[entries + 1].tolist(), strict=True))
        )
        row_lows = None
        if self.window is not None:
            lens = tables.queries[entries]
            # The position of every row, then the first one that it sees.
            ends = np.cumsum(lens)
            positions = np.arange(ends[-1]) - np.repeat(ends - lens - tables.firsts[entries], lens)
            row_lows = positions + 1 - self.window
        for start, stop in self._pieces(int(entries[0]), segment.start, segment.stop):
            lows = None
            if row_lows is not None and int(row_lows.max()) > start:
                lows = np.clip(row_lows - start, 0, stop - start)
            call = self._call(rows, int(entries[0]), start, stop, lows=lows)
            self.parts.append(call)
            if self.growth is not None:
                self.growth.add_part(call, entries, start, stop)

    def _decodes(self, entries: Int64s, starts: Int64s) -> None:
        """Own parts of entries with one query."""
        tables = self.tables
        stops = tables.contexts[entries]
        lens, extra_runs = stops - starts, tables.breaks_in(entries, starts, stops)
        short = lens <= self.call_tokens
        if np.count_nonzero(short) < 2:
            short[:] = False
        copied = short | ((extra_runs > 0) & (lens <= extra_runs * self.call_tokens))
        slots = tables.slots_at(entries, starts)
        in_place = zip(
            *(
                column[~copied].tolist()
                for column in (entries, tables.starts[entries], starts, stops, extra_runs, slots)
            ),
            strict=True,
        )
        tails: list[tuple[int, int]] = []  # what is left of entries that are else read in place
        for entry, row, start, stop, more, slot in in_place:
            where = Rows(row, row + 1)
            if not more:
                self._view(Call(where, slot, None, stop - start), entry, start)
                continue
            *parts, (begin, end) = self._pieces(entry, start, stop)
            if end - begin >= self.call_tokens and tables.is_run(entry, begin, end):
                self._view(self._call(where, entry, begin, end), entry, begin)
            else:
                tails.append((entry, begin))
            for part in parts:
                call = self._call(where, entry, *part)
                self.parts.append(call)
                if self.growth is not None:
                    self.growth.add_part(call, np.array([entry]), *part)
        if tails:
            both = np.concatenate([entries[copied], np.array([entry for entry, _ in tails])])
            begins = np.concatenate([starts[copied], np.array([begin for _, begin in tails])])
            order = np.argsort(both)
            self._copied_decodes(both[order], begins[order])
        else:
            self._copied_decodes(entries[copied], starts[copied])

    def _view(self, call: Call, entry: int, start: int) -> None:
        self.base.append(call)
        if self.growth is not None:
            self.growth.add_view(call, entry, start)

    def _copied_decodes(self, entries: Int64s, starts: Int64s) -> None:
        """Own parts that are copied, in equal pieces if they are long; the last pieces are the base."""
        lens = self.tables.contexts[entries] - starts
        counts = -(-lens // self.copy_tokens)
        for piece in range(int(counts.max(initial=0))):
            calls = self.parts if piece else self.base
            # Long and short ones apart: all rows of a call are padded to its longest.
            long = lens > self.call_tokens
            for chosen in (long, ~long):
                some = np.flatnonzero((counts > piece) & chosen)
                if len(some):
                    numbers = counts[some] - 1 - piece
                    begins, stops = (
                        starts[some] + lens[some] * number // counts[some]
                        for number in (numbers, numbers + 1)
                    )
                    calls += self._padded(entries[some], begins, stops, own=piece == 0)

    def _padded(self, entries: Int64s, starts: Int64s, stops: Int64s, own: bool) -> list[PaddedCall]:
        """One query of each of some entries over some positions of each, as many at once as are copied at once."""
        slack = MAX_KEPT_STEPS if self.growth is not None and own else 0
        group = PaddedRows(self.tables, entries, starts, stops, self.copy_tokens, slack)
        if self.growth is not None:
            self.growth.add_padded(group, own)
        rows, calls = self.tables.starts[entries], []
        for number, (begin, end) in enumerate(itertools.pairwise(group.bounds)):
            numbers = rows[begin:end]
            first, last = int(numbers[0]), int(numbers[-1])
            consecutive = last - first == len(numbers) - 1
            where = Rows(first, last + 1, None if consecutive else numbers)
            calls.append(PaddedCall(where, group, number))
        return calls

    def _prompt(self, entry: int, own_start: int) -> None:
        tables, window = self.tables, self.window
        first, stop = int(tables.firsts[entry]), int(tables.contexts[entry])
        rows = Rows(int(tables.starts[entry]), int(tables.starts[entry + 1]))
        start = own_start
        # A window leaves few keys before the rows of a chunk, and each row other ones: all in one call.
        if window is None and start < first:
            pieces = self._pieces(entry, start, first)
            # Rather than copy the prefix to where the rows' own keys are.
            far = first - start > 2 * self.call_tokens and not tables.is_run(entry, start, stop)
            if len(pieces) > 1 and pieces[-1][1] - pieces[-1][0] < self.costs.prefix:
                # The last piece goes with the rows: in most cases it is the rest of a block.
                *pieces, (start, _) = pieces
            elif far or len(pieces) > 1 or first - start >= self.costs.prefix:
                start = first
            else:
                pieces = []
            self.parts += [self._call(rows, entry, *piece) for piece in pieces]
        chunks = []
        for row in range(0, stop - first, self.costs.rows):
            end = min(row + self.costs.rows, stop - first)
            seen = start if window is None else max(start, first + row + 1 - window)
            chunks.append(Chunk(row, end, seen - start, first + end - seen, first + row - seen))
        self.base.append(self._call(rows, entry, start, stop, chunks=chunks))

    def _pieces(self, entry: int, start: int, stop: int) -> list[tuple[int, int]]:
        """Some positions of an entry, cut where reading in place pays; each piece is read or copied at once."""
        runs = self.tables.runs(entry, start, stop)
        if len(runs) == 1:
            return runs
        if stop - start <= (len(runs) - 1) * self.call_tokens:
            return self._copied(start, stop)
        pieces: list[tuple[int, int]] = []
        begin = start  # of the short runs that no piece has yet
        for run_start, run_stop in runs:
            if run_stop - run_start >= self.call_tokens:
                pieces += self._copied(begin, run_start)
                pieces.append((run_start, run_stop))
                begin = run_stop
        return pieces + self._copied(begin, stop)

    def _copied(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Positions to copy, in pieces of about equal size."""
        count = -(-(stop - start) // self.copy_tokens)
        cuts = [start + (stop - start) * number // count for number in range(count)]
        return list(zip(cuts, [*cuts[1:], stop], strict=True)) if count else []

    def _call(
        self,
        rows: Rows,
        entry: int,
        start: int,
        stop: int,
        lows: Int64s | None = None,
        chunks: list[Chunk] | None = None,
    ) -> Call:
        if self.tables.is_run(entry, start, stop):
            return Call(rows, self.tables.first_slot(entry, start), None, stop - start, lows, chunks)
        return Call(rows, -1, self.tables.slots(entry, start, stop), stop - start, lows, chunks)


def _round(calls: Sequence[Call | PaddedCall]) -> Round:
    ranges = [(call.rows.start, call.rows.stop) for call in calls]
    if all(call.rows.index is None for call in calls):
        return Round(list(calls), Rows.of(ranges))
    index = np.concatenate([call.rows.numbers() for call in calls])
    if (np.diff(index) == 1).all():
        return Round(list(calls), Rows(int(index[0]), int(index[-1]) + 1))
    return Round(list(calls), Rows(int(index.min()), int(index.max()) + 1, index))


def _rounds(parts: list[Call | PaddedCall], num_rows: int) -> list[Round]:
    """Parts of contexts in as few rounds as their rows allow, first come first placed."""
    rounds: list[tuple[npt.NDArray[np.bool_], list[Call | PaddedCall]]] = []
    for call in parts:
        rows = call.rows
        where = slice(rows.start, rows.stop) if rows.index is None else rows.index
        place = next((one for one in rounds if not one[0][where].any()), None)
        if place is None:
            place = np.zeros(num_rows, bool), []
            rounds.append(place)
        place[0][where] = True
        place[1].append(call)
    return [_round(sorted(calls, key=lambda call: call.rows.start)) for _, calls in rounds]
