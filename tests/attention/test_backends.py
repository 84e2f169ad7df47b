"""The torch backend against the reference over random ragged steps, and the reference against the plain formula."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from radixkv.attention import (
    AttentionBackend,
    AttentionBatch,
    AttentionSpec,
    ReferenceBackend,
    TorchBackend,
    make_backend,
)
from radixkv.attention.torch_plan import Costs
from radixkv.core.errors import InvalidRequestError
from tests.attention.attention_testkit import dense_attention, make_scene, run
from tests.attention.flashinfer_testkit import over_double

# Every strategy is taken somewhere in these: sharing always or never, copies always or never, small chunks of rows.
COSTS = [
    None,
    Costs(call=0, share=0, rows=3, prefix=1),
    Costs(call=0, share=0, rows=64, prefix=64),
    Costs(call=10**9, share=0, copy=1, rows=5, prefix=10**9),
    Costs(call=10**9, share=10**9, rows=2, prefix=7),
    Costs(call=0, share=10**9, rows=7, prefix=2),
    Costs(call=200, share=300, copy=500, rows=4, prefix=9),
]


@st.composite
def specs(draw, equal_dims=False, softcaps=True):
    kv_heads = draw(st.sampled_from([1, 2, 3]))
    group = draw(st.sampled_from([1, 2, 4]))
    key_dim = draw(st.sampled_from([4, 8, 16]))
    value_dim = key_dim if equal_dims else draw(st.sampled_from([key_dim, key_dim, 4, 24]))
    return AttentionSpec(
        num_heads=kv_heads * group,
        num_kv_heads=kv_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        scale=draw(st.sampled_from([key_dim**-0.5, 0.7])),
        window=draw(st.sampled_from([None, None, 1, 2, 5, 16, 40])),
        softcap=draw(st.sampled_from([None, None, 1.5, 30.0])) if softcaps else None,
    )


@st.composite
def scenes(draw, whole_blocks=False, **options):
    block_size = draw(st.sampled_from([1, 2, 3, 4, 8, 16, 64]))
    entries = draw(st.integers(0, 7))
    paths = []
    for _ in range(entries):
        depth = draw(st.integers(0, 3))
        # Few names and lengths, so that paths often begin alike.
        path = [(draw(st.integers(0, 1)), draw(st.sampled_from([1, 2, 5]))) for _ in range(depth)]
        shared = sum(blocks for _, blocks in path) * block_size
        queries = draw(st.sampled_from([1, 1, 1, 0, 2, 3, 9, 17, 33]))
        context = shared + queries + draw(st.sampled_from([0, 0, 1, 3, 20]))
        paths.append((path, context, queries))
    if draw(st.booleans()):
        paths.sort(key=lambda path: path[2] != 1)  # decodes first, as the scheduler has them
    return make_scene(
        draw(specs(**options)),
        paths,
        block_size=block_size,
        permute=draw(st.booleans()),
        sinks=draw(st.booleans()),
        seed=draw(st.integers(0, 99)),
        window_junk=draw(st.sampled_from([False, "blocks"])) if whole_blocks else draw(st.booleans()),
    )


@given(scenes())
def test_reference_equals_the_formula_over_the_whole_matrix(scene):
    torch.testing.assert_close(run(ReferenceBackend(), scene), dense_attention(scene), rtol=1e-11, atol=1e-11)


@given(scenes(), st.sampled_from(COSTS), st.booleans())
def test_torch_equals_the_reference(scene, costs, fused):
    backend = TorchBackend(costs=costs, fused=fused)
    torch.testing.assert_close(run(backend, scene), run(ReferenceBackend(), scene), rtol=1e-9, atol=1e-9)


@given(scenes(equal_dims=True, softcaps=False), st.sampled_from(COSTS))
def test_fused_kernel_equals_the_reference(scene, costs):
    torch.testing.assert_close(
        run(TorchBackend(costs=costs), scene), run(ReferenceBackend(), scene), rtol=1e-9, atol=1e-9
    )


def plain_spec(window=None, heads=4, kv_heads=2, dim=16):
    return AttentionSpec(heads, kv_heads, dim, dim, dim**-0.5, window)


def each_backend():
    """One of each, by name; a failing test cannot spoil the next one's."""
    makers = {
        "reference": ReferenceBackend,
        "torch": TorchBackend,
        "torch, not fused": lambda: TorchBackend(fused=False),
        "flashinfer": over_double,
    }
    return pytest.mark.parametrize("make", makers.values(), ids=makers.keys())


