"""Attention over the paged pool: one interface, several backends."""

from __future__ import annotations

import torch

from radixkv.attention.interface import AttentionBackend, AttentionBatch, AttentionSpec
from radixkv.attention.reference import ReferenceBackend
from radixkv.attention.torch_backend import TorchBackend
from radixkv.core.errors import InvalidRequestError

__all__ = [
    "AttentionBackend",
    "AttentionBatch",
    "AttentionSpec",
    "ReferenceBackend",
    "TorchBackend",
    "make_backend",
]


def make_backend(name: str, device: torch.device | str) -> AttentionBackend:
    """The backend of a name.

    Args:
        name: "torch", "reference" (float64, slow: for tests), or "auto", which takes the fastest for the device.
        device: Where the pool is.

    Raises:
        InvalidRequestError: There is no backend of that name.
    """
    if name in ("auto", "torch"):
        return TorchBackend(device)
    if name == "reference":
        return ReferenceBackend()
    raise InvalidRequestError(f"no attention backend {name!r}: take auto, torch or reference")
