"""The FlashInfer backend over its double: the matrix of the torch backend, and what is its own."""

from __future__ import annotations

import gc
import itertools
import logging
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from radixkv.attention import AttentionBatch, AttentionSpec, ReferenceBackend, TorchBackend
from radixkv.attention.flashinfer_backend import FlashInferBackend
from radixkv.attention.flashinfer_kinds import Limits
from radixkv.attention.flashinfer_transfer import Transfers
from radixkv.core.errors import InvalidRequestError
from tests.attention.attention_testkit import dense_attention, make_scene, run
from tests.attention.fake_flashinfer import Double
from tests.attention.flashinfer_testkit import OVER_DOUBLE_COSTS, over_double
from tests.attention.test_backends import levels, plain_spec, scenes

NEAR = {"rtol": 1e-5, "atol": 1e-5}  # its log-sum-exps are float32


def names(backend):
    return [name for name, _, _ in backend.module.calls]


def computed_by_torch(backend):
    """Whether nothing at all was run by FlashInfer."""
    return not any(name.endswith(".run") for name in names(backend))


# -- the matrix -----------------------------------------------------------------------------------------------


@given(scenes(whole_blocks=True), st.sampled_from(OVER_DOUBLE_COSTS))
def test_it_equals_the_reference(scene, costs):
    backend = over_double(costs=costs)
    torch.testing.assert_close(run(backend, scene), run(ReferenceBackend(), scene), **NEAR)
    if scene.spec.key_dim == scene.spec.value_dim and scene.batch.num_tokens:
        assert not computed_by_torch(backend)


@pytest.mark.parametrize("block_size", [1, 2, 3, 7, 16, 33, 64])
@pytest.mark.parametrize("window", [None, 1, 63, 64, 65, 200])
def test_prompts_around_the_borders_of_blocks_and_windows(block_size, window):
    backend = over_double()
    for length, cached in itertools.product([1, 63, 64, 65], [0, 1, block_size, 65]):
        scene = make_scene(
            plain_spec(window), [([], cached + length, length)], block_size=block_size, window_junk="blocks"
        )
        torch.testing.assert_close(run(backend, scene), dense_attention(scene), **NEAR)


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("window", [None, 9, 30, 50])
@pytest.mark.parametrize("permute", [True, False])
@pytest.mark.parametrize("costs", OVER_DOUBLE_COSTS)
def test_shared_prefixes_at_several_levels(heads, window, permute, costs):
    spec = plain_spec(window, *heads)
    scene = make_scene(spec, levels(9, 4, own=2), permute=permute, window_junk="blocks")
    backend = over_double(costs=costs)
    torch.testing.assert_close(run(backend, scene), run(ReferenceBackend(), scene), **NEAR)
    shares = costs is OVER_DOUBLE_COSTS[1] and window is None
    assert ("merge_state_in_place" in names(backend)) or not shares


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 2e-2), (torch.float16, 3e-3)])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("heads", [(1, 1), (4, 2), (6, 1), (7, 1), (8, 1)])
def test_what_the_real_kernels_take(dtype, tolerance, head_dim, heads):
    """Nothing relaxed: the dtypes and head sizes of a GPU, groups of any size, soft caps, sinks and windows."""
    backend = over_double(double=Double())
    for window, softcap in [(None, None), (30, None), (None, 5.0), (30, 5.0)]:
        spec = AttentionSpec(*heads, head_dim, head_dim, 1.3 * head_dim**-0.5, window, softcap)
        for decodes, prompts in [(5, 3), (9, 0), (0, 4)]:
            scene = make_scene(
                spec, levels(decodes, prompts, own=3), dtype=dtype, sinks=decodes == 5, window_junk="blocks"
            )
            out = run(backend, scene)
            assert out.dtype == dtype
            torch.testing.assert_close(out.double(), dense_attention(scene), rtol=tolerance, atol=tolerance)
    assert not backend._others


def test_more_heads_than_a_merge_can_hold():
    spec = AttentionSpec(66, 2, 128, 128, 0.1)  # 1056 threads
    backend = over_double(double=Double())
    for paths in (
        levels(9, 4, own=2),
        [([("a", 6)], 26, 1), ([], 9, 1), ([("b", 6)], 27, 1), ([("a", 6)], 30, 1), ([("b", 6)], 25, 1)],
        [([("a", 6)], 26, 1)] * 2 + [([], 9, 1)] + [([("b", 6)], 27, 1)] * 2,
    ):
        scene = make_scene(spec, paths, dtype=torch.bfloat16, sinks=True)
        torch.testing.assert_close(run(backend, scene).double(), dense_attention(scene), rtol=2e-2, atol=2e-2)
    assert "merge_state_in_place" not in names(backend)


