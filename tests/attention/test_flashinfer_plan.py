"""What the launches of a step read: each row its own keys, each once; and what the cost rule promises."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.attention import AttentionBatch, AttentionSpec
from radixkv.attention.flashinfer_kinds import Limits, can_merge, kernel_modules, uses_tensor_cores
from radixkv.attention.flashinfer_plan import FlashInferCosts, cut_step
from radixkv.attention.flashinfer_tables import PageTable, StepSequences
from tests.attention.flashinfer_testkit import OVER_DOUBLE_COSTS
from tests.attention.test_backends import plain_spec, scenes

LLAMA = AttentionSpec(32, 8, 128, 128, 0.09)
GEMMA = AttentionSpec(4, 1, 256, 256, 0.06)


def make_batch(tables, contexts, queries=None, block_size=16):
    queries = [1] * len(tables) if queries is None else queries
    width = max(map(len, tables))
    padded = np.full((len(tables), width), -1, np.int32)
    for row, table in zip(padded, tables, strict=True):
        row[: len(table)] = table
    starts = np.concatenate([[0], np.cumsum(queries)]).astype(np.int32)
    return AttentionBatch(starts, np.array(contexts, np.int32), padded, block_size)


def cut(batch, spec=LLAMA, costs=None):
    return cut_step(StepSequences(batch), spec, costs or FlashInferCosts())


def family(sequences, shared, own, block_size=16):
    """Decodes over one prefix."""
    first, mine = shared // block_size, own // block_size
    tables = [[*range(first), *range(first + i * mine, first + (i + 1) * mine)] for i in range(sequences)]
    return make_batch(tables, [shared + own] * sequences, block_size=block_size)


def reads(launch, batch, window):
    """`(row, slots that it sees)` of every row of a launch, as the kernels do it: in the launches' own row numbers."""
    table = launch.table
    indices = np.full(table.num_pages, -7, np.int32)
    table.write(batch.block_tables, indices)
    assert table.indptr[0] == 0
    assert (np.diff(table.indptr) >= 1).all()
    assert ((table.last_page_len >= 1) & (table.last_page_len <= batch.block_size)).all()
    assert launch.row_starts[0] == 0
    assert (np.diff(launch.row_starts) >= 1).all()
    for array in (table.indptr, table.last_page_len, launch.row_starts):
        assert array.dtype == np.int32
    for request, (first, stop) in enumerate(zip(launch.row_starts[:-1], launch.row_starts[1:], strict=True)):
        pages = indices[table.indptr[request] : table.indptr[request + 1]].astype(np.int64)
        slots = (pages[:, None] * batch.block_size + np.arange(batch.block_size)).reshape(-1)
        slots = slots[: (len(pages) - 1) * batch.block_size + table.last_page_len[request]].tolist()
        for number, row in enumerate(range(first, stop)):
            if launch.mask is not None and not launch.mask[row]:
                continue
            end, begin = len(slots), 0
            if not launch.shared:
                end -= int(stop - first) - 1 - number
                if window is not None:
                    begin = max(0, end - window)
            if launch.decode:
                assert stop - first == 1
            yield launch.first_row + row, slots[begin:end]


