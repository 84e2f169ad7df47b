"""The host tier gives back what was put there, whatever else happens to the pool, and keeps its own books."""

from __future__ import annotations

import logging
import types

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from radixkv import KVLayout, KVStore, LayerLayout
from radixkv.errors import InvalidRequestError
from radixkv.store import HostTier, host_tier, pinning
from tests.store.stream_double import OrderError, StreamDouble

BLOCK = 4
LAYERS = (LayerLayout(2, 3, 5), None, LayerLayout(1, 4, 4, window=8))
CUDA = pytest.param(
    "cuda",
    marks=[
        pytest.mark.cuda,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    ],
)


def make_store(num_blocks: int = 8, device: str = "cpu", dtype: torch.dtype = torch.float32) -> KVStore:
    store = KVStore(KVLayout(LAYERS, dtype, torch.device(device)), num_blocks, BLOCK)
    for tensor in (*store.keys, *store.values):
        if tensor is not None:
            tensor.normal_()
    return store


def make_tier(store: KVStore, num_blocks: int, **kwargs: object) -> HostTier:
    return HostTier(store, store.layout.bytes_per_token * store.block_size * num_blocks, **kwargs)  # type: ignore[arg-type]


def block(store: KVStore, index: int) -> list[torch.Tensor]:
    return [t[index].clone() for t in (*store.keys, *store.values) if t is not None]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("staging", [1, 64 << 20])
def test_a_block_comes_back_as_it_went_though_its_place_was_overwritten(
    device: str, dtype: torch.dtype, staging: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_tier, "_STAGING_BYTES", staging)
    store = make_store(device=device, dtype=dtype)
    tier = make_tier(store, 3)
    assert tier.pool.num_blocks == 3
    before = {i: block(store, i) for i in (6, 1, 2)}
    host = tier.pool.allocate(3)[[2, 0, 1]]
    tier.swap_out(np.array([6, 1, 2], np.int32), host)
    tier.fence()
    for tensor in (*store.keys, *store.values):
        if tensor is not None:
            tensor.fill_(float("nan"))
    tier.swap_in(host[[2, 0, 1]], np.array([5, 0, 7], np.int32))
    assert same(block(store, 0), before[6])
    assert same(block(store, 7), before[1])
    assert same(block(store, 5), before[2])
    assert all(bool(t.isnan().all()) for t in block(store, 3)), "only the blocks named are written"
    assert tier.block_bytes == BLOCK * store.layout.bytes_per_token


@pytest.mark.parametrize("device", ["cpu", CUDA])
@given(data=st.data())
def test_any_order_of_copies_and_writes(device: str, data: st.DataObject) -> None:
    store = make_store(6, device)
    streams = {}
    if device == "cpu":
        streams["stream"] = double = StreamDouble(late=data.draw(st.sampled_from([0.0, 0.5, 1.0])), seed=1)
    tier = make_tier(store, 5, **streams)
    now = {i: block(store, i) for i in range(6)}
    kept: dict[int, list[torch.Tensor]] = {}
    unfenced: set[int] = set()
    for _ in range(data.draw(st.integers(1, 12))):
        what = data.draw(st.sampled_from(["out", "in", "write", "fence"]))
        pick = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=3, unique=True))
        if what == "out":
            targets = data.draw(
                st.lists(st.integers(0, 4), min_size=len(pick), max_size=len(pick), unique=True)
            )
            tier.swap_out(np.array(pick, np.int32), np.array(targets, np.int32))
            kept.update({t: now[p] for p, t in zip(pick, targets, strict=True)})
            unfenced.update(pick)
        elif what == "in" and kept:
            sources = data.draw(st.lists(st.sampled_from(sorted(kept)), min_size=1, max_size=3))
            pick = (pick * 3)[: len(sources)] if len(set((pick * 3)[: len(sources)])) == len(sources) else []
            tier.swap_in(np.array(sources[: len(pick)], np.int32), np.array(pick, np.int32))
            now.update({p: kept[s] for p, s in zip(pick, sources, strict=False)})
            unfenced.clear()
        elif what == "write":
            if unfenced & set(pick):
                tier.fence()
                unfenced.clear()
            if device == "cpu":
                double.main(writes=pick)
            for i in pick:
                for tensor in (*store.keys, *store.values):
                    if tensor is not None:
                        tensor[i].normal_()
                now[i] = block(store, i)
        elif what == "fence":
            tier.fence()
            unfenced.clear()
    tier.fence()
    assert all(same(block(store, i), now[i]) for i in range(6))


def test_a_write_before_the_fence_is_a_race() -> None:
    store = make_store()
    tier = make_tier(store, 3, stream=(double := StreamDouble()))
    tier.swap_out(np.array([6, 1], np.int32), np.array([0, 1], np.int32))
    double.main(reads=[6, 1], writes=[5])  # to read what is being read harms nobody
    with pytest.raises(OrderError, match="may write block 1 before"):
        double.main(writes=[1])
    tier.fence()
    double.main(writes=[1, 6])


