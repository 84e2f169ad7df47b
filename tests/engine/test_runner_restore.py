"""The model object stays as it was found, whatever happens, and others can use it meanwhile."""

from __future__ import annotations

import _thread
import copy
import signal
import threading
import time

import hf_testkit as kit
import numpy as np
import pytest
import step_testkit as steps
import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from radixkv.hf.own_forward import in_own_forward


def all_configs(model):
    found = {}
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None:
            found[id(config)] = (config, dict(vars(config)))
    return list(found.values())


class Untouched:
    """Model and configs are the same after the block as before it."""

    def __init__(self, model):
        self.model = model

    def __enter__(self):
        self.before = kit.snapshot(self.model)
        self.configs = all_configs(self.model)
        self.random = torch.get_rng_state()

    def __exit__(self, *_):
        assert kit.snapshot(self.model) == self.before
        for config, values in self.configs:
            assert vars(config) == values
        assert torch.equal(torch.get_rng_state(), self.random)
        assert not in_own_forward()


@pytest.mark.parametrize("name", ["llama_gqa", "gemma3", "deepseek_v3", "falcon", "llama4"])
def test_making_and_running(name):
    model = steps.build(name)
    pool = steps.Pool(model)
    with Untouched(model):
        runner = steps.make_runner(model, pool)
        for tensor in (*pool.store.keys, *pool.store.values):
            assert tensor is None or tensor.isnan().all(), "the trial wrote into the pool"
        a, b = pool.seq(20, 1), pool.seq(30, 2)
        runner.execute(pool.step([(a, 17), (b, 9)]))
        runner.execute(pool.step([(a, 1), (b, 9)]))


def test_a_model_in_training_mode_is_tried_in_evaluation_mode():
    model = kit.tiny("gpt2", attn_pdrop=0.5, resid_pdrop=0.5, embd_pdrop=0.5)
    pool = steps.Pool(model)
    model.train()
    model.transformer.h[0].eval()
    with Untouched(model):
        assert steps.make_runner(model, pool).fallback_reason is None


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("name", ["llama_gqa", "falcon"])
def test_a_forward_that_raises_in_the_middle(name, error):
    model = steps.build(name)
    pool = steps.Pool(model)
    runner = steps.make_runner(model, pool)
    twin = kit.twin(model)
    a, b = pool.seq(20, 1), pool.seq(30, 2)
    steps.run_and_compare(runner, twin, pool, [(a, 5), (b, 9)])

    def fail(*_):
        raise error("in layer 1")

    layer = model.model if name == "llama_gqa" else model.transformer.h
    layer = layer.layers[1] if name == "llama_gqa" else layer[1]
    handle = layer.register_forward_hook(fail)
    step = pool.step([(a, 3), (b, 3)])
    with Untouched(model), pytest.raises(error, match="in layer 1"):
        runner.execute(step)
    handle.remove()
    ids = kit.prompt(9)
    assert torch.equal(model(input_ids=ids).logits, twin(input_ids=ids).logits)
    # The same step again, as after `Scheduler.fail`.
    logits = runner.execute(step)
    kit.close(logits[0], steps.plain_logits(twin, a.tokens[:8])[-1])
    kit.close(logits[1], steps.plain_logits(twin, b.tokens[:12])[-1])


def test_a_trial_that_is_interrupted():
    model = steps.build("llama_gqa")
    pool = steps.Pool(model)
    calls = []

    def interrupt(*_):
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt

    model.train()
    handle = model.model.layers[1].register_forward_hook(interrupt)
    with Untouched(model), pytest.raises(KeyboardInterrupt):
        steps.make_runner(model, pool)
    handle.remove()


def test_ctrl_c_at_any_moment():
    """A signal after ever longer waits, until a step gets through without it."""
    model = steps.build("llama_gqa")
    pool = steps.Pool(model)
    runner = steps.make_runner(model, pool, "auto")
    a, b = pool.seq(20, 1), pool.seq(30, 2)
    step = pool.step([(a, 17), (b, 9)])
    runner.execute(step)
    began = time.perf_counter()
    runner.execute(step)
    usual = time.perf_counter() - began
    hits = 0
    with Untouched(model):
        for wait in (*np.linspace(0, usual, 60), *np.linspace(0.8 * usual, 1.1 * usual, 240)):
            timer = threading.Timer(wait, _thread.interrupt_main, [signal.SIGINT])
            try:
                timer.start()
                runner.execute(step)
                timer.join()
                time.sleep(0)
            except KeyboardInterrupt:
                hits += 1
            try:
                timer.join()
                time.sleep(0.0001)
            except KeyboardInterrupt:
                hits += 1
            assert not in_own_forward()
            assert model.config._attn_implementation == "sdpa"
    assert hits == 300
    logits = runner.execute(step)
    kit.close(logits[0], steps.plain_logits(kit.twin(model), a.tokens[:17])[-1])


