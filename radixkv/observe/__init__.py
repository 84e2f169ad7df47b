"""What the cache did: counters that are always on."""

from radixkv.observe.stats import CacheStats, RequestStats, StatsRecorder

__all__ = ["CacheStats", "RequestStats", "StatsRecorder"]
