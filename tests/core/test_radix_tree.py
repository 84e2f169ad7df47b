"""The radix tree against a model that knows nothing of edges: a dict of every cached block by its tokens."""

from __future__ import annotations

import gc
import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from radixkv.core import (
    BlockPool,
    CacheCorruptionError,
    InvalidRequestError,
    OutOfBlocksError,
    RadixTree,
    TreeListener,
    block_states,
)
from radixkv.core.eviction import LRUPolicy


class Entry:
    def __init__(self, block, last_use):
        self.block, self.last_use = block, last_use


class TreeModel:
    """Cached blocks by (namespace, all tokens up to the end of the block). A tail's tokens end inside a block."""

    def __init__(self, num_blocks, block_size):
        self.num_blocks, self.block_size = num_blocks, block_size
        self.entries: dict[tuple, Entry] = {}
        self.held: Counter[int] = Counter()  # references that are not the tree's
        self.now = 0

    def blocks_in_use(self):
        return {b for b, n in self.held.items() if n} | {e.block for e in self.entries.values()}

    def parent_of(self, tokens):
        return tokens[: (len(tokens) - 1) // self.block_size * self.block_size]

    def children(self, space, tokens):
        return [k for k in self.entries if k[0] == space and k[1] and self.parent_of(k[1]) == tokens]

    def candidates(self, space, tokens):
        """Children of the whole-block path that `tokens` starts with, by common rows with what is left."""
        start = len(tokens) // self.block_size * self.block_size
        return start, self.children(space, tokens[:start])

    def whole_path(self, space, tokens):
        path, size = [], self.block_size
        while (
            len(tokens) >= size * (len(path) + 1)
            and (space, tokens[: size * (len(path) + 1)]) in self.entries
        ):
            path.append((space, tokens[: size * (len(path) + 1)]))
        return path

    def best_tails(self, space, tokens, num_whole):
        start = num_whole * self.block_size
        best, keys = 0, []
        for key in self.children(space, tokens[:start]):
            rows = common(key[1][start:], tokens[start:])
            if rows > best:
                best, keys = rows, [key]
            elif rows == best and rows:
                keys.append(key)
        return best, keys

    def use(self, keys):
        for key in keys:
            self.entries[key].last_use = self.now

    def victims(self):
        """Keys of the evictable leaf blocks with the oldest last use."""
        inner = {(space, self.parent_of(tokens)) for space, tokens in self.entries}
        leaves = [k for k, e in self.entries.items() if k not in inner and not self.held[e.block]]
        oldest = min((self.entries[k].last_use for k in leaves), default=None)
        return [k for k in leaves if self.entries[k].last_use == oldest]

    def evict(self, num, is_free):
        """Drop what must go; `is_free` settles ties, which only siblings used by one request have."""
        done = 0
        while done < num and (victims := self.victims()):
            gone = [k for k in victims if is_free(self.entries[k].block)]
            assert gone, f"one of {[(k, self.entries[k].block) for k in victims]} should have been evicted"
            del self.entries[gone[0]]
            done += 1
        return done

    @property
    def num_evictable(self):
        return sum(not self.held[e.block] for e in self.entries.values())


def common(a, b):
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return n


# Mostly prefixes of a few sequences, and those with another end: so that most requests share something.
bases = [(0,) * 12, (0, 1) * 6, (0, 0, 0, 1, 1, 0, 1, 0, 0, 1, 1, 1)]
prefixes = st.builds(lambda base, n: base[:n], st.sampled_from(bases), st.integers(1, 12))
token_lists = st.one_of(
    prefixes,
    prefixes,
    st.builds(lambda prefix, end: (*prefix, *end)[:12], prefixes, st.lists(st.integers(0, 2), max_size=4)),
    st.lists(st.integers(0, 1), max_size=11).map(tuple),
)
namespaces = st.sampled_from([b"", "x"])


class TreeMachine(RuleBasedStateMachine):
    """Any order of calls: same hits, same blocks, same victims and same books as the model."""

    @initialize(
        num_blocks=st.integers(4, 16),
        block_size=st.integers(1, 4),
        hashing=st.sampled_from(["xxh3", "constant"]),
    )
    def start(self, num_blocks, block_size, hashing):
        self.pool = BlockPool(num_blocks)
        self.tree = RadixTree(self.pool, block_size, self.make_policy(num_blocks))
        if hashing == "constant":
            self.tree._hash = lambda data, seed: 7
        self.model = self.model_class(num_blocks, block_size)
        self.matches: list[tuple] = []
        self.diverged = set()  # blocks of the tree that were put in the place of one that a fork holds
        self.tables: list[list] = []  # [namespace, tokens, blocks]

    model_class = TreeModel

    def make_policy(self, num_blocks):
        return "lru"

    # -- steps -----------------------------------------------------------------------------------------------

    def match_both(self, space, tokens, limit, partial):
        model, size = self.model, self.model.block_size
        cut = tokens[:limit]
        path = model.whole_path(space, cut)
        rows, keys = model.best_tails(space, cut, len(path)) if partial else (0, [])
        assert (
            self.tree.match_length(tokens, space, max_tokens=limit, partial=partial)
            == len(path) * size + rows
        )
        match = self.tree.match(tokens, space, max_tokens=limit, partial=partial)
        assert match.num_tokens == len(path) * size + rows
        assert match.blocks.tolist() == [model.entries[k].block for k in path]
        if rows:
            assert match.tail is not None
            assert match.tail.num_rows == rows
            chosen = [k for k in keys if model.entries[k].block == match.tail.block]
            assert chosen, "the tail must be one of those that share most rows"
            path.append(chosen[0])
        else:
            assert match.tail is None
        if path:
            model.now += 1
            model.use(path)
        for key in path:
            model.held[model.entries[key].block] += 1
        return match

    def allocate_both(self, n):
        model = self.model
        free = model.num_blocks - len(model.blocks_in_use())
        if n > free + model.num_evictable:
            before = self.pool.refcounts
            with pytest.raises(OutOfBlocksError) as error:
                self.tree.allocate(n)
            assert (error.value.needed, error.value.free, error.value.evictable) == (
                n,
                free,
                model.num_evictable,
            )
            assert (self.pool.refcounts == before).all()
            return None
        ids = self.tree.allocate(n)
        taken = set(ids.tolist())
        model.evict(n - free, lambda b: b in taken or self.pool.refcount(b) == 0)
        for block in ids.tolist():
            assert block not in model.blocks_in_use()
            model.held[block] += 1
        return ids.tolist()

    def insert_both(self, space, tokens, given):
        """Insert; returns the table to go on with."""
        model, size = self.model, self.model.block_size
        result = self.tree.insert(tokens, given, space)
        after = result.blocks.tolist()
        cached = {block for node in self.tree.nodes() for block in node.blocks.tolist()}
        expect, used, replaced, new_blocks, new_tokens = [], [], 0, 0, 0
        fresh = []
        stopped = False
        for i, block in enumerate(given):
            key = (space, tokens[: (i + 1) * size])
            mine = key[1][i * size :]
            children = model.children(space, tokens[: i * size]) if not stopped else []
            same = [k for k in children if common(k[1][i * size :], mine) == len(mine)]
            if key in model.entries:
                same = [key]
            if stopped:
                expect.append(block)
            elif same:
                chosen = [k for k in same if model.entries[k].block == after[i]]
                assert chosen, (
                    f"block {i} should be one of {[model.entries[k].block for k in same]}, got {after[i]}"
                )
                owner = model.entries[chosen[0]].block
                used.append(chosen[0])
                expect.append(owner)
                if owner != block:
                    replaced += 1
                    model.held[owner] += 1
                    model.held[block] -= 1
                    if model.held[block]:
                        self.diverged.add(owner)
            else:
                shorter = [k for k in children if common(k[1][i * size :], mine) == len(k[1]) - i * size]
                assert len(shorter) <= 1, "two tails, one a prefix of the other"
                grown = bool(shorter) and model.entries[shorter[0]].block == block
                # Whether a fork really shares this block without holding the path, the tree need not know.
                may_stop = model.held[block] > 1 and not self.diverged.isdisjoint(expect)
                if may_stop and not grown and block not in cached:
                    stopped = True
                    expect.append(block)
                    continue
                if shorter:
                    new_tokens -= len(shorter[0][1]) - i * size
                    del model.entries[shorter[0]]
                model.entries[key] = Entry(block, 0)
                fresh.append(key)
                new_blocks += not grown
                new_tokens += len(mine)
                expect.append(block)
        if not used or model.entries[used[-1]].last_use < model.now:
            model.now += 1
        model.use(used + fresh)
        assert after == expect
        assert result.num_duplicate_blocks == replaced
        assert result.num_new_blocks == new_blocks
        assert result.num_new_tokens == new_tokens
        return after

    # -- rules -----------------------------------------------------------------------------------------------

    @rule(space=namespaces, tokens=token_lists, cut=st.integers(0, 3), partial=st.booleans())
    def match(self, space, tokens, cut, partial):
        match = self.match_both(space, tokens, max(0, len(tokens) - cut), partial)
        self.matches.append((match, match.blocks.tolist(), match.tail))

    @precondition(lambda self: self.matches)
    @rule(data=st.data())
    def release_match(self, data):
        match, blocks, tail = self.matches.pop(data.draw(st.integers(0, len(self.matches) - 1)))
        match.release()
        assert match.released
        self.model.held.subtract(blocks + ([tail.block] if tail else []))
        with pytest.raises(InvalidRequestError):
            match.release()

    @rule(space=namespaces, tokens=token_lists, keep=st.booleans(), warm=st.booleans(), partial=st.booleans())
    def request(self, space, tokens, keep, warm, partial):
        """Match (or not), allocate the rest, insert, and end or stay."""
        size = self.model.block_size
        blocks = []
        if warm:
            match = self.match_both(space, tokens, max(0, len(tokens) - 1), partial)
            blocks = match.take().tolist()
            if match.tail is not None:
                self.model.held[match.tail.block] -= 1
        own = self.allocate_both(-(-len(tokens) // size) - len(blocks))
        if own is None:
            self.pool.release(blocks)
            self.model.held.subtract(blocks)
            return
        blocks = self.insert_both(space, tokens, blocks + own)
        if keep:
            self.tables.append([space, tokens, blocks])
        else:
            self.pool.release(blocks)
            self.model.held.subtract(blocks)

    @rule(space=namespaces, tokens=token_lists, fork=st.booleans())
    def compute(self, space, tokens, fork):
        """A request that is computed, and perhaps forked, before it is inserted."""
        own = self.allocate_both(-(-len(tokens) // self.model.block_size))
        if own is not None:
            self.tables.append([space, tokens, own])
            if fork:
                self.pool.retain(own)
                self.model.held.update(own)
                self.tables.append([space, tokens, list(own)])

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), more=st.lists(st.integers(0, 1), max_size=5).map(tuple), in_place=st.booleans())
    def decode(self, data, more, in_place):
        """A kept sequence grows, in place where only the tree looks on, else by copy on write; then insert."""
        table = data.draw(st.sampled_from(self.tables))
        space, tokens, blocks = table
        size = self.model.block_size
        if not more:
            return
        copy = False
        if len(tokens) % size:
            entry = self.model.entries.get((space, tokens))
            own_tail = entry is not None and entry.block == blocks[-1]
            alone = self.model.held[blocks[-1]] == 1
            cached = any(e.block == blocks[-1] for e in self.model.entries.values())
            copy = not (alone and (not cached or (own_tail and in_place)))
        longer = tokens + more
        own = self.allocate_both(-(-len(longer) // size) - len(blocks) + copy)
        if own is None:
            return
        if copy:
            self.pool.release(blocks[-1])
            self.model.held[blocks[-1]] -= 1
            blocks = blocks[:-1]
        table[1:] = [longer, self.insert_both(space, longer, blocks + own)]

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def insert_a_part(self, data):
        """What is computed so far of a sequence, or again of one that is there."""
        table = data.draw(st.sampled_from(self.tables))
        space, tokens, blocks = table
        size = self.model.block_size
        num = data.draw(st.integers(0, len(tokens) // size))
        if num:
            table[2] = self.insert_both(space, tokens[: num * size], blocks[:num]) + blocks[num:]

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def fork(self, data):
        space, tokens, blocks = data.draw(st.sampled_from(self.tables))
        self.pool.retain(blocks)
        self.model.held.update(blocks)
        self.tables.append([space, tokens, list(blocks)])

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), insert=st.booleans())
    def end(self, data, insert):
        space, tokens, blocks = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        cached = {e.block for e in self.model.entries.values()}
        whole = len(tokens) % self.model.block_size == 0
        if insert and (whole or blocks[-1] not in cached):
            blocks = self.insert_both(space, tokens, blocks)
        self.pool.release(blocks)
        self.model.held.subtract(blocks)

    @rule(n=st.integers(0, 6))
    def evict(self, n):
        expected = min(n, self.model.num_evictable)
        assert self.tree.evict(n) == expected
        assert self.model.evict(n, lambda b: self.pool.refcount(b) == 0) == expected

    @rule(space=st.sampled_from([None, b"", "x"]))
    def clear(self, space):
        keys = [k for k in self.model.entries if space is None or k[0] == space]
        if any(self.model.held[self.model.entries[k].block] for k in keys):
            with pytest.raises(InvalidRequestError):
                self.tree.clear(space)
        else:
            assert self.tree.clear(space) == len(keys)
            for key in keys:
                del self.model.entries[key]

    @rule(only_default=st.booleans())
    def drop_evictable(self, only_default):
        keys = [
            k
            for k, e in self.model.entries.items()
            if not self.model.held[e.block] and (not only_default or k[0] == b"")
        ]
        dropped = self.tree.drop_evictable((lambda name: name == b"") if only_default else None)
        assert dropped == len(keys)
        for key in keys:
            del self.model.entries[key]

    @invariant()
    def books_balance(self):
        if not hasattr(self, "tree"):
            return
        self.tree.check()
        model, tree, size = self.model, self.tree, self.model.block_size
        entries = model.entries
        rows = {k: (len(k[1]) - 1) % size + 1 for k in entries}
        evictable = [k for k, e in entries.items() if not model.held[e.block]]
        assert self.pool.num_free == model.num_blocks - len(model.blocks_in_use())
        assert tree.num_cached_blocks == len(entries)
        assert tree.num_cached_tokens == sum(rows.values())
        assert tree.num_evictable_blocks == len(evictable)
        assert tree.num_evictable_tokens == sum(rows[k] for k in evictable)
        assert tree.num_pinned_blocks == len(entries) - len(evictable)
        assert tree.num_pinned_tokens == tree.num_cached_tokens - tree.num_evictable_tokens
        cached = {e.block for e in entries.values()}
        refs = {b: model.held[b] + (b in cached) for b in range(model.num_blocks)}
        assert self.pool.refcounts.tolist() == [refs[b] for b in range(model.num_blocks)]
        assert sum(len(node.blocks) for node in tree.nodes()) == len(entries)
        path_of = {e.block: k for k, e in entries.items()}
        for _, _, blocks in self.tables:  # whoever holds a cached block holds those before it on its path
            for i, block in enumerate(blocks):
                if block in path_of:
                    space, tokens = path_of[block]
                    assert [entries[space, tokens[: (j + 1) * size]].block for j in range(i)] == blocks[:i]

    def teardown(self):
        if not hasattr(self, "tree"):
            return
        for match, _, _ in self.matches:
            match.release()
        for _, _, blocks in self.tables:
            self.pool.release(blocks)
        self.tree.evict(self.pool.num_blocks)
        assert self.pool.num_free == self.pool.num_blocks
        assert self.tree.num_cached_tokens == self.tree.num_nodes == self.tree.num_leaves == 0
        self.tree.check()


TestTreeMachine = TreeMachine.TestCase


# -- beside the machine: what it cannot say ------------------------------------------------------------------


def make(num_blocks=32, block_size=4):
    pool = BlockPool(num_blocks)
    return pool, RadixTree(pool, block_size)


def store(tree, tokens, namespace=b""):
    """Compute everything anew, insert it, release it."""
    own = tree.allocate(-(-len(tokens) // tree.block_size))
    result = tree.insert(tokens, own, namespace)
    tree.pool.release(result.blocks)
    return result


def snapshot(tree):
    nodes = [(n.namespace, n.start, n.tokens.tolist(), n.blocks.tolist()) for n in tree.nodes()]
    return sorted(nodes), tree.pool.refcounts.tolist(), tree.num_evictable_blocks


@pytest.mark.parametrize(
    ("tokens", "blocks", "message"),
    [
        ([1, 2, 3, 4, 5], [0], "fill 2 blocks of 4, got 1"),
        ([1, 2, 3, 4], [0, 1], "fill 1 blocks of 4, got 2"),
        ([], [0], "fill 0 blocks"),
        ([7, 7, 7, 7], [31], "not held by the caller"),
        ([7, 7, 7, 7], [32], "not in"),
        ([7, 7, 7, 7], [-1], "not in"),
        ([7] * 8, [0, 0], "named twice"),
        ([7, 7, 7, 7], [2], "not held by the caller|cached already"),  # only the tree holds it
        ([7, 7, 7, 7], [3], "cached already"),
        ([1, 2, 3, 4, 7, 7, 7, 7], [2, 0], "not held by the caller"),
        ([1, 2, 3, 4, 5, 7], [0, 31], "not held by the caller"),
        ([1, 2, 3, 4, 5, 7], [0, 0], "named twice"),
        ([1, 2, 3, 4, 7, 7, 7, 7], [31, 0], "not held by the caller"),
        ([1, 2, 3, 4, -5], [0, 1], "negative"),
        ([-1, 2, 3, 4], [0], "negative"),
        ([1.5], [0], "integers"),
        ([1, 2, 3, 4], ["0"], "integers"),
    ],
)
def test_a_refused_insert_changes_nothing(tokens, blocks, message):
    pool, tree = make()
    mine = pool.allocate(2)  # 0 and 1, held by the caller
    store(tree, [1, 2, 3, 4, 5, 6])
    held = pool.allocate(1)  # 4
    assert (mine.tolist(), held.tolist()) == ([0, 1], [4])
    pool.retain(3)
    with pool.lock:
        before = snapshot(tree)
    with pytest.raises(InvalidRequestError, match=message):
        tree.insert(tokens, blocks)
    assert snapshot(tree) == before
    tree_check_without_order(tree)


def tree_check_without_order(tree):
    """The test above holds a block and not the one before it, which `check()` would rightly report."""
    tree.pool.check()


@pytest.mark.parametrize("call", ["match", "match_length"])
@pytest.mark.parametrize("tokens", [[-1], [1, 2, -3], [0.5], [[1]], "ab", None, [True]])
def test_a_look_up_of_what_is_no_tokens(call, tokens):
    _, tree = make()
    store(tree, [1, 2, 3, 4])
    with pytest.raises(InvalidRequestError):
        getattr(tree, call)(tokens)
    tree.check()
    assert tree.num_pinned_blocks == 0


def test_other_requests_that_make_no_sense():
    pool, tree = make()
    for call in (
        lambda: tree.match([1], max_tokens=-1),
        lambda: tree.match([1], namespace=5),
        lambda: tree.insert([1], pool.allocate(1), namespace=["x"]),
        lambda: tree.evict(-1),
        lambda: tree.allocate(-1),
        lambda: RadixTree(BlockPool(1), 0),
        lambda: RadixTree(BlockPool(1), 1.5),
        lambda: RadixTree(BlockPool(1), True),
    ):
        with pytest.raises(InvalidRequestError):
            call()
    with pytest.raises(InvalidRequestError, match=r"unknown eviction policy 'random': there is .*lru"):
        RadixTree(BlockPool(1), 4, policy="random")
    assert RadixTree(BlockPool(1), 4).policy == "lru"


def test_a_match_is_handed_over_or_given_back_once():
    pool, tree = make()
    store(tree, [1, 2, 3, 4, 5, 6])
    match = tree.match([1, 2, 3, 4, 5, 9])
    assert match.tail is not None
    assert pool.refcount(match.tail.block) == 2
    blocks = match.take()
    assert pool.refcount(match.tail.block) == 1
    assert match.released
    for again in (match.release, match.take, match.take_all):
        with pytest.raises(InvalidRequestError, match="already"):
            again()
    assert tree.num_pinned_blocks == 1
    pool.release(blocks)
    with tree.match([1, 2, 3, 4]) as match:
        match.release()  # leaving the block then does not release twice
    assert tree.num_pinned_blocks == 0
    tree.check()


def test_a_tail_is_replaced_by_a_fuller_one_and_survives_for_who_holds_it():
    pool, tree = make()
    store(tree, [1, 2, 3, 4, 5])
    lease = tree.match([1, 2, 3, 4, 5])
    old = lease.tail.block
    result = store(tree, [1, 2, 3, 4, 5, 6, 7])
    assert (result.num_new_blocks, result.num_duplicate_blocks, result.num_new_tokens) == (1, 1, 2)
    assert tree.num_cached_blocks == 2
    assert pool.refcount(old) == 1
    assert tree.match_length([1, 2, 3, 4, 5, 6, 7]) == 7
    lease.release()
    assert pool.refcount(old) == 0
    tree.check()


def test_tails_that_differ_live_side_by_side():
    _, tree = make()
    store(tree, [1, 2, 3, 4])
    for tail in ([5], [6, 7], [6, 8], [9, 9, 9]):
        store(tree, [1, 2, 3, 4, *tail])
    assert tree.num_cached_tokens == 4 + 1 + 2 + 2 + 3
    assert tree.match_length([1, 2, 3, 4, 6, 8, 1]) == 6
    assert tree.match_length([1, 2, 3, 4, 6, 1]) == 5
    assert store(tree, [1, 2, 3, 4, 6]).num_duplicate_blocks == 2
    store(tree, [1, 2, 3, 4, 6, 8, 8, 8, 8])  # a tail becomes whole and grows on
    assert tree.match_length([1, 2, 3, 4, 6, 8, 8, 8, 8]) == 9
    assert tree.num_cached_tokens == 4 + 1 + 2 + 5 + 3
    tree.check()


def test_a_tail_grows_within_its_block():
    pool, tree = make()
    own = pool.allocate(1)
    tree.insert([1], own)
    result = tree.insert([1, 2, 3], own)
    assert (result.num_new_blocks, result.num_duplicate_blocks, result.num_new_tokens) == (0, 0, 2)
    both = np.append(own, pool.allocate(1))
    result = tree.insert([1, 2, 3, 4, 5], both)
    assert (result.num_new_blocks, result.num_new_tokens, result.blocks.tolist()) == (1, 2, both.tolist())
    assert tree.num_cached_tokens == tree.num_pinned_tokens == 5
    pool.release(both)
    assert tree.num_evictable_tokens == 5
    tree.check()


def test_nothing_is_cached_below_a_replaced_block_that_a_fork_does_not_hold():
    """Else the fork would hold a block of a path without those before it, which may then be evicted."""
    pool, tree = make()
    a, b = pool.allocate(1), pool.allocate(3)
    tree.insert([1, 2, 3, 4], a)
    pool.retain(b[:2])  # a fork of the second sequence, made before it was inserted
    result = tree.insert(list(range(1, 13)), b)
    assert result.blocks.tolist() == [a[0], b[1], b[2]]
    assert (result.num_new_blocks, result.num_duplicate_blocks) == (0, 1)
    pool.release(result.blocks)
    pool.release(a)
    tree.check()
    assert tree.evict(5) == 1
    pool.release(b[:2])
    assert pool.num_free == pool.num_blocks


def test_direct_references_pin():
    """References that no match made count as well, without the tree being told."""
    pool, tree = make()
    own = pool.allocate(3)
    tree.insert(list(range(12)), own)
    pool.release(own)
    pool.retain(own[:2])
    assert (tree.num_pinned_blocks, tree.num_evictable_blocks) == (2, 1)
    assert tree.evict(9) == 1
    assert tree.evict(9) == 0
    pool.release(own[1])
    assert tree.evict(9) == 1
    pool.release(own[0])
    assert tree.evict(9) == 1
    tree.check()


def test_pinned_leaves_are_looked_at_once():
    """A pinned leaf is parked when it comes up, and comes back when it is released."""
    _, tree = make(64, 1)
    for i in range(20):
        store(tree, [i])
    leases = [tree.match([i]) for i in range(19)]
    assert tree.evict(5) == 1
    assert tree._policy.num_filed() == 0
    assert len(tree._parked) == 19
    leases[7].release()
    leases[3].release()
    tree.check()
    store(tree, [50])
    assert tree.evict(1) == 1
    assert tree.match_length([3]) == 0  # matched before 7
    assert tree.evict(2) == 2
    assert len(tree._parked) == 17
    tree.check()


def test_the_callers_array_is_not_kept():
    """Neither tokens nor block ids of the caller are held by the tree."""
    pool, tree = make()
    tokens, own = np.arange(8), pool.allocate(2)
    tree.insert(tokens, own)
    tokens[:] = 99
    own[:] = 30
    assert tree.match_length(range(8)) == 8
    tree.check()


def test_edges_of_every_length_are_compared_to_the_token():
    tree = RadixTree(BlockPool(4000), 4)
    tokens = np.arange(12_000)
    store(tree, tokens)
    rng = random.Random(0)
    places = [0, 1, 3, 4, 127, 128, 129, 511, 512, 513, 1023, 1024, 4095, 8191, 11_999]
    for at in places + [rng.randrange(12_000) for _ in range(200)]:
        other = tokens.copy()
        other[at] = 1_000_000
        assert tree.match_length(other) == at
        assert tree.match_length(tokens[:at]) == at
        assert tree.match_length(tokens, max_tokens=at) == at
        assert tree.match_length(other, partial=False) == at // 4 * 4


def test_the_closest_of_many_children_is_found():
    rng = np.random.default_rng(0)
    tree = RadixTree(BlockPool(5000), 6)
    stored = []
    for _ in range(2000):
        tokens = rng.integers(0, 4, 6)
        store(tree, tokens)
        stored.append(tokens)
    stored = np.array(stored)
    for _ in range(300):
        tokens = rng.integers(0, 5, 6)
        expected = int(np.cumprod(stored == tokens, axis=1).sum(axis=1).max())
        assert tree.match_length(tokens) == expected
    tree.check()


def test_big_tokens_sort_like_small_ones():
    _, tree = make(64, 2)
    values = [0, 1, 255, 256, 2**31, 2**32, 2**62, 2**63 - 1]
    for v in values:
        store(tree, [v, 7])
    for v in values:
        assert tree.match_length([v, 8]) == 1
        assert tree.match_length([v, 7, 1]) == 2
    tree.check()


def test_empty_namespaces_leave_nothing_behind():
    _, tree = make(4, 4)
    for i in range(100):
        store(tree, [1, 2, 3, 4], ("salt", str(i)))
    assert len(tree._roots) == 4
    tree.evict(4)
    assert tree._roots == {}
    assert list(tree.nodes()) == []


def test_several_namespaces_are_cleared_together_or_not_at_all():
    pool, tree = make()
    for space in ("a", "b", "c"):
        store(tree, [1, 2, 3, 4], space)
    lease = tree.match([1, 2, 3, 4], "b")
    with pytest.raises(InvalidRequestError):
        tree.clear_all(["a", "b"])
    assert tree.num_cached_blocks == 3
    assert tree.clear_all(["a", "c"]) == 2
    lease.release()
    assert tree.clear_all() == 1
    assert pool.num_free == pool.num_blocks


def test_nodes_are_copies_that_tell_everything():
    _, tree = make()
    store(tree, list(range(10)), "x")
    store(tree, [0, 1, 2, 3, 9, 9], "x")
    nodes = {tuple(n.tokens.tolist()): n for n in tree.nodes()}
    assert nodes[0, 1, 2, 3].num_children == 2
    assert nodes[9, 9].start == 4
    assert len(nodes[4, 5, 6, 7, 8, 9].blocks) == 2
    with pytest.raises(ValueError, match="read-only"):
        nodes[9, 9].tokens[0] = 1


def test_a_million_blocks():
    pool = BlockPool(1_000_000)
    tree = RadixTree(pool, 1)
    tokens = np.arange(1_000_000)
    own = pool.allocate(1_000_000)
    tree.insert(tokens, own)
    pool.release(own)
    with tree.match(tokens) as match:
        assert match.num_tokens == tree.num_pinned_blocks == 1_000_000
    branch = np.append(tokens[:500_000], [7, 7])
    match = tree.match(branch)
    extra = tree.allocate(2)
    pool.release(tree.insert(branch, np.append(match.take(), extra)).blocks)
    assert tree.evict(600_000) == 600_000
    assert tree.evict(1_000_000) == 400_000
    tree.check()


def leaf(tree):
    return tree._policy.first()


@pytest.mark.parametrize(
    "damage",
    [
        lambda t: leaf(t).blocks.__setitem__(slice(0, 4), b"\0\0\0\0"),
        lambda t: leaf(t).edge.extend(b"12345678" * 9),
        lambda t: leaf(t).edge.__delitem__(slice(-8, None)),
        lambda t: leaf(t).blocks.__delitem__(slice(0, None)),
        lambda t: setattr(leaf(t), "hash", 5),
        lambda t: setattr(leaf(t), "parked", True),
        lambda t: setattr(leaf(t), "parent", t._roots[b""]),
        lambda t: t._policy.unfile(leaf(t)),
        lambda t: t._policy.priority.__setitem__(0, -5),
        lambda t: t._policy.priority.fill(0),
        lambda t: setattr(t, "_num_nodes", 99),
        lambda t: setattr(t, "_num_leaves", 0),
        lambda t: setattr(leaf(t).parent, "num_children", 1),
        lambda t: leaf(t).parent.index.popitem(),
        lambda t: t.pool.retain(int(np.frombuffer(leaf(t).blocks, np.int32)[-1])),
        lambda t: t._roots.__setitem__(b"empty", type(t._roots[b""])(b"empty", 1)),
        lambda t: t._roots.clear(),
        lambda t: leaf(t).parent.tails.clear(),
        lambda t: leaf(t).edge.__setitem__(slice(0, 8), (9).to_bytes(8, "little")),
    ],
)
def test_the_checker_finds_damage(damage):
    _, tree = make()
    store(tree, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10])
    store(tree, [1, 2, 3, 4, 9, 6])
    store(tree, [1, 2, 3, 4, 5, 5])
    tree.match_length([1, 2, 3, 4, 5, 5, 5])
    tree.check()
    assert leaf(tree).parent.index is not None
    damage(tree)
    with pytest.raises(CacheCorruptionError):
        tree.check()


@pytest.mark.parametrize(
    "call",
    [
        lambda t: t.match([1, 2]),
        lambda t: t.evict(1),
        lambda t: t.insert([5, 6], t.pool.allocate(1)),
        lambda t: t.clear(),
        lambda t: t.drop_evictable(),
    ],
)
def test_checks_run_after_every_change_when_asked(call, monkeypatch):
    monkeypatch.setenv("RADIXKV_CHECK", "1")
    _, tree = make()
    store(tree, [1, 2, 3, 4])
    tree._num_nodes = 5
    with pytest.raises(CacheCorruptionError):
        call(tree)


def test_a_dropped_tree_is_collected():
    _, tree = make()
    store(tree, [1, 2, 3, 4])
    pool = tree.pool
    del tree
    gc.collect()
    assert pool._tree() is None


def test_runs_that_were_remembered_are_those_of_the_whole_table():
    """A table of which one block is neither matched nor new: the tail that grows in its place."""
    pool, tree = make(64, 4)
    tokens = list(range(100, 111))
    blocks = np.append(pool.allocate(4)[:2], pool.allocate(1))
    tree.insert(tokens, blocks)
    tree.match(tokens[:8]).release()  # what the insert below has, without the tail
    more = np.append(blocks, pool.allocate(2))
    tree.insert([*tokens, *range(200, 209)], more)
    tree.check()
    pool.release(more)
    assert tree.num_evictable_blocks == tree.num_cached_blocks == 5
    tree.check()


def test_a_caller_who_writes_into_a_match_harms_nobody():
    pool, tree = make(64, 4)
    store(tree, list(range(100, 140)))
    match = tree.match(list(range(100, 120)))
    blocks = match.blocks.copy()
    match.blocks[:] = match.blocks[::-1].copy()
    tree.insert(list(range(100, 120)), blocks)
    pool.release(blocks)
    tree.check()


class TestRunsOfFewBlocks:
    """The machine again, where even few blocks are looked at as runs, and short ones count as long."""

    @pytest.fixture(autouse=True)
    def small(self, monkeypatch):
        monkeypatch.setattr(block_states, "FEW", 0)
        monkeypatch.setattr(block_states, "ROW", 2)

    def test_any_order_of_calls(self):
        run_state_machine_as_test(TreeMachine)


@pytest.mark.parametrize("fork_ends", [True, False])
def test_a_block_that_a_fork_shares_behind_a_duplicate_is_not_cached_later_either(fork_ends):
    pool = BlockPool(4)
    tree = RadixTree(pool, 1)
    pool.release(tree.insert([0], pool.allocate(1)).blocks)
    fork = pool.allocate(2)
    pool.retain(fork)
    mine = tree.insert([0, 0], fork).blocks  # the fork still holds its duplicate of block 0
    assert tree.num_cached_blocks == 1
    if fork_ends:
        pool.release(fork)
    mine = np.concatenate((mine, pool.allocate(1)))
    mine = tree.insert([0, 0, 0], mine).blocks
    tree.check()
    assert tree.num_cached_blocks == (3 if fork_ends else 1)
    pool.release(mine)
    tree.check()
    assert tree.evict(3) == (3 if fork_ends else 1)
    if not fork_ends:
        pool.release(fork)
    assert pool.num_free == 4


def test_a_table_is_never_shorter_than_asked_for():
    pool, tree = make()
    store(tree, [1, 2, 3, 4, 5, 6, 7, 8])
    tree._evict = lambda missing: []  # as if what is counted as evictable were not
    with pytest.raises(OutOfBlocksError):
        tree.allocate(pool.num_free + 1)
    tree.check()


def test_a_fork_that_holds_a_duplicate_replaced_in_an_earlier_insert():
    pool = BlockPool(16)
    tree = RadixTree(pool, 1)
    owner = tree.insert([0], pool.allocate(1)).blocks
    mine = pool.allocate(2)
    fork = mine.copy()
    pool.retain(fork)
    first = tree.insert([0], mine[:1]).blocks  # the fork goes on with its duplicate
    mine = tree.insert([0, 0], np.concatenate((first, mine[1:]))).blocks
    tree.check()
    pool.release(owner)
    pool.release(mine)
    tree.check()
    assert tree.num_evictable_blocks == tree.evict(16)
    more = tree.allocate(pool.num_free)
    pool.release(more)
    pool.release(fork)
    assert pool.num_free == 16


def test_blocks_handed_out_anew_are_not_taken_for_duplicates():
    pool = BlockPool(6)
    tree = RadixTree(pool, 1)
    owner = tree.insert([0], pool.allocate(1)).blocks
    fork = pool.allocate(2)
    pool.retain(fork)
    pool.release(tree.insert([0, 0], fork).blocks)
    pool.release(fork)
    pool.release(owner)
    tree.evict(6)
    anew = pool.allocate(4)
    pool.retain(anew)
    assert tree.insert([5, 6, 7, 8], anew).num_new_blocks == 4
    tree.check()


class Angry(TreeListener):
    def on_matched(self, *_):
        raise KeyboardInterrupt

    def on_removed(self, *_):
        raise KeyboardInterrupt


def test_what_raises_in_a_listener_loses_no_block():
    pool, tree = make()
    store(tree, [1, 2, 3, 4, 5, 6, 7, 8])
    store(tree, [9, 9, 9])
    listener = Angry()
    tree.add_listener(listener)
    with pytest.raises(KeyboardInterrupt):
        tree.match([1, 2, 3, 4])
    tree.check()
    assert tree.num_pinned_blocks == 0
    for call in (lambda: tree.evict(1), lambda: tree.allocate(pool.num_free + 1)):
        cached, free = tree.num_cached_blocks, pool.num_free
        with pytest.raises(KeyboardInterrupt):
            call()
        tree.check()
        assert (tree.num_cached_blocks, pool.num_free) == (cached - 1, free + 1)


def test_a_policy_can_be_used_again_if_the_pool_refuses_the_tree():
    pool, _ = make()
    policy = LRUPolicy(pool.num_blocks)
    with pytest.raises(InvalidRequestError):
        RadixTree(pool, 4, policy)
    RadixTree(BlockPool(pool.num_blocks), 4, policy)
