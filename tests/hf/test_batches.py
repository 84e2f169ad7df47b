"""Batches with left padding: every row has its own hit, and a cold batch computes each prefix once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hf_testkit import (
    ARCHS,
    EOS,
    MAIN_ARCHS,
    NULL,
    both_ways,
    count_tokens,
    distinct_tokens,
    expect_hits,
    expect_same,
    greedy,
    join,
    make_cache,
    pad_left,
    prompt,
    rows,
    same,
    tiny,
    twin,
)

pytestmark = pytest.mark.filterwarnings("default")


def batch_greedy(model: Any, batch: dict[str, torch.Tensor], n: int = 6, **kwargs: Any) -> torch.Tensor:
    return model.generate(**batch, max_new_tokens=n, do_sample=False, **kwargs)


@both_ways
@pytest.mark.parametrize("arch", ARCHS)
def test_rows_that_hit_differently(arch: str) -> None:
    """One row wholly cached, one in part, one not at all, one a single token; with different padding each."""
    model = tiny(arch)
    reference = twin(model)
    cache = make_cache(model)
    known, other = prompt(18), prompt(12, seed=1)
    with cache.attached(model):
        greedy(model, known)
        greedy(model, other)
    prompts = [
        join(known[:, :11], prompt(9, seed=2)),
        known,
        prompt(15, seed=3),
        other[:, :1],
        other[:, :9],
        join(known, prompt(7, seed=4)),
    ]
    batch = pad_left(prompts)
    expect_same(cache, model, lambda m: batch_greedy(m, batch), reference)
    expect_hits(cache, 11, 17, 0, 0, 8, 18)
    expect_same(cache, model, lambda m: batch_greedy(m, batch), reference)
    expect_hits(cache, *(row.shape[1] - 1 for row in prompts))
    for row in prompts:  # a row of a padded batch is good for the same prompt alone
        expect_same(cache, model, lambda m, ids=row: greedy(m, ids), reference)
        expect_hits(cache, row.shape[1] - 1)


@pytest.mark.parametrize("arch", MAIN_ARCHS)
def test_rows_alone_and_in_any_company(arch: str) -> None:
    model = tiny(arch)
    reference = twin(model)
    cache = make_cache(model)
    prompts = [join(prompt(10), prompt(3 * i + 1, seed=i)) for i in range(5)] + [prompt(2, seed=9)]
    orders = [(0, 1), (3, 2, 1), (5, 4), (4, 3, 2, 1, 0, 5), (5,), (0, 0, 5, 5)]
    for width_more, order in enumerate(orders):
        chosen = [prompts[i] for i in order]
        batch = pad_left(chosen, max(row.shape[1] for row in chosen) + width_more)
        expect_same(cache, model, lambda m, b=batch: batch_greedy(m, b), reference)


@pytest.mark.parametrize("arch", MAIN_ARCHS)
def test_a_cold_batch_computes_each_prefix_once(arch: str) -> None:
    """Eight rows of the same length: shared tokens once, own tokens once each."""
    model = tiny(arch)
    reference = twin(model)
    cache = make_cache(model)
    shared = prompt(24)
    prompts = [join(shared, torch.tensor([[10 + i]]), prompt(5, seed=i)) for i in range(8)]
    batch = {"input_ids": torch.cat(prompts), "attention_mask": torch.ones(8, 30, dtype=torch.long)}
    expected = batch_greedy(reference, batch)
    with cache.attached(model), count_tokens(model) as counts:
        same(batch_greedy(model, batch), expected)
    if NULL:
        return
    prefill = sum(counts) - 8 * 5
    assert distinct_tokens(prompts) == 24 + 8 * 6
    assert prefill == distinct_tokens(prompts)
    rows(cache)
    assert cache.stats.computed_tokens == prefill, "FC-35: computed is what was really run"
    assert cache.stats.requests == 8
    assert cache.stats.prompt_tokens == 8 * 30

    with cache.attached(model), count_tokens(model) as counts:
        same(batch_greedy(model, batch), expected)
    assert sum(counts) == 8 + 8 * 5
    expect_hits(cache, *[29] * 8)


@both_ways
@pytest.mark.parametrize("arch", MAIN_ARCHS)
def test_a_cold_batch_of_several_families(arch: str) -> None:
    """Prefixes shared on two levels, with rows that are prefixes of others and duplicates."""
    model = tiny(arch)
    reference = twin(model)
    cache = make_cache(model)
    root = prompt(12)
    left, right = join(root, prompt(9, seed=1)), join(root, prompt(9, seed=2))
    prompts = [
        join(left, prompt(4, seed=3)),
        join(left, prompt(4, seed=4)),
        join(right, prompt(4, seed=5)),
        right,
        root,
        join(left, prompt(4, seed=3)),
        prompt(10, seed=6),
        prompt(10, seed=6),
    ]
    batch = pad_left(prompts)
    expected = batch_greedy(reference, batch)
    with cache.attached(model), count_tokens(model) as counts:
        same(batch_greedy(model, batch), expected)
    if NULL:
        return
    prefill = sum(counts) - len(prompts) * 5
    # The last token of every row goes through the model; ragged suffixes may be padded to the longest of them.
    padding = sum(max(row.shape[1] for row in prompts) - row.shape[1] for row in prompts)
    assert prefill <= distinct_tokens(prompts) + len(prompts) + padding
    assert prefill < sum(row.shape[1] for row in prompts)
    rows(cache)
    for row in prompts:
        expect_same(cache, model, lambda m, ids=row: greedy(m, ids), reference)
        expect_hits(cache, row.shape[1] - 1)


@both_ways
@pytest.mark.parametrize("arch", MAIN_ARCHS)
def test_duplicates_only(arch: str) -> None:
    model = tiny(arch)
    reference = twin(model)
    cache = make_cache(model)
    ids = prompt(20).repeat(5, 1)
    expected = greedy(reference, ids)
    with cache.attached(model), count_tokens(model) as counts:
        same(greedy(model, ids), expected)
    assert NULL or sum(counts) <= 20 + 5 + 5 * 7
    expect_same(cache, model, lambda m: greedy(m, ids[:1]), reference)
    expect_hits(cache, 19)


@both_ways
@pytest.mark.parametrize("arch", MAIN_ARCHS)
def test_rows_that_stop_early_leave_true_tokens_only(arch: str) -> None:
    """Finished rows are fed pads with mask 1: nothing behind the first end token may be taken for an answer."""
    model = tiny(arch, eos=True)
    reference = twin(model)
    cache = make_cache(model, num_blocks=1024)
    prompts = [prompt(5 + i, seed=i) for i in range(10)]
    batch = pad_left(prompts)
    answered = expect_same(cache, model, lambda m: batch_greedy(m, batch, 40), reference)
    lengths = []
    for given, row in zip(prompts, answered, strict=True):
        new = row[batch["input_ids"].shape[1] :].tolist()
        new = new[: new.index(EOS) + 1] if EOS in new else new
        lengths.append(len(new))
        chat = join(given, torch.tensor([new]), prompt(4, seed=77))
        expect_same(cache, model, lambda m, ids=chat: greedy(m, ids, 4), reference)
        if not NULL:
            hit = rows(cache)[0][1]
            assert hit - given.shape[1] - len(new) in (-1, 0)
        # The same answer with pads behind it, as a client may send it back by mistake.
        padded = join(given, torch.tensor([[*new, 0, 0, 0]]), prompt(2, seed=78))
        mask = torch.ones_like(padded)
        expect_same(
            cache,
            model,
            lambda m, ids=padded, mask=mask: m.generate(
                ids, attention_mask=mask, max_new_tokens=4, do_sample=False
            ),
            reference,
        )
    assert len(set(lengths)) > 1, "all rows stop together: the test shows nothing"


def test_a_pad_id_inside_the_prompt_makes_a_hole_in_the_inferred_mask() -> None:
    """`generate()` infers the mask from the pad id: with and without the hole these are two different texts."""
    model = tiny()
    reference = twin(model)
    cache = make_cache(model)
    ids = prompt(16)
    ids[0, 6] = 0
    full = torch.ones_like(ids)
    for _ in range(2):
        expect_same(cache, model, lambda m: m.generate(ids, max_new_tokens=8, do_sample=False), reference)
        expect_same(cache, model, lambda m: greedy(m, ids, attention_mask=full), reference)


@pytest.mark.parametrize("arch", MAIN_ARCHS)
def test_a_prompt_that_starts_with_the_pad_id(arch: str) -> None:
    """Left padding and a real first token 0 look alike in the ids and differ in the mask."""
    model = tiny(arch)
    reference = twin(model)
    cache = make_cache(model)
    ids = join(torch.zeros(1, 3, dtype=torch.long), prompt(12))
    masked = torch.tensor([[0, 0, 0] + [1] * 12])
    for _ in range(2):
        expect_same(cache, model, lambda m: greedy(m, ids, attention_mask=torch.ones_like(ids)), reference)
        expect_same(cache, model, lambda m: greedy(m, ids, attention_mask=masked), reference)
        expect_same(cache, model, lambda m: m.generate(ids, max_new_tokens=8, do_sample=False), reference)


def test_a_bool_or_float_mask() -> None:
    model = tiny()
    reference = twin(model)
    cache = make_cache(model)
    batch = pad_left([prompt(9), prompt(14, seed=1)])
    expected = batch_greedy(reference, batch)
    for dtype in (torch.bool, torch.int32, torch.float32):
        other = {**batch, "attention_mask": batch["attention_mask"].to(dtype)}
        with cache.attached(model):
            same(batch_greedy(model, other), expected)


@both_ways
def test_a_row_of_padding_only() -> None:
    """Not sensible, but no reason to fail where transformers does not, nor to touch the other rows."""
    model = tiny()
    reference = twin(model)
    cache = make_cache(model)
    batch = pad_left([prompt(9), prompt(9, seed=1)])
    batch["attention_mask"][0] = 0
    expected = batch_greedy(reference, batch)
    with cache.attached(model):
        same(batch_greedy(model, batch)[1], expected[1])
    expect_same(cache, model, lambda m: greedy(m, prompt(9)), reference)
    expect_same(cache, model, lambda m: greedy(m, prompt(9, seed=1)), reference)
