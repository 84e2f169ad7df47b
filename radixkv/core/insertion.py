"""How a computed prefix gets into the tree."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from radixkv.core.block_pool import States
from radixkv.core.block_states import ID_BYTES, REFERENCE, BlockIds, Index
from radixkv.core.errors import InvalidRequestError
from radixkv.core.eviction import Retention
from radixkv.core.match import InsertResult
from radixkv.core.node import Node, Root, last_block, sort_key
from radixkv.core.tokens import TOKEN_BYTES, TokenArray, require_non_negative, token_bytes

if TYPE_CHECKING:
    from radixkv.core.radix_tree import RadixTree

# Where a sequence leaves what the tree knows; see `_place`.
_Place = tuple[
    Node,  # the last node passed whole, or the root
    Node | None,  # its child that must be split, unless nothing is left to insert; or None
    int,  # bytes that match of the edge of that child
    Node | None,  # the leaf that is to be continued in place, or None
    int,  # block at its end that is only partly filled and will be filled further or replaced, or -1
    bytearray,  # ids of the blocks of the tree that hold leading blocks of the sequence
    int,  # bytes of the sequence that those hold, and that partly filled block if there is one
]


def insert_path(
    tree: RadixTree, array: TokenArray, given: BlockIds, namespace: bytes, retention: Retention | None = None
) -> InsertResult:
    """`RadixTree.insert`, under the lock, with what it has made of its arguments."""
    pool, policy, block_bytes = tree._pool, tree._policy, tree._block_bytes
    data = token_bytes(array)
    root = tree._roots.get(namespace) or Root(namespace, tree._next_serial())
    node, child, matched, grows, old_tail, have, known = _place(tree, root, data)
    num_have = len(have) // ID_BYTES

    # Blocks of the caller that the tree has already.
    result = given
    replaced: BlockIds | None = None
    diverges = False
    last = -1
    if num_have:
        if have == given[:num_have].tobytes():
            last = given.item(num_have - 1)
            if pool.is_idle(last):  # references never rise along a path
                raise InvalidRequestError(f"block {last} is not held by the caller")
        else:
            pool.require_held(given)
            kept = np.frombuffer(have, np.int32)
            last = kept.item(-1)
            differ = np.flatnonzero(kept != given[:num_have])
            replaced, replacing = given[differ], kept[differ]
            diverges = bool((pool._state[replaced] > REFERENCE).any())  # a fork goes on with the duplicate
            result = np.concatenate((kept, given[num_have:]))

    # Blocks that are new to the tree. `same` is the tail it has already, which grows within its block.
    fresh = given[num_have:]
    num_fresh = len(fresh)
    same = int(old_tail >= 0 and num_fresh > 0 and fresh.item(0) == old_tail)
    unknown = fresh[same:] if same else fresh
    index: Index = []
    if num_fresh:
        if not tree._was_checked(array):
            require_non_negative(array[known // TOKEN_BYTES :])
        if same < num_fresh:
            index, state = pool.look_up_private(unknown)
            num_sound = _num_sound(tree, unknown, state, have, diverges)
            if num_sound < len(unknown):
                unknown = unknown[:num_sound]
                index, state = pool.look_up_private(unknown)
                num_fresh = same + len(unknown)
                fresh = fresh[:num_fresh]
    num_new = num_fresh - same
    stop = min(len(data), (num_have + num_fresh) * block_bytes)
    path = array[: stop // TOKEN_BYTES]

    # Nothing can fail from here on.
    new_use = not num_have or last != tree._tip
    if new_use:
        tree._now += 1  # else this is the request that was there last: one use, one time
    now = tree._now
    if replaced is not None:
        pool.hold(pool.index(replacing))
        policy.on_share(pool.index(replacing))
        pool.release(replaced)
        if diverges:
            tree._note_duplicates(replacing, replaced)
    if num_fresh:
        if num_new:
            pool.cache(unknown, index, state, -(stop // TOKEN_BYTES) % tree._block_size)
        policy.behind = last
        if same:
            rows = stop // TOKEN_BYTES - num_have * tree._block_size
            pool.grow(old_tail, min(rows, tree._block_size))
            policy.on_grow(old_tail, num_have, path, root.seed, now)
            policy.behind = old_tail
            if retention is not None:
                policy.retain([(old_tail, old_tail + 1)], retention)
        if num_new:
            policy.on_insert(index, num_have + same, path, root.seed, now)
            if retention is not None:
                policy.retain(index, retention)
        if grows is not None:
            leaf = grows
            _grow(tree, root, leaf, data[known:stop], fresh, -1 if same else old_tail)
        else:
            if child is not None:
                node = tree._split(root, child, matched // block_bytes)
            elif node is root:
                tree._roots[namespace] = root
            runs = index if isinstance(index, list) and not same else None
            edge, blocks = bytearray(data[known:stop]), bytearray(fresh.data)
            leaf = tree._add_child(root, node, edge, blocks, runs)
        leaf.used_at = tree._clock()
        for listener in tree._listeners:
            listener.on_stored(namespace, path, num_have, fresh, last)
    if num_have:
        # A request that matched and computes the rest: its table is often released next.
        continues = have == tree._matched[0]
        if new_use or continues or retention is not None:
            above = tree._matched[1] if continues else pool.index(np.frombuffer(have, np.int32))
            if new_use:
                policy.on_use(above, now)
            if retention is not None:
                policy.retain(above, retention)
            if policy.eager and not num_fresh and (new_use or retention is not None):
                tree._refile_tip(node if child is None else child, last)
            is_all = num_have + num_new == len(given) and result is given
            if continues and is_all and isinstance(above, list) and isinstance(index, list):
                pool.remember(given, above + index)
    tree._tip = result.item(stop // block_bytes - 1) if stop >= block_bytes else -1
    num_replaced = 0 if replaced is None else len(replaced)
    return InsertResult(result, num_new, num_replaced, (stop - known) // TOKEN_BYTES if num_fresh else 0)


def _num_sound(tree: RadixTree, unknown: BlockIds, state: States, have: bytearray, diverges: bool) -> int:
    """How many of the blocks that are new to the tree it may take over.

    A fork that still holds a duplicate in place of a block of the path does not hold the path: blocks behind it that
    this fork may share stay out of the tree, so that references never rise along a path.
    """
    if isinstance(state, int) or not (
        diverges or tree._diverged
    ):  # the caller alone holds them, or all hold all
        return len(unknown)
    shared = state > REFERENCE
    if not shared.any():
        return len(unknown)
    if not diverges:
        tree._forget_ended_duplicates()
        diverges = not tree._diverged.keys().isdisjoint(np.frombuffer(have, np.int32).tolist())
    return int(shared.argmax()) if diverges else len(unknown)


def _place(tree: RadixTree, root: Root, data: memoryview) -> _Place:
    """Where a sequence leaves what the tree knows. Changes nothing."""
    block_bytes, stop = tree._block_bytes, len(data)
    path, node, start, child, matched = tree._walk(root, data, stop)
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
            near, common = tree._closest(node, data[start:])
            if near is not None and common == stop - start:  # a tail that is a prefix
                pieces.append(near.blocks[:ID_BYTES])
                child, known = near, stop
            elif near is not None and common == len(near.edge):  # a shorter tail
                grows = near
                known += common
    old_tail = -1
    if grows is not None and known % block_bytes:
        old_tail = last_block(grows)
        if grows is node:
            pieces[-1] = pieces[-1][:-ID_BYTES]
    return node, child, matched, grows, old_tail, bytearray().join(pieces), known


def _grow(
    tree: RadixTree, root: Root, leaf: Node, more: memoryview, fresh: BlockIds, replaced_tail: int
) -> None:
    """Continue a leaf in place, behind its last token.

    Args:
        tree: The tree.
        root: Root of the leaf.
        leaf: The leaf.
        more: What follows its tokens, as bytes.
        fresh: The blocks of `more`; the first of them takes the place of the leaf's tail, if it has one.
        replaced_tail: That tail, to be let go, or -1 if there is none or it is in `fresh` itself.
    """
    tree._unpark(leaf)
    was_tail_only = len(leaf.edge) < tree._block_bytes
    parent = leaf.parent
    assert parent is not None
    key = sort_key(leaf.edge[: tree._block_bytes]) if was_tail_only and parent.index is not None else b""
    if len(leaf.edge) % tree._block_bytes:
        del leaf.blocks[-ID_BYTES:]
    if replaced_tail >= 0:
        tree._policy.on_replace(replaced_tail, fresh.item(0))
        tree._diverged.pop(replaced_tail, None)
        tree._pool.uncache(replaced_tail)
        for listener in tree._listeners:
            listener.on_removed(np.array([replaced_tail], np.int32))
    leaf.edge += more
    leaf.blocks += fresh.tobytes()
    leaf.runs = None
    if was_tail_only:
        if parent.index is not None:
            del parent.index[key]
            parent.index[sort_key(leaf.edge[: tree._block_bytes])] = leaf
        if len(leaf.edge) >= tree._block_bytes:
            assert parent.tails is not None
            del parent.tails[leaf.serial]
            tree._link(root, parent, leaf)
    if leaf.entry is None:
        tree._policy.file(leaf, last_block(leaf))
    elif tree._policy.eager:
        tree._policy.refile(leaf, last_block(leaf))
