"""Leaves by class and last use, and in which order they go if an index says what each class is worth at each age."""

from __future__ import annotations

from heapq import heappop, heappush
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from sortedcontainers import SortedList

from radixkv.core.errors import CacheCorruptionError
from radixkv.core.policies.reuse_rates import (
    BIN_OF_AGE,
    CLASS_BITS,
    CLASS_MASK,
    EDGES,
    HORIZON,
    NUM_BINS,
    NUM_CLASSES,
    RING_MASK,
    ROW,
)

if TYPE_CHECKING:
    from radixkv.core.node import Node

TOLERANCE = 2.0  # indices within this factor of the lowest count as equal: the least recently used goes

# Time of last use, serial number, class, leaf. Serial numbers differ, so that nothing behind them is compared.
Entry = tuple[int, int, int, "Node"]

# Worth, time, serial number, entry, and the youngest time of the bin whose next leaf is to follow it, or 0.
Candidate = tuple[float, int, int, Entry, int]

# Worth, oldest time, youngest time, class.
Bin = tuple[float, int, int, int]

FIRST_OF_ALL = -1.0
LAST_OF_ALL = float("inf")

_OLDEST = np.append(EDGES[1:] - 1, HORIZON - 1).tolist()  # age in each bin
_YOUNGEST = EDGES.tolist()


