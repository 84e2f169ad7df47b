"""Eviction policies beside least recently used. Needs numpy and sortedcontainers, never torch."""

from radixkv.core.eviction import register_policy
from radixkv.core.policies.fifo import FIFOPolicy
from radixkv.core.policies.lfu import AgedLFUPolicy, LFUPolicy

__all__ = ["AgedLFUPolicy", "FIFOPolicy", "LFUPolicy"]

for _policy in (AgedLFUPolicy, FIFOPolicy, LFUPolicy):
    register_policy(_policy)
