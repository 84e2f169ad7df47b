"""Query rows whose keys are copied together, and how they grow from one decode step to the next. numpy only."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import numpy.typing as npt

from radixkv.attention.step_tables import Int64s, StepTables

__all__ = ["PaddedRows"]

_Kind = TypeVar("_Kind", bound=np.generic)


class PaddedRows:
    """One query of each of some entries over some positions of each, cut into calls of a few rows.

    The slots of all rows stand in one matrix, row `i` from position `begins[i]` on. A call reads a rectangle of
    it, just wide enough for its own rows. What a row does not see there is padded with a slot that it does see:
    any other slot may hold anything, and a NaN is not masked by adding to it.

    Args:
        tables: The step.
        entries: int64 `[n]`, ascending, with one query each.
        begins: int64 `[n]`: the first position of each.
        stops: int64 `[n]`: one past the last, above `begins`.
        at_once: Slots that a call may read.
        slack: Further columns to leave room for; more than 0 only where the last position is the query's own.

    Attributes:
        entries: As given.
        stops: int64 `[n]`, as they are now.
        bounds: The rows of each call: `bounds[c] .. bounds[c + 1]`.
        widths: Keys of each call as they are now, padding included.
        whole: Of each call, whether its rows see all of those.
        flat: int64: slots of all calls, each as `[rows, keys]`.
        hidden: bool, like `flat`: padding. None if there is none.
    """

    def __init__(
        self,
        tables: StepTables,
        entries: Int64s,
        begins: Int64s,
        stops: Int64s,
        at_once: int,
        slack: int = 0,
    ) -> None:
        self.entries, self.stops = entries, stops
        self._begins, self._fronts = begins, begins
        lens = stops - begins
        most, count = int(lens.max()), len(entries)
        positions = begins[:, None] + np.minimum(np.arange(most, dtype=np.int64), lens[:, None] - 1)
        self._slots = np.empty((count, most + slack), np.int64)
        self._slots[:, :most] = tables.slots_at(entries[:, None], positions)
        self._last = self._slots[:, most - 1].copy()
        self._slots[:, most:] = self._last[:, None]
        self._rows = np.arange(count)
        self.bounds = [*range(0, count, max(1, at_once // most)), count]
        self._sizes = np.diff(self.bounds)
        self._cut()

    def grow(self, contexts: Int64s, lows: Int64s, last_slots: Int64s, own: bool) -> None:
        """Move on to the next step.

        Args:
            contexts: int64 `[S]`: tokens of every entry of the step, one more than before.
            lows: int64 `[S]`: the first position that each sees.
            last_slots: int64 `[S]`: slot of the last token of each.
            own: Whether the rows read their queries' own tokens, so that they end one further.
        """
        if own:
            self._last = last_slots[self.entries]
            self._slots[self._rows, self.stops - self._begins] = self._last
            self.stops = contexts[self.entries]
        fronts = np.maximum(self._fronts, lows[self.entries])
        moved = np.flatnonzero(fronts > self._fronts)
        if len(moved):
            self._slots[moved, self._fronts[moved] - self._begins[moved]] = self._last[moved]
            self._fronts = fronts
        self._cut()

    def slots(self, call: int) -> Int64s:
        """int64 `[rows, keys]` of a call."""
        return self._of(self.flat, call)

    def hidden_in(self, call: int) -> npt.NDArray[np.bool_]:
        """Bool `[rows, keys]` of a call: what is padding."""
        whole = np.zeros(len(self.flat), bool) if self.hidden is None else self.hidden
        return self._of(whole, call)

    @property
    def sizes(self) -> list[int]:
        """Slots of each call."""
        return [
            (b - a) * width for a, b, width in zip(self.bounds, self.bounds[1:], self.widths, strict=False)
        ]

    def _of(self, flat: npt.NDArray[_Kind], call: int) -> npt.NDArray[_Kind]:
        sizes = self.sizes
        start = sum(sizes[:call])
        return flat[start : start + sizes[call]].reshape(-1, self.widths[call])

    def _cut(self) -> None:
        starts, firsts, ends = self.bounds[:-1], self._fronts - self._begins, self.stops - self._begins
        low, high = np.minimum.reduceat(firsts, starts), np.maximum.reduceat(ends, starts)
        whole = (np.maximum.reduceat(firsts, starts) == low) & (np.minimum.reduceat(ends, starts) == high)
        self.widths, self.whole = (high - low).tolist(), whole.tolist()
        left, right = int(low.min()), int(high.max())
        columns, slots = np.arange(left, right), self._slots[:, left:right]
        hidden = None
        if not whole.all():
            hidden = columns >= ends[:, None]
            if firsts.any():
                hidden |= columns < firsts[:, None]
        if int(low.max()) == left and int(high.min()) == right:
            self.flat = slots.ravel()
            self.hidden = None if hidden is None else hidden.ravel()
            return
        chosen = columns < np.repeat(high, self._sizes)[:, None]
        if int(low.max()) > left:
            chosen &= columns >= np.repeat(low, self._sizes)[:, None]
        self.flat = slots[chosen]
        self.hidden = None if hidden is None else hidden[chosen]