def test_rows_between_two_shared_parts_are_left_alone():
    spec = plain_spec(dim=64)
    paths = [([("a", 6)], 26, 1)] * 2 + [([], 9, 1)] + [([("b", 6)], 27, 1)] * 2
    scene = make_scene(spec, paths, dtype=torch.bfloat16, permute=False)
    backend = over_double(double=Double())
    torch.testing.assert_close(run(backend, scene).double(), dense_attention(scene), rtol=2e-2, atol=2e-2)
    (merge,) = [kwargs for name, _, kwargs in backend.module.calls if name == "merge_state_in_place"]
    assert merge["mask"].tolist() == [True, True, False, True, True]


def test_the_queries_may_have_any_strides_and_the_pool_may_be_interleaved():
    scene = make_scene(plain_spec(dim=64), levels(5, 3, own=2), dtype=torch.bfloat16)
    expected = dense_attention(scene)
    scene.query = scene.query.transpose(0, 1).contiguous().transpose(0, 1)
    both = torch.stack([scene.keys, scene.values], dim=1)
    scene.keys, scene.values = both[:, 0], both[:, 1]
    out = run(over_double(double=Double()), scene)
    torch.testing.assert_close(out.double(), expected, rtol=2e-2, atol=2e-2)


# -- what goes to torch ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "dtype", "message"),
    [
        (AttentionSpec(4, 2, 64, 32, 0.1), torch.bfloat16, "values have 32"),
        (AttentionSpec(4, 2, 80, 80, 0.1), torch.bfloat16, "heads have 80"),
        (AttentionSpec(4, 2, 64, 64, 0.1), torch.float32, "dtype is float32"),
        (AttentionSpec(4, 2, 64, 64, 0.1), torch.float64, "dtype is float64"),
    ],
)
def test_what_no_kernel_computes_goes_to_torch_with_one_reason(caplog, spec, dtype, message):
    backend = over_double(double=Double())
    assert backend.unsupported(spec) is None
    with caplog.at_level(logging.WARNING, "radixkv.attention"):
        for seed in range(3):
            scene = make_scene(spec, levels(4, 2, own=seed), dtype=dtype, seed=seed)
            torch.testing.assert_close(
                run(backend, scene).double(), dense_attention(scene), rtol=2e-2, atol=2e-2
            )
    assert computed_by_torch(backend)
    (record,) = caplog.records
    assert message in record.getMessage()
    assert message in backend.fallback_reason(spec)


def test_one_kind_of_layers_goes_to_torch_and_the_others_do_not():
    backend, kinds = (
        over_double(double=Double()),
        [plain_spec(dim=64), plain_spec(dim=80), plain_spec(9, dim=64)],
    )
    for seed in range(3):
        made = [make_scene(spec, levels(4, 2, own=seed), seed=seed, dtype=torch.bfloat16) for spec in kinds]
        backend.plan(made[0].batch, kinds)
        for scene in made:
            out = backend.run(scene.spec, scene.query, scene.keys, scene.values)
            torch.testing.assert_close(out.double(), dense_attention(scene), rtol=2e-2, atol=2e-2)
    dims = {args[0].shape[-1] for name, args, _ in backend.module.calls if name.endswith(".run")}
    assert dims == {64}


def test_keys_and_values_of_other_strides_go_to_torch(caplog):
    scene = make_scene(plain_spec(dim=64), levels(4, 2, own=1), dtype=torch.bfloat16)
    scene.values = torch.stack([scene.values, scene.values], dim=1)[:, 0]
    backend = over_double(double=Double())
    for _ in range(2):
        torch.testing.assert_close(run(backend, scene).double(), dense_attention(scene), rtol=2e-2, atol=2e-2)
    assert computed_by_torch(backend)
    (record,) = caplog.records
    assert "strides" in record.getMessage()


