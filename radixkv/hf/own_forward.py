"""Telling forwards that an engine makes from those of the user: attached caches leave them alone."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import TypeVar

__all__ = ["in_own_forward", "own_forward"]

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
