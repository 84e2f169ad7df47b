"""Host memory that a GPU can copy to and from by itself."""

from __future__ import annotations

import contextlib
import mmap

import torch
from torch import Tensor

from radixkv.core.errors import InvalidRequestError
from radixkv.store.sizing import format_bytes

__all__ = ["page_aligned", "pin", "unpin"]

_PAGE = mmap.PAGESIZE
_PORTABLE = 1  # cudaHostRegisterPortable: pinned for all devices


def page_aligned(num_bytes: int, dtype: torch.dtype) -> Tensor:
    """Uninitialised host memory, `[num_bytes / itemsize]`, on pages of its own: pages are pinned as a whole.

    Raises:
        InvalidRequestError: There is not that much.
    """
    try:
        with torch.inference_mode(
            False
        ):  # tensors born in inference mode could never be written outside of it
            whole = torch.empty(num_bytes + 2 * _PAGE, dtype=torch.uint8)
    except (RuntimeError, MemoryError) as error:
        raise InvalidRequestError(
            f"the host could not give {format_bytes(num_bytes)} for swapped blocks: ask for less host_memory"
        ) from error
    start = -whole.data_ptr() % _PAGE
    return whole[start : start + num_bytes].view(dtype)


def pin(memory: Tensor) -> str | None:
    """Page-lock the memory of a tensor of `page_aligned` where it lies.

    torch's own `pin_memory=True` rounds sizes up to a power of two, which is too much for tens of GiB.

    Returns:
        Why it could not be done; None if it was. The memory can be used in either case, pageable memory at a lower
        bandwidth and with the host waiting for each copy.
    """
    try:
        status = int(
            torch.cuda.cudart().cudaHostRegister(
                memory.data_ptr(), -(-memory.numel() * memory.element_size() // _PAGE) * _PAGE, _PORTABLE
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
