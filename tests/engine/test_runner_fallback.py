"""What cannot run in one row runs one sequence at a time, with a reason that says why."""

from __future__ import annotations

import hf_testkit as kit
import pytest
import step_testkit as steps
import torch
from transformers import LlamaForCausalLM

from radixkv.attention import ReferenceBackend, make_backend


class Unwilling(ReferenceBackend):
    name = "unwilling"

    def unsupported(self, spec):
        return "it will not"


class Wrong(ReferenceBackend):
    """Right for decodes, a little wrong for prompts."""

    def run(self, spec, query, keys, values, sinks=None):
        out = super().run(spec, query, keys, values, sinks)
        return out if len(out) == self._batch.num_entries else out * 1.02


class Broken(ReferenceBackend):
    def run(self, spec, query, keys, values, sinks=None):
        raise RuntimeError("no kernel for this card")


@pytest.mark.parametrize("scattered", [True, False])
@pytest.mark.parametrize("name", steps.ALL)
def test_one_sequence_at_a_time(name, scattered):
    model = steps.build(name)
    pool = steps.Pool(model, scattered=scattered)
    runner = steps.make_runner(model, pool, Unwilling())
    assert runner.fallback_reason is not None
    if name in steps.FLAT:
        assert runner.fallback_reason == "attention backend 'unwilling': it will not"
    twin = kit.twin(model)
    a, b, c = pool.seq(26, 1), pool.seq(40, 2), pool.seq(22, 3)
    steps.run_and_compare(runner, twin, pool, [(a, 19), (b, 7)])
    steps.run_and_compare(runner, twin, pool, [(a, 1), (b, 21), (c, 3)])
    steps.run_and_compare(runner, twin, pool, [(a, 1), (b, 1), (c, 17)])
    for _ in range(3):
        steps.run_and_compare(runner, twin, pool, [(a, 1), (b, 1)])


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("bloom", "BloomForCausalLM does not use transformers' AttentionInterface"),
        ("falcon", "FalconForCausalLM does not use transformers' AttentionInterface"),
        ("llama4", "its attention masks are neither causal nor those of a sliding window"),
    ],
)
def test_reasons(name, reason):
    model = steps.build(name)
    assert steps.make_runner(model, steps.Pool(model)).fallback_reason == reason


@pytest.mark.skipif(kit.TRANSFORMERS < (5, 0), reason="caches expanded heads")
def test_reason_of_latent_attention():
    model = steps.build("deepseek_v3")
    reason = steps.make_runner(model, steps.Pool(model)).fallback_reason
    assert reason == "DeepseekV3Attention changes keys and values after they are cached"


def test_a_backend_that_computes_something_else_is_found_out():
    model = steps.build("llama_gqa")
    pool = steps.Pool(model)
    runner = steps.make_runner(model, pool, Wrong())
    assert "gives other logits in a forward over several sequences" in runner.fallback_reason
    steps.run_and_compare(runner, kit.twin(model), pool, [(pool.seq(20), 19)])


def test_a_backend_that_fails():
    model = steps.build("llama_gqa")
    pool = steps.Pool(model)
    runner = steps.make_runner(model, pool, Broken())
    assert runner.fallback_reason.endswith("no kernel for this card")
    assert "\n" not in runner.fallback_reason
    steps.run_and_compare(runner, kit.twin(model), pool, [(pool.seq(20), 19)])


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("CUDA out of memory. Tried to allocate 2 GiB")]
)
def test_a_lack_of_memory_says_nothing_about_the_model(error):
    class Starved(Broken):
        def run(self, *args, **kwargs):
            raise error

    model = steps.build("llama_gqa")
    with pytest.raises(type(error)):
        steps.make_runner(model, steps.Pool(model), Starved())
    assert steps.make_runner(model, steps.Pool(model)).fallback_reason is None


