"""How the plan of a decode step becomes that of the next one, in which each context is one token longer.

Nothing is cut anew. Own parts end one token further, in layers with a window everything begins one token further
for those that have outgrown it, and parts that all entries see whole stay as they are. A plan grows until that would
change which calls there are: a new block that is not behind the last one, or a part that nobody sees any more.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from radixkv.attention.decode_steps import MAX_KEPT_STEPS
from radixkv.attention.padded_rows import PaddedRows
from radixkv.attention.step_tables import Int64s
from radixkv.attention.torch_calls import Call

__all__ = ["Growth"]


@dataclass(slots=True)
class _Part:
    """A call over positions `start .. stop` of some entries, as it was planned."""

    call: Call
    entries: Int64s
    start: int
    stop: int
    slot: int
    slots: Int64s | None


@dataclass
class Growth:
    """What the planner notes of a step of decodes, for the steps after it.

    Attributes:
        window: Of the layers.
        floors: int64 `[S]`: where the own part of each entry begins; later once a window has passed it.
        contexts: int64 `[S]`, of the step that was planned.
        steps_left: Times that the plan can still grow.
    """

    window: int | None
    floors: Int64s
    contexts: Int64s
    steps_left: int = field(init=False)

    def __post_init__(self) -> None:
        self.steps_left = MAX_KEPT_STEPS
        if self.window is not None:
            # Padding is a slot that the row sees now.
            self.steps_left = min(self.steps_left, self.window - 1)
        self._views: list[tuple[Call, int, int]] = []
        self._own_parts: list[_Part] = []
        self._shared_parts: list[_Part] = []
        self._padded: list[tuple[PaddedRows, bool]] = []
        self._columns: tuple[Int64s, ...] | None = None

    def add_view(self, call: Call, entry: int, start: int) -> None:
        """A call in place, over the positions of an entry from `start` to its own last one."""
        self._views.append((call, entry, start))

    def add_part(self, call: Call, entries: Int64s, start: int, stop: int) -> None:
        """A call over positions before the entries' own last ones: shared ones, or an earlier piece of one entry."""
        if self.window is None:
            return
        parts = self._own_parts if len(entries) == 1 else self._shared_parts
        parts.append(_Part(call, entries, start, stop, call.slot, call.slots))
        self._seen_until(np.array([stop]), self.contexts[entries].min(keepdims=True))

    def add_padded(self, rows: PaddedRows, own: bool) -> None:
        """Rows copied together; `own`: up to their own last positions."""
        self._padded.append((rows, own))
        if not own and self.window is not None:
            self._seen_until(rows.stops, self.contexts[rows.entries])

    def _seen_until(self, stops: Int64s, contexts: Int64s) -> None:
        assert self.window is not None
        self.steps_left = min(self.steps_left, int((stops + self.window - contexts).min()) - 1)

    def grow(self, contexts: Int64s, last_slots: Int64s) -> bool:
        """Change all calls to those of the next step.

        Args:
            contexts: int64 `[S]`, one more than before.
            last_slots: int64 `[S]`: slot of the last token of each entry.

        Returns:
            False if the next step must be planned anew; the calls are then of no more use.
        """
        if self.steps_left <= 0:
            return False
        self.steps_left -= 1
        lows = self.floors if self.window is None else np.maximum(self.floors, contexts - self.window)
        if self._views and not self._grow_views(contexts, lows, last_slots):
            return False
        for rows, own in self._padded:
            rows.grow(contexts, lows, last_slots, own)
        for part in self._own_parts:
            _begin_at(part, max(part.start, int(lows[part.entries[0]])))
        for part in self._shared_parts:
            assert self.window is not None
            seen = contexts[part.entries] - self.window
            start = max(part.start, int(seen.min()))
            _begin_at(part, start)
            part.call.lows = None
            if int(seen.max()) > start:
                part.call.lows = np.clip(seen - start, 0, part.stop - start)
        return True

    def _grow_views(self, contexts: Int64s, lows: Int64s, last_slots: Int64s) -> bool:
        if self._columns is None:
            entries = np.array([entry for _, entry, _ in self._views])
            starts = np.array([start for _, _, start in self._views], np.int64)
            slots = np.array([call.slot for call, _, _ in self._views], np.int64)
            self._columns = entries, starts, slots - starts
        entries, starts, offsets = self._columns
        stops = contexts[entries]
        if (last_slots[entries] != offsets + stops - 1).any():
            return False
        starts = np.maximum(starts, lows[entries])
        slots, counts = (offsets + starts).tolist(), (stops - starts).tolist()
        for (call, _, _), slot, count in zip(self._views, slots, counts, strict=True):
            call.slot, call.num_keys = slot, count
        return True


def _begin_at(part: _Part, start: int) -> None:
    moved, call = start - part.start, part.call
    call.num_keys = part.stop - start
    if part.slots is None:
        call.slot = part.slot + moved
    else:
        call.slots = part.slots[moved:]
