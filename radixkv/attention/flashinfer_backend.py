"""Attention with FlashInfer's paged kernels, on NVIDIA GPUs."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from radixkv.attention.flashinfer_choice import device_problem, import_flashinfer, is_of_a_build
from radixkv.attention.flashinfer_kinds import KernelModule, Limits, can_merge, kernel_modules, module_of
from radixkv.attention.flashinfer_plan import FlashInferCosts, StepCut, cut_step
from radixkv.attention.flashinfer_sending import PlannedStep, send_step
from radixkv.attention.flashinfer_tables import StepSequences
from radixkv.attention.flashinfer_transfer import Transfers
from radixkv.attention.flashinfer_wrappers import Wrappers
from radixkv.attention.interface import (
    AttentionBackend,
    AttentionBatch,
    AttentionSpec,
    require_fitting,
    require_whole_heads,
)
from radixkv.attention.merge import merge_in_place
from radixkv.attention.torch_backend import TorchBackend
from radixkv.core.errors import InvalidRequestError, first_line

__all__ = ["FlashInferBackend"]

_log = logging.getLogger(__name__)

_LN2 = math.log(2.0)


class FlashInferBackend:
    """FlashInfer's paged decode and prefill kernels straight on the pool's tensors, shared prefixes attended once.

    `flashinfer_plan` says how a step is cut into launches, `flashinfer_kinds` which kernel computes which kind of
    layers. Kinds that no kernel computes go to another backend, each with one logged warning that says why; nothing
    else about them changes.

    The page tables of a step reach the device in one transfer, and neither `plan` nor `run` waits for the device in
    the usual case: `num_waits` counts the times that it had to.

    Args:
        device: Where the pool is.
        module: The `flashinfer` package, or something that does as it does; None imports it. A stand-in may have an
            attribute `radixkv_hooks` with `limits` and `transfers(device)`, which then replace the usual ones.
        fallback: For kinds of layers that FlashInfer cannot compute; None takes `TorchBackend`.
        workspace_bytes: What long contexts are split in. It grows if a kind of layers may need more.
        costs: The cost rule.
        limits: What the kernels take.
        transfers: How tables reach the device.

    Raises:
        InvalidRequestError: FlashInfer is missing or of an unknown version, the device is none of its devices, or there
            is no memory for the workspace.
    """

    name = "flashinfer"

    def __init__(
        self,
        device: torch.device | str = "cuda",
        *,
        module: Any = None,
        fallback: AttentionBackend | None = None,
        workspace_bytes: int = 256 << 20,
        costs: FlashInferCosts | None = None,
        limits: Limits | None = None,
        transfers: Transfers | None = None,
    ) -> None:
        self.device = torch.device(device)
        if module is None:
            problem = device_problem(self.device)
            if problem is not None:
                raise InvalidRequestError(
                    f'attention="flashinfer": {problem}; attention="torch" runs anywhere'
                )
            module = import_flashinfer()
            if self.device.index is None:  # as tensors have it
                self.device = torch.device(self.device.type, torch.cuda.current_device())
        hooks = getattr(module, "radixkv_hooks", None)
        if hooks is not None:
            limits, transfers = limits or hooks.limits, transfers or hooks.transfers(self.device)
        self.module = module
        self.fallback = fallback if fallback is not None else TorchBackend(self.device)
        self._limits = limits or Limits()
        self._transfers = transfers or Transfers(self.device)
        self._costs = costs or FlashInferCosts()
        self._wrappers = Wrappers(module, self.device, self._transfers, workspace_bytes)
        self._batch: AttentionBatch | None = None
        self._steps: dict[AttentionSpec, PlannedStep] = {}
        self._cuts: dict[AttentionSpec, StepCut] = {}
        # What was learnt of a kind of layers, and stays.
        self._dtypes: dict[AttentionSpec, torch.dtype] = {}
        self._reasons: dict[AttentionSpec, str] = {}
        self._logged: dict[AttentionSpec, str] = {}
        self._merges = True
        self._works: set[KernelModule] = set()
        # Kinds that the fallback has planned for this step, or is to plan.
        self._others: list[AttentionSpec] = []
        self._room: dict[tuple[str, int, int, torch.dtype], Tensor] = {}

    # -- what can be computed ---------------------------------------------------------------------------------

    def unsupported(self, spec: AttentionSpec) -> str | None:
        """Why layers of the kind `spec` cannot be run, not even by the fallback; None if they can."""
        return None if self.fallback_reason(spec) is None else self.fallback.unsupported(spec)

    def fallback_reason(self, spec: AttentionSpec, dtype: torch.dtype | None = None) -> str | None:
        """Why layers of a kind are computed by the fallback; None if FlashInfer computes them.

        Args:
            spec: The kind.
            dtype: Of queries, keys and values; None takes the one that the kind was last run with, if it was.
        """
        known = self._limits.why_not(spec, dtype if dtype is not None else self._dtypes.get(spec))
        return known if known is not None else self._reasons.get(spec)

    def kernel_modules(self, specs: Collection[AttentionSpec], dtype: torch.dtype) -> list[KernelModule]:
        """The kernel modules that FlashInfer builds or loads for layers of these kinds.

        Args:
            specs: The kinds of layers.
            dtype: Of queries, keys and values.
        """
        return kernel_modules(specs, dtype, self._limits)

    @property
    def num_waits(self) -> int:
        """How often `plan` had to wait for the device, since the backend was made."""
        return self._transfers.num_waits

    @property
    def transfers(self) -> Transfers:
        """How tables reach the device."""
        return self._transfers

    @property
    def wrappers(self) -> Wrappers:
        """FlashInfer's objects."""
        return self._wrappers

    @property
    def costs(self) -> FlashInferCosts:
        """The cost rule."""
        return self._costs

    def cut_of(self, spec: AttentionSpec) -> StepCut:
        """How the planned step is cut into launches for layers of a kind; for tests and benchmarks."""
        return self._cuts[spec]

    # -- planning ---------------------------------------------------------------------------------------------

    def plan(self, batch: AttentionBatch, specs: Collection[AttentionSpec]) -> None:
        """Cut a step into launches, send its page tables to the device, and plan the kernels.

        What only the tensors can tell, their dtype, is taken to be that of the last step; the kernels of a kind that
        was never run are planned in its first `run`.

        Args:
            batch: The step.
            specs: The distinct kinds of layers that `run` will be called for.
        """
        self._forget()
        kinds = list(dict.fromkeys(specs))
        ours = [spec for spec in kinds if self.fallback_reason(spec) is None]
        sequences = StepSequences(batch)
        alike: dict[Any, StepCut] = {}
        cuts = {}
        for spec in ours:
            shape = spec.window, spec.num_heads, spec.num_kv_heads, spec.key_dim
            if shape not in alike:
                alike[shape] = cut_step(sequences, spec, self._costs)
            cuts[spec] = alike[shape]
        steps = send_step(batch, cuts, self._transfers)
        self._batch = batch
        self._steps, self._cuts = steps, cuts
        try:
            for spec in kinds:
                if spec not in steps:
                    self._leave(spec)
            for spec, step in list(steps.items()):
                dtype = self._dtypes.get(spec)
                if dtype is not None:
                    self._plan_kernels(spec, step, dtype)
            if self._others:
                self.fallback.plan(batch, self._others)
        except BaseException:
            self._forget()
            raise

    def _forget(self) -> None:
        """No half of a plan stays."""
        self._batch, self._others = None, []
        self._steps, self._cuts = {}, {}

    def _leave(self, spec: AttentionSpec, reason: str | None = None) -> None:
        """Give a kind of layers to the fallback, for this step at least. It is to be planned by the caller."""
        if reason is None:
            reason = self.fallback_reason(spec)
        if self._logged.get(spec) != reason:
            _log.warning(
                "attention of %s: FlashInfer cannot compute it (%s); %s does",
                spec,
                reason,
                self.fallback.name,
            )
            self._logged[spec] = str(reason)
        self._others.append(spec)

    def _plan_kernels(self, spec: AttentionSpec, step: PlannedStep, dtype: torch.dtype) -> None:
        """Plan the wrappers of a kind of layers; one that FlashInfer has no kernel for after all is left to others."""
        assert self._batch is not None
        for role, one in step.roles():
            module = module_of(spec, dtype, decode=one.launch.decode, shared=one.launch.shared)
            try:
                self._wrappers.plan(one, role, spec, dtype, self._batch.block_size)
            except Exception as error:
                # A kernel that has worked once is built: whatever it is now, it is not for good.
                if module in self._works or not is_of_a_build(error):
                    raise
                del self._steps[spec]
                self._reasons[spec] = (
                    f"the kernel {module} could not be built or loaded: {type(error).__name__}: {first_line(error)}"
                )
                self._leave(spec)
                return
            self._works.add(module)
        step.dtype = self._dtypes[spec] = dtype

    # -- running ----------------------------------------------------------------------------------------------

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
        step = self._steps.get(spec)
        if step is None or not step.checked or step.dtype != query.dtype:
            step = self._first_run(spec, query, keys, values)
            if step is None:
                return self.fallback.run(spec, query, keys, values, sinks)
        elif query.shape[0] != self._batch.num_tokens:  # type: ignore[union-attr]
            raise InvalidRequestError(
                f"the step has {self._batch.num_tokens} query rows, got {query.shape[0]}"  # type: ignore[union-attr]
            )
        if torch.is_grad_enabled():
            with torch.no_grad():
                return self._run(step, spec, query, keys, values, sinks)
        return self._run(step, spec, query, keys, values, sinks)

    def _run(
        self,
        step: PlannedStep,
        spec: AttentionSpec,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        sinks: Tensor | None,
    ) -> Tensor:
        if not step.own:
            return query.new_empty(0, spec.num_heads, spec.value_dim)
        if query.stride(-1) != 1:
            query = query.contiguous()
        rows, heads, dim, dtype = query.shape[0], spec.num_heads, spec.value_dim, query.dtype
        if step.order is not None:
            query = torch.index_select(
                query, 0, step.order, out=self._buffer("query", rows, heads, spec.key_dim, dtype)
            )
        cache = (keys, values)  # a tuple: it takes no list
        out = self._buffer("out", rows, heads, dim, dtype)
        lse = None
        if step.shared or sinks is not None:
            lse = self._buffer("lse", rows, heads, 0, torch.float32)
        for one in step.own:
            if lse is None:
                one.run(query[one.start : one.stop], cache, out=out[one.start : one.stop])
                continue
            one.run(
                query[one.start : one.stop],
                cache,
                out=out[one.start : one.stop],
                lse=lse[one.start : one.stop],
                return_lse=True,
            )
        if lse is not None:
            for one in step.shared:
                part = self._buffer("part", one.num_rows, heads, dim, dtype)
                part_lse = self._buffer("part lse", one.num_rows, heads, 0, torch.float32)
                one.run(query[one.start : one.stop], cache, out=part, lse=part_lse, return_lse=True)
                self._merge(out[one.start : one.stop], lse[one.start : one.stop], part, part_lse, one.mask)
            if sinks is not None:
                self.give_to_sinks(out, lse, sinks)
        if step.inverse is not None:
            return torch.index_select(
                out, 0, step.inverse, out=self._buffer("ordered", rows, heads, dim, dtype)
            )
        return out

    @staticmethod
    def give_to_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
        """Take from `out`, in place, what the sinks get; `lse` is the kernels', of base 2."""
        share = torch.sigmoid(lse * _LN2 - sinks.to(torch.float32))
        return out.mul_(share.unsqueeze(-1))

    def _merge(self, out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor, mask: Tensor | None) -> None:
        """Merge a shared part into the rows that it is a part of."""
        if self._merges and can_merge(out.shape[1], out.shape[2], out.element_size()):
            try:
                self.module.merge_state_in_place(out, lse, part, part_lse, mask=mask)
                return
            except Exception as error:
                if not is_of_a_build(error):
                    raise
                self._merges = False
                _log.warning("FlashInfer cannot merge (%s); torch does", first_line(error))
        # Also for more heads than a block of threads can hold.
        if mask is not None:
            # Less than any true one, and the output of rows that take no part may be NaN.
            part_lse = torch.where(mask[:, None], part_lse, -1e30)
            part = torch.where(mask[:, None, None], part, 0)
        exact, natural = out.to(torch.float32), lse * _LN2
        merge_in_place(exact, natural, part.to(torch.float32), part_lse * _LN2)
        out.copy_(exact)
        torch.div(natural, _LN2, out=lse)

    def _first_run(
        self, spec: AttentionSpec, query: Tensor, keys: Tensor, values: Tensor
    ) -> PlannedStep | None:
        """Look at the tensors of a kind of layers once a step; None if the fallback is to compute them."""
        batch = self._batch
        step = self._steps.get(spec)
        if batch is None or (step is None and spec not in self._others):
            raise InvalidRequestError(f"plan this step for {spec} before running it")
        if step is None:
            self._dtypes[spec] = query.dtype  # it may be another one than kept it from FlashInfer
            return None
        require_fitting(spec, batch.num_tokens, batch.block_size, query, keys, values)
        if not query.device == keys.device == values.device == self.device:
            raise InvalidRequestError(
                f"queries, keys and values must be on {self.device}, got {query.device}, {keys.device}, {values.device}"
            )
        require_whole_heads(keys, values)
        reason = self._limits.why_not(spec, query.dtype)
        if reason is None and keys.stride() != values.stride():
            reason = f"its keys have the strides {keys.stride()} and its values {values.stride()}"
            self._reasons[spec] = reason
        if reason is not None:
            self._dtypes[spec] = query.dtype
            del self._steps[spec]
            self._leave(spec, reason)
        elif step.dtype != query.dtype:
            self._plan_kernels(spec, step, query.dtype)
        if spec not in self._steps:
            self.fallback.plan(batch, self._others)
            return None
        step.checked = True
        return step

    def _buffer(self, name: str, rows: int, heads: int, dim: int, dtype: torch.dtype) -> Tensor:
        """`[rows, heads, dim]`, or `[rows, heads]` for a dim of 0: the same memory for every layer and step."""
        key = (name, heads, dim, dtype)
        room = self._room.get(key)
        if room is None or len(room) < rows:
            shape = (rows, heads, dim) if dim else (rows, heads)
            # Written to inside and outside of inference mode.
            with torch.inference_mode(False):
                room = self._room[key] = torch.empty(shape, dtype=dtype, device=self.device)
        return room if len(room) == rows else room[:rows]
