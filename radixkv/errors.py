"""The errors of radixkv, under their public name."""

from radixkv.core.errors import (
    CacheCorruptionError,
    InvalidRequestError,
    OutOfBlocksError,
    RadixKVError,
    UnsupportedModelError,
)

__all__ = [
    "CacheCorruptionError",
    "InvalidRequestError",
    "OutOfBlocksError",
    "RadixKVError",
    "UnsupportedModelError",
]
