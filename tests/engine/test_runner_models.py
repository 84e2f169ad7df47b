"""Every kind of model gives the logits of its plain forwards, whatever is mixed into a step."""

from __future__ import annotations

import hf_testkit as kit
import numpy as np
import pytest
import step_testkit as steps
import torch
from hypothesis import given, settings
from hypothesis import strategies as st


@pytest.mark.parametrize("name", steps.ALL)
def test_ragged_steps(name):
    model = steps.build(name)
    pool = steps.Pool(model)
    runner = steps.make_runner(model, pool)
    if name in steps.FLAT:
        assert runner.fallback_reason is None
    if name in steps.ONE_BY_ONE:
        assert runner.fallback_reason is not None
    twin = kit.twin(model)
    a, b, c = pool.seq(24, 1), pool.seq(40, 2), pool.seq(22, 3)
    # Prompts longer and shorter than the window of 8; b in chunks, its second one beside a decode.
    steps.run_and_compare(runner, twin, pool, [(a, 19), (b, 7)])
    steps.run_and_compare(runner, twin, pool, [(a, 1), (b, 21), (c, 3)])
    steps.run_and_compare(runner, twin, pool, [(a, 1), (b, 1), (c, 17)])
    for _ in range(2):
        steps.run_and_compare(runner, twin, pool, [(a, 1), (b, 1), (c, 1)])


@pytest.mark.parametrize("name", ["llama_gqa", "gemma3", "gemma2", "gpt_oss"])
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_backends(name, backend):
    model = steps.build(name)
    pool = steps.Pool(model)
    runner = steps.make_runner(model, pool, backend)
    assert runner.fallback_reason is None
    twin = kit.twin(model)
    a, b = pool.seq(40, 1), pool.seq(30, 2)
    steps.run_and_compare(runner, twin, pool, [(a, 33), (b, 11)])
    for _ in range(6):
        steps.run_and_compare(runner, twin, pool, [(a, 1), (b, 3)])


@pytest.mark.parametrize("name", ["llama_gqa", "gemma3", "gpt2"])
@pytest.mark.parametrize("block", [1, 3, 16])
def test_block_sizes_and_consecutive_blocks(name, block):
    model = steps.build(name)
    for scattered in (False, True):
        pool = steps.Pool(model, block=block, blocks=96, scattered=scattered)
        runner = steps.make_runner(model, pool)
        assert runner.fallback_reason is None
        a, b = pool.seq(40, 1), pool.seq(30, 2)
        twin = kit.twin(model)
        steps.run_and_compare(
            runner, twin, pool, [(a, 38), (b, 5)]
        )  # one long run of slots: written in slices
        steps.run_and_compare(runner, twin, pool, [(a, 1), (b, 12)])


@pytest.mark.parametrize("name", ["llama_gqa", "gemma3", "deepseek_v3"])
def test_shared_blocks(name):
    model = steps.build(name)
    pool = steps.Pool(model)
    runner = steps.make_runner(model, pool)
    twin = kit.twin(model)
    trunk = pool.seq(22, 1)
    steps.run_and_compare(runner, twin, pool, [(trunk, 22)])
    forks = [pool.fork(trunk, pool.seq(9, 10 + i).tokens) for i in range(3)]
    assert all(fork.done == 20 for fork in forks)
    before = [
        keys[torch.as_tensor(trunk.blocks[:5])].clone() for keys in runner.store.keys if keys is not None
    ]
    steps.run_and_compare(runner, twin, pool, [(fork, 5 + i) for i, fork in enumerate(forks)])
    steps.run_and_compare(runner, twin, pool, [(fork, 1) for fork in forks])
    after = [keys[torch.as_tensor(trunk.blocks[:5])] for keys in runner.store.keys if keys is not None]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("name", ["llama_gqa", "falcon", "opt", "gpt2", "gemma3n"])
def test_only_what_is_sampled_has_logits(name):
    model = steps.build(name)
    pool = steps.Pool(model)
    runner = steps.make_runner(model, pool)
    twin = kit.twin(model)
    a, b, c = pool.seq(20, 1), pool.seq(20, 2), pool.seq(20, 3)

    step = pool.step([(a, 6), (b, 7), (c, 8)], sample=[])
    head = []
    handle = model.get_output_embeddings().register_forward_hook(lambda *args: head.append(args))
    logits = runner.execute(step)
    handle.remove()
    assert logits.shape == (0, runner.vocab_size)
    assert not head, "nobody samples: the head has nothing to do"

    # The prompt of the second entry ends here and three sequences fork from it; the third one is still at it.
    logits = runner.execute(pool.step([(a, 1), (b, 2), (c, 3)], sample=[0, 1, 1, 1]))
    assert logits.shape == (2, runner.vocab_size)
    kit.close(logits[0], steps.plain_logits(twin, a.tokens[:7])[-1])
    kit.close(logits[1], steps.plain_logits(twin, b.tokens[:9])[-1])
    logits = runner.execute(pool.step([(c, 1)]))
    kit.close(logits[0], steps.plain_logits(twin, c.tokens[:12])[-1])


