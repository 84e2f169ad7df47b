"""Which kinds of layers FlashInfer's kernels compute, by which kernel, and what that needs. No tensor is touched here.

The limits are those of flashinfer-python 0.6.13 as its sources state them: `utils.cuh` lists the query groups of the
CUDA-core decode kernel and the head sizes, `prefill.cuh` says what fa2 cannot do, `scheduler.cuh` how it splits long
contexts and what memory that takes, `cascade.cuh` how many threads a merge has.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch

from radixkv.attention.interface import AttentionSpec

__all__ = [
    "KernelModule",
    "Limits",
    "can_merge",
    "graph_plan_bytes",
    "graph_workspace_need",
    "kernel_modules",
    "module_of",
    "query_tile",
    "uses_tensor_cores",
    "workspace_need",
]

# Query groups that the CUDA-core decode kernel is compiled for, and those of them that it is taken for: from four on
# the tensor-core kernel reads each key once for the whole group.
_CUDA_CORE_GROUPS = (1, 2, 3)

_DTYPES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64"}


@dataclass(frozen=True)
class Limits:
    """What the kernels take. Anything else is computed by another backend.

    Attributes:
        head_dims: Sizes of a head, the same for keys and values. None: any (a test double may not care).
        dtypes: Of queries, keys and values.
    """

    head_dims: frozenset[int] | None = frozenset({64, 128, 256})
    dtypes: frozenset[torch.dtype] = frozenset({torch.float16, torch.bfloat16})

    def why_not(self, spec: AttentionSpec, dtype: torch.dtype | None = None) -> str | None:
        """Why layers of this kind cannot be computed; None if they can.

        Args:
            spec: The kind.
            dtype: Of queries, keys and values; None if it is not known yet.
        """
        if spec.key_dim != spec.value_dim:
            return f"its values have {spec.value_dim} elements per head and its keys {spec.key_dim}"
        if self.head_dims is not None and spec.key_dim not in self.head_dims:
            known = ", ".join(map(str, sorted(self.head_dims)))
            return f"its heads have {spec.key_dim} elements, and the kernels take {known}"
        if dtype is not None and dtype not in self.dtypes:
            known = " and ".join(sorted(str(one).removeprefix("torch.") for one in self.dtypes))
            return f"its dtype is {str(dtype).removeprefix('torch.')}, and the kernels take {known}"
        return None


def uses_tensor_cores(spec: AttentionSpec) -> bool:
    """Whether decode steps of this kind go to fa2 on tensor cores rather than to the CUDA-core kernel.

    The CUDA-core kernel walks the whole context of a windowed layer and knows few group sizes.
    """
    return spec.window is not None or spec.group not in _CUDA_CORE_GROUPS


def can_merge(num_heads: int, head_dim: int, element_size: int) -> bool:
    """Whether `merge_state_in_place` can be launched: one block of threads holds all heads of a row."""
    per_thread = max(16 // element_size, head_dim // 32)
    return num_heads * (head_dim // per_thread) <= 1024


def query_tile(mean_rows: int, head_dim: int) -> int:
    """Rows of the packed query group that one fa2 thread block attends with, from their mean number per request.

    Source: `FA2DetermineCtaTileQ` in `utils.cuh`, for sm_80 and newer.
    """
    if mean_rows > 64 and head_dim < 256:
        return 128
    return 64 if mean_rows > 16 else 16


def workspace_need(spec: AttentionSpec, num_sms: int) -> int:
    """Bytes that splitting long contexts of this kind takes at most.

    A context is split only until there are two thread blocks for each multiprocessor, and each then writes a float32
    tile of partial results and its log-sum-exps.

    Args:
        spec: The kind.
        num_sms: Multiprocessors of the device.

    Source: `PrefillPlan` in `scheduler.cuh`.
    """
    blocks = 2 * num_sms // spec.num_kv_heads
    tile = query_tile(1 << 20, spec.value_dim)
    return spec.num_heads * blocks * tile * (spec.value_dim + 1) * 4


def graph_workspace_need(spec: AttentionSpec, rows: int, num_sms: int) -> int:
    """Bytes that a decode of so many rows takes in a CUDA graph, where the launch is padded to the most it may be.

    Args:
        spec: The kind.
        rows: Of the graph.
        num_sms: Multiprocessors of the device.

    Source: `PrefillPlan` and `DecodePlan` in `scheduler.cuh`.
    """
    tile = query_tile(spec.group, spec.value_dim) if uses_tensor_cores(spec) else 1
    return spec.num_heads * _graph_blocks(spec, rows, num_sms) * tile * (spec.value_dim + 1) * 4


def graph_plan_bytes(spec: AttentionSpec, rows: int, num_sms: int) -> int:
    """Bytes that the plan of such a decode is given: more than twice what it takes.

    It has three int32 and a flag for each block of threads, two int32 for each row, a few numbers, and what each of
    these arrays is aligned by.

    Args:
        spec: The kind.
        rows: Of the graph.
        num_sms: Multiprocessors of the device.

    Source: as for `graph_workspace_need`.
    """
    return 32 * _graph_blocks(spec, rows, num_sms) + 32 * rows + (64 << 10)


def _graph_blocks(spec: AttentionSpec, rows: int, num_sms: int) -> int:
    """Blocks of threads for each KV head, at most."""
    blocks = max(1, 2 * num_sms // spec.num_kv_heads)
    if not uses_tensor_cores(spec):
        return max(rows, 8 * blocks)  # that kernel may have more blocks of threads on a multiprocessor
    tile = query_tile(spec.group, spec.value_dim)
    return max(blocks, -(-rows * spec.group // tile) + rows - 1)


@dataclass(frozen=True)
class KernelModule:
    """What FlashInfer compiles, or finds compiled, as one unit.

    Attributes:
        kind: `decode` (CUDA cores), `fa2` (tensor cores: prefill, and decode as well), or `cascade` (merging).
        dtype: Of queries, keys and values: `bf16` or `fp16`. Empty for `cascade`.
        head_dim: Size of a head. 0 for `cascade`.
        window: Whether it is the build with a sliding window.
        softcap: Whether it is the build with soft-capped logits.
    """

    kind: str
    dtype: str = ""
    head_dim: int = 0
    window: bool = False
    softcap: bool = False

    def __str__(self) -> str:
        if not self.dtype:
            return self.kind
        flags = [flag for flag, on in (("swa", self.window), ("cap", self.softcap)) if on]
        return ":".join([self.kind, self.dtype, str(self.head_dim), *flags])


def module_of(spec: AttentionSpec, dtype: torch.dtype, *, decode: bool, shared: bool) -> KernelModule:
    """The module that one launch needs.

    Args:
        spec: The kind of layers.
        dtype: Of queries, keys and values.
        decode: Whether each request has one row and the decode wrapper runs it.
        shared: Whether it is a shared part. Those are whole for who sees them: no window, also in windowed layers.
    """
    kind = "decode" if decode and not uses_tensor_cores(spec) else "fa2"
    window = spec.window is not None and not shared
    return KernelModule(kind, _DTYPES.get(dtype, str(dtype)), spec.key_dim, window, spec.softcap is not None)


def kernel_modules(
    specs: Collection[AttentionSpec], dtype: torch.dtype, limits: Limits | None = None
) -> list[KernelModule]:
    """All modules that steps of any kind may need, for building them before the first step.

    Args:
        specs: Kinds of layers.
        dtype: Of queries, keys and values.
        limits: What the kernels take; kinds that they do not take need no module.

    Returns:
        In a fixed order. `str()` of one is its name in the form `fa2:bf16:128:swa`.
    """
    limits = limits or Limits()
    found: set[KernelModule] = set()
    for spec in specs:
        if limits.why_not(spec, dtype) is None:
            for decode, shared in ((False, False), (False, True), (True, False)):
                found.add(module_of(spec, dtype, decode=decode, shared=shared))
            found.add(KernelModule("cascade"))
    return sorted(found, key=str)
