"""Whatever `generate()` can do (sampling, beams, streamers, drafts), it does the same with the cache attached."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hf_testkit import (
    MAIN_ARCHS,
    books,
    both_ways,
    close,
    expect_hits,
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
from transformers import LogitsProcessorList, MaxTimeCriteria, StoppingCriteria, StoppingCriteriaList
from transformers.generation.logits_process import LogitsProcessor

pytestmark = pytest.mark.filterwarnings("default")


def seeded(seed: int, **kwargs: Any) -> Callable[[Any], torch.Tensor]:
    """A sampling call whose random stream does not depend on what ran before."""

    def call(model: Any) -> torch.Tensor:
        torch.manual_seed(seed)
        return model.generate(do_sample=True, max_new_tokens=10, **kwargs)

    return call


@both_ways
@pytest.mark.parametrize("arch", MAIN_ARCHS)
def test_sampling_with_a_seed(arch: str) -> None:
    model = tiny(arch)
    reference = twin(model)
    cache = make_cache(model)
    ids = prompt(22)
    different = set()
    for seed in range(5):
        got = expect_same(cache, model, seeded(seed, inputs=ids, temperature=2.0, top_k=0), reference)
        different.add(tuple(got[0].tolist()))
    expect_hits(cache, 21)
    assert len(different) > 2
    expect_same(cache, model, seeded(9, inputs=ids, top_p=0.9, repetition_penalty=1.3), reference)
    expect_same(cache, model, seeded(9, **pad_left([ids, ids[:, :9], prompt(3)]), temperature=2.0), reference)


@both_ways
@pytest.mark.parametrize("arch", MAIN_ARCHS)
def test_num_return_sequences(arch: str) -> None:
    model = tiny(arch)
    reference = twin(model)
    cache = make_cache(model)
    ids = join(prompt(22))
    for _ in range(2):
        got = expect_same(
            cache, model, seeded(3, inputs=ids, num_return_sequences=4, temperature=2.0), reference
        )
        assert got.shape[0] == 4
    both = pad_left([prompt(9), ids])
    for _ in range(2):
        expect_same(cache, model, seeded(3, **both, num_return_sequences=3, temperature=2.0), reference)


@both_ways
@pytest.mark.parametrize("arch", MAIN_ARCHS)
@pytest.mark.parametrize("beams", [2, 4])
def test_beam_search(arch: str, beams: int) -> None:
    model = tiny(arch, eos=True)
    reference = twin(model)
    cache = make_cache(model)
    ids = prompt(17)
    for i in range(3):
        longer = join(ids, prompt(2 + i, seed=i))
        expect_same(cache, model, lambda m, ids=longer: greedy(m, ids, num_beams=beams), reference)
    answered = expect_same(
        cache, model, lambda m: greedy(m, ids, num_beams=beams, num_return_sequences=beams), reference
    )
    batch = pad_left([prompt(6), join(ids, prompt(3, seed=4)), prompt(6)])
    for _ in range(2):
        expect_same(cache, model, lambda m: m.generate(**batch, max_new_tokens=8, num_beams=beams), reference)
    # What the beams left in the cache was reordered many times; each kept row must still be true.
    for row in answered:
        chat = join(row[None], prompt(5, seed=8))
        expect_same(cache, model, lambda m, ids=chat: greedy(m, ids), reference)


def test_beam_sampling_and_early_stopping() -> None:
    model = tiny(eos=True)
    reference = twin(model)
    cache = make_cache(model)
    ids = prompt(17)
    for seed in range(3):
        call = seeded(seed, inputs=ids, num_beams=3, early_stopping=True, length_penalty=0.5)
        expect_same(cache, model, call, reference)


class Recorder:
    """A streamer that keeps what it is given."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def put(self, value: torch.Tensor) -> None:
        self.events.append(value.tolist())

    def end(self) -> None:
        self.events.append("end")


def test_a_streamer_gets_the_same_tokens() -> None:
    model = tiny()
    reference = twin(model)
    cache = make_cache(model)
    ids = prompt(15)
    plain = Recorder()
    greedy(reference, ids, streamer=plain)
    for _ in range(2):
        mine = Recorder()
        with cache.attached(model):
            greedy(model, ids, streamer=mine)
        assert mine.events == plain.events
    assert plain.events[-1] == "end"
    assert len(plain.events) == 1 + 8 + 1
    expect_hits(cache, 14)


