"""The engine over FlashInfer's code path: whole runs on the CPU, with a stand-in that enforces FlashInfer's contract.

The same tokens must come out as from the torch backend and from plain `generate()`.
"""

from __future__ import annotations

import logging

import hf_testkit as kit
import pytest
import step_testkit as steps
import torch
from engine_testkit import alone, drained, family, make_engine, params, prompt, tiny, tokens_of, twin

from tests.attention.fake_flashinfer import Double
from tests.attention.flashinfer_testkit import OVER_DOUBLE_COSTS, over_double


def kinds_of(backend):
    """The FlashInfer methods that were called."""
    return {name for name, _, _ in backend.module.calls}


@pytest.mark.parametrize("name", ["llama", "llama_gqa", "gemma3", "qwen3", "mistral", "phi3", "gpt2"])
def test_tokens_are_those_of_generate(name):
    model = tiny(name)
    reference = twin(model)
    prompts = family(21, 1, 5, 12, 3) + family(0, 1, 2, 30, seed=7) + family(21, 5, seed=0)
    expected = [alone(reference, p) for p in prompts]
    backend = over_double()
    engine = make_engine(model, attention=backend)
    assert engine.fallback_reason is None
    for _ in range(2):
        assert tokens_of(engine.generate(prompts, params(8))) == expected
        drained(engine)
    assert "BatchDecodeWithPagedKVCacheWrapper.run" in kinds_of(backend)
    # What the prompts share is longer than mistral's window in all layers.
    assert ("merge_state_in_place" in kinds_of(backend)) == (name != "mistral")


@pytest.mark.parametrize("costs", OVER_DOUBLE_COSTS)
@pytest.mark.parametrize("num_blocks", [12, 40])
def test_tokens_are_those_of_the_torch_backend(costs, num_blocks):
    model = tiny("gemma3")
    prompts = family(13, 2, 6, 9) + family(0, 25, 3, 17, seed=5)
    results = []
    for attention in ("torch", over_double(costs=costs)):
        engine = make_engine(model, attention=attention, num_blocks=num_blocks, max_batched_tokens=23)
        outs = engine.generate(prompts, params(14, temperature=0.8, seed=3))
        results.append(tokens_of(outs))
        drained(engine)
    assert results[0] == results[1]


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss", "gemma3n", "mixtral"])
def test_soft_caps_sinks_shared_layers_and_experts(name):
    model = steps.build(name)
    pool = steps.Pool(model)
    backend = over_double()
    runner = steps.make_runner(model, pool, backend)
    assert runner.fallback_reason is None
    twin_model = kit.twin(model)
    trunk = pool.seq(22, 1)
    steps.run_and_compare(runner, twin_model, pool, [(trunk, 22)])
    forks = [pool.fork(trunk, pool.seq(9, 10 + i).tokens) for i in range(3)]
    steps.run_and_compare(runner, twin_model, pool, [(fork, 4 + i) for i, fork in enumerate(forks)])
    for _ in range(3):
        steps.run_and_compare(runner, twin_model, pool, [(fork, 1) for fork in forks])


def small(dtype, head_dim=64):
    """A model that the real kernels could compute."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=kit.VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=1, head_dim=head_dim, max_position_embeddings=512, initializer_range=0.25,
        tie_word_embeddings=False, pad_token_id=0, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval().to(dtype)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    return model


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_what_the_real_kernels_take(dtype, head_dim):
    """Nothing is relaxed here: dtypes, head sizes and pages are those of a GPU."""
    model = small(dtype, head_dim)
    exact = kit.twin(model)  # float32, the same weights
    pool = steps.Pool(model, block=16)
    backend = over_double(double=Double())
    runner = steps.make_runner(model, pool, backend)
    assert runner.fallback_reason is None
    a, b, c = pool.seq(60, 1), pool.seq(50, 2), pool.seq(40, 3)
    works = [
        [(a, 37), (b, 9)],
        [(a, 1), (b, 25), (c, 30)],
        [(a, 1), (b, 1), (c, 1)],
        [(a, 1), (b, 1), (c, 1)],
    ]
    for work in works:
        for row, (seq, _) in zip(runner.execute(pool.step(work)), work, strict=True):
            right = steps.plain_logits(exact, seq.tokens[: seq.done])[-1]
            plain = steps.plain_logits(model, seq.tokens[: seq.done])[-1]
            # As near to the exact logits as the model's own forward in 16 bits, give or take.
            assert (row - right).norm() < 3 * (plain - right).norm() + 0.02 * right.norm()
    assert kinds_of(backend) >= {
        "BatchPrefillWithPagedKVCacheWrapper.run",
        "BatchDecodeWithPagedKVCacheWrapper.run",
    }


@pytest.mark.parametrize("head_dim", [64, 128])
def test_tokens_in_float16_are_those_of_the_torch_backend(head_dim):
    model = small(torch.float16, head_dim)
    prompts = family(40, 4, 9, 1, 6) + family(0, 30, 7, seed=3)
    results = []
    for attention in ("torch", over_double(double=Double())):
        engine = make_engine(model, attention=attention, block_size=16, num_blocks=64)
        results.append(tokens_of(engine.generate(prompts, params(12))))
        drained(engine)
    assert results[0] == results[1]


def test_models_in_float32_are_left_to_torch_with_one_warning(caplog):
    model = small(torch.float32)
    backend = over_double(double=Double())
    with caplog.at_level(logging.WARNING, "radixkv.attention"):
        engine = make_engine(model, attention=backend)
        ids = prompt(20)[0].tolist()
        assert tokens_of(engine.generate([ids], params(6))) == [alone(twin(model), ids, 6)]
    assert engine.fallback_reason is None
    (record,) = caplog.records
    assert "float32" in record.getMessage()
    assert not any(name.endswith(".run") for name in kinds_of(backend))


def test_a_long_run_waits_for_nothing_when_the_sampler_has(monkeypatch):
    """Drawing a token waits for the device; with that, neither plans nor transfers have anything to wait for."""
    model = tiny("gemma3")
    backend = over_double()
    engine = make_engine(model, attention=backend)
    sample = engine._sampler.sample

    def sampled(*args, **kwargs):
        backend.module.synchronize()
        return sample(*args, **kwargs)

    monkeypatch.setattr(engine._sampler, "sample", sampled)
    backend.module.synchronize()  # the trial of the model draws no tokens
    before = backend.num_waits
    engine.generate(family(21, 1, 5, 12, 3), params(30))
    assert backend.num_waits == before
    (transfers,) = backend.module.transfers
    assert transfers.num_transfers > 30
