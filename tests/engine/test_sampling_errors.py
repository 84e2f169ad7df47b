"""What goes wrong with one sequence is that sequence's, and no other's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hf_testkit import tiny
from sampling_testkit import drive, last_logits, outputs

from radixkv.core.errors import RadixKVError
from radixkv.engine.sampler import Sampler
from radixkv.engine.sampling_params import SamplingParams

NAN, INF = float("nan"), float("inf")
PROMPT = [9, 33, 12, 9, 40]
WAYS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "seed": 1},
    {"temperature": 1.0, "seed": 1, "top_k": 5},
    {"temperature": 1.0, "seed": 1, "top_p": 0.5, "min_p": 0.1},
    {"repetition_penalty": 1.5},
    {"repetition_penalty": 1.5, "temperature": 1.0, "seed": 1},
    {"logprobs": 2},
    {"stopping_criteria": [lambda ids, scores: False]},
]


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny("llama_gqa")


def poisoned(value: float, at: int | None) -> Any:
    """Logits that go bad at the third new token of every prompt that begins with 1."""

    def logits_of(model: Any, ids: Any) -> torch.Tensor:
        row = last_logits(model, ids).clone()
        if ids[0] == 1 and len(ids) == len(PROMPT) + 2:
            row[slice(None) if at is None else at] = value
        return row

    return logits_of


BAD = [
    (NAN, 5, "NaN"),
    (NAN, 0, "NaN"),
    (NAN, 63, "NaN"),
    (NAN, None, "NaN"),
    (-INF, None, "all its logits are minus infinity"),
]


@pytest.mark.parametrize(("value", "at", "message"), BAD)
@pytest.mark.parametrize("shuffle", [None, 0])
def test_logits_that_are_no_numbers(
    model: Any, value: float, at: int | None, message: str, shuffle: Any
) -> None:
    bad = [1, *PROMPT[1:]]
    requests = [(ids, SamplingParams(max_new_tokens=5, **way)) for way in WAYS for ids in (PROMPT, bad)]
    runs = [run for (run,) in drive(model, requests, logits_of=poisoned(value, at), shuffle=shuffle)]
    right = outputs(drive(model, requests))
    for i, run in enumerate(runs):
        if i % 2 == 0:
            assert [run.output] == right[i]
            assert run.error is None
        else:
            assert run.reason == "error"
            assert isinstance(run.error, RadixKVError)
            assert message in str(run.error)
            assert "after 7 tokens" in str(run.error)
            assert run.output == right[i][0][:2], "what came before is right"


def test_infinity_is_the_likeliest_and_no_probability(model: Any) -> None:
    bad = [1, *PROMPT[1:]]
    requests = [
        (bad, SamplingParams(max_new_tokens=5, **way)) for way in ({}, {"temperature": 1.0, "top_k": 5})
    ]
    (greedy,), (sampled,) = drive(model, requests, logits_of=poisoned(INF, 7))
    assert greedy.output[2] == 7
    assert "contain infinity" in str(sampled.error)


def test_the_model_may_ask_to_repair_them(model: Any) -> None:
    model.generation_config.remove_invalid_values = True
    try:
        requests = [([1, *PROMPT[1:]], SamplingParams(max_new_tokens=5, **way)) for way in WAYS]
        for (run,) in drive(model, requests, logits_of=poisoned(NAN, 5)):
            assert run.error is None
    finally:
        model.generation_config.remove_invalid_values = False


def test_nothing_left_to_choose(model: Any) -> None:
    def ban_all(ids: Any, scores: Any) -> Any:
        return scores.fill_(-INF)

    for way in ({}, {"temperature": 1.0}):
        requests = [
            (PROMPT, SamplingParams(max_new_tokens=3, logits_processors=[ban_all], **way)),
            (PROMPT, SamplingParams(max_new_tokens=3, seed=1, **way)),
        ]
        (bad,), (good,) = drive(model, requests)
        assert "nothing is left to choose from" in str(bad.error)
        assert good.reason == "length"


def test_a_temperature_that_overflows(model: Any) -> None:
    ((run,),) = drive(model, [(PROMPT, SamplingParams(max_new_tokens=3, temperature=1e-42))])
    assert "temperature is so small" in str(run.error)


class Raises:
    def __init__(self, after: int) -> None:
        self.after = after

    def __call__(self, ids: Any, scores: Any) -> Any:
        if ids.shape[1] >= len(PROMPT) + self.after:
            raise ZeroDivisionError("a fault")
        return scores if isinstance(scores, torch.Tensor) else False


@pytest.mark.parametrize(
    ("field", "what"), [("logits_processors", "processor"), ("stopping_criteria", "criterion")]
)
@pytest.mark.parametrize("way", WAYS[:6])
def test_what_raises_ends_its_own_sequence(model: Any, field: str, what: str, way: dict[str, Any]) -> None:
    mine = SamplingParams(max_new_tokens=6, **{**way, field: [Raises(2)]})
    others = [(PROMPT, SamplingParams(max_new_tokens=6, **w)) for w in WAYS]
    right = outputs(drive(model, others))
    *rest, (run,) = drive(model, [*others, (PROMPT, mine)])
    assert outputs(rest) == right
    assert run.reason == "error"
    assert isinstance(run.error, RadixKVError)
    assert isinstance(run.error.__cause__, ZeroDivisionError)
    assert f"{what} Raises raised ZeroDivisionError: a fault" in str(run.error)
    assert len(run.output) == (2 if field == "logits_processors" else 1)


@pytest.mark.parametrize(
    "result",
    [None, 3, lambda s: s[0], lambda s: s[:, :-1], lambda s: s.tolist()],
    ids=["None", "3", "row", "short", "list"],
)
def test_a_processor_that_returns_something_else(model: Any, result: Any) -> None:
    def processor(ids: Any, scores: Any) -> Any:
        return result(scores) if callable(result) else result

    ((run,),) = drive(model, [(PROMPT, SamplingParams(max_new_tokens=3, logits_processors=[processor]))])
    assert "must return scores of shape (1, 64)" in str(run.error)


def test_a_criterion_that_answers_for_many(model: Any) -> None:
    params = SamplingParams(
        max_new_tokens=3, stopping_criteria=[lambda ids, scores: torch.tensor([True, False])]
    )
    ((run,),) = drive(model, [(PROMPT, params)])
    assert "one value for one sequence" in str(run.error)


def test_a_tokenizer_that_raises(model: Any) -> None:
    class Broken:
        def decode(self, ids: Any, **_: Any) -> str:
            if len(ids) > 2:
                raise IndexError("no such token")
            return "x"

    requests = [
        (PROMPT, SamplingParams(max_new_tokens=5, stop="stop")),
        (PROMPT, SamplingParams(max_new_tokens=5)),
    ]
    (bad,), (good,) = drive(model, requests, tokenizer=Broken())
    assert "the tokenizer Broken raised IndexError" in str(bad.error)
    assert good.reason == "length"


def test_an_interrupt_is_not_swallowed(model: Any) -> None:
    def interrupt(ids: Any, scores: Any) -> Any:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        drive(model, [(PROMPT, SamplingParams(logits_processors=[interrupt]))])


def test_scores_given_to_others_are_copies(model: Any) -> None:
    """A processor and a criterion write into all that they get; sequences on the same row see nothing of it."""

    def vandal(ids: Any, scores: Any) -> Any:
        ids.fill_(1)
        kept = scores.clone()
        scores.fill_(0)
        return kept

    def vandal_criterion(ids: Any, scores: Any) -> bool:
        ids.fill_(1)
        scores[0].fill_(0)
        return False

    plain = SamplingParams(max_new_tokens=5)
    (right,) = outputs(drive(model, [(PROMPT, plain)]))[0]
    for way in (
        {"logits_processors": [vandal]},
        {"stopping_criteria": [vandal_criterion]},
        {"logits_processors": [vandal], "stopping_criteria": [vandal_criterion]},
    ):
        params = SamplingParams(max_new_tokens=5, n=2, **way)  # type: ignore[arg-type]
        runs = drive(
            model, [(PROMPT, params), (PROMPT, plain), (PROMPT, SamplingParams(max_new_tokens=5, logprobs=1))]
        )
        assert [out for group in outputs(runs) for out in group] == [right] * 4


def test_an_empty_call(model: Any) -> None:
    sampled = Sampler(model).sample(torch.empty(0, 64), [], np.zeros(0, int), lambda i: np.zeros(0, np.int64))
    assert len(sampled.token_ids) == 0
    assert sampled.finished == sampled.errors == {}
