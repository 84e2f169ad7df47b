"""A cache may be attached to the model that an engine runs: it does not notice the engine's forwards."""

from __future__ import annotations

import threading

import hf_testkit as kit
import pytest
import step_testkit as steps


def counts(cache):
    stats = cache.stats
    return (
        stats.requests,
        stats.prompt_tokens,
        stats.hit_tokens,
        stats.computed_tokens,
        dict(stats.bypasses),
    )


@pytest.mark.parametrize("name", ["llama_gqa", "gemma3", "deepseek_v3", "opt"])
def test_steps_pass_through_uncounted(name):
    model = steps.build(name)
    twin = kit.twin(model)
    cache = kit.make_cache(model)
    ids = kit.prompt(18)
    expected = kit.greedy(twin, ids)
    pool = steps.Pool(model)
    with cache.attached(model):
        before = counts(cache)
        cached = cache.num_cached_blocks
        runner = steps.make_runner(model, pool)
        a, b = pool.seq(20, 1), pool.seq(30, 2)
        steps.run_and_compare(runner, twin, pool, [(a, 17), (b, 9)])
        assert counts(cache) == before
        assert cache.num_cached_blocks == cached
        kit.same(kit.greedy(model, ids), expected)
        steps.run_and_compare(runner, twin, pool, [(a, 1), (b, 9)])
        kit.same(kit.greedy(model, ids), expected)
        kit.expect_hits(cache, 17)
        steps.run_and_compare(runner, twin, pool, [(a, 1), (b, 1)])
    kit.books(cache)


def test_a_step_between_two_forwards_of_a_session():
    model = steps.build("llama_gqa")
    twin = kit.twin(model)
    cache = kit.make_cache(model)
    pool = steps.Pool(model)
    runner = steps.make_runner(model, pool)
    ids = kit.prompt(18)
    a = pool.seq(20, 1)
    with cache.session(ids) as past:
        keyword = kit.cache_keyword(model)
        model(input_ids=ids[:, :10], **{keyword: past})
        steps.run_and_compare(runner, twin, pool, [(a, 9)])
        logits = model(input_ids=ids[:, 10:], **{keyword: past}).logits
        kit.close(logits, twin(input_ids=ids).logits[:, 10:])
    assert cache.match_length(ids[0]) == 18
    kit.books(cache)


def test_generate_of_another_thread_during_a_step():
    model = steps.build("llama_gqa")
    twin = kit.twin(model)
    cache = kit.make_cache(model)
    pool = steps.Pool(model)
    runner = steps.make_runner(model, pool)
    ids = kit.prompt(18)
    expected = kit.greedy(twin, ids)
    me, got = threading.get_ident(), []

    def hook(*_):
        if threading.get_ident() == me:
            handle.remove()
            thread = threading.Thread(target=lambda: got.append(kit.greedy(model, ids)))
            thread.start()
            thread.join(60)

    handle = model.model.layers[1].register_forward_pre_hook(hook)
    a = pool.seq(20, 1)
    with cache.attached(model):
        steps.run_and_compare(runner, twin, pool, [(a, 9)])
    kit.same(got[0], expected)
    assert cache.stats.requests == 1
    kit.books(cache)
