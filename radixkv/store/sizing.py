"""How many blocks: from a count, from tokens, from bytes, or from what is free."""

from __future__ import annotations

import re
from pathlib import Path

import psutil
import torch

from radixkv.core.errors import InvalidRequestError
from radixkv.store.layout import KVLayout

__all__ = ["DEFAULT_FRACTION", "format_bytes", "free_memory_bytes", "parse_memory", "pick_num_blocks"]

# A GPU is bought for the model and its cache; host memory is shared with everything else that runs there.
DEFAULT_FRACTION = {"cuda": 0.5, "cpu": 0.2}

_UNITS = {
    "": 1, "b": 1,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "pb": 10**15,
    "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40, "p": 2**50,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40, "pib": 2**50,
}  # fmt: skip
_MEMORY = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)\s*")
_CGROUP_FILES = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


def parse_memory(memory: str | int | float, free: int) -> int:
    """Turn a size in words into bytes.

    Args:
        memory: Text such as `"2GiB"` (1024) or `"2GB"` (1000), a number of bytes (an int), or a share of `free` (a
            float up to 1.0).
        free: Bytes that are free.

    Raises:
        InvalidRequestError: It is none of these, or not positive.
    """
    if isinstance(memory, bool) or not isinstance(memory, (str, int, float)):
        raise InvalidRequestError(f'memory is a size such as "2GiB", bytes, or a fraction, got {memory!r}')
    if isinstance(memory, str):
        parts = _MEMORY.fullmatch(memory)
        if parts is None or parts[2].lower() not in _UNITS:
            raise InvalidRequestError(f'cannot read memory={memory!r}: write it like "512MiB" or "2GiB"')
        size = int(float(parts[1]) * _UNITS[parts[2].lower()])
    elif isinstance(memory, float):
        if not 0.0 < memory <= 1.0:
            raise InvalidRequestError(
                f"memory={memory!r}: a float is a fraction of free memory, above 0 and at most 1; give bytes as an int"
            )
        size = int(free * memory)
    else:
        size = memory
    if size <= 0:
        raise InvalidRequestError(f"memory={memory!r} is no room at all: give a positive size")
    return size


def format_bytes(size: int) -> str:
    """`2147483648` -> `"2.0 GiB"`."""
    value = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def free_memory_bytes(device: torch.device | str) -> int:
    """Bytes that can still be had on a device.

    Args:
        device: On the CPU, the limit of the container (cgroup) counts too.
    """
    device = torch.device(device)
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    free = int(psutil.virtual_memory().available)
    for limit_file, usage_file in _CGROUP_FILES:
        try:
            limit = int(Path(limit_file).read_text())
            usage = int(Path(usage_file).read_text())
        except (OSError, ValueError):  # no such controller, or "max"
            continue
        free = min(free, max(limit - usage, 0))
    return free


def pick_num_blocks(
    layout: KVLayout,
    block_size: int,
    *,
    num_blocks: int | None = None,
    num_tokens: int | None = None,
    memory: str | int | float | None = None,
) -> int:
    """How many blocks of a layout to allocate. At most one of the three sizes may be given.

    Args:
        layout: Of the model.
        block_size: Tokens in a block.
        num_blocks: The size in blocks, or
        num_tokens: in tokens, rounded up to whole blocks, or
        memory: in memory, as `parse_memory` takes it. With none of the three, a fifth of free host memory or half of
            free GPU memory.

    Raises:
        InvalidRequestError: Sizes contradict each other, are not positive, hold not even one block, or
            need more memory than is free; the message gives both figures.
    """
    given = {"num_blocks": num_blocks, "num_tokens": num_tokens, "memory": memory}
    named = [name for name, value in given.items() if value is not None]
    if len(named) > 1:
        raise InvalidRequestError(f"give one of num_blocks, num_tokens and memory, not {' and '.join(named)}")
    if isinstance(block_size, bool) or not isinstance(block_size, int) or block_size < 1:
        raise InvalidRequestError(f"block_size is a positive number of tokens, got {block_size!r}")
    for name in ("num_blocks", "num_tokens"):
        value = given[name]
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise InvalidRequestError(f"{name} is a positive integer, got {value!r}")

    block_bytes = layout.bytes_per_token * block_size
    free = free_memory_bytes(layout.device)
    if num_blocks is not None:
        blocks = num_blocks
    elif num_tokens is not None:
        blocks = -(-num_tokens // block_size)
    else:
        fraction = DEFAULT_FRACTION.get(layout.device.type, DEFAULT_FRACTION["cpu"])
        size = parse_memory(fraction if memory is None else memory, free)
        blocks = size // block_bytes
        if blocks < 1:
            raise InvalidRequestError(
                f"{format_bytes(size)} holds no block: one block of {block_size} tokens takes "
                f"{format_bytes(block_bytes)}; give more memory or a smaller block_size"
            )
    if blocks * block_bytes > free:
        raise InvalidRequestError(
            f"{blocks} blocks of {block_size} tokens take {format_bytes(blocks * block_bytes)}, and "
            f"{layout.device} has {format_bytes(free)} free: ask for less, or free some"
        )
    return blocks
