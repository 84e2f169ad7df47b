"""The real FlashInfer on a GPU, against the formula in float64: what the tests over its double promise.

pytest -m cuda tests/attention/test_flashinfer_gpu.py
"""

from __future__ import annotations

import pytest
import torch

from radixkv.attention import AttentionSpec, FlashInferBackend, backend_choice
from radixkv.attention.flashinfer_plan import FlashInferCosts
from tests.attention.attention_testkit import dense_attention, make_scene
from tests.attention.test_backends import levels, plain_spec

CHOICE, REASON = backend_choice("cuda")
pytestmark = [pytest.mark.cuda, pytest.mark.skipif(CHOICE != "flashinfer", reason=REASON)]

ALWAYS = FlashInferCosts(launch_bytes=-(10**9), split_bytes=0)
NEVER = FlashInferCosts(cascade=False, split_bytes=10**12)


@pytest.fixture(scope="module", params=[ALWAYS, NEVER], ids=["cascade", "flat"])
def backend(request):
    return FlashInferBackend("cuda", costs=request.param)


def compare(backend, scene, tolerance=2e-2, times=1):
    """Run a scene on the GPU; the formula takes the same rounded inputs, in float64 on the CPU."""
    args = [
        None if tensor is None else tensor.cuda()
        for tensor in (scene.query, scene.keys, scene.values, scene.sinks)
    ]
    expected = dense_attention(scene)
    for _ in range(times):
        backend.plan(scene.batch, [scene.spec])
        assert scene.spec not in backend._others, backend.fallback_reason(scene.spec)
        out = backend.run(scene.spec, *args)
        assert scene.spec not in backend._others, backend.fallback_reason(scene.spec)
        assert out.dtype == scene.query.dtype
        torch.testing.assert_close(out.cpu().double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (8, 2), (7, 1), (16, 2)])
def test_decodes_prompts_and_mixed_steps(backend, dtype, head_dim, heads):
    for decodes, prompts in [(9, 0), (0, 4), (9, 4)]:
        scene = make_scene(
            plain_spec(None, *heads, head_dim), levels(decodes, prompts, own=3), dtype=dtype, sinks=True
        )
        compare(backend, scene)


@pytest.mark.parametrize("window", [1, 16, 30, 50])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_windows_and_soft_caps(backend, window, softcap):
    spec = AttentionSpec(8, 2, 128, 128, 0.1, window, softcap)
    for decodes, prompts in [(9, 0), (0, 4), (9, 4)]:
        # No NaN before a window: what is read there is multiplied by 0.
        compare(backend, make_scene(spec, levels(decodes, prompts, own=3), dtype=torch.bfloat16))


@pytest.mark.parametrize("block_size", [1, 8, 16, 33, 64])
def test_block_sizes_and_long_contexts(backend, block_size):
    paths = [([], length, 1) for length in (1, 15, 16, 17, 127, 128, 129, 500, 1023, 2049)]
    paths += [([], 1000, 77), ([], 300, 300)]
    compare(
        backend, make_scene(plain_spec(None, 8, 2, 128), paths, block_size=block_size, dtype=torch.bfloat16)
    )


def test_more_heads_than_a_merge_can_hold(backend):
    compare(
        backend, make_scene(AttentionSpec(66, 2, 128, 128, 0.1), levels(9, 4, own=2), dtype=torch.bfloat16)
    )


def test_rows_between_two_shared_parts(backend):
    paths = [([("a", 6)], 26, 1)] * 2 + [([], 9, 1)] + [([("b", 6)], 27, 1)] * 2
    compare(backend, make_scene(plain_spec(dim=64), paths, dtype=torch.bfloat16, permute=False))


def test_many_steps_in_a_row_never_use_a_plan_that_was_overwritten(backend):
    """Steps are given to the device faster than it works; every result is looked at only in the end."""
    spec = plain_spec(None, 8, 2, 128)
    scenes = [
        make_scene(
            spec,
            [([], 40 + 7 * step + i, 1) for i in range(16)],
            block_size=16,
            dtype=torch.bfloat16,
            seed=step,
        )
        for step in range(20)
    ]
    tensors = [tuple(t.cuda() for t in (s.query, s.keys, s.values)) for s in scenes]
    backend.plan(scenes[0].batch, [spec])
    backend.run(spec, *tensors[0])
    torch.cuda.synchronize()
    busy = torch.randn(4096, 4096, device="cuda")
    outs = []
    for scene, args in zip(scenes, tensors, strict=True):
        for _ in range(5):
            busy = torch.tanh(busy @ busy)
        backend.plan(scene.batch, [spec])
        outs.append(backend.run(spec, *args).clone())
    for scene, out in zip(scenes, outs, strict=True):
        torch.testing.assert_close(out.cpu().double(), dense_attention(scene), rtol=2e-2, atol=2e-2)


def test_a_step_waits_for_nothing(backend):
    """No call of `plan` and `run` waits for the device, beside events that have long happened."""
    spec = plain_spec(None, 8, 2, 128)
    scene = make_scene(spec, levels(9, 4, own=3), dtype=torch.bfloat16)
    args = [t.cuda() for t in (scene.query, scene.keys, scene.values)]
    compare(backend, scene)
    torch.cuda.synchronize()
    waits = backend.num_waits
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            backend.plan(scene.batch, [spec])
            for _ in range(4):
                out = backend.run(spec, *args)
            torch.cuda.set_sync_debug_mode("default")
            torch.cuda.synchronize()  # as drawing a token does
            torch.cuda.set_sync_debug_mode("error")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert backend.num_waits == waits
    torch.testing.assert_close(out.cpu().double(), dense_attention(scene), rtol=2e-2, atol=2e-2)


def test_offsets_beyond_32_bits(backend):
    """A pool of over 2**32 elements, of which a few blocks at its end are used."""
    spec = AttentionSpec(8, 2, 128, 128, 0.1)
    small = make_scene(spec, levels(3, 2, own=2), dtype=torch.bfloat16)
    blocks = 2**32 // (4 * 2 * 128) + 1000
    free, _ = torch.cuda.mem_get_info()
    if free < 2 * blocks * 4 * 2 * 128 * 2 + (2 << 30):
        pytest.skip("needs 19 GiB of GPU memory")
    keys, values = (torch.zeros(blocks, 4, 2, 128, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    shift = blocks - len(small.keys)
    keys[shift:], values[shift:] = small.keys.cuda(), small.values.cuda()
    tables = small.batch.block_tables.copy()
    for row, table in zip(tables, small.blocks, strict=True):
        row[: len(table)] = [block + shift for block in table]
    batch = type(small.batch)(small.batch.query_starts, small.batch.context_lens, tables, 4, 3)
    backend.plan(batch, [spec])
    out = backend.run(spec, small.query.cuda(), keys, values)
    torch.testing.assert_close(out.cpu().double(), dense_attention(small), rtol=2e-2, atol=2e-2)


def test_other_kinds_go_to_torch(backend):
    for spec, dtype in [(plain_spec(dim=80), torch.bfloat16), (plain_spec(dim=64), torch.float32)]:
        scene = make_scene(spec, levels(5, 3, own=2), dtype=dtype)
        args = [t.cuda() for t in (scene.query, scene.keys, scene.values)]
        backend.plan(scene.batch, [spec])
        out = backend.run(spec, *args)
        torch.testing.assert_close(out.cpu().double(), dense_attention(scene), rtol=2e-2, atol=2e-2)
