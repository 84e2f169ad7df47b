"""KV memory: how large a block is, how many fit, and moving rows in and out of them."""

from radixkv.store.host_tier import HostTier
from radixkv.store.kv_store import KVStore, SlotRuns
from radixkv.store.layout import KVLayout, LayerLayout
from radixkv.store.sizing import free_memory_bytes, parse_memory, pick_num_blocks

__all__ = [
    "HostTier",
    "KVLayout",
    "KVStore",
    "LayerLayout",
    "SlotRuns",
    "free_memory_bytes",
    "parse_memory",
    "pick_num_blocks",
]
