"""Attention with torch over the paged pool: any device, and the default on CPUs."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from radixkv.attention.interface import AttentionBatch, AttentionSpec
from radixkv.attention.merge import apply_sinks, merge_in_place
from radixkv.attention.torch_bind import Bands, BoundPadded, BoundRound, Scratch, bind_rounds
from radixkv.attention.torch_kernels import FlashLayer, LayerKernel, MathLayer, flash_can_run
from radixkv.attention.torch_plan import Costs, Round, StepTables, plan_rounds
from radixkv.core.errors import InvalidRequestError

__all__ = ["TorchBackend"]

# Away from the CPU, kernel launches cost more than arithmetic, and large masks little.
_COSTS_ELSEWHERE = Costs(call=1 << 20, share=1 << 20, rows=1024, prefix=4096)


class TorchBackend:
    """Reads the pool in place where blocks are consecutive, and shared prefixes once for all that share them.

    `torch_plan` says how a step is cut into calls, and by which cost rule. Slots beyond a sequence's tokens and
    table entries beyond its blocks are never read. Logits of one call, not of the step, are what memory must
    hold beside the result.

    Args:
        device: Where the pool is.
        costs: The cost rule; None takes what was measured for the kind of device.
        fused: Whether to use torch's fused CPU kernel where it can compute the layer.
    """

    name = "torch"

    def __init__(
        self, device: torch.device | str = "cpu", costs: Costs | None = None, *, fused: bool = True
    ) -> None:
        self.device = torch.device(device)
        self._costs = costs or (Costs() if self.device.type == "cpu" else _COSTS_ELSEWHERE)
        self._fused = fused
        self._batch: AttentionBatch | None = None
        self._plans: dict[AttentionSpec, list[Round]] = {}
        self._bound: dict[AttentionSpec, list[BoundRound]] = {}
        self._scratch: dict[torch.dtype, Scratch] = {}
        self._bands: dict[tuple[int | None, torch.dtype], Bands] = {}

    def unsupported(self, spec: AttentionSpec) -> str | None:
        """None: every kind of layer is computed."""
        return None

    def plan(self, batch: AttentionBatch, specs: Collection[AttentionSpec]) -> None:
        """Cut a step into calls, once for each kind of layers. Touches no tensor."""
        tables = StepTables(batch)
        self._batch = batch
        self._plans = {spec: plan_rounds(tables, spec, self._costs) for spec in specs}
        self._bound = {}

    def run(
        self, spec: AttentionSpec, query: Tensor, keys: Tensor, values: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        """Attention of one layer; shapes as in `AttentionBackend.run`.

        Raises:
            InvalidRequestError: Not planned, or the tensors are not those of `spec` and the step.
        """
        bound = self._bound.get(spec)
        if bound is None:
            bound = self._bind(spec, query, keys, values)
        if torch.is_grad_enabled():
            with torch.no_grad():
                return self._run(bound, spec, query, keys, values, sinks)
        return self._run(bound, spec, query, keys, values, sinks)

    def _run(
        self,
        bound: list[BoundRound],
        spec: AttentionSpec,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        sinks: Tensor | None,
    ) -> Tensor:
        if not bound:
            return query.new_empty(0, spec.num_heads, spec.value_dim)
        fused = self._fused and flash_can_run(spec, query.device)
        layer: LayerKernel = (FlashLayer if fused else MathLayer)(spec, query, keys, values)
        merging = len(bound) > 1 or sinks is not None
        out, lse = _attend(layer, bound[0], merging)
        if merging and out.dtype != lse.dtype:
            out = out.to(lse.dtype)
        for number, part in enumerate(bound[1:], 2):
            last = number == len(bound) and sinks is None
            part_out, part_lse = _attend(layer, part, True)
            part_out = part_out.to(lse.dtype)
            if part.row_index is not None:
                rows_out, rows_lse = out.index_select(0, part.row_index), lse.index_select(0, part.row_index)
                merge_in_place(rows_out, rows_lse, part_out, part_lse, last=last)
                out.index_copy_(0, part.row_index, rows_out)
                lse.index_copy_(0, part.row_index, rows_lse)
            elif part.num_rows < out.shape[0]:
                rows_out, rows_lse = (whole.narrow(0, part.first_row, part.num_rows) for whole in (out, lse))
                merge_in_place(rows_out, rows_lse, part_out, part_lse, last=last)
            else:
                merge_in_place(out, lse, part_out, part_lse, last=last)
        if sinks is not None:
            apply_sinks(out, lse, sinks)
        return out.to(query.dtype)

    def _bind(self, spec: AttentionSpec, query: Tensor, keys: Tensor, values: Tensor) -> list[BoundRound]:
        batch = self._batch
        if batch is None or spec not in self._plans:
            raise InvalidRequestError(f"plan this step for {spec} before running it")
        page = (keys.shape[0], batch.block_size, spec.num_kv_heads)
        wanted = (
            (batch.num_tokens, spec.num_heads, spec.key_dim),
            (*page, spec.key_dim),
            (*page, spec.value_dim),
        )
        given = tuple(tuple(tensor.shape) for tensor in (query, keys, values))
        if given != wanted:
            raise InvalidRequestError(f"queries, keys and values must be {wanted} for {spec}, got {given}")
        if not query.dtype == keys.dtype == values.dtype:
            raise InvalidRequestError(
                f"queries, keys and values must have one dtype, got {query.dtype}, {keys.dtype}, {values.dtype}"
            )
        dtype = torch.promote_types(query.dtype, torch.float32)
        bands = self._bands.get((spec.window, dtype))
        if bands is None:
            bands = self._bands[spec.window, dtype] = Bands(spec.window, dtype, keys.device)
        # Masks serve several steps, of which one may run in inference mode and another not.
        with torch.inference_mode(False):
            scratch = self._scratch.get(query.dtype)
            if scratch is None:
                scratch = self._scratch[query.dtype] = Scratch(2 * self._costs.copy, query.dtype, keys.device)
            bound = bind_rounds(self._plans[spec], spec, bands, scratch)
        self._bound[spec] = bound
        return bound


def _attend(layer: LayerKernel, part: BoundRound, with_lse: bool) -> tuple[Tensor, Tensor]:
    """Results of a round, in the order of its rows; the log-sum-exp is anything if it is not needed."""
    results = [
        layer.padded(call) if isinstance(call, BoundPadded) else layer.call(call) for call in part.calls
    ]
    if len(results) == 1:
        out, lse = results[0]
    else:
        out = torch.cat([result[0] for result in results])
        lse = torch.cat([result[1] for result in results]) if with_lse else results[0][1]
    if part.order is not None:
        out = out.index_select(0, part.order)
        lse = lse.index_select(0, part.order) if with_lse else lse
    return out, lse
