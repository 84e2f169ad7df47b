"""The radix tree: which token prefixes are cached, and in which blocks."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from radixkv.core import hashing
from radixkv.core.block_pool import BlockPool, as_block_ids
from radixkv.core.block_states import (
    FREE,
    ID_BYTES,
    IDLE,
    MOST_RUNS,
    BlockIds,
    Index,
    Run,
    get,
    joined,
    leading,
    trailing,
)
from radixkv.core.errors import CacheCorruptionError, InvalidRequestError, OutOfBlocksError
from radixkv.core.eviction import EvictionPolicy, Retention, make_policy
from radixkv.core.insertion import insert_path
from radixkv.core.linked_nodes import LinkedNodes
from radixkv.core.listener import TreeListener
from radixkv.core.match import InsertResult, Match, Tail
from radixkv.core.namespace import Namespace, canonical_namespace
from radixkv.core.node import Node, Root, below, last_block
from radixkv.core.tokens import (
    TOKEN_BYTES,
    TokenArray,
    require_block_size,
    require_non_negative,
    shown,
    to_int64,
    token_bytes,
)
from radixkv.core.tree_check import check_nodes
from radixkv.core.tree_copy import copy_tree

__all__ = ["InsertResult", "Match", "NodeInfo", "RadixTree", "Tail"]


@dataclass(frozen=True)
class NodeInfo:
    """A copy of one node, for inspection.

    Attributes:
        namespace: Canonical namespace.
        start: Tokens before this edge.
        tokens: `int64[...]`, the tokens on the edge.
        blocks: `int32[ceil(len(tokens) / block_size)]`.
        num_children: 0 for a leaf.
        parent: Number of its parent among the nodes that `nodes()` gave before it; -1 at the root.
        references: `int32[...]`, holders of each block, the tree among them: 1 means that it can be evicted.
        num_hits: Requests that matched into the edge. Where an edge was split, both parts keep the number.
        used_at: `time.monotonic()` of the last match or insert that touched it, in seconds.
    """

    namespace: bytes
    start: int
    tokens: TokenArray
    blocks: BlockIds
    num_children: int
    parent: int
    references: npt.NDArray[np.int32]
    num_hits: int
    used_at: float


class RadixTree(LinkedNodes):
    """Cached token prefixes, shared block by block, evicted block by block.

    A node owns the run of blocks on the edge that leads to it; edges are cut only at block borders. A leaf's
    edge may end in a *tail*, a block of which only the leading rows are filled.

    Invariants, all verified by `check()`:

    1. Every block on an edge carries the tree's reference in the pool; no block is on two edges.
    2. References never rise along a path from the root, as whoever holds a block of a path holds those before
       it. So a cached block that only the tree holds has only such blocks below it, and is evictable.
    3. No two children of a node start with the same block of tokens: of the first blocks of two children,
       neither is a prefix of the other. (Whole blocks differ somewhere; a tail that is a prefix of a sibling's
       first block would say nothing new.)
    4. Only leaves may end in a tail; a node that is not a root owns at least one block, a root at least one
       child.
    5. Every leaf is either filed with the eviction policy or parked under its last block, which others hold and the
       pool watches.
    6. `num_cached_* == num_evictable_* + num_pinned_*`, in blocks and in tokens.

    Costs: `match` and `insert` are one hash and one memcmp for each edge passed, and a constant number of numpy
    calls; `evict` is logarithmic in the number of leaves for each leaf touched. Every method may be called
    from any thread; the lock is the pool's.

    Args:
        pool: The pool of the blocks; a pool takes one tree.
        block_size: Tokens in a block, 1,048,576 at most.
        policy: Who is evicted first: the name of a policy (`policy_names()`), its class, or one made for this pool.

    Raises:
        InvalidRequestError: The block size or the policy makes no sense, or the pool has a tree already.
    """

    def __init__(
        self,
        pool: BlockPool,
        block_size: int = 16,
        policy: str | type[EvictionPolicy] | EvictionPolicy = "lru",
    ) -> None:
        super().__init__(require_block_size(block_size), make_policy(policy, pool.num_blocks))
        pool.attach_tree(self, self._block_size)
        self._policy.bind(self._block_size)
        self._pool = pool
        self._parked: dict[int, Node] = {}  # by last block
        # Cached blocks that forks have duplicates of, and those duplicates; some may have been given back since.
        self._diverged: dict[int, set[int]] = {}
        self._now = 0
        self._matched: tuple[bytes, Index] = (
            b"",
            [],
        )  # what the last match found, which is often inserted next
        self._checked: Callable[[], TokenArray | None] = lambda: None  # the last request, while it lives
        self._tip = -1  # last whole block of the path that was matched or inserted last
        self._num_evicted = self._num_evicted_tokens = 0
        self._listeners: tuple[TreeListener, ...] = ()
        self._clock = time.monotonic
        self._checks = pool._checks

    def __repr__(self) -> str:
        return (
            f"RadixTree(block_size={self._block_size}, cached={self.num_cached_blocks}, "
            f"evictable={self.num_evictable_blocks}, nodes={self._num_nodes})"
        )

    # -- numbers, all O(1) -----------------------------------------------------------------------------------

    @property
    def pool(self) -> BlockPool:
        """The pool of the blocks."""
        return self._pool

    @property
    def block_size(self) -> int:
        """Tokens in a block."""
        return self._block_size

    @property
    def policy(self) -> str:
        """Name of the eviction policy."""
        return self._policy.name

    @property
    def num_cached_blocks(self) -> int:
        """Blocks in the tree."""
        return self._pool.num_cached

    @property
    def num_cached_tokens(self) -> int:
        """Filled rows of the blocks in the tree."""
        return self._pool.num_cached_rows

    @property
    def num_evictable_blocks(self) -> int:
        """Cached blocks that nobody but the tree holds."""
        return self._pool.num_idle

    @property
    def num_evictable_tokens(self) -> int:
        """Filled rows of the evictable blocks."""
        return self._pool.num_idle_rows

    @property
    def num_pinned_blocks(self) -> int:
        """Cached blocks that somebody beside the tree holds."""
        return self._pool.num_cached - self._pool.num_idle

    @property
    def num_pinned_tokens(self) -> int:
        """Filled rows of the pinned blocks."""
        return self._pool.num_cached_rows - self._pool.num_idle_rows

    @property
    def num_nodes(self) -> int:
        """Nodes, roots not counted."""
        return self._num_nodes

    @property
    def num_leaves(self) -> int:
        """Nodes without children."""
        return self._num_leaves

    @property
    def num_evicted_blocks_total(self) -> int:
        """Blocks evicted since the tree was made."""
        return self._num_evicted

    @property
    def num_evicted_tokens_total(self) -> int:
        """Filled rows of those blocks."""
        return self._num_evicted_tokens

    # -- watching --------------------------------------------------------------------------------------------

    def add_listener(self, listener: TreeListener) -> None:
        """Let `listener` hear of what happens from now on."""
        with self._pool.lock:
            self._listeners = (*self._listeners, listener)

    def remove_listener(self, listener: TreeListener) -> None:
        """Tell `listener` no more; nothing happens if it does not listen."""
        with self._pool.lock:
            self._listeners = tuple(known for known in self._listeners if known is not listener)

    # -- matching --------------------------------------------------------------------------------------------

    def match(
        self,
        tokens: Any,
        namespace: Namespace = b"",
        *,
        max_tokens: int | None = None,
        partial: bool = True,
        again: bool = False,
        retention: Retention | None = None,
    ) -> Match:
        """The longest cached prefix, held: one reference on each of its blocks.

        Counts as a use of the matched blocks. No node is split.

        Args:
            tokens: The request; an int64 array is not copied.
            namespace: What must be equal beside the tokens.
            max_tokens: Upper limit of the hit, such as `len(tokens) - 1` where the last token must be computed.
            partial: Match token by token; else whole blocks only, without a tail.
            again: This request matched before, and waited or was paused since: its blocks count as recently
                used, but it is not counted as one more request that uses them.
            retention: How long to keep the blocks found; for trees whose policy takes requests' word for it.

        Raises:
            InvalidRequestError: Tokens, namespace or limit make no sense, or the policy keeps no retentions.
        """
        if retention is not None:
            self.require_retention(retention)
        array = to_int64(tokens)
        limit = len(array) if max_tokens is None else _limit(array, max_tokens)
        canonical = canonical_namespace(namespace)
        pool = self._pool
        with pool.lock:
            ids, rows, runs, nodes = self._find(array, canonical, limit, partial)
            num_tokens = len(ids) // ID_BYTES * self._block_size
            if rows:
                num_tokens += rows - self._block_size
            require_non_negative(array[num_tokens:])  # what is cached was checked when it was inserted
            self._checked = weakref.ref(array)
            held = np.frombuffer(ids, np.int32) if ids else np.empty(0, np.int32)
            index: Index = pool.index(held) if runs is None else runs
            if ids:
                pool.hold_path(held, index)
                if isinstance(index, list):
                    self._matched = bytes(ids), index
            note = None
            try:
                self._count_use(canonical, array, held, index, nodes, again, retention)
                num_whole = len(held) - (rows > 0)
                self._tip = held.item(num_whole - 1) if num_whole else -1
                for listener in self._listeners:
                    said = listener.on_matched(canonical, array, num_tokens, limit, again)
                    note = said if note is None else note
            except BaseException:  # of a policy or listener, or Ctrl-C
                pool.release(held)
                raise
            if self._checks:
                self.check()
            return Match(self, num_tokens, held, Tail(held.item(-1), rows) if rows else None, note)

    def _was_checked(self, array: TokenArray) -> bool:
        """Whether the last match looked at all these tokens: what is inserted mostly is its array, or a slice of it."""
        checked = self._checked()
        return checked is not None and (array is checked or array.base is checked)

    def _count_use(
        self,
        namespace: bytes,
        array: TokenArray,
        held: BlockIds,
        index: Index,
        nodes: list[Node],
        again: bool,
        retention: Retention | None,
    ) -> None:
        policy = self._policy
        self._now = now = self._now + 1
        if again:
            policy.on_use(index, now)
            policy.on_share(index)
        else:
            root = self._roots.get(namespace)
            seed = hashing.namespace_seed(namespace) if root is None else root.seed
            policy.on_request(index, len(held), array, seed, now)
        if retention is not None:
            policy.retain(index, retention)
        if nodes:
            moment = self._clock()
            for node in nodes:
                node.used_at = moment
                node.num_hits += not again
            if policy.eager:
                self._refile_tip(nodes[-1], held.item(-1))

    def require_retention(self, retention: Retention | None) -> None:
        """Make sure that the policy takes this `retention`: None always goes.

        Raises:
            InvalidRequestError: It is no `Retention`, or the policy keeps none.
        """
        if retention is None:
            return
        if not isinstance(retention, Retention):
            raise InvalidRequestError(f"a retention is a radixkv.core.Retention, got {shown(retention)}")
        if not self._policy.retains:
            raise InvalidRequestError(
                f"the eviction policy {self._policy.name!r} keeps no retentions: make the tree with policy='priority'"
            )

    def _refile_tip(self, node: Node, last: int) -> None:
        """After a use of a path that ends in block `last` of a node: file it anew, if it is a leaf that ends there."""
        if node.entry is not None and last_block(node) == last:
            self._policy.refile(node, last)

    def match_length(
        self, tokens: Any, namespace: Namespace = b"", *, max_tokens: int | None = None, partial: bool = True
    ) -> int:
        """How many leading tokens `match` would find. Changes nothing, not even recency.

        Args:
            tokens: As for `match`, like the rest.
            namespace: What must be equal beside the tokens.
            max_tokens: Upper limit of the hit.
            partial: Count token by token; else whole blocks only.

        Raises:
            InvalidRequestError: Tokens, namespace or limit make no sense.
        """
        array = to_int64(tokens)
        limit = len(array) if max_tokens is None else _limit(array, max_tokens)
        with self._pool.lock:
            ids, rows, _, _ = self._find(array, canonical_namespace(namespace), limit, partial)
        num_tokens = (len(ids) // ID_BYTES - (rows > 0)) * self._block_size + rows
        require_non_negative(array[num_tokens:])
        return num_tokens

    def _find(
        self, array: TokenArray, namespace: bytes, limit: int, partial: bool
    ) -> tuple[bytearray, int, list[Run] | None, list[Node]]:
        """Ids (int32, as bytes) that match, the rows of the last one if it is a tail, else 0, their runs and nodes."""
        root = self._roots.get(namespace)
        partial &= self._block_size > 1  # a block of one token has no part
        if root is None or limit < (1 if partial else self._block_size):
            return bytearray(), 0, [], []
        data = token_bytes(array)
        path, node, start, child, matched = self._walk(root, data, limit * TOKEN_BYTES)
        pieces = [n.blocks for n in path]
        few = len(path) < MOST_RUNS
        runs = [n.runs for n in path] if few else []
        rows = 0
        if child is not None:
            num_whole, rest = divmod(matched, self._block_bytes)
            rows = rest // TOKEN_BYTES if partial else 0
            num = num_whole + (rows > 0)
            pieces.append(child.blocks[: num * ID_BYTES])
            runs.append(leading(child.runs, num))
            path.append(child)
        elif start % self._block_bytes:  # the path ends in a leaf with a tail
            if partial:
                rows = start % self._block_bytes // TOKEN_BYTES
            else:
                pieces[-1] = pieces[-1][:-ID_BYTES]
                runs.append(None)
        elif partial and node.num_children and start < limit * TOKEN_BYTES:
            child, matched = self._closest(node, data[start : limit * TOKEN_BYTES])
            if child is not None:
                rows = matched // TOKEN_BYTES
                pieces.append(child.blocks[:ID_BYTES])
                runs.append(leading(child.runs, 1))
                path.append(child)
        return bytearray().join(pieces), rows, joined(runs) if few else None, path

    # -- inserting -------------------------------------------------------------------------------------------

    def insert(
        self, tokens: Any, blocks: Any, namespace: Namespace = b"", *, retention: Retention | None = None
    ) -> InsertResult:
        """Make a computed prefix visible to others.

        The tree takes references of its own on the blocks it keeps; the caller keeps theirs. A block whose
        tokens the tree already has is a duplicate: the caller's reference moves to the tree's block, which the
        returned table names instead. This also holds for a partly filled last block that is a prefix of a
        cached one. The other way round, a fuller last block replaces a cached tail with the same leading tokens:
        the tree lets go of the tail. Counts as a use of the whole path.

        One exception keeps references from rising along a path: as long as a fork goes on with a duplicate of a
        block of this path, from the first new block on that others hold too, nothing is cached; the fork might
        share it without holding the path.

        Args:
            tokens: The tokens from position 0 on whose KV is written. An array that was matched must not have been
                changed since.
            blocks: Their `ceil(len(tokens) / block_size)` blocks, each held by the caller.
            namespace: What must be equal beside the tokens.
            retention: How long to keep the blocks of the path; for trees whose policy takes requests' word for it.

        Raises:
            InvalidRequestError: The number of blocks is wrong, one is not held by the caller, is named twice, or
                is cached under other tokens; or the policy keeps no retentions. Nothing is changed.
        """
        self.require_retention(retention)
        array = to_int64(tokens)
        given = as_block_ids(blocks)
        num_needed = -(-len(array) // self._block_size)
        if len(given) != num_needed:
            raise InvalidRequestError(
                f"{len(array)} tokens fill {num_needed} blocks of {self._block_size}, got {len(given)}"
            )
        canonical = canonical_namespace(namespace)
        if not num_needed:
            return InsertResult(given, 0, 0, 0)
        with self._pool.lock:
            result = insert_path(self, array, given, canonical, retention)
            if self._checks:
                self.check()
            return result

    # -- evicting --------------------------------------------------------------------------------------------

    def evict(self, num_blocks: int) -> int:
        """Free cached blocks that nobody holds, worst first, from the ends of the leaves.

        Returns:
            Blocks freed: exactly `num_blocks`, or all evictable ones if there are fewer.

        Raises:
            InvalidRequestError: `num_blocks` is negative.
        """
        if num_blocks < 0:
            raise InvalidRequestError(f"cannot evict {num_blocks} blocks")
        pool = self._pool
        with pool.lock:
            freed = 0
            for ids, index in self._evict(num_blocks):
                pool.drop_idle(ids, index)
                freed += len(ids)
            if self._checks:
                self.check()
            return freed

    def _evict(self, num_blocks: int) -> list[tuple[BlockIds, Index]]:
        """Cut off what `evict` is to free. The pool still takes it for cached, which the caller must change."""
        gone: list[tuple[BlockIds, Index]] = []
        self._refile_woken()
        try:
            self._policy.begin()
            self._evict_into(gone, num_blocks)
            self._policy.end()
        except (
            BaseException
        ):  # of a policy or listener, or Ctrl-C: what is out of the tree must get to the pool
            for ids, index in gone:
                self._pool.drop_idle(ids, index)
            raise
        return gone

    def _evict_into(self, gone: list[tuple[BlockIds, Index]], num_blocks: int) -> None:
        policy, pool = self._policy, self._pool
        while num_blocks:
            leaf = policy.first()
            if leaf is None:
                break
            ids = np.frombuffer(leaf.blocks[-ID_BYTES * num_blocks :], np.int32)
            last = ids.item(-1)
            if not pool.is_idle(last):
                policy.unfile(leaf)
                self._park(leaf, last)
                continue
            num = policy.num_to_cut(leaf, ids)
            if not num:
                continue
            ids = ids[len(ids) - num :]
            index: Index = trailing(leaf.runs, num) or pool.index(ids)
            num = pool.idle_suffix(ids, index)
            if num < len(ids):
                ids = ids[len(ids) - num :]
                index = pool.index(ids)
            gap = -len(leaf.edge) % self._block_bytes
            self._num_evicted_tokens += num * self._block_size - gap // TOKEN_BYTES
            policy.on_evict(ids)
            gone.append((ids, index))
            num_blocks -= num
            self._num_evicted += num
            self._cut(leaf, ids)

    def _cut(self, leaf: Node, ids: BlockIds) -> None:
        """Take its last blocks off a filed leaf: out of the tree and its order, and tell the listeners."""
        if len(ids) * ID_BYTES == len(leaf.blocks):
            self._policy.unfile(leaf)
            self._remove_leaf(leaf)
        else:
            keep = len(leaf.blocks) - len(ids) * ID_BYTES
            del leaf.edge[keep // ID_BYTES * self._block_bytes :]
            del leaf.blocks[keep:]
            leaf.runs = leading(leaf.runs, keep // ID_BYTES)
            if self._policy.eager:
                self._policy.refile(leaf, last_block(leaf))
        if self._diverged:
            self._forget_replacements(ids)
        for listener in self._listeners:
            listener.on_removed(ids)

    def _note_duplicates(self, replacing: BlockIds, replaced: BlockIds) -> None:
        """Blocks of a path, and the duplicates that the caller held in their place until now."""
        for block, duplicate in zip(replacing.tolist(), replaced.tolist(), strict=True):
            if self._pool._state.item(duplicate) != FREE:
                self._diverged.setdefault(block, set()).add(duplicate)

    def _forget_ended_duplicates(self) -> None:
        """Those that nobody holds any more. One that was handed out anew since is taken for held: that costs a hit."""
        state = self._pool._state
        for block, duplicates in list(self._diverged.items()):
            duplicates -= {duplicate for duplicate in duplicates if state.item(duplicate) == FREE}
            if not duplicates:
                del self._diverged[block]

    def _forget_replacements(self, ids: BlockIds) -> None:
        """These are no longer cached."""
        for block in ids.tolist():
            self._diverged.pop(block, None)

    def allocate(self, n: int) -> BlockIds:
        """`pool.allocate(n)`, after evicting what is missing.

        Returns:
            `int32[n]`, block ids; the caller holds one reference on each.

        Raises:
            OutOfBlocksError: Free and evictable blocks together are too few. Nothing is changed.
        """
        pool = self._pool
        with pool.lock:
            missing = n - pool.num_free
            if missing <= 0:
                return pool.allocate(n)
            if missing > pool.num_idle:
                raise OutOfBlocksError(n, pool.num_free, pool.num_idle)
            taken = self._evict(missing)
            if sum(len(ids) for ids, _ in taken) < missing:  # never a table that is too short
                for ids, index in taken:
                    pool.drop_idle(ids, index)
                raise OutOfBlocksError(n, pool.num_free)
            for ids, index in taken:
                pool.take_idle(ids, index)
            own = pool.complete(taken)
            if self._checks:
                self.check()
            return own

    def clear(self, namespace: Namespace = None) -> int:
        """Drop everything, or everything of one namespace; all or nothing.

        Args:
            namespace: None for all. (To clear only the default namespace, pass `b""`.)

        Returns:
            Blocks freed.

        Raises:
            InvalidRequestError: Somebody else still holds a block of it. Nothing is changed.
        """
        return self.clear_all(None if namespace is None else [namespace])

    def clear_all(self, namespaces: Iterable[Namespace] | None = None) -> int:
        """Drop everything of several namespaces, or of all (None); all or nothing.

        Args:
            namespaces: Which ones.

        Returns:
            Blocks freed.

        Raises:
            InvalidRequestError: Somebody else still holds a block of it. Nothing is changed.
        """
        keys = None if namespaces is None else {canonical_namespace(namespace) for namespace in namespaces}
        with self._pool.lock:
            roots = [root for root in self._roots.values() if keys is None or root.namespace in keys]
            nodes = [node for root in roots for node in below(root)]
            ids = np.frombuffer(bytearray().join([node.blocks for node in nodes]), np.int32)
            index = self._pool.index(ids)
            held = len(ids) - np.count_nonzero(get(self._pool._state, index) == IDLE)
            if held:
                raise InvalidRequestError(f"{held} cached blocks are in use: release them, then clear")
            for node in nodes:
                if node.entry is not None:
                    self._policy.unfile(node)
                self._unpark(node)
                self._num_leaves -= node.num_children == 0
            self._num_nodes -= len(nodes)
            for root in roots:
                del self._roots[root.namespace]
            if len(ids):
                self._policy.on_drop(ids)
                self._pool.drop_idle(ids, index)
                self._forget_replacements(ids)
                self._tip = -1
            for listener in self._listeners:
                if keys is None:
                    listener.on_cleared()
                elif len(ids):
                    listener.on_removed(ids)
            if self._checks:
                self.check()
            return len(ids)

    def drop_evictable(self, namespace_filter: Callable[[bytes], bool] | None = None) -> int:
        """Drop all that nobody else holds.

        Args:
            namespace_filter: Which canonical namespaces (see `canonical_namespace`) to empty; None for all.

        Returns:
            Blocks freed.
        """
        with self._pool.lock:
            self._refile_woken()
            freed = 0
            for root in list(self._roots.values()):
                if namespace_filter is not None and not namespace_filter(root.namespace):
                    continue
                leaves = [node for node in below(root) if node.num_children == 0]
                while leaves:
                    leaf = leaves.pop()
                    ids = np.frombuffer(bytearray(leaf.blocks), np.int32)
                    num = self._pool.idle_suffix(ids, self._pool.index(ids))
                    if num:
                        parent = leaf.parent
                        gone = ids[len(ids) - num :]
                        self._policy.on_drop(gone)
                        self._cut(leaf, gone)
                        self._pool.drop_idle(gone, self._pool.index(gone))
                        freed += num
                        if num == len(ids) and parent is not None and parent.entry is not None:
                            leaves.append(parent)  # it has become a leaf
            if self._checks:
                self.check()
            return freed

    def _remove_leaf(self, leaf: Node) -> None:
        parent = leaf.parent
        assert parent is not None
        self._unlink(leaf)
        leaf.parent = None
        parent.num_children -= 1
        self._num_nodes -= 1
        self._num_leaves -= 1
        if parent.num_children == 0:
            if isinstance(parent, Root):
                del self._roots[parent.namespace]
            else:
                parent.index = None
                self._num_leaves += 1
                last = last_block(parent)
                self._policy.file(parent, last)
        elif parent.num_children == 1:
            parent.index = None
            if not isinstance(parent, Root):
                self._merge(parent)

    def _park(self, leaf: Node, last: int) -> None:
        leaf.parked = True
        self._parked[last] = leaf
        self._pool.watch(last)

    def _unpark(self, leaf: Node) -> None:
        if leaf.parked:
            leaf.parked = False
            last = last_block(leaf)
            del self._parked[last]
            self._pool.unwatch(last)

    def _refile_woken(self) -> None:
        for block in self._pool.take_woken():
            leaf = self._parked.get(block)
            if leaf is not None:
                self._unpark(leaf)
                self._policy.file(leaf, block)

    # -- inspection ------------------------------------------------------------------------------------------

    def nodes(self) -> Iterator[NodeInfo]:
        """Copies of all nodes as they are when the first one is asked for, parents before children."""
        copy = copy_tree(self)
        for i in range(len(copy)):
            ids = copy.blocks_of(i)
            yield NodeInfo(
                copy.namespaces[i],
                copy.starts[i],
                copy.tokens_of(i),
                ids,
                copy.num_children[i],
                copy.parents[i],
                copy.references[ids],
                copy.num_hits[i],
                copy.used_at[i],
            )

    def content_hashes(self, tokens: Any, namespace: Namespace = b"") -> list[bytes]:
        """Chained 128-bit content addresses of the whole blocks of `tokens`, cached or not; see `ContentHasher`.

        Args:
            tokens: Any tokens.
            namespace: What must be equal beside the tokens.

        Returns:
            `len(tokens) // block_size` digests of 16 bytes.
        """
        return hashing.content_hashes(tokens, self._block_size, namespace)

    def check(self) -> None:
        """Raise `CacheCorruptionError`, with values, at the first invariant broken. For tests."""
        with self._pool.lock:
            self._pool.check()
            check_nodes(self)
            if self.num_cached_blocks != self.num_evictable_blocks + self.num_pinned_blocks:
                raise CacheCorruptionError("tree invariant 6: cached != evictable + pinned")


def _limit(array: TokenArray, max_tokens: int) -> int:
    if max_tokens < 0:
        raise InvalidRequestError(f"max_tokens must not be negative, got {max_tokens}")
    return min(len(array), int(max_tokens))
