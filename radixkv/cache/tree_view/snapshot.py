"""What a tree held at one moment."""

from __future__ import annotations

import time
from dataclasses import dataclass

from radixkv.core.radix_tree import RadixTree
from radixkv.core.tree_copy import TreeCopy, copy_tree

__all__ = ["Snapshot", "Totals", "take_snapshot"]


@dataclass(frozen=True)
class Totals:
    """Exact counts of a whole tree and its pool.

    Attributes:
        namespaces: Namespaces with something cached.
        nodes: Nodes of the tree, roots not counted.
        blocks: Cached blocks.
        tokens: Cached tokens.
        pinned_blocks: Cached blocks that somebody beside the tree holds, so that they cannot be evicted.
        pool_blocks: Blocks of the pool.
        free_blocks: Those that hold nothing. The rest is cached, or held by a request and not cached yet.
    """

    namespaces: int
    nodes: int
    blocks: int
    tokens: int
    pinned_blocks: int
    pool_blocks: int
    free_blocks: int


@dataclass(frozen=True)
class Snapshot:
    """A copy of a tree, and its counters at the same moment.

    Attributes:
        nodes: Of the tree.
        totals: The tree's and the pool's own counters.
        block_size: Tokens in a block.
        policy: Eviction policy.
        taken_unix: Seconds since 1970.
    """

    nodes: TreeCopy
    totals: Totals
    block_size: int
    policy: str
    taken_unix: float


def take_snapshot(tree: RadixTree) -> Snapshot:
    """Copy a `tree`, under its lock: requests of other threads wait meanwhile, in proportion to the nodes."""
    pool = tree.pool
    with pool.lock:
        nodes = copy_tree(tree)
        totals = Totals(
            namespaces=len(set(nodes.namespaces)),
            nodes=tree.num_nodes,
            blocks=tree.num_cached_blocks,
            tokens=tree.num_cached_tokens,
            pinned_blocks=tree.num_pinned_blocks,
            pool_blocks=pool.num_blocks,
            free_blocks=pool.num_free,
        )
        return Snapshot(nodes, totals, tree.block_size, tree.policy, time.time())
