"""The radix tree: which token prefixes are cached, and in which blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from sortedcontainers import SortedDict

from radixkv.core import hashing
from radixkv.core.block_pool import IDLE, REFERENCE, BlockIds, BlockPool, Index, as_block_ids
from radixkv.core.errors import CacheCorruptionError, InvalidRequestError, OutOfBlocksError
from radixkv.core.eviction import LeafOrder, make_policy
from radixkv.core.match import InsertResult, Match, Tail
from radixkv.core.namespace import Namespace, canonical_namespace
from radixkv.core.node import (
    ID_BYTES,
    Node,
    Root,
    below,
    children,
    common_bytes,
    common_key_bytes,
    last_block,
    sort_key,
)
from radixkv.core.tokens import TOKEN_BYTES, TokenArray, require_non_negative, to_int64, token_bytes
from radixkv.core.tree_check import check_nodes

__all__ = ["InsertResult", "Match", "NodeInfo", "RadixTree", "Tail"]

# A node left with one child is merged with it up to this length, so that a path whose branches were all evicted
# has at most one edge for each 1,024 tokens, while a merge never copies more than 16 KiB.
MERGE_BYTES = 2048 * TOKEN_BYTES


@dataclass(frozen=True)
class NodeInfo:
    """A copy of one node, for inspection.

    Attributes:
        namespace: Canonical namespace.
        start: Tokens before this edge.
        tokens: `int64[...]`, the tokens on the edge.
        blocks: `int32[ceil(len(tokens) / block_size)]`.
        num_children: 0 for a leaf.
    """

    namespace: bytes
    start: int
    tokens: TokenArray
    blocks: BlockIds
    num_children: int


class _Place(NamedTuple):
    """Where a sequence leaves what the tree knows; see `RadixTree._place`.

    Attributes:
        node: Last node passed whole, or the root.
        child: Its child that must be split, unless nothing is left to insert; or None.
        matched: Bytes that match of the edge of `child`.
        grows: The leaf that is to be continued in place, or None.
        old_tail: Block at its end that is only partly filled and will be filled further or replaced, or -1.
        have: Blocks of the tree that hold leading blocks of the sequence.
        known: Bytes of the sequence that those hold, and `old_tail` if it is one.
    """

    node: Node
    child: Node | None
    matched: int
    grows: Node | None
    old_tail: int
    have: BlockIds
    known: int


class RadixTree:
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
    5. Every leaf is either in the eviction order, under a priority not above its own, or parked under its
       last block, which others hold and the pool watches.
    6. `num_cached_* == num_evictable_* + num_pinned_*`, in blocks and in tokens.

    Costs: `match` and `insert` are one hash and one memcmp for each edge passed, and a constant number of numpy
    calls; `evict` is logarithmic in the number of leaves for each leaf touched. Every method may be called
    from any thread; the lock is the pool's.

    Args:
        pool: The pool of the blocks; a pool takes one tree.
        block_size: Tokens in a block.
        policy: Who is evicted first; only "lru" exists.
    """

    def __init__(self, pool: BlockPool, block_size: int = 16, policy: str = "lru") -> None:
        if isinstance(block_size, bool) or not isinstance(block_size, (int, np.integer)) or block_size < 1:
            raise InvalidRequestError(f"block_size must be an integer of at least 1, got {block_size!r}")
        self._policy = make_policy(policy, pool.num_blocks)
        pool.attach_tree(self, int(block_size))
        self._pool = pool
        self._block_size = int(block_size)
        self._block_bytes = self._block_size * TOKEN_BYTES
        self._hash: Callable[[Any, int], int] = hashing.block_hash
        self._roots: dict[bytes, Root] = {}
        self._order = LeafOrder()
        self._parked: dict[int, Node] = {}  # by last block
        self._now = 0
        self._serial = 0
        self._num_nodes = self._num_leaves = 0
        self._num_evicted = 0
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
        """Blocks that `evict` freed since the tree was made."""
        return self._num_evicted

    # -- matching --------------------------------------------------------------------------------------------

    def match(
        self, tokens: Any, namespace: Namespace = b"", *, max_tokens: int | None = None, partial: bool = True
    ) -> Match:
        """The longest cached prefix, held: one reference on each of its blocks.

        Counts as a use of the matched blocks. No node is split.

        Args:
            tokens: The request; an int64 array is not copied.
            namespace: What must be equal beside the tokens.
            max_tokens: Upper limit of the hit, such as `len(tokens) - 1` where the last token must be computed.
            partial: Match token by token; else whole blocks only, without a tail.

        Raises:
            InvalidRequestError: Tokens, namespace or limit make no sense.
        """
        array = to_int64(tokens)
        limit = _limit(array, max_tokens)
        with self._pool.lock:
            ids, rows = self._find(array, canonical_namespace(namespace), limit, partial)
            num_whole = len(ids) // ID_BYTES - (rows > 0)
            num_tokens = num_whole * self._block_size + rows
            require_non_negative(array[num_tokens:])  # what is cached was checked when it was inserted
            if not ids:
                return Match(self, 0, np.empty(0, np.int32), None)
            held = np.frombuffer(ids, np.int32)
            index = self._pool.index(held)
            self._pool.hold(index)
            self._now += 1
            self._policy.on_use(index, self._now)
            if self._checks:
                self.check()
            return Match(self, num_tokens, held, Tail(held.item(-1), rows) if rows else None)

    def match_length(
        self, tokens: Any, namespace: Namespace = b"", *, max_tokens: int | None = None, partial: bool = True
    ) -> int:
        """How many leading tokens `match` would find. Changes nothing, not even recency."""
        array = to_int64(tokens)
        limit = _limit(array, max_tokens)
        with self._pool.lock:
            ids, rows = self._find(array, canonical_namespace(namespace), limit, partial)
        num_tokens = (len(ids) // ID_BYTES - (rows > 0)) * self._block_size + rows
        require_non_negative(array[num_tokens:])
        return num_tokens

    def _find(self, array: TokenArray, namespace: bytes, limit: int, partial: bool) -> tuple[bytearray, int]:
        """Ids (int32, as bytes) that match, and the rows of the last one if it is a tail, else 0."""
        root = self._roots.get(namespace)
        if root is None or limit < (1 if partial else self._block_size):
            return bytearray(), 0
        data = token_bytes(array)
        path, node, start, child, matched = self._walk(root, data, limit * TOKEN_BYTES)
        pieces = [n.blocks for n in path]
        rows = 0
        if child is not None:
            num_whole, rest = divmod(matched, self._block_bytes)
            rows = rest // TOKEN_BYTES if partial else 0
            pieces.append(child.blocks[: (num_whole + (rows > 0)) * ID_BYTES])
        elif start % self._block_bytes:  # the path ends in a leaf with a tail
            if partial:
                rows = start % self._block_bytes // TOKEN_BYTES
            else:
                pieces[-1] = pieces[-1][:-ID_BYTES]
        elif partial and node.num_children and start < limit * TOKEN_BYTES:
            child, matched = self._closest(node, data[start : limit * TOKEN_BYTES])
            if child is not None:
                rows = matched // TOKEN_BYTES
                pieces.append(child.blocks[:ID_BYTES])
        return bytearray().join(pieces), rows

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
                    return path, node, start, child, common_bytes(edge, data[start:stop])
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

    # -- inserting -------------------------------------------------------------------------------------------

    def insert(self, tokens: Any, blocks: Any, namespace: Namespace = b"") -> InsertResult:
        """Make a computed prefix visible to others.

        The tree takes references of its own on the blocks it keeps; the caller keeps theirs. A block whose
        tokens the tree already has is a duplicate: the caller's reference moves to the tree's block, which the
        returned table names instead. This also holds for a partly filled last block that is a prefix of a
        cached one. The other way round, a fuller last block replaces a cached tail with the same leading tokens:
        the tree lets go of the tail. Counts as a use of the whole path.

        One exception keeps references from rising along a path: if some block was replaced, then from the first
        new block on that others (a fork) hold too, nothing is cached; they do not hold the replacement.

        Args:
            tokens: The tokens from position 0 on whose KV is written.
            blocks: Their `ceil(len(tokens) / block_size)` blocks, each held by the caller.
            namespace: What must be equal beside the tokens.

        Raises:
            InvalidRequestError: The number of blocks is wrong, one is not held by the caller, is named twice, or
                is cached under other tokens. Nothing is changed.
        """
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
            result = self._insert(array, given, canonical)
            if self._checks:
                self.check()
            return result

    def _insert(self, array: TokenArray, given: BlockIds, namespace: bytes) -> InsertResult:
        pool, block_bytes = self._pool, self._block_bytes
        data = token_bytes(array)
        root = self._roots.get(namespace) or Root(namespace, self._next_serial())
        place = self._place(root, data)
        have, known = place.have, place.known
        num_have = len(have)

        # Blocks of the caller that the tree has already.
        result = given
        replaced = have[:0]
        if num_have and have.tobytes() != given[:num_have].tobytes():
            pool.require_held(given)
            differ = np.flatnonzero(have != given[:num_have])
            replaced, replacing = given[differ], have[differ]
            result = np.concatenate((have, given[num_have:]))
        elif num_have and pool.is_idle(have.item(-1)):  # references never rise along a path
            raise InvalidRequestError(f"block {have.item(-1)} is not held by the caller")

        # Blocks that are new to the tree. `same` is the tail it has already, which grows within its block.
        fresh = given[num_have:]
        old_tail = place.old_tail
        same = int(old_tail >= 0 and len(fresh) > 0 and fresh.item(0) == old_tail)
        unknown = fresh[same:]
        if len(fresh):
            require_non_negative(array[known // TOKEN_BYTES :])
        if len(unknown):
            index, state = pool.look_up_private(unknown)
            if len(replaced) and not isinstance(state, int) and np.maximum.reduce(state) > REFERENCE:
                unknown = unknown[: int((state > REFERENCE).argmax())]
                index, state = pool.index(unknown), state[: len(unknown)]
                fresh = fresh[: same + len(unknown)]
        stop = min(len(data), (num_have + len(fresh)) * block_bytes)

        # Nothing can fail from here on.
        if not num_have or self._policy.priority.item(have.item(-1)) < self._now:
            self._now += 1  # else this is the request that matched last: one use, one time
        if len(replaced):
            pool.hold(pool.index(replacing))
            pool.release(replaced)
        if len(fresh):
            rows_of_last = (stop // TOKEN_BYTES - 1) % self._block_size + 1
            if same:
                pool.grow(old_tail, rows_of_last if len(fresh) == 1 else self._block_size)
                self._policy.on_use(slice(old_tail, old_tail + 1), self._now)
            if len(unknown):
                pool.cache(unknown, index, state, rows_of_last)
                self._policy.on_insert(index, self._now)
            self._roots[namespace] = root
            if place.grows is not None:
                self._grow(root, place.grows, data[known:stop], fresh, -1 if same else old_tail)
            else:
                parent = place.node
                if place.child is not None:
                    parent = self._split(root, place.child, place.matched // block_bytes)
                self._add_child(root, parent, bytearray(data[known:stop]), bytearray(fresh.tobytes()))
        if num_have and self._policy.priority.item(have.item(-1)) < self._now:
            self._policy.on_use(pool.index(have), self._now)
        num_new_tokens = (stop - known) // TOKEN_BYTES if len(fresh) else 0
        return InsertResult(result, len(unknown), len(replaced), num_new_tokens)

    def _place(self, root: Root, data: memoryview) -> _Place:
        """Where a sequence leaves what the tree knows. Changes nothing."""
        block_bytes, stop = self._block_bytes, len(data)
        path, node, start, child, matched = self._walk(root, data, stop)
        pieces = [n.blocks for n in path]
        known = start + matched
        grows: Node | None = None
        if child is not None:
            # If the sequence ends here, its tail is a prefix of a cached block and covered too.
            num = matched // block_bytes
            if known == stop:
                num = -(-matched // block_bytes)
            else:
                known = start + num * block_bytes
            pieces.append(child.blocks[: num * ID_BYTES])
        elif known < stop:
            if not node.num_children and node is not root:
                grows = node
            elif node.tails or (node.num_children and stop - start < block_bytes):
                near, common = self._closest(node, data[start:])
                if near is not None and common == stop - start:  # a tail that is a prefix
                    pieces.append(near.blocks[:ID_BYTES])
                    known = stop
                elif near is not None and common == len(near.edge):  # a shorter tail
                    grows = near
                    known += common
        old_tail = -1
        if grows is not None and known % block_bytes:
            old_tail = last_block(grows)
            if grows is node:
                pieces[-1] = pieces[-1][:-ID_BYTES]
        have = np.frombuffer(bytearray().join(pieces), np.int32)
        return _Place(node, child, matched, grows, old_tail, have, known)

    def _grow(self, root: Root, leaf: Node, more: memoryview, fresh: BlockIds, replaced_tail: int) -> None:
        """Continue a leaf in place, behind its last token.

        Args:
            root: Root of the leaf.
            leaf: The leaf.
            more: What follows its tokens, as bytes.
            fresh: The blocks of `more`; the first of them takes the place of the leaf's tail, if it has one.
            replaced_tail: That tail, to be let go, or -1 if there is none or it is in `fresh` itself.
        """
        self._unpark(leaf)
        was_tail_only = len(leaf.edge) < self._block_bytes
        parent = leaf.parent
        assert parent is not None
        key = sort_key(leaf.edge[: self._block_bytes]) if was_tail_only and parent.index is not None else b""
        if len(leaf.edge) % self._block_bytes:
            del leaf.blocks[-ID_BYTES:]
        if replaced_tail >= 0:
            self._pool.uncache(replaced_tail)
        leaf.edge += more
        leaf.blocks += fresh.tobytes()
        if was_tail_only:
            if parent.index is not None:
                del parent.index[key]
                parent.index[sort_key(leaf.edge[: self._block_bytes])] = leaf
            if len(leaf.edge) >= self._block_bytes:
                assert parent.tails is not None
                del parent.tails[leaf.serial]
                self._link(root, parent, leaf)
        if leaf.entry is None:
            self._order.add(leaf, self._now)

    def _add_child(self, root: Root, parent: Node, edge: bytearray, blocks: bytearray) -> None:
        child = Node(parent, edge, blocks, self._next_serial())
        self._link(root, parent, child)
        parent.num_children += 1
        if parent.index is not None:
            parent.index[sort_key(edge[: self._block_bytes])] = child
        self._num_nodes += 1
        self._num_leaves += 1
        self._order.add(child, self._now)

    def _split(self, root: Root, node: Node, num_blocks: int) -> Node:
        """Cut a node after `num_blocks` of its blocks; the new upper part. The lower part stays `node`."""
        at = num_blocks * self._block_bytes
        upper = Node(node.parent, node.edge[:at], node.blocks[: num_blocks * ID_BYTES], self._next_serial())
        self._replace_child(node, upper)
        node.edge = node.edge[at:]  # a copy: pieces must not hold the whole
        node.blocks = node.blocks[num_blocks * ID_BYTES :]
        node.parent = upper
        upper.num_children = 1
        self._link(root, upper, node)
        self._num_nodes += 1
        return upper

    # -- evicting --------------------------------------------------------------------------------------------

    def evict(self, num_blocks: int) -> int:
        """Free cached blocks that nobody holds, worst first, from the ends of the leaves.

        Returns:
            Blocks freed: exactly `num_blocks`, or all evictable ones if there are fewer.
        """
        if num_blocks < 0:
            raise InvalidRequestError(f"cannot evict {num_blocks} blocks")
        with self._pool.lock:
            self._refile_woken()
            order, priority, pool = self._order, self._policy.priority, self._pool
            freed = 0
            while freed < num_blocks and len(order):
                leaf = order.first()
                ids = np.frombuffer(leaf.blocks[-ID_BYTES * (num_blocks - freed) :], np.int32)
                last = ids.item(-1)
                if not pool.is_idle(last):
                    order.pop_first()
                    self._park(leaf, last)
                    continue
                bound = order.second_priority()
                if priority.item(last) > bound:
                    order.pop_first()
                    order.add(leaf, priority.item(last))
                    continue
                # The leaf stays first while its last block is not above the second leaf: all may go that are
                # not, up to the first that may not. Priorities are monotone along an edge.
                if priority.item(ids.item(0)) > bound:
                    ids = ids[len(ids) - int((priority[ids] <= bound)[::-1].argmin()) :]
                index = pool.index(ids)
                num = pool.idle_suffix(ids, index)
                if num < len(ids):
                    ids = ids[len(ids) - num :]
                    index = pool.index(ids)
                if len(ids) * ID_BYTES == len(leaf.blocks):
                    order.pop_first()
                self._trim(leaf, ids, index)
                freed += len(ids)
            self._num_evicted += freed
            if self._checks:
                self.check()
            return freed

    def allocate(self, n: int) -> BlockIds:
        """`pool.allocate(n)`, after evicting what is missing.

        Raises:
            OutOfBlocksError: Free and evictable blocks together are too few. Nothing is changed.
        """
        with self._pool.lock:
            missing = n - self._pool.num_free
            if missing > 0:
                if missing > self.num_evictable_blocks:
                    raise OutOfBlocksError(n, self._pool.num_free, self.num_evictable_blocks)
                self.evict(missing)
            return self._pool.allocate(n)

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
            held = len(ids) - np.count_nonzero(self._pool._state[index] == IDLE)
            if held:
                raise InvalidRequestError(f"{held} cached blocks are in use: release them, then clear")
            for node in nodes:
                if node.entry is not None:
                    self._order.remove(node)
                self._unpark(node)
                self._num_leaves -= node.num_children == 0
            self._num_nodes -= len(nodes)
            for root in roots:
                del self._roots[root.namespace]
            if len(ids):
                self._pool.drop_idle(ids, index)
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
                        if num == len(ids):
                            self._order.remove(leaf)
                        self._trim(leaf, gone, self._pool.index(gone))
                        freed += num
                        if num == len(ids) and parent is not None and parent.entry is not None:
                            leaves.append(parent)  # it has become a leaf
            if self._checks:
                self.check()
            return freed

    def _trim(self, leaf: Node, ids: BlockIds, index: Index) -> None:
        """Free the last blocks of a leaf, `ids`; a leaf that has no others is out of the order, and goes too."""
        keep = len(leaf.blocks) - len(ids) * ID_BYTES
        keep_bytes = keep // ID_BYTES * self._block_bytes
        if keep:
            # Its entry in the order is now too low at worst, and will be corrected when it comes up.
            del leaf.edge[keep_bytes:]
            del leaf.blocks[keep:]
        else:
            self._remove_leaf(leaf)
        self._pool.drop_idle(ids, index)

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
                self._order.add(parent, self._policy.priority.item(last))
        elif parent.num_children == 1:
            parent.index = None
            if not isinstance(parent, Root):
                self._merge(parent)

    def _merge(self, node: Node) -> None:
        """Let the only child of a node absorb it, if together they are short."""
        child = self._only_child(node)
        if len(node.edge) + len(child.edge) > MERGE_BYTES:
            return
        child.edge = node.edge + child.edge
        child.blocks = node.blocks + child.blocks
        child.parent = node.parent
        self._replace_child(node, child)
        node.parent = None
        self._num_nodes -= 1

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
                self._order.add(leaf, self._policy.priority.item(block))

    # -- links between nodes ---------------------------------------------------------------------------------

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

    # -- inspection ------------------------------------------------------------------------------------------

    def nodes(self) -> Iterator[NodeInfo]:
        """Copies of all nodes, parents before children. Meant for inspection while nobody changes the tree."""
        for root in list(self._roots.values()):
            todo = [(child, 0) for child in children(root)]
            while todo:
                node, start = todo.pop()
                tokens = np.frombuffer(bytes(node.edge), np.int64)
                ids = np.frombuffer(bytes(node.blocks), np.int32)
                yield NodeInfo(root.namespace, start, tokens, ids, node.num_children)
                todo += [(child, start + len(tokens)) for child in children(node)]

    def content_hashes(self, tokens: Any, namespace: Namespace = b"") -> list[bytes]:
        """Chained 128-bit content addresses of the whole blocks of `tokens`; see `ContentHasher`."""
        return hashing.content_hashes(tokens, self._block_size, namespace)

    def check(self) -> None:
        """Raise `CacheCorruptionError`, with values, at the first invariant broken. For tests."""
        with self._pool.lock:
            self._pool.check()
            check_nodes(self)
            if self.num_cached_blocks != self.num_evictable_blocks + self.num_pinned_blocks:
                raise CacheCorruptionError("tree invariant 6: cached != evictable + pinned")


def _limit(array: TokenArray, max_tokens: int | None) -> int:
    if max_tokens is None:
        return len(array)
    if max_tokens < 0:
        raise InvalidRequestError(f"max_tokens must not be negative, got {max_tokens}")
    return min(len(array), int(max_tokens))
