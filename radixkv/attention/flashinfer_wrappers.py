"""FlashInfer's wrapper objects: made once for each kind of layers, planned once a step, run once a layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from radixkv.attention.flashinfer_kinds import (
    graph_plan_bytes,
    graph_workspace_need,
    uses_tensor_cores,
    workspace_need,
)
from radixkv.attention.flashinfer_plan import Launch
from radixkv.attention.flashinfer_sending import PlannedLaunch
from radixkv.attention.flashinfer_transfer import Transfers
from radixkv.attention.interface import AttentionSpec
from radixkv.core.errors import InvalidRequestError, is_out_of_memory
from radixkv.store.sizing import format_bytes

__all__ = ["PlannedWrapper", "Wrappers", "plan_options"]


def plan_options(spec: AttentionSpec, dtype: torch.dtype, *, whole: bool = False) -> dict[str, Any]:
    """What every wrapper's `plan` takes by name.

    Args:
        spec: The kind of layers.
        dtype: Of queries, keys and values.
        whole: Whether all keys are seen, whatever the window.
    """
    return dict(
        window_left=-1 if spec.window is None or whole else spec.window - 1,
        logits_soft_cap=spec.softcap,
        sm_scale=spec.scale,
        q_data_type=dtype,
        kv_data_type=dtype,
    )


class PlannedWrapper:
    """One wrapper, which must not be planned again before the device has read its last plan."""

    def __init__(self, wrapper: Any, transfers: Transfers) -> None:
        self.wrapper = wrapper
        self._transfers = transfers
        self._planned: Any = None

    def plan(self, *args: Any, **kwargs: Any) -> None:
        """Plan the wrapper, once the device has read the plan before."""
        # `plan` writes the split to page-locked memory of the wrapper and sends it from there.
        self._transfers.wait(self._planned)
        try:
            self.wrapper.plan(*args, **kwargs)
        finally:
            # Also if it is interrupted: it may have sent by then.
            self._planned = self._transfers.mark()


class Wrappers:
    """All wrappers of a backend. They share one workspace, since everything runs on one stream.

    Args:
        module: The `flashinfer` package.
        device: Where it computes.
        transfers: Whose events guard the plans.
        workspace_bytes: Size of the workspace, to begin with. It grows if a kind of layers may need more.

    Raises:
        InvalidRequestError: There is no memory for the workspace.
    """

    def __init__(self, module: Any, device: torch.device, transfers: Transfers, workspace_bytes: int) -> None:
        self._module, self._device, self._transfers = module, device, transfers
        self._wrappers: dict[tuple[AttentionSpec, torch.dtype, str], PlannedWrapper] = {}
        self._num_sms = 132
        if device.type == "cuda":
            self._num_sms = torch.cuda.get_device_properties(device).multi_processor_count
        self._workspace = self._new_workspace(workspace_bytes)

    @property
    def workspace_bytes(self) -> int:
        """Size of the workspace now."""
        return self._workspace.numel()

    @property
    def num_wrappers(self) -> int:
        """Wrappers made so far."""
        return len(self._wrappers)

    def plan(
        self, planned: PlannedLaunch, role: str, spec: AttentionSpec, dtype: torch.dtype, page_size: int
    ) -> None:
        """Plan one launch of the step.

        Args:
            planned: The launch. Its `run` is the wrapper's own afterwards.
            role: What the launch is among those of its step and kind: each has a wrapper of its own.
            spec: The kind of layers.
            dtype: Of queries, keys and values.
            page_size: Tokens per block.
        """
        launch = planned.launch
        key = spec, dtype, role
        wrapper = self._wrappers.get(key)
        if wrapper is None:
            wrapper = self._wrappers[key] = self._make(launch, spec)
        table = (
            torch.from_numpy(launch.table.indptr),
            planned.indices,
            torch.from_numpy(launch.table.last_page_len),
        )
        heads = spec.num_heads, spec.num_kv_heads, spec.key_dim, page_size
        options = plan_options(spec, dtype, whole=launch.shared)
        if launch.decode:
            wrapper.plan(*table, *heads, **options)
        else:
            longest = int(np.diff(launch.row_starts).max())
            wrapper.plan(
                torch.from_numpy(launch.row_starts),
                *table,
                *heads,
                causal=not launch.shared,
                max_token_per_sequence=longest,  # else it is found by a loop over a tensor
                **options,
            )
        planned.run = wrapper.wrapper.run

    def for_graph(
        self, spec: AttentionSpec, indptr: Tensor, indices: Tensor, last_page_len: Tensor
    ) -> PlannedWrapper:
        """A decode wrapper whose `run` can be part of a CUDA graph.

        Args:
            spec: The kind of layers.
            indptr: int32 `[B + 1]` on the device, as the others: where the kernels look, for good.
            indices: int32, as many as there may ever be.
            last_page_len: int32 `[B]`.
        """
        rows = len(last_page_len)
        self._provide(graph_workspace_need(spec, rows, self._num_sms))

        def make() -> Any:
            wrapper = self._module.BatchDecodeWithPagedKVCacheWrapper(
                self._workspace,
                "NHD",
                use_cuda_graph=True,
                use_tensor_cores=uses_tensor_cores(spec),
                paged_kv_indptr_buffer=indptr,
                paged_kv_indices_buffer=indices,
                paged_kv_last_page_len_buffer=last_page_len,
                backend="fa2",
            )
            # Each takes 8 MiB of the device and of page-locked memory to plan in, and there is one for every batch
            # size and kind of layers. One that is too small is an error of `plan`, which looks before it writes.
            size = graph_plan_bytes(spec, rows, self._num_sms)
            small = torch.empty(size, dtype=torch.uint8, device=self._device)
            wrapper.reset_workspace_buffer(self._workspace, small)
            return wrapper

        return self._wrapped(make)

    def _make(self, launch: Launch, spec: AttentionSpec) -> PlannedWrapper:
        self._provide(workspace_need(spec, self._num_sms))
        if launch.decode:
            return self._wrapped(
                lambda: self._module.BatchDecodeWithPagedKVCacheWrapper(
                    self._workspace, "NHD", use_tensor_cores=uses_tensor_cores(spec), backend="fa2"
                )
            )
        return self._wrapped(
            lambda: self._module.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "NHD", backend="fa2")
        )

    def _provide(self, need: int) -> None:
        if need > self.workspace_bytes:
            # Wrappers made before keep the smaller one, which was enough for them.
            self._workspace = self._new_workspace(need)

    def _wrapped(self, make: Callable[[], Any]) -> PlannedWrapper:
        try:
            # Its buffers are written inside and outside of inference mode.
            with torch.inference_mode(False):
                wrapper = make()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise InvalidRequestError(
                f"{self._device} has no memory left for FlashInfer's buffers (16 MiB for each kind of layers): make "
                "the pool smaller"
            ) from error
        return PlannedWrapper(wrapper, self._transfers)

    def _new_workspace(self, size: int) -> Tensor:
        try:
            with torch.inference_mode(False):
                return torch.zeros(size, dtype=torch.uint8, device=self._device)  # as it wants it at first
        except (RuntimeError, MemoryError) as error:
            raise InvalidRequestError(
                f"{self._device} could not give {format_bytes(size)} for FlashInfer's workspace: make the pool smaller"
            ) from error
