"""The cache: pool, tree, store and statistics behind one thread-safe facade.

Names are loaded on first use: what looks at a tree (`radixkv.cache.tree_view`) needs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__all__ = ["KVSource", "Lease", "ModelPlug", "PrefixCache"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'radixkv.cache' has no attribute {name!r}")
    value = getattr(importlib.import_module("radixkv.cache.prefix_cache"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))


if TYPE_CHECKING:
    from radixkv.cache.prefix_cache import KVSource, Lease, ModelPlug, PrefixCache
