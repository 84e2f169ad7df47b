"""Requests that come, end, fork, are aborted and make room, through graphs of all sizes: every token is right."""

from __future__ import annotations

import random

import pytest
from engine_testkit import alone, balanced, drained, family, params, tiny, twin
from graphs_testkit import graph_engine, padded_rows_are_harmless

MODES = [
    {"preemption": "recompute", "num_blocks": 26},
    {"preemption": "swap", "host_memory": "64KiB", "order": "prefix", "num_blocks": 26},
    {"num_blocks": 256},
]


@pytest.mark.parametrize("name", ["llama_gqa", "gemma3"])
@pytest.mark.parametrize("mode", MODES, ids=["recompute", "swap", "room"])
def test_random_traffic(name, mode):
    """Free blocks and the scratch block are NaN before each replay, and a replay writes to its own slots only."""
    model = tiny(name)
    reference = twin(model)
    rng = random.Random(len(name) + len(mode))
    prompts = family(11, 1, 4, 9) + family(0, 2, 17, 6, seed=5) + family(6, 3, 8, seed=9)
    expected = [alone(reference, ids, 20) for ids in prompts]
    engine = graph_engine(model, max_num_seqs=11, max_batched_tokens=30, **mode)
    seen = padded_rows_are_harmless(engine)
    pending, added, aborted = {}, 0, 0
    while added < 70 or engine.has_unfinished:
        while added < 70 and engine.stats.waiting < rng.choice([0, 0, 1, 3]):
            which, length = rng.randrange(len(prompts)), rng.randint(1, 20)
            rid = engine.add_request(prompts[which], params(length, n=rng.choice([1, 1, 1, 2])))
            pending[rid] = which
            added += 1
        if rng.random() < 0.05 and pending:
            aborted += engine.abort(rng.choice(list(pending)[-6:]))
        for out in engine.step():
            if out.completion is not None:
                tokens = out.completion.token_ids
                assert out.completion.finish_reason in ("length", "abort")
                assert tokens == expected[pending[out.rid]][: len(tokens)]
        balanced(engine)
    graphs = engine._runner.graphs
    assert engine.no_graphs_reason is None
    assert len(graphs.sizes) >= (3 if "preemption" in mode else 4)
    assert seen["padding"] > 30
    assert seen["replays"] == graphs.num_replays + graphs.num_compared
    assert 0 < graphs.num_planned_ahead < graphs.num_replays
    assert aborted > 0
    if "preemption" in mode:
        assert engine.stats.preemptions > 3
    drained(engine)
    engine.cache.clear()
    assert engine.cache.num_free_blocks == mode["num_blocks"]
