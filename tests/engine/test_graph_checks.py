"""Whether a graph that is wrong is found out, one that is right believed, and one that fails later left alone."""

from __future__ import annotations

import gc
import logging
import sys
import weakref

import numpy as np
import pytest
import torch
from engine_testkit import alone, drained, family, make_engine, params, tiny, tokens_of, twin
from graphs_testkit import device_of, graph_engine
from test_engine_flashinfer import small

from radixkv.attention.flashinfer_graphs import GraphAttention, StepBuffers, graph_device
from radixkv.attention.flashinfer_kinds import graph_plan_bytes
from radixkv.attention.flashinfer_tables import PageTable
from radixkv.attention.interface import AttentionSpec
from radixkv.engine.graph_checks import Tolerances, logits_problem
from radixkv.engine.graphs import graph_sizes
from tests.attention.fake_flashinfer import Double
from tests.attention.flashinfer_testkit import over_double

WARNINGS = "radixkv.engine"


def half(**kwargs):
    """An engine in bfloat16, whose logits tell little."""
    backend = over_double(double=Double(graphs=True))
    kwargs = {"block_size": 16, "num_blocks": 128, "max_num_seqs": 4, **kwargs}
    return make_engine(small(torch.bfloat16, 64), attention=backend, **kwargs)


# Each changes what a graph's page tables show of a context, `start` to `stop`.
BUGS = {
    "the newest token is not seen": lambda start, stop: (start, np.maximum(stop - 1, 1)),
    "one token too many is seen": lambda start, stop: (start, np.where(stop % 16, stop + 1, stop)),
    "the first block of long contexts is not seen": (
        lambda start, stop: (np.where(stop - start > 128, start + 16, start), stop)
    ),
    "rows of other sequences": lambda start, stop: (np.roll(start, 1), np.roll(stop, 1)),
}


@pytest.mark.parametrize("bug", BUGS)
def test_wrong_attention_is_found_out_in_half_precision(bug, monkeypatch, caplog):
    """None of these change logits by more than two right forwards may differ, for one prompt or another."""
    between = PageTable.between.__func__

    def wrong(cls, entries, starts, stops, size):
        if sys._getframe(1).f_code.co_filename.endswith("flashinfer_graphs.py") and len(starts):
            starts, stops = BUGS[bug](starts, stops)
        return between(cls, entries, starts, stops, size)

    monkeypatch.setattr(PageTable, "between", classmethod(wrong))
    engine = half()
    with caplog.at_level(logging.WARNING, WARNINGS):
        engine.generate(family(0, 40, 41, 42), params(4))
    assert engine.num_graph_steps == 0
    assert engine.graph_sizes == []
    assert "is another than torch's" in engine.no_graphs_reason
    assert len(caplog.records) == 1
    drained(engine)


def test_right_attention_is_believed_in_half_precision():
    engine = half()
    engine.generate(family(0, 40, 41, 42), params(6))
    assert engine.no_graphs_reason is None
    assert engine.num_graph_steps > 0


def test_tolerances_of_logits():
    right = torch.randn(8, 1000, generator=torch.Generator().manual_seed(1))
    tolerances = Tolerances.of(torch.bfloat16, "cuda")
    noise = torch.randn(8, 1000, generator=torch.Generator().manual_seed(2))
    assert logits_problem(right, right + 0.02 * noise, tolerances) is None
    assert "the usual row" in logits_problem(right, right + 0.1 * noise, tolerances)
    one = right.clone()
    one[3] += 0.1 * noise[3]  # another expert, say
    assert logits_problem(right, one, tolerances) is None
    one[3] = right[4]
    assert logits_problem(right, one, tolerances) is not None
    one[3] = float("nan")
    assert logits_problem(right, one, tolerances) is not None


@pytest.mark.parametrize("when", ["padded", "long"])
def test_compared_again_on_steps_of_another_kind(when):
    """A graph that is right for the first steps, and wrong for padded ones or for long contexts."""
    model = tiny("llama_gqa")
    engine = graph_engine(model, max_num_seqs=4, num_blocks=64)
    prompts = family(0, *[9] * 4)
    assert tokens_of(engine.generate(prompts, params(5))) == [alone(twin(model), p, 5) for p in prompts]
    graphs = engine._runner.graphs
    assert graphs.sizes == [4]
    assert graphs.num_compared == 1
    later = family(0, 9, 9, 9, seed=5) if when == "padded" else family(0, 70, 70, 70, 70, seed=5)
    device_of(engine).after_replay = lambda graph: graph.output.neg_()
    expected = [alone(twin(model), p, 5) for p in later]
    assert tokens_of(engine.generate(later, params(5))) == expected
    assert graphs.num_compared == 2
    assert "other logits" in engine.no_graphs_reason
    drained(engine)


# -- failures -----------------------------------------------------------------------------------------------------


