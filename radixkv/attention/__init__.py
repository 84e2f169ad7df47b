"""Attention over the paged pool: one interface, several backends."""

from __future__ import annotations

import logging

import torch

from radixkv.attention.flashinfer_backend import FlashInferBackend
from radixkv.attention.flashinfer_choice import backend_choice
from radixkv.attention.interface import AttentionBackend, AttentionBatch, AttentionSpec
from radixkv.attention.reference import ReferenceBackend
from radixkv.attention.torch_backend import TorchBackend
from radixkv.core.errors import InvalidRequestError

__all__ = [
    "AttentionBackend",
    "AttentionBatch",
    "AttentionSpec",
    "FlashInferBackend",
    "ReferenceBackend",
    "TorchBackend",
    "backend_choice",
    "make_backend",
]

_log = logging.getLogger(__name__)


def make_backend(name: str, device: torch.device | str) -> AttentionBackend:
    """The backend of a name.

    Args:
        name: "flashinfer" (NVIDIA GPUs), "torch", "reference" (float64, slow: for tests), or "auto", which takes
            FlashInfer where it can be used and torch elsewhere; `backend_choice` says which, and why.
        device: Where the pool is.

    Returns:
        A new `AttentionBackend`, for one model.

    Raises:
        InvalidRequestError: There is no backend of that name, or it was asked for by name and cannot be used here.
    """
    device = torch.device(device)
    if name == "auto":
        name, reason = backend_choice(device)
        if name == "torch" and device.type == "cuda":
            _log.warning("attention runs on torch instead of FlashInfer: %s", reason)
    if name == "torch":
        return TorchBackend(device)
    if name == "flashinfer":
        return FlashInferBackend(device)
    if name == "reference":
        return ReferenceBackend()
    raise InvalidRequestError(f"no attention backend {name!r}: take auto, flashinfer, torch or reference")
