"""Gemma 3 270M with its real weights: a window of 512 tokens, prompts longer than that, hits at several places."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hf_testkit import books, expect_hits, greedy, join, make_cache, pad_left, same, twin

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default"), pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def gemma() -> Any:
    from radixkv.demo.weights import load_gemma

    loaded = load_gemma()
    model = loaded[0] if isinstance(loaded, tuple) else loaded
    return model.float().eval()


@pytest.fixture(scope="module")
def reference(gemma: Any) -> Any:
    return twin(gemma)


def words(length: int, seed: int = 0) -> torch.Tensor:
    """Frequent pieces of the vocabulary, at random: long enough to cross the window, with no special ids."""
    generator = torch.Generator().manual_seed(seed)
    return join(torch.tensor([[2]]), torch.randint(500, 20_000, (1, length - 1), generator=generator))


def test_hits_before_at_and_after_the_window(gemma: Any, reference: Any) -> None:
    cache = make_cache(gemma, block_size=16, num_tokens=8192)
    base = words(700)
    with cache.attached(gemma):
        same(greedy(gemma, base, 6), greedy(reference, base, 6))
        for cut in (30, 300, 511, 512, 513, 600, 699):
            other = join(base[:, :cut], (base[:, cut : cut + 1] + 7), words(40, seed=cut)[:, 1:])
            same(greedy(gemma, other, 6), greedy(reference, other, 6))
            expect_hits(cache, cut)
            books(cache)
        same(greedy(gemma, base, 6), greedy(reference, base, 6))
        expect_hits(cache, 699)
    books(cache)


def test_a_chat_that_grows_past_the_window(gemma: Any, reference: Any) -> None:
    cache = make_cache(gemma, block_size=16, num_tokens=8192)
    chat, known = words(480), 0
    with cache.attached(gemma):
        for turn in range(3):
            answered = greedy(gemma, chat, 20)
            same(answered, greedy(reference, chat, 20))
            expect_hits(cache, known)
            known = answered.shape[1] - 1 if answered[0, -1] not in (1, 106) else None
            chat = join(answered, words(21, seed=turn)[:, 1:])
            if known is None:
                known = answered.shape[1] - 1
    books(cache)


def test_a_left_padded_batch(gemma: Any, reference: Any) -> None:
    cache = make_cache(gemma, block_size=16, num_tokens=8192)
    shared = words(560)
    batch = pad_left([join(shared, words(9 + 20 * i, seed=i)[:, 1:]) for i in range(3)] + [words(40, seed=9)])
    expected = reference.generate(**batch, max_new_tokens=5, do_sample=False)
    with cache.attached(gemma):
        for _ in range(2):
            same(gemma.generate(**batch, max_new_tokens=5, do_sample=False), expected)
    expect_hits(cache, 560 + 8 - 1, 560 + 28 - 1, 560 + 48 - 1, 39)
    books(cache)
