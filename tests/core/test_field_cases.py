"""The field cases on trees, locks, releases, matching, hashes, namespaces, tails, recency, depth and memory.

Each test is named for its case. `check()` runs after every change (RADIXKV_CHECK=1).
"""

from __future__ import annotations

import gc
import itertools
import sys
import threading
import time
import weakref

import numpy as np
import pytest

from radixkv.core import (
    BlockPool,
    BlockTable,
    ContentHasher,
    InvalidRequestError,
    OutOfBlocksError,
    RadixTree,
    hashing,
)


@pytest.fixture(autouse=True)
def _check_after_every_change(monkeypatch, request):
    if "big" not in request.keywords and not getattr(request.function, "big", False):
        monkeypatch.setenv("RADIXKV_CHECK", "1")


def big(test):
    """Without `check()` after every change, which would take minutes."""
    test.big = True
    return test


def make(num_blocks, block_size):
    pool = BlockPool(num_blocks)
    return pool, RadixTree(pool, block_size)


def store(tree, tokens, namespace=b"", keep=False):
    """A whole request: match, allocate, insert, release. Returns the table (held if `keep`)."""
    tokens = list(tokens)
    match = tree.match(tokens, namespace, partial=False)
    num = -(-len(tokens) // tree.block_size)
    try:
        own = tree.allocate(num - len(match.blocks))
    except OutOfBlocksError:
        match.release()
        raise
    blocks = tree.insert(tokens, np.concatenate((match.take(), own)), namespace).blocks
    if not keep:
        tree.pool.release(blocks)
    return blocks.tolist()


def hit(tree, tokens, namespace=b"", **limits):
    """How many tokens match, by a real match."""
    with tree.match(list(tokens), namespace, **limits) as match:
        return match.num_tokens


def balanced(tree, num_private=0):
    pool = tree.pool
    parts = (pool.num_free, tree.num_evictable_blocks, tree.num_pinned_blocks, num_private)
    assert min(parts) >= 0
    assert sum(parts) == pool.num_blocks
    tree.check()


def test_fc01_a_split_keeps_the_books_balanced():
    pool, tree = make(8, 4)
    store(tree, range(1, 13))
    assert tree.num_cached_blocks == 3
    store(tree, [*range(1, 9), 51, 52, 53, 54])
    assert tree.num_cached_blocks == 4
    balanced(tree)
    lease = tree.match(range(1, 13))
    assert (tree.num_pinned_blocks, tree.num_evictable_blocks) == (3, 1)
    balanced(tree)
    lease.release()
    assert tree.num_evictable_blocks == 4
    before = pool.num_free
    assert tree.evict(100) == 4
    assert pool.num_free - before == 4
    assert tree.num_cached_blocks == 0
    balanced(tree)


def test_fc02_a_partial_match_pins_only_what_matched():
    pool, tree = make(16, 4)
    store(tree, range(1, 33))
    second = [*range(1, 21), 99, 98, 97, 96]
    lease = tree.match(second)
    assert lease.num_tokens == 20
    assert tree.num_pinned_blocks == 5
    assert tree.evict(100) == 3
    balanced(tree)
    store(tree, second)
    lease.release()
    assert tree.num_pinned_blocks == 0
    assert tree.num_evictable_blocks == tree.num_cached_blocks == 6
    assert tree.evict(100) == 6
    assert tree.num_cached_blocks == 0
    assert pool.num_free == 16


def test_fc03_a_parent_never_goes_before_a_child():
    _, tree = make(16, 2)
    chain = [1, 2, 3, 4, 5, 6]
    store(tree, chain)
    store(tree, [1, 2, 9, 9])  # so that X, Y and Z are nodes of their own
    store(tree, [1, 2, 3, 4, 9, 9])
    lease = tree.match(chain)
    assert tree.evict(100) == 2  # the branches, nothing of the path
    assert hit(tree, chain) == 6
    assert tree.evict(100) == 0
    lease.release()
    assert tree.evict(100) == 3


def test_fc04_eviction_does_what_it_was_asked():
    _, tree = make(64, 4)
    for i in range(10):
        store(tree, range(100 * i, 100 * i + 16))
    assert tree.evict(4) == 4
    leases = [tree.match(range(100 * i, 100 * i + 16)) for i in range(10)]
    assert tree.evict(1) == 0
    assert tree.num_evictable_blocks == 0
    leases[3].release()
    assert tree.evict(1) == 1
    balanced(tree)


def test_fc05_a_late_duplicate():
    pool, tree = make(10, 4)
    prompt = list(range(16))
    a, b = pool.allocate(4), pool.allocate(4)
    first = tree.insert(prompt, a)
    assert first.blocks.tolist() == a.tolist()
    second = tree.insert(prompt, b)
    assert second.blocks.tolist() == a.tolist()
    assert (second.num_new_blocks, second.num_duplicate_blocks, second.num_new_tokens) == (0, 4, 0)
    assert pool.refcounts[b].tolist() == [0] * 4  # freed once
    assert pool.refcounts[a].tolist() == [3] * 4
    assert not set(pool.allocate(6).tolist()) & set(a.tolist())
    pool.release(first.blocks)
    pool.release(second.blocks)
    balanced(tree, num_private=6)


def test_fc06_two_copies_of_one_prefix_made_in_the_same_step():
    pool, tree = make(8, 4)
    shared = list(range(8))
    a, b = pool.allocate(3), pool.allocate(3)
    table_a = tree.insert([*shared, 20, 21, 22, 23], a).blocks
    table_b = tree.insert([*shared, 30, 31, 32, 33], b).blocks
    assert table_b.tolist() == [*a[:2].tolist(), b[2]]
    pool.release(table_a)
    assert tree.evict(1) == 1
    lease = tree.match(shared)
    assert lease.blocks.tolist() == a[:2].tolist()
    pool.release(table_b)
    lease.release()
    assert tree.evict(100) == 3
    assert pool.num_free == 8


def test_fc07_the_same_block_named_twice_in_one_release():
    pool = BlockPool(8)
    pool.allocate(8)
    with pytest.raises(InvalidRequestError):
        pool.release([7, 3, 7])  # one reference is held
    assert pool.num_free == 0
    pool.retain([7])
    pool.release([7, 3, 7])
    assert pool.num_free == 2
    with pytest.raises(InvalidRequestError):
        pool.release(7)
    assert pool.num_free == 2
    pool.check()
    # Token ranges 0..4 and 5..11 of one request at 8 tokens a block: the shared block is released once.
    table = BlockTable(pool, 8)
    table.append(12)
    table.truncate(5)
    assert len(table) == 1
    table.release()
    assert pool.num_free == 2
    with pytest.raises(InvalidRequestError):
        table.release()


def test_fc08_unlocked_hits_are_not_spare_room():
    pool, tree = make(6, 2)
    prefix = [1, 2, 3, 4, 5, 6]
    store(tree, prefix)
    # (a) The hit is held before room is made, so it cannot be taken for room.
    with tree.match(prefix) as lease:
        with pytest.raises(OutOfBlocksError) as error:
            tree.allocate(4)
        assert (error.value.needed, error.value.free, error.value.evictable) == (4, 3, 0)
        assert len(lease.blocks) == 3
    assert tree.num_evictable_blocks == 3
    assert hit(tree, prefix) == 6
    # (b)
    with tree.match(prefix) as lease:
        own = tree.allocate(3)
        assert not set(own.tolist()) & set(lease.blocks.tolist())
        assert tree.num_cached_blocks == 3
        pool.release(own)
    balanced(tree)


@pytest.mark.parametrize("value", [0, 7, 2**64 - 1])
def test_fc09_forced_collision(value, monkeypatch):
    monkeypatch.setattr(hashing, "block_hash", lambda data, seed: value)
    _, tree = make(32, 4)
    first = store(tree, range(1, 9))
    assert hit(tree, range(11, 19)) == 0
    second = store(tree, range(11, 19))
    third = store(tree, [*range(11, 15), *range(31, 35)])
    for tokens, blocks in ((range(1, 9), first), (range(11, 19), second)):
        with tree.match(tokens) as match:
            assert match.blocks.tolist() == blocks
    assert third[0] == second[0]
    balanced(tree)
    for _ in range(5):  # every position in the chain of collisions is unlinked at some time
        tree.evict(1)
        balanced(tree)
    assert tree.num_cached_blocks == 0


def test_fc10_tagged_namespace_fields():
    pairs = [
        (("adapter", "x"), ("salt", "x")),
        (("adapter", "x", None), (None, "x", "adapter")),
        (("tenant", "ab", "user", "c"), ("tenant", "a", "user", "bc")),
        ("a", b"a"),
        ("", None),
        ((), None),
        (("a",), "a"),
        ((("a",), "b"), ("a", ("b",))),
    ]
    for one, other in pairs:
        _, tree = make(8, 4)
        store(tree, range(8), one)
        assert hit(tree, range(8), other) == 0
        assert hit(tree, range(8), one) == 8
    _, tree = make(8, 4)
    store(tree, range(8), None)
    assert hit(tree, range(8), b"") == 8


@pytest.mark.parametrize(("partial", "expected"), [(True, 11), (False, 8)])
def test_fc13_the_whole_prompt_is_in_the_cache(partial, expected):
    _, tree = make(8, 4)
    store(tree, range(12))
    assert hit(tree, range(12), max_tokens=11, partial=partial) == expected
    assert hit(tree, range(13), max_tokens=12, partial=partial) == 12


@pytest.mark.parametrize(("block_size", "whole"), [(1, 84), (16, 80)])
def test_fc14_how_much_of_a_finished_answer_can_be_reused(block_size, whole):
    _, tree = make(200, block_size)
    answered = list(range(85))
    store(tree, answered[:84])  # the last sampled token was never run
    follow_up = answered + list(range(500, 530))
    assert hit(tree, follow_up, max_tokens=len(follow_up) - 1, partial=False) == whole
    assert hit(tree, follow_up, max_tokens=len(follow_up) - 1) == 84


def test_fc15_shorter_than_one_block():
    pool, tree = make(8, 4)
    store(tree, range(1, 9))
    assert hit(tree, [1, 2, 3], partial=False) == 0
    assert hit(tree, [1, 2, 3]) == 3
    empty = tree.insert([], [])
    assert (empty.blocks.tolist(), empty.num_new_blocks) == ([], 0)
    nodes = tree.num_nodes
    store(tree, [1, 2, 3])  # a tail that says nothing new
    assert tree.num_nodes == nodes
    assert tree.num_pinned_blocks == 0
    assert hit(tree, range(1, 9), max_tokens=7, partial=False) == 4
    assert hit(tree, range(1, 9), max_tokens=7) == 7
    assert hit(tree, [], max_tokens=0) == 0
    tree.evict(100)
    assert tree.num_cached_blocks == 0
    assert pool.num_free == 8


def test_fc17_one_token_prompts():
    _, tree = make(4, 1)
    store(tree, [7])
    assert hit(tree, [7, 8, 9]) == 1
    assert hit(tree, [7], max_tokens=0) == 0
    _, tree = make(4, 4)
    store(tree, [7])
    assert hit(tree, [7, 8, 9], partial=False) == 0
    assert hit(tree, [7, 8, 9]) == 1  # token by token, more than the case asks for
    assert hit(tree, [7], max_tokens=0) == 0


def test_fc20_resume_after_a_pause():
    pool, tree = make(16, 16)
    tokens = list(range(50))
    table = BlockTable(pool, 16)
    table.append(50)
    table.replace(tree.insert(tokens, table.blocks).blocks)
    table.release()
    assert hit(tree, tokens, max_tokens=49, partial=False) == 48
    resumed = BlockTable.adopt(tree.match(tokens, max_tokens=49))
    assert resumed.num_tokens == 49
    copies = resumed.append(1, tree.allocate)
    assert [c.num_rows for c in copies] == [1]
    resumed.release()
    balanced(tree)


@big
def test_fc24_a_deep_chain():
    pool, tree = make(6000, 1)
    tokens = np.arange(6000)
    for n in range(1, 6001):
        store_array_blocks(tree, tokens[:n])
    assert tree.num_cached_blocks == 6000
    assert tree.num_nodes == 1  # a leaf that is continued grows
    assert tree.evict(10_000) == 6000

    pool, tree = make(12_000, 1)
    deep_chain(tree, tokens)
    assert tree.num_nodes == 11_999
    assert tree.num_cached_blocks == 11_999
    lease = tree.match(tokens)
    assert lease.num_tokens == tree.num_pinned_blocks == 6000
    tree.check()
    assert sum(len(node.blocks) for node in tree.nodes()) == 11_999
    lease.release()
    assert tree.evict(4000) == 4000
    tree.check()
    assert tree.evict(100_000) == 7999
    assert pool.num_free == 12_000
    deep_chain(tree, tokens)
    assert tree.drop_evictable() == 11_999
    deep_chain(tree, tokens)
    assert tree.clear() == 11_999
    assert pool.num_free == 12_000
    tree.check()


def deep_chain(tree, tokens):
    """One edge for each token, with a branch at each."""
    store_array_blocks(tree, tokens)
    for n in range(len(tokens) - 1, 0, -1):  # from the deep end, so that few edges are passed each time
        store_array_blocks(tree, np.append(tokens[:n], [1_000_000]))


@big
def test_fc24_a_deep_tree_can_be_dropped():
    """Neither reference counting nor the collector may recurse along the chain."""
    _, tree = make(60_000, 1)
    deep_chain(tree, np.arange(20_000))
    gone = weakref.ref(tree)
    del tree
    gc.collect()
    assert gone() is None


@big
def test_branches_that_were_evicted_leave_no_long_chain_of_edges():
    _, tree = make(12_000, 1)
    tokens = np.arange(6000)
    deep_chain(tree, tokens)
    lease = tree.match(tokens)
    assert tree.evict(100_000) == 5999
    tree.check()
    assert tree.num_nodes <= 6000 // 1024 + 1
    assert tree.match_length(tokens) == 6000
    lease.release()
    assert tree.evict(6000) == 6000


@big
def test_fc25_key_cost_is_linear():
    def seconds(n):
        best = []
        for _ in range(5):
            pool = BlockPool(n // 16)
            tree = RadixTree(pool, 16)
            tokens, blocks = np.arange(n), pool.allocate(n // 16)
            start = time.thread_time()
            tree.insert(tokens, blocks)
            tree.content_hashes(tokens)
            best.append(time.thread_time() - start)
        return min(best)

    assert seconds(65_536) < 3 * seconds(32_768)


def test_fc25_a_decode_step_hashes_at_most_one_block(monkeypatch):
    hasher = ContentHasher(16)
    hasher.update(range(1000))
    calls = itertools.count()
    real = hashing.xxhash.xxh3_128_digest
    monkeypatch.setattr(hashing.xxhash, "xxh3_128_digest", lambda data: (next(calls), real(data))[1])
    for token in range(64):
        before = next(calls)
        hasher.update([token])
        assert next(calls) - before - 1 <= 1
    _, tree = make(8, 4)
    seen = []
    tree._hash = lambda data, seed: (seen.append(len(data)), 5)[1]
    blocks = store(tree, range(20), keep=True)
    seen.clear()
    tree.insert([*range(20), 99], [*blocks, *tree.allocate(1).tolist()])
    assert len(seen) <= 2  # one edge is passed, whatever its length; nothing else is hashed


@pytest.mark.parametrize("look_up", [[1, 1], [1, 1, 5, 6, 7]])
def test_fc26_a_hit_counts_as_use(look_up):
    _, tree = make(2, 2)
    store(tree, [1, 1])
    store(tree, [2, 2])
    assert hit(tree, look_up) == 2
    store(tree, [3, 3])
    assert tree.match_length([1, 1]) == 2
    assert tree.match_length([2, 2]) == 0
    assert tree.match_length([3, 3]) == 2


def test_fc26_a_peek_does_not():
    _, tree = make(2, 2)
    store(tree, [1, 1])
    store(tree, [2, 2])
    assert tree.match_length([1, 1]) == 2
    store(tree, [3, 3])
    assert tree.match_length([1, 1]) == 0


def test_fc27_the_tail_goes_first():
    pool, tree = make(4, 2)
    chain = list(range(8))
    for _ in range(100):
        blocks = store(tree, chain)
        own = tree.allocate(1)
        assert own.tolist() == [blocks[3]]
        assert hit(tree, chain) == 6
        pool.release(own)
    # The first block cannot be missing while others are there: it goes last.
    assert tree.evict(3) == 3
    assert hit(tree, chain) == 0


def test_fc36_a_reused_block_forgets_its_past():
    _, tree = make(2, 2)
    x, y = [1, 2, 3, 4], [5, 6, 7, 8]
    store(tree, x)
    store(tree, y)
    assert tree.match_length(x) == 0
    assert tree.match_length(y) == 4
    assert tree.num_cached_blocks == 2


@big
def test_fc37_pieces_do_not_hold_the_whole():
    def memory(tree):
        todo, total = list(tree._roots.values()), 0
        while todo:
            node = todo.pop()
            total += sys.getsizeof(node.edge) + sys.getsizeof(node.blocks)
            todo += node.children.values()
        return total

    _, tree = make(400, 16)
    tokens = np.arange(4096)
    store_array_blocks(tree, tokens)
    whole = memory(tree)
    for at in range(64, 4096, 64):
        store_array_blocks(tree, np.append(tokens[:at], np.full(16, 9999 + at)))
    with tree.match(tokens[:64]):
        tree.evict(1000)
        assert tree.num_cached_blocks == 4
        empty = sys.getsizeof(bytearray())
        piece = 64 * 8 + 4 * 4
        assert memory(tree) <= 2 * piece + 8 * empty
        assert memory(tree) < whole / 20


def store_array_blocks(tree, tokens):
    match = tree.match(tokens, partial=False)
    own = tree.allocate(len(tokens) // tree.block_size - len(match.blocks))
    tree.pool.release(tree.insert(tokens, np.concatenate((match.take(), own))).blocks)


@big
def test_fc37_a_trimmed_edge_gives_memory_back():
    _, tree = make(1000, 16)
    store_array_blocks(tree, np.arange(16_000))
    tree.evict(990)
    (node,) = tree._roots[b""].children.values()
    assert len(node.edge) == 10 * 16 * 8
    assert sys.getsizeof(node.edge) <= 2 * len(node.edge) + 64
    assert sys.getsizeof(node.blocks) <= 2 * len(node.blocks) + 64


def test_fc40_reset_tells_the_truth():
    pool, tree = make(8, 2)
    store(tree, [1, 2, 3, 4])
    store(tree, [1, 2, 5, 6, 7], "other")
    lease = tree.match([1, 2, 9])
    for namespace in (None, b""):
        with pytest.raises(InvalidRequestError, match="in use"):
            tree.clear(namespace)
    assert tree.match_length([1, 2, 3, 4]) == 4
    assert tree.clear("other") == 3  # nobody holds any of that
    lease.release()
    assert tree.clear() == 2
    assert tree.num_cached_blocks == 0
    assert pool.num_free == 8


def test_fc42_fork_inside_a_block():
    pool = BlockPool(16)
    memory = np.zeros(64, int)

    def write(table, tokens):
        start = table.num_tokens
        for copy in table.append(len(tokens)):
            rows = np.arange(copy.num_rows)
            memory[copy.dst * 4 + rows] = memory[copy.src * 4 + rows]
        memory[table.slots(start, start + len(tokens))] = tokens

    for order in itertools.permutations(range(3)):
        original = BlockTable(pool, 4)
        write(original, [1, 2, 3, 4, 5, 6])
        branches = [original.fork() for _ in range(3)]
        for i, branch in enumerate(branches):
            write(branch, [10 * i + 1, 10 * i + 2, 10 * i + 3])
            assert branch.blocks[0] == original.blocks[0]  # full blocks are shared
            assert branch.blocks[1] != original.blocks[1]
        for i, branch in enumerate(branches):
            expected = [1, 2, 3, 4, 5, 6, 10 * i + 1, 10 * i + 2, 10 * i + 3]
            assert memory[branch.slots(0, 9)].tolist() == expected
        assert memory[original.slots(0, 6)].tolist() == [1, 2, 3, 4, 5, 6]
        for i in order:
            branches[i].release()
        original.release()
        assert pool.num_free == 16


@big
def test_fc43_many_callers():
    pool, tree = make(60, 4)
    prompts = [tuple(range(20)) + (i,) * 12 for i in range(5)] + [(i,) * 30 for i in range(100, 105)]
    errors = []

    def caller(seed):
        try:
            for i in range(60):
                tokens = prompts[(seed + i * 7) % len(prompts)]
                with tree.match(tokens, max_tokens=len(tokens) - 1) as match:
                    num = -(-len(tokens) // 4) - len(match.blocks)
                    try:
                        own = tree.allocate(num)
                    except OutOfBlocksError:
                        continue
                    pool.retain(match.blocks)
                    pool.release(tree.insert(tokens, np.concatenate((match.blocks, own))).blocks)
        except BaseException as error:
            errors.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=caller, args=(i,)) for i in range(20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert errors == []
    balanced(tree)
    assert tree.num_pinned_blocks == 0
