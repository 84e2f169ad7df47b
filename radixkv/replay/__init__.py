"""Traces replayed through the tree and pool of a cache: hit rates, policies, the offline optimum. No torch.

`simulate` is the whole of it; `read_trace` reads a trace once for several calls.
"""

from radixkv.replay.capacities import ladder, parse_capacity
from radixkv.replay.kv_size import KVSize, kv_size
from radixkv.replay.optimum import OptimalPolicy, ceiling, token_ceiling
from radixkv.replay.reading import read_trace
from radixkv.replay.runs import OPTIMA
from radixkv.replay.simulation import PolicyResult, ReplayResult, default_policies, simulate
from radixkv.replay.trace import Request, Trace

__all__ = [
    "OPTIMA",
    "KVSize",
    "OptimalPolicy",
    "PolicyResult",
    "ReplayResult",
    "Request",
    "Trace",
    "ceiling",
    "default_policies",
    "kv_size",
    "ladder",
    "parse_capacity",
    "read_trace",
    "simulate",
    "token_ceiling",
]
