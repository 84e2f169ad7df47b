"""The stand-in for CUDA graphs shows what would go wrong on a GPU."""

from __future__ import annotations

import gc

import pytest
import torch

from radixkv.attention.device_graphs import NotCapturable, WaitGuard
from tests.attention.fake_flashinfer import ContractError, FakeGraphs


@pytest.fixture
def graphs():
    return FakeGraphs()


@torch.no_grad()
def test_a_replay_computes_from_what_lies_in_its_memory(graphs):
    weight, x, table = torch.randn(4, 3), torch.zeros(2, 4), torch.zeros(6, 3)
    rows = torch.tensor([1, 4])

    def forward():
        y = (x @ weight).relu()
        table.index_copy_(0, rows, y)
        y += 1  # in place
        return torch.cat([y, torch.arange(3.0)[None]]).T.contiguous()

    graph = graphs.capture(forward)
    place = graph.output.data_ptr()
    for _ in range(3):
        x.copy_(torch.randn(2, 4))
        rows.copy_(torch.randperm(6)[:2])
        table.zero_()
        graph.replay()
        y = (x @ weight).relu()
        wanted = torch.zeros(6, 3)
        wanted[rows] = y
        assert torch.equal(table, wanted)
        assert torch.equal(graph.output, torch.cat([y + 1, torch.arange(3.0)[None]]).T)
        assert graph.output.data_ptr() == place


@torch.no_grad()
def test_nothing_is_computed_before_the_first_replay(graphs):
    x = torch.ones(3)
    graph = graphs.capture(lambda: x * 2)
    assert graph.output.isnan().all()
    graph.replay()
    assert torch.equal(graph.output, torch.full((3,), 2.0))


@torch.no_grad()
def test_numbers_that_python_worked_out_stay_as_they_were(graphs):
    x, calls = torch.ones(3), [0]

    def forward():
        calls[0] += 1
        return x * calls[0]

    graph = graphs.capture(forward)
    for _ in range(2):
        graph.replay()
        assert torch.equal(graph.output, torch.full((3,), 3.0))
    assert calls == [3]


@torch.no_grad()
def test_memory_that_was_given_back_is_noticed(graphs):
    held = [torch.ones(3)]
    graph = graphs.capture(lambda: held[0] + 1)
    graph.replay()
    held[0] = torch.zeros(3)
    gc.collect()
    with pytest.raises(ContractError, match="given back"):
        graph.replay()


WAITS = {
    "item": lambda x: x * x.sum().item(),
    "bool": lambda x: x if x.sum() > 0 else -x,
    "tolist": lambda x: torch.tensor(x.tolist()),
    "numpy": lambda x: torch.from_numpy(x.numpy() + 1),
    "nonzero": lambda x: x.nonzero(),
    "mask": lambda x: x[x > 0],
    "mask written": lambda x: x.clone().masked_fill_(x > 0, 0) + x.index_put((x > 0,), torch.tensor(1.0)),
    "unique": lambda x: x.unique(),
    "repeats": lambda x: torch.repeat_interleave(x.long().clamp(min=0)),
    "histogram": lambda x: torch.histc(x, 4),
}


@pytest.mark.parametrize("name", WAITS)
@torch.no_grad()
def test_the_host_must_not_look_at_a_result(graphs, name):
    x = torch.ones(3)
    with pytest.raises(NotCapturable, match="waits for the device"):
        graphs.capture(lambda: WAITS[name](x))
    assert torch.equal(graphs.capture(lambda: x + 1).output.isnan(), torch.ones(3, dtype=torch.bool))


@torch.no_grad()
def test_what_waits_for_nothing_may_be_recorded():
    x = torch.ones(3)
    with WaitGuard("cpu"):
        x[torch.tensor([0, 2])]
        torch.histc(x, 4, min=0, max=3)
        x.masked_fill(x > 0, 2)
        torch.where(x > 0, x, 0)
        x.to(torch.float16)
        x.topk(2)


def test_copies_between_host_and_device_are_told_by_their_devices():
    guard = WaitGuard("meta")  # plays the device
    host, device = torch.ones(3), torch.ones(3, device="meta")
    with pytest.raises(NotCapturable, match="ordinary memory"), guard:
        host.to("meta")
    with pytest.raises(NotCapturable, match="to the host"), guard:
        host.copy_(device)
    with guard:
        host.to(torch.float64)
        device.to(torch.float64)
        (host > 0).nonzero()
