"""Counts of values in fixed buckets: what Prometheus calls a histogram."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["SECONDS", "SHARES", "Histogram", "HistogramStats"]

# Bounds of times to first token and of latencies, in seconds: two or three a decade.
SECONDS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0,
)  # fmt: skip
# Bounds of shares. The first bucket holds the zeros alone, the last what is all but the last token or so.
SHARES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 1.0)


@dataclass(frozen=True)
class HistogramStats:
    """A snapshot of a histogram.

    Attributes:
        bounds: Upper bounds of the buckets, ascending; a value on a bound is below it. One bucket more has none.
        counts: Values in each bucket, `len(bounds) + 1` of them.
        total: Sum of all values.
    """

    bounds: tuple[float, ...] = ()
    counts: tuple[int, ...] = ()
    total: float = 0.0

    @property
    def count(self) -> int:
        """Values in all."""
        return sum(self.counts)

    @property
    def mean(self) -> float:
        """Mean of all values; 0.0 without values."""
        return self.total / self.count if self.count else 0.0

    def __sub__(self, earlier: HistogramStats) -> HistogramStats:
        """What came between two snapshots of the same histogram."""
        if not isinstance(earlier, HistogramStats):
            return NotImplemented
        if not earlier.bounds:
            return self
        if self.bounds != earlier.bounds:
            raise ValueError("these are not two snapshots of one histogram: their buckets differ")
        counts = tuple(now - then for now, then in zip(self.counts, earlier.counts, strict=True))
        return HistogramStats(self.bounds, counts, self.total - earlier.total)

    def to_dict(self) -> dict[str, Any]:
        """Plain lists and numbers, fit for JSON."""
        return {
            "bounds": list(self.bounds),
            "counts": list(self.counts),
            "total": self.total,
            "count": self.count,
            "mean": self.mean,
        }


class Histogram:
    """A histogram that counts. Not thread-safe by itself: whoever owns it has a lock, or is one thread.

    Args:
        bounds: Upper bounds of the buckets, ascending.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._total = 0.0

    def add(self, value: float) -> None:
        """Count a value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value

    def snapshot(self) -> HistogramStats:
        """As of now."""
        return HistogramStats(self._bounds, tuple(self._counts), self._total)