def in_layer(model, action):
    """Run `action` once, in the middle of the next forward of this thread."""
    me = threading.get_ident()

    def hook(*_):
        if threading.get_ident() == me:
            handle.remove()
            action()

    handle = model.get_decoder().layers[1].register_forward_pre_hook(hook)


def in_thread(action):
    results = []
    thread = threading.Thread(target=lambda: results.append(action()))
    thread.start()
    thread.join(60)
    assert results, "the thread failed"
    return results[0]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["llama_gqa", "gemma3", "gemma2", "gpt_oss", "gemma3n"])
def test_plain_forwards_of_another_thread_meanwhile(name, attention):
    model = steps.build(name)
    model.config._attn_implementation = attention
    kit.plain(lambda: model(input_ids=kit.prompt(5)))  # not every model has both
    pool = steps.Pool(model)
    runner = steps.make_runner(model, pool)
    if runner.fallback_reason:
        pytest.skip(runner.fallback_reason)
    twin = kit.twin(model)
    padded = kit.pad_left([kit.prompt(5, 1), kit.prompt(19, 2)])
    ids = kit.prompt(30, 3)

    def plain(which):
        with torch.no_grad():
            logits = [which(**padded).logits, which(input_ids=ids).logits]
        return [*logits, kit.greedy(which, ids, 4)]

    expected = plain(twin)
    got = []
    a, b = pool.seq(20, 1), pool.seq(30, 2)
    with Untouched(model):
        in_layer(model, lambda: got.extend(in_thread(lambda: plain(model))))
        steps.run_and_compare(runner, twin, pool, [(a, 17), (b, 9)])
    assert len(got) == 3
    for value, right in zip(got, expected, strict=True):
        assert torch.equal(value, right)


def test_two_runners_of_one_model_in_two_threads():
    model = steps.build("gemma3")
    twin = kit.twin(model)
    pools = [steps.Pool(model), steps.Pool(model)]
    runners = [steps.make_runner(model, pool) for pool in pools]

    def other():
        c = pools[1].seq(30, 3)
        steps.run_and_compare(runners[1], twin, pools[1], [(c, 9)])
        steps.run_and_compare(runners[1], twin, pools[1], [(c, 1)])
        return True

    a, b = pools[0].seq(20, 1), pools[0].seq(30, 2)
    with Untouched(model):
        in_layer(model, lambda: in_thread(other))
        steps.run_and_compare(runners[0], twin, pools[0], [(a, 17), (b, 9)])
        steps.run_and_compare(runners[0], twin, pools[0], [(a, 1), (b, 1)])


def test_an_implementation_set_meanwhile_stays_and_is_noticed():
    model = steps.build("llama_gqa")
    pool = steps.Pool(model)
    runner = steps.make_runner(model, pool)
    a = pool.seq(20, 1)
    step = pool.step([(a, 17)])
    in_layer(model, lambda: model.set_attn_implementation("eager"))
    with pytest.raises(kit.errors.InvalidRequestError, match="must not be set while the engine runs"):
        runner.execute(step)
    assert model.config._attn_implementation == "eager"
    logits = runner.execute(step)
    kit.close(logits[0], steps.plain_logits(kit.twin(model), a.tokens[:17])[-1])


def test_a_user_s_own_attention_function():
    def loud(module, query, key, value, mask, **kwargs):
        calls.append(mask)
        return sdpa(module, query, key, value, mask, **kwargs)

    calls = []
    sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]
    AttentionInterface.register("loud_sdpa", loud)
    AttentionMaskInterface.register("loud_sdpa", ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    model = steps.build("llama_gqa")
    model.config._attn_implementation = "loud_sdpa"
    pool = steps.Pool(model)
    runner = steps.make_runner(model, pool)
    assert runner.fallback_reason is None
    assert model.config._attn_implementation == "loud_sdpa"
    assert calls
    a = pool.seq(20, 1)
    steps.run_and_compare(runner, kit.twin(steps.build("llama_gqa")), pool, [(a, 17)])


def test_a_copy_made_in_the_middle_works():
    model = steps.build("llama_gqa")
    pool = steps.Pool(model)
    runner = steps.make_runner(model, pool)
    copies = []
    in_layer(model, lambda: copies.append(copy.deepcopy(model)))
    a = pool.seq(20, 1)
    runner.execute(pool.step([(a, 17)]))
    ids = kit.prompt(9)
    twin = kit.twin(model)
    assert torch.equal(copies[0](input_ids=ids).logits, twin(input_ids=ids).logits)
    mine = steps.Pool(copies[0])
    steps.run_and_compare(steps.make_runner(copies[0], mine), twin, mine, [(mine.seq(20, 1), 17)])
