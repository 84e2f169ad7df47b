"""The sampler chooses the tokens that `model.generate()` chooses when the request is alone."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hf_testkit import EOS, FIRST, VOCAB, tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_testkit import LONGEST, drive, generated, one, outputs

from radixkv.core.errors import InvalidRequestError
from radixkv.engine.processors import OutputPenalty
from radixkv.engine.sampler import Sampler
from radixkv.engine.sampling_params import SamplingParams

PROMPT = [9, 33, 12, 9, 40, 33, 12, 8]
WATERMARK = transformers.WatermarkingConfig(bias=2.5, seeding_scheme="selfhash")


@pytest.fixture(scope="module")
def whole() -> Any:
    return tiny("llama_gqa", eos=True)


@pytest.fixture
def model(whole: Any) -> Iterator[Any]:
    before = whole.generation_config
    whole.generation_config = copy.deepcopy(before)
    yield whole
    whole.generation_config = before


def likely(model: Any, n: int = 12) -> list[int]:
    """What greedy would say: settings that are to change something are about these."""
    return generated(model, PROMPT, n)


def set_up(model: Any, own: dict[str, Any]) -> dict[str, Any]:
    """Change the model's own generation settings; numbers above a thousand stand for what greedy would say."""
    tokens = likely(model)

    def meant(value: Any) -> Any:
        if isinstance(value, bool):
            return value
        if isinstance(value, int) and value >= 1000:
            return tokens[value - 1000]
        if isinstance(value, list):
            return [meant(v) for v in value]
        return value

    for name, value in own.items():
        setattr(model.generation_config, name, meant(value))
    return {name: meant(value) for name, value in own.items()}


OWN: dict[str, dict[str, Any]] = {
    "nothing": {},
    "eos": {"eos_token_id": 1004},
    "several eos": {"eos_token_id": [63, 1006, 1003]},
    "suppress": {"suppress_tokens": [1000, 1002, 5]},
    "begin suppress": {"begin_suppress_tokens": [1000]},
    "ngrams": {"no_repeat_ngram_size": 2},
    "bad words": {"bad_words_ids": [[1001], [1000, 1003], [12, 9]]},
    "bad eos": {"bad_words_ids": [[1001], [1004]], "eos_token_id": 1004},
    "repetition": {"repetition_penalty": 1.7},
    "forced eos": {"forced_eos_token_id": EOS},
    "forced bos": {"forced_bos_token_id": 7},
    "min new": {"min_new_tokens": 6, "eos_token_id": [1002, 1003]},
    "min length": {"min_length": len(PROMPT) + 5, "eos_token_id": 1002},
    "min both": {"min_length": 3, "min_new_tokens": 7, "eos_token_id": 1002},
    "decay": {"exponential_decay_length_penalty": (3, 2.5), "eos_token_id": 11},
    "bias": {"sequence_bias": [[[21], 9.0], [[21, 22], 30.0]]},
    "invalid": {"remove_invalid_values": True},
    "normalised": {"renormalize_logits": True, "repetition_penalty": 1.2},
    "encoder": {"encoder_repetition_penalty": 1.5, "encoder_no_repeat_ngram_size": 2},
    "watermark": {"watermarking_config": WATERMARK},
    "sampling by itself": {"do_sample": True, "temperature": 0.3, "top_k": 4, "top_p": 0.5},
    "length by itself": {"max_length": 13},
    "new by itself": {"max_new_tokens": 3},
    "no pad": {"pad_token_id": None, "eos_token_id": 1005},
    "all": {
        "eos_token_id": [1008, 1009],
        "min_new_tokens": 4,
        "repetition_penalty": 1.3,
        "no_repeat_ngram_size": 3,
        "suppress_tokens": [1001],
        "bad_words_ids": [[20, 21]],
        "begin_suppress_tokens": [30],
    },
}


@pytest.mark.parametrize("own", OWN)
@pytest.mark.parametrize("prompt", [PROMPT, [1]], ids=["prompt", "bos"])
def test_greedy(model: Any, own: str, prompt: list[int]) -> None:
    plain = generated(model, prompt, 12)
    set_up(model, OWN[own])
    expected = generated(model, prompt, 12)
    run = one(model, prompt, SamplingParams(max_new_tokens=12))
    assert run.output == expected
    assert run.reason == ("stop" if run.output[-1] in run.state.stop_token_ids else "length")
    if own in (
        "suppress",
        "begin suppress",
        "ngrams",
        "bad words",
        "repetition",
        "forced eos",
        "bias",
        "all",
    ):
        assert prompt == [1] or expected != plain, "the test tests nothing"


