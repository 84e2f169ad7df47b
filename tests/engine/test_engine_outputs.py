"""The engine gives what plain `generate()` gives for each prompt alone, whatever else is in the batch."""

from __future__ import annotations

import pytest
import torch
from engine_testkit import alone, drained, family, make_engine, params, prompt, tiny, tokens_of, twin
from hf_testkit import ARCHS, count_tokens, distinct_tokens

import radixkv


@pytest.mark.parametrize("name", ARCHS)
def test_a_ragged_batch_with_shared_prefixes(name: str) -> None:
    model = tiny(name)
    reference = twin(model)
    prompts = family(21, 1, 5, 12, 3) + family(0, 1, 2, 30, seed=7) + family(21, 5, seed=0)
    expected = [alone(reference, p) for p in prompts]
    engine = make_engine(model)
    outs = engine.generate(prompts, params(8))
    assert tokens_of(outs) == expected
    assert [c.finish_reason for c in outs] == ["length"] * len(prompts)
    assert [c.num_prompt_tokens for c in outs] == [len(p) for p in prompts]
    assert all(0 <= c.num_cached_tokens < c.num_prompt_tokens for c in outs)
    drained(engine)
    again = engine.generate(prompts, params(8))
    assert tokens_of(again) == expected
    assert [c.num_cached_tokens for c in again] == [len(p) - 1 for p in prompts]
    drained(engine)


@pytest.mark.parametrize("preemption", ["recompute", "swap", "auto"])
@pytest.mark.parametrize("num_blocks", [9, 12, 20])
def test_outputs_do_not_depend_on_the_pool(num_blocks: int, preemption: str) -> None:
    model = tiny("llama_gqa")
    reference = twin(model)
    prompts = family(9, 2, 6, 7, 11) + family(0, 3, 17, 4, seed=5)
    expected = [alone(reference, p, 14) for p in prompts]
    host_memory = 0 if preemption == "recompute" else "64KiB"
    engine = make_engine(model, num_blocks=num_blocks, preemption=preemption, host_memory=host_memory)
    outs = engine.generate(prompts, params(14))
    assert tokens_of(outs) == expected
    drained(engine)
    if num_blocks == 9:
        assert engine.stats.preemptions > 0
    if preemption == "recompute":
        assert engine.stats.swapped_out_blocks == 0


@pytest.mark.parametrize("max_batched_tokens", [1, 3, 7, 64])
@pytest.mark.parametrize("max_num_seqs", [1, 3, 64])
def test_outputs_do_not_depend_on_the_size_of_a_step(max_batched_tokens: int, max_num_seqs: int) -> None:
    model = tiny("gemma3")
    reference = twin(model)
    prompts = family(13, 2, 6, 9) + family(0, 25, seed=5)
    expected = [alone(reference, p, 6) for p in prompts]
    engine = make_engine(model, max_batched_tokens=max_batched_tokens, max_num_seqs=max_num_seqs)
    assert tokens_of(engine.generate(prompts, params(6))) == expected
    drained(engine)


