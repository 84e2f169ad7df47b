"""The host tier gives back what was put there, and keeps its own books."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from radixkv import KVLayout, KVStore, LayerLayout
from radixkv.errors import InvalidRequestError
from radixkv.store import HostTier

BLOCK = 4


def make_store(num_blocks: int = 8) -> KVStore:
    layers = (LayerLayout(2, 3, 5), None, LayerLayout(1, 4, 4, window=8))
    store = KVStore(KVLayout(layers, torch.float32, torch.device("cpu")), num_blocks, BLOCK)
    for tensor in (*store.keys, *store.values):
        if tensor is not None:
            tensor.normal_()
    return store


def block(store: KVStore, index: int) -> list[torch.Tensor]:
    return [t[index].clone() for t in (*store.keys, *store.values) if t is not None]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_a_block_comes_back_as_it_went_though_its_place_was_overwritten() -> None:
    store = make_store()
    tier = HostTier(store, memory=store.layout.bytes_per_token * BLOCK * 3)
    assert tier.pool.num_blocks == 3
    before = {i: block(store, i) for i in (6, 1)}
    host = tier.pool.allocate(2)
    tier.swap_out(np.array([6, 1], np.int32), host)
    for tensor in (*store.keys, *store.values):
        if tensor is not None:
            tensor.fill_(float("nan"))
    tier.swap_in(host, np.array([0, 7], np.int32))
    assert same(block(store, 0), before[6])
    assert same(block(store, 7), before[1])
    assert all(bool(t.isnan().all()) for t in block(store, 3)), "only the blocks named are written"
    assert tier.block_bytes == BLOCK * store.layout.bytes_per_token


@pytest.mark.parametrize(
    ("memory", "match"),
    [(1, "holds no block"), ("x", "cannot read"), (0, "no room"), (-5, "no room"), ("900TiB", "more than")],
)
def test_sizes_that_make_no_sense(memory: object, match: str) -> None:
    with pytest.raises(InvalidRequestError, match=match):
        HostTier(make_store(), memory)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("sources", "targets"), [([0, 1], [2]), ([9], [0]), ([0], [9]), ([0, 1], [2, 2]), ([-1], [0])]
)
def test_moves_that_make_no_sense_change_nothing(sources: list[int], targets: list[int]) -> None:
    store = make_store(4)
    tier = HostTier(store, memory=store.layout.bytes_per_token * BLOCK * 4)
    before = [block(store, i) for i in range(4)]
    with pytest.raises(InvalidRequestError):
        tier.swap_in(np.array(sources, np.int32), np.array(targets, np.int32))
    assert all(same(block(store, i), before[i]) for i in range(4))


def test_stores_of_other_shapes_are_refused() -> None:
    other = KVStore(KVLayout.uniform(1, 2, 4), 4, BLOCK)
    with pytest.raises(InvalidRequestError, match="different shapes"):
        make_store().copy_blocks_from(other, np.array([0]), np.array([0]))
