"""`SamplingParams` takes what has a meaning, and refuses all else with one clear error."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from radixkv.core.errors import InvalidRequestError
from radixkv.engine.sampling_params import SamplingParams

NAN, INF = float("nan"), float("inf")
INTEGERS = ["max_new_tokens", "min_new_tokens", "n", "top_k", "seed", "logprobs"]
NUMBERS = ["temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"]
LISTS = ["stop_token_ids", "allowed_token_ids"]
FLAGS = ["ignore_eos", "include_stop_str_in_output"]
BAD: list[tuple[str, Any]] = [
    *[(name, value) for name in INTEGERS for value in (True, 1.0, 0.5, "3", -1, NAN, [1], 2**64, 1j, b"1")],
    *[(name, None) for name in ("n", "top_k", *NUMBERS, "stop", *LISTS[:1], *FLAGS) if name != "repetition_penalty"],
    *[(name, value) for name in NUMBERS for value in (NAN, INF, -INF, True, "1", [1.0], 10**400, 1j, -2.5)],
    *[(name, 0) for name in ("max_new_tokens", "n", "top_p", "repetition_penalty")],
    *[(name, np.bool_(True)) for name in (*INTEGERS, *NUMBERS)],
    *[(name, torch.tensor([1.0, 2.0])) for name in (*INTEGERS, *NUMBERS)],
    *[("top_p", value) for value in (1.0001, 2)],
    *[("min_p", value) for value in (1.0001, -0.1)],
    *[(name, value) for name in ("presence_penalty", "frequency_penalty") for value in (2.1, -2.1)],
    *[("stop", value) for value in ("", ["a", ""], [""], 3, ["a", 3], b"a", [b"a"], [None])],
    *[(name, value) for name in LISTS for value in (3, "3", [1.5], [True], [-1], [2**63], ["1"], np.array(3), [[1]])],
    ("allowed_token_ids", []),
    *[("bad_words_ids", value) for value in (3, "3", b"a", [3], ["a"], [[1.5]], [[]], [[1], []], [[-1]], [[[1]]],
                                             np.array(3), [1, [2]], [[True]], [b"a"], torch.tensor([1, 2]))],
    *[("logit_bias", value) for value in (3, "3", [3], [(1,)], [(1, 2, 3)], {1.5: 1.0}, {"1": 1.0}, {True: 1.0},
                                          {-1: 1.0}, {1: NAN}, {1: INF}, {1: True}, {1: "1"}, {1: None}, {1: [1.0]},
                                          {1: 10**400}, {1: 1e39}, [(1, 1.0), (1, 2.0)], np.array(3), {2**63: 1.0})],
    *[(name, value) for name in FLAGS for value in (1, 0, "yes", [], np.array([True]), torch.tensor([True, False]))],
    *[(name, value) for name in ("logits_processors", "stopping_criteria") for value in (3, len, "a", [3], [int])],
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), BAD, ids=lambda v: repr(v)[:30])
def test_what_has_no_meaning_is_refused(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**{name: value})
    message = str(caught.value)
    assert message.startswith(name), "names the field"
    assert "must be" in message, "says what is allowed"
    assert len(message) < 250
    assert "\n" not in message


def test_more_tokens_at_least_than_at_most() -> None:
    with pytest.raises(InvalidRequestError, match="min_new_tokens=9 is more than max_new_tokens=8"):
        SamplingParams(max_new_tokens=8, min_new_tokens=9)
    SamplingParams(max_new_tokens=8, min_new_tokens=8)
    SamplingParams(max_new_tokens=None, min_new_tokens=9000)


def test_unknown_options_are_refused() -> None:
    with pytest.raises(TypeError, match="num_beams"):
        SamplingParams(num_beams=4)  # type: ignore[call-arg]


@given(value=st.floats() | st.integers(-(2**70), 2**70))
@pytest.mark.parametrize("name", NUMBERS)
def test_any_number_is_kept_as_float_or_refused(name: str, value: Any) -> None:
    low, high = {
        "temperature": (0, math.inf),
        "top_p": (0, 1),
        "min_p": (0, 1),
        "repetition_penalty": (0, math.inf),
    }.get(name, (-2, 2))
    open_below = name in ("top_p", "repetition_penalty")
    allowed = math.isfinite(value) and low <= value <= high and not (open_below and value == low)
    if not allowed:
        with pytest.raises(InvalidRequestError, match=f"^{name} is"):
            SamplingParams(**{name: value})
    else:
        kept = getattr(SamplingParams(**{name: value}), name)
        assert type(kept) is float
        assert kept == float(value)


@given(value=st.integers(-(2**70), 2**70))
@pytest.mark.parametrize("name", INTEGERS)
def test_any_integer_is_kept_or_refused(name: str, value: int) -> None:
    low = 1 if name in ("max_new_tokens", "n") else 0
    high = 2**63 - 1 if name == "seed" else 2**31 - 1
    if name == "min_new_tokens":
        high = 128
    if low <= value <= high:
        assert getattr(SamplingParams(**{name: value}), name) == value
    else:
        with pytest.raises(InvalidRequestError, match=f"^{name}"):
            SamplingParams(**{name: value})


def test_numbers_of_numpy_and_torch() -> None:
    params = SamplingParams(
        temperature=np.float32(0.5),  # type: ignore[arg-type]
        top_p=torch.tensor(0.5),  # type: ignore[arg-type]
        top_k=np.int64(3),  # type: ignore[arg-type]
        seed=torch.tensor(4),  # type: ignore[arg-type]
        ignore_eos=np.bool_(True),  # type: ignore[arg-type]
        repetition_penalty=2,
    )
    assert (params.temperature, params.top_p, params.top_k, params.seed) == (0.5, 0.5, 3, 4)
    assert params.ignore_eos is True
    assert type(params.repetition_penalty) is float
    for ids in ([3, 4, 3], (3, 4), np.array([3, 4]), torch.tensor([3, 4]), iter([3, 4]), range(3, 5)):
        assert SamplingParams(stop_token_ids=ids).stop_token_ids == (3, 4)  # type: ignore[arg-type]
    assert SamplingParams(allowed_token_ids=np.array([4, 3, 4])).allowed_token_ids == (4, 3)  # type: ignore[arg-type]
    for rows in (
        [[3], [4, 5], [3]],
        ([3], (4, 5)),
        [np.array([3]), torch.tensor([4, 5])],
        iter([range(3, 4), [4, 5]]),
    ):
        assert SamplingParams(bad_words_ids=rows).bad_words_ids == ((3,), (4, 5))  # type: ignore[arg-type]
    for biases in (
        {4: 1, 3: -INF},
        [(4, np.float32(1)), [3, -INF]],
        {np.int64(4): torch.tensor(1.0), 3: -INF},
    ):
        assert SamplingParams(logit_bias=biases).logit_bias == ((3, -INF), (4, 1.0))  # type: ignore[arg-type]
    assert SamplingParams(stop="ab").stop == ("ab",)
    assert SamplingParams(stop=["a", "b", "a"]).stop == ("a", "b")


def test_none_is_the_models_own_or_no_limit() -> None:
    none = dict.fromkeys(
        (
            "max_new_tokens",
            "min_new_tokens",
            "repetition_penalty",
            "allowed_token_ids",
            "bad_words_ids",
            "seed",
        ),
    )
    params = SamplingParams(**none)  # type: ignore[arg-type]
    assert all(getattr(params, name) is None for name in none)
    assert dataclasses.replace(params, max_new_tokens=128) == SamplingParams()
    assert SamplingParams(logit_bias=None).logit_bias == SamplingParams(logit_bias={}).logit_bias == ()
    assert SamplingParams(bad_words_ids=[]).bad_words_ids == ()


def test_it_is_a_value() -> None:
    params = SamplingParams(
        max_new_tokens=3,
        stop=["x"],
        temperature=0.7,
        seed=1,
        logit_bias={5: 2.0},
        allowed_token_ids=[5, 6],
        bad_words_ids=[[5], [6, 5]],
    )
    assert dataclasses.replace(params, n=2).logit_bias == params.logit_bias == ((5, 2.0),)
    assert params == copy.deepcopy(params) == pickle.loads(pickle.dumps(params))
    assert hash(params) == hash(copy.copy(params))
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.n = 2  # type: ignore[misc]
    with pytest.raises(InvalidRequestError, match=r"^n is 0"):
        dataclasses.replace(params, n=0)
    assert not params.greedy
    assert SamplingParams().greedy


def test_every_field_is_documented() -> None:
    text = SamplingParams.__doc__ or ""
    for field in dataclasses.fields(SamplingParams):
        assert f"\n        {field.name}:" in text
