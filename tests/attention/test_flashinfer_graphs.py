"""Decode attention that is recorded: one graph, many steps, against the formula in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from radixkv.attention import AttentionSpec, TorchBackend
from radixkv.attention.device_graphs import CudaGraphs
from radixkv.attention.flashinfer_graphs import GraphAttention, StepBuffers, graph_device, sharing_pays
from radixkv.attention.flashinfer_kinds import graph_workspace_need
from radixkv.attention.flashinfer_plan import FlashInferCosts
from radixkv.core.errors import InvalidRequestError
from tests.attention.attention_testkit import dense_attention, make_scene
from tests.attention.fake_flashinfer import ContractError, Double, FakeGraphs
from tests.attention.flashinfer_testkit import over_double

ROWS, BLOCKS = 6, 24


def specs_of(window, softcap):
    full = AttentionSpec(4, 2, 16, 16, 0.3, None, softcap)
    return [full, AttentionSpec(4, 1, 16, 16, 0.25, window, softcap)]


class Recorded:
    """A graph that attends over a pool by two kinds of layers."""

    def __init__(self, specs, size, rows=ROWS):
        self.specs, self.size, self.rows = specs, size, rows
        self.backend = over_double(double=Double.relaxed(graphs=True))
        windows = list(dict.fromkeys(spec.window for spec in specs))
        self.buffers = StepBuffers(self.backend.transfers, windows, rows, size, BLOCKS)
        self.attention = GraphAttention(self.backend, specs, torch.float64, rows, self.buffers, size)
        self.pools = [
            [torch.zeros(200, size, spec.num_kv_heads, 16, dtype=torch.float64) for _ in "kv"]
            for spec in specs
        ]
        self.queries = [torch.zeros(rows, spec.num_heads, 16, dtype=torch.float64) for spec in specs]
        self.sinks = [torch.zeros(spec.num_heads, dtype=torch.float64) for spec in specs]
        self.send(np.empty((0, 1), np.int32), np.empty(0, np.int64))
        self.graph = graph_device(self.backend).capture(self.forward)

    def forward(self):
        parts = zip(self.specs, self.queries, self.pools, self.sinks, strict=True)
        return torch.stack([self.attention.run(spec, q, *pool, sinks) for spec, q, pool, sinks in parts])

    def send(self, tables, contexts):
        self.attention.plan(contexts)
        padding = self.rows - len(contexts)
        self.buffers.send(
            np.zeros((3, self.rows), np.int64),
            self.attention.tables,
            tables,
            padding,
            len(self.pools[0][0]) - 1,
        )

    @torch.no_grad()
    def replay(self, scenes):
        """Results of all kinds, for scenes that have sequences in common."""
        batch = scenes[0].batch
        for scene, query, pools, sinks in zip(scenes, self.queries, self.pools, self.sinks, strict=True):
            query.fill_(float("nan"))
            query[: batch.num_entries] = scene.query
            for pool, part in zip(pools, (scene.keys, scene.values), strict=True):
                pool[:-1] = float("nan")
                pool[: len(part)] = part
            sinks.copy_(scene.sinks)
        self.send(batch.block_tables, batch.context_lens)
        self.graph.replay()
        return [part[: batch.num_entries] for part in self.graph.output]


@given(
    st.integers(1, 40), st.sampled_from([None, 5.0]), st.sampled_from([1, 3, 4, 16]), st.data()
)  # window, softcap, block size
def test_one_graph_attends_any_step_of_decodes(window, softcap, size, data):
    specs = specs_of(window, softcap)
    recorded = Recorded(specs, size)
    for step in range(3):
        most = min(40, BLOCKS * size)
        lens = data.draw(st.lists(st.integers(1, most), min_size=1, max_size=ROWS))
        paths = [([], length, 1) for length in lens]
        scenes = [
            make_scene(spec, paths, block_size=size, sinks=True, seed=step, window_junk="blocks")
            for spec in specs
        ]
        for scene, found in zip(scenes, recorded.replay(scenes), strict=True):
            torch.testing.assert_close(found, dense_attention(scene), rtol=1e-5, atol=1e-5)


def test_planned_for_the_lengths_alone():
    """Page ids are sent apart, and may come later than the plan, for which only how many there are counts."""
    recorded = Recorded(specs_of(9, None), 4)
    attention, paths = recorded.attention, [([], length, 1) for length in (5, 17, 30)]
    scenes = [make_scene(spec, paths, sinks=True, seed=4) for spec in recorded.specs]
    wanted = [part.clone() for part in recorded.replay(scenes)]
    contexts = scenes[0].batch.context_lens
    assert attention.is_planned(contexts)
    assert attention.is_planned(contexts.astype(np.int64))
    assert not attention.is_planned(contexts + 1)
    assert not attention.is_planned(contexts[:2])
    attention.plan(np.array([8, 8, 8, 8]))
    attention.plan(contexts)
    recorded.graph.replay()  # what was sent is still there
    for found, right in zip(recorded.graph.output, wanted, strict=True):
        assert torch.equal(found[:3], right)


def test_queries_that_are_not_those_that_were_recorded():
    recorded = Recorded(specs_of(9, None), 4)
    spec, pool = recorded.specs[0], recorded.pools[0]
    with pytest.raises(InvalidRequestError, match="queries must be"):
        recorded.attention.run(spec, torch.zeros(ROWS, 4, 16), *pool)
    with pytest.raises(InvalidRequestError, match="queries must be"):
        recorded.attention.run(spec, torch.zeros(5, 4, 16, dtype=torch.float64), *pool)


def test_a_plan_cannot_be_part_of_a_graph():
    recorded = Recorded(specs_of(9, None), 4)
    device = graph_device(recorded.backend)

    def forward():
        recorded.attention.plan(np.array([3, 4]))
        return recorded.forward()

    with pytest.raises(ContractError, match="page-locked"):
        device.capture(forward)


@pytest.mark.parametrize("rows", [1, 8, 64, 200, 512])
@pytest.mark.parametrize("heads", [(64, 8), (32, 32), (8, 1), (16, 2)])
def test_the_workspace_holds_the_largest_launch(rows, heads):
    """The double asks for what the scheduler of the kernels allocates, and raises if it is not there."""
    spec = AttentionSpec(*heads, 256, 256, 0.1)
    backend = over_double(double=Double())
    buffers = StepBuffers(backend.transfers, [None], rows, 16, 4)
    attention = GraphAttention(backend, [spec], torch.bfloat16, rows, buffers, 16)
    attention.plan(np.full(rows, 33))
    assert backend.wrappers.workspace_bytes >= graph_workspace_need(spec, rows, 132)


def test_who_records():
    assert graph_device(TorchBackend("cpu")) is None
    assert graph_device(over_double()) is None
    assert isinstance(graph_device(over_double(double=Double.relaxed(graphs=True))), FakeGraphs)
    assert CudaGraphs(torch.device("cuda", 0))._device.index == 0


@pytest.mark.parametrize(
    ("prefix", "rows", "costs", "pays"),
    [
        (1000, 64, FlashInferCosts(), True),  # 16000 tokens for all of 64
        (500, 64, FlashInferCosts(), False),  # comes from the cache for all but the first
        (1000, 64, FlashInferCosts(cascade=False), False),
        (0, 64, FlashInferCosts(), False),  # as long, and nothing in common
        (1000, 8, FlashInferCosts(), False),
        (20, 64, FlashInferCosts(), False),
    ],
)
def test_a_prefix_that_many_share_is_attended_once_where_that_saves_more(prefix, rows, costs, pays):
    spec = AttentionSpec(32, 8, 128, 128, 0.1)
    table = np.arange(rows * 1100, dtype=np.int32).reshape(rows, 1100)
    table[:, :prefix] = np.arange(prefix)
    lens = np.full(rows, (prefix or 1000) * 16 + 40, np.int32)
    batch = make_batch(lens, table)
    backend = over_double(costs=costs)
    assert sharing_pays(backend, batch, [spec], 2) == pays


def make_batch(lens, table):
    from radixkv.attention import AttentionBatch

    return AttentionBatch(np.arange(len(lens) + 1, dtype=np.int32), lens, table, 16, len(lens))