def test_another_dtype_later_is_planned_for():
    backend = over_double(double=Double())
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.bfloat16, torch.bfloat16):
        scene = make_scene(plain_spec(dim=64), levels(4, 2, own=1), dtype=dtype)
        for _ in range(2):
            torch.testing.assert_close(
                run(backend, scene).double(), dense_attention(scene), rtol=2e-2, atol=2e-2
            )
    used = {args[0].dtype for name, args, _ in backend.module.calls if name.endswith(".run")}
    assert used == {torch.bfloat16, torch.float16}


class CannotBuild(Double):
    """Its compiler is missing, for some kernels."""

    def __init__(self, kinds):
        super().__init__()
        self.kinds = kinds

    def BatchPrefillWithPagedKVCacheWrapper(self, *args, **kwargs):
        return self.broken(super().BatchPrefillWithPagedKVCacheWrapper(*args, **kwargs))

    def broken(self, wrapper):
        plan = wrapper.plan

        def fail(*args, **kwargs):
            if kwargs["window_left"] in self.kinds:
                raise RuntimeError("Ninja build failed.\nnvcc: not found")
            return plan(*args, **kwargs)

        wrapper.plan = fail
        return wrapper

    def merge_state_in_place(self, *args, **kwargs):
        if "merge" in self.kinds:
            raise RuntimeError("Ninja build failed.")
        super().merge_state_in_place(*args, **kwargs)


def test_a_kernel_that_cannot_be_built_goes_to_torch(caplog):
    backend = over_double(double=CannotBuild({8}))
    kinds = [plain_spec(dim=64), plain_spec(9, dim=64)]
    for seed in range(3):
        made = [make_scene(spec, levels(0, 4, own=seed), seed=seed, dtype=torch.bfloat16) for spec in kinds]
        backend.plan(made[0].batch, kinds)
        for scene in made:
            out = backend.run(scene.spec, scene.query, scene.keys, scene.values)
            torch.testing.assert_close(out.double(), dense_attention(scene), rtol=2e-2, atol=2e-2)
    (record,) = caplog.records
    assert (
        "the kernel fa2:bf16:64:swa could not be built or loaded: RuntimeError: Ninja build failed."
        in record.getMessage()
    )
    assert backend.fallback_reason(kinds[0]) is None


def test_a_merge_that_cannot_be_built_is_left_to_torch(caplog):
    backend = over_double(double=CannotBuild({"merge"}))
    for _ in range(2):
        scene = make_scene(plain_spec(dim=64), levels(9, 4, own=2), dtype=torch.bfloat16)
        torch.testing.assert_close(run(backend, scene).double(), dense_attention(scene), rtol=2e-2, atol=2e-2)
    assert [record.getMessage() for record in caplog.records] == [
        "FlashInfer cannot merge (Ninja build failed.); torch does"
    ]


def test_what_fails_after_it_has_worked_is_an_error():
    double = CannotBuild(set())
    backend = over_double(double=double)
    scene = make_scene(plain_spec(dim=64), levels(0, 4, own=2), dtype=torch.bfloat16)
    run(backend, scene)
    double.kinds = {-1}
    with pytest.raises(RuntimeError, match="Ninja"):
        run(backend, scene)
    with pytest.raises(InvalidRequestError, match="plan this step"):  # no half of a plan stays
        backend.run(scene.spec, scene.query, scene.keys, scene.values)


class Fails(Double):
    """Its first plan raises."""

    def __init__(self, error):
        super().__init__()
        self.error = error

    def BatchPrefillWithPagedKVCacheWrapper(self, *args, **kwargs):
        wrapper = super().BatchPrefillWithPagedKVCacheWrapper(*args, **kwargs)
        plan = wrapper.plan

        def fail(*args, **kwargs):
            error, self.error = self.error, None
            if error is not None:
                raise error
            return plan(*args, **kwargs)

        wrapper.plan = fail
        return wrapper


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("Buffer overflow when allocating memory for batch_prefill_tmp_v with size 9"),
        RuntimeError("Failed to plan prefill with error: an illegal memory access was encountered"),
        torch.AcceleratorError("CUDA error: unspecified launch failure"),
        RuntimeError("CUDA error: unspecified launch failure"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 8.00 MiB"),
    ],
)
def test_what_is_not_of_a_build_is_an_error_and_not_for_good(error, caplog):
    backend = over_double(double=Fails(error))
    scene = make_scene(plain_spec(dim=64), levels(0, 4, own=2), dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match=str(error)[:11]):
        run(backend, scene)
    torch.testing.assert_close(run(backend, scene).double(), dense_attention(scene), rtol=2e-2, atol=2e-2)
    assert backend.fallback_reason(scene.spec) is None
    assert not computed_by_torch(backend)
    assert caplog.records == []


