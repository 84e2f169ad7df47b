"""Getting a step's page tables onto the device without waiting for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

__all__ = ["Transfers"]


class _HostBuffer:
    """Page-locked memory, and the event after which it may be written again."""

    def __init__(self) -> None:
        self.tensor = torch.empty(0, dtype=torch.int32)
        self.sent: Any = None


class Transfers:
    """One transfer a step, from one of two page-locked buffers in turn, and events that say when memory is free again.

    A page-locked buffer is read by the device some time after the call that sends it. It must not be written before
    that, and waiting for it at once would stop the CPU until all queued work is done. With two buffers in turn the
    wait before a write is for the transfer of the step before last, which has long happened: it came before that
    step's own kernels on the same stream.

    Not thread-safe. Everything happens on the current stream.

    Args:
        device: Where the tables go.

    Attributes:
        num_waits: How often something was not done yet and had to be waited for.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.num_waits = 0
        self._buffers = (_HostBuffer(), _HostBuffer())
        self._turn = 0

    def host(self, size: int) -> npt.NDArray[np.int32]:
        """int32 `[size]` to write; its content is arbitrary. Valid until `send`."""
        self._turn ^= 1
        buffer = self._buffers[self._turn]
        if buffer.sent is not None:
            self.wait(buffer.sent)
            buffer.sent = None
        if len(buffer.tensor) < size:
            with torch.inference_mode(False):
                buffer.tensor = self._page_locked(max(size, 2 * len(buffer.tensor), 1024))
        array: npt.NDArray[np.int32] = buffer.tensor.numpy()
        return array[:size]

    def send(self, size: int) -> Tensor:
        """What was written to `host(size)`, on the device: int32 `[size]`, memory that nobody else uses."""
        buffer = self._buffers[self._turn]
        try:
            with torch.inference_mode(False):
                return self._copy(buffer.tensor[:size])
        finally:
            # Also if it is interrupted: the device may be about to read it.
            buffer.sent = self.mark()

    def empty(self, size: int) -> Tensor:
        """int32 `[size]` on the device, zeros, for `send_into`."""
        with torch.inference_mode(False):
            return torch.zeros(size, dtype=torch.int32, device=self.device)

    def send_into(self, parts: Sequence[tuple[int, Tensor]]) -> None:
        """Put parts of what was written to `host` where they are wanted.

        Args:
            parts: Where each begins in `host`, and its place, int32 in memory of `empty`.
        """
        buffer = self._buffers[self._turn]
        try:
            for start, target in parts:
                self._copy_into(target, buffer.tensor[start : start + len(target)])
        finally:
            buffer.sent = self.mark()

    def mark(self) -> Any:
        """An event after all that was given to the device so far; None where there is nothing to wait for."""
        if self.device.type != "cuda":
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return event

    def wait(self, event: Any) -> None:
        """Return once the device has come past an event."""
        if event is not None and not event.query():
            self.num_waits += 1
            event.synchronize()

    def _page_locked(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.int32, pin_memory=self.device.type == "cuda")

    def _copy_into(self, target: Tensor, host: Tensor) -> None:
        target.copy_(host, non_blocking=True)

    def _copy(self, host: Tensor) -> Tensor:
        if self.device.type == "cuda":
            return host.to(self.device, non_blocking=True)
        return host.clone().to(self.device)
