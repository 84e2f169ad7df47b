"""Copies beside the computation: a second stream, and the events that order it against the first."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

__all__ = ["CopyStream", "CudaCopyStream", "Fetched", "InlineCopies", "copy_stream", "to_device"]


class CopyStream(ABC):
    """A queue of copies on a device, beside the main one that everything else goes through.

    Each of the two queues carries out what it is given in that order. Between them there is no order, except that
    whatever waits for an event comes after all that the event covers. None of the methods but `synchronize` makes the
    host wait. The main stream is the one that is torch's current one at the time of the call.
    """

    @abstractmethod
    def record_main(self) -> Any:
        """An event that covers all that the main stream was given so far."""

    @abstractmethod
    def record(self) -> Any:
        """An event that covers all that this stream was given so far."""

    @abstractmethod
    def wait(self, event: Any) -> None:
        """What this stream is given from now on comes after the event."""

    @abstractmethod
    def main_waits(self, event: Any) -> None:
        """What the main stream is given from now on comes after the event."""

    @abstractmethod
    def run(
        self, work: Callable[[], None], reads: npt.NDArray[np.int64], writes: npt.NDArray[np.int64]
    ) -> None:
        """Give this stream some work.

        Args:
            work: Issues it; called with this stream as the current one.
            reads: Blocks of the pool that it reads, for those who check the order.
            writes: Blocks of the pool that it writes.
        """

    @abstractmethod
    def synchronize(self) -> None:
        """Let the host wait for all that this stream was given."""


class InlineCopies(CopyStream):
    """For devices without a second stream: work is done, or queued like all other, when `run` returns."""

    def record_main(self) -> None:
        """Nothing to wait for."""

    def record(self) -> None:
        """Nothing to wait for."""

    def wait(self, event: Any) -> None:
        """It is so already."""

    def main_waits(self, event: Any) -> None:
        """It is so already."""

    def run(
        self, work: Callable[[], None], reads: npt.NDArray[np.int64], writes: npt.NDArray[np.int64]
    ) -> None:
        """Do it now."""
        work()

    def synchronize(self) -> None:
        """Whoever reads host memory next was waited for."""


class CudaCopyStream(CopyStream):
    """A stream of its own on a CUDA device.

    Args:
        device: With or without an index.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def record_main(self) -> torch.cuda.Event:
        """See `CopyStream`."""
        return torch.cuda.current_stream(self._stream.device).record_event()

    def record(self) -> torch.cuda.Event:
        """See `CopyStream`."""
        return self._stream.record_event()

    def wait(self, event: torch.cuda.Event) -> None:
        """See `CopyStream`."""
        self._stream.wait_event(event)

    def main_waits(self, event: torch.cuda.Event) -> None:
        """See `CopyStream`."""
        torch.cuda.current_stream(self._stream.device).wait_event(event)

    def run(
        self, work: Callable[[], None], reads: npt.NDArray[np.int64], writes: npt.NDArray[np.int64]
    ) -> None:
        """See `CopyStream`."""
        with torch.cuda.stream(self._stream):
            work()

    def synchronize(self) -> None:
        """See `CopyStream`."""
        self._stream.synchronize()


def copy_stream(device: torch.device) -> CopyStream:
    """What there is on this device."""
    return CudaCopyStream(device) if device.type == "cuda" else InlineCopies()


def to_device(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """A numpy array as a tensor on the device, queued on torch's current stream without making the host wait.

    The array must not change before that is done; on the CPU the tensor shares its memory.
    """
    tensor = torch.from_numpy(array)
    if device.type != "cuda":
        return tensor.to(device)
    try:
        # From pageable memory the driver may wait for the stream. torch reuses pinned memory only after the copy.
        tensor = tensor.pin_memory()
    except RuntimeError:  # no memory can be pinned here: right all the same
        return tensor.to(device)
    return tensor.to(device, non_blocking=True)


class Fetched:
    """A small result on its way from the device to the host: queued at once, waited for when it is wanted.

    Args:
        tensor: Of any device; not written to before `get` returns.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._host, self._event = tensor, None
        if tensor.device.type == "cuda":
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.current_stream(tensor.device).record_event()

    def get(self) -> Tensor:
        """The result on the host. Waits for what it was computed from, and for nothing that was queued later."""
        if self._event is not None:
            self._event.synchronize()
        return self._host