@pytest.mark.parametrize("name", ["llama_gqa", "gemma3"])
@settings(max_examples=12)
@given(data=st.data())
def test_any_way_to_cut_prompts_into_steps(name, data):
    model = steps.build(name)
    block = data.draw(st.sampled_from([1, 2, 4, 7, 16]))
    pool = steps.Pool(model, block=block, blocks=160)
    runner = steps.make_runner(model, pool, data.draw(st.sampled_from(["auto", "reference"])))
    twin = kit.twin(model)
    seqs = [
        pool.seq(n, i) for i, n in enumerate(data.draw(st.lists(st.integers(1, 30), min_size=1, max_size=5)))
    ]
    plain = [steps.plain_logits(twin, seq.tokens) for seq in seqs]
    while open_ := [i for i, seq in enumerate(seqs) if seq.done < len(seq.tokens)]:
        chosen = data.draw(st.lists(st.sampled_from(open_), min_size=1, unique=True))
        work = [(i, data.draw(st.integers(1, len(seqs[i].tokens) - seqs[i].done))) for i in chosen]
        work.sort(key=lambda pair: pair[1] > 1 or seqs[pair[0]].done == 0)  # decodes first
        logits = runner.execute(pool.step([(seqs[i], count) for i, count in work]))
        for row, (i, _) in zip(logits, work, strict=True):
            kit.close(row, plain[i][seqs[i].done - 1])


def test_a_step_without_tokens(tiny_llama):
    pool = steps.Pool(tiny_llama)
    runner = steps.make_runner(tiny_llama, pool)
    step = pool.step([(pool.seq(3), 3)])
    for name in ("rows", "query_lens", "context_lens", "token_ids", "positions", "slot_mapping", "sampling"):
        setattr(step, name, getattr(step, name)[:0])
    step.query_starts, step.block_tables = np.zeros(1, np.int32), step.block_tables[:0]
    assert runner.execute(step).shape == (0, 256)


@pytest.mark.parametrize("name", ["llama_gqa", "gemma3", "falcon"])
def test_bfloat16(name):
    model = steps.build(name).bfloat16()
    pool = steps.Pool(model)
    runner = steps.make_runner(model, pool)
    assert (runner.fallback_reason is None) == (name in steps.FLAT)
    reference = kit.twin(model)  # fp32, the same weights
    a, b = pool.seq(20, 1), pool.seq(30, 2)
    for work in ([(a, 17), (b, 9)], [(a, 1), (b, 15)], [(a, 1), (b, 1)]):
        logits = runner.execute(pool.step(work))
        assert logits.dtype == torch.float32
        for row, (seq, _) in zip(logits, work, strict=True):
            exact = steps.plain_logits(reference, seq.tokens[: seq.done])[-1]
            plain = steps.plain_logits(model, seq.tokens[: seq.done])[-1]
            # As near to the exact logits as the model's own bf16 forward, give or take.
            assert (row - exact).norm() < 3 * (plain - exact).norm() + 0.02 * exact.norm()


def test_under_autocast():
    model = steps.build("llama_gqa")
    pool = steps.Pool(model)
    runner = steps.make_runner(model, pool)
    a, b = pool.seq(20, 1), pool.seq(30, 2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        runner.execute(pool.step([(a, 17), (b, 9)]))
        logits = runner.execute(pool.step([(a, 1), (b, 15)]))
        plain = steps.plain_logits(kit.twin(model), b.tokens[:24])[-1]
    assert logits.dtype == torch.float32
    assert (logits[1] - plain).norm() < 0.1 * plain.norm()


@pytest.mark.parametrize("name", ["llama_gqa", "falcon"])
def test_called_in_inference_mode_and_outside(name):
    model = steps.build(name)
    pool = steps.Pool(model)
    with torch.inference_mode():
        runner = steps.make_runner(model, pool)
    twin = kit.twin(model)
    a, b = pool.seq(20, 1), pool.seq(30, 2)
    with torch.inference_mode():
        steps.run_and_compare(runner, twin, pool, [(a, 17), (b, 9)])
    steps.run_and_compare(runner, twin, pool, [(a, 1), (b, 9)])
    with torch.enable_grad():
        assert not runner.execute(pool.step([(a, 1), (b, 1)])).requires_grad
    model(input_ids=kit.prompt(5)).logits.sum().backward()


def test_lora():
    peft = pytest.importorskip("peft")
    model = steps.build("llama_gqa")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    wrapped = peft.get_peft_model(model, config).eval()
    pool = steps.Pool(wrapped)
    runner = steps.make_runner(wrapped, pool)
    assert runner.fallback_reason is None
    a, b = pool.seq(20, 1), pool.seq(30, 2)
    steps.run_and_compare(runner, wrapped, pool, [(a, 17), (b, 9)])
    steps.run_and_compare(runner, wrapped, pool, [(a, 1), (b, 9)])
    with wrapped.disable_adapter():
        c = pool.seq(12, 4)
        steps.run_and_compare(runner, kit.twin(steps.build("llama_gqa")), pool, [(c, 12)])


def test_virtual_tokens_are_refused():
    peft = pytest.importorskip("peft")
    model = steps.build("llama_gqa")
    pool = steps.Pool(model)
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    wrapped = peft.get_peft_model(model, config).eval()
    with pytest.raises(kit.errors.UnsupportedModelError, match="virtual tokens"):
        steps.make_runner(wrapped, pool)
