"""The cache: pool, tree, store and statistics behind one thread-safe facade."""

from radixkv.cache.prefix_cache import KVSource, Lease, ModelPlug, PrefixCache

__all__ = ["KVSource", "Lease", "ModelPlug", "PrefixCache"]