@pytest.mark.parametrize("arch", ["gemma3", "gpt2", "qwen3"])
def test_greedy_other_models(arch: str) -> None:
    model = tiny(arch, eos=True)
    assert one(model, PROMPT, SamplingParams(max_new_tokens=16)).output == generated(model, PROMPT, 16)


@pytest.mark.parametrize("own", ["several eos", "forced eos", "decay", "min new", "bad eos", "all"])
def test_eos_ignored(model: Any, own: str) -> None:
    set_up(model, OWN[own])
    more = {"exponential_decay_length_penalty": None} if own == "decay" else {}
    expected = generated(model, PROMPT, 12, eos_token_id=None, **more)
    run = one(model, PROMPT, SamplingParams(max_new_tokens=12, ignore_eos=True))
    assert run.output == expected
    assert len(run.output) == 12
    assert run.reason == "length"


@pytest.mark.parametrize("ignore_eos", [False, True])
@pytest.mark.parametrize("least", [0, 5])
def test_stop_ids_are_more_eos_ids(model: Any, ignore_eos: bool, least: int) -> None:
    tokens = likely(model)
    model.generation_config.eos_token_id = [tokens[8]]
    ids = [tokens[4], 60] if ignore_eos else [tokens[4], tokens[8]]
    params = SamplingParams(
        max_new_tokens=12, min_new_tokens=least, stop_token_ids=[tokens[4], 60], ignore_eos=ignore_eos
    )
    run = one(model, PROMPT, params)
    assert run.output == generated(model, PROMPT, 12, eos_token_id=ids, min_new_tokens=least or None)
    assert len(run.output) >= least


@pytest.mark.parametrize("penalty", [0.7, 1.4])
def test_a_setting_of_the_request_replaces_the_models(model: Any, penalty: float) -> None:
    set_up(model, {"repetition_penalty": 1.9, "min_new_tokens": 2, "eos_token_id": [1001, 1003, 1005]})
    params = SamplingParams(max_new_tokens=12, repetition_penalty=penalty, min_new_tokens=5)
    expected = generated(model, PROMPT, 12, repetition_penalty=penalty, min_new_tokens=5)
    assert one(model, PROMPT, params).output == expected


OFF: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # here, and in generate()
    "repetition": ({"repetition_penalty": 1.0}, {"repetition_penalty": 1.0}),
    "least": ({"min_new_tokens": 0}, {"min_new_tokens": None, "min_length": 0}),
    "bad words": ({"bad_words_ids": []}, {"bad_words_ids": None}),
}


@pytest.mark.parametrize(
    "own", [{}, {"min_length": len(PROMPT) + 9}, {"max_length": 500, "min_length": 2}], ids=str
)
@pytest.mark.parametrize(
    "off", [[], ["repetition"], ["least"], ["bad words"], ["repetition", "least"], list(OFF)], ids=str
)
def test_the_models_own_can_be_switched_off(model: Any, own: dict[str, Any], off: list[str]) -> None:
    plain = likely(model)
    late = next(token for i, token in enumerate(plain) if i and token not in plain[:i])
    settings = {"repetition_penalty": 1.9, "min_new_tokens": 7, "bad_words_ids": [[plain[0], late]], **own}
    set_up(model, {"eos_token_id": [late, *range(40, 60)], **settings})
    mine: dict[str, Any] = {}
    theirs: dict[str, Any] = {}
    for name in off:
        mine |= OFF[name][0]
        theirs |= OFF[name][1]
    run = one(model, PROMPT, SamplingParams(max_new_tokens=12, **mine))
    assert run.output == generated(model, PROMPT, 12, **theirs)
    if len(off) == len(OFF):
        assert run.output == plain[: plain.index(late) + 1], "the test tests nothing"
    elif "least" not in off:
        assert len(run.output) >= 7


