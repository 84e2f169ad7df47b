"""The errors of radixkv, for its own layers, and how to read those of others."""

from __future__ import annotations

from radixkv.errors import (
    CacheCorruptionError,
    InvalidRequestError,
    OutOfBlocksError,
    RadixKVError,
    UnsupportedModelError,
    install_hint,
)

__all__ = [
    "CacheCorruptionError",
    "InvalidRequestError",
    "OutOfBlocksError",
    "RadixKVError",
    "UnsupportedModelError",
    "first_line",
    "install_hint",
    "is_out_of_memory",
]


def first_line(error: BaseException) -> str:
    """What an error says, without the pages that compilers and device runtimes append; its type if it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out.

    Torch says it in several ways: an error of its own on GPUs, a plain RuntimeError from its CPU allocator.
    """
    texts = ("out of memory", "not enough memory", "can't allocate memory")
    return isinstance(error, MemoryError) or any(text in str(error).lower() for text in texts)
