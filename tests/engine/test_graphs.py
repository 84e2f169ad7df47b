"""Decode steps as CUDA graphs, played on the CPU: the same tokens, and no graph where it does not hold."""

from __future__ import annotations

import itertools
import logging

import hf_testkit as kit
import pytest
import step_testkit as steps
import torch
from engine_testkit import alone, drained, family, make_engine, params, tiny, tokens_of, twin
from graphs_testkit import device_of, graph_engine, padded_rows_are_harmless
from hypothesis import given
from hypothesis import strategies as st
from test_engine_flashinfer import small

from radixkv.engine.graphs import graph_sizes
from radixkv.engine.runner import GraphLimits, ModelRunner
from tests.attention.fake_flashinfer import Double
from tests.attention.flashinfer_testkit import over_double

PROMPTS = family(21, 1, 5, 12, 3) + family(0, 1, 2, 30, seed=7)
WARNINGS = "radixkv.engine"
# Their forwards in older transformers: experts one by one, a look for padding.
WAIT_BEFORE_5 = ("gpt2", "gpt_oss", "mixtral")


def reasons(caplog):
    return [record.getMessage() for record in caplog.records if "CUDA graphs" in record.getMessage()]


@given(st.integers(1, 3000))
def test_the_ladder_holds_every_batch_with_little_padding(most):
    sizes = graph_sizes(most)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == most
    assert all(later <= max(2 * size, size + 8) for size, later in itertools.pairwise(sizes))
    assert len(sizes) < 12 + most / 32


@pytest.mark.parametrize(
    "name",
    [
        "llama",
        "gemma3",
        "qwen3",
        "mistral",
        "phi3",
        "gpt2",
        "gemma2",
        "gpt_oss",
        "gemma3n",
        "mixtral",
        "neox",
    ],
)
def test_tokens_are_those_of_generate(name, caplog):
    """Windows, soft caps, sinks, experts, layers that share their KV."""
    model = steps.build(name)
    reference = twin(model)
    expected = [alone(reference, p, 10) for p in PROMPTS]
    engine = graph_engine(model, max_num_seqs=8)
    with caplog.at_level(logging.WARNING, WARNINGS):
        for _ in range(2):
            assert tokens_of(engine.generate(PROMPTS, params(10))) == expected
            drained(engine)
    if name in WAIT_BEFORE_5 and kit.TRANSFORMERS < (5,):
        assert "waits for the device" in engine.no_graphs_reason
        return
    assert reasons(caplog) == []
    assert engine.no_graphs_reason is None
    assert engine.num_graph_steps >= 14
    assert 8 in engine._runner.graphs.sizes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [64, 256])
def test_what_the_real_kernels_take(dtype, head_dim):
    """Nothing of the double is relaxed, and blocks are those of a GPU."""
    model = small(dtype, head_dim)
    prompts = family(40, 4, 9, 1, 6) + family(0, 30, 7, seed=3)
    results = []
    for graphs in (False, True):
        backend = over_double(double=Double(graphs=True))
        engine = make_engine(
            model, attention=backend, block_size=16, num_blocks=64, cuda_graphs=graphs, max_num_seqs=7
        )
        results.append(tokens_of(engine.generate(prompts, params(12))))
        assert (engine.num_graph_steps > 0) == graphs
        drained(engine)
    assert results[0] == results[1]


def test_groups_of_two_take_the_cuda_core_kernel():
    model = tiny("llama_gqa")
    reference = twin(model)
    backend = over_double(double=Double.relaxed(graphs=True))
    engine = graph_engine(model, backend=backend, max_num_seqs=8)
    seen = padded_rows_are_harmless(engine)
    assert tokens_of(engine.generate(PROMPTS, params(8))) == [alone(reference, p) for p in PROMPTS]
    made = [
        kwargs for name, _, kwargs in backend.module.calls if name == "BatchDecodeWithPagedKVCacheWrapper"
    ]
    assert {kwargs["use_tensor_cores"] for kwargs in made if kwargs.get("use_cuda_graph")} == {False}
    assert seen["padding"] > 0


def test_sampled_and_forked_tokens_are_those_without_graphs():
    model = tiny("gemma3")
    results = []
    for graphs in (False, True):
        engine = graph_engine(model, max_num_seqs=16, cuda_graphs=graphs)
        outs = engine.generate(PROMPTS, params(9, temperature=0.8, seed=3, n=2, logprobs=2))
        results.append([(o.token_ids, [one.top_ids for one in o.logprobs]) for o in outs])
        drained(engine)
    assert engine.num_graph_steps > 5
    assert results[0] == results[1]