BIASED: dict[str, dict[str, Any]] = {
    "bias": {"logit_bias": {1001: 5.0, 1002: -7.5, 40: 3.0}},
    "forbidden": {"logit_bias": {1000: -math.inf, 1001: -math.inf}},
    "wanted": {"logit_bias": {33: 1e30}},
    "allowed": {"allowed_token_ids": [1001, 9, 40, 1003, *range(41, 50)]},
    "allowed one": {"allowed_token_ids": [17]},
    "allowed with eos": {"allowed_token_ids": [EOS, 30]},
    "bad words": {"bad_words_ids": [[1001], [1000, 1002], [12, 9], [PROMPT[-1], 1000]]},
    "bad eos": {"bad_words_ids": [[EOS], [1002]]},
    "all": {
        "logit_bias": {50: 4.0, 51: 3.0, 1003: 1.0},
        "allowed_token_ids": list(range(20, 60)),
        "bad_words_ids": [[50], [51, 51]],
        "repetition_penalty": 1.2,
        "min_new_tokens": 5,
    },
}


@pytest.mark.parametrize(
    ("how", "own"),
    [
        (how, own)
        for how in BIASED
        for own in ("nothing", "all", "bias", "bad words", "forced eos")
        if not (
            how.startswith("allowed ") and own == "all"
        )  # no n-gram may come again: up to version 4, nothing is left
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 1.3])
def test_biases_and_forbidden_tokens(model: Any, how: str, own: str, temperature: float) -> None:
    tokens = likely(model)

    def meant(token: int) -> int:
        return tokens[token - 1000] if token >= 1000 else token

    wanted = dict(BIASED[how])
    arguments: dict[str, Any] = {}
    set_up(model, OWN[own])
    if "logit_bias" in wanted:
        wanted["logit_bias"] = {meant(token): bias for token, bias in wanted["logit_bias"].items()}
        biases = {(token,): bias for token, bias in wanted["logit_bias"].items()}
        for ids, bias in OWN[own].get("sequence_bias", []):
            biases[tuple(ids)] = biases.get(tuple(ids), 0.0) + bias
        arguments["sequence_bias"] = [[list(ids), bias] for ids, bias in biases.items()]
    if "allowed_token_ids" in wanted:
        allowed = wanted["allowed_token_ids"] = [meant(token) for token in wanted["allowed_token_ids"]]
        arguments["prefix_allowed_tokens_fn"] = lambda batch_id, ids: allowed
    if "bad_words_ids" in wanted:
        wanted["bad_words_ids"] = [[meant(token) for token in row] for row in wanted["bad_words_ids"]]
        arguments["bad_words_ids"] = wanted["bad_words_ids"]
    arguments |= {name: wanted[name] for name in ("repetition_penalty", "min_new_tokens") if name in wanted}
    if temperature:
        arguments |= {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    expected = generated(model, PROMPT, 12, 6, **arguments)
    params = SamplingParams(max_new_tokens=12, temperature=temperature, seed=6, **wanted)
    assert one(model, PROMPT, params).output == expected
    if how != "bad eos" and own == "nothing" and not temperature:
        assert expected != tokens, "the test tests nothing"


@pytest.mark.parametrize("form", [dict, list])
def test_a_bias_adds_up_with_the_models_own(model: Any, form: Any) -> None:
    tokens = likely(model)
    own = [[[21], 40.0], [[21, 22], 80.0]]
    model.generation_config.sequence_bias = own if form is list else {tuple(ids): bias for ids, bias in own}
    assert one(model, PROMPT, SamplingParams(max_new_tokens=4)).output[:2] == [21, 22]
    params = SamplingParams(max_new_tokens=4, logit_bias={21: -80.0})
    assert one(model, PROMPT, params).output[0] == tokens[0]


def test_tokens_that_do_not_exist(model: Any) -> None:
    sampler = Sampler(model)
    for wanted in (
        {"logit_bias": {VOCAB: 1.0, 3: 1.0}},
        {"allowed_token_ids": [3, VOCAB]},
        {"bad_words_ids": [[3], [4, VOCAB]]},
    ):
        (name,) = wanted
        with pytest.raises(InvalidRequestError, match=rf"{name} \[{VOCAB}\] do not exist"):
            sampler.start(SamplingParams(**wanted), np.array(PROMPT))  # type: ignore[arg-type]


def test_no_limit_of_new_tokens(model: Any) -> None:
    model.generation_config.eos_token_id = None
    plain = generated(model, PROMPT, LONGEST)
    params = SamplingParams(max_new_tokens=None)
    assert one(model, PROMPT, params).output == plain
    model.generation_config.forced_eos_token_id = 5
    assert one(model, PROMPT, params).output == plain, "it never comes to its end"


def test_a_setting_changed_between_two_requests(model: Any) -> None:
    sampler = Sampler(model)
    params = SamplingParams(max_new_tokens=8)
    plain = likely(model, 8)
    assert one(model, PROMPT, params, sampler=sampler).output == plain
    model.generation_config.suppress_tokens = [plain[2]]
    changed = generated(model, PROMPT, 8)
    assert changed != plain
    assert one(model, PROMPT, params, sampler=sampler).output == changed
    model.generation_config.suppress_tokens.append(plain[0])  # in place
    assert one(model, PROMPT, params, sampler=sampler).output == generated(model, PROMPT, 8)
    model.generation_config.suppress_tokens = None
    assert one(model, PROMPT, params, sampler=sampler).output == plain


SAMPLING: dict[str, dict[str, Any]] = {
    "temperature 1": {"temperature": 1.0},
    "temperature": {"temperature": 0.7},
    "hot": {"temperature": 3.0},
    "top-k": {"temperature": 1.0, "top_k": 5},
    "top-k of one": {"temperature": 1.0, "top_k": 1},
    "top-k of all": {"temperature": 1.0, "top_k": 5000},
    "top-p": {"temperature": 1.3, "top_p": 0.6},
    "tiny top-p": {"temperature": 1.3, "top_p": 1e-6},
    "min-p": {"temperature": 1.0, "min_p": 0.1},
    "min-p 1": {"temperature": 1.0, "min_p": 1.0},
    "all": {"temperature": 1.5, "top_k": 30, "top_p": 0.9, "min_p": 0.02},
    "repetition": {"temperature": 1.0, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.3},
    "least": {"temperature": 1.5, "min_new_tokens": 9},
}


@pytest.mark.parametrize(
    ("how", "own"),
    [*((how, own) for how in SAMPLING for own in ("nothing", "all", "several eos")), ("all", "watermark")],
)
def test_seeded_sampling(model: Any, how: str, own: str) -> None:
    set_up(model, OWN[own])
    wanted = SAMPLING[how]
    for seed in (0, 2**40 + 17):
        run = one(model, PROMPT, SamplingParams(max_new_tokens=12, seed=seed, **wanted))
        own_names = {"do_sample": True, "top_k": 0, "top_p": 1.0, **wanted}
        assert run.output == generated(model, PROMPT, 12, seed, **own_names)


@pytest.mark.parametrize(
    "own",
    [
        {"typical_p": 0.7},
        {"epsilon_cutoff": 0.02},
        {"eta_cutoff": 0.1},
        {"renormalize_logits": True},
        {"do_sample": True, "temperature": 0.2, "top_k": 3, "top_p": 0.4, "min_p": 0.3},
        {"remove_invalid_values": True, "suppress_tokens": [1000, 1001]},
    ],
    ids=lambda own: next(iter(own)),
)
def test_what_the_params_have_no_field_for_is_the_models(model: Any, own: dict[str, Any]) -> None:
    set_up(model, own)
    params = SamplingParams(max_new_tokens=12, temperature=1.2, top_k=40, seed=3)
    expected = generated(
        model, PROMPT, 12, 3, do_sample=True, temperature=1.2, top_k=40, top_p=1.0, min_p=None
    )
    assert one(model, PROMPT, params).output == expected


@settings(max_examples=25)
@given(data=st.data())
def test_any_settings(whole: Any, data: st.DataObject) -> None:
    own = {
        "temperature": data.draw(st.sampled_from([0.5, 1.0, 1.7])),
        "top_k": data.draw(st.sampled_from([0, 1, 7, 64, 100])),
        "top_p": data.draw(st.floats(0.01, 1.0)),
        "min_p": data.draw(st.sampled_from([0.0, 0.05, 0.5])),
        "repetition_penalty": data.draw(st.sampled_from([1.0, 1.2, 0.8])),
        "min_new_tokens": data.draw(st.integers(0, 10)),
    }
    seed = data.draw(st.integers(0, 2**63 - 1))
    prompt = data.draw(st.lists(st.integers(FIRST, VOCAB - 1), min_size=1, max_size=12))
    stops = data.draw(st.lists(st.integers(0, VOCAB - 1), max_size=12, unique=True))
    params = SamplingParams(max_new_tokens=10, seed=seed, stop_token_ids=stops, **own)
    least = own.pop("min_new_tokens") or None
    eos = [EOS, *(token for token in stops if token != EOS)]
    expected = generated(
        whole, prompt, 10, seed, do_sample=True, min_new_tokens=least, eos_token_id=eos, **own
    )
    assert one(whole, prompt, params).output == expected


def test_sequences_of_a_request_have_the_seeds_that_follow(model: Any) -> None:
    params = SamplingParams(max_new_tokens=8, n=4, temperature=1.0, seed=70)
    (runs,) = drive(model, [(PROMPT, params)])
    for index, run in enumerate(runs):
        expected = generated(model, PROMPT, 8, 70 + index, do_sample=True, top_k=0)
        assert run.output == expected
    assert len({tuple(run.output) for run in runs}) == 4


def test_greedy_sequences_of_a_request_are_equal(model: Any) -> None:
    (runs,) = drive(model, [(PROMPT, SamplingParams(max_new_tokens=8, n=3))])
    assert [run.output for run in runs] == [likely(model, 8)] * 3


def test_the_largest_seed(model: Any) -> None:
    params = SamplingParams(max_new_tokens=4, n=2, temperature=1.0, seed=2**63 - 1)
    assert len(drive(model, [(PROMPT, params)])[0]) == 2


def test_without_a_seed_torchs_own_decides(model: Any) -> None:
    params = SamplingParams(max_new_tokens=10, n=2, temperature=1.0)
    results = []
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        results.append(outputs(drive(model, [(PROMPT, params), (PROMPT, params)])))
    assert results[0] == results[1] != results[2]
    assert len({tuple(tokens) for group in results[0] for tokens in group}) == 4
    state = torch.get_rng_state()
    drive(
        model, [(PROMPT, SamplingParams(max_new_tokens=3)), (PROMPT, SamplingParams(temperature=1.0, seed=1))]
    )
    assert torch.equal(torch.get_rng_state(), state), "greedy and seeded ones leave torch's generator alone"


def reference_penalty(presence: float, frequency: float, prompt_len: int) -> Any:
    def process(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        counts = np.bincount(ids[0, prompt_len:].numpy(), minlength=scores.shape[1])
        penalty = counts * frequency + (counts > 0) * presence
        return scores - torch.from_numpy(penalty).to(scores.dtype)

    return process


@pytest.mark.parametrize("presence", [-1.0, 0.0, 2.0])
@pytest.mark.parametrize("frequency", [-0.5, 0.0, 1.5])
@pytest.mark.parametrize("temperature", [0.0, 1.2])
def test_presence_and_frequency_penalties(
    model: Any, presence: float, frequency: float, temperature: float
) -> None:
    params = SamplingParams(
        max_new_tokens=24,
        presence_penalty=presence,
        frequency_penalty=frequency,
        temperature=temperature,
        seed=4,
        ignore_eos=True,
    )
    kwargs: dict[str, Any] = (
        {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {}
    )
    expected = generated(
        model,
        PROMPT,
        24,
        4,
        logits_processor=[reference_penalty(presence, frequency, len(PROMPT))],
        eos_token_id=None,
        **kwargs,
    )
    assert one(model, PROMPT, params).output == expected


@given(st.lists(st.integers(0, 30), max_size=60), st.integers(0, 5), st.data())
def test_penalties_count_as_they_go(tokens: list[int], prompt_len: int, data: st.DataObject) -> None:
    penalty: Any = OutputPenalty(0.5, 0.25, prompt_len)
    reference = reference_penalty(0.5, 0.25, prompt_len)
    scores = torch.randn(1, 31, generator=torch.Generator().manual_seed(1))
    length = 0
    for _ in range(8):
        if data.draw(st.booleans()):
            penalty = penalty.fork()
        if data.draw(st.integers(0, 9)) == 0:
            length = 0
        length = data.draw(st.integers(length, len(tokens)))
        ids = torch.tensor([tokens[:length]], dtype=torch.long)
        torch.testing.assert_close(penalty(ids, scores), reference(ids, scores))


def test_processors_of_the_user_stand_where_generate_puts_them(model: Any) -> None:
    set_up(model, OWN["all"])

    class Spy(transformers.LogitsProcessor):
        def __init__(self) -> None:
            self.seen: list[tuple[list[int], torch.Tensor]] = []

        def __call__(self, input_ids: Any, scores: Any) -> Any:
            self.seen.append((input_ids[0].tolist(), scores.clone()))
            scores[:, 40:50] += 3  # in place
            return scores

    mine, theirs = Spy(), Spy()
    banned = transformers.SuppressTokensLogitsProcessor([44, 45])
    params = SamplingParams(
        max_new_tokens=9, temperature=1.3, top_p=0.9, seed=8, logits_processors=[mine, banned]
    )
    expected = generated(
        model,
        PROMPT,
        9,
        8,
        do_sample=True,
        temperature=1.3,
        top_k=0,
        top_p=0.9,
        logits_processor=[theirs, banned],
    )
    assert one(model, PROMPT, params).output == expected
    assert [ids for ids, _ in mine.seen] == [ids for ids, _ in theirs.seen]
    for (_, own), (_, other) in zip(mine.seen, theirs.seen, strict=True):
        torch.testing.assert_close(own, other)


def test_a_processor_that_keeps_state_can_be_forked_for_each_sequence(model: Any) -> None:
    class Alternates:
        def __init__(self) -> None:
            self.calls = 0

        def fork(self) -> Alternates:
            return Alternates()

        def __call__(self, input_ids: Any, scores: Any) -> Any:
            self.calls += 1
            scores[:, (10 if self.calls % 2 else 11)] = 1000.0
            return scores

    one_for_all = Alternates()
    params = SamplingParams(max_new_tokens=4, n=2, logits_processors=[one_for_all])
    runs = drive(model, [(PROMPT, params), (PROMPT[:3], params)])
    assert outputs(runs) == [[[10, 11, 10, 11]] * 2] * 2
    assert one_for_all.calls == 0


@pytest.mark.parametrize("own", [{"guidance_scale": 1.5}, {"token_healing": True}])
def test_what_the_engine_does_not_do_is_refused(model: Any, own: dict[str, Any]) -> None:
    set_up(model, own)
    with pytest.raises(InvalidRequestError, match="generat"):
        Sampler(model).start(SamplingParams(), np.array(PROMPT))


def test_beam_search_is_said_to_be_left_out(model: Any) -> None:
    plain = likely(model, 6)
    model.generation_config.num_beams = 3
    sampler = Sampler(model)
    with pytest.warns(UserWarning, match="num_beams=3"):
        assert one(model, PROMPT, SamplingParams(max_new_tokens=6), sampler=sampler).output == plain


def test_what_generate_refuses_is_refused(model: Any) -> None:
    model.generation_config.bad_words_ids = [[-3]]
    with pytest.raises(InvalidRequestError, match="generate"):
        Sampler(model).start(SamplingParams(), np.array(PROMPT))


def test_asking_runs_no_forward_and_changes_nothing(model: Any) -> None:
    set_up(model, OWN["all"])
    before = (model.generation_config.to_dict(), model.config.to_dict(), torch.get_rng_state())

    def forward(*_: Any, **__: Any) -> None:
        raise AssertionError("a forward")

    handle = model.register_forward_pre_hook(forward)
    try:
        Sampler(model).start(SamplingParams(temperature=1.0, seed=1, presence_penalty=1.0), np.array(PROMPT))
    finally:
        handle.remove()
    assert model.generation_config.to_dict() == before[0]
    assert model.config.to_dict() == before[1]
    assert torch.equal(torch.get_rng_state(), before[2])


class Bare(torch.nn.Module):
    """A model that has logits and nothing else."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.inner = model
        self.config = model.config

    def forward(self, ids: torch.Tensor, use_cache: bool = False) -> Any:
        return self.inner(ids, use_cache=use_cache)


class Silent(Bare):
    """Its `generate()` runs its own loop whatever it is told."""

    def generate(self, ids: Any, **_: Any) -> Any:
        return ids


@pytest.mark.parametrize("how", ["temperature", "all", "repetition", "least"])
@pytest.mark.parametrize("kind", [Bare, Silent])
def test_a_model_that_cannot_be_asked(whole: Any, how: str, kind: type[Bare]) -> None:
    bare = kind(whole)
    wanted = SAMPLING[how]
    sampler = Sampler(bare)
    params = SamplingParams(max_new_tokens=10, seed=2, **wanted)
    if kind is Silent:
        with pytest.warns(UserWarning, match="no longer tells"):
            sampler.start(params, np.array(PROMPT))
    expected = generated(whole, PROMPT, 10, 2, **{"do_sample": True, "top_k": 0, "top_p": 1.0, **wanted})
    assert one(bare, PROMPT, params, sampler=sampler).output == expected