def test_a_kernel_for_another_gpu_goes_to_torch():
    error = RuntimeError("Failed to plan prefill with error: no kernel image is available for execution")
    backend = over_double(double=Fails(error))
    scene = make_scene(plain_spec(dim=64), levels(0, 4, own=2), dtype=torch.bfloat16)
    torch.testing.assert_close(run(backend, scene).double(), dense_attention(scene), rtol=2e-2, atol=2e-2)
    assert "no kernel image" in backend.fallback_reason(scene.spec)


# -- plans ----------------------------------------------------------------------------------------------------


def decodes(contexts, spec, seed=0, dtype=torch.bfloat16):
    return make_scene(spec, [([], context, 1) for context in contexts], block_size=16, dtype=dtype, seed=seed)


def test_a_kind_is_planned_once_a_step_and_run_for_every_layer():
    backend, kinds = over_double(double=Double()), [plain_spec(dim=64), plain_spec(9, dim=64)]
    for step in range(4):
        scenes = [decodes([20 + step, 40 + step], spec) for spec in kinds]
        backend.plan(scenes[0].batch, kinds)
        if step:  # the dtype is known by then
            planned = [name for name in names(backend) if name.endswith(".plan")]
            assert len(planned) == 2
        for _ in range(3):
            for scene in scenes:
                backend.run(scene.spec, scene.query, scene.keys, scene.values)
        count = {kind: sum(name.endswith(kind) for name in names(backend)) for kind in (".plan", ".run")}
        assert count == {".plan": 2, ".run": 6}
        backend.module.calls.clear()
    assert backend._wrappers.num_wrappers == 2
    assert backend.module.transfers[0].num_transfers == 4


