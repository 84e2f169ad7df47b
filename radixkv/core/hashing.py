"""Hashes of token blocks: short ones to find a child, long chained ones as content addresses."""

from __future__ import annotations

from typing import Any

import numpy as np
import xxhash

from radixkv.core.errors import InvalidRequestError
from radixkv.core.namespace import Namespace, canonical_namespace
from radixkv.core.tokens import TOKEN_BYTES, TokenArray, as_tokens, little_endian, token_bytes

DIGEST_BYTES = 16

# hash(first block as bytes, seed) -> int. Only ever a hint: the tokens are compared after it.
block_hash = xxhash.xxh3_64_intdigest


def namespace_seed(canonical: bytes) -> int:
    """Seed of the block hashes of one namespace, 64 bits."""
    return xxhash.xxh3_64_intdigest(canonical)


class ContentHasher:
    """Chained content addresses of a growing sequence, one for each whole block.

    The address of a block is the 128-bit xxh3 of its parent's address and its own tokens (int64,
    little-endian); the parent of the first block stands for the namespace and the block size. Two addresses are
    therefore equal only if everything up to the end of the block is. They are the same on every machine.

    `update` hashes only blocks that became whole, so that a decode step costs at most one block.

    Args:
        block_size: Tokens in a block, at least 1.
        namespace: What must be equal beside the tokens.

    Raises:
        InvalidRequestError: The block size or the namespace makes no sense.
    """

    def __init__(self, block_size: int, namespace: Namespace = None) -> None:
        if block_size < 1:
            raise InvalidRequestError(f"block_size must be at least 1, got {block_size}")
        self.block_size = block_size
        self._parent = root_digest(block_size, canonical_namespace(namespace))
        self._pending = np.empty(0, np.int64)
        self._digests: list[bytes] = []

    @property
    def digests(self) -> list[bytes]:
        """Addresses of all whole blocks so far, 16 bytes each (a copy)."""
        return list(self._digests)

    @property
    def num_tokens(self) -> int:
        """Tokens given so far, those of an unfinished block included."""
        return len(self._digests) * self.block_size + len(self._pending)

    def update(self, tokens: Any) -> list[bytes]:
        """Append `tokens`; the addresses of the blocks that became whole by it, 16 bytes each."""
        array = as_tokens(tokens)
        if len(self._pending):
            array = np.concatenate((self._pending, array))
        num_whole = len(array) // self.block_size
        fresh = chain_digests(self._parent, array, num_whole, self.block_size)
        self._pending = array[num_whole * self.block_size :].copy()
        if fresh:
            self._parent = fresh[-1]
            self._digests += fresh
        return fresh


def content_hashes(tokens: Any, block_size: int, namespace: Namespace = None) -> list[bytes]:
    """Content addresses of the whole blocks of some tokens; see `ContentHasher`.

    Args:
        tokens: Any tokens.
        block_size: Tokens in a block, at least 1.
        namespace: What must be equal beside the tokens.

    Returns:
        `len(tokens) // block_size` digests of 16 bytes.

    Raises:
        InvalidRequestError: Tokens, block size or namespace make no sense.
    """
    return ContentHasher(block_size, namespace).update(tokens)


def root_digest(block_size: int, canonical: bytes) -> bytes:
    """Parent address of the first block, from a canonical namespace."""
    return xxhash.xxh3_128_digest(b"radixkv block v1;%d;%b" % (block_size, canonical))


def chain_digests(parent: bytes, array: TokenArray, num_whole: int, block_size: int) -> list[bytes]:
    """Content addresses of the first `num_whole` blocks of `array`, which follow the block with address `parent`."""
    if num_whole == 0:
        return []
    data = token_bytes(little_endian(array))
    step = block_size * TOKEN_BYTES
    digests = []
    for start in range(0, num_whole * step, step):
        parent = xxhash.xxh3_128_digest(parent + data[start : start + step])
        digests.append(parent)
    return digests
