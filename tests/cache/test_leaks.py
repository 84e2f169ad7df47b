"""Two hundred calls later the pool, the process and the number of tensors are what they were after ten."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import psutil
import pytest
import torch
from hf_testkit import books, cache_keyword, greedy, join, make_cache, needs_cache, pad_left, prompt, tiny

pytestmark = [needs_cache, pytest.mark.filterwarnings("default")]


def num_tensors() -> int:
    gc.collect()
    return sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects())


def by_generate(cache: Any, model: Any, ids: torch.Tensor) -> None:
    with cache.attached(model):
        greedy(model, ids, 3)


def by_attached_batch(cache: Any, model: Any, ids: torch.Tensor) -> None:
    with cache.attached(model):
        model.generate(**pad_left([ids, ids[:, :5]]), max_new_tokens=2, num_beams=2, do_sample=False)


def by_session(cache: Any, model: Any, ids: torch.Tensor) -> None:
    with cache.session(ids) as past, torch.no_grad():
        model(ids[:, past.num_cached_tokens :], **{cache_keyword(model): past})


def by_failing_session(cache: Any, model: Any, ids: torch.Tensor) -> None:
    try:
        with cache.session(ids) as past, torch.no_grad():
            model(ids[:, past.num_cached_tokens :], **{cache_keyword(model): past})
            raise ZeroDivisionError
    except ZeroDivisionError:
        pass


def by_bypass(cache: Any, model: Any, ids: torch.Tensor) -> None:
    with cache.attached(model):
        greedy(model, ids, 2, use_cache=False)


def by_pin(cache: Any, model: Any, ids: torch.Tensor) -> None:
    with cache.pin(ids[0]):
        cache.match_length(ids[0])


@pytest.mark.parametrize(
    "use",
    [by_generate, by_attached_batch, by_session, by_failing_session, by_bypass, by_pin],
    ids=lambda f: f.__name__,
)
def test_nothing_grows(use: Callable[..., None]) -> None:
    model = tiny()
    cache = make_cache(model, num_blocks=24)

    def calls(start: int, stop: int) -> tuple[int, int]:
        for i in range(start, stop):
            use(cache, model, join(prompt(6), prompt(10, seed=i % 17)))
            books(cache)
        return num_tensors(), psutil.Process().memory_info().rss

    calls(0, 30)
    tensors, memory = calls(30, 40)
    tensors_later, memory_later = calls(40, 240 if use in (by_generate, by_session) else 100)
    assert tensors_later <= tensors + 2
    assert memory_later - memory < 16 << 20


def test_results_that_are_kept_do_not_pin_the_pool() -> None:
    """`return_dict_in_generate` hands the cache object out; people keep such results in lists."""
    model = tiny()
    cache = make_cache(model, num_blocks=12)
    kept = []
    with cache.attached(model):
        for i in range(30):
            ids = join(prompt(6), prompt(10, seed=i))
            kept.append(
                model.generate(
                    ids, max_new_tokens=4, do_sample=False, return_dict_in_generate=True, output_scores=True
                )
            )
            books(cache)
        greedy(model, join(prompt(6), prompt(10, seed=29)))
        assert cache.last_requests[0].hit_tokens == 15
    assert len(kept) == 30
    cache.clear()
    assert cache.num_free_blocks == cache.num_blocks


def test_loops_that_are_kept_do_not_pin_the_pool_after_detach() -> None:
    model = tiny()
    cache = make_cache(model, num_blocks=12)
    kept = []
    with cache.attached(model), torch.no_grad():
        for i in range(10):
            kept.append(model(join(prompt(6), prompt(10, seed=i)), use_cache=True))
    books(cache)
    assert len(kept) == 10


def test_the_pool_is_the_only_large_thing_that_stays() -> None:
    """A long prompt through a session: its working memory goes with it."""
    model = tiny("llama", max_position_embeddings=8192)
    cache = make_cache(model, num_blocks=4, block_size=16)
    ids = prompt(3000)

    def tensor_bytes() -> int:
        gc.collect()
        sizes = {
            thing.untyped_storage().data_ptr(): thing.untyped_storage().nbytes()
            for thing in gc.get_objects()
            if isinstance(thing, torch.Tensor) and thing.device.type == "cpu"
        }
        return sum(sizes.values())

    before = tensor_bytes()
    with cache.attached(model):
        greedy(model, ids, 2)
    with cache.session(ids) as past, torch.no_grad():
        model(ids[:, past.num_cached_tokens :], **{cache_keyword(model): past})
    del past
    assert tensor_bytes() - before < 64 << 10
    books(cache)
