"""Where a sequence ends: stop strings with every kind of tokenizer, and criteria."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hf_testkit import tiny
from hypothesis import given
from hypothesis import strategies as st
from sampling_testkit import drive, generated, one
from tokenizer_testkit import CORPUS, KINDS, SPECIAL, Plain, byte_level

from radixkv.core.errors import InvalidRequestError
from radixkv.engine.sampler import Sampler
from radixkv.engine.sampling_params import SamplingParams
from radixkv.engine.stopping import StopMatch, StopStrings

PROMPT = [9, 33, 12, 9, 40]
STOPS = [
    "stop", "top", "s", " ", "\n\n", "User:", "🙂", "ść", "ż", "漢", "<|im_end|>", "d <|im_end|>", "e.", "lazy dog",
    "p at the top", " stop", "end|", ". ", "'s", "!",
]  # fmt: skip


_made: dict[str, Any] = {}


@pytest.fixture(params=KINDS)
def tokenizer(request: pytest.FixtureRequest) -> Any:
    if request.param not in _made:
        _made[request.param] = KINDS[request.param]()
    return _made[request.param]


def whole_text(tokenizer: Any, ids: list[int]) -> str:
    if isinstance(tokenizer, Plain):
        return tokenizer.decode(ids)
    text: str = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return text


def first_stop(
    tokenizer: Any, ids: list[int], stops: list[str], least: int = 0
) -> tuple[int, int, str] | None:
    """By looking at the whole text of every beginning: tokens until the stop, and where which string begins."""
    for n in range(max(1, least), len(ids) + 1):
        before, text = whole_text(tokenizer, ids[: n - 1]), whole_text(tokenizer, ids[:n])
        before = before.rstrip("\ufffd")
        same = next(
            (i for i, (a, b) in enumerate(zip(before, text, strict=False)) if a != b),
            min(len(before), len(text)),
        )
        found = []
        for stop in stops:
            at = text.rstrip("\ufffd").find(stop, max(0, same - len(stop) + 1))
            if at >= 0:
                found.append((at, -len(stop), stop))
        if found:
            at, _, stop = min(found)
            return n, at, stop
    return None


def some_ids(tokenizer: Any, rng: random.Random) -> list[int]:
    """A mix of text as it is written, and of anything."""
    pieces: list[int] = []
    while len(pieces) < 30:
        if rng.random() < 0.6:
            line = rng.choice(CORPUS)
            start = rng.randrange(len(line))
            pieces += tokenizer(line[start : start + rng.randrange(1, 20)], add_special_tokens=False)[
                "input_ids"
            ]
        else:
            pieces += [rng.randrange(len(tokenizer)) for _ in range(rng.randrange(1, 4))]
    return pieces


@pytest.mark.parametrize("seed", range(40))
def test_stop_strings_are_found_when_they_are_complete(tokenizer: Any, seed: int) -> None:
    rng = random.Random(seed)
    ids = some_ids(tokenizer, rng)
    stops = rng.sample(STOPS, rng.randrange(1, 5))
    least = rng.choice([0, 0, 3, 10])
    expected = first_stop(tokenizer, ids, stops, least)
    search = StopStrings(tokenizer, stops, least)
    for n, token in enumerate(ids, 1):
        if n == 7:
            search = search.fork()
        if search.add(token):
            match = search.match(ids[:n])
            assert match is not None
            assert expected is not None, match
            assert (n, match.string) == (expected[0], expected[2])
            check_match(tokenizer, ids[:n], match, expected[1])
            return
    assert expected is None


def check_match(tokenizer: Any, ids: list[int], match: StopMatch, at: int) -> None:
    whole = whole_text(tokenizer, ids)
    assert whole[at:].startswith(match.string)
    if isinstance(tokenizer, Plain):
        shown = whole
    else:
        shown = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    if shown == whole:
        assert match.text == whole[:at]
    # Tokens wholly before it do not reach into it, and one more does.
    assert len(whole_text(tokenizer, ids[: match.num_tokens]).rstrip("\ufffd")) <= at
    assert len(whole_text(tokenizer, ids[: match.num_tokens + 1]).rstrip("\ufffd")) > at
    assert match.cut(match.text + match.string + "more") == match.text


def test_long_outputs(tokenizer: Any) -> None:
    """The window of tokens that are decoded again moves along, and finds what a look at everything finds."""
    rng = random.Random(1)
    ids: list[int] = []
    for _ in range(12):
        ids += some_ids(tokenizer, rng)
    for stops in (["never there"], ["lazy dog", "漢字 か"], ["stop me"], ["p at the top stop"]):
        expected = first_stop(tokenizer, ids, stops)
        search = StopStrings(tokenizer, stops)
        found = next((n for n, token in enumerate(ids, 1) if search.add(token)), None)
        assert found == (None if expected is None else expected[0])


def test_bytes_that_are_never_a_character() -> None:
    tokenizer = byte_level()
    lone = tokenizer.convert_tokens_to_ids(
        tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("é")[0][0][0]
    )
    search = StopStrings(tokenizer, ["stop"])
    for _ in range(300):
        assert not search.add(lone)
    assert len(search._text._tokens) < 100, "what is decoded again stays short"
    ids = tokenizer("now stop", add_special_tokens=False)["input_ids"]
    assert [search.add(token) for token in ids][-1]


def test_special_tokens_in_a_stop_string_and_before_it() -> None:
    tokenizer = byte_level()
    special = tokenizer.convert_tokens_to_ids("<|im_end|>")
    end = tokenizer("the end", add_special_tokens=False)["input_ids"]
    more = tokenizer(" more stop", add_special_tokens=False)["input_ids"]
    cases = [
        (["<|im_end|>"], [*end, special], "the end", len(end)),
        (["d<|im"], [*end, special], "the en", None),
        (["end|>"], [*end, special], "the end", len(end)),
        (["stop"], [*end, special, *more], "the end more ", None),
    ]
    for stops, ids, text, num_tokens in cases:
        search = StopStrings(tokenizer, stops)
        assert [search.add(token) for token in ids] == [False] * (len(ids) - 1) + [True]
        match = search.match(ids)
        assert match is not None
        assert match.text == text
        assert num_tokens in (None, match.num_tokens)


def test_cutting_a_text_that_was_decoded_by_other_rules() -> None:
    assert StopMatch("stop", 3, "it 's").cut("it's stop and so on") == "it's "
    assert StopMatch("stop", 3, "it 's").cut("nothing") == "it 's"
    assert StopMatch("stop", 3, "a stop b ").cut("a stop b stop") == "a stop b "


def test_cutting_behind_the_stop_string() -> None:
    assert StopMatch("stop", 3, "a stop b ").cut("a stop b stopping", True) == "a stop b stop"
    assert StopMatch("stop", 3, "it 's").cut("it's stop and so on", True) == "it's stop"
    assert StopMatch("<|im_end|>", 3, "the end").cut("the end", True) == "the end<|im_end|>", (
        "though it is special"
    )


# -- through the sampler --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair() -> Any:
    tokenizer = byte_level()
    model = tiny("llama_gqa", vocab_size=len(tokenizer), seed=3)
    model.generation_config.suppress_tokens = list(range(len(SPECIAL)))
    return model, tokenizer


def printable(tokenizer: Any, tokens: list[int], start: int, length: int = 3) -> str:
    text = whole_text(tokenizer, tokens)
    for at in range(start, len(text) - length):
        piece = text[at : at + length]
        if "\ufffd" not in piece and text.index(piece) == at:
            return piece
    raise AssertionError(f"nothing to stop at in {text!r}")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_stop_string_ends_a_sequence(pair: Any, temperature: float) -> None:
    model, tokenizer = pair
    how: dict[str, Any] = {"max_new_tokens": 40, "temperature": temperature, "seed": 1}
    free = one(model, PROMPT, SamplingParams(**how), tokenizer=tokenizer).output
    stop = printable(tokenizer, free, 8)
    run = one(model, PROMPT, SamplingParams(stop=[stop, "none such"], **how), tokenizer=tokenizer)
    assert run.reason == "stop"
    assert run.output == free[: len(run.output)]
    text = whole_text(tokenizer, run.output)
    assert stop in text
    assert stop not in whole_text(tokenizer, run.output[:-1])
    assert run.state.stop_match is not None
    assert run.state.stop_match.string == stop
    assert run.state.cut(text) == text[: text.index(stop)]
    assert run.state.stop == (stop, "none such")
    how["include_stop_str_in_output"] = True
    kept = one(model, PROMPT, SamplingParams(stop=[stop, "none such"], **how), tokenizer=tokenizer)
    assert kept.output == run.output
    assert kept.state.cut(text) == text[: text.index(stop) + len(stop)]
    if not temperature:
        expected = generated(model, PROMPT, 40, stop_strings=[stop], tokenizer=tokenizer)
        assert run.output == expected


def test_a_stop_string_before_the_least_length_does_not_count(pair: Any) -> None:
    model, tokenizer = pair
    free = one(model, PROMPT, SamplingParams(max_new_tokens=30), tokenizer=tokenizer).output
    stop = printable(tokenizer, free, 2)
    run = one(
        model, PROMPT, SamplingParams(max_new_tokens=30, min_new_tokens=25, stop=stop), tokenizer=tokenizer
    )
    assert len(run.output) >= 25
    assert run.output == free[: len(run.output)]


def test_the_prompt_is_not_searched(pair: Any) -> None:
    model, tokenizer = pair
    prompt = tokenizer("please stop", add_special_tokens=False)["input_ids"]
    run = one(model, prompt, SamplingParams(max_new_tokens=5, stop="stop"), tokenizer=tokenizer)
    assert run.reason == "length"


def test_the_models_own_stop_strings(pair: Any) -> None:
    model, tokenizer = pair
    free = one(model, PROMPT, SamplingParams(max_new_tokens=30), tokenizer=tokenizer).output
    model.generation_config.stop_strings = printable(tokenizer, free, 6)
    try:
        run = one(model, PROMPT, SamplingParams(max_new_tokens=30, stop="zzzz"), tokenizer=tokenizer)
        assert run.reason == "stop"
        assert run.output == generated(model, PROMPT, 30, tokenizer=tokenizer)
        assert run.state.stop == (model.generation_config.stop_strings, "zzzz")
        with pytest.raises(InvalidRequestError, match="need a tokenizer"):
            Sampler(model).start(SamplingParams(), np.array(PROMPT))
    finally:
        model.generation_config.stop_strings = None


def test_stop_strings_need_a_tokenizer(pair: Any) -> None:
    with pytest.raises(InvalidRequestError, match="need a tokenizer"):
        Sampler(pair[0]).start(SamplingParams(stop="x"), np.array(PROMPT))


def test_stop_ids_must_exist(pair: Any) -> None:
    model, tokenizer = pair
    sampler = Sampler(model, tokenizer)
    size = model.config.vocab_size
    sampler.start(SamplingParams(stop_token_ids=[size - 1], logprobs=size), np.array(PROMPT))
    with pytest.raises(
        InvalidRequestError, match=rf"\[{size}\] do not exist: the vocabulary has {size} tokens"
    ):
        sampler.start(SamplingParams(stop_token_ids=[3, size]), np.array(PROMPT))
    with pytest.raises(InvalidRequestError, match=f"logprobs is {size + 1}"):
        sampler.start(SamplingParams(logprobs=size + 1), np.array(PROMPT))


class AtLength(transformers.StoppingCriteria):
    """As in transformers, with a tensor for an answer."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.seen: list[list[int]] = []

    def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
        self.seen.append(input_ids[0].tolist())
        assert input_ids.shape[0] == 1
        return torch.full((1,), input_ids.shape[1] >= self.length)


