"""Host memory that a GPU can copy to and from by itself."""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor

__all__ = ["pin", "unpin"]

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for all devices


def pin(memory: Tensor) -> str | None:
    """Page-lock the memory of a CPU tensor where it lies.

    torch's own `pin_memory=True` rounds sizes up to a power of two, which is too much for tens of GiB.

    Returns:
        Why it could not be done; None if it was. The memory can be used in either case, pageable memory at a lower
        bandwidth and with the host waiting for each copy.
    """
    try:
        status = int(
            torch.cuda.cudart().cudaHostRegister(
                memory.data_ptr(), memory.numel() * memory.element_size(), _PORTABLE
            )
        )
    except Exception as error:  # no such function in this build, or no driver
        return f"{type(error).__name__}: {error}"
    if status == 0:
        return None
    try:
        reason = f"{torch.cuda.cudart().cudaGetErrorString(torch.cuda.cudart().cudaError(status))}"
    except Exception:
        reason = "no description"
    # CUDA keeps the error until it is asked for it, and the next kernel launch would report it as its own.
    with contextlib.suppress(Exception):
        torch.zeros(1, device="cuda")
    return f"cudaHostRegister says {status} ({reason})"


def unpin(memory: Tensor) -> None:
    """Undo `pin`, before the memory is given back. Never raises: at the end of a process CUDA may be gone."""
    with contextlib.suppress(Exception):
        torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())
