"""What can go wrong, one class per kind of reaction a caller may have.

They are defined here and not in a layer, because all layers raise them, `observe` below `core` too.
"""

from __future__ import annotations

__all__ = [
    "CacheCorruptionError",
    "InvalidRequestError",
    "OutOfBlocksError",
    "RadixKVError",
    "UnsupportedModelError",
]


def install_hint(extra: str) -> str:
    """How to install what an extra of radixkv brings, as the end of a message. It is on no package index yet."""
    return f'install the extra "{extra}": in a clone of radixkv, pip install ".[{extra}]"'


class RadixKVError(Exception):
    """Base of every error that radixkv raises on purpose."""


class OutOfBlocksError(RadixKVError):
    """An allocation cannot be served, even after evicting all that may be evicted.

    Attributes:
        needed: Blocks asked for.
        free: Blocks that were free.
        evictable: Cached blocks that nobody held.
    """

    def __init__(self, needed: int, free: int, evictable: int = 0) -> None:
        super().__init__(needed, free, evictable)  # all in `args`, so that it pickles
        self.needed, self.free, self.evictable = needed, free, evictable

    def __str__(self) -> str:
        have = f"{self.free} free and {self.evictable} evictable"
        return f"need {self.needed} blocks, have {have}: raise num_blocks or run fewer requests"


class UnsupportedModelError(RadixKVError):
    """The cache can never work for this model; the message says why."""


class InvalidRequestError(RadixKVError, ValueError):
    """The caller asked for something that has no right answer. Nothing was changed."""


class CacheCorruptionError(RadixKVError):
    """`check()` found an invariant broken: a bug in radixkv, or memory changed behind its back."""