# -- which steps --------------------------------------------------------------------------------------------------


def test_only_steps_of_decodes_are_replayed():
    model = tiny("llama_gqa")
    engine = graph_engine(model, max_batched_tokens=8, max_num_seqs=4)
    forwards = []
    flattened = engine._runner._flattened
    engine._runner._flattened = lambda *args: forwards.append(args[2]) or flattened(*args)
    for p in PROMPTS:
        engine.add_request(p, params(6))
    while engine.has_unfinished:
        engine.step()
        engine.check()
    mixed = [step for step in forwards if step.num_decodes < step.num_seqs]
    plain = [step for step in forwards if step.num_decodes == step.num_seqs]
    assert len(mixed) > 3
    # The first of each size, and the first padded one of each, which graphs are held against.
    assert len(plain) == engine._runner.graphs.num_compared >= len(engine._runner.graphs.sizes)
    assert engine.num_graph_steps == engine.stats.steps - len(mixed) - len(plain)
    drained(engine)


def test_graphs_are_made_when_they_are_needed_and_share_their_buffers():
    model = tiny("llama_gqa")
    engine = graph_engine(model, max_num_seqs=20)
    assert engine._runner.graphs.sizes == []
    sizes = set()
    for count in (1, 2, 3, 7, 9, 17, 20, 5, 12):
        engine.generate(family(0, *[6] * count), params(4))
        sizes.add(next(size for size in graph_sizes(20) if size >= count))
        assert engine._runner.graphs.sizes == sorted(sizes)
    assert engine.no_graphs_reason is None
    drained(engine)


@pytest.mark.parametrize("how", ["argument", "environment", "torch", "double without graphs"])
def test_switched_off(how, monkeypatch):
    model = tiny("llama_gqa")
    kwargs = {}
    if how == "argument":
        kwargs["cuda_graphs"] = False
    if how == "environment":
        monkeypatch.setenv("RADIXKV_NO_GRAPHS", "1")
    if how == "torch":
        kwargs["backend"] = "torch"
    if how == "double without graphs":
        kwargs["backend"] = over_double()
    engine = graph_engine(model, **kwargs)
    assert tokens_of(engine.generate(PROMPTS, params(6))) == [alone(twin(model), p, 6) for p in PROMPTS]
    assert engine.num_graph_steps == 0
    wanted = "switched off" if how in ("argument", "environment") else "attention runs on"
    assert wanted in engine.no_graphs_reason


def test_layers_that_flashinfer_does_not_compute():
    model = small(torch.float32)
    engine = make_engine(model, attention=over_double(double=Double(graphs=True)), num_blocks=64)
    assert "float32" in engine.no_graphs_reason
    assert tokens_of(engine.generate(PROMPTS[:2], params(4))) == [
        alone(twin(model), p, 4) for p in PROMPTS[:2]
    ]


def test_models_that_run_one_sequence_at_a_time():
    engine = graph_engine(steps.build("bloom"))
    assert engine.fallback_reason is not None
    assert "one by one" in engine.no_graphs_reason
    engine.generate(PROMPTS[:2], params(4))


def test_where_attending_a_shared_prefix_once_saves_more(monkeypatch):
    model = tiny("llama_gqa")
    reference = twin(model)
    engine = graph_engine(model, max_num_seqs=8)
    prompts = family(40, 1, 2, 3, 4)
    expected = [alone(reference, p) for p in prompts]
    monkeypatch.setattr("radixkv.attention.flashinfer_graphs._LAYER_LAUNCH_BYTES", 4000)
    assert tokens_of(engine.generate(prompts, params(8))) == expected
    assert engine.num_graph_steps == 0
    merges = [name for name, _, _ in engine._runner.backend.module.calls if name.startswith("merge")]
    assert merges
    monkeypatch.undo()
    assert tokens_of(engine.generate(prompts, params(8))) == expected
    assert engine.num_graph_steps > 0


# -- whether a graph is believed ----------------------------------------------------------------------------------


def patched(model, change):
    """A model whose layers do something more: part of its class, so that no hook is seen."""
    kind = type(model.model.norm)
    forward = kind.forward

    class Norm(kind):
        def forward(self, x):
            return change(forward(self, x))

    model.model.norm.__class__ = Norm
    return model