def test_criteria_are_called_as_generate_calls_them(pair: Any) -> None:
    model, _ = pair
    mine, theirs = AtLength(len(PROMPT) + 7), AtLength(len(PROMPT) + 7)
    run = one(model, PROMPT, SamplingParams(max_new_tokens=20, stopping_criteria=[mine]))
    assert run.output == generated(model, PROMPT, 20, stopping_criteria=[theirs])
    assert mine.seen == theirs.seen
    assert run.reason == "stop"


@pytest.mark.parametrize("answer", [True, np.bool_(True), torch.tensor(True), torch.tensor([True]), [1], 1])
def test_what_a_criterion_may_answer(pair: Any, answer: Any) -> None:
    model, _ = pair
    calls = []

    def criterion(ids: Any, scores: Any) -> Any:
        calls.append(scores[-1])
        return answer if len(calls) == 3 else False

    run = one(
        model, PROMPT, SamplingParams(max_new_tokens=9, stopping_criteria=[criterion], repetition_penalty=1.5)
    )
    assert len(run.output) == 3
    assert run.reason == "stop"
    assert [int(scores.argmax()) for scores in calls] == run.output
    assert all(scores.shape == (1, model.config.vocab_size) for scores in calls)


def test_criteria_of_transformers(pair: Any) -> None:
    model, _ = pair
    tokens = generated(model, PROMPT, 12)
    for criterion, more in (
        (transformers.MaxLengthCriteria(len(PROMPT) + 4), {}),
        (transformers.EosTokenCriteria([tokens[5]]), {"eos_token_id": [tokens[2]]}),
    ):
        model.generation_config.eos_token_id = more.get("eos_token_id")
        try:
            run = one(model, PROMPT, SamplingParams(max_new_tokens=12, stopping_criteria=[criterion]))
            assert run.output == generated(model, PROMPT, 12, stopping_criteria=[criterion])
        finally:
            model.generation_config.eos_token_id = None


