"""How many blocks: from a count, from tokens, from memory, or from what the trace would fill."""

from __future__ import annotations

import re
from typing import Any

from radixkv.core.errors import InvalidRequestError
from radixkv.replay.kv_size import KVSize

__all__ = ["UNLIMITED", "ladder", "parse_capacity"]

#: The capacity of a cache that never evicts, as a word.
UNLIMITED = "unlimited"

_UNITS = {
    "b": 1,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip
_TOKENS = ("tok", "token", "tokens")
_SIZE = re.compile(r"\s*([0-9][0-9_,]{0,20}(?:\.[0-9]{1,20})?|\.[0-9]{1,20})\s*([A-Za-z]*)\s*")
_MOST = 2**30 - 1  # blocks of a pool


def parse_capacity(capacity: Any, block_size: int, size: KVSize | None, unlimited: int) -> int:
    """Blocks of a cache.

    Args:
        capacity: Blocks as a number; or a text: `"1000"` blocks, `"512000tok"`, `"40GiB"`, `"unlimited"`.
        block_size: Tokens in a block.
        size: What a token takes, for sizes in bytes.
        unlimited: Blocks that are enough for everything.

    Raises:
        InvalidRequestError: It says nothing that can be understood, is not even one block, or is memory and nobody
            said what a token takes.
    """
    if isinstance(capacity, bool) or not isinstance(capacity, (int, str)):
        raise InvalidRequestError(
            f'a capacity is a number of blocks or a text such as "1000tok" or "40GiB", got {capacity!r}'
        )
    if isinstance(capacity, str) and capacity.strip().lower() == UNLIMITED:
        return unlimited
    number, unit = _split(capacity)
    if unit == "":
        if number != int(number):
            raise InvalidRequestError(f"capacity {capacity}: blocks are counted in whole numbers")
        blocks = int(number)
    elif unit in _TOKENS:
        blocks = int(number) // block_size
    elif size is None:
        raise InvalidRequestError(
            f"capacity {capacity}: how many blocks that is depends on the model: name its config with model_config "
            "(--model-config)"
        )
    else:
        blocks = int(number * _UNITS[unit]) // (size.bytes_per_token * block_size)
    if blocks < 1:
        room = "" if size is None else f", which take {size.bytes_per_token * block_size:,} bytes"
        raise InvalidRequestError(
            f"capacity {capacity} is not even one block of {block_size} tokens{room}: give more"
        )
    if blocks > _MOST:
        raise InvalidRequestError(f"capacity {capacity} is {blocks:,} blocks, a pool has {_MOST:,} at most")
    return blocks


def _split(capacity: int | str) -> tuple[float | int, str]:
    if isinstance(capacity, int):
        return capacity, ""
    found = _SIZE.fullmatch(capacity)
    unit = found[2].lower() if found else "?"
    if found is None or (unit and unit not in _TOKENS and unit not in _UNITS):
        raise InvalidRequestError(
            f"capacity {capacity[:40]!r} cannot be understood: give blocks (1000), tokens (512000tok), memory "
            f"(40GiB) or {UNLIMITED!r}"
        )
    digits = found[1].replace(",", "").replace("_", "")
    return (float(digits) if "." in digits else int(digits)), unit


def ladder(fewest: int, most: int) -> list[int]:
    """Capacities worth looking at: round numbers (1, 2, 5, 10, ...) from `fewest` to `most`, and `most` itself.

    Args:
        fewest: Blocks of the longest request: a cache must hold that.
        most: Blocks of a cache that never evicts.

    Returns:
        Blocks, ascending.
    """
    rungs = []
    power = 1
    while power < most:
        rungs += [digit * power for digit in (1, 2, 5) if fewest <= digit * power < most]
        power *= 10
    if len(rungs) < 3:  # the longest request fills a good part of the cache
        rungs = sorted({fewest + (most - fewest) * i // 4 for i in range(4)})
    return [rung for rung in rungs if rung < most] + [most]
