"""Which lines a view shows when a tree is too large to show all of it."""

from __future__ import annotations

import heapq
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from radixkv.cache.tree_view.snapshot import Snapshot
from radixkv.core.block_states import ID_BYTES
from radixkv.core.tokens import TOKEN_BYTES
from radixkv.core.tree_copy import TreeCopy

__all__ = ["SORTS", "Chain", "Selection", "Sums", "select"]

#: What is shown first: the largest subtrees, those asked for most often, those used last.
SORTS = ("tokens", "hits", "recency")

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Sums:
    """What a part of the tree holds.

    Attributes:
        nodes: Nodes of the tree.
        blocks: Cached blocks.
        tokens: Cached tokens.
        pinned_blocks: Blocks that somebody beside the tree holds.
    """

    nodes: int = 0
    blocks: int = 0
    tokens: int = 0
    pinned_blocks: int = 0

    def __add__(self, other: Sums) -> Sums:
        return Sums(
            self.nodes + other.nodes,
            self.blocks + other.blocks,
            self.tokens + other.tokens,
            self.pinned_blocks + other.pinned_blocks,
        )

    def __sub__(self, other: Sums) -> Sums:
        return self + Sums(-other.nodes, -other.blocks, -other.tokens, -other.pinned_blocks)


@dataclass
class Chain:
    """One line: a node, a run of nodes of which each but the last has one child, or a namespace.

    Attributes:
        members: Indices into the nodes of the snapshot, from the root's side on; none for a namespace.
        namespace: Its canonical namespace.
        depth: 0 for a namespace.
        subtree: All below it, itself included.
        hidden: What lies below it and is not shown.
        children: Those that are shown, first come first.
    """

    members: list[int]
    namespace: bytes
    depth: int
    subtree: Sums
    hidden: Sums
    children: list[Chain] = field(default_factory=list)


@dataclass(frozen=True)
class Selection:
    """What is shown.

    Attributes:
        tops: The namespaces that are shown, in order.
        matching: Sums over all that passed the namespace filter.
        num_matching: How many namespaces did.
        hidden: Sums over those of them that are not shown.
    """

    tops: list[Chain]
    matching: Sums
    num_matching: int
    hidden: Sums


