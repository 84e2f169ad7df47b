"""CUDA graphs on a GPU: what the tests over the double promise. `pytest -m cuda tests/engine/test_graphs_gpu.py`

Written without a GPU at hand, and not run on one yet.
"""

from __future__ import annotations

import warnings

import pytest
import torch
from engine_testkit import drained, family, make_engine, params, tokens_of
from graphs_testkit import padded_rows_are_harmless
from test_engine_flashinfer import small
from test_graphs import patched

from radixkv.attention import backend_choice
from radixkv.attention.device_graphs import CudaGraphs, NotCapturable

CHOICE, REASON = backend_choice("cuda")
pytestmark = [pytest.mark.cuda, pytest.mark.skipif(CHOICE != "flashinfer", reason=REASON)]

PROMPTS = family(40, 1, 5, 12, 3) + family(0, 2, 30, 17, seed=7)


def model_on_gpu(dtype=torch.bfloat16, head_dim=64):
    return small(dtype, head_dim).cuda()


def engine_of(model, **kwargs):
    kwargs = {"block_size": 16, "num_blocks": 256, "max_num_seqs": 11, **kwargs}
    return make_engine(model, **kwargs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_logprobs_are_those_without_graphs(dtype, head_dim):
    model = model_on_gpu(dtype, head_dim)
    found = []
    for graphs in (False, True):
        engine = engine_of(model, cuda_graphs=graphs)
        outs = engine.generate(PROMPTS, params(12, logprobs=1))
        found.append(outs)
        drained(engine)
    assert engine.no_graphs_reason is None
    assert engine.num_graph_steps > 5
    for plain, replayed in zip(*found, strict=True):
        same = 0
        while same < 12 and plain.token_ids[same] == replayed.token_ids[same]:
            same += 1
        # Near ties may fall the other way in 16 bits; what is certain must not.
        assert same >= 2
        for a, b in zip(plain.logprobs[:same], replayed.logprobs[:same], strict=True):
            assert abs(a.logprob - b.logprob) < 0.1


def test_padding_and_blocks_of_nobody_are_harmless():
    engine = engine_of(model_on_gpu())
    seen = padded_rows_are_harmless(engine)
    for count in (1, 3, 5, 7, 9, 11):
        outs = engine.generate(family(0, *[7 + i for i in range(count)]), params(9))
        assert [out.error for out in outs] == [None] * count
    assert engine.no_graphs_reason is None
    assert seen["padding"] > 0
    drained(engine)


def test_a_step_waits_for_its_tokens_and_nothing_else():
    engine = engine_of(model_on_gpu(), max_num_seqs=4)
    for ids in PROMPTS[:4]:
        engine.add_request(ids, params(60))
    while engine.num_graph_steps < 3:
        engine.step()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(10):
                assert len(engine.step()) == 4
    finally:
        torch.cuda.set_sync_debug_mode("default")
    waits = [one for one in caught if "synchroniz" in str(one.message)]
    assert len(waits) == 10, {str(one.message) for one in waits}


def test_a_forward_that_waits_leaves_everything_usable():
    model = patched(model_on_gpu(), lambda x: x * (1.0 if x.isfinite().all() else 0.0))
    engine = engine_of(model)
    outs = engine.generate(PROMPTS, params(6))
    assert [out.error for out in outs] == [None] * len(PROMPTS)
    assert "waits for the device" in engine.no_graphs_reason
    torch.rand(3, device="cuda")  # the random numbers of the device go on
    x = torch.zeros(3, device="cuda")
    with torch.no_grad():
        graph = CudaGraphs(torch.device("cuda", torch.cuda.current_device())).capture(lambda: x + 1)
        x.fill_(4)
        graph.replay()
    assert graph.output.tolist() == [5.0] * 3


def test_a_call_that_cuda_refuses_while_it_records_leaves_everything_usable():
    device = torch.device("cuda", torch.cuda.current_device())
    x = torch.ones(3, device=device)
    calls = []

    def forward():
        calls.append(1)
        if len(calls) == 3:
            torch.cuda.synchronize()  # no torch operation: nothing sees it come
        return x * 2

    graphs = CudaGraphs(device)
    with torch.no_grad(), pytest.raises(NotCapturable):
        graphs.capture(forward)
    assert torch.rand(3, device=device).isfinite().all()
    with torch.no_grad():
        graph = graphs.capture(lambda: x * 3)
        graph.replay()
    assert graph.output.tolist() == [3.0] * 3


def test_graphs_go_when_weights_change():
    model = model_on_gpu(torch.float16)
    engine = engine_of(model)
    before = tokens_of(engine.generate(PROMPTS, params(8)))
    with torch.no_grad():
        model.lm_head.weight.data = -model.lm_head.weight.data
    after = tokens_of(engine.generate(PROMPTS, params(8)))
    plain = tokens_of(engine_of(model, cuda_graphs=False).generate(PROMPTS, params(8)))
    assert before != after
    assert sum(a == b for a, b in zip(after, plain, strict=True)) >= len(PROMPTS) - 2
    assert engine.no_graphs_reason is None
    drained(engine)
