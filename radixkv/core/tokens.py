"""Token sequences from whatever the caller has, without a copy where none is needed."""

from __future__ import annotations

import operator
import struct
import sys
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from radixkv.core.errors import InvalidRequestError

#: Most tokens in a block. Tables of one number for each row of a block are kept, so that there has to be an end.
MAX_BLOCK_SIZE = 2**20

MOST_SHOWN = 40  # characters of a value in a message


def shown(value: Any) -> str:
    """What a message says of a value: its repr, cut where it is long. Python writes no integer of any length."""
    try:
        text = repr(value)
    except ValueError:
        return "a number too long to be written"
    return text if len(text) <= MOST_SHOWN else text[: MOST_SHOWN - 3] + "..."


def require_block_size(block_size: Any) -> int:
    """A number of tokens in a block, checked.

    Raises:
        InvalidRequestError: It is no integer from 1 to `MAX_BLOCK_SIZE`.
    """
    if isinstance(block_size, bool) or not isinstance(block_size, (int, np.integer)) or block_size < 1:
        raise InvalidRequestError(f"block_size must be an integer of at least 1, got {shown(block_size)}")
    if block_size > MAX_BLOCK_SIZE:
        raise InvalidRequestError(
            f"block_size must be at most {MAX_BLOCK_SIZE:,} tokens, got {shown(block_size)}"
        )
    return int(block_size)


TokenArray = npt.NDArray[np.int64]

TOKEN_BYTES = 8
_INT64 = np.dtype(np.int64)
_INT64_MAX = np.iinfo(np.int64).max
_FEW = 32  # items that numpy reads as fast
_PIECE = 16384  # items in one call, whose arguments are copied once more


def as_tokens(tokens: Any) -> TokenArray:
    """Token ids as a one-dimensional C-contiguous int64 array.

    An int64 array, a CPU int64 torch tensor and an int64 buffer are wrapped, not copied.

    Args:
        tokens: List, tuple, range, numpy array, torch tensor (any integer dtype, any device), buffer, or
            anything else that numpy can read as integers.

    Returns:
        `int64[num_tokens]`.

    Raises:
        InvalidRequestError: Not one-dimensional, not integers, negative, or beyond int64.
    """
    array = to_int64(tokens)
    require_non_negative(array)
    return array


def to_int64(tokens: Any) -> TokenArray:
    """Like `as_tokens`, without looking for negative ids.

    The tree calls this: what it finds cached was checked when it was inserted, so that only the rest of a
    request needs `require_non_negative`.
    """
    if type(tokens) is np.ndarray:
        array = tokens
    elif hasattr(tokens, "detach") and hasattr(tokens, "cpu"):  # a torch tensor, without importing torch
        try:
            array = tokens.detach().cpu().numpy()
        except TypeError as error:  # a dtype that numpy has not, such as bfloat16
            raise InvalidRequestError(f"tokens must be integers, got a tensor of {tokens.dtype}") from error
    elif isinstance(tokens, range):
        array = _from_range(tokens)
    elif isinstance(tokens, (list, tuple)):
        array = _from_items(tokens)
    elif isinstance(tokens, (bytes, bytearray)):
        array = np.frombuffer(tokens, np.uint8)
    elif isinstance(tokens, str) or not (hasattr(tokens, "__array__") or _is_buffer(tokens)):
        if isinstance(tokens, str):
            raise InvalidRequestError("tokens must be integers, got a str: tokenize it first")
        if not isinstance(tokens, Iterable):
            raise InvalidRequestError(f"tokens must be a sequence of integers, got {type(tokens).__name__}")
        array = _from_items(list(tokens))
    else:
        array = np.asarray(tokens)

    if array.ndim != 1:
        hint = ": pass one row at a time" if array.ndim == 2 else ""
        raise InvalidRequestError(f"tokens must be one-dimensional, got shape {array.shape}{hint}")
    if array.dtype != _INT64:
        if array.dtype.kind not in "iu":
            raise InvalidRequestError(f"tokens must be integers, got an array of {array.dtype}")
        if array.dtype == np.uint64 and array.size and int(array.max()) > _INT64_MAX:
            raise InvalidRequestError(f"token {int(array.max())} does not fit into int64")
        return array.astype(np.int64)
    return array if array.flags.c_contiguous else np.ascontiguousarray(array)


def require_non_negative(array: TokenArray) -> None:
    """Raise `InvalidRequestError`, naming the first one, if there are negative token ids."""
    if array.size and np.minimum.reduce(array) < 0:
        at = int((array < 0).argmax())
        raise InvalidRequestError(f"tokens must not be negative, got {int(array[at])}")


def little_endian(array: TokenArray) -> TokenArray:
    """The same tokens in the byte order that hashes are defined on; a copy on big-endian hosts only."""
    return array if sys.byteorder == "little" else array.byteswap()


def token_bytes(array: TokenArray) -> memoryview:
    """The bytes of a contiguous, non-empty token array, not copied."""
    view: Any = array  # numpy 1.26 does not tell type checkers that arrays are buffers
    return memoryview(view).cast("B")


def _is_buffer(tokens: Any) -> bool:
    try:
        memoryview(tokens)
    except TypeError:
        return False
    return True


def _from_range(tokens: range) -> TokenArray:
    if len(tokens) == 0:
        return np.empty(0, np.int64)
    try:
        return np.arange(tokens.start, tokens.stop, tokens.step, dtype=np.int64)
    except OverflowError as error:
        raise InvalidRequestError(f"{tokens} does not fit into int64") from error


def _from_items(items: list[Any] | tuple[Any, ...]) -> TokenArray:
    if len(items) < _FEW:
        return _from_any_items(items)
    array = np.empty(len(items), np.int64)
    buffer: Any = array  # numpy 1.26 does not tell type checkers that arrays are buffers
    try:
        # `struct` is three times as fast as numpy, and takes no float for an integer; but True for 1.
        for start in range(0, len(items), _PIECE):
            piece = items[start : start + _PIECE]
            struct.pack_into(f"{len(piece)}q", buffer, start * TOKEN_BYTES, *piece)
    except struct.error:
        return _from_any_items(items)
    if array.size and np.minimum.reduce(array) <= 1:
        suspects = np.flatnonzero(array <= 1).tolist()
        if bool in set(map(type, map(items.__getitem__, suspects))):
            return _from_any_items(items)
    return array


def _from_any_items(items: list[Any] | tuple[Any, ...]) -> TokenArray:
    # numpy would take True for 1 and 1.0 for 1 in a mixed list, so look at the types first.
    kinds = set(map(type, items))
    if not kinds <= {int}:
        wrong = [k.__name__ for k in kinds if k in (bool, np.bool_) or not hasattr(k, "__index__")]
        if wrong:
            raise InvalidRequestError(f"tokens must be integers, got {', '.join(sorted(wrong))} among them")
        try:
            items = [operator.index(item) for item in items]
        except TypeError as error:
            raise InvalidRequestError(f"tokens must be integers: {error}") from error
    try:
        return np.array(items, dtype=np.int64)
    except OverflowError as error:
        raise InvalidRequestError("a token does not fit into int64") from error