class LeafCells:
    """The leaves that may be evicted, with the number of those in each cell (class and bin of age) kept up to date.

    So an eviction looks at the cells with any leaves, of which there are at most 28 * 40, and then at the leaves that
    go, and never at all leaves.

    Costs: `advance` is one gather of 28 rows; filing is logarithmic in the leaves of a class; `begin` is a few
    operations on 28 * 40 numbers; `first` is logarithmic for each leaf that goes.
    """

    def __init__(self) -> None:
        self._time = 0
        self._ring: npt.NDArray[np.int32] = np.zeros((HORIZON, ROW), np.int32)  # leaves by time of last use
        self._counts: npt.NDArray[np.int32] = np.zeros((NUM_BINS, ROW), np.int32)
        self._num_old = 0  # leaves of an age of HORIZON or more
        self._num = 0
        self._files: list[SortedList[Entry]] = [SortedList() for _ in range(NUM_CLASSES)]
        self._evicting = False
        self._index: npt.NDArray[np.float64] = np.empty(0)
        self._bound = 0.0
        self._queue: list[Candidate] = []
        self._bins: list[Bin] = []  # not looked into so far, worst last
        self._better: tuple[
            npt.NDArray[Any], ...
        ] = ()  # bins, classes and worth of all cells, before it is needed
        self._own_too = False  # whether leaves of age 0 are candidates

    def __len__(self) -> int:
        return self._num

    def advance(self, time: int, rows: npt.NDArray[np.int64]) -> None:
        """Time goes on by one; `rows` are the places in the ring of the times that reach the next bin by it."""
        moved = self._ring.take(rows, 0)
        num = len(rows)
        self._counts[:num] += moved
        self._counts[: num - 1] -= moved[1:]
        if num == NUM_BINS:
            self._num_old += int(moved[-1].sum())
            self._counts[-1] = 0
        self._time = time
        self._ring[time & RING_MASK] = 0

    def file(self, leaf: Node, cell: int) -> None:
        """File a leaf under the class and the last use that `cell` holds."""
        last, kind = cell >> CLASS_BITS, cell & CLASS_MASK
        leaf.entry = entry = (last, leaf.serial, kind, leaf)
        self._files[kind].add(entry)
        self._count(last, kind, 1)
        if self._evicting:
            heappush(self._queue, (self._worth(last, kind), last, leaf.serial, entry, 0))

    def unfile(self, leaf: Node) -> None:
        """Take a leaf out."""
        last, _, kind, _ = leaf.entry
        self._files[kind].remove(leaf.entry)
        self._count(last, kind, -1)
        leaf.entry = None

    def begin(self, index: npt.NDArray[np.float64]) -> None:
        """An eviction begins: leaves of age `a` and class `c` are worth `index[bin of a, c]`."""
        self._index = index
        self._evicting = True
        time = self._time
        bins, kinds = self._counts[:, :NUM_CLASSES].nonzero()
        worth = index[bins, kinds]
        self._bound = bound = TOLERANCE * float(np.minimum.reduce(worth)) if len(worth) else 0.0
        equal = worth <= bound
        # By age as they come, the oldest last. The others are put in order only if their turn comes.
        self._bins = [
            (bound, time - _OLDEST[b], time - _YOUNGEST[b], kind)
            for b, kind in zip(bins[equal].tolist(), kinds[equal].tolist(), strict=True)
        ]
        self._better = bins, kinds, worth
        self._queue = []
        if self._num_old:
            for kind in range(NUM_CLASSES):
                self._follow(FIRST_OF_ALL, kind, 0, time - HORIZON)
        self._own_too = False

    def end(self) -> None:
        """The eviction is over."""
        self._evicting = False
        self._queue, self._bins, self._better = [], [], ()

    def first(self) -> Node | None:
        """The filed leaf that goes next. Only between `begin` and `end`."""
        queue, bins = self._queue, self._bins
        while True:
            # Bins that may hold something worse than, or as bad as and older than, the best candidate.
            while bins and (not queue or bins[-1][:2] <= queue[0][:2]):
                worth, oldest, youngest, kind = bins.pop()
                self._follow(worth, kind, oldest, youngest)
            if self._better and (not queue or queue[0][0] > self._bound):
                self._add_better()
                continue
            if not queue:
                if self._own_too:
                    return None
                # Nothing is left but what the running request used.
                self._own_too = True
                for kind in range(NUM_CLASSES):
                    self._follow(LAST_OF_ALL, kind, self._time, self._time)
                continue
            worth, last, serial, entry, youngest = queue[0]
            if entry[3].entry is entry:
                return entry[3]
            heappop(queue)  # filed anew since, or gone
            if youngest:
                self._follow(worth, entry[2], last, youngest, serial)

    def _add_better(self) -> None:
        """Add the bins that are worth more than the bound, worst last, of equal ones the oldest."""
        bins, kinds, worth = self._better
        self._better = ()
        order = np.lexsort((bins, -worth))
        order = order[worth[order] > self._bound]
        time = self._time
        self._bins[:0] = [
            (value, time - _OLDEST[b], time - _YOUNGEST[b], kind)
            for value, b, kind in zip(
                worth[order].tolist(), bins[order].tolist(), kinds[order].tolist(), strict=True
            )
        ]

    def _follow(self, worth: float, kind: int, oldest: int, youngest: int, serial: int = -1) -> None:
        """Make the first leaf of a class and bin, from a place on, a candidate."""
        file = self._files[kind]
        at = file.bisect_left((oldest, serial))
        if at < len(file):
            entry = file[at]
            if entry[0] <= youngest:
                heappush(self._queue, (worth, entry[0], entry[1], entry, youngest))

    def _worth(self, last: int, kind: int) -> float:
        age = self._time - last
        if age >= HORIZON:
            return FIRST_OF_ALL
        if age == 0:
            return LAST_OF_ALL
        return max(float(self._index[BIN_OF_AGE[age], kind]), self._bound)

    def _count(self, last: int, kind: int, change: int) -> None:
        self._num += change
        age = self._time - last
        if age >= HORIZON:
            self._num_old += change
            return
        self._ring[last & RING_MASK, kind] += change
        if age:
            self._counts[BIN_OF_AGE[age], kind] += change

    def check(self) -> None:
        """Recount everything.

        Raises:
            CacheCorruptionError: A count is wrong.
        """
        ring, counts = np.zeros_like(self._ring), np.zeros_like(self._counts)
        num = num_old = 0
        for kind, file in enumerate(self._files):
            for last, _, filed_as, leaf in file:
                if filed_as != kind or leaf.entry[0] != last:
                    raise CacheCorruptionError(f"hit-density: node {leaf.serial} is filed in class {kind}")
                num += 1
                age = self._time - last
                if age >= HORIZON:
                    num_old += 1
                    continue
                ring[last & RING_MASK, kind] += 1
                if age:
                    counts[BIN_OF_AGE[age], kind] += 1
        if (num, num_old) != (self._num, self._num_old):
            raise CacheCorruptionError(
                f"hit-density: {num} leaves, {num_old} old ones, counted {self._num}, {self._num_old}"
            )
        if (ring != self._ring).any() or (counts != self._counts).any():
            raise CacheCorruptionError("hit-density: the leaves in each cell are miscounted")
