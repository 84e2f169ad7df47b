"""The radix tree against a model that knows nothing of edges: a dict of every cached block by its tokens."""

from __future__ import annotations

import gc
import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from radixkv.core import (
    BlockPool,
    CacheCorruptionError,
    InvalidRequestError,
    OutOfBlocksError,
    RadixTree,
)


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
        while len(tokens) >= size * (len(path) + 1) and (space, tokens[: size * (len(path) + 1)]) in self.entries:
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


token_lists = st.lists(st.integers(0, 1), max_size=11).map(tuple)
namespaces = st.sampled_from([b"", "x"])


class TreeMachine(RuleBasedStateMachine):
    """Any order of calls: same hits, same blocks, same victims and same books as the model."""

    @initialize(
        num_blocks=st.integers(4, 16), block_size=st.integers(1, 4), hashing=st.sampled_from(["xxh3", "constant"])
    )
    def start(self, num_blocks, block_size, hashing):
        self.pool = BlockPool(num_blocks)
        self.tree = RadixTree(self.pool, block_size)
        if hashing == "constant":
            self.tree._hash = lambda data, seed: 7
        self.model = TreeModel(num_blocks, block_size)
        self.matches: list[tuple] = []
        self.tables: list[list] = []  # [namespace, tokens, blocks]

    # -- steps -----------------------------------------------------------------------------------------------

    def match_both(self, space, tokens, limit, partial):
        model, size = self.model, self.model.block_size
        cut = tokens[:limit]
        path = model.whole_path(space, cut)
        rows, keys = model.best_tails(space, cut, len(path)) if partial else (0, [])
        assert self.tree.match_length(tokens, space, max_tokens=limit, partial=partial) == len(path) * size + rows
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
            assert (error.value.needed, error.value.free, error.value.evictable) == (n, free, model.num_evictable)
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
                assert chosen, f"block {i} should be one of {[model.entries[k].block for k in same]}, got {after[i]}"
                owner = model.entries[chosen[0]].block
                used.append(chosen[0])
                expect.append(owner)
                if owner != block:
                    replaced += 1
                    model.held[owner] += 1
                    model.held[block] -= 1
            else:
                shorter = [k for k in children if common(k[1][i * size :], mine) == len(k[1]) - i * size]
                assert len(shorter) <= 1, "two tails, one a prefix of the other"
                grown = bool(shorter) and model.entries[shorter[0]].block == block
                if replaced and model.held[block] > 1 and not grown:
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

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), more=token_lists, in_place=st.booleans())
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
