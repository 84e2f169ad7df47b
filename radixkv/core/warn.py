"""Warnings that point at the user's own line."""

from __future__ import annotations

import sys
import warnings

__all__ = ["warn_user"]

# What lies between a user's line and ours, when a model's methods are wrapped.
_BETWEEN = frozenset(("radixkv", "torch", "transformers", "accelerate", "peft"))


def warn_user(message: str) -> None:
    """Warn in the name of the nearest caller that is neither radixkv nor a package that calls it.

    Args:
        message: What the warning says.
    """
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _BETWEEN:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)
