"""Which cached block goes next: the interface of eviction policies, and least recently used."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from numbers import Real
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from radixkv.core.block_states import BlockIds, Index, fill
from radixkv.core.errors import CacheCorruptionError, InvalidRequestError
from radixkv.core.tokens import TokenArray, shown

if TYPE_CHECKING:
    from radixkv.core.node import Node


def require_ttl(ttl: object, of: str) -> None:
    """Make sure that this is a time to live: a number of seconds above 0, infinity among them, or None.

    Args:
        ttl: What was given.
        of: Whose it is, for the message.

    Raises:
        InvalidRequestError: It is not.
    """
    if ttl is None:
        return
    try:
        good = isinstance(ttl, Real) and not isinstance(ttl, bool) and float(ttl) > 0
    except OverflowError:
        good = False
    if not good:
        raise InvalidRequestError(f"the ttl of {of} is seconds above 0, or None, got {shown(ttl)}")


@dataclass(frozen=True)
class Retention:
    """How long to keep what a request uses, for policies that take requests' word for it (`policy="priority"`).

    Attributes:
        priority: Lower ones are evicted first. What nobody says anything about has 0.
        ttl: Seconds from now on after which the blocks are like any others; None for as long as they are cached.

    Raises:
        InvalidRequestError: The priority is no integer, or the time to live is not above 0.
    """

    priority: int
    ttl: float | None = None

    def __post_init__(self) -> None:
        priority = self.priority
        if (
            isinstance(priority, bool)
            or not isinstance(priority, (int, np.integer))
            or abs(int(priority)) >= 2**63
        ):
            raise InvalidRequestError(
                f"the priority of a retention is an integer of 64 bits, got {shown(priority)}"
            )
        require_ttl(self.ttl, "a retention")
        # Plain numbers: arithmetic with clocks must not take on the width of a float32.
        object.__setattr__(self, "priority", int(priority))
        object.__setattr__(self, "ttl", None if self.ttl is None else float(self.ttl))


class EvictionPolicy(ABC):
    """Decides which leaf of the tree is shortened next. One tree has one policy, made for its pool.

    What can be evicted are the last blocks of leaves that nobody holds; the tree keeps the books of that. A policy
    keeps what it knows of each block in arrays over the pool, and the leaves in an order of its own. All methods
    are called under the tree's lock.

    A leaf is *filed* from the moment it is one until it is taken out; `leaf.entry` is the policy's own note on it, and
    None while it is not filed. `Index` selects blocks in a per-block array: see `get`, `put` and `fill` in
    `radixkv.core.block_states`.

    Attributes:
        name: What users select it by.
        num_blocks: Blocks of the pool.
        block_size: Tokens in a block; 0 until the tree is made.
        behind: While `on_insert` or `on_grow` is called: the block before those that it names, on their path; -1 if
            there is none. For policies that continue something along a path.
        eager: Whether the tree calls `refile` each time the last block of a filed leaf is used or has become another
            one. False if what a leaf is filed under can only have risen since, so that it can be corrected when
            the leaf comes up.
        retains: Whether requests may say how long to keep their blocks: `retain`.
    """

    name: ClassVar[str]
    eager: ClassVar[bool] = True
    retains: ClassVar[bool] = False

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = 0
        self.behind = -1

    def bind(self, block_size: int) -> None:
        """The policy was given to a tree with blocks of `block_size` tokens.

        Raises:
            InvalidRequestError: It belongs to another tree.
        """
        if self.block_size:
            raise InvalidRequestError(f"this {self.name} policy belongs to another tree: make one for each")
        self.block_size = block_size

    # -- what happens to blocks ------------------------------------------------------------------------------

    def on_request(self, index: Index, num_hit: int, tokens: TokenArray, seed: int, now: int) -> None:
        """A new request came.

        Args:
            index: The blocks it hit, root first; the last of them may be matched in part.
            num_hit: How many.
            tokens: `int64[...]`, the whole request.
            seed: Of its namespace.
            now: Logical time; rises by one with each use of the tree.
        """

    def on_use(self, index: Index, now: int) -> None:
        """These blocks are in use again by a request that was counted by `on_request`, or are inserted again.

        Args:
            index: The blocks.
            now: Logical time.
        """

    def on_insert(self, index: Index, first: int, tokens: TokenArray, seed: int, now: int) -> None:
        """Blocks are cached now.

        Args:
            index: The blocks.
            first: Number of the first of them on its path.
            tokens: `int64[...]`, the path up to the end of the last of them.
            seed: Of the namespace.
            now: Logical time.
        """

    def on_grow(self, block: int, number: int, tokens: TokenArray, seed: int, now: int) -> None:
        """A cached block that was partly filled was filled further, in place. By default a use.

        Args:
            block: The block.
            number: Its number on its path.
            tokens: `int64[...]`, the path, at least up to the new end of the block.
            seed: Of the namespace.
            now: Logical time.
        """
        self.on_use([(block, block + 1)], now)

    def use_clock(self, clock: Callable[[], float]) -> None:
        """Take the time from elsewhere, as a replay does, whose requests have times of their own.

        Called before the policy is given to a tree. Nothing to do for a policy that knows no time.

        Args:
            clock: Seconds, never running backwards.
        """

    def retain(self, index: Index, retention: Retention) -> None:
        """The request of the last `on_request`, `on_use`, `on_insert` or `on_grow` says how long to keep these blocks.

        Called only if `retains`.

        Args:
            index: The blocks.
            retention: What it says.
        """

    def on_share(self, index: Index) -> None:
        """These blocks are used by another request than the one that inserted them, without an `on_request` for it.

        It came back to them after a pause, or inserted duplicates of them.

        Args:
            index: The blocks.
        """

    def on_replace(self, old: int, new: int) -> None:
        """A cached block that was partly filled goes, as a fuller one with the same first tokens took its place.

        Called behind `on_insert`, and `retain`, for the new one, which should take over what is known of the old
        one. By default the old one is dropped.

        Args:
            old: The block that goes.
            new: The block that is cached in its place.
        """
        self.on_drop(np.array([old], np.int32))

    def on_evict(self, ids: BlockIds) -> None:
        """These blocks, the last ones of one leaf, are being evicted. Called while the leaf is still filed.

        Args:
            ids: `int32[...]`, the blocks.
        """

    def on_drop(self, ids: BlockIds) -> None:
        """These blocks go, but not to make room: they were cleared, or replaced and nothing was taken over.

        Args:
            ids: `int32[...]`, the blocks.
        """

    # -- the order of the leaves -----------------------------------------------------------------------------

    @abstractmethod
    def file(self, leaf: Node, block: int) -> None:
        """Take up a `leaf`, which is not filed, by its last `block`."""

    @abstractmethod
    def unfile(self, leaf: Node) -> None:
        """Take a filed `leaf` out."""

    def refile(self, leaf: Node, block: int) -> None:
        """File a filed `leaf` anew by what its last block, `block`, is now; called only if `eager`."""
        self.unfile(leaf)
        self.file(leaf, block)

    def begin(self) -> None:
        """An eviction of one or more blocks begins."""

    def end(self) -> None:
        """It is over."""

    @abstractmethod
    def first(self) -> Node | None:
        """The leaf that is to be shortened next, still filed; None if there is no leaf."""

    @abstractmethod
    def num_to_cut(self, leaf: Node, ids: BlockIds) -> int:
        """How many blocks of the leaf that `first` named may go before `first` is to be asked again.

        Args:
            leaf: The leaf.
            ids: `int32[...]`, its last blocks, as many as are wanted at most. They may be held by others.

        Returns:
            A number from the end of `ids`; 0 if the leaf does not go after all: it was filed anew.
        """

    @abstractmethod
    def num_filed(self) -> int:
        """Leaves that are filed."""

    def check(self, leaf: Node, block: int) -> None:
        """Verify what is noted of a filed `leaf`, whose last block is `block`.

        Raises:
            CacheCorruptionError: It is wrong; the message gives the values.
        """


# What a leaf is filed under, its serial number, the leaf, and whatever else; as the number is the leaf's alone, two
# leaves are never compared.
Entry = tuple[Any, ...]

SPARE = 16  # old entries that are left in the heap in any case


class PriorityPolicy(EvictionPolicy):
    """Base of policies that give every block a number: the leaf whose last block has the lowest one goes first.

    The leaves are in a heap, where an entry stands as long as it is its leaf's own (`leaf.entry`). Those that do not
    stand any more are left until they come up, or until there are more than an eighth of them: leaves mostly go from
    the top, and a sorted list takes several times as long for that.

    Costs: filing and cutting are logarithmic in the number of leaves, amortised.

    Args:
        num_blocks: Blocks of the pool.

    Attributes:
        priority: `dtype[num_blocks]`, meaningful for cached blocks.
        dtype: Of the priorities, set by a class: int64, the default, or float64.
    """

    dtype: ClassVar[type] = np.int64

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self.priority: npt.NDArray[Any] = np.zeros(num_blocks, self.dtype)
        self._heap: list[Entry] = []
        self._num_filed = 0

    def file(self, leaf: Node, block: int) -> None:
        """File a leaf under the priority of its last block. O(log leaves)."""
        self._push((self.priority.item(block), leaf.serial, leaf))

    def _push(self, entry: Entry) -> None:
        entry[2].entry = entry
        heappush(self._heap, entry)
        self._num_filed += 1

    def unfile(self, leaf: Node) -> None:
        """Take a leaf out: at once from the top of the heap, else its entry is left and ignored."""
        heap = self._heap
        self._num_filed = num = self._num_filed - 1
        if heap[0] is leaf.entry:
            heappop(heap)
        leaf.entry = None
        if len(heap) > num + num // 8 + SPARE or not num:
            self._heap = [entry for entry in heap if entry[2].entry is entry]
            heapify(self._heap)

    def first(self) -> Node | None:
        """The leaf whose last block has the lowest priority; None if there is no leaf."""
        heap = self._heap
        while heap:
            entry = heap[0]
            leaf: Node = entry[2]
            if leaf.entry is entry:
                return leaf
            heappop(heap)
        return None

    def _second(self) -> Any:
        """What the leaf behind the one that `first` named is filed under, or None if there is no other."""
        heap = self._heap
        if len(heap) < 2:
            return None
        entry = heap[1] if len(heap) == 2 or heap[1] < heap[2] else heap[2]
        if entry[2].entry is entry:
            return entry[0]
        top = heappop(heap)
        second = self.first()
        heappush(heap, top)
        return None if second is None else second.entry[0]

    def num_to_cut(self, leaf: Node, ids: BlockIds) -> int:
        """All blocks from the end whose priority is not above that of the second leaf."""
        bound = self._second()
        if bound is None:
            return len(ids)
        last = ids.item(-1)
        if self.priority.item(last) > bound:
            self.refile(leaf, last)
            return 0
        above = self.priority[ids] > bound
        return int(above[::-1].argmax()) if above.any() else len(ids)

    def num_filed(self) -> int:
        """Leaves that are filed. O(1)."""
        return self._num_filed

    def check(self, leaf: Node, block: int) -> None:
        """Verify that a leaf is filed under the priority of its last block (or a lower one if not `eager`).

        Raises:
            CacheCorruptionError: It is not.
        """
        filed, serial, node = leaf.entry
        true = self.priority[block]
        if node is not leaf or serial != leaf.serial or (filed != true if self.eager else filed > true):
            raise CacheCorruptionError(
                f"{self.name}: node {leaf.serial} is filed under {filed} as {serial}, block {block} has {true}"
            )


class LRUPolicy(PriorityPolicy):
    """Least recently used first: the priority of a block is the time of its last use.

    A use covers a path from the root, so that priorities never rise along a path, and every block of an edge has
    its own: an edge of which only the first half is matched need not be split to remember it. A match writes the time
    and nothing else: a leaf stays filed under the time it had, and is filed anew only when it comes up.

    Victim: oldest last use. Ties: the deeper block first.

    Costs: a match is one vectorised write; each cut is logarithmic in the number of leaves.

    Source: Mattson, Gecsei, Slutz and Traiger, "Evaluation techniques for storage hierarchies", IBM Systems Journal
    9(2), 1970; for prefix trees, Zheng et al., "SGLang: efficient execution of structured language model programs",
    2024 (arXiv:2312.07104).

    Args:
        num_blocks: Blocks of the pool.
    """

    name = "lru"
    eager = False

    def on_request(self, index: Index, num_hit: int, tokens: TokenArray, seed: int, now: int) -> None:
        """Note the time of use of the blocks hit."""
        fill(self.priority, index, now)

    def on_use(self, index: Index, now: int) -> None:
        """Note the time of use."""
        fill(self.priority, index, now)

    def on_insert(self, index: Index, first: int, tokens: TokenArray, seed: int, now: int) -> None:
        """Note the time of use of the new blocks."""
        fill(self.priority, index, now)

    def num_to_cut(self, leaf: Node, ids: BlockIds) -> int:
        """All blocks if even the first was used no later than the second leaf, else as the base class."""
        bound = self._second()
        if bound is None or self.priority.item(ids.item(0)) <= bound:
            return len(ids)  # the first is the one used last
        return super().num_to_cut(leaf, ids)


_POLICIES: dict[str, type[EvictionPolicy]] = {}


def register_policy(policy: type[EvictionPolicy]) -> type[EvictionPolicy]:
    """Make a `policy` known by its `name`; also a class decorator.

    A class of the same module and qualified name as the one that is known takes its place: it was defined anew.

    Returns:
        The class itself.

    Raises:
        InvalidRequestError: Another class has that name.
    """
    known = _POLICIES.get(policy.name, policy)
    if (known.__module__, known.__qualname__) != (policy.__module__, policy.__qualname__):
        raise InvalidRequestError(f"{known.__qualname__} is already the eviction policy {policy.name!r}")
    _POLICIES[policy.name] = policy
    return policy


register_policy(LRUPolicy)


def _load_all() -> None:
    # Those policies are built on this module.
    import radixkv.core.policies  # noqa: F401


def policy_names() -> list[str]:
    """Names of all policies that are known, sorted; those of `register_policy` among them."""
    _load_all()
    return sorted(_POLICIES)


def make_policy(policy: str | type[EvictionPolicy] | EvictionPolicy, num_blocks: int) -> EvictionPolicy:
    """The policy of that name, or of that class, for a pool of so many blocks; or the object itself, if it is one.

    Raises:
        InvalidRequestError: There is none of that name, and the message names those that exist; or the
            object was made for a pool of another size; or it is nothing of these.
    """
    if isinstance(policy, type) and issubclass(policy, EvictionPolicy):
        policy = policy(num_blocks)
    if isinstance(policy, EvictionPolicy):
        if policy.num_blocks != num_blocks:
            raise InvalidRequestError(
                f"this {policy.name} policy was made for {policy.num_blocks} blocks, the pool has {num_blocks}"
            )
        return policy
    if not isinstance(policy, str):
        raise InvalidRequestError(
            f"an eviction policy is a name, a class derived from EvictionPolicy or an object, got {shown(policy)}"
        )
    if policy not in _POLICIES:
        _load_all()
    if policy not in _POLICIES:
        raise InvalidRequestError(f"unknown eviction policy {policy!r}: there is {', '.join(policy_names())}")
    return _POLICIES[policy](num_blocks)
