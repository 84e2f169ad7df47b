"""radixkv: a prefix-caching radix-tree KV cache for language models.

The names below are loaded on first use, so `import radixkv` is quick and the parts that need no model
(`BlockPool`, `RadixTree`, `BlockTable`) never import torch or transformers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "BlockCopy": "radixkv.core.block_table",
    "BlockPool": "radixkv.core.block_pool",
    "BlockTable": "radixkv.core.block_table",
    "CacheStats": "radixkv.observe.stats",
    "Completion": "radixkv.engine.completion",
    "Engine": "radixkv.engine.engine",
    "EngineStats": "radixkv.engine.stats",
    "InsertResult": "radixkv.core.radix_tree",
    "KVLayout": "radixkv.store.layout",
    "KVStore": "radixkv.store.kv_store",
    "LayerLayout": "radixkv.store.layout",
    "Lease": "radixkv.cache.prefix_cache",
    "Match": "radixkv.core.radix_tree",
    "OutputStream": "radixkv.engine.output_stream",
    "PrefixCache": "radixkv.cache.prefix_cache",
    "RadixTree": "radixkv.core.radix_tree",
    "RequestStats": "radixkv.observe.stats",
    "Retention": "radixkv.core.eviction",
    "SamplingParams": "radixkv.engine.sampling_params",
    "Scheduler": "radixkv.sched.scheduler",
    "SchedulerConfig": "radixkv.sched.config",
    "SchedulerStats": "radixkv.sched.stats",
    "Tail": "radixkv.core.radix_tree",
    "TokenLogprobs": "radixkv.engine.sampler",
    "TokenOutput": "radixkv.engine.completion",
    "TreeView": "radixkv.cache.tree_view",
    "tree_view": "radixkv.cache.tree_view",
}

_MODULES = ("errors", "replay")

__all__ = [*sorted(_HOME), "__version__", "errors", "replay"]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        value: Any = importlib.import_module(f"radixkv.{name}")
    elif name in _HOME:
        value = getattr(importlib.import_module(_HOME[name]), name)
    else:
        raise AttributeError(f"module 'radixkv' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))


if TYPE_CHECKING:
    from radixkv import errors, replay
    from radixkv.cache.prefix_cache import Lease, PrefixCache
    from radixkv.cache.tree_view import TreeView, tree_view
    from radixkv.core.block_pool import BlockPool
    from radixkv.core.block_table import BlockCopy, BlockTable
    from radixkv.core.eviction import Retention
    from radixkv.core.radix_tree import InsertResult, Match, RadixTree, Tail
    from radixkv.engine.completion import Completion, TokenOutput
    from radixkv.engine.engine import Engine
    from radixkv.engine.output_stream import OutputStream
    from radixkv.engine.sampler import TokenLogprobs
    from radixkv.engine.sampling_params import SamplingParams
    from radixkv.engine.stats import EngineStats
    from radixkv.observe.stats import CacheStats, RequestStats
    from radixkv.sched.config import SchedulerConfig
    from radixkv.sched.scheduler import Scheduler
    from radixkv.sched.stats import SchedulerStats
    from radixkv.store.kv_store import KVStore
    from radixkv.store.layout import KVLayout, LayerLayout
