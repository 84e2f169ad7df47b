"""How likely blocks of each class are to be used again at each age, learned from what a cache sees."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from radixkv.core.policies.ghosts import Cells

# Classes of a block: its uses so far, whether it was the last of its request, how much of that request was new.
USE_BUCKETS = 5  # 1, 2, 3-4, 5-8, 9 or more
LAST_BUCKETS = 2
NEW_BUCKETS = 4  # quarters
NUM_CLASSES = USE_BUCKETS * LAST_BUCKETS * NEW_BUCKETS
MOST_USES = 9  # more are not told apart

_BUCKET = np.array([0, 0, 1, 2, 2, 3, 3, 3, 3, 4], np.int64)  # by uses
NEXT_USES = np.array([1, 2, 3, 4, 5, 6, 7, 8, 9, 9], np.uint8)  # by uses
CLASSES_OF_USES = LAST_BUCKETS * NEW_BUCKETS  # with as many uses
CLASS_OF_USES = _BUCKET * CLASSES_OF_USES
CLASS_OF_LAST = NEW_BUCKETS

# A block's cell is its class and the time of its last use: time * 64 + class.
CLASS_BITS = 6
CLASS_MASK = (1 << CLASS_BITS) - 1
ROW = 1 << CLASS_BITS  # classes, with some unused

# Ages are told apart by a factor of sqrt 2: bin b holds EDGES[b] <= age < EDGES[b + 1].
HORIZON = 16_384  # age, in requests, from which on nothing is told apart
EDGES = np.unique(np.round(2.0 ** (np.arange(2 * 14 + 1) / 2)).astype(np.int64))
NUM_BINS = len(EDGES)
BIN_OF_AGE = np.clip(np.searchsorted(EDGES, np.arange(HORIZON + 1), "right") - 1, 0, None)
_WIDTHS = np.append(np.diff(EDGES), HORIZON * 0.5)[:, None]

RING_MASK = HORIZON - 1
CELL_MASK = HORIZON * ROW - 1

PRIOR = 3.0  # requests that the estimate of a larger group counts for
HALF_LIFE = 2048  # requests after which counts are halved
_MOST = 0.999  # highest rate in a bin that is believed
_IS_LATER = np.tri(NUM_BINS)[:, :, None]

REFRESH = 32  # requests between two computations of the index
COUNTED_BLOCKS = 64  # of a request of average length are counted, up to twice as many
FIRST = 64  # requests at first with one each

_SHORT = 128  # cells; counting so few one by one costs less than to look for equal ones
_ONES = np.ones(_SHORT, np.int32)


class ReuseRates:
    """Counts, by class and age, of blocks that were used again and of those that came so far without.

    Time is counted in requests. A block is *open* from its use on until it is used again, or is given up (dropped,
    or forgotten as a ghost), which says nothing about whether it would have been used: so the counts are those of a
    life table with censoring (Kaplan and Meier, 1958).

    Costs: `advance` is one gather of 28 rows; the others grow with the number of cells given.

    Attributes:
        time: Number of the request that runs, from 1 on; 0 before the first.
        index: `float64[28, 40]`, hits to be expected of a block of that age and class for each request that it stays,
            if it is kept as long as is best.
    """

    def __init__(self) -> None:
        self.time = 0
        self.open: npt.NDArray[np.int32] = np.zeros((HORIZON, ROW), np.int32)  # by time of last use, a ring
        self._flat_open = self.open.reshape(-1)
        self._used: npt.NDArray[np.float64] = np.zeros((NUM_BINS, ROW))
        self._flat_used = self._used.reshape(-1)
        self._seen: npt.NDArray[np.float64] = np.zeros((NUM_BINS, ROW))
        self.index: npt.NDArray[np.float64] = np.ones((NUM_BINS, NUM_CLASSES))
        self._scratch = [np.empty((NUM_BINS, NUM_BINS, NUM_CLASSES)) for _ in range(2)]
        self._length = 20.0  # mean blocks of a request
        self.stride = 1  # one of so many blocks of a path is counted
        self._num_requests = 0

    def advance(self) -> npt.NDArray[np.int64]:
        """The next request comes. Times, in the ring, that reach the next bin by it, youngest first."""
        self.time = time = self.time + 1
        num = int(BIN_OF_AGE[time]) + 1 if time < HORIZON else NUM_BINS
        rows: npt.NDArray[np.int64] = (time - EDGES[:num]) & RING_MASK
        self._seen[:num] += self.open.take(rows, 0)
        self.open[time & RING_MASK] = 0  # what was used a whole ring ago is not told apart any more
        return rows

    def sample(self, first: int) -> slice:
        """Which of the blocks from number `first` of a path on are to be counted."""
        return slice(-(first + 1) % self.stride, None, self.stride)

    def count_request(self, num_blocks: int) -> bool:
        """A request of so many blocks has been seen: age the counts, and draw the conclusions now and then.

        Returns:
            Whether `stride` has changed: long requests are counted by a sample.
        """
        self._num_requests += 1
        self._length += (num_blocks - self._length) / min(self._num_requests, 1000)
        if self._num_requests % HALF_LIFE == 0:
            self._used *= 0.5
            self._seen *= 0.5
        if self._num_requests <= FIRST or self._num_requests % REFRESH == 1:
            self._refresh()
        if self._num_requests % HALF_LIFE != FIRST:
            return False
        before = self.stride
        self.stride = 1 << max(0, int(self._length / COUNTED_BLOCKS).bit_length() - 1)
        return self.stride != before

    def use(self, cells: Cells) -> None:
        """Blocks with these cells are used again."""
        cells, counts = _runs(cells)
        ages = self.time - (cells >> CLASS_BITS)
        if len(ages) and np.maximum.reduce(ages) >= HORIZON:
            young = ages < HORIZON
            cells, counts, ages = cells[young], counts[young], ages[young]
        # With numbers of the type of the array, `at` is ten times faster.
        np.add.at(self._flat_used, (BIN_OF_AGE[ages] << CLASS_BITS) | (cells & CLASS_MASK), counts * 1.0)
        np.subtract.at(self._flat_open, cells & CELL_MASK, counts)

    def give_up(self, cells: Cells) -> None:
        """Whether blocks with these cells are used again will not be seen."""
        cells, counts = _runs(cells)
        young = self.time - (cells >> CLASS_BITS) < HORIZON
        np.subtract.at(self._flat_open, cells[young] & CELL_MASK, counts[young])

    def enter(self, classes: Cells) -> None:
        """Blocks of these classes are in use now."""
        self.open[self.time & RING_MASK] += np.bincount(classes, minlength=ROW).astype(np.int32)

    def now(self, classes: Cells) -> Cells:
        """The cells of blocks of these classes that are in use now."""
        return classes + (self.time << CLASS_BITS)

    def _refresh(self) -> None:
        """Estimate the rates, each drawn towards that of a larger group as far as its own counts are few."""
        used, seen = self._used[:, :NUM_CLASSES], self._seen[:, :NUM_CLASSES]
        total = seen.sum()
        if not total:
            return
        length = self._length / self.stride
        prior = PRIOR * length
        shape = (NUM_BINS, USE_BUCKETS * LAST_BUCKETS, NEW_BUCKETS)
        used_by, seen_by = used.reshape(shape), seen.reshape(shape)
        overall = (used.sum() + 1e-6) / (total + 1e-6)
        by_age = (used.sum(1) + prior * overall) / (seen.sum(1) + prior)
        by_class = (used_by.sum(2) + prior * by_age[:, None]) / (seen_by.sum(2) + prior)
        mean = by_class[:, :, None]
        # One factor for each quarter of news, over all ages.
        factor = (used_by.sum(0) + 2 * length) / ((seen_by * mean).sum(0) + 2 * length)
        mean = np.minimum(mean * factor, 1.0)
        rate = (used_by + 3 * prior * mean) / (seen_by + 3 * prior)
        self.index = _best_ratios(rate.reshape(-1, NUM_CLASSES), *self._scratch)


def _best_ratios(
    rate: npt.NDArray[np.float64], hits: npt.NDArray[np.float64], times: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """The most hits for the time over all times to keep a block, from each bin of age on: a Gittins index.

    Args:
        rate: `float64[28, 40]`, share of the blocks that reach a bin which are used again in it.
        hits: `float64[28, 28, 40]`, scratch: [bin it is kept to, bin it is in, class].
        times: The same.

    Returns:
        `float64[28, 40]`, hits for each request of time.
    """
    rate = np.minimum(rate, _MOST)
    alive = np.ones_like(rate)
    np.cumprod(1 - rate[:-1], 0, out=alive[1:])
    # Sums from each bin to the last one: their differences are exact where few get that far, too.
    for sums, parts in ((hits, rate), (times, (1 - rate / 2) * _WIDTHS)):
        to_last = np.zeros((NUM_BINS + 1, NUM_CLASSES))
        to_last[:-1] = np.cumsum((alive * parts)[::-1], 0)[::-1]
        np.subtract(to_last[None, :-1], to_last[1:, None], out=sums)
    hits *= _IS_LATER
    np.maximum(times, 1e-300, out=times)
    hits /= times
    return np.maximum.reduce(hits, 0)


def _runs(cells: Cells) -> tuple[Cells, npt.NDArray[np.int32]]:
    """Equal cells in a row once, and how many they are: those of a path are few."""
    n = len(cells)
    if n <= _SHORT:
        return cells, _ONES[:n]
    change = (cells[1:] != cells[:-1]).nonzero()[0]
    ends = np.empty(len(change) + 1, np.int64)
    ends[:-1] = change
    ends[-1] = n - 1
    counts = ends.astype(np.int32)
    counts[1:] -= counts[:-1].copy()
    counts[0] += 1
    return cells[ends], counts
