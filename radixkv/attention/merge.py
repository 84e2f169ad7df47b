"""Attention over parts of a context, put together by the log-sum-exp of each part.

Source: Dao et al., FlashAttention, 2022, section 3.1 (arXiv:2205.14135); the use for shared prefixes is that of
Ye et al., Cascade Inference, 2024 (FlashInfer's blog).
"""

from __future__ import annotations

import torch
from torch import Tensor

from radixkv.core.errors import InvalidRequestError

__all__ = ["apply_sinks", "merge_in_place", "merge_states"]


def merge_states(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Combine attention over two disjoint parts of a context, such as prefix and suffix.

    A part without keys has a log-sum-exp of minus infinity and any output, NaN included; it changes nothing.

    Args:
        out_a: `[..., head_dim]`, attention over the first part.
        lse_a: `[...]`, natural log of its softmax denominator. FlashInfer's kernels use base 2: multiply
            theirs by `ln 2`.
        out_b: Like `out_a`, over the second part.
        lse_b: Like `lse_a`.

    Returns:
        Output in the dtype of `out_a` and log-sum-exp of both parts together. Two empty parts give 0 and
        minus infinity.

    Raises:
        InvalidRequestError: Shapes differ; the message gives all.
    """
    if out_a.shape != out_b.shape or not lse_a.shape == lse_b.shape == out_a.shape[:-1]:
        raise InvalidRequestError(
            f"parts to merge must have one shape: outputs {tuple(out_a.shape)} and {tuple(out_b.shape)}, "
            f"log-sum-exps {tuple(lse_a.shape)} and {tuple(lse_b.shape)}"
        )
    lse = torch.logaddexp(lse_a, lse_b)
    merged = torch.zeros_like(out_a, dtype=torch.promote_types(out_a.dtype, lse.dtype))
    for out, part in ((out_a, lse_a), (out_b, lse_b)):
        empty = part == float("-inf")
        # `part - lse` is NaN if both parts are empty, and NaN times 0 is NaN.
        weight = torch.where(empty, 0, torch.exp(part - lse)).unsqueeze(-1)
        merged += torch.where(empty.unsqueeze(-1), 0, weight * out)
    return merged.to(out_a.dtype), lse


def merge_in_place(
    out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor, *, last: bool = False
) -> None:
    """Merge another part into `out` and `lse`, in four calls and without checks: the backends' inner loop.

    Args:
        out: `[..., head_dim]`, overwritten; a floating dtype that can hold the sum (not half precision).
        lse: `[...]`, finite, overwritten unless `last`.
        part_out: Like `out`, finite.
        part_lse: Like `lse`. Hugely negative instead of minus infinity for a row that saw no key.
        last: No more parts follow, and nobody needs `lse`.
    """
    weight = torch.sigmoid(part_lse - lse)
    out.lerp_(part_out, weight.unsqueeze(-1))
    if not last:
        torch.logaddexp(lse, part_lse, out=lse)


def apply_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Let a logit without a value take its share of the softmax.

    Args:
        out: `[..., num_heads, head_dim]`, attention without sinks; overwritten.
        lse: `[..., num_heads]`.
        sinks: `[num_heads]`, one logit per head.

    Returns:
        `out`.
    """
    return out.mul_(torch.sigmoid(lse - sinks.to(lse.dtype)).unsqueeze(-1).to(out.dtype))
