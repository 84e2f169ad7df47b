"""Faults of other engines, as requirements on this one; the numbers are those of the list of field cases."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine_testkit import alone, drained, family, make_engine, params, prompt, tiny, tokens_of, twin
from hf_testkit import snapshot


def test_fc13_the_whole_prompt_is_in_the_cache() -> None:
    model = tiny("llama_gqa")
    reference = twin(model)
    engine = make_engine(model)
    ids = prompt(13)[0].tolist()
    engine.generate([ids[:12]], params(1))
    for length, cached in ((12, 11), (13, 12)):
        (out,) = engine.generate([ids[:length]], params(4))
        assert out.num_cached_tokens == cached
        assert out.token_ids == alone(reference, ids[:length], 4)
    drained(engine)


@pytest.mark.parametrize("block_size", [1, 16])
def test_fc14_the_answer_can_be_reused_too(block_size: int) -> None:
    model = tiny("llama_gqa")
    engine = make_engine(model, block_size=block_size, num_blocks=1024 // block_size)
    ids = prompt(60)[0].tolist()
    (first,) = engine.generate([ids], params(25))
    follow_up = ids + first.token_ids + prompt(30, 7)[0].tolist()
    (second,) = engine.generate([follow_up], params(4))
    assert second.num_cached_tokens == 84, "all but the last sampled token, which was never run"
    assert second.token_ids == alone(twin(model), follow_up, 4)


def test_fc16_an_empty_prompt_among_others() -> None:
    model = tiny("llama_gqa")
    engine = make_engine(model)
    first, last = family(0, 5, 9)
    with pytest.warns(UserWarning, match="empty"):
        outs = engine.generate([first, [], last], params(3))
    assert [out.finish_reason for out in outs] == ["length", "error", "length"]
    drained(engine)
    assert engine.generate([first], params(3))[0].token_ids == outs[0].token_ids


@pytest.mark.parametrize("block_size", [1, 4])
def test_fc17_prompts_of_one_token(block_size: int) -> None:
    model = tiny("llama_gqa")
    engine = make_engine(model, block_size=block_size)
    for _ in range(2):
        (out,) = engine.generate([[7]], params(4))
        assert out.num_cached_tokens == 0
        assert out.token_ids == alone(twin(model), [7], 4)
    drained(engine)


def test_fc22_no_ping_pong() -> None:
    model = tiny("llama_gqa")
    prompts = family(0, 10, 11)
    engine = make_engine(model, num_blocks=16, preemption="recompute")
    outs = engine.generate(prompts, params(54))
    assert tokens_of(outs) == [alone(twin(model), p, 54) for p in prompts]
    assert engine.stats.preemptions <= 4, "two for each request, at most"
    drained(engine)


def test_fc32_a_slow_tier_that_is_full_makes_room_for_recompute() -> None:
    model = tiny("llama_gqa")
    reference = twin(model)
    prompts = family(0, 10, 12, 14)
    expected = [alone(reference, p, 20) for p in prompts]
    engine = make_engine(model, num_blocks=14, preemption="swap", host_memory="64KiB")
    tier = engine._tier
    assert tier is not None
    pinned = tier.pool.allocate(tier.pool.num_free)
    assert tokens_of(engine.generate(prompts, params(20))) == expected
    assert engine.stats.preemptions > 0
    assert engine.stats.preemptions_swap == 0
    tier.pool.release(pinned)
    engine.cache.clear()
    assert tokens_of(engine.generate(prompts, params(20))) == expected
    assert engine.stats.preemptions_swap > 0
    assert tier.pool.num_held == 0
    drained(engine)


def test_fc39_new_weights_between_two_runs() -> None:
    model = tiny("llama_gqa")
    ids = prompt(25)[0].tolist()
    engine = make_engine(model)
    before = engine.generate([ids], params(6))[0].token_ids
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.3)
    (out,) = engine.generate([ids], params(6))
    assert out.num_cached_tokens == 0
    assert out.token_ids == alone(twin(model), ids, 6) != before


def test_fc40_reset_tells_the_truth() -> None:
    model = tiny("llama_gqa")
    engine = make_engine(model)
    rid = engine.add_request(prompt(20)[0], params(30))
    engine.step()
    with pytest.raises(ValueError, match="in use"):
        engine.cache.clear()
    engine.step()
    engine.abort(rid)
    assert engine.cache.clear() > 0
    assert engine.cache.num_free_blocks == engine.cache.num_blocks


@pytest.mark.parametrize("name", ["llama_gqa", "gemma3"])
def test_fc49_cold_against_warm(name: str) -> None:
    model = tiny(name)
    reference = twin(model)
    prompts = [prompt(size, size)[0].tolist() for size in (7, 8, 9, 15, 16, 17, 31)]
    expected = [alone(reference, ids, 12) for ids in prompts]
    engine = make_engine(model, block_size=8)
    logprobs: list[Any] = []
    for _ in range(4):
        outs = engine.generate(prompts, params(12, logprobs=0))
        assert tokens_of(outs) == expected
        logprobs.append([[entry.logprob for entry in out.logprobs or []] for out in outs])
    cold, *warm = torch.tensor(logprobs)
    for run in warm:
        torch.testing.assert_close(run, cold, rtol=0, atol=2e-3)
    drained(engine)


def test_fc50_two_calls_with_other_inputs_and_the_model_as_it_was_found() -> None:
    model = tiny("gemma3")
    before = snapshot(model)
    engine = make_engine(model)
    for seed in (0, 1):
        prompts = family(9, 4, 2, 6, seed=seed)[:: 1 - 2 * seed]
        assert tokens_of(engine.generate(prompts, params(4))) == [alone(twin(model), p, 4) for p in prompts]
        assert snapshot(model) == before
