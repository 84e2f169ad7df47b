"""What the torch backend reads: each row its own keys, each once; and the strategy that the cost rule promises."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.attention import AttentionBatch, AttentionSpec
from radixkv.attention.step_tables import StepTables
from radixkv.attention.torch_calls import PaddedCall
from radixkv.attention.torch_plan import Costs, plan_rounds
from tests.attention.test_backends import COSTS, plain_spec, scenes

GEMMA = AttentionSpec(4, 1, 256, 256, 0.06)


def reads(call, window):
    """`(row, slots it sees)` of every row of a call."""
    if isinstance(call, PaddedCall):
        group = call.group
        slots, hidden = group.slots(call.number), group.hidden_in(call.number)
        assert group.whole[call.number] == (not hidden.any())
        for row, read, padding in zip(call.rows.numbers(), slots, hidden, strict=True):
            assert set(read[padding]) <= set(
                read[~padding]
            )  # padding reads nothing that the row does not own
            yield int(row), read[~padding].tolist()
        return
    slots = (np.arange(call.slot, call.slot + call.num_keys) if call.slots is None else call.slots).tolist()
    rows = call.rows.numbers().tolist()
    if call.chunks is None:
        lows = [0] * len(rows) if call.lows is None else call.lows.tolist()
        for row, low in zip(rows, lows, strict=True):
            yield row, slots[low:]
        return
    assert [chunk.start for chunk in call.chunks] == [0, *(chunk.stop for chunk in call.chunks[:-1])]
    assert call.chunks[-1].stop == len(rows)
    for chunk in call.chunks:
        keys = slots[chunk.first_key : chunk.first_key + chunk.num_keys]
        assert len(keys) == chunk.num_keys == chunk.before + chunk.stop - chunk.start
        for number, row in enumerate(rows[chunk.start : chunk.stop]):
            end = chunk.before + number + 1
            yield row, keys[0 if window is None else max(0, end - window) : end]


@given(scenes(), st.sampled_from(COSTS))
def test_each_row_reads_its_keys_once_and_each_round_a_row_once(scene, costs):
    batch, window = scene.batch, scene.spec.window
    rounds = plan_rounds(StepTables(batch), scene.spec, costs or Costs())
    seen = {row: [] for row in range(batch.num_tokens)}
    for number, one in enumerate(rounds):
        rows = []
        for call in one.calls:
            for row, slots in reads(call, window):
                rows.append(row)
                seen[row] += slots
        assert rows == one.rows.numbers().tolist()
        assert len(set(rows)) == len(rows)
        assert number > 0 or len(rows) == batch.num_tokens
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


def make_batch(tables, contexts, queries=None, block_size=16):
    queries = [1] * len(tables) if queries is None else queries
    width = max(map(len, tables))
    padded = np.full((len(tables), width), -1, np.int32)
    for row, table in zip(padded, tables, strict=True):
        row[: len(table)] = table
    starts = np.concatenate([[0], np.cumsum(queries)]).astype(np.int32)
    return AttentionBatch(starts, np.array(contexts, np.int32), padded, block_size, queries.count(1))


def calls_of(batch, spec=GEMMA):
    return [one.calls for one in plan_rounds(StepTables(batch), spec, Costs())]


def test_a_context_in_consecutive_blocks_is_one_view():
    ((call,),) = calls_of(make_batch([range(7, 263)], [4090]))
    assert (call.slot, call.slots, call.num_keys, call.chunks) == (7 * 16, None, 4090, None)


def test_only_the_window_of_a_layer_is_read():
    windowed = AttentionSpec(4, 1, 256, 256, 0.06, window=512)
    ((call,),) = calls_of(make_batch([range(7, 263)], [4090]), windowed)
    assert (call.slot, call.num_keys) == (7 * 16 + 4090 - 512, 512)


def test_a_shared_prefix_is_read_once_and_own_parts_are_copied_together():
    tables = [[*range(32), 32 + 3 * i, 33 + 3 * i, 34 + 3 * i] for i in range(8)]
    base, shared = calls_of(make_batch(tables, [512 + 33 + i for i in range(8)]))
    (call,) = shared
    assert (len(call.rows), call.slot, call.slots, call.num_keys) == (8, 0, None, 512)
    assert [type(one) for one in base] == [PaddedCall]
    assert base[0].group.slots(0).shape == (8, 40)


def test_levels_of_sharing_become_rounds():
    tables = [[*range(32), *range(32 + 16 * (i // 4), 48 + 16 * (i // 4)), 100 + i] for i in range(8)]
    base, root, branches = calls_of(make_batch(tables, [49 * 16] * 8))
    assert [(len(call.rows), call.num_keys) for call in root] == [(8, 512)]
    assert [(len(call.rows), call.slot, call.num_keys) for call in branches] == [(4, 512, 256), (4, 768, 256)]
    assert base[0].group.slots(0).shape == (8, 16)


def test_a_short_shared_prefix_is_not_worth_a_call():
    tables = [[0, 1 + i] for i in range(4)]
    ((call,),) = calls_of(make_batch(tables, [20] * 4))
    assert call.group.slots(0).shape == (4, 20)


def test_long_contexts_that_share_nothing_are_views():
    (base,) = calls_of(make_batch([range(34 * i, 34 * i + 34) for i in range(8)], [544] * 8))
    assert [(call.slot, call.slots, call.num_keys) for call in base] == [
        (544 * i, None, 544) for i in range(8)
    ]


def test_two_long_runs_are_two_views_and_a_shattered_context_is_copied_in_pieces():
    base, part = calls_of(make_batch([[*range(40, 72), *range(20)]], [52 * 16]))
    assert [(call.slot, call.num_keys) for call in part] == [(640, 512)]
    assert [(call.slot, call.num_keys) for call in base] == [(0, 320)]
    rounds = calls_of(make_batch([range(98, -1, -2)], [50 * 16]))
    assert [[call.group.slots(call.number).size for call in calls] for calls in rounds] == [[400], [400]]


@pytest.mark.parametrize("cached", [0, 512, 2048])
def test_a_prompt_computes_little_more_than_its_triangle(cached):
    spec = plain_spec(heads=4, kv_heads=1, dim=256)
    blocks = (cached + 544) // 16
    rounds = calls_of(make_batch([range(blocks)], [cached + 544], [544]), spec)
    computed = 0
    for calls in rounds:
        for call in calls:
            parts = call.chunks or []
            computed += sum((chunk.stop - chunk.start) * chunk.num_keys for chunk in parts)
            computed += 0 if parts else len(call.rows) * call.num_keys
    assert computed <= 1.15 * (544 * cached + 544 * 545 / 2)
    # A long prefix without a mask, in one call for all rows.
    assert len(rounds) == (2 if cached >= 1024 else 1)


def test_slots_are_64_bits_wide():
    top = 2**31 - 1
    ((call,),) = calls_of(make_batch([[top]], [5]), plain_spec())
    assert call.slot == top * 16
    base, _ = calls_of(make_batch([[top, top - 7]] * 2, [17] * 2), AttentionSpec(4, 1, 8192, 8192, 1.0))
    for call in base:
        slots = call.group.slots(call.number)
        assert slots.dtype == np.int64
        assert slots.min() >= (top - 7) * 16
