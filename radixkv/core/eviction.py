"""Which cached block goes next: priorities of blocks, and the order of the leaves."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from radixkv.core.block_states import Index, fill
from radixkv.core.errors import InvalidRequestError

if TYPE_CHECKING:
    from radixkv.core.node import Node

Entry = tuple[int, int]  # priority, serial

NEVER = 2**63 - 1


class EvictionPolicy(Protocol):
    """Gives every cached block a priority; the leaf block with the lowest one is evicted first.

    While a block is the last of its leaf its priority may rise but never fall: the order of the leaves is
    corrected only when a leaf comes up.
    """

    name: str
    priority: npt.NDArray[np.int64]
    """`int64[num_blocks]`, meaningful for cached blocks."""

    def on_insert(self, index: Index, now: int) -> None:
        """These blocks were cached at logical time `now`."""

    def on_use(self, index: Index, now: int) -> None:
        """These cached blocks were matched, or inserted again, at logical time `now`."""


class LRUPolicy:
    """Least recently used first: the priority of a block is the time of its last use.

    A use covers a path from the root, so that priorities never rise along a path, and every block of an edge has
    its own: an edge of which only the first half is matched need not be split to remember it.
    """

    name = "lru"

    def __init__(self, num_blocks: int) -> None:
        self.priority = np.zeros(num_blocks, np.int64)

    def on_insert(self, index: Index, now: int) -> None:
        fill(self.priority, index, now)

    def on_use(self, index: Index, now: int) -> None:
        fill(self.priority, index, now)


POLICIES = {"lru": LRUPolicy}


def make_policy(name: str, num_blocks: int) -> EvictionPolicy:
    """The policy of that name.

    Raises:
        InvalidRequestError: There is none; the message names those that exist.
    """
    if name not in POLICIES:
        raise InvalidRequestError(f"unknown eviction policy {name!r}: there is {', '.join(sorted(POLICIES))}")
    return POLICIES[name](num_blocks)


class LeafOrder:
    """The leaves of a tree, lowest priority first, with priorities that may be out of date.

    A leaf is filed under the priority its last block had at that time. As it can only have risen since, the
    first entry, once found to be up to date, is the true minimum. `node.entry` is the entry, or None.

    A heap. An entry whose leaf was taken out from the middle stays until it comes up, or until such entries
    are the majority; it does not keep the leaf alive.
    """

    def __init__(self) -> None:
        self._heap: list[Entry] = []
        self._leaves: dict[int, Node] = {}  # by serial

    def __len__(self) -> int:
        return len(self._leaves)

    def add(self, node: Node, priority: int) -> None:
        """File a leaf, which is not filed yet."""
        serial = node.serial
        node.entry = entry = (priority, serial)
        self._leaves[serial] = node
        heapq.heappush(self._heap, entry)

    def remove(self, node: Node) -> None:
        """Take a leaf out, wherever it is."""
        node.entry = None
        del self._leaves[node.serial]
        if len(self._heap) > 2 * len(self._leaves) + 16:
            self._heap = [leaf.entry for leaf in self._leaves.values() if leaf.entry is not None]
            heapq.heapify(self._heap)

    def first(self) -> Node | None:
        """The leaf filed under the lowest priority, or None if there is no leaf."""
        while self._heap:
            entry = self._heap[0]
            node = self._leaves.get(entry[1])
            if node is not None and node.entry is entry:
                return node
            heapq.heappop(self._heap)
        return None

    def second_priority(self) -> int:
        """A priority that no leaf but the first is filed below, `NEVER` if there is no other."""
        heap = self._heap
        if len(heap) > 2:
            return min(heap[1], heap[2])[0]
        return heap[1][0] if len(heap) > 1 else NEVER

    def pop_first(self) -> None:
        """Take the leaf out that `first` named."""
        node = self._leaves.pop(heapq.heappop(self._heap)[1])
        node.entry = None

    def nodes(self) -> list[Node]:
        """All leaves, in order."""
        return sorted(self._leaves.values(), key=lambda node: node.entry or (NEVER, 0))
