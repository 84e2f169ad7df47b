"""The wrappers and functions, in signatures that are FlashInfer's."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace

import torch

from radixkv.attention.flashinfer_kinds import Limits

from .graphs import FakeGraphs
from .maths import merge_pair
from .timeline import FakeTransfers, Timeline, demand, recorded
from .wrappers import DecodeWrapper, PrefillWrapper, unpacked


class Double:
    """Stands in for the module `flashinfer`.

    Args:
        limits: What its kernels take; None: what the real ones do. `Double.relaxed()` takes any head size and dtype.
        num_sms: Multiprocessors of the device that it plays.
        graphs: Whether it plays CUDA graphs.

    Attributes:
        calls: `(name, args, kwargs)` of every call of a function, a constructor or a wrapper's method (`Wrapper.plan`),
            as it was made; `self` is left out. The last ten thousand.
        timeline: What the device did.
        graphs: The `FakeGraphs` made so far.
    """

    __version__ = "0.6.13"

    def __init__(self, limits=None, num_sms=132, graphs=False):
        self.limits = limits or Limits()
        self.num_sms = num_sms
        self.calls = deque(maxlen=10_000)
        self.timeline = Timeline()
        self.transfers = []
        self.graphs = []
        self.radixkv_hooks = SimpleNamespace(
            limits=self.limits, transfers=self._new_transfers, graphs=self._new_graphs if graphs else None
        )

    @classmethod
    def relaxed(cls, **options):
        """Any head size, and float32 and float64 as well."""
        dtypes = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
        return cls(Limits(head_dims=None, dtypes=frozenset(dtypes)), **options)

    def _new_transfers(self, device):
        self.transfers.append(FakeTransfers(device, self.timeline))
        return self.transfers[-1]

    def _new_graphs(self, device):
        self.graphs.append(FakeGraphs())
        return self.graphs[-1]

    def synchronize(self):
        """Wait for the device, as `torch.cuda.synchronize()`."""
        self.timeline.synchronize()

    def BatchDecodeWithPagedKVCacheWrapper(self, *args, **kwargs):
        self.calls.append(("BatchDecodeWithPagedKVCacheWrapper", args, kwargs))
        return DecodeWrapper(self, *args, **kwargs)

    def BatchPrefillWithPagedKVCacheWrapper(self, *args, **kwargs):
        self.calls.append(("BatchPrefillWithPagedKVCacheWrapper", args, kwargs))
        return PrefillWrapper(self, *args, **kwargs)

    # -- functions --------------------------------------------------------------------------------------------

    @recorded("merge_state")
    def merge_state(self, v_a, s_a, v_b, s_b):
        _check_merge(v_a, s_a, v_b, s_b)
        return merge_pair(v_a, s_a, v_b, s_b)

    @recorded("merge_state_in_place")
    def merge_state_in_place(self, v, s, v_other, s_other, mask=None):
        _check_merge(v, s, v_other, s_other)
        demand(
            s.dtype == torch.float32, "another dtype of s is converted, and the result of the merge is lost"
        )
        merged, lse = merge_pair(v, s, v_other, s_other)
        if mask is None:
            v.copy_(merged)
            s.copy_(lse)
            return
        demand(mask.dtype in (torch.bool, torch.uint8), f"mask is read as bytes, got {mask.dtype}")
        demand(
            mask.shape == v.shape[:1] and mask.is_contiguous(),
            f"mask must be [{v.shape[0]}], got {mask.shape}",
        )
        demand(not self.timeline.tells_places or self.timeline.holds(mask), "mask must be on the device")
        taking_part = mask.bool()
        v[taking_part], s[taking_part] = merged[taking_part], lse[taking_part]

    @recorded("get_seq_lens")
    def get_seq_lens(self, kv_indptr, kv_last_page_len, page_size):
        pages = kv_indptr[1:] - kv_indptr[:-1]
        return torch.clamp(pages - 1, min=0) * page_size + kv_last_page_len

    @recorded("get_batch_indices_positions")
    def get_batch_indices_positions(self, append_indptr, seq_lens, nnz, batch_indices=None, positions=None):
        counts = append_indptr[1:] - append_indptr[:-1]
        which = torch.full((nnz,), -1, dtype=torch.int32)
        where = torch.zeros(nnz, dtype=torch.int32)
        for request, (start, count) in enumerate(zip(append_indptr.tolist(), counts.tolist(), strict=False)):
            which[start : start + count] = request
            where[start : start + count] = torch.arange(count) + int(seq_lens[request]) - count
        return which, where

    @recorded("append_paged_kv_cache")
    def append_paged_kv_cache(
        self, append_key, append_value, batch_indices, positions, paged_kv_cache,
        kv_indices, kv_indptr, kv_last_page_len, kv_layout="NHD",
    ):  # fmt: skip
        keys, values = unpacked(paged_kv_cache)
        for name, tensor in (("batch_indices", batch_indices), ("positions", positions), ("kv_indices", kv_indices),
                             ("kv_indptr", kv_indptr), ("kv_last_page_len", kv_last_page_len)):  # fmt: skip
            demand(tensor.dtype == torch.int32, f"{name} must be int32, got {tensor.dtype}")
        demand(bool((batch_indices >= 0).all()), "padded rows write to memory of nobody")
        demand(keys.shape[-1] in (64, 128, 256, 512), f"append takes no head_dim of {keys.shape[-1]}")
        size = keys.shape[1]
        pages = kv_indices[kv_indptr[batch_indices.long()].long() + positions.long() // size].long()
        keys[pages, positions.long() % size] = append_key
        values[pages, positions.long() % size] = append_value


def _check_merge(v, s, v_other, s_other):
    for name, tensor in (("v", v), ("s", s), ("v_other", v_other), ("s_other", s_other)):
        demand(tensor.is_contiguous(), f"{name} must be contiguous")
    demand(v.dim() == 3 and v.shape == v_other.shape, f"states differ: {v.shape} and {v_other.shape}")
    demand(v.dtype == v_other.dtype, "states must have one dtype")
    demand(
        s.shape == s_other.shape == v.shape[:2], f"s must be {v.shape[:2]}, got {s.shape} and {s_other.shape}"
    )
    heads, dim = v.shape[1:]
    threads = heads * -(-dim // max(16 // v.element_size(), dim // 32))
    demand(threads <= 1024, f"{heads} heads of {dim} need {threads} threads in a block")