class StopAt(StoppingCriteria):
    def __init__(self, length: int) -> None:
        self.length, self.seen = length, []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.seen.append(input_ids.tolist())
        return torch.full((input_ids.shape[0],), input_ids.shape[1] >= self.length)


class Favour(LogitsProcessor):
    def __init__(self, token: int) -> None:
        self.token, self.seen = token, []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.seen.append(input_ids.tolist())
        scores = scores.clone()
        if input_ids.shape[1] % 3 == 0:
            scores[:, self.token] += 100
        return scores


def test_stopping_criteria_and_logits_processors_see_the_same() -> None:
    model = tiny()
    reference = twin(model)
    cache = make_cache(model)
    ids = prompt(15)

    def call(m: Any) -> tuple[list[Any], list[Any], list[Any]]:
        stop, favour = StopAt(20), Favour(33)
        out = greedy(
            m,
            ids,
            30,
            stopping_criteria=StoppingCriteriaList([stop, MaxTimeCriteria(1000)]),
            logits_processor=LogitsProcessorList([favour]),
        )
        return out.tolist(), stop.seen, favour.seen

    expected = call(reference)
    assert len(expected[0][0]) == 20
    for _ in range(3):
        with cache.attached(model):
            assert call(model) == expected
    expect_hits(cache, 14)
    chat = torch.tensor([expected[0][0] + [9, 8, 7]])
    expect_same(cache, model, lambda m: greedy(m, chat), reference)
    expect_hits(cache, 19)


@both_ways
@pytest.mark.parametrize("arch", MAIN_ARCHS)
@pytest.mark.parametrize("beams", [1, 3])
def test_return_dict_with_scores(arch: str, beams: int) -> None:
    model = tiny(arch)
    reference = twin(model)
    cache = make_cache(model)
    ids = prompt(15)
    call = dict(
        max_new_tokens=6,
        do_sample=False,
        num_beams=beams,
        return_dict_in_generate=True,
        output_scores=True,
        output_logits=True,
    )
    expected = reference.generate(ids, **call)
    for _ in range(2):
        with cache.attached(model):
            got = model.generate(ids, **call)
        assert type(got) is type(expected)
        assert set(got.keys()) == set(expected.keys())
        same(got.sequences, expected.sequences)
        assert [s.shape for s in got.scores] == [s.shape for s in expected.scores]
        close(torch.stack(got.scores), torch.stack(expected.scores))
        close(torch.stack(got.logits), torch.stack(expected.logits))
        if beams > 1:
            close(got.sequences_scores, expected.sequences_scores)
            same(got.beam_indices, expected.beam_indices)
        books(cache, alive=True)  # `got` and the cache object in it are


@both_ways
def test_the_cache_in_the_result_can_be_used_to_go_on() -> None:
    """Plain code may continue by hand from the cache that `generate()` returned."""
    from hf_testkit import cache_keyword, cache_of

    model = tiny()
    reference = twin(model)
    cache = make_cache(model)
    ids = prompt(15)
    call = dict(max_new_tokens=6, do_sample=False, return_dict_in_generate=True)

    def go_on(m: Any) -> torch.Tensor:
        out = m.generate(ids, **call)
        with torch.no_grad():
            more = {cache_keyword(m): cache_of(out)}
            return m(join(out.sequences[:, -1:], prompt(3, seed=2)), use_cache=True, **more).logits

    expected = go_on(reference)
    for _ in range(2):
        with cache.attached(model):
            close(go_on(model), expected)
    cache.check()


# ------------------------------------------------------------------------------------------ drafts