def test_a_forward_that_counts_in_python_is_found_out(caplog):
    model = tiny("llama_gqa")
    expected = [alone(twin(model), p, 8) for p in PROMPTS]
    state = {"graph": False}
    # Harmless for the tokens, as long as nothing is recorded; then it is as wrong as can be.
    engine = graph_engine(patched(model, lambda x: -x if state["graph"] else x), max_num_seqs=8)

    def record():
        state["graph"] = True

    device = device_of(engine)
    device.before_capture = record
    device.before_replay = lambda graph: state.update(graph=False)
    with caplog.at_level(logging.WARNING, WARNINGS):
        assert tokens_of(engine.generate(PROMPTS, params(8))) == expected
    (reason,) = reasons(caplog)
    assert "other logits" in reason
    assert "other logits" in engine.no_graphs_reason
    assert engine.num_graph_steps == 0
    assert len(device.made) == 2  # its attention alone, too
    drained(engine)


WAITS = {
    "a number": lambda x: x * (1.0 if x.isfinite().all() else 0.0),
    "a mask": lambda x: x.index_put((x > 1e9,), torch.zeros(())),
    "numpy": lambda x: x + torch.from_numpy(x.numpy() * 0),
}


@pytest.mark.parametrize("name", WAITS)
def test_a_forward_that_waits_runs_without_with_one_warning(name, caplog):
    model = tiny("llama_gqa")
    expected = [alone(twin(model), p, 6) for p in PROMPTS]
    engine = graph_engine(patched(model, WAITS[name]), max_num_seqs=8)
    with caplog.at_level(logging.WARNING, WARNINGS):
        for _ in range(2):
            assert tokens_of(engine.generate(PROMPTS, params(6))) == expected
        engine.generate(PROMPTS[:1], params(3))  # another size
    (reason,) = reasons(caplog)
    assert "waits for the device" in reason
    assert engine.num_graph_steps == 0
    drained(engine)


def test_no_memory_for_another_graph(caplog):
    """Those that there are serve smaller batches, too."""
    model = tiny("llama_gqa")
    reference = twin(model)
    engine = graph_engine(model, max_num_seqs=16)
    engine.generate(family(0, *[5] * 7), params(4))
    assert 8 in engine._runner.graphs.sizes

    def out():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3 bytes")

    device_of(engine).before_capture = out
    with caplog.at_level(logging.WARNING, WARNINGS):
        for count in (12, 3, 12, 1):
            prompts = family(0, *[5] * count)
            before = engine.num_graph_steps
            outs = engine.generate(prompts, params(5))
            assert tokens_of(outs) == [alone(reference, p, 5) for p in prompts]
            assert (engine.num_graph_steps > before) == (count <= 8)
    (reason,) = reasons(caplog)
    assert "out of memory" in reason
    drained(engine)


def test_a_forward_that_raises_beside_its_graph_is_tried_again():
    model = tiny("llama_gqa")
    engine = graph_engine(model, max_num_seqs=8)
    execute, calls = engine._runner._flattened, []

    def failing(*args):
        calls.append(args[2])
        if len(calls) == 2:  # the plain forward of the first step of decodes
            raise RuntimeError("once")
        return execute(*args)

    engine._runner._flattened = failing
    outs = engine.generate(PROMPTS, params(6))
    assert [out.error for out in outs] == [None] * len(PROMPTS)
    assert tokens_of(outs) == [alone(twin(model), p, 6) for p in PROMPTS]
    drained(engine)


# -- what a graph holds for ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["in place", "data", "new parameter"])
def test_graphs_go_when_weights_change(how):
    model = tiny("llama_gqa")
    engine = graph_engine(model, max_num_seqs=8)
    before = tokens_of(engine.generate(PROMPTS, params(8)))
    first = len(device_of(engine).made)
    weight = model.model.layers[1].mlp.down_proj.weight
    with torch.no_grad():
        if how == "in place":
            weight.mul_(-1)
        elif how == "data":
            weight.data = -weight.data
        else:
            model.model.layers[1].mlp.down_proj.weight = torch.nn.Parameter(-weight)
    expected = [alone(twin(model), p, 8) for p in PROMPTS]
    assert before != expected
    assert tokens_of(engine.generate(PROMPTS, params(8))) == expected
    assert len(device_of(engine).made) > first
    assert engine.no_graphs_reason is None
    drained(engine)


def test_weights_that_change_between_two_steps():
    model = tiny("llama_gqa")
    engine = graph_engine(model, max_num_seqs=8)
    rid = engine.add_request(PROMPTS[0], params(12))
    tokens = [out.token_id for _ in range(6) for out in engine.step()]
    with torch.no_grad():
        model.lm_head.weight.mul_(-1)
    while engine.has_unfinished:
        tokens += [out.token_id for out in engine.step() if out.rid == rid]
    reference = twin(model)
    assert tokens[6:] == alone(reference, PROMPTS[0] + tokens[:6], 6)
    drained(engine)


