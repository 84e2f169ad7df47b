"""FlashInfer's two wrappers, as strict as its sources and documentation."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import ClassVar

import torch

from .graphs import is_recording, opaque
from .maths import attend, graph_plan_bytes, graph_workspace_bytes, paged_positions, workspace_bytes
from .timeline import demand, recorded, unwatched

CUDA_CORE_GROUPS = (1, 2, 3, 4, 8)
EMPTY_LSE = -5e4  # "minus infinity" of 0.6.13


class _Wrapper:
    """What both wrappers have in common."""

    def _init(self, double, workspace, kv_layout, backend, use_cuda_graph, buffers):
        self.double = double
        demand(workspace.dtype == torch.uint8 and workspace.dim() == 1, "the workspace is a row of bytes")
        demand(kv_layout == "NHD", f"the double knows NHD only, got {kv_layout!r}")
        demand(backend == "fa2", f"say fa2: {backend!r} may take fa3, or cuDNN in later versions")
        self.workspace_size = workspace.numel()
        self.plan_size = 8 << 20
        self.use_cuda_graph = use_cuda_graph
        self.buffers = buffers  # indptr, indices, last_page_len
        if use_cuda_graph:
            for buffer in buffers:
                demand(torch.is_tensor(buffer) and buffer.dtype == torch.int32, "graphs need int32 buffers")
            demand(
                len(buffers[0]) == len(buffers[2]) + 1, "indptr's buffer has one element more than the batch"
            )
        self.planned = None
        self.plan_number = 0

    def _plan(self, *args):
        with unwatched():
            self._plan_unwatched(*args)

    def _plan_unwatched(
        self, indptr, indices, last_page_len, qo_indptr, num_qo_heads, num_kv_heads, head_dim, page_size,
        causal, window_left, logits_soft_cap, sm_scale, q_data_type, kv_data_type,
    ):  # fmt: skip
        double, timeline = self.double, self.double.timeline
        demand(not is_recording(), "plan sends from page-locked memory, which a graph cannot have in it")
        demand(
            self.plan_number <= timeline.known,
            "planned again before the device was known to have read the last plan: wait for an event",
        )
        host = {"indptr": indptr, "last_page_len": last_page_len, "qo_indptr": qo_indptr}
        for name, tensor in ({**host, "indices": indices}).items():
            demand(torch.is_tensor(tensor), f"{name} must be a tensor")
            demand(
                tensor.dtype == torch.int32, f"{name} must be int32, others are misread: got {tensor.dtype}"
            )
            demand(tensor.dim() == 1 and tensor.is_contiguous(), f"{name} must be one row")
        for name, tensor in host.items():
            demand(
                tensor.device.type == "cpu" and not timeline.holds(tensor),
                f"{name} on the device is a hidden wait",
            )
        demand(not timeline.tells_places or timeline.holds(indices), "indices must be on the device")
        batch = len(last_page_len)
        demand(batch > 0, "an empty batch divides by zero")
        demand(len(indptr) == batch + 1 and len(qo_indptr) == batch + 1, "indptr must be [batch + 1]")
        demand(int(indptr[0]) == 0 and int(qo_indptr[0]) == 0, "indptr must start at 0")
        pages, rows = indptr.diff(), qo_indptr.diff()
        if self.use_cuda_graph:
            demand(batch == len(self.buffers[2]), f"graph of a batch of {len(self.buffers[2])}, got {batch}")
            demand(len(indices) <= len(self.buffers[1]), "more pages than the graph's buffer holds")
            empty = pages == 0
            demand(bool((last_page_len[empty] == 0).all()), "a padded row has last_page_len 0")
            demand(
                self.takes_tensor_cores or not empty.any(),
                "the CUDA-core kernel's scheduler forgets empty rows where it looks for a split that fits",
            )
        else:
            empty = torch.zeros(batch, dtype=torch.bool)
        demand(
            bool((pages[~empty] > 0).all()), f"requests need at least one page, indptr is {indptr.tolist()}"
        )
        demand(bool((rows > 0).all()), f"requests need at least one row, qo_indptr is {qo_indptr.tolist()}")
        demand(len(indices) == int(indptr[-1]), f"indices must be [{int(indptr[-1])}], got {len(indices)}")
        last = last_page_len[~empty]
        demand(
            bool(((last >= 1) & (last <= page_size)).all()),
            f"last_page_len must lie in 1..{page_size}, got {last_page_len.tolist()}",
        )
        demand(num_qo_heads % num_kv_heads == 0, "query heads must divide among KV heads")
        demand(kv_data_type is not None, "kv_data_type must be given")
        for dtype in (q_data_type, kv_data_type):
            demand(dtype in double.limits.dtypes, f"no kernel for {dtype}")
        dims = double.limits.head_dims
        demand(dims is None or head_dim in dims, f"no kernel for a head_dim of {head_dim}")
        demand(
            isinstance(window_left, int) and window_left >= -1,
            f"window_left must be -1 or more: {window_left}",
        )
        demand(logits_soft_cap is None or logits_soft_cap > 0, f"logits_soft_cap={logits_soft_cap}")
        lens = torch.where(empty, 0, (pages - 1) * page_size + last_page_len)
        demand(not causal or bool((rows <= lens).all()), "a causal request has no more rows than keys")
        if self.takes_tensor_cores:
            if self.use_cuda_graph:
                need = graph_workspace_bytes(batch, num_qo_heads, num_kv_heads, head_dim, double.num_sms)
            else:
                need = workspace_bytes(
                    rows * (num_qo_heads // num_kv_heads), pages, page_size, window_left, num_qo_heads, num_kv_heads,
                    head_dim, double.num_sms,
                )  # fmt: skip
            if need > self.workspace_size:
                raise RuntimeError(
                    f"Buffer overflow when allocating memory for batch_prefill_tmp_v with size {need}, but only "
                    f"{self.workspace_size} bytes available: increase the workspace buffer size"
                )
        else:
            group = num_qo_heads // num_kv_heads
            demand(group in CUDA_CORE_GROUPS, f"no CUDA-core kernel for a group of {group}")
        if self.use_cuda_graph:
            need = graph_plan_bytes(
                batch, num_qo_heads, num_kv_heads, head_dim, double.num_sms, self.takes_tensor_cores
            )
            if need > self.plan_size:
                raise RuntimeError(
                    f"Buffer overflow when allocating memory for batch_prefill_request_indices with size {need}, but "
                    f"only {self.plan_size} bytes available"
                )
            for buffer, tensor in zip(self.buffers, (indptr, indices, last_page_len), strict=True):
                buffer[: len(tensor)].copy_(tensor)
            indices = self.buffers[1]
        self.planned = SimpleNamespace(
            indptr=indptr.clone(), indices=indices, lens=lens, qo_indptr=qo_indptr.clone(), page_size=page_size,
            heads=(num_qo_heads, num_kv_heads, head_dim), causal=causal, window_left=window_left,
            soft_cap=logits_soft_cap, sm_scale=sm_scale, dtypes=(q_data_type, kv_data_type), step=timeline.steps,
        )  # fmt: skip
        self.plan_number = timeline.enqueue()

    def _run(self, *args):
        with unwatched():  # kernels are no torch operations, and what is checked here is nobody's
            return self._run_unwatched(*args)

    def _run_unwatched(self, q, paged_kv_cache, out, lse, return_lse, window_left):
        planned, timeline = self.planned, self.double.timeline
        demand(planned is not None, "run before plan")
        demand(
            self.use_cuda_graph or planned.step == timeline.steps,
            "the plan is that of an earlier step",
        )
        timeline.execute()
        keys, values = unpacked(paged_kv_cache)
        num_qo_heads, num_kv_heads, head_dim = planned.heads
        rows = int(planned.qo_indptr[-1])
        demand(
            tuple(q.shape) == (rows, num_qo_heads, head_dim),
            f"q must be {(rows, num_qo_heads, head_dim)} as planned, got {tuple(q.shape)}",
        )
        demand(q.stride(-1) == 1, "the last dimension of q must be contiguous")
        if q.dtype != planned.dtypes[0]:
            raise ValueError(f"The dtype of q {q.dtype} does not match the q_data_type {planned.dtypes[0]}")
        if keys.dtype != planned.dtypes[1]:
            raise ValueError(
                f"The dtype of k {keys.dtype} does not match the kv_data_type {planned.dtypes[1]}"
            )
        page = (planned.page_size, num_kv_heads, head_dim)
        for pool in (keys, values):
            demand(tuple(pool.shape[1:]) == page, f"pages must be {page}, got {tuple(pool.shape[1:])}")
            demand(pool.stride(-1) == 1, "the last dimension of the cache must be contiguous")
        demand(keys.stride() == values.stride(), "K and V must have the same strides")
        demand(window_left is None or window_left == planned.window_left, "window_left is that of the plan")
        demand(self.use_cuda_graph or not is_recording(), "a plan of an ordinary wrapper does not stay")
        if out is None:
            out = torch.empty_like(q)
        demand(
            out.shape == q.shape and out.dtype == q.dtype, f"out must be as q, got {out.shape}, {out.dtype}"
        )
        demand(out.stride(-1) == 1 and out.is_contiguous(), "out must be contiguous")
        if return_lse:
            if lse is None:
                lse = torch.empty(q.shape[:2], dtype=torch.float32)
            demand(
                lse.shape == q.shape[:2] and lse.dtype == torch.float32, f"lse must be float32 {q.shape[:2]}"
            )
            demand(lse.is_contiguous(), "lse must be contiguous")
        if self.use_cuda_graph:
            opaque(
                lambda: self._compute(planned, q, keys, values, out, lse if return_lse else None),
                [out, lse] if return_lse else [out],
            )
        else:
            self._compute(planned, q, keys, values, out, lse if return_lse else None)
        timeline.enqueue()
        return (out, lse) if return_lse else out

    def _compute(self, planned, q, keys, values, out, lse):
        """What the kernels do. In a graph, they look for everything but shapes in the memory that they know."""
        scale = planned.sm_scale if planned.sm_scale is not None else 1 / math.sqrt(planned.heads[2])
        indptr, indices, lens = planned.indptr, planned.indices, planned.lens
        if self.use_cuda_graph:
            self.double.timeline.execute()
            indptr, indices, last_page_len = self.buffers
            pages = indptr.diff()
            lens = torch.where(pages == 0, 0, (pages - 1) * planned.page_size + last_page_len)
        used = indices[: int(indptr[-1])]
        demand(
            bool(((used >= 0) & (used < keys.shape[0])).all()),
            f"page ids must lie in 0..{keys.shape[0] - 1}, got {used.tolist()}",
        )
        with torch.no_grad():
            for request in range(len(lens)):
                first, stop = planned.qo_indptr[request : request + 2].tolist()
                length = int(lens[request])
                if not length:
                    out[first:stop] = 0
                    if lse is not None:
                        lse[first:stop] = EMPTY_LSE
                    continue
                pages = used[int(indptr[request]) : int(indptr[request + 1])]
                key, value = (paged_positions(pool, pages, length) for pool in (keys, values))
                if planned.window_left >= 0:
                    demand(
                        bool(value.isfinite().all()),
                        "values before a window are multiplied by 0, not skipped",
                    )
                part, part_lse = attend(
                    q[first:stop], key, value, scale, planned.soft_cap, planned.causal, planned.window_left,
                )  # fmt: skip
                out[first:stop] = part.to(out.dtype)
                if lse is not None:
                    lse[first:stop] = part_lse.to(torch.float32)


class DecodeWrapper(_Wrapper):
    #: Optional arguments of `plan` that it knows, with FlashInfer's defaults.
    PLAN_OPTIONS: ClassVar = {
        "pos_encoding_mode": "NONE", "window_left": -1, "logits_soft_cap": None, "q_data_type": "float16",
        "kv_data_type": None, "sm_scale": None, "non_blocking": True, "disable_split_kv": False,
    }  # fmt: skip

    def __init__(
        self,
        double,
        float_workspace_buffer,
        kv_layout="NHD",
        use_cuda_graph=False,
        use_tensor_cores=False,
        paged_kv_indptr_buffer=None,
        paged_kv_indices_buffer=None,
        paged_kv_last_page_len_buffer=None,
        backend="auto",
        jit_args=None,
    ):
        self.takes_tensor_cores = use_tensor_cores
        buffers = paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer
        self._init(double, float_workspace_buffer, kv_layout, backend, use_cuda_graph, buffers)

    @recorded("BatchDecodeWithPagedKVCacheWrapper.reset_workspace_buffer")
    def reset_workspace_buffer(self, float_workspace_buffer, int_workspace_buffer):
        for buffer in (float_workspace_buffer, int_workspace_buffer):
            demand(buffer.dtype == torch.uint8 and buffer.dim() == 1, "a workspace is a row of bytes")
        demand(self.planned is None, "what is planned lies in the buffer that is taken away")
        self.workspace_size, self.plan_size = float_workspace_buffer.numel(), int_workspace_buffer.numel()

    @recorded("BatchDecodeWithPagedKVCacheWrapper.plan")
    def plan(self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, **kwargs):
        options = _options(self.PLAN_OPTIONS, kwargs)
        self._plan(
            indptr, indices, last_page_len, torch.arange(len(last_page_len) + 1, dtype=torch.int32),
            num_qo_heads, num_kv_heads, head_dim, page_size, False, options.window_left, options.logits_soft_cap,
            options.sm_scale, options.q_data_type, options.kv_data_type,
        )  # fmt: skip

    @recorded("BatchDecodeWithPagedKVCacheWrapper.run")
    def run(
        self, q, paged_kv_cache, *args, q_scale=None, k_scale=None, v_scale=None, out=None, lse=None,
        return_lse=False, enable_pdl=None, window_left=None, sinks=None,
    ):  # fmt: skip
        demand(sinks is None, "fa2 ignores sinks")
        return self._run(q, paged_kv_cache, out, lse, return_lse, window_left)


class PrefillWrapper(_Wrapper):
    PLAN_OPTIONS: ClassVar = {
        **DecodeWrapper.PLAN_OPTIONS, "causal": False, "max_token_per_sequence": None,
    }  # fmt: skip
    takes_tensor_cores = True

    def __init__(
        self,
        double,
        float_workspace_buffer,
        kv_layout="NHD",
        use_cuda_graph=False,
        qo_indptr_buf=None,
        paged_kv_indptr_buf=None,
        paged_kv_indices_buf=None,
        paged_kv_last_page_len_buf=None,
        custom_mask_buf=None,
        mask_indptr_buf=None,
        backend="auto",
        jit_args=None,
        jit_kwargs=None,
    ):
        buffers = paged_kv_indptr_buf, paged_kv_indices_buf, paged_kv_last_page_len_buf
        self._init(double, float_workspace_buffer, kv_layout, backend, use_cuda_graph, buffers)

    @recorded("BatchPrefillWithPagedKVCacheWrapper.plan")
    def plan(
        self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads, num_kv_heads,
        head_dim_qk, page_size, **kwargs,
    ):  # fmt: skip
        options = _options(self.PLAN_OPTIONS, kwargs)
        longest = options.max_token_per_sequence
        demand(
            longest is None or longest == int(qo_indptr.diff().max()),
            f"max_token_per_sequence={longest} is not that of {qo_indptr.tolist()}",
        )
        self._plan(
            paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, qo_indptr, num_qo_heads, num_kv_heads,
            head_dim_qk, page_size, options.causal, options.window_left, options.logits_soft_cap, options.sm_scale,
            options.q_data_type, options.kv_data_type,
        )  # fmt: skip

    @recorded("BatchPrefillWithPagedKVCacheWrapper.run")
    def run(
        self, q, paged_kv_cache, *args, q_scale=None, k_scale=None, v_scale=None, out=None, lse=None,
        return_lse=False, enable_pdl=None, window_left=None, sinks=None,
    ):  # fmt: skip
        demand(sinks is None, "fa2 ignores sinks")
        return self._run(q, paged_kv_cache, out, lse, return_lse, window_left)


def _options(known, given):
    unknown = set(given) - set(known)
    if unknown:
        raise TypeError(f"the double knows no {', '.join(sorted(unknown))}")
    demand("q_data_type" in given, "q_data_type is float16 unless it is given")
    return SimpleNamespace(**{**known, **given})


def unpacked(cache):
    if isinstance(cache, tuple):
        return cache
    if torch.is_tensor(cache):
        return cache.unbind(dim=1)
    raise KeyError(
        f"Unrecognized paged_kv_cache type {type(cache)}, expect a single tensor or a tuple of tensor."
    )
