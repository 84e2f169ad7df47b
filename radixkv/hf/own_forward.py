"""Telling forwards that an engine makes from those of the user: attached caches leave them alone."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextvars import ContextVar
from typing import TypeVar

import torch

__all__ = ["in_own_forward", "is_running", "own_forward"]

_T = TypeVar("_T")
_depth: ContextVar[int] = ContextVar("radixkv_own_forward", default=0)


def in_own_forward() -> bool:
    """Whether this thread is in a forward that an engine makes."""
    return _depth.get() > 0


def own_forward(forward: Callable[[], _T]) -> _T:
    """The result of `forward()`, which may call the model in ways that are no user's."""
    before = _depth.get()
    try:
        try:
            _depth.set(before + 1)
            return forward()
        finally:
            _depth.set(before)
    finally:  # once more: Ctrl-C may have come just before the other
        _depth.set(before)


def is_running(module: torch.nn.Module) -> bool:
    """Whether this thread is in a call of that module. Walks the stack: nothing for every step."""
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code is _CALL and frame.f_locals.get("self") is module:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


_CALL = torch.nn.Module._call_impl.__code__
