"""What a decode step makes the host wait for: its tokens, and nothing else. And what is done while the device works."""

from __future__ import annotations

import contextlib

import pytest
import torch
from engine_testkit import alone, drained, family, params, tiny, twin
from graphs_testkit import Waits, device_of, graph_engine

from radixkv.engine import sampling_call
from radixkv.store import copy_stream

PROMPTS = family(21, 1, 5, 12, 3)


def argmax(scores):
    """`best` as it is on a device: on a CPU it looks into the memory."""
    ids = scores.argmax(dim=-1)
    return ids, scores.gather(1, ids[:, None])[:, 0] > -torch.inf


class OnItsWay:
    """`Fetched`, whose wait is counted."""

    def __init__(self, waits, tensor):
        self.waits, self.tensor = waits, tensor

    def get(self):
        self.waits.found["fetched"] += 1
        return self.waits.add_host(self.tensor.clone())


@contextlib.contextmanager
def on_a_device(engine, waits, monkeypatch):
    """Let a CPU stand for a device: what is sent there without waiting is another tensor."""

    def send(array, device):
        return torch.tensor(array)

    for module in (copy_stream, sampling_call):
        monkeypatch.setattr(module, "to_device", send)
    monkeypatch.setattr("radixkv.engine.runner.to_device", send)
    monkeypatch.setattr("radixkv.hf.watch.Fetched", lambda tensor: OnItsWay(waits, tensor))
    monkeypatch.setattr(sampling_call, "best", argmax)
    for buffer in engine._runner.backend.transfers._buffers:
        waits.add_host(buffer.tensor)
    with waits:
        yield


def decoding(engine, rows=4, length=40):
    """Until all sequences decode and there is a graph for them."""
    for ids in PROMPTS[:rows]:
        engine.add_request(ids, params(length))
    while engine.num_graph_steps < 2:
        engine.step()


def test_the_watch_sees_what_would_wait(monkeypatch):
    waits = Waits()
    with waits:
        device, host = torch.ones(3), torch.from_numpy(torch.ones(3).numpy())
        assert waits.found == {"numpy": 1}
        host.tolist()
        host[host > 2].sum().item()
        assert waits.found == {"numpy": 1}
        device.sum().item()
        bool(device.any())
        device[device > 2]
        host.to(torch.device("cpu"))
        device.cpu().numpy().tolist()
    assert waits.found == {
        "numpy": 1, "item": 1, "__bool__": 1, "mask": 1, "copy of ordinary memory": 1, "cpu": 1,
    }  # fmt: skip


@pytest.mark.parametrize("name", ["llama_gqa", "gemma3"])
@pytest.mark.parametrize("graphs", [True, False])
def test_a_step_waits_for_its_tokens_and_nothing_else(name, graphs, monkeypatch):
    model = tiny(name)
    engine = graph_engine(model, max_num_seqs=4, cuda_graphs=graphs)
    if graphs:
        decoding(engine)
    else:
        for ids in PROMPTS:
            engine.add_request(ids, params(40))
        while engine.stats.generated_tokens < 20:
            engine.step()
    monkeypatch.setattr(engine._plug._watch, "_compares_elsewhere", lambda: True)
    if not graphs:
        engine._runner.backend.run = lambda spec, query, *_: torch.zeros_like(query)  # kernels are no torch
    waits = Waits()
    for row in range(10):
        with on_a_device(engine, waits, monkeypatch):
            assert len(engine.step()) == 4
        # The comparison of the weights was queued before anything else of the step.
        assert waits.found == {"cpu": row + 1, "fetched": row + 1}


@pytest.mark.parametrize("name", ["llama_gqa", "gemma3"])
def test_the_next_step_is_planned_while_this_one_is_computed(name, monkeypatch):
    """After the launch, before its tokens are read; as long as the same sequences go on, every plan is made then."""
    model = tiny(name)
    expected = [alone(twin(model), ids, 40) for ids in PROMPTS]
    engine = graph_engine(model, max_num_seqs=4)
    decoding(engine)
    calls = engine._runner.backend.module.calls
    device = device_of(engine)
    device.before_replay = lambda graph: calls.append(("replay", (), {}))
    sample = engine._sampler.sample

    def sampled(*args, **kwargs):
        calls.append(("sample", (), {}))
        engine._runner.backend.module.synchronize()  # reading the tokens waits for the device
        return sample(*args, **kwargs)

    monkeypatch.setattr(engine._sampler, "sample", sampled)
    engine.step()
    before = engine._runner.backend.num_waits
    graphs = engine._runner.graphs
    done = graphs.num_replays, graphs.num_planned_ahead
    for _ in range(10):
        calls.clear()
        engine.step()
        kinds = len(engine._runner.graphs._specs)
        names = [name.removeprefix("BatchDecodeWithPagedKVCacheWrapper.") for name, _, _ in calls]
        runs = [name for name in names if name != "run"]
        assert runs == ["replay", *["plan"] * kinds, "sample"]
    assert (graphs.num_replays, graphs.num_planned_ahead) == (done[0] + 10, done[1] + 10)
    assert engine._runner.backend.num_waits == before
    tokens = {}
    while engine.has_unfinished:
        for out in engine.step():
            if out.completion is not None:
                tokens[out.rid] = out.completion.token_ids
    assert [tokens[rid] for rid in range(4)] == expected
    drained(engine)


def test_one_transfer_of_inputs_and_pages_a_step(monkeypatch):
    engine = graph_engine(tiny("gemma3"), max_num_seqs=4)
    decoding(engine)
    backend = engine._runner.backend
    sends, send = [], backend.transfers.send_into
    monkeypatch.setattr(backend.transfers, "send_into", lambda parts: sends.append(parts) or send(parts))
    monkeypatch.setattr("radixkv.engine.runner.to_device", None)
    for count in range(1, 6):
        engine.step()
        assert len(sends) == count
        assert len(sends[-1]) == 1 + 2  # inputs, pages of full layers, pages of windows


@pytest.mark.parametrize("change", [True, False])
def test_weights_are_compared_without_waiting_for_what_is_queued(change, monkeypatch):
    """A write that shows in no counter is noticed before the step that it comes before; comparing waits late."""
    model = tiny("llama_gqa")
    engine = graph_engine(model, max_num_seqs=4)
    watch = engine._plug._watch
    monkeypatch.setattr(watch, "_compares_elsewhere", lambda: True)
    rid = engine.add_request(PROMPTS[0], params(12))
    monkeypatch.setattr(watch, "_same_content", None)
    tokens = [out.token_id for _ in range(6) for out in engine.step()]
    order = []
    for owner, name in ((watch, "_begin_comparison"), (engine._scheduler, "schedule"), (watch, "overtaken")):
        call = getattr(owner, name)
        monkeypatch.setattr(
            owner, name, lambda *args, call=call, name=name: (order.append(name), call(*args))[1]
        )
    if change:
        # Past the version counter, as a fused optimizer writes.
        model.lm_head.weight.detach().numpy().__imul__(-1)
    tokens += [out.token_id for out in engine.step() if out.rid == rid]
    once = ["_begin_comparison", "schedule", "overtaken"]
    # Where it has changed, what was scheduled is taken back, and everything is computed anew.
    assert order == once * (2 if change else 1)
    while engine.has_unfinished:
        tokens += [out.token_id for out in engine.step() if out.rid == rid]
    assert tokens[6:] == alone(twin(model), PROMPTS[0] + tokens[:6], 6)
    drained(engine)
