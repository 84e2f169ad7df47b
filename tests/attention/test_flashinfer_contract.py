"""Every call that the backend makes, bound against the signatures of the real package.

The package imports without a GPU: `pip install --no-deps -r .ci/flashinfer.txt`. Where it is not installed these tests
are skipped, unless RADIXKV_NEEDS_FLASHINFER is set, as in the continuous integration.
"""

from __future__ import annotations

import inspect
import os
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from radixkv.attention import AttentionSpec
from radixkv.attention.flashinfer_choice import version_problem
from radixkv.attention.flashinfer_graphs import GraphAttention, StepBuffers
from radixkv.attention.flashinfer_kinds import can_merge
from tests.attention.attention_testkit import make_scene, run
from tests.attention.fake_flashinfer import Double
from tests.attention.fake_flashinfer import wrappers as double_wrappers
from tests.attention.flashinfer_testkit import OVER_DOUBLE_COSTS, over_double
from tests.attention.test_backends import levels

if os.environ.get("RADIXKV_NEEDS_FLASHINFER"):
    import flashinfer
else:
    flashinfer = pytest.importorskip("flashinfer", exc_type=ImportError)

WRAPPERS = ["BatchDecodeWithPagedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper"]
PINNED = flashinfer.__version__ == Double.__version__


def signatures(name):
    """The real signatures that a call must fit: of what is called, and of what that hands its `**kwargs` to."""
    owner = flashinfer
    for part in name.split("."):
        owner, function = getattr(owner, part), getattr(owner, part)
    found = [inspect.signature(function)]
    if any(p.kind is p.VAR_KEYWORD for p in found[0].parameters.values()):
        cls, method = name.split(".")
        found.append(inspect.signature(getattr(getattr(flashinfer, cls), f"_{method}_impl")))
    return found


def recorded_calls():
    """All kinds of calls: decodes by both kernels, prompts, mixed steps, windows, soft caps, sinks, shared parts."""
    specs = [
        AttentionSpec(heads, kv_heads, 64, 64, 0.125, window, softcap)
        for heads, kv_heads in [(2, 1), (8, 1)]
        for window, softcap in [(None, None), (30, None), (None, 20.0)]
    ]
    double = Double()
    for costs in OVER_DOUBLE_COSTS[:3]:
        backend = over_double(double=double, costs=costs)
        for spec in specs:
            for decodes, prompts in [(9, 4), (9, 0), (0, 4)]:
                scene = make_scene(
                    spec, levels(decodes, prompts, own=2), dtype=torch.bfloat16, sinks=decodes > prompts
                )
                run(backend, scene)
    for spec in specs:
        backend = over_double(double=double)
        buffers = StepBuffers(backend.transfers, [spec.window], 4, 16, 4)
        attention = GraphAttention(backend, [spec], torch.bfloat16, 4, buffers, 16)
        attention.plan(np.array([33, 1, 17]))
        tables = np.arange(12, dtype=np.int32).reshape(3, 4)
        buffers.send(np.zeros((3, 4), np.int64), attention.tables, tables, 1, 12)
        query = torch.zeros(4, spec.num_heads, 64, dtype=torch.bfloat16)
        keys, values = (torch.zeros(13, 16, spec.num_kv_heads, 64, dtype=torch.bfloat16) for _ in range(2))
        for sinks in (None, torch.zeros(spec.num_heads)):
            attention.run(spec, query, keys, values, sinks)
    return list(double.calls)


@pytest.fixture(scope="module")
def calls():
    return recorded_calls()


def test_the_version_is_one_that_the_backend_takes():
    assert version_problem(flashinfer.__version__) is None


def test_every_call_fits_the_real_signature(calls):
    seen = set()
    for name, args, kwargs in calls:
        seen.add(name)
        for signature in signatures(name):
            method = (None,) if "." in name else ()  # self
            signature.bind(*method, *args, **kwargs)
    methods = [f"{wrapper}.{method}" for wrapper in WRAPPERS for method in ("plan", "run")]
    methods.append(f"{WRAPPERS[0]}.reset_workspace_buffer")
    assert seen == {*WRAPPERS, *methods, "merge_state_in_place"}
    assert any(kwargs.get("use_cuda_graph") for _, _, kwargs in calls)


