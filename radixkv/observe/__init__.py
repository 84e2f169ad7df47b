"""What the cache did: counters that are always on, records of requests, metrics and events."""

from radixkv.observe.histogram import HistogramStats
from radixkv.observe.prefill_cost import PrefillCost
from radixkv.observe.requests import MISS_REASONS, MissNote, RequestStats
from radixkv.observe.stats import CacheStats, StatsRecorder

__all__ = [
    "MISS_REASONS",
    "CacheStats",
    "HistogramStats",
    "MissNote",
    "PrefillCost",
    "RequestStats",
    "StatsRecorder",
]