def test_an_interrupted_plan_may_have_been_sent():
    """The next one must not write to its page-locked memory before the device has come so far."""
    backend, spec = over_double(double=Double()), plain_spec(dim=64)
    scene = decodes([20, 40], spec)
    run(backend, scene)
    backend.module.synchronize()
    (wrapper,) = backend.wrappers._wrappers.values()
    plan = wrapper.wrapper.plan

    def interrupted(*args, **kwargs):
        plan(*args, **kwargs)
        raise KeyboardInterrupt

    wrapper.wrapper.plan = interrupted
    with pytest.raises(KeyboardInterrupt):
        run(backend, scene)
    wrapper.wrapper.plan = plan
    torch.testing.assert_close(run(backend, scene).double(), dense_attention(scene), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("into", [False, True])
def test_an_interrupted_transfer_may_be_under_way(into):
    transfers = over_double(double=Double()).transfers
    name = "_copy_into" if into else "_copy"
    copy = getattr(transfers, name)
    place = transfers.empty(5)

    def interrupted(*args):
        copy(*args)
        raise KeyboardInterrupt

    def send():
        transfers.host(5)[:] = 1
        return transfers.send_into([(0, place)]) if into else transfers.send(5)

    setattr(transfers, name, interrupted)
    for _ in range(4):  # each of the two buffers comes again
        with pytest.raises(KeyboardInterrupt):
            send()
    setattr(transfers, name, copy)
    send()
    assert transfers.num_waits > 0


def test_nothing_is_waited_for_when_the_host_has_seen_the_last_step():
    backend, spec = over_double(double=Double()), plain_spec(dim=64)
    for step in range(6):
        run(backend, decodes([20 + step, 40 + step], spec))
        backend.module.synchronize()
    assert backend.num_waits == 0


def test_a_host_that_runs_ahead_waits_for_the_last_plan_only():
    backend, spec = over_double(double=Double()), plain_spec(dim=64)
    for step in range(6):
        run(backend, decodes([20 + step, 40 + step], spec))
    assert 0 < backend.num_waits <= 5


def test_outputs_and_partial_results_are_written_to_the_same_memory():
    backend, spec = over_double(double=Double()), plain_spec(dim=64)
    scene = make_scene(spec, levels(9, 4, own=2), dtype=torch.bfloat16, sinks=True)
    places = set()
    for _ in range(3):
        out = run(backend, scene)
        places.add(out.data_ptr())
        out += 1  # the caller's own
    assert len(places) == 1
    for name, _, kwargs in backend.module.calls:
        if name.endswith(".run"):
            assert kwargs["out"] is not None


def test_the_workspace_grows_for_kinds_that_may_need_more():
    double = Double()
    backend = over_double(double=double, workspace_bytes=1 << 20)
    run(backend, decodes([40000, 9, 17000], AttentionSpec(8, 1, 64, 64, 0.1)))
    grown = backend._wrappers.workspace_bytes
    assert grown > 1 << 20
    run(backend, decodes([40000, 9, 17000], AttentionSpec(16, 1, 128, 128, 0.1)))
    assert backend._wrappers.workspace_bytes > grown


def test_the_default_workspace_is_enough_for_a_usual_model():
    spec = AttentionSpec(32, 8, 128, 128, 0.1)
    backend = FlashInferBackend("cpu", module=Double())
    run(backend, decodes([9], spec))
    assert backend._wrappers.workspace_bytes == 256 << 20


def test_no_memory_for_the_workspace():
    with pytest.raises(InvalidRequestError, match=r"could not give 1024.0 TiB for FlashInfer's workspace"):
        over_double(workspace_bytes=1 << 50)


def test_no_memory_for_a_wrapper():
    class Full(Double):
        def BatchDecodeWithPagedKVCacheWrapper(self, *args, **kwargs):
            raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 8.00 MiB")

    backend = over_double(double=Full())
    with pytest.raises(InvalidRequestError, match="no memory left for FlashInfer's buffers"):
        run(backend, decodes([9], plain_spec(dim=64)))


def test_tensors_on_another_device_than_the_pool():
    backend, scene = over_double(double=Double()), decodes([9], plain_spec(dim=64))
    backend.plan(scene.batch, [scene.spec])
    with pytest.raises(InvalidRequestError, match="must be on cpu, got meta"):
        backend.run(scene.spec, scene.query.to("meta"), scene.keys, scene.values)
    with pytest.raises(InvalidRequestError, match="one dtype"):
        backend.run(scene.spec, scene.query.half(), scene.keys, scene.values)


def test_a_step_of_another_size_is_refused_in_every_layer():
    backend, scene = over_double(double=Double()), decodes([9, 20], plain_spec(dim=64))
    run(backend, scene)
    with pytest.raises(InvalidRequestError, match="2 query rows, got 1"):
        backend.run(scene.spec, scene.query[:1], scene.keys, scene.values)


def test_plain_transfers_on_the_cpu():
    module = SimpleNamespace(
        **{name: getattr(Double(), name) for name in ("BatchDecodeWithPagedKVCacheWrapper",)}
    )
    backend = FlashInferBackend("cpu", module=module, workspace_bytes=1024)
    assert isinstance(backend._transfers, Transfers)
    scene = decodes([9, 20], plain_spec(dim=64))
    torch.testing.assert_close(run(backend, scene).double(), dense_attention(scene), rtol=2e-2, atol=2e-2)
    transfers = Transfers(torch.device("cpu"))
    sent = []
    for step in range(4):
        transfers.host(5)[:] = step
        sent.append(transfers.send(5))
    assert [tensor[0].item() for tensor in sent] == [0, 1, 2, 3]


def test_page_ids_and_lengths_up_to_the_largest():
    """A pool of 2**31 slots and more: tables hold pages, in 32 bits."""
    spec = AttentionSpec(2, 1, 64, 64, 0.1)
    top = 2**31 - 1
    batch = AttentionBatch(
        np.array([0, 1], np.int32), np.array([33], np.int32), np.array([[top, 5, top - 1]], np.int32), 16
    )
    backend = over_double(double=Double())
    backend.plan(batch, [spec])
    (launch,) = backend._steps[spec].own
    assert launch.indices.dtype == torch.int32
    assert launch.indices.tolist() == [top, 5, top - 1]


def test_names_of_modules_and_the_fallback():
    other = TorchBackend()
    backend = over_double(double=Double(), fallback=other, limits=Limits(frozenset({64})))
    assert backend.fallback is other
    found = backend.kernel_modules([plain_spec(dim=64), plain_spec(dim=128)], torch.float16)
    assert [str(module) for module in found] == ["cascade", "decode:fp16:64", "fa2:fp16:64"]
    gc.collect()
