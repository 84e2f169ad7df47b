"""What the kernels compute, in float64, and how fa2 splits long contexts."""

from __future__ import annotations

import math

import torch


def paged_positions(pool, pages, length):
    """`[length, heads, dim]` of a request."""
    return pool[pages.long()].flatten(0, 1)[:length]


def attend(q, key, value, scale, soft_cap, causal, window_left):
    """`[n, Hq, D]` over `[m, Hkv, D]`: output, and log-sum-exp in base 2, float64."""
    n, heads, dim = q.shape
    m, kv_heads, _ = key.shape
    logits = torch.einsum(
        "nhgd,mhd->hgnm", q.double().view(n, kv_heads, heads // kv_heads, dim), key.double()
    )
    logits = logits * scale
    if soft_cap is not None:
        logits = soft_cap * torch.tanh(logits / soft_cap)
    # The last query lines up with the last key, with a causal mask or without.
    row = torch.arange(m - n, m)[:, None]
    column = torch.arange(m)[None]
    seen = torch.ones(n, m, dtype=torch.bool)
    if causal:
        seen &= column <= row
    if window_left >= 0:
        seen &= column >= row - window_left
    logits = logits.masked_fill(~seen, -math.inf)
    lse = torch.logsumexp(logits, -1, keepdim=True)
    # A masked key is read and multiplied by 0 only in a window; there the caller has seen that all are finite.
    value = value.double().masked_fill(~seen.any(0)[:, None, None], 0)
    out = torch.einsum("hgnm,mhd->nhgd", (logits - lse).exp(), value)
    return out.reshape(n, heads, -1), (lse[..., 0] / math.log(2)).permute(2, 0, 1).reshape(n, heads)


def merge_pair(v_a, s_a, v_b, s_b):
    """Both states together, as the cascade kernels have it: base 2."""
    s_a, s_b = s_a.double(), s_b.double()
    top = torch.maximum(s_a, s_b)
    a, b = torch.exp2(s_a - top), torch.exp2(s_b - top)
    merged = (a / (a + b))[..., None] * v_a.double() + (b / (a + b))[..., None] * v_b.double()
    return merged.to(v_a.dtype), (torch.log2(a + b) + top).float()


def workspace_bytes(packed, pages, page_size, window_left, num_qo_heads, num_kv_heads, head_dim, num_sms):
    """Bytes of the float workspace that fa2's plan takes: `PrefillPlan` in scheduler.cuh."""
    packed, pages = packed.tolist(), pages.tolist()
    mean = sum(packed) // len(packed)
    tile = 128 if mean > 64 and head_dim < 256 else 64 if mean > 16 else 16
    if window_left >= 0:
        pages = [min(-(-(window_left + tile) // page_size), count) for count in pages]
    most = 2 * num_sms // num_kv_heads
    low, high = max(128 // page_size, 1), max([1, *pages])
    longest = high

    def blocks(chunk):
        return sum(
            -(-rows // tile) * -(-max(count, 1) // chunk) for rows, count in zip(packed, pages, strict=True)
        )

    while low < high:
        middle = (low + high) // 2
        if blocks(middle) > most:
            low = middle + 1
        else:
            high = middle
    if low >= longest:
        return 0
    return num_qo_heads * blocks(low) * tile * (head_dim + 1) * 4


def graph_workspace_bytes(batch, num_qo_heads, num_kv_heads, head_dim, num_sms):
    """The same in a CUDA graph of so many decodes: the launch is padded to the most it may be."""
    group = num_qo_heads // num_kv_heads
    tile = 128 if group > 64 and head_dim < 256 else 64 if group > 16 else 16
    tiles = -(-batch * group // tile) + batch - 1
    blocks = max(2 * num_sms // num_kv_heads, tiles)
    return num_qo_heads * blocks * tile * (head_dim + 1) * 4


def graph_plan_bytes(batch, num_qo_heads, num_kv_heads, head_dim, num_sms, tensor_cores):
    """What the plan of such a launch takes, array by array as `PrefillPlan` and `DecodePlan` allocate them."""
    group = num_qo_heads // num_kv_heads
    tile = 128 if group > 64 and head_dim < 256 else 64 if group > 16 else 16
    if tensor_cores:
        padded = max(2 * num_sms // num_kv_heads, -(-batch * group // tile) + batch - 1)
        sizes = [4 * padded] * 3 + [4 * (batch + 1), 4, 4, 4 * (batch + 1), padded]
    else:
        padded = max(batch, 16 * num_sms // num_kv_heads)
        sizes = [4 * padded, 4 * padded, 4 * (padded + 1), 4, padded]
    return sum(-(-size // 16) * 16 for size in sizes)
