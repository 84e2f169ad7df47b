"""Eviction policies beside least recently used. Needs numpy and sortedcontainers, never torch."""

from radixkv.core.eviction import register_policy
from radixkv.core.policies.cost_aware import CostAwarePolicy
from radixkv.core.policies.fifo import FIFOPolicy
from radixkv.core.policies.hit_density import HitDensityPolicy
from radixkv.core.policies.lfu import AgedLFUPolicy, LFUPolicy
from radixkv.core.policies.retention import RetentionPolicy
from radixkv.core.policies.slru import SLRUPolicy

__all__ = [
    "AgedLFUPolicy",
    "CostAwarePolicy",
    "FIFOPolicy",
    "HitDensityPolicy",
    "LFUPolicy",
    "RetentionPolicy",
    "SLRUPolicy",
]

for _policy in (
    AgedLFUPolicy,
    CostAwarePolicy,
    FIFOPolicy,
    HitDensityPolicy,
    LFUPolicy,
    RetentionPolicy,
    SLRUPolicy,
):
    register_policy(_policy)
