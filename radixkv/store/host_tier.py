"""Host memory for the blocks of sequences that are swapped out."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from radixkv.core.block_pool import BlockPool
from radixkv.core.errors import InvalidRequestError
from radixkv.store.kv_store import KVStore
from radixkv.store.sizing import format_bytes, free_memory_bytes, parse_memory

__all__ = ["HostTier"]


class HostTier:
    """A second, slower store in host memory, with a pool of its own: the swap space of the vLLM paper.

    Args:
        store: The device store whose blocks are moved.
        memory: Its size: bytes, or a text such as `"1GiB"`, or a fraction (float) of free host memory.

    Attributes:
        pool: Books of the host blocks.
        block_bytes: Bytes of one block, all layers.

    Raises:
        InvalidRequestError: The size makes no sense, or holds not even one block.

    Source: Kwon et al., PagedAttention (vLLM), 2023, section 4.5 (arXiv:2309.06180).
    """

    def __init__(self, store: KVStore, memory: str | int | float) -> None:
        self._store = store
        self.block_bytes = store.layout.bytes_per_token * store.block_size
        free = free_memory_bytes("cpu")
        size = parse_memory(memory, free)
        if size > free:
            raise InvalidRequestError(
                f"host_memory={memory!r} is more than the {format_bytes(free)} that the host has free"
            )
        num_blocks = size // self.block_bytes
        if num_blocks < 1:
            raise InvalidRequestError(
                f"host_memory={memory!r} holds no block: one takes {format_bytes(self.block_bytes)}"
            )
        self.pool = BlockPool(num_blocks)
        layout = dataclasses.replace(store.layout, device=torch.device("cpu"))
        self._host = KVStore(layout, num_blocks, store.block_size)

    def swap_out(self, device_blocks: np.ndarray, host_blocks: np.ndarray) -> None:
        """Copy blocks of the device store to the host: int32 `[n]` each."""
        self._host.copy_blocks_from(self._store, device_blocks, host_blocks)

    def swap_in(self, host_blocks: np.ndarray, device_blocks: np.ndarray) -> None:
        """Copy them back: int32 `[n]` each."""
        self._store.copy_blocks_from(self._host, host_blocks, device_blocks)
