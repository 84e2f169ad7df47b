"""The nodes of the radix tree, and comparisons of the tokens on their edges."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
from sortedcontainers import SortedDict

from radixkv.core import hashing
from radixkv.core.block_states import ID_BYTES, Run
from radixkv.core.tokens import TOKEN_BYTES

# Bytes of two edges that are compared at a time to find where they part.
FIRST_PIECE = 4096
LARGEST_PIECE = 1 << 16


class Node:
    """A run of blocks, the edge that leads to it, and what follows.

    Tokens and ids are kept as bytes: a bytearray compares with a part of a request by one memcmp and no copy,
    grows and shrinks in place, and gives its memory back.
    """

    __slots__ = (
        "blocks",
        "children",
        "cut",
        "edge",
        "entry",
        "hash",
        "index",
        "next",
        "num_children",
        "num_hits",
        "parent",
        "parked",
        "runs",
        "serial",
        "tails",
        "used_at",
    )

    def __init__(
        self,
        parent: Node | None,
        edge: bytearray,
        blocks: bytearray,
        serial: int,
        runs: list[Run] | None = None,
    ) -> None:
        self.parent = parent
        self.edge = edge  # int64 tokens; only a leaf's may end inside a block
        self.blocks = blocks  # int32 ids
        self.cut = 0  # bytes of the edge that the last request matched which left it midway; a hint
        self.runs = runs  # of those ids, or None if nobody has looked or they are scattered
        self.serial = serial
        self.hash = 0  # of the first block, where this is in `parent.children`
        self.next: Node | None = None  # sibling with the same hash
        self.children: dict[int, Node] = {}  # children whose first block is whole, by its hash
        self.tails: dict[int, Node] | None = None  # children that are nothing but a tail, by serial
        self.num_children = 0
        self.index: SortedDict[bytes, Node] | None = None  # children by first block, once somebody needed it
        self.entry: Any = None  # note of the eviction policy on a leaf that it has filed
        self.parked = False  # a leaf whose last block others hold, waiting for `pool.take_woken`
        self.num_hits = 0  # requests that matched into the edge
        self.used_at = 0.0  # time.monotonic() of the last match or insert


class Root(Node):
    """Where the paths of one namespace start; owns no blocks."""

    __slots__ = ("namespace", "seed")

    def __init__(self, namespace: bytes, serial: int) -> None:
        super().__init__(None, bytearray(), bytearray(), serial)
        self.namespace = namespace
        self.seed = hashing.namespace_seed(namespace)


def last_block(node: Node) -> int:
    """Id of the last block on the edge."""
    return int.from_bytes(node.blocks[-ID_BYTES:], sys.byteorder)


def children(node: Node) -> Iterator[Node]:
    """All children, in no particular order."""
    for head in node.children.values():
        child: Node | None = head
        while child is not None:
            yield child
            child = child.next
    if node.tails:
        yield from node.tails.values()


def below(root: Node) -> Iterator[Node]:
    """All nodes under a root, parents first, without recursion."""
    todo = list(children(root))
    while todo:
        node = todo.pop()
        yield node
        todo += children(node)


def common_bytes(edge: bytearray, data: memoryview, guess: int = 0) -> int:
    """Length of the common prefix, in bytes, whole tokens only; faster if `guess` is right."""
    if (
        guess
        and edge.startswith(data[:guess])
        and edge[guess : guess + TOKEN_BYTES] != data[guess : guess + TOKEN_BYTES]
    ):
        return min(guess, len(edge), len(data))
    size = min(len(edge), len(data))
    # memcmp does the bulk, in pieces that are still at hand when numpy looks where in one of them they part.
    low, step = 0, FIRST_PIECE
    while low < size:
        high = min(low + step, size)
        if not edge.startswith(data[low:high], low):
            ours = np.frombuffer(edge, np.int64, (high - low) // TOKEN_BYTES, low)
            theirs = np.frombuffer(data, np.int64, (high - low) // TOKEN_BYTES, low)
            return low + int((ours != theirs).argmax()) * TOKEN_BYTES
        low = high
        step = min(4 * step, LARGEST_PIECE)
    return size


def sort_key(tokens: bytearray | memoryview) -> bytes:
    """Bytes that sort like the tokens; a prefix of tokens has a prefix of bytes."""
    return np.frombuffer(tokens, np.int64).astype(">i8").tobytes()


def common_key_bytes(a: bytes, b: bytes) -> int:
    """Length of the common prefix of two sort keys, in bytes, whole tokens only."""
    size = min(len(a), len(b))
    differ = int.from_bytes(a[:size], "big") ^ int.from_bytes(b[:size], "big")
    return (size - (differ.bit_length() + 7) // 8) // TOKEN_BYTES * TOKEN_BYTES
