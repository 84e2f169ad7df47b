"""CUDA graphs, played on the CPU: what a forward launches is written down, and launched again on the same memory.

As on a GPU, and unlike a second call of the forward:

* Python does not run again. A number that the host worked out during the recording stays what it was;
* what was recorded has not been computed: all results of the recording are rubbish until the first replay;
* memory from outside of the recording is read at its address. If it was given back meanwhile, that is an error here,
  and anybody's content on a GPU;
* the host must not look at a result while it records.
"""

from __future__ import annotations

import contextlib
from unittest import mock

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map_only

from radixkv.attention.device_graphs import GraphDevice, NotCapturable, WaitGuard

from .timeline import ContractError, demand, unwatched

_recording = []

# What reads a tensor past the dispatcher on a CPU, and through a copy to the host on a GPU.
_HOST_READS = {torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.cpu, torch.Tensor.__array__}
_EMPTY = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}


def is_recording():
    return bool(_recording)


def opaque(work, outputs):
    """Do what one kernel does, now and in every replay of what is being recorded.

    Args:
        work: Reads and writes memory that stays where it is.
        outputs: Tensors that it writes.
    """
    if not _recording:
        work()
        return
    with unwatched():
        work()
    _recording[-1].note(work, outputs)


class FakeGraphs(GraphDevice):
    """Makes `FakeGraph`s.

    Attributes:
        made: All of them.
        before_replay, after_replay: Called with each graph.
        before_capture: Called before each recording; may raise.
    """

    def __init__(self):
        self.made = []
        self.before_replay = self.after_replay = lambda graph: None
        self.before_capture = lambda: None

    def capture(self, forward):
        for _ in range(2):
            forward()
        self.before_capture()
        graph = FakeGraph(forward, self)
        self.made.append(graph)
        return graph


def _known_to_transformers():
    """transformers leaves some checks out while a stream is captured."""
    from transformers.utils import import_utils

    if not hasattr(import_utils, "is_cuda_stream_capturing"):
        return contextlib.nullcontext()
    return mock.patch.object(import_utils, "is_cuda_stream_capturing", return_value=True)


class _NoHostReads(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in _HOST_READS:
            raise NotCapturable(f"its forward calls {func.__name__}, and waits for the device")
        return func(*args, **(kwargs or {}))


class _External:
    """Memory that was there before the recording. It is not kept."""

    def __init__(self, tensor):
        self.storage = StorageWeakRef(tensor.untyped_storage())
        self.form = tensor.storage_offset(), tensor.size(), tensor.stride()
        self.like = torch.empty(0, dtype=tensor.dtype)

    def tensor(self):
        storage = torch.UntypedStorage._new_with_weak_ptr(self.storage.cdata)
        demand(storage is not None, "a graph reads memory that was given back since it was recorded")
        return self.like.detach().set_(storage, *self.form)


class _Recorder(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.tape = []
        self.own = {}  # storages made during the recording, by address of the object
        self.rubbish = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        inputs = [one for one in tree_iter((args, kwargs)) if isinstance(one, torch.Tensor)]
        known = {one.untyped_storage()._cdata for one in inputs}
        results = [one for one in tree_iter(out) if isinstance(one, torch.Tensor)]
        fresh = [one for one in results if one.untyped_storage()._cdata not in known]
        for one in fresh:
            self.own[one.untyped_storage()._cdata] = one.untyped_storage()
        self.rubbish += fresh
        name = func.overloadpacket.__name__
        if name == "lift_fresh":  # of a number that Python wrote: part of the recording
            self.own |= {one.untyped_storage()._cdata: one.untyped_storage() for one in inputs}
        if name in _EMPTY or not (fresh or func._schema.is_mutable):
            return out  # room, or another view of it
        if name == "set_":
            raise ContractError("a recorded tensor must not get other memory")
        kept = tree_map_only(torch.Tensor, self._kept, (args, kwargs))
        fresh_ids = {id(one) for one in fresh}
        targets = [one if id(one) in fresh_ids else None for one in results]
        self.tape.append((func, kept, targets))
        return out

    def note(self, work, outputs):
        self.tape.append((work, None, None))
        self.rubbish += [one for one in outputs if one.untyped_storage()._cdata in self.own]

    def _kept(self, tensor):
        return tensor if tensor.untyped_storage()._cdata in self.own else _External(tensor)


class FakeGraph:
    """What a forward launched.

    Attributes:
        output: Holds the result after a replay.
        num_replays: So far.
    """

    def __init__(self, forward, device=None):
        self._device = device or FakeGraphs()
        recorder = _Recorder()
        _recording.append(recorder)
        try:
            with _known_to_transformers(), _NoHostReads(), WaitGuard("cpu"), recorder:
                self.output = forward()
        finally:
            _recording.pop()
        self._tape = recorder.tape
        self._rubbish = recorder.rubbish
        self.num_replays = 0
        self._spoil()

    @torch.no_grad()
    def _spoil(self):
        """Nothing has been computed yet."""
        for tensor in self._rubbish:
            if tensor.is_floating_point():
                tensor.fill_(float("nan"))
            elif tensor.dtype != torch.bool:
                tensor.fill_(torch.iinfo(tensor.dtype).max)

    @torch.no_grad()
    def replay(self):
        with unwatched():
            self._replay()

    def _replay(self):
        self._device.before_replay(self)
        self._spoil()
        self.num_replays += 1
        for call, kept, targets in self._tape:
            if kept is None:
                call()
                continue
            args, kwargs = tree_map_only(_External, _External.tensor, kept)
            results = [one for one in tree_iter(call(*args, **kwargs)) if isinstance(one, torch.Tensor)]
            for target, result in zip(targets, results, strict=True):
                if target is not None:
                    demand(target.shape == result.shape, "a recorded result has another size now")
                    target.copy_(result)
        self._device.after_replay(self)
