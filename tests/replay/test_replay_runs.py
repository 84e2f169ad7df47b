"""What a replay counts is what plain models of a cache count."""

from __future__ import annotations

import json
import os
import random

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from radixkv.core import policy_names
from radixkv.replay import ceiling, read_trace, simulate, token_ceiling
from radixkv.replay.runs import run, run_unlimited

from .replay_models import (
    Ambiguous,
    TokenLRU,
    common_length,
    leaf_cache_hits,
    leaves,
    most_hits,
    most_token_hits,
    paths_of,
)

# Hit tokens of the public Mooncake conversation trace (see the docs), by a plain reference.
CONVERSATION = {
    250: (6190664, 6347726, 6190664, 14691080, 9514204),
    500: (6229259, 6725582, 6227016, 20188961, 17003759),
    1000: (6575459, 7100235, 6573216, 28153578, 26457015),
    2000: (8016630, 8807918, 8015213, 37645705, 36819308),
    5000: (16505817, 13635878, 16471160, 50381221, 50149293),
    10000: (31238981, 19451001, 31140407, 54098411, 54098411),
    30000: (48093740, 40744781, 48097612, 54098411, 54098411),
    50000: (52347371, 50769793, 52327299, 54098411, 54098411),
    100000: (53695979, 53609451, 53695231, 54098411, 54098411),
}
COLUMNS = ("lru", "lfu", "fifo", "optimal", "optimal-pin")


def of_ids(requests, block_size=10):
    """A trace of hash ids; last blocks are filled to different degrees."""
    return read_trace(
        [
            {"hash_ids": ids, "input_length": len(ids) * block_size - 7 * number % block_size}
            for number, ids in enumerate(requests)
        ],
        block_size=block_size,
    )


def of_tokens(requests, block_size):
    return read_trace([{"token_ids": tokens} for tokens in requests], block_size=block_size)


def hit_tokens(trace, hits):
    return sum(min(num * trace.block_size, r.num_tokens) for num, r in zip(hits, trace.requests, strict=True))


def growing(symbols, most, longest):
    """Requests that often go on from, or part inside, one before."""

    @st.composite
    def draw_requests(draw):
        requests = [[0]]
        for _ in range(draw(st.integers(1, most))):
            start = draw(st.sampled_from(requests))
            start = start[: draw(st.integers(0, len(start)))]
            more = draw(st.lists(st.integers(0, symbols - 1), min_size=1, max_size=longest))
            requests.append((start + more)[:longest])
        return requests[1:]

    return draw_requests()


POLICIES = {
    "lru": lambda uses, inserted, used: used,
    "fifo": lambda uses, inserted, used: inserted,
    "lfu": lambda uses, inserted, used: (uses, used),
}


@pytest.mark.parametrize("policy", POLICIES)
@given(requests=growing(3, 30, 6), spare=st.integers(0, 12))
def test_policies_on_blocks(policy, requests, spare):
    trace = of_ids(requests)
    capacity = max(map(len, requests)) + spare
    hits = leaf_cache_hits(requests, capacity, POLICIES[policy])
    found = run(trace, policy, capacity)
    assert (found.hit_blocks, found.hit_tokens) == (sum(hits), hit_tokens(trace, hits))


