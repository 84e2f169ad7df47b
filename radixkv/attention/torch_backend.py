"""Attention with torch over the paged pool: any device, and the default on CPUs."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from radixkv.attention.decode_steps import DecodeSteps
from radixkv.attention.interface import (
    AttentionBatch,
    AttentionSpec,
    require_fitting,
    require_whole_heads,
)
from radixkv.attention.merge import apply_sinks, merge_in_place
from radixkv.attention.step_tables import StepTables
from radixkv.attention.torch_bind import (
    Bands,
    BoundCall,
    BoundPadded,
    BoundRound,
    Scratch,
    bind_rounds,
    rebind_rounds,
)
from radixkv.attention.torch_kernels import FlashLayer, LayerKernel, MathLayer, flash_can_run
from radixkv.attention.torch_plan import Costs, Plan, plan_step
from radixkv.core.errors import InvalidRequestError

__all__ = ["TorchBackend"]

# Away from the CPU, kernel launches cost more than arithmetic, and large masks little. Estimates: not measured.
_COSTS_ELSEWHERE = Costs(call=1 << 20, share=1 << 20, copy=1 << 24, rows=1024, prefix=4096)


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
        self._num_rows = self._block_size = 0
        self._plans: dict[AttentionSpec, Plan] = {}
        self._steps: DecodeSteps | None = None
        # Steps planned, and which of them the tensors of a plan are for.
        self._number = 0
        self._bound: dict[tuple[AttentionSpec, torch.dtype], tuple[int, list[BoundRound]]] = {}
        self._scratch: dict[torch.dtype, Scratch] = {}
        self._bands: dict[tuple[int | None, torch.dtype], Bands] = {}

    def unsupported(self, spec: AttentionSpec) -> str | None:
        """None: every kind of layer is computed, whatever `spec` says."""
        return None

    def plan(self, batch: AttentionBatch, specs: Collection[AttentionSpec]) -> None:
        """Cut a step into calls, once for each kind of layers. Touches no tensor.

        A step of decodes that follows the last one, with each context one token longer, takes its plan over and
        lets it grow.

        Args:
            batch: The step.
            specs: The distinct kinds of layers that `run` will be called for.
        """
        # Whatever is raised below, no half of a plan stays.
        steps, self._steps = self._steps, None
        grown = None if steps is None or self._plans.keys() != set(specs) else steps.advance(batch)
        self._number += 1  # also for the same step again: tensors are looked at once a step
        if steps is None or grown is None or (grown and not self._grow(steps)):
            self._plans, self._bound = {}, {}
            tables = StepTables(batch)
            decodes = DecodeSteps.only_decodes(batch)
            steps = DecodeSteps(batch) if decodes else None
            self._plans = {spec: plan_step(tables, spec, self._costs, decodes) for spec in specs}
            self._num_rows, self._block_size = batch.num_tokens, batch.block_size
        self._steps = steps

    def _grow(self, steps: DecodeSteps) -> bool:
        return all(
            plan.growth is not None and plan.growth.grow(steps.contexts, steps.last_slots)
            for plan in self._plans.values()
        )

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
        number, bound = self._bound.get((spec, query.dtype), (-1, []))
        if number != self._number:
            bound = self._bind(spec, query, keys, values)
        elif query.shape[0] != self._num_rows:
            raise InvalidRequestError(f"the step has {self._num_rows} query rows, got {query.shape[0]}")
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
        # The fused kernel takes for granted that the elements of a head lie side by side.
        if query.stride(-1) != 1:
            query = query.contiguous()
        require_whole_heads(keys, values)
        kernel = FlashLayer if self._fused and flash_can_run(spec, query.device) else MathLayer
        layer: LayerKernel = kernel(spec, query, keys, values)
        out, lse = _together(bound[0], [_attend(layer, call) for call in bound[0].calls])
        if out.dtype != lse.dtype and (len(bound) > 1 or sinks is not None):
            out = out.to(lse.dtype)
        for number, part in enumerate(bound[1:], 2):
            last = number == len(bound) and sinks is None
            _merge(out, lse, part, *_together(part, [_attend(layer, call) for call in part.calls]), last)
        if sinks is not None:
            apply_sinks(out, lse, sinks)
        return out.to(query.dtype)

    def _bind(self, spec: AttentionSpec, query: Tensor, keys: Tensor, values: Tensor) -> list[BoundRound]:
        if spec not in self._plans:
            raise InvalidRequestError(f"plan this step for {spec} before running it")
        require_fitting(spec, self._num_rows, self._block_size, query, keys, values)
        dtype = torch.promote_types(query.dtype, torch.float32)
        bands = self._bands.get((spec.window, dtype))
        if bands is None:
            bands = self._bands[spec.window, dtype] = Bands(spec.window, dtype, keys.device)
        # Masks serve several steps, of which one may run in inference mode and another not.
        with torch.inference_mode(False):
            scratch = self._scratch.get(query.dtype)
            if scratch is None:
                scratch = self._scratch[query.dtype] = Scratch(2 * self._costs.copy, query.dtype, keys.device)
            rounds = self._plans[spec].rounds
            known = self._bound.pop((spec, query.dtype), None)
            if known is None:
                bound = bind_rounds(rounds, spec, bands, scratch)
            else:
                bound = known[1]
                rebind_rounds(bound, rounds, spec, bands, scratch)
        self._bound[spec, query.dtype] = self._number, bound
        return bound


def _attend(layer: LayerKernel, call: BoundCall | BoundPadded) -> tuple[Tensor, Tensor]:
    return layer.padded(call) if isinstance(call, BoundPadded) else layer.call(call)


def _together(part: BoundRound, results: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Results of all calls of a round, in the order of its rows."""
    if len(results) == 1:
        out, lse = results[0]
    else:
        out, lse = (torch.cat(tensors) for tensors in zip(*results, strict=True))
    if part.order is not None:
        out, lse = out.index_select(0, part.order), lse.index_select(0, part.order)
    return out, lse


def _merge(
    out: Tensor, lse: Tensor, rows: BoundRound, part_out: Tensor, part_lse: Tensor, last: bool
) -> None:
    """Merge results for some rows into those for all."""
    part_out = part_out.to(out.dtype)
    if rows.row_index is not None:
        rows_out, rows_lse = out.index_select(0, rows.row_index), lse.index_select(0, rows.row_index)
        merge_in_place(rows_out, rows_lse, part_out, part_lse, last=last)
        out.index_copy_(0, rows.row_index, rows_out)
        lse.index_copy_(0, rows.row_index, rows_lse)
    elif rows.num_rows < out.shape[0]:
        rows_out, rows_lse = (whole.narrow(0, rows.first_row, rows.num_rows) for whole in (out, lse))
        merge_in_place(rows_out, rows_lse, part_out, part_lse, last=last)
    else:
        merge_in_place(out, lse, part_out, part_lse, last=last)
