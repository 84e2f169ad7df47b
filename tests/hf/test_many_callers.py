"""FC-43: one attached model and one cache, used from several threads."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hf_testkit import (
    NULL,
    books,
    both_ways,
    cache_keyword,
    expect_same,
    expect_totals,
    greedy,
    join,
    make_cache,
    pad_left,
    prompt,
    same,
    tiny,
    twin,
)

pytestmark = pytest.mark.filterwarnings("default")

THREADS = 8


def together(jobs: list[Callable[[], Any]]) -> list[Any]:
    """Run all jobs on `THREADS` threads that start at the same moment; the first error is raised here."""
    barrier = threading.Barrier(THREADS)

    def work(first: int) -> list[tuple[int, Any]]:
        torch.set_num_threads(1)
        barrier.wait()
        return [(i, jobs[i]()) for i in range(first, len(jobs), THREADS)]

    with ThreadPoolExecutor(THREADS) as pool:
        results = dict(pair for part in pool.map(work, range(THREADS)) for pair in part)
    return [results[i] for i in range(len(jobs))]


PROMPTS = [join(prompt(10 + 3 * (i % 3)), prompt(5, seed=i % 10)) for i in range(32)]


@both_ways
@pytest.mark.parametrize("num_blocks", [256, 12])
@pytest.mark.parametrize("arch", ["llama_gqa", "gemma3"])
def test_generate_from_eight_threads(arch: str, num_blocks: int) -> None:
    """With room for all and with a pool that evicts all the time."""
    model = tiny(arch)
    reference = twin(model)
    expected = [greedy(reference, ids, 5) for ids in PROMPTS]
    cache = make_cache(model, num_blocks=num_blocks)
    with cache.attached(model):
        got = together([lambda ids=ids: greedy(model, ids, 5) for ids in PROMPTS])
    for mine, theirs in zip(got, expected, strict=True):
        same(mine, theirs)
    books(cache)
    expect_totals(cache)
    assert NULL or cache.stats.requests == len(PROMPTS)
    for ids in PROMPTS[:6]:
        expect_same(cache, model, lambda m, ids=ids: greedy(m, ids, 5), reference)


@both_ways
def test_sessions_batches_and_generate_mixed() -> None:
    model = tiny()
    reference = twin(model)
    keyword = cache_keyword(model)
    cache = make_cache(model, num_blocks=64)

    def by_session(ids: torch.Tensor) -> torch.Tensor:
        with cache.session(ids) as past, torch.no_grad():
            current = ids[:, past.num_cached_tokens :]
            tokens = []
            for _ in range(5):
                current = model(current, **{keyword: past}).logits[:, -1:].argmax(-1)
                tokens.append(current)
        return join(ids, *tokens)

    def by_batch(ids: torch.Tensor) -> torch.Tensor:
        batch = pad_left([ids, ids[:, :7]])
        return model.generate(**batch, max_new_tokens=5, do_sample=False)[:1]

    kinds = [by_session, by_batch, lambda ids: greedy(model, ids, 5)]
    expected = [greedy(reference, ids, 5) for ids in PROMPTS]
    with cache.attached(model):
        got = together([lambda i=i, ids=ids: kinds[i % 3](ids) for i, ids in enumerate(PROMPTS)])
    for mine, theirs in zip(got, expected, strict=True):
        same(mine, theirs)
    books(cache)


def test_pins_looks_and_clears_in_between() -> None:
    """Callers that look, pin, reset and clear while others generate."""
    if NULL:
        pytest.skip("about the cache itself")
    from radixkv import errors

    model = tiny()
    reference = twin(model)
    cache = make_cache(model, num_blocks=64)
    expected = [greedy(reference, ids, 4) for ids in PROMPTS]

    def generate(i: int) -> bool:
        return greedy(model, PROMPTS[i], 4).tolist() == expected[i].tolist()

    def look(i: int) -> bool:
        tokens = PROMPTS[i][0]
        assert 0 <= cache.match_length(tokens) <= len(tokens)
        with cache.pin(tokens) as lease:
            assert lease.num_tokens <= len(tokens)
            cache.check()
        assert cache.stats.hit_tokens >= 0
        return True

    def clear(i: int) -> bool:
        with contextlib.suppress(errors.InvalidRequestError):  # FC-40: somebody holds blocks
            cache.clear()
        cache.check()
        return True

    jobs = [generate, look, generate, clear]
    with cache.attached(model):
        assert all(together([lambda i=i: jobs[i % 4](i) for i in range(len(PROMPTS))]))
    books(cache)


def test_namespaces_in_two_threads_never_mix() -> None:
    """Two models of the same shape, each with its own cache, and sessions of two namespaces on one cache."""
    model = tiny()
    reference = twin(model)
    keyword = cache_keyword(model)
    cache = make_cache(model)

    def job(i: int) -> torch.Tensor:
        ids = PROMPTS[i]
        with cache.session(ids, namespace=("tenant", str(i % 2))) as past, torch.no_grad():
            return model(ids[:, past.num_cached_tokens :], **{keyword: past}).logits[:, -1].argmax(-1)

    got = together([lambda i=i: job(i) for i in range(len(PROMPTS))])
    for ids, token in zip(PROMPTS, got, strict=True):
        same(token, reference(ids).logits[:, -1].argmax(-1))
    books(cache)
    assert NULL or cache.match_length(PROMPTS[0][0]) == 0
