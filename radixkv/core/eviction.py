"""Which cached block goes next: priorities of blocks, and the order of the leaves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt
from sortedcontainers import SortedList

from radixkv.core.block_states import Index, fill
from radixkv.core.errors import InvalidRequestError

if TYPE_CHECKING:
    from radixkv.core.node import Node

Entry = tuple[int, int, "Node"]  # priority, serial, leaf

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
    """

    def __init__(self) -> None:
        self._entries: SortedList[Entry] = SortedList()

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, node: Node, priority: int) -> None:
        """File a leaf, which is not filed yet. `node.serial` breaks ties, so that nodes are never compared."""
        node.entry = entry = (priority, node.serial, node)
        self._entries.add(entry)

    def remove(self, node: Node) -> None:
        """Take a leaf out, wherever it is."""
        self._entries.remove(node.entry)
        node.entry = None

    def first(self) -> Node | None:
        """The leaf filed under the lowest priority, or None if there is no leaf."""
        return self._entries[0][2] if self._entries else None

    def second_priority(self) -> int:
        """The priority that the second leaf is filed under, `NEVER` if there is no other."""
        return self._entries[1][0] if len(self._entries) > 1 else NEVER

    def pop_first(self) -> None:
        """Take the leaf out that `first` named."""
        self._entries.pop(0)[2].entry = None

    def nodes(self) -> list[Node]:
        """All leaves, in order."""
        return [entry[2] for entry in self._entries]
