"""Whole requests in a row hit exactly what a block-granular LRU hits."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "trace_requests.py"


@pytest.fixture(scope="module")
def trace_requests():
    import sys

    spec = importlib.util.spec_from_file_location("trace_requests", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["trace_requests"] = module
    spec.loader.exec_module(module)
    return module


def synthetic(rng, num_requests):
    """Conversations that grow and branch, several at a time, in the trace's form."""
    lines, chats, next_id = [], [[0, 1], [0], [2]], 3
    for _ in range(num_requests):
        ids = list(chats[rng.integers(len(chats))][: rng.integers(1, 9)])
        for _ in range(rng.integers(0, 4)):
            ids.append(next_id)
            next_id += 1
        chats.append(ids)
        lines.append({"hash_ids": ids, "input_length": int(512 * len(ids) - rng.integers(0, 512))})
    return lines


@pytest.mark.parametrize("share", [0.1, 0.4, 2.0])
@pytest.mark.parametrize("block_size", [16, 100])
def test_hits_are_those_of_a_block_lru(tmp_path, trace_requests, share, block_size):
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, synthetic(np.random.default_rng(0), 150))))
    requests = trace_requests.read_trace(str(path), 1000)
    largest = max(r.num_tokens for r in requests) // block_size + 1
    num_blocks = max(largest, int(trace_requests.count_distinct_tokens(requests) * share) // block_size)
    result = trace_requests.replay(trace_requests.stream(requests), block_size, num_blocks)
    assert result.hit_tokens == trace_requests.brute_force_hits(requests, block_size, num_blocks)
    assert (result.num_evicted > 0) == (share < 1)
    assert result.hit_tokens > 0


def test_distinct_tokens_are_counted_once(trace_requests):
    """The number of distinct tokens counts a shared block once, with the most tokens anybody has in it."""
    request = trace_requests.Request
    assert trace_requests.count_distinct_tokens(
        [request((1, 2), 600), request((1, 2), 700), request((1, 3), 1024)]
    ) == (512 + 188 + 512)