@pytest.mark.parametrize("where", ["inside", "model", "global"])
def test_hooks_are_called_in_every_step(where, caplog):
    model = tiny("llama_gqa")
    expected = [alone(twin(model), p, 8) for p in PROMPTS]
    engine = graph_engine(model, max_num_seqs=8)
    engine.generate(PROMPTS, params(8))
    assert engine.num_graph_steps > 0
    engine.cache.clear()
    calls = []

    def hook(module, *_):
        if module is (model.model.layers[0] if where == "inside" else model):
            calls.append(module)

    if where == "global":
        handle = torch.nn.modules.module.register_module_forward_hook(hook)
    else:
        handle = (model.model.layers[0] if where == "inside" else model).register_forward_hook(hook)
    before, done = engine.stats.steps, engine.num_graph_steps
    with handle, caplog.at_level(logging.WARNING, WARNINGS):
        for _ in range(2):
            assert tokens_of(engine.generate(PROMPTS, params(8))) == expected
    assert len(calls) == engine.stats.steps - before
    assert engine.num_graph_steps == done
    (reason,) = reasons(caplog)
    assert "hooks" in reason
    assert engine.no_graphs_reason in reason
    assert tokens_of(engine.generate(PROMPTS, params(8))) == expected
    assert engine.num_graph_steps > (0 if where == "inside" else done)
    assert engine.no_graphs_reason is None
    drained(engine)


def test_an_attached_cache_does_not_stand_in_the_way():
    model = tiny("llama_gqa")
    expected = [alone(twin(model), p, 8) for p in PROMPTS]
    engine = graph_engine(model, max_num_seqs=8)
    with engine.cache.attached(model):
        assert tokens_of(engine.generate(PROMPTS, params(8))) == expected
        assert engine.num_graph_steps > 0
    drained(engine)


def test_autocast_runs_without(caplog):
    model = tiny("llama_gqa")
    results = []
    for graphs in (False, True):
        engine = graph_engine(model, max_num_seqs=8, cuda_graphs=graphs)
        engine.generate(PROMPTS, params(4))
        done = engine.num_graph_steps
        with torch.autocast("cpu", torch.bfloat16), caplog.at_level(logging.WARNING, WARNINGS):
            results.append(tokens_of(engine.generate(PROMPTS, params(6))))
        assert engine.num_graph_steps in (0, done)
    assert results[0] == results[1]
    assert len(reasons(caplog)) == 1


def test_inference_mode_may_come_and_go():
    model = tiny("gemma3")
    expected = [alone(twin(model), p, 8) for p in PROMPTS]
    engine = graph_engine(model, max_num_seqs=8)
    for mode in (True, False, True):
        with torch.inference_mode(mode):
            assert tokens_of(engine.generate(PROMPTS, params(8))) == expected
    assert engine.no_graphs_reason is None
    assert engine.num_graph_steps > 0


def test_logits_stay_when_the_next_step_is_replayed():
    model = tiny("llama_gqa")
    pool = steps.Pool(model)
    runner = ModelRunner(
        model, pool.store, over_double(double=Double.relaxed(graphs=True)), GraphLimits(4, 64)
    )
    runner.under("these weights")
    sequences = [pool.seq(20, seed) for seed in range(3)]
    runner.execute(pool.step([(seq, 12) for seq in sequences]))
    kept = []
    for _ in range(5):
        logits = runner.execute(pool.step([(seq, 1) for seq in sequences]))
        kept.append((logits, logits.clone()))
    assert runner.graphs.num_replays == 4
    for logits, as_they_were in kept:
        assert logits.shape == (3, runner.vocab_size)
        assert torch.equal(logits, as_they_were)
    for row, seq in zip(kept[-1][0], sequences, strict=True):
        wanted = steps.plain_logits(twin(model), seq.tokens[: seq.done])[-1]
        torch.testing.assert_close(row, wanted, rtol=0, atol=2e-3)


def test_contexts_as_long_as_there_may_be():
    """The longest context fills what there is for page ids, and nothing is planned beyond it."""
    model = tiny("gemma3")
    reference = twin(model)
    for num_blocks, max_seq_len in ((64, 21), (5, 64)):
        engine = graph_engine(model, max_num_seqs=1, num_blocks=num_blocks, max_seq_len=max_seq_len)
        ids = PROMPTS[0][:5]
        (out,) = engine.generate([ids], params(16))
        assert out.token_ids == alone(reference, ids, 16)
        assert engine.num_graph_steps == 14
        drained(engine)
