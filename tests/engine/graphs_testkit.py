"""Engines that run decode steps as graphs, played on the CPU, and a watch on what would wait for a device."""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest import mock

import torch
from engine_testkit import make_engine
from torch.overrides import TorchFunctionMode

from tests.attention.fake_flashinfer import Double
from tests.attention.flashinfer_testkit import over_double


def graph_engine(model: Any, *, backend: Any = None, **kwargs: Any) -> Any:
    """An engine over the double with graphs. `engine.graph_device` makes them."""
    backend = backend or over_double(double=Double.relaxed(graphs=True))
    engine = make_engine(model, attention=backend, **kwargs)
    return engine


def device_of(engine: Any) -> Any:
    """What makes the graphs of an engine."""
    return engine._runner.graphs._device


def padded_rows_are_harmless(engine: Any) -> dict[str, int]:
    """Before each replay, spoil all that no running sequence may read; after it, look for what was written to.

    Returns:
        How many replays and rows of padding were looked at so far.
    """
    store, pool, graphs = engine.cache.store, engine.cache.pool, engine._runner.graphs
    pairs = [
        (whole, ours)
        for wholes, part in ((store.keys_and_scratch, store.keys), (store.values_and_scratch, store.values))
        for whole, ours in zip(wholes, part, strict=True)
        if whole is not None
    ]
    seen: Counter[str] = Counter()
    replay = graphs._replay

    def watched(graph: Any, step: Any) -> Any:
        free = torch.from_numpy(pool.refcounts == 0).to(store.layout.device)
        for whole, ours in pairs:
            ours[free] = float("nan")
            whole[store.scratch_block] = float("nan")
        copies = [whole.clone() for whole, _ in pairs]
        logits = replay(graph, step)
        slots = torch.from_numpy(step.slot_mapping).to(store.layout.device)
        for (whole, _), old in zip(pairs, copies, strict=True):
            now, was = whole.flatten(0, 1), old.flatten(0, 1)
            same = (now == was) | (now.isnan() & was.isnan())
            changed = (~same.flatten(1).all(1)).nonzero()[:, 0]
            changed = changed[changed < store.num_blocks * store.block_size]
            assert torch.isin(changed, slots).all(), "a replay wrote to somebody else's slot"
            assert now[slots].isfinite().all()
        assert logits.isfinite().all()
        seen["replays"] += 1
        seen["padding"] += graph.attention.rows - step.num_seqs
        return logits

    graphs._replay = watched
    return seen


_from_numpy = torch.from_numpy  # which is not told to modes
_T = torch.Tensor
_READS = {_T.item, _T.tolist, _T.numpy, _T.__array__, _T.__bool__, _T.__int__, _T.__float__, _T.__index__}
_READS |= {_T.__contains__, _T.nonzero, _T.masked_select, _T.equal, _T.unique, _T.bincount}
_READS |= {torch.equal, torch.nonzero, torch.masked_select, torch.unique, torch.bincount}


class Waits(TorchFunctionMode):
    """Counts where the host would wait for a device, if every tensor lay there that the host did not make itself.

    The host's are those made by `torch.from_numpy`, copied to it by `.cpu()`, and what comes of them without leaving.

    Attributes:
        found: What was called, and how often.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()
        self._host: dict[int, Any] = {}  # storages, kept so that nobody gets their place

    def __enter__(self) -> Waits:
        self._patch = mock.patch.object(torch, "from_numpy", lambda array: self.add_host(_from_numpy(array)))
        self._patch.start()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self._patch.stop()
        super().__exit__(*error)

    def add_host(self, tensor: torch.Tensor) -> torch.Tensor:
        self._host[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor

    def is_host(self, tensor: Any) -> bool:
        return tensor.untyped_storage()._cdata in self._host

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.empty and "pin_memory" in kwargs:
            return self.add_host(func(*args, **kwargs))
        name = getattr(func, "__name__", str(func))
        first = args[0] if args and isinstance(args[0], torch.Tensor) else None
        if first is not None and not self.is_host(first):
            if func is torch.Tensor.cpu:
                self.found["cpu"] += 1
                return self.add_host(first.clone())
            if func in _READS:
                self.found[name] += 1
            if func in (torch.Tensor.__getitem__, torch.Tensor.__setitem__):
                picks = args[1] if isinstance(args[1], tuple) else (args[1],)
                if any(isinstance(one, torch.Tensor) and one.dtype == torch.bool for one in picks):
                    self.found["mask"] += 1
        elif first is not None and func is torch.Tensor.to and "device" in {*kwargs, *map(_kind, args[1:])}:
            self.found["copy of ordinary memory"] += 1
            return first.clone()
        result = func(*args, **kwargs)
        if (
            first is not None
            and self.is_host(first)
            and isinstance(result, torch.Tensor)
            and not self.is_host(result)
        ):
            self.add_host(result)
        return result


def _kind(argument: Any) -> str:
    return "device" if isinstance(argument, torch.device) else ""