@pytest.mark.parametrize("block_size", [1, 2, 16, 64])
def test_outputs_do_not_depend_on_the_block_size(block_size: int) -> None:
    model = tiny("gemma3")
    reference = twin(model)
    prompts = family(18, 2, 6, 9, 1)
    expected = [alone(reference, p, 6) for p in prompts]
    engine = make_engine(model, block_size=block_size, num_blocks=max(4, 512 // block_size))
    for _ in range(2):
        assert tokens_of(engine.generate(prompts, params(6))) == expected
        drained(engine)


def test_a_shared_prefix_is_computed_once_though_all_arrive_together() -> None:
    model = tiny("llama_gqa")
    prompts = family(40, 4, 4, 4, 4)
    engine = make_engine(model)
    with count_tokens(model) as counts:
        engine.generate(prompts, params(1))
    rows = [torch.tensor([p]) for p in prompts]
    # Whole blocks are shared while they are under way: 40 is a multiple of the block size.
    assert sum(counts) == distinct_tokens(rows)
    assert engine.stats.hit_tokens == 3 * 40
    drained(engine)


def test_several_completions_of_a_prompt_share_its_prefill() -> None:
    model = tiny("llama_gqa")
    reference = twin(model)
    ids = prompt(22)[0].tolist()
    engine = make_engine(model)
    with count_tokens(model) as counts:
        outs = engine.generate([ids], params(6, n=3))
    assert tokens_of(outs) == [alone(reference, ids, 6)] * 3
    assert [c.index for c in outs] == [0, 1, 2]
    assert sum(counts) == 22 + 3 * 5
    assert engine.stats.cow_copies == 2, "the first writers copy, the last one owns the tail"
    drained(engine)


def test_a_fork_goes_on_like_its_parent() -> None:
    model = tiny("llama_gqa")
    ids = prompt(10)[0].tolist()
    expected = alone(twin(model), ids, 12)
    engine = make_engine(model)
    rid = engine.add_request(ids, params(12))
    for _ in range(4):
        engine.step()
    index = engine.fork(rid)
    done = {}
    while engine.has_unfinished:
        for out in engine.step():
            if out.completion is not None:
                done[out.index] = out.completion
    assert set(done) == {0, index}
    assert tokens_of(list(done.values())) == [expected, expected]
    drained(engine)


def test_it_shares_the_cache_with_an_attached_model() -> None:
    model = tiny("llama_gqa")
    reference = twin(model)
    first, second = family(30, 5, 6)
    cache = radixkv.PrefixCache.for_model(model, num_blocks=128, block_size=4)
    engine = make_engine(model, cache=cache)
    assert engine.cache is cache
    assert tokens_of(engine.generate([first], params(6))) == [alone(reference, first, 6)]
    with cache.attached(model):
        assert alone(model, second, 6) == alone(reference, second, 6)
        assert cache.last_requests[0].hit_tokens == 30
        third = [*second, *alone(reference, second, 6)[:3], 7]
        (out,) = engine.generate([third], params(6))
        assert out.token_ids == alone(reference, third, 6)
        assert out.num_cached_tokens == len(third) - 1
    assert cache.stats.bypasses == {}
    drained(engine)


def test_statistics_of_the_cache_count_each_prompt_once() -> None:
    model = tiny("llama_gqa")
    prompts = family(24, 4, 4)
    engine = make_engine(model, num_blocks=18)
    engine.generate(prompts, params(20))
    stats = engine.cache.stats
    assert stats.requests == 2
    assert stats.prompt_tokens == sum(map(len, prompts))
    assert stats.hit_tokens == engine.stats.hit_tokens == 24
    assert engine.stats.prompt_tokens == stats.prompt_tokens
    assert engine.stats.generated_tokens == 40


def test_namespaces_share_nothing() -> None:
    model = tiny("llama_gqa")
    ids = prompt(20)[0].tolist()
    engine = make_engine(model)
    hits = [
        engine.generate([ids], params(2), namespace=name)[0].num_cached_tokens for name in ("a", "b", "a")
    ]
    assert hits == [0, 0, 19]
    assert engine.cache.clear("a") > 0
    assert engine.generate([ids], params(2), namespace="a")[0].num_cached_tokens == 0
    assert engine.generate([ids], params(2), namespace="b")[0].num_cached_tokens == 19


@pytest.mark.parametrize("order", ["fcfs", "prefix"])
def test_results_come_in_the_order_of_the_prompts(order: str) -> None:
    model = tiny("llama_gqa")
    reference = twin(model)
    prompts = [p for i in range(4) for p in family(12, 3, 7, 1, seed=i)][::-1]
    engine = make_engine(model, max_num_seqs=2, order=order)
    outs = engine.generate(prompts, [params(1 + i % 5) for i in range(len(prompts))])
    assert tokens_of(outs) == [alone(reference, p, 1 + i % 5) for i, p in enumerate(prompts)]
    drained(engine)
