"""Nodes and how they hang together; nothing of pools or references."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sortedcontainers import SortedDict

from radixkv.core import hashing
from radixkv.core.block_states import ID_BYTES, Run, joined, leading, trailing
from radixkv.core.eviction import EvictionPolicy
from radixkv.core.node import Node, Root, children, common_bytes, common_key_bytes, last_block, sort_key
from radixkv.core.tokens import TOKEN_BYTES

# A node left with one child is merged with it up to this length, so that a path whose branches were all evicted
# has at most one edge for each 1,024 tokens, while a merge never copies more than 16 KiB.
MERGE_BYTES = 2048 * TOKEN_BYTES


class LinkedNodes:
    """The nodes of all namespaces: found by the tokens on their edges, added, split and merged.

    The base of `RadixTree`, which states the invariants.

    Args:
        block_size: Tokens in a block.
        policy: Who new leaves are filed with.
    """

    def __init__(self, block_size: int, policy: EvictionPolicy) -> None:
        self._block_size = block_size
        self._block_bytes = block_size * TOKEN_BYTES
        self._hash: Callable[[Any, int], int] = hashing.block_hash
        self._roots: dict[bytes, Root] = {}
        self._policy = policy
        self._serial = 0
        self._num_nodes = self._num_leaves = 0

    def _walk(
        self, root: Root, data: memoryview, stop: int
    ) -> tuple[list[Node], Node, int, Node | None, int]:
        """Follow `data[:stop]` (bytes of int64 tokens) from a root.

        Returns:
            The nodes passed whole; the last of them (or the root); where it ends, in bytes; and if the request
            goes on into one of its children for at least a block but not for its whole edge, this child and
            how many bytes of its edge match, else None and 0.
        """
        block_bytes, hash_block, seed = self._block_bytes, self._hash, root.seed
        path: list[Node] = []
        node: Node = root
        start = 0
        while True:
            first_end = start + block_bytes
            if first_end > stop or not node.children:
                return path, node, start, None, 0
            child = node.children.get(hash_block(data[start:first_end], seed))
            while child is not None:  # more than one round only if hashes collide
                edge = child.edge
                end = start + len(edge)
                if end <= stop and edge == data[start:end]:
                    path.append(child)
                    node = child
                    start = end
                    break
                if edge.startswith(data[start:first_end]):
                    # An insert leaves the edge where the match before it did.
                    child.cut = matched = common_bytes(edge, data[start:stop], child.cut)
                    return path, node, start, child, matched
                child = child.next
            else:
                return path, node, start, None, 0

    def _closest(self, node: Node, rest: memoryview) -> tuple[Node | None, int]:
        """The child whose first block shares most leading tokens with `rest`, and how many bytes; or None, 0.

        Not more than its first block is compared: whole blocks are found by their hash before.
        """
        rest = rest[: self._block_bytes]
        if node.num_children == 1:
            child = self._only_child(node)
            common = common_bytes(child.edge, rest)
            return (child, common) if common else (None, 0)
        index = self._index_of(node)
        key = sort_key(rest)
        # Whoever shares most with `key` stands next to where it would be.
        at = index.bisect_left(key)
        best, longest = None, 0
        for i in (at - 1, at):
            if 0 <= i < len(index):
                other, child = index.peekitem(i)
                common = common_key_bytes(key, other)
                if common > longest:
                    best, longest = child, common
        return best, longest

    def _add_child(
        self,
        root: Root,
        parent: Node,
        edge: bytearray,
        blocks: bytearray,
        runs: list[Run] | None,
    ) -> Node:
        """A new leaf below `parent`, filed."""
        child = Node(parent, edge, blocks, self._next_serial(), runs)
        self._link(root, parent, child)
        parent.num_children += 1
        if parent.index is not None:
            parent.index[sort_key(edge[: self._block_bytes])] = child
        self._num_nodes += 1
        self._num_leaves += 1
        self._policy.file(child, last_block(child))
        return child

    def _split(self, root: Root, node: Node, num_blocks: int) -> Node:
        """Cut a node after `num_blocks` of its blocks; the new upper part. The lower part stays `node`."""
        at, at_id = num_blocks * self._block_bytes, num_blocks * ID_BYTES
        num_below = len(node.blocks) // ID_BYTES - num_blocks
        edge, blocks = node.edge, node.blocks
        # The shorter part is the one that is copied.
        if 2 * at < len(edge):
            upper_edge, upper_blocks = edge[:at], blocks[:at_id]
            del edge[:at]
            del blocks[:at_id]
        else:
            upper_edge, upper_blocks = edge, blocks
            node.edge, node.blocks = edge[at:], blocks[at_id:]
            del edge[at:]
            del blocks[at_id:]
        upper = Node(
            node.parent, upper_edge, upper_blocks, self._next_serial(), leading(node.runs, num_blocks)
        )
        upper.num_hits, upper.used_at = node.num_hits, node.used_at
        self._replace_child(node, upper)
        node.cut = 0
        node.runs = trailing(node.runs, num_below)
        node.parent = upper
        upper.num_children = 1
        self._link(root, upper, node)
        self._num_nodes += 1
        return upper

    def _merge(self, node: Node) -> None:
        """Let the only child of a node absorb it, if together they are short."""
        child = self._only_child(node)
        if len(node.edge) + len(child.edge) > MERGE_BYTES:
            return
        child.edge = node.edge + child.edge
        child.blocks = node.blocks + child.blocks
        child.runs = joined([node.runs, child.runs])
        child.parent = node.parent
        child.num_hits = max(child.num_hits, node.num_hits)
        child.used_at = max(child.used_at, node.used_at)
        self._replace_child(node, child)
        node.parent = None
        self._num_nodes -= 1

    def _next_serial(self) -> int:
        self._serial += 1
        return self._serial

    def _link(self, root: Root, parent: Node, child: Node) -> None:
        """Make a child findable: by the hash of its first block, or among the tails if it has no whole one."""
        if len(child.edge) < self._block_bytes:
            if parent.tails is None:
                parent.tails = {}
            parent.tails[child.serial] = child
            return
        child.hash = self._hash(memoryview(child.edge)[: self._block_bytes], root.seed)
        child.next = parent.children.get(child.hash)
        parent.children[child.hash] = child

    def _unlink(self, child: Node) -> None:
        parent = child.parent
        assert parent is not None
        if parent.index is not None:
            del parent.index[sort_key(child.edge[: self._block_bytes])]
        if len(child.edge) < self._block_bytes:
            assert parent.tails is not None
            del parent.tails[child.serial]
            return
        head = parent.children[child.hash]
        if head is child:
            if child.next is None:
                del parent.children[child.hash]
            else:
                parent.children[child.hash] = child.next
        else:
            while head.next is not child:
                assert head.next is not None
                head = head.next
            head.next = child.next
        child.next = None

    def _replace_child(self, old: Node, new: Node) -> None:
        """Put `new`, which starts with the same whole block, in the place of `old` below the parent of `old`."""
        parent = old.parent
        assert parent is not None
        new.hash = old.hash
        new.next = old.next
        old.next = None
        head = parent.children[old.hash]
        if head is old:
            parent.children[old.hash] = new
        else:
            while head.next is not old:
                assert head.next is not None
                head = head.next
            head.next = new
        if parent.index is not None:
            parent.index[sort_key(new.edge[: self._block_bytes])] = new

    def _only_child(self, node: Node) -> Node:
        return next(iter((node.children or node.tails or {}).values()))

    def _index_of(self, node: Node) -> SortedDict[bytes, Node]:
        if node.index is None:
            # Built when it is first needed: a tree that is only asked for whole blocks never pays for it.
            node.index = SortedDict((sort_key(c.edge[: self._block_bytes]), c) for c in children(node))
        return node.index