@each_backend()
def test_plain_case_equals_torch_sdpa(make):
    scene = make_scene(plain_spec(), [([], 37, 37)], block_size=5)
    keys, values = (
        torch.cat([pool[block] for block in scene.blocks[0]])[:37] for pool in (scene.keys, scene.values)
    )
    expected = torch.nn.functional.scaled_dot_product_attention(
        scene.query.transpose(0, 1)[None],
        keys.transpose(0, 1)[None].repeat_interleave(2, dim=1),
        values.transpose(0, 1)[None].repeat_interleave(2, dim=1),
        is_causal=True,
    )[0].transpose(0, 1)
    torch.testing.assert_close(run(make(), scene), expected)


@pytest.mark.parametrize("block_size", [1, 2, 3, 7, 16, 33, 64])
@pytest.mark.parametrize("window", [None, 1, 63, 64, 65, 200])
def test_prompts_around_the_borders_of_blocks_chunks_and_windows(block_size, window):
    for length, cached in itertools.product([1, 63, 64, 65, 130], [0, 1, block_size, 65]):
        scene = make_scene(
            plain_spec(window), [([], cached + length, length)], block_size=block_size, window_junk=True
        )
        torch.testing.assert_close(run(TorchBackend(), scene), run(ReferenceBackend(), scene))


def levels(decodes, prompts, own):
    """Sequences below a tree of three levels."""
    entries = []
    for number in range(decodes + prompts):
        path = [("root", 6), (f"branch {number % 2}", 4), (f"twig {number % 4}", 3)]
        queries = 1 if number < decodes else 5
        entries.append((path, 13 * 4 + own + queries + number % 3, queries))
    return entries


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("window", [None, 9, 30, 50])
@pytest.mark.parametrize("permute", [True, False])
@pytest.mark.parametrize("costs", COSTS)
def test_shared_prefixes_at_several_levels(heads, window, permute, costs):
    spec = plain_spec(window, *heads)
    scene = make_scene(spec, levels(9, 4, own=2), permute=permute, window_junk=True)
    torch.testing.assert_close(run(TorchBackend(costs=costs), scene), run(ReferenceBackend(), scene))


def test_many_rows_over_a_shared_prefix_in_a_group_of_several_kv_heads():
    # More rows than are folded, and rows that are not neighbours.
    paths = [([("prefix", 9)], 36 + 20, 20), ([("other", 9)], 36 + 20, 20)] * 2
    for window in (None, 30):
        scene = make_scene(plain_spec(window, 8, 2), paths)
        backend = TorchBackend(costs=Costs(call=0, share=0))
        torch.testing.assert_close(run(backend, scene), run(ReferenceBackend(), scene))


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 3e-3)]
)
@pytest.mark.parametrize("costs", COSTS)
@pytest.mark.parametrize("fused", [True, False])
def test_dtypes(dtype, tolerance, costs, fused):
    for window in (None, 30):
        scene = make_scene(plain_spec(window), levels(5, 3, own=3), dtype=dtype, sinks=True, window_junk=True)
        out = run(TorchBackend(costs=costs, fused=fused), scene)
        assert out.dtype == dtype
        expected = dense_attention(scene)  # in float64, from the same rounded inputs
        torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)


