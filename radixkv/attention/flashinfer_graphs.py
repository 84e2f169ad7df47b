"""Decode attention that can be recorded in a CUDA graph: FlashInfer's wrappers over memory that stays where it is.

The graph of a batch size launches the same kernels on the same memory, whatever the step. What a step brings goes into
that memory before a replay, in two parts:

* the *lengths* of the contexts, which are all that FlashInfer's `plan` depends on. They are known before the tokens of
  the step are, so that it can be planned while the device still computes the step before;
* the *inputs and page ids*, in one transfer.

A batch smaller than the graph is filled up with requests of one token in the scratch block of the pool. Empty requests
would be shorter, but the scheduler of FlashInfer's CUDA-core kernel does not count them where it looks for a split that
fits, and counts them where it writes the split (`PartitionPagedKVCacheBinarySearchMinNumPagePerBatch` in
`scheduler.cuh` of 0.6.13): with many of them it writes past the end of its tables. And the documentation asks for one
token at least.

All buffers may be shared by the graphs of all sizes: on one stream, what is sent for a step arrives after the replay
before it and before its own.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from radixkv.attention.device_graphs import CudaGraphs, GraphDevice
from radixkv.attention.flashinfer_backend import FlashInferBackend
from radixkv.attention.flashinfer_plan import cut_step
from radixkv.attention.flashinfer_tables import PageTable, StepSequences
from radixkv.attention.flashinfer_transfer import Transfers
from radixkv.attention.flashinfer_wrappers import plan_options
from radixkv.attention.interface import AttentionBackend, AttentionBatch, AttentionSpec
from radixkv.core.errors import InvalidRequestError

__all__ = ["GraphAttention", "StepBuffers", "graph_device", "sharing_pays"]

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]

# Time that launching one layer takes without a graph, in bytes that an H100 or H200 could have read meanwhile: half a
# millisecond. An estimate, not measured.
_LAYER_LAUNCH_BYTES = 2_000_000_000


def graph_device(backend: AttentionBackend) -> GraphDevice | None:
    """What records graphs over this backend; None if nothing does."""
    if not isinstance(backend, FlashInferBackend):
        return None
    hooks = getattr(backend.module, "radixkv_hooks", None)
    if hooks is not None:
        make = getattr(hooks, "graphs", None)
        return None if make is None else make(backend.device)
    return CudaGraphs(backend.device) if backend.device.type == "cuda" else None


def sharing_pays(
    backend: FlashInferBackend, batch: AttentionBatch, specs: Collection[AttentionSpec], itemsize: int
) -> bool:
    """Whether attending shared prefixes once, without a graph, saves more than a graph does.

    A graph attends each context by itself: which sequences share what differs from step to step. Looked at only where
    contexts are so long that it might pay.

    Args:
        backend: Whose cost rule counts.
        batch: A step of decodes.
        specs: Kinds of its layers.
        itemsize: Bytes of an element of the pool.
    """
    if not backend.costs.cascade or batch.num_entries < 2:
        return False
    tokens = int(batch.context_lens.sum(dtype=np.int64))
    sequences: StepSequences | None = None
    for spec in specs:
        token_bytes = spec.num_kv_heads * (spec.key_dim + spec.value_dim) * itemsize
        if tokens * token_bytes < _LAYER_LAUNCH_BYTES:
            continue
        sequences = sequences or StepSequences(batch)
        cut = cut_step(sequences, spec, backend.costs)
        shared = sum(_num_tokens(launch.table, batch.block_size) for launch in cut.shared)
        own = sum(_num_tokens(launch.table, batch.block_size) for launch in cut.own)
        saved = (tokens - shared - own) * token_bytes
        if shared * token_bytes <= backend.costs.cache_bytes:
            saved = int(saved * backend.costs.cache_share)
        if shared and saved >= _LAYER_LAUNCH_BYTES:
            return True
    return False


def _num_tokens(table: PageTable, page_size: int) -> int:
    return int(((table.counts - 1) * page_size + table.last_page_len).sum())


class StepBuffers:
    """Device memory that the graphs of all sizes read: inputs of the model, and page ids for each window.

    Args:
        transfers: The way to the device.
        windows: Distinct windows of the layers.
        rows: The largest batch.
        block_size: Tokens per block.
        blocks: The most that a sequence can have.
    """

    def __init__(
        self, transfers: Transfers, windows: Sequence[int | None], rows: int, block_size: int, blocks: int
    ) -> None:
        self._transfers = transfers
        self._rows = rows
        self._inputs = transfers.empty(6 * rows)
        self._indices: dict[int | None, Tensor] = {}
        for window in windows:
            most = blocks if window is None else min(blocks, window // block_size + 2)
            self._indices[window] = transfers.empty(rows * most)

    def inputs(self, rows: int) -> Tensor:
        """int64 `[3, rows]`: token ids, positions and slots."""
        return self._inputs[: 6 * rows].view(torch.int64).view(3, rows)

    def indices(self, window: int | None) -> Tensor:
        """int32: page ids of the layers with that window."""
        return self._indices[window]

    def send(
        self,
        inputs: Int64s,
        tables: dict[int | None, PageTable],
        block_tables: Int32s,
        padding: int,
        scratch_block: int,
    ) -> None:
        """Put a step on the device.

        Args:
            inputs: int64 `[3, rows]`.
            tables: Pages of the sequences, by window.
            block_tables: Of the sequences.
            padding: Rows behind them, which read one page each:
            scratch_block: this one.
        """
        words = 2 * inputs.size
        parts: list[tuple[int, Tensor]] = [(0, self._inputs[:words])]
        size = words
        for window, table in tables.items():
            parts.append((size, self._indices[window][: table.num_pages + padding]))
            size += table.num_pages + padding
        host = self._transfers.host(size)
        host[:words] = inputs.reshape(-1).view(np.int32)
        for (start, place), table in zip(parts[1:], tables.values(), strict=True):
            table.write(block_tables, host[start : start + table.num_pages])
            host[start + table.num_pages : start + len(place)] = scratch_block
        self._transfers.send_into(parts)


class GraphAttention:
    """Attention of decode steps of one batch size. Plan the lengths, send the rest, and replay what `run` launched.

    Args:
        backend: Whose kernels, workspace and transfers are used.
        specs: Kinds of layers, all of which FlashInfer computes.
        dtype: Of queries, keys and values.
        rows: The batch size.
        buffers: Where page ids are.
        block_size: Tokens per block.
    """

    name = "flashinfer"

    def __init__(
        self,
        backend: FlashInferBackend,
        specs: Collection[AttentionSpec],
        dtype: torch.dtype,
        rows: int,
        buffers: StepBuffers,
        block_size: int,
    ) -> None:
        self.rows = rows
        self.tables: dict[int | None, PageTable] = {}
        self._buffers = buffers
        self._block_size = block_size
        self._dtype = dtype
        self._planned: Int64s | None = None
        self._lengths: dict[int | None, tuple[Tensor, Tensor]] = {}
        for window in dict.fromkeys(spec.window for spec in specs):
            self._lengths[window] = backend.transfers.empty(rows + 1), backend.transfers.empty(rows)
        self._wrappers = {}
        for spec in dict.fromkeys(specs):
            indptr, last = self._lengths[spec.window]
            indices = buffers.indices(spec.window)
            self._wrappers[spec] = backend.wrappers.for_graph(spec, indptr, indices, last)

    def is_planned(self, contexts: npt.NDArray[np.integer]) -> bool:
        """Whether the last plan is that of these context lengths."""
        return self._planned is not None and np.array_equal(self._planned, contexts)

    def forget_plan(self) -> None:
        """Whatever was planned, plan again."""
        self._planned = None

    def plan(self, contexts: npt.NDArray[np.integer]) -> None:
        """Plan the kernels for contexts of these lengths; they replace those planned before.

        May wait until the device has read the plan before, which comes ahead of all kernels that use it.

        Args:
            contexts: `[n]`, at most `rows`, the new token included. Further rows are padding.
        """
        self._planned = None
        lens = contexts.astype(np.int64)
        count, padding = len(lens), self.rows - len(lens)
        tables, host = {}, {}
        for window in self._lengths:
            starts = np.zeros_like(lens) if window is None else np.maximum(lens - window, 0)
            table = tables[window] = PageTable.between(np.arange(count), starts, lens, self._block_size)
            pages = table.num_pages + np.arange(1, padding + 1, dtype=np.int32)
            indptr = np.concatenate([table.indptr, pages])
            last = np.concatenate([table.last_page_len, np.ones(padding, np.int32)])
            host[window] = torch.from_numpy(indptr), torch.from_numpy(last), int(indptr[-1])
        for spec, wrapper in self._wrappers.items():
            indptr_host, last_host, num_pages = host[spec.window]
            wrapper.plan(
                indptr_host,
                self._buffers.indices(spec.window)[:num_pages],  # they are, or will be, where they belong
                last_host,
                spec.num_heads,
                spec.num_kv_heads,
                spec.key_dim,
                self._block_size,
                **plan_options(spec, self._dtype),
            )
        self.tables = tables
        self._planned = lens

    def run(
        self, spec: AttentionSpec, query: Tensor, keys: Tensor, values: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        """Attention of one layer; shapes as in `AttentionBackend.run`, with the scratch block behind the pool.

        Raises:
            InvalidRequestError: The tensors are not those of `spec`.
        """
        if tuple(query.shape) != (self.rows, spec.num_heads, spec.key_dim) or query.dtype != self._dtype:
            raise InvalidRequestError(
                f"queries must be {(self.rows, spec.num_heads, spec.key_dim)} in {self._dtype} for {spec}, got "
                f"{tuple(query.shape)} in {query.dtype}"
            )
        if query.stride(-1) != 1:
            query = query.contiguous()
        run = self._wrappers[spec].wrapper.run
        out = query.new_empty(self.rows, spec.num_heads, spec.value_dim)
        if sinks is None:
            run(query, (keys, values), out=out)
            return out
        lse = query.new_empty(self.rows, spec.num_heads, dtype=torch.float32)
        run(query, (keys, values), out=out, lse=lse, return_lse=True)
        return FlashInferBackend.give_to_sinks(out, lse, sinks)
