"""Random prompts over a tiny alphabet in pools of any size: the tokens are always those of plain transformers."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from hf_testkit import books, expect_totals, greedy, make_cache, pad_left, same, tiny, twin
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

MODELS = {arch: tiny(arch) for arch in ("llama_gqa", "gemma3", "gpt2")}
TWINS = {arch: twin(model) for arch, model in MODELS.items()}

token = st.integers(3, 5)
text = st.lists(token, min_size=1, max_size=24).map(tuple)
quick = settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    derandomize=True,
)


@cache
def right(arch: str, ids: tuple[int, ...], n: int) -> torch.Tensor:
    return greedy(TWINS[arch], torch.tensor([ids]), n)


@cache
def right_batch(arch: str, rows: tuple[tuple[int, ...], ...], n: int) -> torch.Tensor:
    return batch_greedy(TWINS[arch], rows, n)


def batch_greedy(model: Any, rows: tuple[tuple[int, ...], ...], n: int) -> torch.Tensor:
    return model.generate(
        **pad_left([torch.tensor([row]) for row in rows]), max_new_tokens=n, do_sample=False
    )


@quick
@given(
    arch=st.sampled_from(sorted(MODELS)),
    block_size=st.integers(1, 16),
    num_blocks=st.integers(1, 24),
    prompts=st.lists(text, min_size=2, max_size=8),
    n=st.integers(1, 6),
)
def test_one_prompt_at_a_time(
    arch: str, block_size: int, num_blocks: int, prompts: list[tuple[int, ...]], n: int
) -> None:
    """The pool may be smaller than the prompt, or evict at every call."""
    model = MODELS[arch]
    cache = make_cache(model, block_size=block_size, num_blocks=num_blocks)
    with cache.attached(model):
        for ids in prompts:
            same(greedy(model, torch.tensor([ids]), n), right(arch, ids, n))
            books(cache)
    expect_totals(cache)


@quick
@given(
    arch=st.sampled_from(sorted(MODELS)),
    block_size=st.integers(1, 16),
    num_blocks=st.integers(1, 40),
    batches=st.lists(st.lists(text, min_size=1, max_size=4).map(tuple), min_size=1, max_size=4),
    n=st.integers(1, 4),
)
def test_batches(
    arch: str, block_size: int, num_blocks: int, batches: list[tuple[tuple[int, ...], ...]], n: int
) -> None:
    model = MODELS[arch]
    cache = make_cache(model, block_size=block_size, num_blocks=num_blocks)
    with cache.attached(model):
        for rows in batches:
            same(batch_greedy(model, rows, n), right_batch(arch, rows, n))
            books(cache)
    expect_totals(cache)


@quick
@given(
    block_size=st.integers(1, 8),
    num_blocks=st.integers(2, 30),
    texts=st.lists(text, min_size=2, max_size=6),
    data=st.data(),
)
def test_sessions_that_end_anyhow(
    block_size: int, num_blocks: int, texts: list[tuple[int, ...]], data: Any
) -> None:
    """Sessions that overlap, are cut, fail or are left half fed."""
    arch = data.draw(st.sampled_from(sorted(MODELS)))
    model, reference = MODELS[arch], TWINS[arch]
    from hf_testkit import NULL, cache_keyword, close

    if NULL:
        return
    from radixkv import errors

    keyword = cache_keyword(model)
    cache = make_cache(model, block_size=block_size, num_blocks=num_blocks)
    for given_ids in texts:
        ids = torch.tensor([given_ids])
        ending = data.draw(st.sampled_from(["well", "error", "half fed", "cut"]))
        try:
            with cache.session(ids) as past, torch.no_grad():
                n = past.num_cached_tokens
                assert n < ids.shape[1]
                stop = data.draw(st.integers(n + 1, ids.shape[1])) if ending == "half fed" else ids.shape[1]
                got = model(ids[:, n:stop], **{keyword: past}).logits[:, -1]
                close(got, reference(ids[:, :stop]).logits[:, -1])
                if ending == "error":
                    raise ZeroDivisionError
                if ending == "cut":
                    back = data.draw(st.integers(1, min(3, ids.shape[1])))
                    past.crop(-back)
                    again = ids[:, ids.shape[1] - back :]
                    close(model(again, **{keyword: past}).logits[:, -1], got)
        except ZeroDivisionError:
            assert ending == "error"
        except (errors.OutOfBlocksError, errors.InvalidRequestError):
            assert ids.shape[1] > num_blocks * block_size, "refused although the pool has room"
        books(cache)
        cache.check()
    with cache.attached(model):
        for given_ids in texts:
            same(greedy(model, torch.tensor([given_ids]), 3), right(arch, given_ids, 3))
    books(cache)