@each_backend()
def test_no_entries_and_no_rows(make):
    spec, backend = plain_spec(), make()
    for paths in ([], [([], 5, 0)], [([], 0, 0)]):
        assert run(backend, make_scene(spec, paths)).shape == (0, 4, 16)
    scene = make_scene(spec, [([], 1, 1), ([], 0, 0), ([], 1, 1)])
    torch.testing.assert_close(run(backend, scene), dense_attention(scene))


@pytest.mark.parametrize("make", [TorchBackend, over_double], ids=["torch", "flashinfer"])
def test_specs_of_one_step_share_a_plan_and_backends_are_used_again(make):
    backend, reference = make(), ReferenceBackend()
    kinds = [plain_spec(), plain_spec(7), AttentionSpec(4, 4, 16, 8, 0.3, None, 20.0)]
    for seed in range(3):
        made = [make_scene(spec, levels(4, 2, own=seed), seed=seed) for spec in kinds]
        batch = made[0].batch
        backend.plan(batch, kinds)
        reference.plan(batch, kinds)
        for _ in range(2):
            for scene in made:
                args = (scene.spec, scene.query, scene.keys, scene.values)
                torch.testing.assert_close(backend.run(*args), reference.run(*args))


def test_strided_queries_and_pools():
    scene = make_scene(plain_spec(), levels(5, 3, own=2), dtype=torch.float32)
    expected = run(ReferenceBackend(), scene)
    # As after rotation in [heads, tokens, dim]; K and V interleaved by block, as FlashInfer may have them.
    scene.query = scene.query.transpose(0, 1).contiguous().transpose(0, 1)
    both = torch.stack([scene.keys, scene.values], dim=1)
    scene.keys, scene.values = both[:, 0], both[:, 1]
    assert not scene.query.is_contiguous()
    for costs, fused in itertools.product(COSTS, (True, False)):
        torch.testing.assert_close(run(TorchBackend(costs=costs, fused=fused), scene), expected)
    torch.testing.assert_close(run(over_double(), scene), expected)


def apart(tensor):
    return tensor.repeat_interleave(2, dim=-1)[..., ::2]


def test_elements_that_do_not_lie_side_by_side():
    scene = make_scene(plain_spec(), levels(5, 3, own=2), dtype=torch.float32)
    expected = run(ReferenceBackend(), scene)
    scene.query = apart(scene.query)
    assert scene.query.stride(-1) == 2
    for costs, fused in itertools.product(COSTS, (True, False)):
        torch.testing.assert_close(run(TorchBackend(costs=costs, fused=fused), scene), expected)
    torch.testing.assert_close(run(over_double(), scene), expected)


@pytest.mark.parametrize("make", [TorchBackend, over_double], ids=["torch", "flashinfer"])
@pytest.mark.parametrize("what", ["keys", "values"])
def test_a_pool_whose_elements_do_not_lie_side_by_side_is_refused(what, make):
    scene = make_scene(plain_spec(), levels(5, 3, own=2), dtype=torch.float32)
    setattr(scene, what, apart(getattr(scene, what)))
    with pytest.raises(InvalidRequestError, match="side by side"):
        run(make(), scene)


@pytest.mark.parametrize("permute", [True, False])
def test_offsets_beyond_32_bits(permute):
    # FC-47. Memory that nobody touches costs nothing: 20 blocks of a pool of over 2**32 elements are used.
    spec = AttentionSpec(2, 1, 256, 256, 0.1)
    small = make_scene(spec, levels(3, 2, own=2), permute=permute, dtype=torch.bfloat16)
    expected = run(ReferenceBackend(), small)
    blocks = 2**32 // (4 * 256) + 1000
    try:
        keys, values = (torch.empty(blocks, 4, 1, 256, dtype=torch.bfloat16) for _ in range(2))
    except RuntimeError:
        pytest.skip("this machine does not lend 2 x 8 GiB of address space")
    shift = blocks - len(small.keys)
    keys[shift:], values[shift:] = small.keys, small.values
    tables = small.batch.block_tables.copy()
    for row, table in zip(tables, small.blocks, strict=True):
        row[: len(table)] = np.array(table) + shift
    batch = AttentionBatch(small.batch.query_starts, small.batch.context_lens, tables, 4, 3)
    for backend in (*(TorchBackend(costs=costs) for costs in COSTS), over_double()):
        backend.plan(batch, [spec])
        out = backend.run(spec, small.query, keys, values)
        torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("make", [TorchBackend, over_double], ids=["torch", "flashinfer"])