def test_a_copy_waits_for_what_was_written_before() -> None:
    store = make_store()
    double = StreamDouble()
    tier = make_tier(store, 3, stream=double)
    double.main(writes=[2])
    tier.swap_out(np.array([2], np.int32), np.array([0], np.int32))
    double.main(reads=[3])
    tier.swap_in(np.array([0], np.int32), np.array([3], np.int32))
    double.main(reads=[3], writes=[3])
    double.wait = lambda event: None  # type: ignore[method-assign]
    with pytest.raises(OrderError, match="side may read block 3 before"):
        tier.swap_out(np.array([3], np.int32), np.array([0], np.int32))


def test_a_copy_that_fails_halfway_is_waited_for_all_the_same() -> None:
    store = make_store()
    double = StreamDouble()
    tier = make_tier(store, 3, stream=double)

    def fail(number: int, when: str) -> None:
        if when == "after":
            raise torch.OutOfMemoryError("no room for the index")

    double.before_copy = fail
    with pytest.raises(torch.OutOfMemoryError):
        tier.swap_in(np.array([0], np.int32), np.array([4], np.int32))
    double.main(writes=[4])
    with pytest.raises(torch.OutOfMemoryError):
        tier.swap_out(np.array([5], np.int32), np.array([0], np.int32))
    tier.fence()
    double.main(writes=[5])


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
@pytest.mark.parametrize("way", ["swap_in", "swap_out"])
def test_moves_that_make_no_sense_change_nothing(way: str, sources: list[int], targets: list[int]) -> None:
    store = make_store(4)
    tier = make_tier(store, 4, stream=(double := StreamDouble()))
    before = [block(store, i) for i in range(4)]
    with pytest.raises(InvalidRequestError):
        getattr(tier, way)(np.array(sources, np.int32), np.array(targets, np.int32))
    assert double.num_copies == 0
    assert all(same(block(store, i), before[i]) for i in range(4))


@pytest.mark.parametrize(
    ("module", "says"), [(host_tier, "cpu could not give"), (pinning, "the host could not")]
)
def test_no_memory_for_it_is_one_clear_error(
    module: types.ModuleType, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make_store()

    class Poor:
        def __getattr__(self, name: str) -> object:
            return getattr(torch, name)

        def empty(self, *args: object, **kwargs: object) -> torch.Tensor:
            raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(module, "torch", Poor())
    with pytest.raises(InvalidRequestError, match=says):
        make_tier(store, 2)


# -- pinned memory ----------------------------------------------------------------------------------------------


def test_pinning_says_why_it_cannot() -> None:
    if torch.cuda.is_available():
        pytest.skip("it can")
    memory = pinning.page_aligned(100, torch.float32)
    assert memory.shape == (25,)
    assert memory.data_ptr() % 4096 == 0
    assert pinning.pin(memory)
    pinning.unpin(memory)


def test_what_is_pinned_is_given_back_once_the_copies_are_done(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []
    fake = types.SimpleNamespace(
        cudaHostRegister=lambda at, size, flags: calls.append(size) or 0,
        cudaHostUnregister=lambda at: calls.append("unpin") or 0,
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: fake)
    store, double = make_store(), StreamDouble(late=0.0)
    tier = make_tier(store, 3, stream=double)
    tier._pin(3)  # as it does for itself on a GPU
    assert tier.pageable_reason is None
    double.synchronize = lambda: calls.append("wait")  # type: ignore[method-assign]
    assert 3 * tier.block_bytes <= 4096
    del tier
    assert calls == [4096, "wait", "unpin"]


def test_without_pinned_memory_it_works_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fake = types.SimpleNamespace(
        cudaHostRegister=lambda at, size, flags: 2,
        cudaError=lambda status: status,
        cudaGetErrorString=lambda status: "out of memory",
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: fake)
    store = make_store()
    before = block(store, 6)
    with caplog.at_level(logging.WARNING):
        tier = make_tier(store, 3)
        tier._pin(3)
        tier.swap_out(np.array([6], np.int32), np.array([1], np.int32))
        tier.fence()
        tier.swap_in(np.array([1], np.int32), np.array([0], np.int32))
    assert same(block(store, 0), before)
    assert len(caplog.records) == 1
    assert "not pinned" in caplog.text
    assert "out of memory" in caplog.text


# -- on a GPU ---------------------------------------------------------------------------------------------------


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_copies_on_a_gpu_are_ordered_and_the_host_waits_for_none() -> None:
    store = KVStore(KVLayout.uniform(4, 8, 128, dtype=torch.bfloat16, device="cuda"), 256, 16)
    tier = make_tier(store, 128)
    assert tier.pageable_reason is None
    out, back = np.arange(0, 256, 2, dtype=np.int32), np.arange(1, 256, 2, dtype=np.int32)
    host = np.random.permutation(128).astype(np.int32)
    for round_ in range(5):
        wanted = torch.randn_like(store.keys[0])
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            torch.cuda._sleep(20_000_000)  # the main stream is busy before each operation that matters
            for tensor in (*store.keys, *store.values):
                tensor.copy_(wanted)
            tier.swap_out(out, host)
            tier.fence()
            for tensor in (*store.keys, *store.values):
                tensor.zero_()
            torch.cuda._sleep(20_000_000)
            tier.swap_in(host, back)
            got = [tensor.clone() for tensor in (*store.keys, *store.values)]
        finally:
            torch.cuda.set_sync_debug_mode("default")
        for tensor in got:
            assert torch.equal(tensor[1::2], wanted[::2]), round_
            assert not tensor[::2].any(), round_
