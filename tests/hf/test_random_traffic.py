"""Random prompts over a tiny alphabet in pools of any size: the tokens are always those of plain transformers."""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import torch
from hf_testkit import (
    NULL,
    books,
    cache_keyword,
    cache_of,
    close,
    expect_totals,
    greedy,
    make_cache,
    pad_left,
    same,
    tiny,
    twin,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from radixkv import errors

MODELS = {arch: tiny(arch) for arch in ("llama_gqa", "gemma3", "gpt2")}
TWINS = {arch: twin(model) for arch, model in MODELS.items()}

# RADIXKV_TEST_SEARCH=2000 looks at other examples in every run, and at so many.
SEARCH = int(os.environ.get("RADIXKV_TEST_SEARCH", "0"))

token = st.integers(3, 5)
text = st.lists(token, min_size=1, max_size=24).map(tuple)
ways = st.sampled_from(["contiguous", "paged"])
quick = settings(
    max_examples=SEARCH or 25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    derandomize=not SEARCH,
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
    way=ways,
    block_size=st.integers(1, 16),
    num_blocks=st.integers(1, 24),
    prompts=st.lists(text, min_size=2, max_size=8),
    n=st.integers(1, 6),
)
def test_one_prompt_at_a_time(
    arch: str, way: str, block_size: int, num_blocks: int, prompts: list[tuple[int, ...]], n: int
) -> None:
    """The pool may be smaller than the prompt, or evict at every call."""
    model = MODELS[arch]
    cache = make_cache(model, block_size=block_size, num_blocks=num_blocks, decode=way)
    with cache.attached(model):
        for ids in prompts:
            same(greedy(model, torch.tensor([ids]), n), right(arch, ids, n))
            books(cache)
    expect_totals(cache)


@quick
@given(
    arch=st.sampled_from(sorted(MODELS)),
    way=ways,
    block_size=st.integers(1, 16),
    num_blocks=st.integers(1, 40),
    batches=st.lists(st.lists(text, min_size=1, max_size=4).map(tuple), min_size=1, max_size=4),
    n=st.integers(1, 4),
)
def test_batches(
    arch: str, way: str, block_size: int, num_blocks: int, batches: list[tuple[tuple[int, ...], ...]], n: int
) -> None:
    model = MODELS[arch]
    cache = make_cache(model, block_size=block_size, num_blocks=num_blocks, decode=way)
    with cache.attached(model):
        for rows in batches:
            same(batch_greedy(model, rows, n), right_batch(arch, rows, n))
            books(cache)
    expect_totals(cache)


@quick
@given(
    way=ways,
    block_size=st.integers(1, 8),
    num_blocks=st.integers(2, 30),
    texts=st.lists(text, min_size=2, max_size=6),
    data=st.data(),
)
def test_sessions_that_end_anyhow(
    way: str, block_size: int, num_blocks: int, texts: list[tuple[int, ...]], data: Any
) -> None:
    """Sessions that overlap, are cut, fail or are left half fed."""
    arch = data.draw(st.sampled_from(sorted(MODELS)))
    model, reference = MODELS[arch], TWINS[arch]
    if NULL:
        return
    keyword = cache_keyword(model)
    cache = make_cache(model, block_size=block_size, num_blocks=num_blocks, decode=way)
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


MODES = (
    "greedy",
    "sample",
    "beams",
    "many",
    "lookup",
    "chunked",
    "assisted",
    "loop",
    "session",
    "bypass",
    "stopped",
)
ASSISTANT = tiny("llama_gqa", seed=9, num_hidden_layers=1)


def run_mode(model: Any, mode: str, ids: torch.Tensor, seed: int) -> torch.Tensor:
    """One call of a kind; the same for the plain model and for the attached one."""
    call: dict[str, Any] = dict(attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False)
    torch.manual_seed(seed)
    if mode == "loop":
        past, current, tokens = None, ids, []
        with torch.no_grad():
            for _ in range(4):
                out = model(current, use_cache=True, **{cache_keyword(model): past})
                past, current = cache_of(out), out.logits[:, -1:].argmax(-1)
                tokens.append(current)
        return torch.cat([ids, *tokens], 1)
    extra: dict[str, Any] = {
        "sample": dict(do_sample=True, temperature=2.0),
        "beams": dict(num_beams=3, num_return_sequences=2, eos_token_id=60),
        "many": dict(do_sample=True, temperature=2.0, num_return_sequences=3),
        "lookup": dict(prompt_lookup_num_tokens=3),
        "chunked": dict(prefill_chunk_size=1 + seed % 7),
        "assisted": dict(assistant_model=ASSISTANT),
        "bypass": dict(use_cache=False),
        "stopped": dict(eos_token_id=[3, 4, 10, 20, 30, 40]),
    }.get(mode, {})
    return model.generate(ids, **{**call, **extra})


@quick
@given(
    arch=st.sampled_from(sorted(MODELS)),
    way=ways,
    block_size=st.integers(1, 16),
    num_blocks=st.integers(1, 32),
    calls=st.lists(
        st.tuples(st.sampled_from(MODES), text, st.integers(0, 3), st.booleans()), min_size=2, max_size=8
    ),
)
def test_all_kinds_of_calls_mixed(
    arch: str, way: str, block_size: int, num_blocks: int, calls: list[Any]
) -> None:
    """Each call may go on from the answer of the one before it, as a chat does."""
    model, reference = MODELS[arch], TWINS[arch]
    if NULL:
        return
    cache = make_cache(model, block_size=block_size, num_blocks=num_blocks, decode=way)
    answered = torch.zeros(1, 0, dtype=torch.long)
    for mode, new, seed, go_on in calls:
        if arch == "gemma3" and mode == "assisted":
            mode = "lookup"  # some versions of transformers cannot cut a sliding window
        ids = torch.tensor([new])
        if go_on:
            ids = torch.cat([answered, ids], 1)[:, -60:]
        try:
            expected = run_mode(reference, "greedy" if mode == "session" else mode, ids, seed)
        except Exception:  # plain transformers fails: nothing to compare with
            continue
        if mode == "session":
            try:
                with cache.session(ids) as past:
                    keyword = {cache_keyword(model): past}
                    got = greedy(model, ids, 4, **keyword)
            except (errors.OutOfBlocksError, errors.InvalidRequestError):
                assert ids.shape[1] > num_blocks * block_size, "refused although the pool has room"
                continue
        else:
            with cache.attached(model):
                got = run_mode(model, mode, ids, seed)
        same(got, expected)
        books(cache)
        answered = expected[:1]
    expect_totals(cache)
