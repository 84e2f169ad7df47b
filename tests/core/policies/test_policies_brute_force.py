"""Every policy evicts what a plain model evicts, block by block, on random traces and on the public one."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.core import BlockPool, RadixTree, Retention
from radixkv.core.policies import RetentionPolicy, SLRUPolicy
from tests.core.policies.policy_models import MODELS, SLRU, Priority

# Requests that share prefixes: paths in a small tree of tokens, some of them popular.
tokens = st.lists(st.sampled_from([0, 0, 0, 1, 2]), min_size=1, max_size=8).map(tuple)
popular = st.sampled_from([(0, 0, 0, 0, 0, 0), (0, 0, 0, 1, 1, 1), (1, 1, 1), (2, 0, 2, 0, 2, 0, 2, 0)])
extended = st.builds(lambda head, end: (head + end)[:8], popular, tokens)
requests = st.lists(st.one_of(popular, extended, tokens), min_size=1, max_size=60)


def serve(tree, tokens, retention=None):
    """One request, as an engine would: match, make room, insert, release. Blocks hit."""
    size = tree.block_size
    whole = np.array(tokens[: len(tokens) // size * size], np.int64)
    match = tree.match(whole, partial=False, retention=retention)
    num_hit = len(match.blocks)
    own = tree.allocate(len(whole) // size - num_hit)
    table = np.concatenate((match.take(), own))
    tree.pool.release(tree.insert(whole, table, retention=retention).blocks)
    return num_hit


def prefixes(tree):
    """All that is cached, as tuples of all tokens up to the end of each block."""
    found, paths = set(), []
    for node in tree.nodes():
        above = () if node.parent < 0 else paths[node.parent]
        path = above + tuple(node.tokens.tolist())
        paths.append(path)
        size = tree.block_size
        found |= {path[:end] for end in range(len(above) + size, len(path) + 1, size)}
    return found


@pytest.mark.parametrize("policy", sorted(MODELS))
@given(requests=requests, block_size=st.sampled_from([1, 1, 2]), room=st.integers(0, 12))
def test_the_same_blocks_are_cached_after_every_request(policy, requests, block_size, room):
    longest = max(len(r) // block_size for r in requests)
    capacity = longest + room
    if not capacity:
        return
    tree = RadixTree(BlockPool(capacity), block_size, policy)
    model = MODELS[policy](capacity, block_size)
    for number, request in enumerate(requests):
        hits = serve(tree, request)
        now_cached = prefixes(tree)
        assert model.request(request, now_cached.__contains__) == hits, f"request {number}: {request}"
        assert model.cached == now_cached, f"after request {number}: {request}"
        tree.check()
        if hasattr(tree._policy, "check_all"):
            tree._policy.check_all()


@given(
    requests=requests,
    room=st.integers(0, 12),
    min_hits=st.integers(1, 3),
    share=st.sampled_from([0.0, 0.2, 0.4, 0.8, 1.0]),
)
def test_no_more_than_a_share_is_protected(requests, room, min_hits, share):
    capacity = max(map(len, requests)) + room
    policy = SLRUPolicy(capacity, min_hits=min_hits, protected_share=share)
    tree, model = RadixTree(BlockPool(capacity), 1, policy), SLRU(capacity, 1, min_hits=min_hits, share=share)
    for request in requests:
        hits = serve(tree, request)
        now_cached = prefixes(tree)
        assert model.request(request, now_cached.__contains__) == hits
        assert model.cached == now_cached
        policy.check_all()
        tree.check()


retentions = st.one_of(
    st.none(),
    st.tuples(st.integers(-2, 3), st.one_of(st.none(), st.integers(1, 6).map(float))),
)


@given(
    requests=st.lists(
        st.tuples(st.one_of(popular, extended, tokens), retentions, st.integers(0, 3)),
        min_size=1,
        max_size=50,
    ),
    room=st.integers(0, 12),
)
def test_retentions_are_kept_and_expire(requests, room):
    time = [0.0]
    capacity = max(len(r) for r, _, _ in requests) + room
    tree = RadixTree(BlockPool(capacity), 1, RetentionPolicy(capacity, clock=lambda: time[0]))
    model = Priority(capacity, 1)
    for request, retention, pause in requests:
        time[0] += pause
        model.clock, model.retention = time[0], retention
        hits = serve(tree, request, None if retention is None else Retention(*retention))
        now_cached = prefixes(tree)
        assert model.request(request, now_cached.__contains__) == hits
        assert model.cached == now_cached
        tree.check()


def conversations(seed, num_requests):
    """A small trace in the manner of the public one: conversations that grow, with a shared root and a Zipf tail."""
    rng = np.random.default_rng(seed)
    chats, number = [[0]], 0
    for _ in range(num_requests):
        if rng.random() < 0.35:
            chat = chats[0] + [10_000 + number]
        else:
            chat = list(chats[int(len(chats) * rng.random() ** 0.5) - 1])
        for _ in range(rng.integers(0, 5)):
            number += 1
            chat.append(number)
        chats.append(chat)
        yield tuple(chat[:40])


@pytest.mark.parametrize("policy", sorted(MODELS))
@pytest.mark.parametrize("capacity", [45, 120])
def test_a_longer_trace(policy, capacity):
    tree = RadixTree(BlockPool(capacity), 1, policy)
    model = MODELS[policy](capacity, 1)
    total = 0
    for request in conversations(5, 350):
        hits = serve(tree, request)
        total += hits
        assert model.request(request, prefixes(tree).__contains__) == hits
    assert total > 0
    tree.check()


# Hit blocks of `conversations(5, 2000)` at 100 blocks, by the models: whoever changes a policy on purpose runs
# `python -m tests.core.policies.test_policies_brute_force` (half a minute).
KNOWN = {
    "cost-aware": 3735,
    "fifo": 3455,
    "lfu": 3942,
    "lfu-aged": 3714,
    "lru": 3462,
    "priority": 3462,
    "slru": 3792,
}


@pytest.mark.parametrize("policy", sorted(KNOWN))
def test_known_hits_of_a_trace(policy):
    tree = RadixTree(BlockPool(100), 1, policy)
    assert sum(serve(tree, request) for request in conversations(5, 2000)) == KNOWN[policy]


@pytest.mark.parametrize("policy", ["lru", "lfu", "fifo"])
@pytest.mark.parametrize("capacity", [250, 2000])
def test_the_public_trace_gives_the_reference_values(policy, capacity):
    """RADIXKV_TRACE names conversation_trace.jsonl; expected_conversation.json lies beside it."""
    path = Path(os.environ.get("RADIXKV_TRACE", ""))
    expected = path.parent / "expected_conversation.json"
    if not path.is_file() or not expected.is_file():
        pytest.skip("set RADIXKV_TRACE to the path of conversation_trace.jsonl")
    values = json.loads(expected.read_text())["whole_trace"]["capacities"][str(capacity)]
    tree = RadixTree(BlockPool(capacity), 1, policy)
    hit_blocks = hit_tokens = 0
    with path.open() as lines:
        for line in lines:
            request = json.loads(line)
            num = serve(tree, tuple(request["hash_ids"]))
            hit_blocks += num
            hit_tokens += min(512 * num, request["input_length"])
    assert (hit_blocks, hit_tokens) == (values[policy]["hit_blocks"], values[policy]["hit_tokens"])


if __name__ == "__main__":
    for name, model_class in sorted(MODELS.items()):
        pool_size = 100
        model = model_class(pool_size, 1)
        tree = RadixTree(BlockPool(pool_size), 1, name)
        hits = 0
        for request in conversations(5, 2000):
            serve(tree, request)
            hits += model.request(request, prefixes(tree).__contains__)  # the tree settles ties, nothing else
        print(f'    "{name}": {hits},')
