"""Pool, radix tree, block tables and hashes. Needs numpy, never torch."""

from radixkv.core.block_keys import block_keys
from radixkv.core.block_pool import BlockPool
from radixkv.core.block_table import BlockCopy, BlockTable
from radixkv.core.errors import (
    CacheCorruptionError,
    InvalidRequestError,
    OutOfBlocksError,
    RadixKVError,
    UnsupportedModelError,
)
from radixkv.core.eviction import EvictionPolicy, PriorityPolicy, Retention, policy_names, register_policy
from radixkv.core.hashing import ContentHasher, content_hashes
from radixkv.core.listener import TreeListener
from radixkv.core.namespace import Namespace, canonical_namespace
from radixkv.core.radix_tree import InsertResult, Match, NodeInfo, RadixTree, Tail
from radixkv.core.tokens import as_tokens

__all__ = [
    "BlockCopy",
    "BlockPool",
    "BlockTable",
    "CacheCorruptionError",
    "ContentHasher",
    "EvictionPolicy",
    "InsertResult",
    "InvalidRequestError",
    "Match",
    "Namespace",
    "NodeInfo",
    "OutOfBlocksError",
    "PriorityPolicy",
    "RadixKVError",
    "RadixTree",
    "Retention",
    "Tail",
    "TreeListener",
    "UnsupportedModelError",
    "as_tokens",
    "block_keys",
    "canonical_namespace",
    "content_hashes",
    "policy_names",
    "register_policy",
]
