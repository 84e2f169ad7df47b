"""KV events: what is cached, told to routers and viewers over ZeroMQ, in the formats of vLLM and SGLang.

Needs the extra `observe` (msgspec and pyzmq).
"""

from __future__ import annotations

from radixkv.observe.kv_discovery import EventDirectory
from radixkv.observe.kv_messages import (
    DIALECTS,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Dialect,
    KVCacheEvent,
    external_hashes,
    pick_dialect,
)
from radixkv.observe.kv_publisher import EventSource, KVEventPublisher

__all__ = [
    "DIALECTS",
    "AllBlocksCleared",
    "BlockRemoved",
    "BlockStored",
    "Dialect",
    "EventDirectory",
    "EventSource",
    "KVCacheEvent",
    "KVEventPublisher",
    "external_hashes",
    "pick_dialect",
]
