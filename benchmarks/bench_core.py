"""Pool and tree alone, in CPU time.

    python -m pytest benchmarks/bench_core.py --benchmark-columns=min,median,max,rounds

Every case checks its answer. Tokens are given as int64 arrays, except where the name says list. Whole requests
on a public trace are in `trace_requests.py`.
"""

from __future__ import annotations

import time

import numpy as np
import pytest

from radixkv.core import BlockPool, ContentHasher, RadixTree, as_tokens

# CPU time of this thread: other processes on the machine do not count.
pytestmark = pytest.mark.benchmark(timer=time.thread_time, warmup=True, warmup_iterations=3, disable_gc=True)

LONG = 131_072
BLOCK = 16
ROUNDS = 200


def filled(num_blocks):
    pool = BlockPool(num_blocks)
    return pool, RadixTree(pool, BLOCK)


def store(tree, tokens):
    match = tree.match(tokens, partial=False)
    own = tree.allocate(-(-len(tokens) // BLOCK) - len(match.blocks))
    tree.pool.release(tree.insert(tokens, np.concatenate((match.take(), own))).blocks)


@pytest.fixture(scope="module")
def long_prompt():
    return np.random.default_rng(0).integers(0, 128_000, LONG)


@pytest.fixture(scope="module")
def one_edge(long_prompt):
    _, tree = filled(LONG // BLOCK)
    store(tree, long_prompt)
    assert tree.num_nodes == 1
    return tree


@pytest.fixture(scope="module")
def chain(long_prompt):
    """256 edges of 512 tokens, with a branch of one block at the end of each."""
    _, tree = filled(LONG // BLOCK + 256)
    for end in range(512, LONG + 1, 512):
        store(tree, long_prompt[:end])
        store(tree, np.append(long_prompt[:end], np.full(BLOCK, 200_000)))
    assert tree.num_nodes == 511
    return tree


def matched(benchmark, tree, tokens, **limits):
    def give_back():
        if benchmark_matches:
            benchmark_matches.pop().release()

    benchmark_matches = []
    benchmark.pedantic(
        lambda: benchmark_matches.append(tree.match(tokens, **limits)),
        setup=give_back,
        rounds=ROUNDS,
        warmup_rounds=5,
    )
    num_tokens = benchmark_matches[-1].num_tokens
    give_back()
    return num_tokens


def test_match_131072_on_one_edge(benchmark, one_edge, long_prompt):
    assert matched(benchmark, one_edge, long_prompt) == LONG


def test_match_131072_on_one_edge_all_but_the_last_token(benchmark, one_edge, long_prompt):
    assert matched(benchmark, one_edge, long_prompt, max_tokens=LONG - 1) == LONG - 1


def test_match_131072_on_256_edges(benchmark, chain, long_prompt):
    assert matched(benchmark, chain, long_prompt) == LONG


def test_match_length_131072_on_256_edges(benchmark, chain, long_prompt):
    assert benchmark(chain.match_length, long_prompt) == LONG


def test_match_2048(benchmark, one_edge, long_prompt):
    assert matched(benchmark, one_edge, long_prompt[:2048]) == 2048


def test_match_a_miss(benchmark, one_edge, long_prompt):
    assert matched(benchmark, one_edge, long_prompt[1:2049], partial=False) == 0


def test_match_inside_a_block_of_10000_children(benchmark):
    _, tree = filled(10_000)
    prompts = np.random.default_rng(1).integers(0, 128_000, (10_000, BLOCK))
    for prompt in prompts:
        store(tree, prompt)
    near = np.append(prompts[5000, :9], [1, 2, 3])
    assert tree.match_length(near) == 9
    assert matched(benchmark, tree, near) == 9


def test_insert_2048_new_and_release(benchmark):
    pool, tree = filled(1_000_000 // BLOCK)
    rng = np.random.default_rng(2)

    def fresh():
        return (rng.integers(0, 128_000, 2048), tree.allocate(2048 // BLOCK)), {}

    def insert(tokens, blocks):
        pool.release(tree.insert(tokens, blocks).blocks)

    benchmark.pedantic(insert, setup=fresh, rounds=ROUNDS, warmup_rounds=5)
    assert tree.num_cached_tokens == 2048 * (ROUNDS + 5)


def test_insert_one_more_token_after_131072(benchmark, long_prompt):
    """A decode step that publishes each token; a block is filled after 16 of them."""
    pool, tree = filled(LONG // BLOCK + 64)
    blocks = pool.allocate(LONG // BLOCK + 64)
    tokens = np.append(long_prompt, np.arange(1024))
    step = iter(range(LONG + 1, LONG + 1024))
    tree.insert(long_prompt, blocks[: LONG // BLOCK])

    def insert():
        n = next(step)
        return tree.insert(tokens[:n], blocks[: -(-n // BLOCK)])

    assert benchmark.pedantic(insert, rounds=ROUNDS, warmup_rounds=5).num_new_tokens == 1


def test_evict_one_of_64000_leaves(benchmark):
    _, tree = filled(64_000)
    for prompt in np.random.default_rng(3).integers(0, 128_000, (64_000, BLOCK)):
        store(tree, prompt)
    assert tree.num_leaves == 64_000
    assert benchmark.pedantic(tree.evict, args=(1,), rounds=2000, warmup_rounds=5) == 1
    assert tree.num_leaves == 64_000 - 2005


def test_evict_one_block_of_a_131072_token_edge(benchmark, long_prompt):
    _, tree = filled(LONG // BLOCK)
    store(tree, long_prompt)
    assert benchmark.pedantic(tree.evict, args=(1,), rounds=2000, warmup_rounds=5) == 1
    assert tree.match_length(long_prompt) == LONG - 2005 * BLOCK


def test_evict_one_with_10000_pinned_leaves(benchmark):
    """Leases do not slow eviction down: a pinned leaf is looked at once."""
    _, tree = filled(20_000)
    prompts = np.random.default_rng(4).integers(0, 128_000, (20_000, BLOCK))
    for prompt in prompts:
        store(tree, prompt)
    leases = [tree.match(prompt) for prompt in prompts[:10_000]]
    tree.evict(1)
    assert benchmark.pedantic(tree.evict, args=(1,), rounds=2000, warmup_rounds=5) == 1
    for lease in leases:
        lease.release()


@pytest.mark.parametrize("n", [1, 128, 8192])
def test_allocate_and_release(benchmark, n):
    pool = BlockPool(100_000)
    benchmark(lambda: pool.release(pool.allocate(n)))
    assert pool.num_free == 100_000


def test_content_hashes_of_2048(benchmark, one_edge, long_prompt):
    assert len(benchmark(one_edge.content_hashes, long_prompt[:2048])) == 128


def test_content_hash_of_one_more_token(benchmark):
    hasher = ContentHasher(BLOCK)
    benchmark.pedantic(hasher.update, args=([1],), rounds=2000)
    assert len(hasher.digests) == 2000 // BLOCK


def test_tokens_from_a_list_of_2048(benchmark, long_prompt):
    tokens = long_prompt[:2048].tolist()
    assert len(benchmark(as_tokens, tokens)) == 2048
