"""Recording what a forward gives to the device, and giving it all of that again in one call.

A graph launches what was recorded on the memory that it was recorded on. Nothing of the forward's Python runs again,
so what differs between calls must lie in that memory, and nothing may depend on a number that the host read back.
"""

from __future__ import annotations

import contextlib
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from radixkv.core.errors import first_line

__all__ = ["Captured", "CudaGraphs", "GraphDevice", "NotCapturable", "WaitGuard"]

# Operations whose result, or its size, the host must know: it waits for the device.
_WAITS = frozenset(
    {
        "_local_scalar_dense",
        "_unique",
        "_unique2",
        "bincount",
        "equal",
        "is_nonzero",
        "item",
        "masked_select",
        "nonzero",
        "unique_consecutive",
        "unique_dim",
        "unique_dim_consecutive",
    }
)


class NotCapturable(RuntimeError):
    """The forward does something that cannot be part of a graph; the message says what."""


class Captured(Protocol):
    """What was recorded."""

    output: Tensor

    def replay(self) -> None:
        """Give it to the device again. `output` then holds the result, until something else is replayed."""


class GraphDevice(ABC):
    """Makes graphs. Those of one object share memory: only one runs at a time, and each overwrites what others left."""

    @abstractmethod
    def capture(self, forward: Callable[[], Tensor]) -> Captured:
        """Run a forward twice to warm up, and record it a third time.

        Raises:
            NotCapturable: It waits for the device, or cannot be recorded for another reason.
            RuntimeError: Anything that the forward raises, torch's out of memory among it.
        """


class WaitGuard(TorchDispatchMode):
    """Raises where the host would wait for a device, before it does, in this thread only.

    Waiting during a capture makes CUDA give up the capture, which torch does not recover from well; an exception ends
    it in order. torch's own `set_sync_debug_mode` is for all threads. And it cannot be found out without a capture:
    transformers leaves some checks out during one.

    Args:
        device_type: Of the device that must not be waited for.
    """

    def __init__(self, device_type: str) -> None:
        super().__init__()
        self._type = device_type

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        reason = self._reason(func, args, kwargs)
        if reason is not None:
            raise NotCapturable(f"its forward {reason}, and waits for the device")
        return func(*args, **kwargs)

    def _reason(self, func: Any, args: Any, kwargs: Any) -> str | None:
        name = func.overloadpacket.__name__
        if name in ("_to_copy", "copy_"):
            source = args[0] if name == "_to_copy" else args[1]
            target = kwargs.get("device") if name == "_to_copy" else args[0].device
            return self._copies(source, target)
        if name == "repeat_interleave" and kwargs.get("output_size") is None and len(args) == 1:
            return "repeats by numbers that it computed" if self._here(args) else None
        if name in ("index", "index_put", "index_put_", "_unsafe_index"):
            picks = [i for i in args[1] if isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8)]
            return "picks rows by a mask" if self._here(picks) else None
        if name == "histc":
            bounds = dict(zip(("min", "max"), args[2:], strict=False)) | kwargs
            alike = bounds.get("min", 0) == bounds.get("max", 0)
            return "reads back between what it counts" if alike and self._here(args) else None
        if name in _WAITS and self._here((args, kwargs)):
            return f"reads a result back ({name})"
        return None

    def _copies(self, source: Tensor, target: torch.device | None) -> str | None:
        if target is None or target.type == source.device.type:
            return None
        if source.device.type == self._type:
            return "copies a result to the host"
        if target.type == self._type and not source.is_pinned():
            return "copies from ordinary memory of the host"
        return None

    def _here(self, values: Any) -> bool:
        return any(isinstance(one, Tensor) and one.device.type == self._type for one in tree_leaves(values))


class _CudaGraph:
    def __init__(self, graph: torch.cuda.CUDAGraph, output: Tensor) -> None:
        self._graph = graph
        self.output = output

    @property
    def pool(self) -> Any:
        """The memory pool that it is recorded in."""
        return self._graph.pool()

    def replay(self) -> None:
        self._graph.replay()


class CudaGraphs(GraphDevice):
    """CUDA graphs, all in one memory pool.

    Args:
        device: Where forwards run.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # One for all: torch keeps a workspace for each stream that ever multiplied.
        self._side: torch.cuda.Stream | None = None
        # A pool is gone with the last of its graphs, and cannot be asked for by its handle any more.
        self._alive: weakref.WeakSet[_CudaGraph] = weakref.WeakSet()

    def capture(self, forward: Callable[[], Tensor]) -> Captured:
        """See `GraphDevice`."""
        with torch.cuda.device(self._device):
            if self._side is None:
                self._side = torch.cuda.Stream()
            side, main = self._side, torch.cuda.current_stream()
            side.wait_stream(main)
            with torch.cuda.stream(side):
                # What is made in a first forward, such as workspaces, must not be made in the graph.
                forward()
                forward()
            main.wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            pool = next((one.pool for one in self._alive), None)
            # Only this thread's calls are held to the rules of capturing.
            capturing = torch.cuda.graph(graph, pool=pool, stream=side, capture_error_mode="thread_local")
            try:
                with _mended(main), capturing, WaitGuard("cuda"):
                    output = forward()
            except (NotCapturable, torch.OutOfMemoryError):
                raise
            except RuntimeError as error:
                raise NotCapturable(f"recording it failed: {first_line(error)}") from error
            captured = _CudaGraph(graph, output)
            self._alive.add(captured)
            return captured


@contextlib.contextmanager
def _mended(main: torch.cuda.Stream) -> Iterator[None]:
    """Leave stream and random numbers usable if a capture fails: torch itself does not."""
    generator = torch.cuda.default_generators[main.device.index]
    kept = generator.clone_state()
    try:
        yield
    except BaseException:
        torch.cuda.set_stream(main)
        with contextlib.suppress(Exception):
            generator.graphsafe_set_state(kept)
        with contextlib.suppress(Exception):
            torch.cuda.synchronize()
        raise
