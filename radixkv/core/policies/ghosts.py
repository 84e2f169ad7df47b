"""Blocks that are no longer cached, remembered for a while."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from radixkv.core.block_keys import BlockKeys

Cells = npt.NDArray[np.int64]
Uses = npt.NDArray[np.uint8]

SLOTS_PER_GHOST = 4


class GhostTable:
    """Keys of blocks and what is known of them, first in, first out; found by a table of slots without chains.

    The newest key has its slot: one that had it before is forgotten early, about one in ten. All operations are a
    constant number of numpy calls, and cost nothing that grows with the table.

    33 to 49 bytes for each ghost, taken from the system as they are first written.

    Args:
        num_ghosts: Room, at least 1.
    """

    def __init__(self, num_ghosts: int) -> None:
        self._keys: BlockKeys = np.zeros(num_ghosts, np.uint64)
        self._cells: Cells = np.zeros(num_ghosts, np.int64)  # 0: nothing there
        self._uses: Uses = np.zeros(num_ghosts, np.uint8)
        num_slots = 1 << (SLOTS_PER_GHOST * num_ghosts - 1).bit_length()
        self._slots: npt.NDArray[np.int32] = np.zeros(num_slots, np.int32)  # places in the arrays above
        self._slot_mask = np.uint64(num_slots - 1)
        self._room = num_ghosts
        self._next = 0

    def cells(self) -> Cells:
        """The cells of all ghosts. A walk of the table, for checks."""
        return self._cells[self._cells > 0]

    def limit(self, num_ghosts: int) -> Cells:
        """Use less room than there is; the cells of those that go."""
        self._room = min(max(num_ghosts, 1), len(self._keys))
        gone = self._cells[self._room :]
        gone = gone[gone > 0]
        self._cells[self._room :] = 0
        self._next %= self._room
        return gone

    def take(self, keys: BlockKeys) -> tuple[npt.NDArray[np.intp], Cells, Uses]:
        """Take those of the keys out that are there: their numbers in `keys`, ascending, their cells and their uses."""
        places = self._slots[keys & self._slot_mask]
        found = (self._keys[places] == keys).nonzero()[0]
        at = places[found]
        cells = self._cells[at]
        if not cells.all():  # taken before
            there = cells > 0
            found, at, cells = found[there], at[there], cells[there]
        self._cells[at] = 0
        return found, cells, self._uses[at]

    def add(self, keys: BlockKeys, cells: Cells, uses: Uses) -> Cells:
        """Put keys in, any number of them; the cells of those that had to go for them. Cells are above 0."""
        gone = [self._cells[:0]]  # of a sample of few blocks there may be none
        at, num = 0, len(keys)
        while at < num:
            stop = min(num, at + self._room - self._next)
            gone += self._put(keys[at:stop], cells[at:stop], uses[at:stop])
            at = stop
        return gone[-1] if len(gone) <= 2 else np.concatenate(gone)

    def _put(self, keys: BlockKeys, cells: Cells, uses: Uses) -> list[Cells]:
        """As `add`, for as many as fit in before the end of the arrays."""
        gone = []
        slots = keys & self._slot_mask
        before = self._slots[slots]
        full = self._cells[before].nonzero()[0]
        if len(full):
            before = before[full]
            # Two keys may rob the same one.
            robbed = np.unique(before[self._keys[before] & self._slot_mask == slots[full]])
            gone.append(self._cells[robbed])
            self._cells[robbed] = 0
        start, stop = self._next, self._next + len(keys)
        old = self._cells[start:stop]
        gone.append(old[old > 0])
        self._keys[start:stop] = keys
        self._cells[start:stop] = cells
        self._uses[start:stop] = uses
        self._slots[slots] = np.arange(start, stop, dtype=np.int32)
        self._next = stop % self._room
        return gone
