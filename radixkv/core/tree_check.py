"""The check of a whole tree; `RadixTree` states the invariants."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np

from radixkv.core.block_states import CACHED, ID_BYTES
from radixkv.core.errors import CacheCorruptionError
from radixkv.core.eviction import LRUPolicy
from radixkv.core.node import Node, Root, below, children, sort_key
from radixkv.core.tokens import TOKEN_BYTES

if TYPE_CHECKING:
    from radixkv.core.radix_tree import RadixTree


def check_nodes(tree: RadixTree) -> None:
    """Raise `CacheCorruptionError`, with values, at the first of the tree's invariants that is broken."""
    pool, policy = tree._pool, tree._policy
    owner: dict[int, int] = {}
    num_nodes = num_leaves = 0
    num_filed = num_parked = 0
    woken = set(pool._woken)
    for root in tree._roots.values():
        if root.num_children == 0 or root.edge or root.blocks:
            raise CacheCorruptionError(f"tree invariant 4: root {root.namespace!r} has no child, or blocks")
        _check_children(tree, root, root)
        for node in below(root):
            num_nodes += 1
            ids = np.frombuffer(bytes(node.blocks), np.int32)
            if node.runs is not None and [i for run in node.runs for i in range(*run)] != ids.tolist():
                raise CacheCorruptionError(f"node {node.serial} has blocks {ids.tolist()}, runs {node.runs}")
            num_tokens, rest = divmod(len(node.edge), TOKEN_BYTES)
            where = f"node {node.serial} with blocks {ids.tolist()[:8]}"
            if rest or not len(ids) or len(ids) != -(-num_tokens // tree._block_size):
                raise CacheCorruptionError(f"tree invariant 4: {where} has {num_tokens} tokens")
            if node.num_children and num_tokens % tree._block_size:
                raise CacheCorruptionError(f"tree invariant 4: {where} has a tail and children")
            for block in ids.tolist():
                if owner.setdefault(block, node.serial) != node.serial:
                    raise CacheCorruptionError(f"tree invariant 1: block {block} is on two edges")
            if len(set(ids.tolist())) != len(ids):
                raise CacheCorruptionError(f"tree invariant 1: {where} names a block twice")
            gaps = np.zeros(len(ids), np.int32)
            gaps[-1] = -num_tokens % tree._block_size
            if (pool._gaps[ids] != gaps).any() or not (pool._state[ids] & CACHED).all():
                raise CacheCorruptionError(f"tree invariant 1: {where}: the pool has other rows cached")
            parent = node.parent
            assert parent is not None
            above = parent.blocks[-ID_BYTES:]
            chain = np.frombuffer(bytes(above + node.blocks), np.int32)
            if (np.diff(pool._state[chain]) > 0).any():
                raise CacheCorruptionError(
                    f"tree invariant 2: {where}: references rise, {(pool._state[chain] >> 1).tolist()[:8]}"
                )
            if isinstance(policy, LRUPolicy) and (np.diff(policy.priority[chain]) > 0).any():
                raise CacheCorruptionError(
                    f"lru: {where}: last use rises, {policy.priority[chain].tolist()[:8]}"
                )
            _check_children(tree, root, node)
            last = int(ids[-1])
            if node.num_children:
                if node.entry is not None or node.parked:
                    raise CacheCorruptionError(f"tree invariant 5: {where} is filed, but no leaf")
                continue
            num_leaves += 1
            num_filed += node.entry is not None
            num_parked += node.parked
            if (node.entry is None) != node.parked:
                raise CacheCorruptionError(f"tree invariant 5: leaf {where} is not filed once")
            if node.entry is not None:
                policy.check(node, last)
            if node.parked and (
                tree._parked.get(last) is not node or not (pool._watched[last] or last in woken)
            ):
                raise CacheCorruptionError(f"tree invariant 5: leaf {where} is parked, but not watched")
    if len(owner) != pool.num_cached:
        raise CacheCorruptionError(f"tree invariant 1: {len(owner)} on edges, {pool.num_cached} in the pool")
    have = (tree._num_nodes, tree._num_leaves, policy.num_filed(), len(tree._parked))
    true = (num_nodes, num_leaves, num_filed, num_parked)
    if have != true:
        raise CacheCorruptionError(f"tree: nodes, leaves, filed, parked are {have}, recount {true}")


def _check_children(tree: RadixTree, root: Root, node: Node) -> None:
    kin = list(children(node))
    if len(kin) != node.num_children:
        raise CacheCorruptionError(f"node {node.serial}: {len(kin)} children, counted {node.num_children}")
    keys = sorted((sort_key(child.edge[: tree._block_bytes]), child.serial) for child in kin)
    for (first, _), (second, _) in itertools.pairwise(keys):
        if second.startswith(first):  # in sorted order a prefix stands right before what it begins
            raise CacheCorruptionError(f"tree invariant 3: two children of node {node.serial} start alike")
    if node.index is not None:
        listed = [(key, child.serial) for key, child in node.index.items()]
        if listed != keys:
            raise CacheCorruptionError(f"node {node.serial}: the index of its children is wrong")
    for child in kin:
        if child.parent is not node:
            raise CacheCorruptionError(f"node {child.serial} does not know its parent {node.serial}")
        whole = len(child.edge) >= tree._block_bytes
        if whole == (node.tails is not None and child.serial in node.tails):
            raise CacheCorruptionError(f"node {child.serial} is in the wrong table of node {node.serial}")
        if whole and child.hash != tree._hash(bytes(child.edge[: tree._block_bytes]), root.seed):
            raise CacheCorruptionError(f"node {child.serial} is found under a wrong hash")