def test_a_mask_of_its_own():
    model = steps.build("llama_gqa")

    def mask(module, args, kwargs):
        q = kwargs["hidden_states"].shape[1]
        if kwargs.get("attention_mask") is None:
            kwargs["attention_mask"] = torch.ones(q, q, dtype=torch.bool).tril()[None, None]
        return args, kwargs

    model.model.layers[1].self_attn.register_forward_pre_hook(mask, with_kwargs=True)
    runner = steps.make_runner(model, steps.Pool(kit.twin(model)))
    assert "LlamaAttention brings an attention mask of its own" in runner.fallback_reason


def test_attention_that_changes_later_is_an_error():
    model = steps.build("llama_gqa")
    pool = steps.Pool(model)
    runner = steps.make_runner(model, pool)
    step = pool.step([(pool.seq(20), 19)])
    model.model.layers[1].self_attn.scaling *= 2
    with pytest.raises(kit.errors.InvalidRequestError, match="another attention than it did before"):
        runner.execute(step)
    assert model.config._attn_implementation == "sdpa"


def _plain_forward(model, past_key_values, **kwargs):
    return LlamaForCausalLM.forward(model, **{kit.cache_keyword(LlamaForCausalLM): past_key_values}, **kwargs)


class IntegersOnly(LlamaForCausalLM):
    """Takes a number of logits to keep, not their places."""

    def forward(self, input_ids, position_ids=None, past_key_values=None, use_cache=None, logits_to_keep=0):
        if not isinstance(logits_to_keep, int):
            raise TypeError("logits_to_keep is a number")
        more = dict(position_ids=position_ids, use_cache=use_cache, logits_to_keep=logits_to_keep)
        return _plain_forward(self, past_key_values, input_ids=input_ids, **more)


class AllLogits(LlamaForCausalLM):
    """Always computes all logits."""

    def forward(self, input_ids, position_ids=None, past_key_values=None, use_cache=None):
        more = dict(position_ids=position_ids, use_cache=use_cache)
        return _plain_forward(self, past_key_values, input_ids=input_ids, **more)


@pytest.mark.parametrize("kind", [IntegersOnly, AllLogits])
@pytest.mark.parametrize("backend", [None, Unwilling()])
def test_models_that_keep_other_logits(kind, backend):
    plain = steps.build("llama_gqa")
    model = plain
    model = kind(plain.config).eval()
    model.load_state_dict(plain.state_dict())
    pool = steps.Pool(plain)
    runner = steps.make_runner(model, pool, backend)
    assert (runner.fallback_reason is None) == (backend is None)
    a, b = pool.seq(20, 1), pool.seq(30, 2)
    steps.run_and_compare(runner, plain, pool, [(a, 17), (b, 9)])
    steps.run_and_compare(runner, plain, pool, [(a, 1), (b, 9)])


def test_a_pool_of_another_model_is_refused():
    pool = steps.Pool(steps.build("llama_gqa"))
    with pytest.raises(kit.errors.UnsupportedModelError, match="failed in a forward over its KV in the pool"):
        steps.make_runner(steps.build("llama"), pool)


def test_a_pool_elsewhere_is_refused():
    model = steps.build("llama_gqa")
    pool = steps.Pool(model)
    with pytest.raises(kit.errors.InvalidRequestError, match="pool is on cpu"):
        steps.make_runner(model.to("meta"), pool)


def test_rotary_angles_that_depend_on_the_length():
    model = steps.build(
        "llama_gqa", max_position_embeddings=32, rope_scaling={"rope_type": "dynamic", "factor": 2.0}
    )
    pool = steps.Pool(model)
    runner = steps.make_runner(model, pool, make_backend("auto", "cpu"))
    assert (runner.rope.kind, runner.rope.limit) == ("dynamic", 32)
    assert runner.fallback_reason is None
    twin = kit.twin(model)
    a, b = pool.seq(32, 1), pool.seq(20, 2)
    steps.run_and_compare(runner, twin, pool, [(a, 31), (b, 9)])
    steps.run_and_compare(runner, twin, pool, [(a, 1), (b, 9)])
