"""Host memory for the blocks of sequences that are swapped out."""

from __future__ import annotations

import contextlib
import itertools
import logging
import weakref
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from radixkv.core.block_pool import BlockPool
from radixkv.core.errors import InvalidRequestError
from radixkv.store.copy_stream import CopyStream, copy_stream, to_device
from radixkv.store.kv_store import KVStore, as_moves
from radixkv.store.pinning import page_aligned, pin, unpin
from radixkv.store.sizing import format_bytes, free_memory_bytes, parse_memory

__all__ = ["HostTier"]

_log = logging.getLogger(__name__)

# Room on the device in which the layers of some blocks are put together, so that they cross the bus in one piece.
_STAGING_BYTES = 64 << 20


class HostTier:
    """A second, slower store in host memory, with a pool of its own: the swap space of the vLLM paper.

    A block lies there in one piece, all layers together. On the way it passes through a staging buffer on the device
    (64 MiB, or less if the tier is smaller), where its layers are gathered, so that consecutive host blocks cross the
    bus in one copy.

    On a GPU the copies run on a stream of their own while the main stream computes, and the host waits for nothing:

    - a copy comes after all that the main stream was given before `swap_out` or `swap_in` was called;
    - what the main stream is given after `swap_in` comes after that copy, so that it reads what has arrived;
    - what it is given after `fence` comes after all copies: only then may the sources of `swap_out` be written to;
    - host blocks may be reused at once, because all copies run in one stream.

    The host memory is pinned. If that fails, pageable memory takes its place: slower, and the host waits for each
    copy. The reason is logged once.

    Args:
        store: The device store whose blocks are moved.
        memory: Its size: bytes, or a text such as `"1GiB"`, or a fraction (float) of free host memory.
        stream: Where the copies run; None takes what the device has.

    Attributes:
        pool: Books of the host blocks.
        block_bytes: Bytes of one block, all layers.
        pageable_reason: Why the memory is not pinned; None if it is, or need not be.

    Raises:
        InvalidRequestError: The size makes no sense, holds not even one block, or cannot be had.

    Source: Kwon et al., PagedAttention (vLLM), 2023, section 4.5 (arXiv:2309.06180).
    """

    def __init__(
        self, store: KVStore, memory: str | int | float, *, stream: CopyStream | None = None
    ) -> None:
        self._store = store
        layout = store.layout
        self.block_bytes = layout.bytes_per_token * store.block_size
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
        num_staged = min(num_blocks, store.num_blocks, max(1, _STAGING_BYTES // self.block_bytes))
        width = self.block_bytes // layout.dtype.itemsize
        self._host = page_aligned(num_blocks * self.block_bytes, layout.dtype).view(num_blocks, width)
        self._staging = _on_device(num_staged, width, layout.dtype, layout.device)
        self._parts = _split(store, self._staging)
        self._stream = copy_stream(layout.device) if stream is None else stream
        self._must_fence = False
        self.pageable_reason: str | None = None
        if layout.device.type == "cuda":
            self._pin(num_blocks)
        self.pool = BlockPool(num_blocks)

    def swap_out(self, device_blocks: npt.NDArray[np.int32], host_blocks: npt.NDArray[np.int32]) -> None:
        """Copy blocks of the device store to the host. The former must not be written to before `fence`.

        Args:
            device_blocks: int32 `[n]`.
            host_blocks: int32 `[n]`, distinct.

        Raises:
            InvalidRequestError: The ids make no sense; nothing is copied.
        """
        sources, targets = as_moves(
            "swap_out", device_blocks, host_blocks, self._store.num_blocks, self.pool.num_blocks
        )
        self._start()
        self._stream.run(lambda: self._copy_out(sources, targets), reads=sources, writes=targets[:0])

    def swap_in(self, host_blocks: npt.NDArray[np.int32], device_blocks: npt.NDArray[np.int32]) -> None:
        """Copy them back. Whatever the main stream is given from now on finds them there.

        Args:
            host_blocks: int32 `[n]`.
            device_blocks: int32 `[n]`, distinct.

        Raises:
            InvalidRequestError: The ids make no sense; nothing is copied.
        """
        sources, targets = as_moves(
            "swap_in", host_blocks, device_blocks, self.pool.num_blocks, self._store.num_blocks
        )
        self._start()
        try:
            self._stream.run(lambda: self._copy_in(sources, targets), reads=sources[:0], writes=targets)
        finally:
            self.fence()  # also if it failed halfway: the blocks may soon be somebody else's

    def fence(self) -> None:
        """Let what the main stream is given from now on come after all copies so far. The host does not wait."""
        if self._must_fence:
            self._stream.main_waits(self._stream.record())
            self._must_fence = False

    # -- inner -----------------------------------------------------------------------------------------------

    def _start(self) -> None:
        self._must_fence = True  # first: whatever is queued and then fails must be waited for, too
        self._stream.wait(self._stream.record_main())

    def _copy_out(self, sources: npt.NDArray[np.int64], targets: npt.NDArray[np.int64]) -> None:
        for index, host in self._batches(sources, targets):
            for tensor, staged in self._parts:
                torch.index_select(tensor, 0, index, out=staged[: len(index)])
            for start, first, count in _runs(host):
                self._copy(self._host[first : first + count], self._staging[start : start + count])

    def _copy_in(self, sources: npt.NDArray[np.int64], targets: npt.NDArray[np.int64]) -> None:
        for index, host in self._batches(targets, sources):
            for start, first, count in _runs(host):
                self._copy(self._staging[start : start + count], self._host[first : first + count])
            for tensor, staged in self._parts:
                tensor.index_copy_(0, index, staged[: len(index)])

    def _copy(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source, non_blocking=self.pageable_reason is None)

    def _batches(
        self, device: npt.NDArray[np.int64], host: npt.NDArray[np.int64]
    ) -> Iterator[tuple[Tensor, npt.NDArray[np.int64]]]:
        """As many blocks at a time as the staging buffer holds, in the order of their host blocks."""
        order = np.argsort(host, kind="stable")
        host, index = host[order], to_device(device[order], self._store.layout.device)
        step = len(self._staging)
        for start in range(0, len(host), step):
            yield index[start : start + step], host[start : start + step]

    def _pin(self, num_blocks: int) -> None:
        self.pageable_reason = pin(self._host)
        if self.pageable_reason is None:
            weakref.finalize(self, _give_back, self._stream, self._host)
        else:
            _log.warning(
                "the host tier of %s is not pinned, swapping will be slow: %s",
                format_bytes(num_blocks * self.block_bytes),
                self.pageable_reason,
            )


def _on_device(num_blocks: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    try:
        with torch.inference_mode(False):
            return torch.empty(num_blocks, width, dtype=dtype, device=device)
    except (RuntimeError, MemoryError) as error:
        size = format_bytes(num_blocks * width * dtype.itemsize)
        raise InvalidRequestError(
            f"{device} could not give {size} to swap blocks through: make the cache smaller"
        ) from error


def _split(store: KVStore, staging: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Each tensor of the store with its columns of the staging buffer, `[blocks, block_size, heads, dim]` both."""
    parts, start = [], 0
    for tensor in (*store.keys, *store.values):
        if tensor is not None:
            width = tensor[0].numel()
            parts.append((tensor, staging[:, start : start + width].unflatten(1, tensor.shape[1:])))
            start += width
    assert start == staging.shape[1]
    return parts


def _runs(blocks: npt.NDArray[np.int64]) -> Iterator[tuple[int, int, int]]:
    """Index, first block and length of each run of consecutive ids."""
    borders = [0, *(np.flatnonzero(np.diff(blocks) != 1) + 1).tolist(), len(blocks)]
    for start, stop in itertools.pairwise(borders):
        yield start, int(blocks[start]), stop - start


def _give_back(stream: CopyStream, memory: Tensor) -> None:
    """The tier is gone: wait for its last copies, then let the pages go."""
    with contextlib.suppress(Exception):  # CUDA may be gone, too
        stream.synchronize()
    unpin(memory)
