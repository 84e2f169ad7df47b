"""Whether FlashInfer can be used on a device, and why not."""

from __future__ import annotations

import importlib
import importlib.util
import re
import subprocess
from types import ModuleType

import torch

from radixkv.core.errors import InvalidRequestError, install_hint, is_out_of_memory

__all__ = [
    "INSTALL",
    "KNOWN_VERSIONS",
    "backend_choice",
    "import_flashinfer",
    "is_of_a_build",
    "version_problem",
]

INSTALL = install_hint("cuda")

# The first release whose calls were read and bound against ours, and the first of which nothing is known.
_FIRST, _BEFORE = (0, 6, 13), (0, 8)
KNOWN_VERSIONS = "0.6.13 up to, not including, 0.8"

# FlashInfer's fa2 kernels need the asynchronous copies of Ampere.
_OLDEST_GPU = (8, 0)

# What its host code says of a buffer, and it and torch of the device.
_NOT_OF_A_BUILD = ("buffer overflow", "cuda error", "cudaerror", "failed with error", "failed to plan")
_NO_KERNEL = "no kernel image"


def backend_choice(device: torch.device | str) -> tuple[str, str]:
    """What `attention="auto"` takes for a device, and why.

    Looks, but loads nothing onto the device. FlashInfer itself is imported only where everything else speaks for it.

    Args:
        device: Where the pool is.

    Returns:
        The name of a backend, `"flashinfer"` or `"torch"`, and the reason in a few words.
    """
    device = torch.device(device)
    problem = device_problem(device)
    if problem is None:
        try:
            module = import_flashinfer()
        except InvalidRequestError as error:
            problem = str(error)
        else:
            return "flashinfer", f"FlashInfer {module.__version__} on {_gpu_name(device)}"
    return "torch", problem


def device_problem(device: torch.device) -> str | None:
    """Why FlashInfer's kernels cannot run on a device; None if they can."""
    if device.type != "cuda":
        return f"FlashInfer needs an NVIDIA GPU, and the device is {device}"
    if torch.version.hip is not None:
        return "FlashInfer needs an NVIDIA GPU, and this torch is for AMD's"
    if not torch.cuda.is_available():
        return "FlashInfer needs an NVIDIA GPU, and torch finds none"
    found = torch.cuda.get_device_capability(device)
    if found < _OLDEST_GPU:
        oldest = ".".join(map(str, _OLDEST_GPU))
        return (
            f"FlashInfer's kernels need compute capability {oldest} (Ampere) or newer, and {_gpu_name(device)} has "
            f"{found[0]}.{found[1]}"
        )
    return None


def import_flashinfer() -> ModuleType:
    """The package.

    Raises:
        InvalidRequestError: It is missing, broken or of a version that is not known.
    """
    if importlib.util.find_spec("flashinfer") is None:
        raise InvalidRequestError(f"FlashInfer is not installed: {INSTALL}")
    try:
        module = importlib.import_module("flashinfer")
    except (
        Exception
    ) as error:  # it imports half of CUDA's Python world, any of which may be missing or broken
        raise InvalidRequestError(
            f"FlashInfer is installed but cannot be imported ({type(error).__name__}: {error}): {INSTALL}"
        ) from error
    problem = version_problem(str(getattr(module, "__version__", "unknown")))
    if problem is not None:
        raise InvalidRequestError(problem)
    return module


def version_problem(version: str) -> str | None:
    """Why a version of FlashInfer is not used; None if it is one that is known."""
    numbers = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", version)
    if numbers is None:
        return f"FlashInfer's version {version!r} is not known to radixkv, which knows {KNOWN_VERSIONS}: {INSTALL}"
    found = tuple(int(part or 0) for part in numbers.groups())
    if not _FIRST <= found < _BEFORE:
        return f"FlashInfer {version} is not known to radixkv, which knows {KNOWN_VERSIONS}: {INSTALL}"
    return None


def is_of_a_build(error: BaseException) -> bool:
    """Whether an error says that a kernel could not be compiled or loaded, which will be so the next time.

    Compilers and loaders fail with many errors, of which RuntimeError is the usual one. So are a workspace that is too
    small and a failure of the device, neither of which says anything about the kernel.
    """
    if is_out_of_memory(error):
        return False
    text = str(error).lower()
    if _NO_KERNEL in text:
        return True
    if isinstance(error, getattr(torch, "AcceleratorError", ())) or any(s in text for s in _NOT_OF_A_BUILD):
        return False
    return isinstance(error, (RuntimeError, OSError, ImportError, subprocess.SubprocessError))


def _gpu_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device)