def test_gradients_and_inference_mode_do_not_matter(make):
    scene = make_scene(plain_spec(), levels(3, 2, own=2), dtype=torch.float32)
    scene.query.requires_grad_()
    backend, expected = make(), dense_attention(scene).float()
    backend.plan(scene.batch, [scene.spec])
    for mode in (torch.inference_mode, torch.no_grad, torch.enable_grad) * 2:
        with mode():
            out = backend.run(scene.spec, scene.query, scene.keys, scene.values)
            torch.testing.assert_close(out, expected)
            out += 1  # the caller's own
            assert not out.requires_grad


def test_every_backend_has_the_interface_and_a_name():
    for name in ("auto", "torch", "reference"):
        backend = make_backend(name, "cpu")
        assert isinstance(backend, AttentionBackend)
        assert backend.unsupported(plain_spec()) is None
    assert isinstance(make_backend("auto", "cpu"), TorchBackend)
    assert isinstance(over_double(), AttentionBackend)
    with pytest.raises(InvalidRequestError, match="take auto, flashinfer, torch or reference"):
        make_backend("flash", "cpu")


@each_backend()
def test_what_was_not_planned_or_does_not_fit_is_refused(make):
    scene, backend = make_scene(plain_spec(), [([], 9, 3)]), make()
    args = (scene.query, scene.keys, scene.values)
    with pytest.raises(InvalidRequestError, match="plan this step"):
        make().run(scene.spec, *args)
    backend.plan(scene.batch, [scene.spec])
    with pytest.raises(InvalidRequestError, match="plan this step"):
        backend.run(plain_spec(window=3), *args)
    for wrong in (
        (scene.query[:2], scene.keys, scene.values),
        (scene.query, scene.keys[:, :2], scene.values),
        (scene.query, scene.keys, scene.values[..., :4]),
    ):
        with pytest.raises(InvalidRequestError, match="got"):
            backend.run(scene.spec, *wrong)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_heads": 3}, "do not divide"),
        ({"key_dim": 0}, "at least one"),
        ({"window": 0}, "at least one key"),
        ({"softcap": 0.0}, "above 0"),
    ],
)
def test_specs_that_describe_no_attention_are_refused(changes, message):
    good = {"num_heads": 4, "num_kv_heads": 2, "key_dim": 8, "value_dim": 8, "scale": 1.0}
    with pytest.raises(InvalidRequestError, match=message):
        AttentionSpec(**{**good, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"query_starts": np.array([0, 1], np.int32)}, "2 contexts need 3 query starts"),
        ({"query_starts": np.array([0, 3, 2], np.int32)}, "must ascend"),
        ({"query_starts": np.array([0, 1, 10], np.int32)}, "counts its queries"),
        ({"context_lens": np.array([5, 99], np.int32)}, "needs 25 blocks"),
        ({"block_tables": np.array([[0, 1], [7, 2]], np.int32)}, "ids in use"),
        ({"num_decodes": 2}, "2 decodes"),
        ({"block_size": 0}, "at least one token"),
    ],
)
def test_batches_that_contradict_themselves_are_refused(changes, message):
    good = {
        "query_starts": np.array([0, 1, 4], np.int32),
        "context_lens": np.array([5, 8], np.int32),
        "block_tables": np.array([[0, 1], [3, 2]], np.int32),
        "block_size": 4,
        "num_decodes": 1,
    }
    AttentionBatch(**good).check(4)
    with pytest.raises(InvalidRequestError, match=message):
        AttentionBatch(**{**good, **changes}).check(4)