@both_ways
@pytest.mark.parametrize("arch", MAIN_ARCHS)
def test_assisted_decoding(arch: str) -> None:
    """With a small assistant that is not attached itself: its drafts are partly right, so the cache is cut often."""
    model = tiny(arch)
    reference = twin(model)
    noisy = twin(model)
    with torch.no_grad():
        for parameter in noisy.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.02)
    other = tiny("llama_gqa", seed=5, num_hidden_layers=1)
    cache = make_cache(model)
    ids = prompt(19)
    for assistant in (noisy, other):
        for i in range(3):
            longer = join(ids, prompt(3, seed=i // 2))
            answered = expect_same(
                cache,
                model,
                lambda m, ids=longer, a=assistant: greedy(m, ids, 15, assistant_model=a),
                reference,
            )
            same(answered, greedy(reference, longer, 15))
            chat = join(answered, prompt(4, seed=7))
            expect_same(cache, model, lambda m, ids=chat: greedy(m, ids), reference)


def test_assisted_decoding_with_the_assistant_attached_to_its_own_cache() -> None:
    model, assistant = tiny(), tiny(seed=3, num_hidden_layers=1)
    reference, plain_assistant = twin(model), twin(assistant)
    cache, cache2 = make_cache(model), make_cache(assistant)
    for i in range(3):
        ids = join(prompt(19), prompt(3, seed=i // 2))
        expected = greedy(reference, ids, 15, assistant_model=plain_assistant)
        with cache.attached(model), cache2.attached(assistant):
            same(greedy(model, ids, 15, assistant_model=assistant), expected)
        books(cache)
        books(cache2)


@pytest.mark.parametrize("arch", ["llama_gqa"])
def test_assistant_early_exit(arch: str) -> None:
    """The model is its own assistant with fewer layers: KV of its short forwards must never be taken for whole ones."""
    model = tiny(arch, num_hidden_layers=4)
    reference = twin(model)
    cache = make_cache(model)
    for i in range(4):
        ids = join(prompt(19), prompt(3, seed=i // 2))
        expected = greedy(reference, ids, 12, assistant_early_exit=2)
        same(expected, greedy(reference, ids, 12))
        with cache.attached(model):
            same(greedy(model, ids, 12, assistant_early_exit=2), expected)
            same(greedy(model, ids, 12), expected)
        cache.check()
        expect_totals(cache)


@both_ways
@pytest.mark.parametrize("arch", MAIN_ARCHS)
def test_prompt_lookup(arch: str) -> None:
    """The first forward holds prompt and draft and needs a logit for each draft token, also when they are cached."""
    model = tiny(arch)
    reference = twin(model)
    cache = make_cache(model)
    phrase = prompt(7)
    ids = join(phrase, prompt(3, seed=1), phrase, prompt(2, seed=2), phrase[:, :3])
    for _ in range(2):
        expect_same(cache, model, lambda m: greedy(m, ids, 15, prompt_lookup_num_tokens=4), reference)
    # Now the drafts themselves are cached, since the cache has seen the prompt with its continuation.
    expect_same(cache, model, lambda m: greedy(m, join(ids, phrase[:, 3:]), 3), reference)
    for i in range(3):
        longer = join(ids, prompt(i, seed=3)) if i else ids
        answered = expect_same(
            cache, model, lambda m, ids=longer: greedy(m, ids, 15, prompt_lookup_num_tokens=4), reference
        )
        chat = join(answered, phrase)
        expect_same(
            cache, model, lambda m, ids=chat: greedy(m, ids, 15, prompt_lookup_num_tokens=4), reference
        )


@pytest.mark.parametrize("arch", MAIN_ARCHS)
@pytest.mark.parametrize("chunk", [1, 5, 8, 64])
def test_chunked_prefill(arch: str, chunk: int) -> None:
    model = tiny(arch)
    reference = twin(model)
    cache = make_cache(model)
    for i in range(4):
        ids = join(prompt(21), prompt(6, seed=i // 2))
        expect_same(cache, model, lambda m, ids=ids: greedy(m, ids, prefill_chunk_size=chunk), reference)
        expect_same(cache, model, lambda m, ids=ids: greedy(m, ids), reference)


def test_contrastive_and_other_decoding_settings() -> None:
    """Settings that change what is chosen, not what is computed."""
    model = tiny()
    reference = twin(model)
    cache = make_cache(model)
    ids = prompt(18)
    for extra in (
        dict(no_repeat_ngram_size=2),
        dict(bad_words_ids=[[5], [6, 7]]),
        dict(min_new_tokens=3, eos_token_id=[9, 10, 11, 12, 13, 14, 15]),
        dict(suppress_tokens=list(range(3, 30))),
        dict(renormalize_logits=True, repetition_penalty=1.5),
    ):
        for _ in range(2):
            expect_same(cache, model, lambda m, extra=extra: greedy(m, ids, **extra), reference)
    expect_hits(cache, 17)
