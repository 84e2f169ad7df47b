"""The KV memory itself: one pair of tensors per layer, addressed by slots."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from radixkv.core.errors import InvalidRequestError
from radixkv.store.copy_stream import to_device
from radixkv.store.layout import KVLayout
from radixkv.store.sizing import format_bytes

__all__ = ["KVStore", "SlotRuns"]

# Up to here one copy per run of consecutive slots beats one gather through an index.
_MAX_RUNS = 16


@dataclass(frozen=True)
class SlotRuns:
    """Where the KV of some consecutive tokens lies, worked out once and used for every layer.

    Attributes:
        num_tokens: Tokens addressed.
        runs: `(first_slot, num_slots)` of each run of consecutive slots, in token order.
        index: int64 `[num_tokens]` on the store's device; None while there are few runs.
    """

    num_tokens: int
    runs: tuple[tuple[int, int], ...]
    index: Tensor | None


class KVStore:
    """Keys and values of `num_blocks` blocks, for every layer of a model.

    The layout is FlashInfer's NHD page layout. The store knows neither tokens nor references: who may touch a block
    is the business of `BlockPool`.

    Behind the blocks lies one more, the *scratch block*, which is in nobody's books: computations of a fixed shape
    write there what belongs nowhere.

    Args:
        layout: The layers.
        num_blocks: Blocks, at least 1.
        block_size: Tokens in a block, at least 1.

    Attributes:
        keys: One tensor `[num_blocks, block_size, num_kv_heads, key_dim]` a layer, in the layout's dtype and on its
            device; None for a layer without KV.
        values: The same with `value_dim`.
        keys_and_scratch: The same memory as `keys`, with the scratch block: `[num_blocks + 1, ...]`.
        values_and_scratch: The same of `values`.

    Raises:
        InvalidRequestError: A size is below 1, or the device cannot give that much memory.
    """

    def __init__(self, layout: KVLayout, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1 or block_size < 1:
            raise InvalidRequestError(
                f"a store needs at least one block of one token, got {num_blocks=}, {block_size=}"
            )
        self.layout = layout
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.keys: list[Tensor | None] = []
        self.values: list[Tensor | None] = []
        self.keys_and_scratch: list[Tensor | None] = []
        self.values_and_scratch: list[Tensor | None] = []
        try:
            # Tensors born in inference mode could never be written outside of it.
            with torch.inference_mode(False):
                for layer in layout.layers:
                    for part, whole, dim in (
                        (self.keys, self.keys_and_scratch, 0 if layer is None else layer.key_dim),
                        (self.values, self.values_and_scratch, 0 if layer is None else layer.value_dim),
                    ):
                        if layer is None:
                            part.append(None)
                            whole.append(None)
                            continue
                        page = (num_blocks + 1, block_size, layer.num_kv_heads, dim)
                        tensor = torch.empty(page, dtype=layout.dtype, device=layout.device)
                        whole.append(tensor)
                        part.append(tensor[:num_blocks])
        except (RuntimeError, MemoryError) as error:  # torch.OutOfMemoryError is a RuntimeError
            need = layout.bytes_per_token * block_size * num_blocks
            raise InvalidRequestError(
                f"{layout.device} could not give {format_bytes(need)} for {num_blocks} blocks: ask for less"
            ) from error

    @property
    def scratch_block(self) -> int:
        """Id of the scratch block: no block of the pool has it."""
        return self.num_blocks

    @property
    def num_bytes(self) -> int:
        """Bytes of all blocks together, without the scratch block."""
        return self.layout.bytes_per_token * self.block_size * self.num_blocks

    def locate(self, blocks: np.ndarray, start: int, stop: int) -> SlotRuns:
        """Slots of the tokens `start..stop` of a sequence whose block table is `blocks`.

        Args:
            blocks: int32 `[num_blocks_of_sequence]`.
            start: First token, counted from the start of the sequence.
            stop: One past the last token.

        Raises:
            InvalidRequestError: The table does not have all of these tokens.
        """
        if not 0 <= start <= stop <= len(blocks) * self.block_size:
            raise InvalidRequestError(
                f"tokens {start}..{stop} do not lie in a table of {len(blocks)} blocks of {self.block_size}"
            )
        if start == stop:
            return SlotRuns(0, (), None)
        size = self.block_size
        first, last = start // size, (stop - 1) // size
        # int64 before multiplying: slots of a large pool pass 2**31.
        part = blocks[first : last + 1].astype(np.int64)
        breaks = np.flatnonzero(np.diff(part) != 1) + 1
        heads = np.concatenate(([0], breaks))
        ends = np.concatenate((breaks, [len(part)]))
        runs = [
            (int(part[head]) * size, int(end - head) * size) for head, end in zip(heads, ends, strict=True)
        ]
        skip = start - first * size
        runs[0] = (runs[0][0] + skip, runs[0][1] - skip)
        over = (last + 1) * size - stop
        runs[-1] = (runs[-1][0], runs[-1][1] - over)
        index = None
        if len(runs) > _MAX_RUNS:
            slots = (part[:, None] * size + np.arange(size)).reshape(-1)[skip : skip + stop - start]
            index = to_device(np.ascontiguousarray(slots), self.layout.device)
        return SlotRuns(stop - start, tuple(runs), index)

    def read(self, layer: int, where: SlotRuns, key_out: Tensor, value_out: Tensor) -> None:
        """Copy rows of one layer out of the store.

        Args:
            layer: Layer index.
            where: From `locate`.
            key_out: `[num_kv_heads, where.num_tokens, key_dim]`, written in place; may be a strided view.
            value_out: The same with `value_dim`.

        Raises:
            InvalidRequestError: The layer keeps no KV of its own.
        """
        for pool, out in (
            (self._flat(self.keys, layer), key_out),
            (self._flat(self.values, layer), value_out),
        ):
            if where.index is not None:
                out.copy_(pool.index_select(0, where.index).transpose(0, 1))
                continue
            done = 0
            for slot, length in where.runs:
                out[:, done : done + length].copy_(pool[slot : slot + length].transpose(0, 1))
                done += length

    def write(self, layer: int, where: SlotRuns, keys: Tensor, values: Tensor) -> None:
        """Copy rows of one layer into the store.

        Args:
            layer: Layer index.
            where: From `locate`.
            keys: `[num_kv_heads, where.num_tokens, key_dim]`.
            values: The same with `value_dim`.

        Raises:
            InvalidRequestError: The layer keeps no KV of its own.
        """
        for pool, rows in ((self._flat(self.keys, layer), keys), (self._flat(self.values, layer), values)):
            if where.index is not None:
                pool.index_copy_(0, where.index, rows.transpose(0, 1))
                continue
            done = 0
            for slot, length in where.runs:
                pool[slot : slot + length].copy_(rows[:, done : done + length].transpose(0, 1))
                done += length

    def copy_blocks(self, sources: np.ndarray, targets: np.ndarray) -> None:
        """Copy whole blocks onto others in every layer (copy-on-write). No block may be both source and target.

        Args:
            sources: int32 `[n]`.
            targets: int32 `[n]`, distinct.

        Raises:
            InvalidRequestError: The ids make no sense; nothing is copied.
        """
        source_ids, target_ids = as_moves("copy_blocks", sources, targets, self.num_blocks, self.num_blocks)
        if np.isin(target_ids, source_ids).any():
            raise InvalidRequestError(
                "copy_blocks: targets must be distinct, and none may be a source as well"
            )
        source, target = to_device(np.stack((source_ids, target_ids)), self.layout.device)
        for tensor in (*self.keys, *self.values):
            if tensor is not None:
                tensor.index_copy_(0, target, tensor.index_select(0, source))

    def _flat(self, tensors: list[Tensor | None], layer: int) -> Tensor:
        tensor = tensors[layer]
        if tensor is None:
            raise InvalidRequestError(f"layer {layer} holds no keys and values of its own")
        return tensor.view(-1, *tensor.shape[2:])


def as_moves(
    what: str, sources: np.ndarray, targets: np.ndarray, num_sources: int, num_targets: int
) -> tuple[np.ndarray, np.ndarray]:
    """Both as int64, after checking that they name blocks that exist, each target once."""
    source_ids, target_ids = (np.asarray(ids, dtype=np.int64) for ids in (sources, targets))
    if source_ids.shape != target_ids.shape or source_ids.ndim != 1:
        raise InvalidRequestError(
            f"{what} needs two id lists of one length, got {source_ids.shape} and {target_ids.shape}"
        )
    if len(np.unique(target_ids)) != len(target_ids):
        raise InvalidRequestError(f"{what}: targets must be distinct, and no block may be named twice")
    for ids, size in ((source_ids, num_sources), (target_ids, num_targets)):
        if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= size):
            raise InvalidRequestError(f"{what}: block ids must lie in 0..{size - 1}")
    return source_ids, target_ids