class _Columns:
    """The nodes of a snapshot as columns, with sums over subtrees. No object for each node: there may be millions."""

    def __init__(self, snapshot: Snapshot, sort: str, collapse: bool) -> None:
        nodes, n = snapshot.nodes, len(snapshot.nodes)
        self.nodes = nodes
        self.block_size = snapshot.block_size
        self.parent = nodes.parents
        self.tokens = [len(edge) // TOKEN_BYTES for edge in nodes.edges]
        self.blocks = [len(blocks) // ID_BYTES for blocks in nodes.blocks]
        self.pinned = _pinned_blocks(nodes, self.blocks)
        self.count = [1] * n
        # What a subtree is ranked by: a sum or a maximum, so never above what it is part of.
        self.value: list[Any]
        if sort == "tokens":
            self.value = self.tokens
        else:
            self.value = list(nodes.num_hits if sort == "hits" else nodes.used_at)
        num_children = nodes.num_children
        self.joins = [collapse and parent >= 0 and num_children[parent] == 1 for parent in self.parent]
        self._sum_up()
        # Children by parent: those of node i are `order[starts[i] : starts[i + 1]]`.
        parents = np.fromiter(self.parent, np.int64, n)
        self.order: Ints = np.argsort(parents, kind="stable")
        self.starts: Ints = np.searchsorted(parents[self.order], np.arange(-1, n + 1))

    def _sum_up(self) -> None:
        tokens, blocks, pinned, count = self.tokens, self.blocks, self.pinned, self.count
        # A node comes after its parent, so from the back every subtree is complete when it is added.
        for i in range(len(self.parent) - 1, -1, -1):
            up = self.parent[i]
            if up >= 0:
                tokens[up] += tokens[i]
                blocks[up] += blocks[i]
                pinned[up] += pinned[i]
                count[up] += count[i]
        value = self.value
        if value is not tokens:
            for i in range(len(self.parent) - 1, -1, -1):
                up = self.parent[i]
                if up >= 0 and value[i] > value[up]:
                    value[up] = value[i]

    def below(self, node: int) -> list[int]:
        """Its children; those of all roots for -1."""
        return self.order[self.starts[node + 1] : self.starts[node + 2]].tolist()

    def subtree(self, node: int) -> Sums:
        return Sums(self.count[node], self.blocks[node], self.tokens[node], self.pinned[node])

    def chain(self, first: int) -> list[int]:
        """The nodes on the line that begins with one."""
        members = [first]
        while True:
            below = self.below(members[-1])
            if len(below) != 1 or not self.joins[below[0]]:
                return members
            members.append(below[0])

    def rank(self, node: int) -> bytes:
        """Tells siblings apart, as their first blocks of tokens differ, and sorts like the tokens."""
        first_block = np.frombuffer(self.nodes.edges[node][: self.block_size * TOKEN_BYTES], np.int64)
        return first_block.astype(">i8").tobytes()


def _pinned_blocks(nodes: TreeCopy, num_blocks: list[int]) -> list[int]:
    """For each node, its blocks that have a reference beside the tree's own."""
    if not num_blocks:
        return []
    ids = np.frombuffer(b"".join(nodes.blocks), np.int32)
    starts = np.cumsum([0, *num_blocks[:-1]])
    return np.add.reduceat((nodes.references[ids] > 1).astype(np.int64), starts).tolist()


def select(
    snapshot: Snapshot,
    *,
    namespaces: Collection[bytes] | None,
    sort: str,
    max_nodes: int,
    max_depth: int | None,
    min_blocks: int,
    collapse: bool,
) -> Selection:
    """Choose the lines, from the subtrees that rank first down, and sum up the rest.

    Deterministic: where two subtrees rank the same, the tokens they start with decide.

    Args:
        snapshot: Of the tree.
        namespaces: Canonical namespaces to look at; None for all.
        sort: One of `SORTS`.
        max_nodes: Most lines; a namespace takes one.
        max_depth: Most lines below each other under a namespace; None for any number.
        min_blocks: Subtrees of fewer blocks are not shown.
        collapse: Show a run of single children as one line.
    """
    columns = _Columns(snapshot, sort, collapse)
    firsts: dict[bytes, list[int]] = {}
    for node in columns.below(-1):
        namespace = snapshot.nodes.namespaces[node]
        if namespaces is None or namespace in namespaces:
            firsts.setdefault(namespace, []).append(node)

    matching = Sums()
    # (rank, when its parent was shown, rank among equals, its parent, its first node or -1), the best comes out first
    waiting: list[tuple[float, int, bytes, Chain | None, int]] = []
    spaces: dict[bytes, Chain] = {}
    for namespace, kin in firsts.items():
        subtree = sum((columns.subtree(node) for node in kin), Sums())
        matching += subtree
        spaces[namespace] = Chain([], namespace, 0, subtree, subtree)
        values = [columns.value[node] for node in kin]
        value = sum(values) if sort == "tokens" else max(values)
        if subtree.blocks >= min_blocks:
            waiting.append((-value, 0, namespace, None, -1))
    heapq.heapify(waiting)
    tops: list[Chain] = []
    hidden = matching
    for serial in range(1, max_nodes + 1):
        if not waiting:
            break
        _, _, key, parent, first = heapq.heappop(waiting)
        if parent is None:
            chain = spaces[key]
            tops.append(chain)
            hidden -= chain.subtree
            below = firsts[key]
        else:
            members = columns.chain(first)
            below = columns.below(members[-1])
            subtree = columns.subtree(first)
            rest = sum((columns.subtree(node) for node in below), Sums())
            chain = Chain(members, parent.namespace, parent.depth + 1, subtree, rest)
            parent.children.append(chain)
            parent.hidden -= subtree
        if max_depth is None or chain.depth < max_depth:
            for node in below:
                if columns.blocks[node] >= min_blocks:
                    heapq.heappush(waiting, (-columns.value[node], serial, columns.rank(node), chain, node))
    return Selection(tops, matching, len(firsts), hidden)
