"""Merging parts of a softmax against the softmax over all of it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from radixkv.attention.merge import apply_sinks, merge_in_place, merge_states
from radixkv.core.errors import InvalidRequestError


def attend(logits, values):
    """`[rows, heads, keys]` and `[keys, heads, dim]` -> output and log-sum-exp; no keys give NaN and -inf."""
    lse = torch.logsumexp(logits, -1)
    out = torch.einsum("rhk,khd->rhd", torch.exp(logits - lse[..., None]), values)
    return (out if logits.shape[-1] else torch.full_like(out, float("nan"))), lse


def parts(sizes, spread=3.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(5, 3, sum(sizes), generator=generator, dtype=torch.float64) * spread
    values = torch.randn(sum(sizes), 3, 4, generator=generator, dtype=torch.float64)
    cut = [attend(a, b) for a, b in zip(logits.split(sizes, -1), values.split(sizes), strict=True)]
    return cut, attend(logits, values)


@given(
    st.lists(st.integers(0, 6), min_size=1, max_size=5),
    st.sampled_from([0.1, 3.0, 300.0]),
    st.integers(0, 9),
)
def test_parts_merged_equal_the_whole(sizes, spread, seed):
    cut, (whole, whole_lse) = parts(sizes, spread, seed)
    out, lse = cut[0]
    for part in cut[1:]:
        out, lse = merge_states(out, lse, *part)
    if not sum(sizes):
        assert (lse == float("-inf")).all()
        assert len(sizes) == 1 or (out == 0).all()
        return
    torch.testing.assert_close(lse, whole_lse)
    torch.testing.assert_close(out, whole)


@given(st.lists(st.integers(1, 6), min_size=2, max_size=5), st.sampled_from([0.1, 3.0, 300.0]))
def test_merging_in_place_equals_the_whole(sizes, spread):
    cut, (whole, _) = parts(sizes, spread)
    out, lse = (tensor.clone() for tensor in cut[0])
    for number, part in enumerate(cut[1:]):
        before = lse.clone()
        last = number == len(cut) - 2
        merge_in_place(out, lse, *part, last=last)
        if last:  # nobody reads it again: it is left alone
            assert torch.equal(lse, before)
    torch.testing.assert_close(out, whole)


def test_a_part_that_saw_no_key_changes_nothing():
    cut, _ = parts([4])
    (out, lse), hidden = cut[0], torch.full((5, 3), -1e30, dtype=torch.float64)
    merged, merged_lse = out.clone(), lse.clone()
    merge_in_place(merged, merged_lse, torch.ones_like(out), hidden)
    assert torch.equal(merged, out)
    assert torch.equal(merged_lse, lse)
    merged, merged_lse = torch.ones_like(out), hidden.clone()
    merge_in_place(merged, merged_lse, out, lse)
    assert torch.equal(merged, out)
    assert torch.equal(merged_lse, lse)


def test_half_precision_keeps_its_dtype():
    cut, (whole, _) = parts([3, 4])
    (out_a, lse_a), (out_b, lse_b) = ((out.bfloat16(), lse.float()) for out, lse in cut)
    out, lse = merge_states(out_a, lse_a, out_b, lse_b)
    assert out.dtype == torch.bfloat16
    assert lse.dtype == torch.float32
    torch.testing.assert_close(out.double(), whole, rtol=2e-2, atol=2e-2)


def test_sinks_are_keys_without_values():
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(5, 3, 7, generator=generator, dtype=torch.float64)
    values = torch.randn(7, 3, 4, generator=generator, dtype=torch.float64)
    sinks = torch.randn(3, generator=generator, dtype=torch.float64)
    with_sink = torch.cat([logits, sinks[:, None].expand(5, 3, 1)], -1)
    expected, _ = attend(with_sink, torch.cat([values, torch.zeros(1, 3, 4, dtype=torch.float64)]))
    out, lse = attend(logits, values)
    torch.testing.assert_close(apply_sinks(out, lse, sinks), expected)


def test_parts_of_different_shapes_are_refused():
    cut, _ = parts([2, 2])
    (out_a, lse_a), (out_b, lse_b) = cut
    for args in ((out_a[:2], lse_a, out_b, lse_b), (out_a, lse_a, out_b, lse_b[:, :1])):
        with pytest.raises(InvalidRequestError, match="one shape"):
            merge_states(*args)
