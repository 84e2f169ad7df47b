"""The store against plain indexing, for any block table, any range and layers of different shapes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from radixkv import KVLayout, KVStore, LayerLayout
from radixkv.core.errors import InvalidRequestError

MIXED = KVLayout(
    (LayerLayout(2, 4, 3), None, LayerLayout(1, 8, 8, window=5)), torch.float32, torch.device("cpu")
)


@st.composite
def tables(draw):
    """A block table of some pool, mixing runs of consecutive ids with jumps, and a range of its tokens."""
    size = draw(st.integers(1, 5))
    num_blocks = draw(st.integers(1, 40))
    order = draw(st.permutations(range(num_blocks)) | st.just(list(range(num_blocks))))
    table = np.array(order[: draw(st.integers(1, num_blocks))], dtype=np.int32)
    start = draw(st.integers(0, len(table) * size))
    stop = draw(st.integers(start, len(table) * size))
    return size, num_blocks, table, start, stop


@given(tables())
def test_what_is_written_is_read_back_and_nothing_else_is_touched(case):
    size, num_blocks, table, start, stop = case
    store = KVStore(MIXED, num_blocks, size)
    for tensor in (*store.keys, *store.values):
        if tensor is not None:
            tensor.fill_(-1)
    where = store.locate(table, start, stop)
    slots = [int(table[i // size]) * size + i % size for i in range(start, stop)]
    assert where.num_tokens == len(slots)
    for layer, shape in enumerate(MIXED.layers):
        if shape is None:
            continue
        # Strided sources and targets, as the plug-in has them.
        source = torch.arange(shape.num_kv_heads * len(slots) * 8.0).view(shape.num_kv_heads, -1, 8)
        keys, values = source[..., : shape.key_dim], source[..., : shape.value_dim] + 0.5
        store.write(layer, where, keys, values)
        for pool, rows in ((store.keys[layer], keys), (store.values[layer], values)):
            flat = pool.view(-1, *pool.shape[2:])
            assert torch.equal(flat[slots], rows.transpose(0, 1))
            others = np.setdiff1d(np.arange(num_blocks * size), slots)
            assert (flat[others] == -1).all()
        out = torch.zeros(shape.num_kv_heads, len(slots) + 3, 8)
        store.read(layer, where, out[:, 1 : 1 + len(slots), : shape.key_dim], torch.empty_like(values))
        assert torch.equal(out[:, 1 : 1 + len(slots), : shape.key_dim], keys)
        assert (out[:, 0] == 0).all()
        assert (out[:, 1 + len(slots) :] == 0).all()


def test_block_copies_go_through_every_layer():
    store = KVStore(MIXED, 6, 2)
    for tensor in (*store.keys, *store.values):
        if tensor is not None:
            tensor.copy_(torch.arange(6.0).view(6, 1, 1, 1).expand_as(tensor))
    store.copy_blocks(np.array([1, 4], dtype=np.int32), np.array([0, 5], dtype=np.int32))
    for tensor in (*store.keys, *store.values):
        if tensor is not None:
            assert tensor[:, 0, 0, 0].tolist() == [1, 1, 2, 3, 4, 4]


@pytest.mark.parametrize(
    ("sources", "targets", "word"),
    [
        ([0], [0], "distinct"),
        ([0, 1], [2, 2], "distinct"),
        ([0], [9], "lie in"),
        ([-1], [2], "lie in"),
        ([0], [1, 2], "length"),
    ],
)
def test_bad_block_copies_are_refused(sources, targets, word):
    with pytest.raises(InvalidRequestError, match=word):
        KVStore(MIXED, 4, 2).copy_blocks(np.array(sources), np.array(targets))


def test_slots_are_64_bit():
    """FC-47: block id times block size passes 2**31 long before block ids do."""
    store = KVStore(KVLayout.uniform(1, 1, 1), 1, 1)
    store.block_size = 2**20
    table = np.array([2**20, 2**21], dtype=np.int32)
    where = store.locate(table, 5, 2**20 + 7)
    assert where.runs == ((2**40 + 5, 2**20 - 5), (2**41, 7))
    store._flat  # noqa: B018 - the store itself is never read here
    many = np.arange(2**20, 2**20 + 100, 2, dtype=np.int32)
    store.block_size = 2**12
    where = store.locate(many, 0, len(many) * 2**12)
    assert where.index is not None
    assert int(where.index[-1]) == int(many[-1]) * 2**12 + 2**12 - 1


def test_a_range_outside_the_table_is_refused():
    store = KVStore(MIXED, 4, 2)
    with pytest.raises(InvalidRequestError, match="do not lie"):
        store.locate(np.array([0, 1], dtype=np.int32), 0, 5)


def test_a_layer_without_kv_cannot_be_read():
    store = KVStore(MIXED, 4, 2)
    where = store.locate(np.array([0], dtype=np.int32), 0, 1)
    with pytest.raises(InvalidRequestError, match="layer 1"):
        store.write(1, where, torch.zeros(1, 1, 1), torch.zeros(1, 1, 1))


def test_a_store_made_in_inference_mode_can_be_written_outside():
    with torch.inference_mode():
        store = KVStore(MIXED, 4, 2)
    where = store.locate(np.array([0], dtype=np.int32), 0, 1)
    store.write(0, where, torch.ones(2, 1, 4), torch.ones(2, 1, 3))
    assert store.keys[0][0, 0].sum() == 8


def test_the_scratch_block_lies_behind_the_pool_and_is_no_part_of_it() -> None:
    store = KVStore(MIXED, 4, 2)
    assert store.scratch_block == 4
    for parts, wholes in ((store.keys, store.keys_and_scratch), (store.values, store.values_and_scratch)):
        for part, whole in zip(parts, wholes, strict=True):
            assert (part is None) == (whole is None)
            if part is None or whole is None:
                continue
            part.fill_(1)
            whole[store.scratch_block] = 2
            assert part.shape[0] == 4
            assert part.is_contiguous()
            assert (part == 1).all()
            assert whole.shape == (5, *part.shape[1:])
            assert whole.data_ptr() == part.data_ptr()
