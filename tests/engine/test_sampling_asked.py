"""`generate()` is asked once for settings that are new, and what it said then is right for every other request."""

from __future__ import annotations

import copy
import time
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hf_testkit import prompt, tiny
from sampling_testkit import drive, generated, one, outputs
from test_sampling_generate import OWN, SAMPLING

from radixkv.engine.generate_settings import GenerateSettings, Lists
from radixkv.engine.sampler import Sampler
from radixkv.engine.sampling_params import SamplingParams

PROMPT = [9, 33, 12, 9, 40, 33, 12, 8]


class Counting:
    """A model whose `generate()` is counted."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.asked = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        self.asked += 1
        return self.model.generate(*args, **kwargs)


@pytest.fixture(scope="module")
def whole() -> Any:
    return tiny("llama_gqa", eos=True)


@pytest.fixture
def model(whole: Any) -> Iterator[Any]:
    before = whole.generation_config
    whole.generation_config = copy.deepcopy(before)
    yield whole
    whole.generation_config = before


def told(value: Any) -> Any:
    """All that is in an object, to compare."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), value.tolist()
    if isinstance(value, torch.Generator):
        return value.get_state().tolist()
    if isinstance(value, np.ndarray):
        return value.dtype, value.shape  # room for what is to come
    if isinstance(value, (tuple, list)):
        return [told(item) for item in value]
    if isinstance(value, types.FunctionType):
        return value.__qualname__, [told(cell.cell_contents) for cell in value.__closure__ or ()]
    if hasattr(value, "__dict__") and not isinstance(value, (type, types.BuiltinFunctionType)):
        return type(value), {
            name: told(item) for name, item in vars(value).items() if name != "initial_timestamp"
        }
    return value


def same(one: Lists, two: Lists) -> None:
    assert told(one.processors) == told(two.processors)
    assert told(one.criteria) == told(two.criteria)
    assert (one.stop_ids, one.stop_strings) == (two.stop_ids, two.stop_strings)


SETTINGS: dict[str, dict[str, Any]] = {
    **OWN,
    "begin and bos": {"begin_suppress_tokens": [4, 5], "forced_bos_token_id": 7},
    "both mins": {"min_length": 30, "min_new_tokens": 3},
    "time": {"max_time": 100.0},
    "synthid": {"watermarking_config": transformers.SynthIDTextWatermarkingConfig(ngram_len=3, keys=[1, 2, 3])},
}  # fmt: skip
REQUESTS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "least": {"min_new_tokens": 4},
    "much": {
        "temperature": 0.5, "top_k": 4, "presence_penalty": 1.0, "min_new_tokens": 2, "repetition_penalty": 1.5,
        "logit_bias": {5: 1.0}, "allowed_token_ids": [5, 6, 7], "bad_words_ids": [[5, 6]],
    },
    "own": {"logits_processors": [lambda ids, s: s, transformers.RepetitionPenaltyLogitsProcessor(1.7)],
            "stopping_criteria": [transformers.MaxTimeCriteria(9.0), transformers.EosTokenCriteria(4)]},
}  # fmt: skip


@pytest.mark.parametrize("own", [name for name in SETTINGS if name != "encoder"])
@pytest.mark.parametrize("how", REQUESTS)
def test_an_answer_that_is_remembered_is_the_answer(model: Any, own: str, how: str) -> None:
    for name, value in SETTINGS[own].items():
        setattr(model.generation_config, name, value)
    counting = Counting(model)
    settings = GenerateSettings(counting)
    for length, most in [(8, 12), (9, 12), (3, 200), (2, 5), (8, None), (40, 12), (40, 5000)]:
        params = SamplingParams(max_new_tokens=most, **REQUESTS[how])
        ids = prompt(length, seed=length)[0].numpy()
        got = settings.lists(params, ids)
        same(got, GenerateSettings(model).lists(params, ids))
        for mine, theirs in (
            (got.processors, params.logits_processors),
            (got.criteria, params.stopping_criteria),
        ):
            assert {id(p) for p in mine if id(p) in got.given} == set(map(id, theirs)), "the very objects"
    assert counting.asked <= 2
    before = counting.asked
    for token in (3, 7):
        ids = np.array([token])
        for most in (9, 20):
            params = SamplingParams(max_new_tokens=most, **REQUESTS[how])
            same(settings.lists(params, ids), GenerateSettings(model).lists(params, ids))
    assert counting.asked <= before + 2, "prompts of one token are a case of their own"


def test_nothing_is_asked_twice(model: Any) -> None:
    counting = Counting(model)
    settings = GenerateSettings(counting)
    for how in SAMPLING.values():
        first = counting.asked
        for length in range(2, 40):
            settings.lists(
                SamplingParams(max_new_tokens=9 + length, seed=length, n=3, **how), np.arange(length) + 5
            )
        assert counting.asked - first <= 2
    shared = SamplingParams(temperature=0.5, top_k=3)
    assert settings.lists(shared, np.arange(9)) is settings.lists(shared, np.arange(4)), (
        "nothing is made anew"
    )