def test_the_models_own_time_limit(pair: Any) -> None:
    model, _ = pair
    model.generation_config.max_time = 0.0
    try:
        assert len(one(model, PROMPT, SamplingParams(max_new_tokens=12)).output) == 1
    finally:
        model.generation_config.max_time = None


def test_a_criterion_with_state_for_each_sequence(pair: Any) -> None:
    class After:
        def __init__(self) -> None:
            self.left = 4

        def fork(self) -> After:
            other = After()
            other.left = self.left
            return other

        def __call__(self, ids: Any, scores: Any) -> bool:
            self.left -= 1
            return self.left == 0

    params = SamplingParams(max_new_tokens=12, n=2, temperature=1.0, seed=1, stopping_criteria=[After()])
    (runs,) = drive(pair[0], [(PROMPT, params)])
    assert [len(run.output) for run in runs] == [4, 4]


@given(
    st.lists(st.sampled_from("ab"), max_size=12),
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_letters(letters: list[str], stops: list[str]) -> None:
    text = "".join(letters)
    search = StopStrings(Plain(), stops)
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    for n, letter in enumerate(text, 1):
        found = search.add(ord(letter))
        assert found == (n == min(ends, default=-1))
        if found:
            match = search.match(list(text[:n].encode()))
            assert match is not None
            complete = [stop for stop in stops if text[:n].endswith(stop)]
            assert match.string == max(complete, key=len)
            assert match.text == text[: n - len(match.string)]
            assert match.num_tokens == n - len(match.string)
            return
