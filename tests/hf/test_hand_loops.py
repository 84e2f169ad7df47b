"""Loops written by hand around `model(...)`, unchanged, with the cache attached."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hf_testkit import (
    MAIN_ARCHS,
    NULL,
    books,
    both_ways,
    cache_keyword,
    cache_of,
    close,
    count_tokens,
    expect_hits,
    expect_same,
    greedy,
    join,
    make_cache,
    pad_left,
    positions,
    prompt,
    same,
    tiny,
    twin,
)
from transformers import DynamicCache

pytestmark = pytest.mark.filterwarnings("default")


def loop(
    model: Any, ids: torch.Tensor, n: int = 6, start: Callable[[Any], Any] = lambda _: None, **first: Any
):
    """The usual loop; `first` is passed with every forward."""
    keyword = cache_keyword(model)
    past, current, tokens = start(model), ids, []
    with torch.no_grad():
        for _ in range(n):
            out = model(current, **{keyword: past}, **first)
            past = cache_of(out)
            current = out.logits[:, -1:].argmax(-1)
            tokens.append(current)
    return join(ids, *tokens)


LOOPS = {
    "none": dict(use_cache=True),
    "none, last logits": dict(logits_to_keep=1),
    "empty": dict(start=lambda _: DynamicCache()),
    "empty, use_cache": dict(start=lambda _: DynamicCache(), use_cache=True),
    "empty for the model": dict(start=lambda m: DynamicCache(config=m.config), use_cache=True),
    "empty, last logits": dict(start=lambda _: DynamicCache(), use_cache=True, logits_to_keep=1),
}


@pytest.mark.parametrize("arch", MAIN_ARCHS)
@pytest.mark.parametrize("kind", LOOPS)
def test_a_loop_gives_the_same_tokens(arch: str, kind: str) -> None:
    model = tiny(arch)
    reference = twin(model)
    cache = make_cache(model)
    how = LOOPS[kind]
    base = prompt(17)
    for i, ids in enumerate(
        [base, base, join(base, prompt(4, seed=1)), join(base[:, :10], prompt(5, seed=2))]
    ):
        expected = loop(reference, ids, **how)
        same(expected, greedy(reference, ids, 6))
        with cache.attached(model), count_tokens(model) as counts:
            same(loop(model, ids, **how), expected)
        expect_hits(cache, (0, 16, 17, 10)[i])
        assert NULL or sum(counts) == ids.shape[1] - (0, 16, 17, 10)[i] + 5
        books(cache)


@pytest.mark.parametrize("arch", MAIN_ARCHS)
def test_a_loop_feeds_the_cache_with_its_answer(arch: str) -> None:
    model = tiny(arch)
    reference = twin(model)
    cache = make_cache(model)
    with cache.attached(model):
        answered = loop(model, prompt(13), 10, use_cache=True)
    chat = join(answered, prompt(3, seed=1))
    expect_same(cache, model, lambda m: loop(m, chat, use_cache=True), reference)
    expect_hits(cache, 22)


@pytest.mark.parametrize("arch", MAIN_ARCHS)
def test_keyword_input_and_tuples(arch: str) -> None:
    model = tiny(arch)
    reference = twin(model)
    cache = make_cache(model)
    ids = prompt(17)
    with torch.no_grad():
        expected = reference(ids).logits[:, -1]
        with cache.attached(model):
            for _ in range(2):
                close(model(input_ids=ids, use_cache=True).logits[:, -1], expected)
                # The second argument is the cache in GPT-2 and the mask elsewhere.
                second = DynamicCache() if arch == "gpt2" else torch.ones_like(ids)
                close(model(ids, second, use_cache=True).logits[:, -1], expected)
                close(model(ids, use_cache=True, return_dict=False)[0][:, -1], expected)
                close(model(ids, use_cache=True, logits_to_keep=1).logits, expected[:, None])
    books(cache)


@pytest.mark.parametrize("arch", MAIN_ARCHS)
@pytest.mark.parametrize("keep", [1, 2, 5, 17, 40])
def test_logits_to_keep_gives_all_that_were_asked_for(arch: str, keep: int) -> None:
    model = tiny(arch)
    reference = twin(model)
    cache = make_cache(model)
    ids = prompt(17)
    with torch.no_grad():
        expected = reference(ids, logits_to_keep=keep).logits
        for _ in range(3):
            with cache.attached(model):
                close(model(ids, use_cache=True, logits_to_keep=keep).logits, expected)
    expect_hits(cache, max(0, 17 - keep))


@pytest.mark.parametrize("arch", MAIN_ARCHS)
def test_a_plain_forward_keeps_all_its_logits(arch: str) -> None:
    """Perplexity code reads every logit: without a sign that it wants a cache, nothing is cut off."""
    model = tiny(arch)
    reference = twin(model)
    cache = make_cache(model)
    ids = prompt(17)
    with torch.no_grad():
        expected = reference(ids).logits
        with cache.attached(model):
            for i in range(3):
                got = model(ids).logits
                assert got.shape == expected.shape
                close(got, expected)
                assert NULL or cache.stats.bypasses.get("full_logits") == i + 1
                greedy(model, ids)
    expect_same(cache, model, lambda m: greedy(m, ids), reference)


@both_ways
@pytest.mark.parametrize("arch", ["llama_gqa", "gemma3"])
def test_a_padded_batch_with_positions(arch: str) -> None:
    model = tiny(arch)
    reference = twin(model)
    cache = make_cache(model)
    batch = pad_left([prompt(9), prompt(14, seed=1), join(prompt(9), prompt(2, seed=2))])

    def padded_loop(m: Any) -> torch.Tensor:
        ids, mask, past, tokens = batch["input_ids"], batch["attention_mask"], None, []
        current, place = ids, positions(mask)
        with torch.no_grad():
            for _ in range(6):
                out = m(
                    current,
                    attention_mask=mask,
                    position_ids=place,
                    use_cache=True,
                    **{cache_keyword(m): past},
                )
                past = cache_of(out)
                current = out.logits[:, -1:].argmax(-1)
                tokens.append(current)
                mask = torch.cat([mask, torch.ones_like(current)], 1)
                place = place[:, -1:] + 1
        return torch.cat(tokens, 1)

    expect_same(cache, model, padded_loop, reference)
    expect_same(cache, model, padded_loop, reference)
    expect_hits(cache, 8, 13, 10)
    for row in (prompt(9), prompt(14, seed=1)):
        expect_same(cache, model, lambda m, ids=row: greedy(m, ids), reference)
        expect_hits(cache, row.shape[1] - 1)


@both_ways
@pytest.mark.parametrize("arch", MAIN_ARCHS)
def test_a_chat_held_in_one_cache_object(arch: str) -> None:
    """Turn after turn on one `past`: several tokens are appended to a filled cache."""
    model = tiny(arch)
    reference = twin(model)
    cache = make_cache(model)

    def chat(m: Any) -> torch.Tensor:
        past, seen = None, []
        with torch.no_grad():
            for turn in range(4):
                current = prompt(6 + turn, seed=turn)
                for _ in range(5):
                    out = m(current, use_cache=True, **{cache_keyword(m): past})
                    past = cache_of(out)
                    current = out.logits[:, -1:].argmax(-1)
                    seen.append(current)
        return torch.cat(seen, 1)

    for _ in range(3):
        expect_same(cache, model, chat, reference)


@both_ways
@pytest.mark.parametrize("arch", MAIN_ARCHS)
def test_two_loops_at_once(arch: str) -> None:
    model = tiny(arch)
    reference = twin(model)
    cache = make_cache(model)
    one, two = prompt(12), join(prompt(8), prompt(6, seed=1))

    def both(m: Any) -> torch.Tensor:
        state = [[one, None, []], [two, None, []]]
        with torch.no_grad():
            for _ in range(6):
                for row in state:
                    out = m(row[0], use_cache=True, **{cache_keyword(m): row[1]})
                    row[1] = cache_of(out)
                    row[0] = out.logits[:, -1:].argmax(-1)
                    row[2].append(row[0])
        return torch.cat([torch.cat(row[2], 1) for row in state])

    for _ in range(2):
        expect_same(cache, model, both, reference)


@both_ways
@pytest.mark.parametrize("arch", ["llama_gqa", "gpt2"])
def test_the_recipe_of_the_transformers_docs(arch: str) -> None:
    """A prompt cache made once and copied for each question, with and without the library around it."""
    model = tiny(arch)
    reference = twin(model)
    cache = make_cache(model)
    prefix = prompt(18)
    questions = [prompt(5, seed=i) for i in range(3)]

    def recipe(m: Any) -> torch.Tensor:
        with torch.no_grad():
            made = cache_of(m(prefix, use_cache=True, **{cache_keyword(m): DynamicCache()}))
        answers = [
            greedy(m, join(prefix, question), **{cache_keyword(m): copy.deepcopy(made)})
            for question in questions
        ]
        return torch.cat(answers)

    for _ in range(2):
        expected = recipe(reference)
        with cache.attached(model):
            same(recipe(model), expected)
        cache.check()
    for question in questions:
        expect_same(cache, model, lambda m, q=question: greedy(m, join(prefix, q)), reference)
    books(cache)


@both_ways
@pytest.mark.parametrize("arch", ["llama_gqa", "gpt2"])
def test_a_loop_that_cuts_its_cache(arch: str) -> None:
    """Go back five tokens and say something else; negative numbers remove tokens in all versions."""
    model = tiny(arch)
    reference = twin(model)
    cache = make_cache(model)
    ids = prompt(15)

    def back_and_forth(m: Any) -> torch.Tensor:
        keyword = cache_keyword(m)
        with torch.no_grad():
            past = cache_of(m(ids, use_cache=True))
            first = m(prompt(7, seed=1), use_cache=True, **{keyword: past}).logits
            past.crop(-5)
            second = m(prompt(6, seed=2), use_cache=True, **{keyword: past}).logits
        return torch.cat([first, second], 1)

    expected = back_and_forth(reference)
    for _ in range(2):
        with cache.attached(model):
            close(back_and_forth(model), expected)
    kept = join(ids, prompt(7, seed=1)[:, :2], prompt(6, seed=2), prompt(3, seed=3))
    expect_same(cache, model, lambda m: greedy(m, kept), reference)
    expect_hits(cache, 15 + 2 + 6)
    dropped = join(ids, prompt(7, seed=1), prompt(3, seed=3))
    expect_same(cache, model, lambda m: greedy(m, dropped), reference)


@both_ways
def test_gradients_are_those_of_the_plain_model() -> None:
    """A forward that may be differentiated gets no KV from elsewhere: the graph would end there."""
    model = tiny()
    reference = twin(model)
    cache = make_cache(model)
    ids = prompt(17)

    def gradients(m: Any) -> list[torch.Tensor]:
        m.zero_grad()
        m(ids, use_cache=True).logits[:, -1].square().sum().backward()
        return [parameter.grad.clone() for parameter in m.parameters()]

    expected = gradients(reference)
    with cache.attached(model):
        greedy(model, ids)
        for got in (gradients(model), gradients(model)):
            for a, b in zip(got, expected, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)
    model.zero_grad()
    expect_same(cache, model, lambda m: greedy(m, ids), reference)