def test_objects_of_the_same_types_are_not_asked_for_again(model: Any) -> None:
    counting = Counting(model)
    settings = GenerateSettings(counting)
    for penalty in (1.1, 1.2, 1.3):
        mine = [transformers.RepetitionPenaltyLogitsProcessor(penalty), lambda ids, scores: scores]
        lists = settings.lists(SamplingParams(logits_processors=mine), np.array(PROMPT))
        assert list(lists.processors) == mine
    assert counting.asked == 1
    settings.lists(SamplingParams(logits_processors=mine[::-1]), np.array(PROMPT))
    settings.lists(SamplingParams(logits_processors=[mine[0], mine[0]]), np.array(PROMPT))
    assert counting.asked == 3


def test_a_prompt_is_not_remembered(model: Any) -> None:
    """Where the prompt itself is in what generate() makes, it is asked for every request, and once."""
    model.generation_config.encoder_repetition_penalty = 1.5
    model.generation_config.encoder_no_repeat_ngram_size = 2
    counting = Counting(model)
    sampler = Sampler(counting)
    params = SamplingParams(max_new_tokens=8, n=3, temperature=1.0, seed=1)
    prompts = [PROMPT, PROMPT[::-1], PROMPT[:3]]
    runs = drive(counting, [(ids, params) for ids in prompts], sampler=sampler)
    assert counting.asked == len(prompts)
    for ids, group in zip(prompts, outputs(runs), strict=True):
        for index, got in enumerate(group):
            assert got == generated(model, ids, 8, 1 + index, do_sample=True, top_k=0)


class Stateful:
    """A processor that nobody knows, with state."""

    def __init__(self, model: Any, *, copyable: bool = True) -> None:
        self.model = model
        self.calls = 0
        self.copyable = copyable

    def __deepcopy__(self, memo: Any) -> Stateful:
        if not self.copyable:
            raise TypeError("not me")
        other = Stateful(self.model)
        other.calls = self.calls
        return other

    def __call__(self, ids: Any, scores: Any) -> Any:
        self.calls += 1
        return scores.index_fill(1, torch.tensor([10 + self.calls]), 1000.0)


@pytest.mark.parametrize("copyable", [True, False])
def test_a_model_class_with_processors_of_its_own(
    model: Any, monkeypatch: pytest.MonkeyPatch, copyable: bool
) -> None:
    get = model._get_logits_processor

    def with_more(*args: Any, **kwargs: Any) -> Any:
        return transformers.LogitsProcessorList([*get(*args, **kwargs), Stateful(model, copyable=copyable)])

    monkeypatch.setattr(model, "_get_logits_processor", with_more)
    counting = Counting(model)
    sampler = Sampler(counting)
    params = SamplingParams(max_new_tokens=4, n=3)
    assert outputs(drive(model, [(PROMPT, params)] * 2, sampler=sampler)) == [[[11, 12, 13, 14]] * 3] * 2
    assert counting.asked == (2 if copyable else 6)
    assert outputs(drive(model, [(PROMPT, SamplingParams(max_new_tokens=4))])) == [[[11, 12, 13, 14]]]


def test_every_request_has_its_own_clock(model: Any) -> None:
    model.generation_config.max_time = 50.0
    settings = GenerateSettings(model)
    first = settings.lists(SamplingParams(), np.array(PROMPT)).criteria[0]
    time.sleep(0.01)
    second = settings.lists(SamplingParams(), np.array(PROMPT)).criteria[0]
    assert second.max_time == 50.0
    assert second.initial_timestamp > first.initial_timestamp


def test_sequences_of_a_watermarked_request_have_their_own_state(model: Any) -> None:
    config = transformers.SynthIDTextWatermarkingConfig(ngram_len=3, keys=[1, 2, 3])
    model.generation_config.watermarking_config = config
    params = SamplingParams(max_new_tokens=8, n=2, temperature=1.0, seed=4)
    runs = outputs(drive(model, [(PROMPT, params), (PROMPT[:3], params)]))
    for ids, group in zip((PROMPT, PROMPT[:3]), runs, strict=True):
        for index, got in enumerate(group):
            assert got == generated(model, ids, 8, 4 + index, do_sample=True, top_k=0)


def test_a_change_inside_of_an_object_of_the_config_is_noticed(model: Any) -> None:
    config = transformers.WatermarkingConfig(bias=2.0, seeding_scheme="lefthash")
    model.generation_config.watermarking_config = config
    sampler = Sampler(model)
    params = SamplingParams(max_new_tokens=8)
    first = one(model, PROMPT, params, sampler=sampler).output
    assert first == generated(model, PROMPT, 8)
    config.bias = 30.0
    second = one(model, PROMPT, params, sampler=sampler).output
    assert second == generated(model, PROMPT, 8) != first
