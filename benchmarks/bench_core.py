"""Pool and tree alone, in CPU time.

    python -m pytest benchmarks/bench_core.py --benchmark-columns=min,median,max,rounds
    python -m pytest benchmarks/bench_core.py -k against -q     # how costs grow, only

Every case checks its answer. Tokens are given as int64 arrays, except where the name says list. The cases named
`..._against_...` show what a cost grows with: the length of the prompt, the edges it passes, the nodes that are cached
beside it (up to a million: the tree is made once, in half a minute), the size of a block. They are also written as one
table if RADIXKV_BENCH_TABLE names a file.

Whole requests on a public trace are in `trace_requests.py`; with RADIXKV_TRACE set to its path, its replay is a case
here, too.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from radixkv.core import BlockPool, ContentHasher, RadixTree, as_tokens

sys.path.insert(0, str(Path(__file__).parent))

# CPU time of this thread: other processes on the machine do not count.
pytestmark = pytest.mark.benchmark(timer=time.thread_time, warmup=True, warmup_iterations=3, disable_gc=True)

LONG = 131_072
BLOCK = 16
ROUNDS = 200


def filled(num_blocks, block_size=BLOCK):
    pool = BlockPool(num_blocks)
    return pool, RadixTree(pool, block_size, policy="lru")


def store(tree, tokens):
    match = tree.match(tokens, partial=False)
    own = tree.allocate(-(-len(tokens) // tree.block_size) - len(match.blocks))
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


# -- what costs grow with ------------------------------------------------------------------------------------

LENGTHS = [1_000, 8_000, 64_000, LONG, 1_000_000]
EDGES = [1, 4, 16, 64, 256]
NODES = [100, 1_000, 10_000, 100_000, 1_000_000]
BLOCK_SIZES = [1, 4, 16, 64, 256, 1024]

_table: dict[tuple[str, str], dict[int, float]] = {}


@pytest.fixture(scope="module", autouse=True)
def table():
    """Write the medians of the cases named `against`, if somebody wants them."""
    yield
    path = os.environ.get("RADIXKV_BENCH_TABLE")
    if not path or not _table:
        return
    lines = []
    for axis in dict.fromkeys(axis for axis, _ in _table):
        rows = {what: row for (a, what), row in _table.items() if a == axis}
        columns = sorted({x for row in rows.values() for x in row})
        lines += [f"| {axis} | " + " | ".join(f"{x:,}" for x in columns) + " |"]
        lines += ["| --- |" + " ---: |" * len(columns)]
        for what, row in rows.items():
            cells = (f"{row[x] * 1e6:.1f}" if x in row else "" for x in columns)
            lines += [f"| {what} | " + " | ".join(cells) + " |"]
        lines += [""]
    Path(path).write_text("\n".join(lines))


def note(benchmark, axis, what, x):
    if benchmark.stats is not None:  # None with --benchmark-disable
        _table.setdefault((axis, what), {})[x] = statistics.median(benchmark.stats.stats.data)


def time_match(benchmark, tree, tokens, rounds=100):
    held = []

    def give_back():
        if held:
            held.pop().release()

    benchmark.pedantic(
        lambda: held.append(tree.match(tokens)), setup=give_back, rounds=rounds, warmup_rounds=5
    )
    num_tokens = held[-1].num_tokens
    give_back()
    return num_tokens


def time_insert(benchmark, tree, length, rounds=100):
    """Insert prompts that share nothing; each is dropped again before the next one."""
    rng = np.random.default_rng(7)
    num_before = tree.num_cached_tokens

    def fresh():
        tree.evict(tree.num_cached_blocks - num_before // tree.block_size)
        tokens = rng.integers(200_000, 300_000, length)
        return (tokens, tree.allocate(-(-length // tree.block_size))), {}

    def insert(tokens, blocks):
        tree.pool.release(tree.insert(tokens, blocks).blocks)

    benchmark.pedantic(insert, setup=fresh, rounds=rounds, warmup_rounds=5)
    assert tree.num_cached_tokens == num_before + length


def time_evict(benchmark, tree, rounds=50):
    num_before = tree.num_cached_blocks
    assert benchmark.pedantic(tree.evict, args=(1,), rounds=rounds, warmup_rounds=5) == 1
    assert tree.num_cached_blocks == num_before - rounds - 5


@pytest.fixture(scope="module")
def million():
    return np.random.default_rng(5).integers(0, 128_000, 1_000_000)


@pytest.mark.parametrize("length", LENGTHS)
def test_match_against_prompt_length(benchmark, million, length):
    _, tree = filled(-(-length // BLOCK))
    store(tree, million[:length])
    assert time_match(benchmark, tree, million[:length]) == length
    note(benchmark, "tokens in the prompt, all on one edge", "match", length)


@pytest.mark.parametrize("length", LENGTHS)
def test_insert_against_prompt_length(benchmark, length):
    _, tree = filled(2 * -(-length // BLOCK))
    time_insert(benchmark, tree, length, rounds=30)
    note(benchmark, "tokens in the prompt, all on one edge", "insert, nothing cached", length)


@pytest.mark.parametrize("length", LENGTHS)
def test_evict_against_prompt_length(benchmark, million, length):
    _, tree = filled(-(-length // BLOCK))
    store(tree, million[:length])
    time_evict(benchmark, tree)
    note(benchmark, "tokens in the prompt, all on one edge", "evict one block", length)


@pytest.mark.parametrize("edges", EDGES)
def test_match_against_edges_passed(benchmark, million, edges):
    length = 256 * 512
    _, tree = filled(length // BLOCK + edges)
    for end in range(length // edges, length + 1, length // edges):
        store(tree, million[:end])
        if end < length:
            store(tree, np.append(million[:end], np.full(BLOCK, 200_000)))
    assert tree.num_nodes == 2 * edges - 1
    assert time_match(benchmark, tree, million[:length]) == length
    note(benchmark, "edges that a match of 131,072 tokens passes", "match", edges)


@pytest.fixture(scope="module")
def crowd():
    """Trees with many nodes beside the prompts that are looked for; each is made from the one before."""
    pool, tree = filled(max(NODES) + 100_000)
    rng = np.random.default_rng(6)
    prompt = rng.integers(0, 128_000, 2048)

    def grown(num_nodes):
        for tokens in rng.integers(0, 128_000, (max(0, num_nodes - tree.num_nodes), BLOCK)):
            pool.release(tree.insert(tokens, pool.allocate(1)).blocks)
        store(tree, prompt)  # the one used last
        assert tree.num_nodes >= num_nodes
        return tree, prompt

    return grown


@pytest.mark.parametrize("what", ["match 2,048 tokens", "a miss", "insert 2,048 tokens", "evict one block"])
@pytest.mark.parametrize("nodes", NODES)
def test_against_cached_nodes(benchmark, crowd, nodes, what):
    tree, prompt = crowd(nodes)
    if what.startswith("match"):
        assert time_match(benchmark, tree, prompt) == len(prompt)
    elif what == "a miss":
        assert matched(benchmark, tree, prompt[1:], partial=False) == 0
    elif what.startswith("insert"):
        blocks = tree.pool.allocate(128 * 200)
        used = iter(range(200))
        rng = np.random.default_rng(nodes)

        def fresh():
            at = next(used) * 128
            return (rng.integers(200_000, 300_000, 2048), blocks[at : at + 128]), {}

        benchmark.pedantic(tree.insert, setup=fresh, rounds=100, warmup_rounds=5)
        tree.pool.release(blocks)
    else:
        time_evict(benchmark, tree, rounds=50 if nodes < 10_000 else 2000)
    note(benchmark, "nodes cached beside it", what, nodes)


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("what", ["match 131,072 tokens", "insert 8,192 tokens", "evict one block"])
def test_against_block_size(benchmark, million, block_size, what):
    _, tree = filled(LONG // block_size + 8192 // block_size, block_size)
    store(tree, million[:LONG])
    if what.startswith("match"):
        assert time_match(benchmark, tree, million[:LONG]) == LONG
    elif what.startswith("insert"):
        time_insert(benchmark, tree, 8192)
    else:
        time_evict(benchmark, tree)
    note(benchmark, "tokens in a block", what, block_size)


@pytest.mark.skipif("RADIXKV_TRACE" not in os.environ, reason="RADIXKV_TRACE does not name the trace")
def test_replay_of_2000_requests_of_the_trace(benchmark):
    import trace_requests as trace

    requests = trace.read_trace(os.environ["RADIXKV_TRACE"], 2000)
    num_blocks = int(trace.count_distinct_tokens(requests) * 0.4) // BLOCK
    prompts = list(trace.stream(requests))
    result = benchmark.pedantic(trace.replay, args=(prompts, BLOCK, num_blocks), rounds=3)
    assert result.hit_tokens == trace.KNOWN_HITS[2000, BLOCK, 0.4]
