"""Many requests in pools that are too small for them: the right tokens for all, and a pool as it was at the end."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from engine_testkit import alone, balanced, drained, family, make_engine, params, tiny, twin

# Prompt tokens and new tokens of six requests; number 2 has the prompt of number 0.
SHAPES = [(14, 10), (10, 12), (14, 14), (5, 20), (20, 6), (9, 16)]
LARGEST = max(-(-(prompt + new - 1) // 4) for prompt, new in SHAPES)
MODES: list[dict[str, Any]] = [
    {"preemption": "recompute", "order": "fcfs"},
    {"preemption": "swap", "host_memory": "64KiB", "order": "prefix"},
    {"preemption": "auto", "host_memory": "8KiB", "order": "prefix"},
]


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode["preemption"])
def test_six_requests_in_every_pool_that_holds_the_largest(mode: dict[str, Any]) -> None:
    model = tiny("llama_gqa")
    reference = twin(model)
    prompts = [family(0, size, seed=i)[0] for i, (size, _) in enumerate(SHAPES)]
    prompts[2] = prompts[0]
    wanted = [params(new) for _, new in SHAPES]
    expected = [alone(reference, p, new) for p, (_, new) in zip(prompts, SHAPES, strict=True)]
    preemptions = swaps = 0
    for num_blocks in [*range(LARGEST, 30), 40, 64]:
        engine = make_engine(model, num_blocks=num_blocks, **mode)
        owners = [engine.add_request(p, w) for p, w in zip(prompts, wanted, strict=True)]
        got: dict[Any, list[int]] = {rid: [] for rid in owners}
        while engine.has_unfinished:
            for out in engine.step():
                if out.token_id is not None:
                    got[out.rid].append(out.token_id)
            balanced(engine)
        assert [got[rid] for rid in owners] == expected, num_blocks
        drained(engine)
        preemptions += engine.stats.preemptions
        if num_blocks == 64:
            assert engine.stats.preemptions == 0
            assert engine.stats.hit_tokens == 13, "the second of two equal prompts computes one token"
        engine.cache.clear()
        assert engine.cache.num_free_blocks == num_blocks
        swaps += engine.stats.preemptions_swap
    assert preemptions > 0
    assert (swaps > 0) == (mode["preemption"] != "recompute")


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode["preemption"])
def test_two_thousand_requests_in_a_pool_that_preempts_all_the_time(mode: dict[str, Any]) -> None:
    model = tiny("llama_gqa")
    reference = twin(model)
    rng = random.Random(7)
    prompts = [
        ids
        for seed in range(8)
        for ids in family(rng.choice([0, 7, 12, 19]), 3, 1, 9, 14, 22, seed=10 * seed)
    ]
    prompts = [ids for ids in prompts if len(ids) <= 40]
    expected = [alone(reference, ids, 24) for ids in prompts]
    engine = make_engine(
        model,
        num_blocks=20,
        max_batched_tokens=24,
        max_num_seqs=12,
        **mode,
    )
    baseline = np.array(engine.cache.pool.refcounts)
    pending: dict[Any, tuple[int, int]] = {}
    outcome = {"length": 0, "abort": 0, "capacity": 0}
    added = 0

    def settle(out: Any) -> None:
        completion = out.completion
        if completion is None:
            return
        which, length = pending[out.rid]
        tokens = completion.token_ids
        outcome[completion.finish_reason] += 1
        assert tokens == expected[which][: len(tokens)]
        if completion.finish_reason == "length":
            assert len(tokens) == length

    while added < 2000 or engine.has_unfinished:
        while added < 2000 and engine.stats.waiting < 10:
            which, length = rng.randrange(len(prompts)), rng.randint(1, 24)
            n = rng.choice([1, 1, 1, 1, 2, 3])
            rid = engine.add_request(
                prompts[which], params(length, n=n), namespace=rng.choice([None, None, "x"])
            )
            pending[rid] = which, length
            added += 1
        if rng.random() < 0.02:
            engine.abort(rng.choice(list(pending)[-20:]))
        for out in engine.step():
            settle(out)
        if rng.random() < 0.02:
            balanced(engine)
    assert outcome["length"] > 1900
    assert outcome["abort"] > 10
    assert outcome["capacity"] == 0
    assert engine.stats.preemptions > 300
    assert (engine.stats.preemptions_swap > 0) == (mode["preemption"] != "recompute")
    assert (
        engine.stats.swapped_out_bytes
        == engine.stats.swapped_out_blocks * 4 * engine.cache.layout.bytes_per_token
    )
    drained(engine)
    engine.cache.clear()
    assert (np.array(engine.cache.pool.refcounts) == baseline).all()