def test_a_look_ahead_that_fails_costs_nothing(monkeypatch, caplog):
    model = tiny("llama_gqa")
    prompts = family(0, 5, 9, 12)
    expected = [alone(twin(model), p, 8) for p in prompts]
    engine = graph_engine(model, max_num_seqs=4)
    plan, executed = GraphAttention.plan, []

    def failing(self, contexts):
        if sys._getframe(1).f_code.co_name == "_look_ahead":
            plan(self, contexts)  # half of it is done
            raise RuntimeError("no plan")
        plan(self, contexts)

    monkeypatch.setattr(GraphAttention, "plan", failing)
    execute = engine._runner.execute
    engine._runner.execute = lambda step: executed.append(step) or execute(step)
    with caplog.at_level(logging.WARNING, WARNINGS):
        assert tokens_of(engine.generate(prompts, params(8))) == expected
    assert len(executed) == engine.stats.steps
    assert engine.num_graph_steps > 0
    assert engine._runner.graphs.num_planned_ahead == 0
    assert [record.getMessage() for record in caplog.records] == [
        "a decode step could not be planned ahead: RuntimeError: no plan"
    ]
    drained(engine)


def test_a_replay_that_fails_is_run_without_and_the_graph_dropped(caplog):
    model = tiny("llama_gqa")
    prompts = family(0, 5, 9, 12)
    expected = [alone(twin(model), p, 8) for p in prompts]
    engine = graph_engine(model, max_num_seqs=4)
    executed = []
    execute = engine._runner.execute
    engine._runner.execute = lambda step: executed.append(step) or execute(step)
    assert tokens_of(engine.generate(prompts, params(8))) == expected
    assert engine.graph_sizes == [4]
    done = engine.num_graph_steps

    def fail(graph):
        raise RuntimeError("the launch failed\nand much more")

    device_of(engine).before_replay = fail
    with caplog.at_level(logging.WARNING, WARNINGS):
        for _ in range(2):
            assert tokens_of(engine.generate(prompts, params(8))) == expected
    assert engine.graph_sizes == []
    assert engine.num_graph_steps == done
    assert engine.no_graphs_reason == "a graph for 4 sequences failed: RuntimeError: the launch failed"
    assert len(caplog.records) == 1
    assert len(executed) == engine.stats.steps
    drained(engine)


# -- what is public, and what is kept -----------------------------------------------------------------------------


def test_graphs_recorded_before_the_first_request():
    model = tiny("llama_gqa")
    engine = graph_engine(model, max_num_seqs=12)
    device = device_of(engine)
    rows = []
    capture = device.capture

    def noted(forward):
        captured = capture(forward)
        rows.append(len(captured.output) if captured.output.dim() == 2 else None)
        return captured

    device.capture = noted
    assert engine.backend_name == "flashinfer"
    assert engine.record_graphs() == engine.graph_sizes == graph_sizes(12)
    assert [count for count in rows if count] == graph_sizes(12)[::-1]
    made = len(device.made)
    assert engine.record_graphs() == graph_sizes(12)
    for count in (1, 3, 12):
        prompts = family(0, *[7] * count)
        assert tokens_of(engine.generate(prompts, params(6))) == [alone(twin(model), p, 6) for p in prompts]
    assert len(device.made) == made
    assert engine.num_graph_steps > 0
    assert engine.no_graphs_reason is None
    drained(engine)


def test_nothing_to_record():
    engine = make_engine(tiny("llama_gqa"), attention="torch")
    assert engine.record_graphs() == []
    assert engine.backend_name == "torch"
    assert "attention runs on torch" in engine.no_graphs_reason


@pytest.mark.parametrize("graphs", [False, True])
def test_a_dropped_engine_takes_its_graphs_along(graphs):
    """Without a run of the garbage collector, which knows nothing of the memory of a GPU."""
    engine = graph_engine(tiny("llama_gqa"), max_num_seqs=4, cuda_graphs=graphs)
    gc.collect()
    gc.disable()
    try:
        engine.generate(family(0, 5, 9, 12), params(5))
        runner = engine._runner
        kept = [weakref.ref(one) for one in (engine, runner, runner.backend)]
        if graphs:
            assert engine.num_graph_steps > 0
            kept.append(weakref.ref(runner.graphs))
            kept += [weakref.ref(graph) for graph in device_of(engine).made[:1]]
            device_of(engine).made.clear()
        del engine, runner
        assert [one() for one in kept] == [None] * len(kept)
    finally:
        gc.enable()


def test_a_closed_engine_has_no_graphs_and_makes_them_again():
    model = tiny("llama_gqa")
    prompts = family(0, 5, 9, 12)
    expected = [alone(twin(model), p, 6) for p in prompts]
    engine = graph_engine(model, max_num_seqs=4)
    for _ in range(2):
        before = engine.num_graph_steps
        assert tokens_of(engine.generate(prompts, params(6))) == expected
        assert engine.num_graph_steps > before
        engine.close()
        assert engine.graph_sizes == []


@pytest.mark.parametrize("heads", [(64, 8), (32, 32), (8, 1), (16, 2), (6, 3)])
def test_plans_have_room_enough_and_no_more(heads):
    """The double asks for what the schedulers allocate; FlashInfer's own choice is 8 MiB each time."""
    spec = AttentionSpec(*heads, 128, 128, 0.1)
    for rows in (1, 8, 64, 512):
        backend = over_double(double=Double())
        buffers = StepBuffers(backend.transfers, [None], rows, 16, 4)
        attention = GraphAttention(backend, [spec], torch.bfloat16, rows, buffers, 16)
        attention.plan(np.full(rows, 33))
        assert graph_plan_bytes(spec, rows, 132) < 256 << 10
    assert graph_device(backend) is None
