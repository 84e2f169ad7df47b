"""The torch backend as it runs away from the CPU: on a GPU if there is one, and with the same costs on the CPU."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from radixkv.attention import AttentionBatch, TorchBackend
from radixkv.attention.torch_backend import _COSTS_ELSEWHERE
from tests.attention.attention_testkit import dense_attention, make_scene
from tests.attention.test_backends import COSTS, levels, plain_spec, scenes

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.cuda,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
        ],
    ),
]
DTYPES = [(torch.float32, 2e-5), (torch.bfloat16, 3e-2)]


def backend_on(device, costs=None):
    return TorchBackend(device, costs=costs or _COSTS_ELSEWHERE, fused=False)


def compare(backend, scene, dtype, tolerance):
    """Run a scene that `backend` has planned; the formula takes the same rounded inputs, in float64 on the CPU."""
    for name in ("query", "keys", "values", "sinks"):
        tensor = getattr(scene, name)
        setattr(scene, name, None if tensor is None else tensor.to(dtype))
    tensors = (scene.query, scene.keys, scene.values, scene.sinks)
    got = backend.run(scene.spec, *(None if each is None else each.to(backend.device) for each in tensors))
    assert got.dtype == dtype
    assert got.device.type == backend.device.type
    torch.testing.assert_close(got.cpu().double(), dense_attention(scene), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
@settings(max_examples=25)
@given(scene=scenes(), costs=st.sampled_from(COSTS))
def test_random_steps(device, dtype, tolerance, scene, costs):
    backend = backend_on(device, costs)
    backend.plan(scene.batch, [scene.spec])
    compare(backend, scene, dtype, tolerance)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
@pytest.mark.parametrize("window", [None, 9, 40])
@pytest.mark.parametrize("costs", [None, COSTS[1]])
def test_decodes_that_grow(device, dtype, tolerance, window, costs):
    backend = backend_on(device, costs)
    whole = make_scene(plain_spec(window), levels(9, 0, own=20))
    for step in range(15):
        contexts = whole.batch.context_lens - 14 + step
        used = -(-contexts // 4)
        blocks = [table[:count] for table, count in zip(whole.blocks, used.tolist(), strict=True)]
        batch = AttentionBatch(whole.batch.query_starts, contexts, whole.batch.block_tables, 4, 9)
        scene = type(whole)(whole.spec, batch, whole.query, whole.keys, whole.values, None, blocks)
        backend.plan(batch, [scene.spec])
        compare(backend, scene, dtype, tolerance)