def test_the_calls_are_those_that_were_read(calls):
    """What is left to a default is what the backend wants, and nothing is given by a position that may move."""
    for name, args, kwargs in calls:
        if name.endswith(".plan"):
            assert len(args) == (7 if "Decode" in name else 8)
            assert {"q_data_type", "kv_data_type", "sm_scale", "window_left", "logits_soft_cap"} <= set(
                kwargs
            )
            names = signatures(name)[-1].parameters
            assert names["pos_encoding_mode"].default == "NONE"
            assert names["o_data_type"].default is None
        elif name.endswith(".run"):
            assert kwargs["out"] is not None
            assert isinstance(args[1], tuple)


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_the_double_has_the_names_and_defaults_of_the_package(wrapper):
    kind = "DecodeWrapper" if "Decode" in wrapper else "PrefillWrapper"
    ours = getattr(double_wrappers, kind)
    pairs = [
        (inspect.signature(ours).parameters, inspect.signature(getattr(flashinfer, wrapper)).parameters),
        (
            inspect.signature(ours.run).parameters,
            inspect.signature(getattr(flashinfer, wrapper).run).parameters,
        ),
    ]
    for known, real in pairs:
        for name, parameter in known.items():
            if name != "double":
                assert (parameter.kind, parameter.default) == (real[name].kind, real[name].default), name
    plan = signatures(f"{wrapper}.plan")[-1].parameters
    for name, default in ours.PLAN_OPTIONS.items():
        assert plan[name].default == default
    positional = [
        name
        for name, p in inspect.signature(ours.plan).parameters.items()
        if p.kind is p.POSITIONAL_OR_KEYWORD
    ]
    assert list(plan)[: len(positional)] == positional


@pytest.mark.parametrize(
    "name",
    [
        "merge_state",
        "merge_state_in_place",
        "append_paged_kv_cache",
        "get_batch_indices_positions",
        "get_seq_lens",
    ],
)
def test_functions_of_the_double_have_the_real_signature(name):
    ours = inspect.signature(getattr(Double(), name)).parameters
    real = inspect.signature(getattr(flashinfer, name)).parameters
    assert [(n, p.default) for n, p in ours.items()] == [(n, p.default) for n, p in real.items()]


def source(name):
    return (Path(flashinfer.__file__).parent / "data" / "include" / "flashinfer" / name).read_text()


def test_what_was_read_in_the_sources_is_still_there():
    groups = re.search(
        r"#define DISPATCH_GQA_GROUP_SIZE.*?(?=#define)", source("utils.cuh"), re.DOTALL
    ).group()
    known = tuple(map(int, re.findall(r"group_size == (\d+)", groups)))
    assert set(double_wrappers.CUDA_CORE_GROUPS) <= set(known)  # later ones have more
    assert not PINNED or known == double_wrappers.CUDA_CORE_GROUPS
    tile = re.search(r"FA2DetermineCtaTileQ\(.*?\n\}", source("utils.cuh"), re.DOTALL).group()
    assert "avg_packed_qo_len > 64 && head_dim < 256" in tile
    merge = re.search(
        r"cudaError_t MergeStateInPlace\(.*?\n\}", source("attention/cascade.cuh"), re.DOTALL
    ).group()
    assert "std::max(16U / sizeof(DType), HEAD_DIM / 32U)" in merge
    assert "dim3 nthrs(bdx, bdy)" in merge
    assert "mask[pos] == 0" in source("attention/cascade.cuh")
    assert can_merge(64, 128, 2)
    assert not can_merge(65, 128, 2)
    split = source("attention/scheduler.cuh")
    # Later ones need less: a tile holds the heads of a group.
    rows = (
        ["padded_batch_size * cta_tile_q"]
        if PINNED
        else ["padded_batch_size * cta_tile_q", "max_partial_rows"]
    )
    assert any(f"num_qo_heads * {count} * head_dim_vo * sizeof(float)" in split for count in rows)
    assert "int num_blocks_per_sm = 2;" in split
    assert "std::max((128 / page_size), 1U)" in split
