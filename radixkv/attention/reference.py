"""Attention in float64 with plain loops: slow, and the judge of all others."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import torch
from torch import Tensor

from radixkv.attention.interface import AttentionBatch, AttentionSpec
from radixkv.core.errors import InvalidRequestError

__all__ = ["ReferenceBackend"]


class ReferenceBackend:
    """One query row at a time, in float64, reading exactly the slots that the row sees.

    A wrong slot, a NaN in a slot that nobody owns or an id out of range shows at once, because nothing else
    is ever read. For tests: a step costs Python time for each query row.
    """

    name = "reference"

    def __init__(self) -> None:
        self._batch: AttentionBatch | None = None
        self._specs: frozenset[AttentionSpec] = frozenset()

    def unsupported(self, spec: AttentionSpec) -> str | None:
        """None: the reference computes every kind of layer, whatever `spec` says."""
        return None

    def plan(self, batch: AttentionBatch, specs: Collection[AttentionSpec]) -> None:
        """Keep the step.

        Args:
            batch: The step.
            specs: Not needed here.

        Raises:
            InvalidRequestError: The arrays of the batch contradict one another.
        """
        batch.check()
        self._batch, self._specs = batch, frozenset(specs)

    def run(
        self, spec: AttentionSpec, query: Tensor, keys: Tensor, values: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        """Attention of one layer.

        Args:
            spec: One of the planned kinds.
            query: `[T, num_heads, key_dim]`; this and the rest as in `AttentionBackend.run`.
            keys: `[num_blocks, block_size, num_kv_heads, key_dim]`, the layer's pool.
            values: The same with `value_dim`.
            sinks: `[num_heads]`, or None.

        Returns:
            `[T, num_heads, value_dim]` in the dtype of `query`.

        Raises:
            InvalidRequestError: Not planned, or the tensors are not those of `spec` and the step.
        """
        batch = self._batch
        if batch is None or spec not in self._specs:
            raise InvalidRequestError(f"plan this step for {spec} before running it")
        batch.check(keys.shape[0])
        expected = (batch.num_tokens, spec.num_heads, spec.key_dim)
        page = (keys.shape[0], batch.block_size, spec.num_kv_heads)
        if (
            query.shape != expected
            or keys.shape != (*page, spec.key_dim)
            or values.shape != (*page, spec.value_dim)
        ):
            raise InvalidRequestError(
                f"{spec} needs queries {expected}, keys {(*page, spec.key_dim)} and values "
                f"{(*page, spec.value_dim)}, got {tuple(query.shape)}, {tuple(keys.shape)}, {tuple(values.shape)}"
            )
        out = torch.empty(batch.num_tokens, spec.num_heads, spec.value_dim, dtype=torch.float64)
        for entry in range(batch.num_entries):
            first_row, end_row = (int(row) for row in batch.query_starts[entry : entry + 2])
            first_position = int(batch.context_lens[entry]) - (end_row - first_row)
            for row in range(first_row, end_row):
                position = first_position + row - first_row
                start = 0 if spec.window is None else max(0, position + 1 - spec.window)
                seen = np.arange(start, position + 1)
                blocks = torch.from_numpy(
                    batch.block_tables[entry, seen // batch.block_size].astype(np.int64)
                ).to(keys.device)
                offsets = torch.from_numpy(seen % batch.block_size).to(keys.device)
                out[row] = _attend(
                    spec,
                    query[row].cpu().double(),
                    keys[blocks, offsets].cpu().double(),
                    values[blocks, offsets].cpu().double(),
                    None if sinks is None else sinks.cpu().double(),
                )
        return out.to(query.device, query.dtype)


def _attend(spec: AttentionSpec, query: Tensor, keys: Tensor, values: Tensor, sinks: Tensor | None) -> Tensor:
    """One row: query `[heads, key_dim]`, keys and values `[n, kv_heads, dim]` -> `[heads, value_dim]`."""
    out = torch.empty(spec.num_heads, spec.value_dim, dtype=torch.float64)
    for head in range(spec.num_heads):
        kv_head = head // spec.group
        logits = keys[:, kv_head] @ query[head] * spec.scale
        if spec.softcap is not None:
            logits = spec.softcap * torch.tanh(logits / spec.softcap)
        top = logits.max() if sinks is None else torch.maximum(logits.max(), sinks[head])
        weights = torch.exp(logits - top)
        total = weights.sum() if sinks is None else weights.sum() + torch.exp(sinks[head] - top)
        out[head] = weights @ values[:, kv_head] / total
    return out
