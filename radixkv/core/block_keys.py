"""64-bit keys of the blocks of a path, for tables that remember blocks which are no longer cached."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from radixkv.core.tokens import TokenArray

BlockKeys = npt.NDArray[np.uint64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_MASK = (1 << 64) - 1

_factors: dict[int, npt.NDArray[np.uint64]] = {}


def block_keys(
    tokens: TokenArray, block_size: int, seed: int, *, first: int = 0, parent_key: int = 0
) -> BlockKeys:
    """A key for each block of a path, which stands for all tokens up to its end.

    Made for tables that guess well, such as the ghosts of an eviction policy: a few nanoseconds a block, from a
    constant number of numpy calls. Equal keys are very probably equal paths, and never proof of it; whoever
    hands out KV compares tokens. Not stable across versions; `content_hashes` is.

    A block is hashed by a multilinear form of its tokens (Carter and Wegman, 1979) and its number, mixed by the
    finalizer of splitmix64 (Steele, Lea and Flood, 2014); a key is the sum over the blocks of its path, so that it can
    be continued from any block.

    Args:
        tokens: `int64[...]`, the path from position 0 on.
        block_size: Tokens in a block.
        seed: Of the namespace; 0 for keys that ignore it.
        first: Number of the first block wanted.
        parent_key: Key of block `first - 1`; needed if `first` is not 0.

    Returns:
        `uint64[ceil(len(tokens) / block_size) - first]`, that of a partly filled last block included.
    """
    rest = tokens[first * block_size :].view(np.uint64)
    num_whole, num_rows = divmod(len(rest), block_size)
    factors = _factors.get(block_size)
    if factors is None:
        factors = np.random.default_rng(0x5EED).integers(0, 2**63, block_size, dtype=np.uint64) * np.uint64(
            2
        ) + np.uint64(1)
        _factors[block_size] = factors
    sums = np.empty(num_whole + (num_rows > 0), np.uint64)
    whole = rest[: num_whole * block_size]
    # At the width of one token einsum is slower than a product.
    sums[:num_whole] = (
        whole * factors if block_size == 1 else np.einsum("ij,j->i", whole.reshape(-1, block_size), factors)
    )
    if num_rows:
        part = int(np.add.reduce(rest[num_whole * block_size :] * factors[:num_rows]))
        sums[-1] = (part ^ (num_rows << 48)) & _MASK
    sums += np.arange(first + 1, first + 1 + len(sums), dtype=np.uint64) * _GOLDEN
    _mix(sums)
    if len(sums):
        start = parent_key if first else (seed * int(_MIX_1) ^ (seed >> 31)) & _MASK
        sums[:1] += np.uint64(start)  # as an array: a scalar would warn of the overflow
    return np.cumsum(sums, dtype=np.uint64)


def _mix(x: BlockKeys) -> None:
    """The finalizer of splitmix64, in place."""
    x ^= x >> np.uint64(30)
    x *= _MIX_1
    x ^= x >> np.uint64(27)
    x *= _MIX_2
    x ^= x >> np.uint64(31)