@given(scenes(), st.sampled_from(OVER_DOUBLE_COSTS))
def test_each_row_reads_its_keys_once(scene, costs):
    batch, window = scene.batch, scene.spec.window
    found = cut(batch, scene.spec, costs)
    seen = {row: [] for row in range(batch.num_tokens)}
    order = np.arange(batch.num_tokens) if found.order is None else found.order
    assert sorted(order.tolist()) == list(range(batch.num_tokens))
    at = 0
    for launch in found.own:  # they tile the rows
        assert launch.first_row == at
        assert launch.mask is None
        at = launch.stop_row
    assert at == batch.num_tokens
    for launch in found.launches:
        for row, slots in reads(launch, batch, window):
            seen[int(order[row])] += slots
    for entry, table in enumerate(scene.blocks):
        first, stop = batch.query_starts[entry : entry + 2].tolist()
        for row in range(first, stop):
            position = int(batch.context_lens[entry]) - stop + row
            low = 0 if window is None else max(0, position + 1 - window)
            expected = [
                table[p // batch.block_size] * batch.block_size + p % batch.block_size
                for p in range(low, position + 1)
            ]
            assert sorted(seen[row]) == sorted(expected)


@given(scenes(), st.integers(0, 3))
def test_tables_are_the_same_by_rows_and_by_index(scene, threshold):
    batch = scene.batch
    used = np.flatnonzero(batch.context_lens > 0)
    contexts = batch.context_lens[used].astype(np.int64)
    starts = np.minimum(contexts - 1, threshold * batch.block_size)
    table = PageTable.between(used, starts, contexts, batch.block_size)
    got = np.zeros(table.num_pages, np.int32)
    table.write(batch.block_tables, got)
    expected = []
    for entry, start, context in zip(used, starts, contexts, strict=True):
        expected += scene.blocks[entry][start // batch.block_size : -(-context // batch.block_size)]
    assert got.tolist() == expected


def test_long_tables_are_copied_row_by_row():
    batch = make_batch([range(100, 300), range(500, 700)], [3200, 3190])
    table = PageTable.between(np.array([1, 0]), np.array([16, 0]), np.array([3190, 3200]), 16)
    got = np.zeros(table.num_pages, np.int32)
    table.write(batch.block_tables, got)
    assert got.tolist() == [*range(501, 700), *range(100, 300)]
    assert table.last_page_len.tolist() == [6, 16]


# -- the cost rule: what the notes on FlashInfer predict for an H200, until it is measured ------------------------


@pytest.mark.parametrize("sequences", [64, 256])
@pytest.mark.parametrize("shared", [8192, 32768])
def test_a_long_prefix_of_many_is_attended_once(sequences, shared):
    found = cut(family(sequences, shared, 256))
    assert [launch.table.counts.tolist() for launch in found.shared] == [[shared // 16]]
    assert found.shared[0].row_starts.tolist() == [0, sequences]
    assert found.order is None
    assert found.shared[0].mask is None
    (own,) = found.own
    assert own.decode
    assert own.table.counts.tolist() == [16] * sequences


@pytest.mark.parametrize(("sequences", "shared"), [(16, 1024), (4, 8192), (2, 2048), (64, 64)])
def test_a_cascade_that_would_lose_is_left(sequences, shared):
    found = cut(family(sequences, shared, 256))
    assert not found.shared
    assert found.own[0].table.counts.tolist() == [(shared + 256) // 16] * sequences


def test_several_levels_and_sequences_that_are_no_neighbours():
    # Two branches of a trunk, taken in turn, and one sequence of its own in between.
    trunk, branches = range(512), (range(1000, 1512), range(2000, 2512))
    tables = [[*trunk, *branches[i % 2], 5000 + i] for i in range(64)]
    tables.insert(13, list(range(7000, 7100)))
    batch = make_batch(tables, [1025 * 16] * 13 + [1600] + [1025 * 16] * 51)
    found = cut(batch)
    assert [np.diff(launch.row_starts).tolist() for launch in found.shared] == [[64], [32, 32]]
    assert [launch.table.counts.tolist() for launch in found.shared] == [[512], [512, 512]]
    assert found.order.tolist()[-1] == 13
    assert all(launch.mask is None for launch in found.shared)


def test_rows_between_two_parts_are_masked_out():
    pairs = [[*range(1000 * g, 1000 * g + 700)] for g in range(2)]
    tables = (
        [[*pairs[0], 9000 + i] for i in range(32)]
        + [[8000, 8001]]
        + [[*pairs[1], 9100 + i] for i in range(32)]
    )
    found = cut(make_batch(tables, [701 * 16] * 32 + [20] + [701 * 16] * 32))
    (shared,) = found.shared
    assert found.order is None
    assert np.diff(shared.row_starts).tolist() == [32, 1, 32]
    assert shared.table.counts.tolist() == [700, 1, 700]
    assert np.flatnonzero(~shared.mask).tolist() == [32]


def test_small_parts_of_one_depth_share_the_launch_that_none_of_them_is_worth():
    groups = [[*range(1000 * g, 1000 * g + 128)] for g in range(8)]
    tables = [[*groups[i // 8], 20000 + i] for i in range(64)]
    found = cut(make_batch(tables, [129 * 16] * 64))
    assert [np.diff(launch.row_starts).tolist() for launch in found.shared] == [[8] * 8]
    alone = cut(make_batch(tables[:8], [129 * 16] * 8))
    assert not alone.shared


def test_windows_keep_whole_pages_out_and_share_only_what_all_queries_see():
    windowed = AttentionSpec(4, 1, 256, 256, 0.06, window=512)
    found = cut(make_batch([range(7, 263)], [4090]), windowed)
    (own,) = found.own
    # The first position seen is 3578: page 223 on.
    assert (own.table.first_pages.tolist(), own.table.counts.tolist()) == ([223], [33])
    wide = AttentionSpec(32, 8, 128, 128, 0.09, window=8192 + 256)
    assert cut(family(64, 8192, 256), wide).shared
    assert not cut(family(64, 8192, 256), AttentionSpec(32, 8, 128, 128, 0.09, window=8192)).shared


def test_decodes_beside_prompts_get_a_launch_of_their_own_if_they_read_much():
    def mixed(context):
        tables = [list(range(1000 * i, 1000 * i + -(-context // 16))) for i in range(32)] + [
            list(range(90000, 90128))
        ]
        return make_batch(tables, [context] * 32 + [2048], [1] * 32 + [2048])

    long, short = cut(mixed(8000)), cut(mixed(100))
    assert [(launch.decode, launch.first_row, launch.stop_row) for launch in long.own] == [
        (True, 0, 32),
        (False, 32, 2080),
    ]
    assert [launch.decode for launch in short.own] == [False]


def test_full_tiles_of_prompts_gain_nothing_from_sharing():
    tables = [[*range(512), *range(1000 + 64 * i, 1064 + 64 * i)] for i in range(8)]
    many = cut(make_batch(tables, [576 * 16] * 8, [1024] * 8))
    few = cut(make_batch(tables, [576 * 16] * 8, [4] * 8))
    assert not many.shared
    assert few.shared


def test_sequences_without_queries_are_left_out():
    batch = make_batch([[1, 2], [3], [4, 5]], [20, 16, 30], [1, 0, 1])
    (own,) = cut(batch).own
    assert own.table.entries.tolist() == [0, 2]
    assert own.row_starts.tolist() == [0, 1, 2]
    assert cut(make_batch([[1]], [16], [0])).launches == []


# -- kernels ------------------------------------------------------------------------------------------------------


def test_which_kernel_decodes():
    for group, tensor_cores in [
        (1, False),
        (2, False),
        (3, False),
        (4, True),
        (5, True),
        (7, True),
        (8, True),
    ]:
        assert uses_tensor_cores(plain_spec(None, 2 * group, 2, 64)) == tensor_cores
        assert uses_tensor_cores(plain_spec(16, 2 * group, 2, 64))


def test_names_of_kernel_modules():
    import torch

    specs = [
        GEMMA,
        AttentionSpec(4, 1, 256, 256, 0.06, window=512),
        AttentionSpec(8, 8, 128, 128, 0.1, softcap=30.0),
        AttentionSpec(8, 8, 80, 80, 0.1),
    ]
    names = [str(module) for module in kernel_modules(specs, torch.bfloat16)]
    assert names == ["cascade", "decode:bf16:128:cap", "fa2:bf16:128:cap", "fa2:bf16:256", "fa2:bf16:256:swa"]
    assert kernel_modules(specs, torch.float32) == []


def test_limits_say_what_is_wrong():
    import torch

    limits = Limits()
    assert limits.why_not(LLAMA, torch.bfloat16) is None
    assert "4 elements per head and its keys 64" in limits.why_not(AttentionSpec(2, 1, 64, 4, 1.0))
    assert "heads have 80 elements, and the kernels take 64, 128, 256" in limits.why_not(
        AttentionSpec(2, 1, 80, 80, 1.0)
    )
    assert "float32, and the kernels take bfloat16 and float16" in limits.why_not(LLAMA, torch.float32)


@pytest.mark.parametrize(
    ("heads", "dim", "fits"), [(64, 128, True), (65, 128, False), (32, 256, True), (33, 256, False)]
)
def test_heads_that_a_merge_can_hold(heads, dim, fits):
    assert can_merge(heads, dim, 2) == fits