@given(requests=growing(3, 30, 9), spare=st.integers(0, 12), block_size=st.integers(1, 4))
def test_lru_on_tokens(requests, spare, block_size):
    trace = of_tokens(requests, block_size)
    capacity = trace.blocks_of(trace.longest) + spare
    model = TokenLRU(block_size, capacity)
    try:
        hits = [model.serve(tokens) for tokens in requests]
    except Ambiguous:
        assume(False)
    found = run(trace, "lru", capacity)
    assert found.hit_tokens == sum(hits)
    assert found.hit_blocks == sum(num // block_size for num in hits)
    assert found.evicted_blocks == model.evicted


@settings(max_examples=300)
@given(requests=growing(2, 6, 3), spare=st.integers(0, 3))
def test_the_optimum_on_blocks_is_the_best_of_all_ways(requests, spare):
    trace = of_ids(requests)
    capacity = max(map(len, requests)) + spare
    best = most_hits(requests, capacity)
    assert run(trace, "optimal", capacity).hit_blocks == best
    assert ceiling(trace.paths, capacity) == best
    assert run(trace, "optimal-pin", capacity).hit_blocks == most_hits(requests, capacity, pin=True)


@settings(max_examples=300)
@given(
    requests=growing(2, 6, 5),
    spare=st.integers(0, 3),
    block_size=st.integers(1, 2),
)
def test_no_way_to_keep_tokens_beats_the_optimum(requests, spare, block_size):
    trace = of_tokens(requests, block_size)
    capacity = max(1, max(map(len, requests)) // block_size) + spare
    assume(sum(map(len, requests)) <= 18)
    best = most_hits(requests, capacity, block_size, leave_one=True)
    bound = ceiling(trace.paths, capacity)
    assert best <= bound
    if not any(len(tokens) % block_size == 0 for tokens in requests):
        assert best == bound  # every request can hit all its whole blocks


@settings(max_examples=200)
@given(requests=growing(2, 6, 6), spare=st.integers(0, 2), block_size=st.integers(1, 3))
def test_no_way_to_keep_blocks_hits_more_tokens_than_the_optimum(requests, spare, block_size):
    trace = of_tokens(requests, block_size)
    capacity = trace.blocks_of(trace.longest) + spare
    assume(sum(trace.blocks_of(request) for request in trace.requests) <= 14)
    most = run_unlimited(trace)
    bound = token_ceiling(most.hits, block_size, ceiling(trace.paths, capacity))
    assert most_token_hits(requests, capacity, block_size) <= bound <= most.hit_tokens


def test_tokens_inside_of_blocks_that_a_smaller_cache_hits_more_of():
    """Found by a tester: whoever lost a whole block can hit most of it in a sibling."""
    requests = [[1, 2, 3, 4, 5, 6, 7, 100 + number, 9] for number in range(10)] * 5
    for capacity, wanted in ((3, 7 * 49), (6, 7 * 49)):
        lru, pinned, optimal = simulate(
            [{"token_ids": tokens} for tokens in requests],
            block_size=4,
            capacity=capacity,
            policy=["lru", "optimal-pin", "optimal"],
        ).results
        assert lru.hit_tokens == wanted <= pinned.hit_tokens <= optimal.hit_tokens


@given(requests=growing(3, 40, 12), spare=st.integers(0, 20), block_size=st.integers(1, 4))
def test_every_policy_stays_below_the_optimum(requests, spare, block_size):
    tokens, blocks = of_tokens(requests, block_size), of_ids(requests)
    for trace in (tokens, blocks):
        capacity = trace.blocks_of(trace.longest) + spare
        bound, most = ceiling(trace.paths, capacity), run_unlimited(trace)
        assert run(trace, "optimal", capacity).hit_blocks == bound <= most.hit_blocks
        in_tokens = most.hit_tokens if trace is blocks else token_ceiling(most.hits, block_size, bound)
        for policy in [*policy_names(), "optimal-pin"]:
            found = run(trace, policy, capacity)
            assert found.hit_blocks <= bound, policy
            assert found.hit_tokens <= in_tokens <= most.hit_tokens, policy
            assert found.peak_blocks <= capacity


@given(requests=growing(3, 40, 12), block_size=st.integers(1, 4))
def test_without_a_limit_everything_seen_before_is_hit(requests, block_size):
    ids = of_ids(requests)
    seen, hits = set(), 0
    for path in paths_of(requests, 1):
        hits += sum(block in seen for block in path)
        seen |= set(path)
    found = run_unlimited(ids)
    assert (found.hit_blocks, found.evicted_blocks, found.peak_blocks) == (hits, 0, len(seen))
    assert ids.paths.num_distinct == len(seen)
    assert run(ids, "lru", found.peak_blocks).hit_tokens == found.hit_tokens

    trace = of_tokens(requests, block_size)
    hits, seen = 0, []
    for tokens in requests:
        limit = tokens[:-1]
        hits += max((common_length(limit, other) for other in seen), default=0)
        seen.append(tokens)
    found = run_unlimited(trace)
    assert (found.hit_tokens, found.evicted_blocks) == (hits, 0)
    whole = {block for path in paths_of(requests, block_size) for block in path}
    assert trace.paths.num_distinct == len(whole)
    again = run(trace, "lru", found.peak_blocks)
    assert (again.hit_tokens, again.evicted_blocks) == (hits, 0)


def test_next_uses():
    # Every request is found again, the second by the fourth; the third cannot hit its last block itself.
    trace = of_tokens([[1, 2, 3], [1, 2, 5, 6], [1, 2], [1, 2, 5, 6, 7]], 2)
    uses = [trace.paths.next_uses(number).tolist() for number in range(4)]
    assert uses == [[1], [4, 3], [3], [4, 4]]
    assert [trace.paths.numbers(n).tolist()[0] for n in range(4)] == [trace.paths.numbers(0)[0]] * 4


def test_models_know_a_leaf():
    assert sorted(leaves({(1,): 0, (1, 2): 0, (3,): 0})) == [(1, 2), (3,)]


@pytest.fixture(scope="module")
def conversation():
    path = os.environ.get("RADIXKV_TRACE")
    if not path:
        pytest.skip("RADIXKV_TRACE does not name conversation_trace.jsonl")
    return read_trace(path)


@pytest.mark.parametrize("capacity", [250, 5000])
def test_the_public_trace_to_the_token(conversation, capacity):
    assert len(conversation) == 12031
    found = tuple(run(conversation, policy, capacity).hit_tokens for policy in COLUMNS)
    assert found == CONVERSATION[capacity]


@pytest.mark.slow
@pytest.mark.parametrize("capacity", CONVERSATION)
def test_the_public_trace_to_the_token_at_all_capacities(conversation, capacity):
    found = tuple(run(conversation, policy, capacity).hit_tokens for policy in COLUMNS)
    assert found == CONVERSATION[capacity]


def test_the_public_trace_in_depth_first_order(conversation):
    # Sorted by path, LRU loses nothing at any capacity that holds the longest request.
    requests = sorted(conversation.requests, key=lambda request: request.content.tolist())
    items = [{"hash_ids": r.content, "input_length": r.num_tokens} for r in requests]
    assert run(read_trace(items), "lru", 247).hit_blocks == 105710


def test_json_lines_and_objects_are_the_same(tmp_path):
    rng = random.Random(1)
    items = [{"token_ids": [rng.randrange(5) for _ in range(rng.randrange(1, 30))]} for _ in range(50)]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, items)))
    assert run(read_trace(path), "lru", 20) == run(read_trace(items), "lru", 20)
