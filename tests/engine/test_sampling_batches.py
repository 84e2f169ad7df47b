"""What a sequence gets does not depend on what else is sampled with it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hf_testkit import prompt, tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_testkit import drive, last_logits, one, outputs

from radixkv.engine import draws
from radixkv.engine.sampler import Sampler
from radixkv.engine.sampling_params import SamplingParams
from radixkv.engine.shortlist import Shortlist
from radixkv.engine.treatment import Treatment

LARGE = 9000  # of this size on, filters work on a shortlist
KINDS: list[dict[str, Any]] = [
    {},
    {"logprobs": 3},
    {"logprobs": 0, "temperature": 1.0},
    {"temperature": 1.0},
    {"temperature": 1.0, "n": 3},
    {"temperature": 1.0, "top_k": 5},
    {"temperature": 0.8, "top_p": 0.7},
    {"temperature": 0.8, "top_p": 0.7, "seed": 3, "n": 2},
    {"temperature": 1.2, "min_p": 0.1},
    {"temperature": 1.2, "top_k": 9, "top_p": 0.8, "min_p": 0.05},
    {"repetition_penalty": 1.5},
    {"repetition_penalty": 1.5, "temperature": 1.0, "top_k": 5},
    {"presence_penalty": 1.0, "frequency_penalty": 0.5, "n": 2},
    {"min_new_tokens": 5, "stop_token_ids": list(range(3, 40))},
    {"min_new_tokens": 3, "temperature": 1.0, "n": 2},
    {"stop_token_ids": list(range(20, 30))},
    {"ignore_eos": True},
    {"stopping_criteria": [lambda ids, scores: ids.shape[1] > 12]},
    {"stopping_criteria": [lambda ids, scores: scores[-1].max() > 7], "temperature": 1.0, "top_k": 8},
    {"logits_processors": [lambda ids, scores: scores.roll(1, dims=-1)]},
]


@pytest.fixture(scope="module")
def model() -> Any:
    model = tiny("llama_gqa", eos=True)
    model.generation_config.suppress_tokens = [50]
    return model


def requests(seed: int) -> list[tuple[list[int], SamplingParams]]:
    made = []
    for i, kind in enumerate(KINDS):
        ids = prompt(4 + i % 3, seed=i % 4)[0].tolist()  # some prompts are equal: rows are shared
        made.append((ids, SamplingParams(**{"max_new_tokens": 7, "seed": 100 * seed + i, **kind})))
    return made


@pytest.mark.parametrize("shared_rows", [True, False])
@pytest.mark.parametrize("shuffle", [0, 1, 2, 3])
def test_mixed_and_shuffled(model: Any, shuffle: int, shared_rows: bool) -> None:
    wanted = requests(shuffle)
    alone = [outputs(drive(model, [request]))[0] for request in wanted]
    order = np.random.default_rng(shuffle).permutation(len(wanted))
    together = drive(model, [wanted[i] for i in order], shuffle=shuffle, shared_rows=shared_rows)
    assert outputs(together) == [alone[i] for i in order]


def test_logprobs_are_the_models_own(model: Any) -> None:
    settings: list[dict[str, Any]] = [
        {},
        {"temperature": 0.3, "top_k": 2, "seed": 1},
        {"repetition_penalty": 3.0},
        {"temperature": 2.0, "seed": 5},
    ]
    for count in (0, 1, 5, 64):
        params = [SamplingParams(max_new_tokens=6, logprobs=count, **kind) for kind in settings]
        ids = prompt(6)[0].tolist()
        for (run,) in drive(model, [(ids, p) for p in params], shuffle=count):
            for step, entry in enumerate(run.logprobs):
                row = last_logits(model, run.ids[: run.prompt_len + step]).double()
                right = row - row.exp().sum().log()
                assert entry is not None
                assert entry.token_id == run.output[step]
                assert entry.logprob == pytest.approx(right[entry.token_id].item(), abs=1e-5)
                top = right.sort(descending=True)
                assert entry.top_ids == top.indices[:count].tolist()
                assert entry.top_logprobs == pytest.approx(top.values[:count].tolist(), abs=1e-5)


def test_logprobs_do_not_change_the_tokens(model: Any) -> None:
    ids = prompt(6)[0].tolist()
    for kind in ({}, {"temperature": 1.0, "seed": 3}):
        with_them = one(model, ids, SamplingParams(max_new_tokens=6, logprobs=2, **kind))
        assert with_them.output == one(model, ids, SamplingParams(max_new_tokens=6, **kind)).output
        assert with_them.state.params.logprobs == 2
        assert all(entry is not None for entry in with_them.logprobs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_types_of_logits(dtype: torch.dtype) -> None:
    logits = torch.randn(5, 300, generator=torch.Generator().manual_seed(0)).to(dtype)
    logits[2, 7] = logits[2, 9] = logits[2].max() + 1  # a tie, as is common in bfloat16: the first wins
    sampler = Sampler(Anything())
    array = np.array([1, 2])
    for kind in (
        {},
        {"temperature": 0.7, "seed": 1},
        {"repetition_penalty": 1.2},
        {"temperature": 1.0, "seed": 2},
    ):
        states = [sampler.start(SamplingParams(**kind), array) for _ in range(5)]
        got = sampler.sample(logits, states, np.arange(5), lambda i: array).token_ids
        states = [sampler.start(SamplingParams(**kind), array) for _ in range(5)]
        expected = sampler.sample(logits.float(), states, np.arange(5), lambda i: array).token_ids
        assert got.tolist() == expected.tolist()
        if not kind:
            assert got.tolist() == logits.float().argmax(dim=-1).tolist()


class Anything:
    """A model nobody looks at."""


def test_a_fork_goes_on_by_itself(model: Any) -> None:
    ids = prompt(6)[0].tolist()
    for kind in (
        {"temperature": 1.0, "seed": 1},
        {"temperature": 1.0, "seed": 1, "repetition_penalty": 1.3, "presence_penalty": 1.0},
        {"presence_penalty": 1.5, "frequency_penalty": 1.0},
    ):
        params = SamplingParams(max_new_tokens=40, ignore_eos=True, **kind)  # type: ignore[arg-type]
        whole = one(model, ids, params).output
        results = []
        for _ in range(2):
            sampler = Sampler(model)
            parent = sampler.start(params, np.array(ids))
            known = advance(model, sampler, [parent], [list(ids)], 10)
            children = [sampler.fork(parent) for _ in range(2)]
            tokens = advance(model, sampler, [parent, *children], [list(known[0]) for _ in range(3)], 30)
            outs = [row[len(ids) :] for row in tokens]
            assert outs[0] == whole, "its forks change nothing for it"
            results.append(outs)
            if "temperature" in kind:
                assert len({tuple(out) for out in outs}) == 3
                assert len({tuple(out[:10]) for out in outs}) == 1
            else:
                assert outs == [whole] * 3
        assert results[0] == results[1], "reproducible"


def advance(
    model: Any, sampler: Sampler, states: list[Any], known: list[list[int]], n: int
) -> list[list[int]]:
    for _ in range(n):
        logits = torch.stack([last_logits(model, row) for row in known])
        sampled = sampler.sample(logits, states, np.arange(len(states)), lambda i: np.array(known[i]))
        for row, token in zip(known, sampled.token_ids.tolist(), strict=True):
            row.append(token)
    return known


def test_processors_that_generate_made_are_forked_with_their_state(model: Any) -> None:
    before = model.generation_config.watermarking_config
    model.generation_config.watermarking_config = transformers.SynthIDTextWatermarkingConfig(
        ngram_len=3, keys=[1, 2, 3]
    )
    try:
        params = SamplingParams(max_new_tokens=14, temperature=1.0, seed=5)
        whole = one(model, prompt(6)[0].tolist(), params).output
        sampler = Sampler(model)
        parent = sampler.start(params, prompt(6)[0].numpy())
        known = advance(model, sampler, [parent], [prompt(6)[0].tolist()], 5)
        child = sampler.fork(parent)
        rows = advance(model, sampler, [parent, child], [list(known[0]), list(known[0])], 9)
        assert rows[0][6:] == whole
    finally:
        model.generation_config.watermarking_config = before


# -- large vocabularies ---------------------------------------------------------------------------------------


def rows_of(seed: int, count: int = 3, spread: float = 3.0, vocab: int = LARGE) -> torch.Tensor:
    return torch.randn(count, vocab, generator=torch.Generator().manual_seed(seed)) * spread


def warpers(**kinds: float) -> list[Any]:
    made: dict[str, Any] = {
        "temperature": transformers.TemperatureLogitsWarper,
        "top_k": transformers.TopKLogitsWarper,
        "top_p": transformers.TopPLogitsWarper,
        "min_p": transformers.MinPLogitsWarper,
    }
    return [made[name](value) for name, value in kinds.items()]


FILTERS: list[dict[str, Any]] = [
    {"top_k": 50},
    {"temperature": 0.7, "top_k": 50},
    {"temperature": 0.7, "top_k": 1},
    {"temperature": 0.7, "top_k": 64, "top_p": 0.95},
    {"temperature": 1.5, "top_k": 64, "top_p": 0.95, "min_p": 0.1},
    {"top_k": 1000},
    {"top_p": 0.9},
    {"top_p": 0.999999},
    {"top_p": 1e-9},
    {"temperature": 0.7, "top_p": 0.3, "min_p": 0.2},
    {"min_p": 0.05},
    {"temperature": 2.0, "min_p": 1e-9},
    {"min_p": 1.0},
]


@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("spread", [0.1, 1.0, 3.0, 10.0])
def test_a_shortlist_keeps_what_the_filters_keep(filters: dict[str, Any], spread: float) -> None:
    processors = warpers(**filters)
    short = Shortlist.for_processors(processors)
    assert short is not None
    for seed in range(4):
        scores = rows_of(seed, spread=spread)
        scores[1, 100:160] = scores[1].topk(40).values[-1]  # ties
        right = scores
        for processor in processors:
            right = processor(torch.empty(3, 0), right)
        right = right.softmax(dim=-1)
        if not short.fits(LARGE):
            continue
        got, ids, decided = short(scores)
        for row in decided.nonzero()[:, 0].tolist():
            whole = torch.zeros(LARGE).scatter(0, ids[row], got[row])
            assert (whole > 0).tolist() == (right[row] > 0).tolist()
            torch.testing.assert_close(whole, right[row], rtol=1e-5, atol=1e-8)
        if spread == 10.0 and filters.get("top_p") != 0.999999 and filters.get("min_p") != 1e-9:
            assert decided[[0, 2]].all(), "or it would be of no use"


@pytest.mark.parametrize("filters", [{}, {"temperature": 1.3}, *FILTERS], ids=str)
@pytest.mark.parametrize("spread", [0.5, 4.0])
def test_large_vocabularies_draw_what_multinomial_draws(filters: dict[str, Any], spread: float) -> None:
    processors = warpers(**filters)
    treatment = Treatment(processors, samples=True)
    for seed in range(3):
        scores = rows_of(seed, count=4, spread=spread)
        scores[3] = 0.5
        mine, theirs = ([torch.Generator().manual_seed(seed + i) for i in range(4)] for _ in range(2))
        for _ in range(3):
            ids, usable = treatment.choose(scores.clone(), mine)
            assert usable.all()
            for i in range(4):
                row = scores[i : i + 1]
                for processor in processors:
                    row = processor(torch.empty(1, 0), row)
                assert ids[i] == torch.multinomial(row.softmax(dim=-1), 1, generator=theirs[i])[0, 0]
        assert all(torch.equal(a.get_state(), b.get_state()) for a, b in zip(mine, theirs, strict=True))


@pytest.mark.parametrize("filters", [{}, {"temperature": 0.9}, *FILTERS], ids=str)
def test_rows_of_large_vocabularies_do_not_see_each_other(filters: dict[str, Any]) -> None:
    treatment = Treatment(warpers(**filters), samples=True)
    scores = torch.cat([rows_of(s, spread=spread) for s, spread in enumerate((0.1, 2.0, 8.0))])
    scores[4] = float("nan")
    scores[5] = -torch.inf
    together, usable = treatment.choose(
        scores.clone(), [torch.Generator().manual_seed(i) for i in range(len(scores))]
    )
    assert usable.tolist() == [i not in (4, 5) for i in range(len(scores))]
    for i in range(len(scores)):
        token, fine = treatment.choose(scores[i : i + 1].clone(), [torch.Generator().manual_seed(i)])
        assert fine[0] == usable[i]
        assert not fine[0] or token[0] == together[i]


@settings(max_examples=40)
@given(
    vocab=st.integers(1, 300),
    rows=st.integers(1, 5),
    seed=st.integers(0, 2**31),
    spread=st.sampled_from([0.0, 1.0, 20.0]),
)
def test_a_draw_is_a_draw_of_multinomial(vocab: int, rows: int, seed: int, spread: float) -> None:
    probabilities = rows_of(seed, rows, spread, vocab).softmax(dim=-1)
    mine, theirs = ([torch.Generator().manual_seed(seed + i) for i in range(rows)] for _ in range(2))
    ids, usable = draws.draw(probabilities, mine)
    assert usable.all()
    for i in range(rows):
        assert ids[i] == torch.multinomial(probabilities[i : i + 1], 1, generator=theirs[i])[0, 0]


def test_where_multinomial_is_no_race_it_is_asked_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draws, "race_is_exact", lambda device: False)
    monkeypatch.setattr("radixkv.engine.treatment.race_is_exact", lambda device: False)
    treatment = Treatment(warpers(temperature=0.7, top_k=50), samples=True)
    scores = rows_of(0, count=4)
    scores[1] = float("nan")
    scores[2] = torch.inf
    ids, usable = treatment.choose(scores.clone(), [torch.Generator().manual_seed(i) for i in range(4)])
    assert usable.tolist() == [True, False, False, True]
    monkeypatch.undo()
    again, _ = treatment.choose(scores.clone(), [torch.Generator().manual_seed(i) for i in range(4)])
    assert ids[[0, 3]].tolist() == again[[0, 3]].tolist()


def test_where_exponentials_come_from_elsewhere_they_are_all_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    scores = rows_of(0, count=4)
    results = []
    for known in (True, False):
        if not known:
            monkeypatch.setattr(draws, "_exponential_is_log_of_uniform", lambda device: False)
        for filters in ({"temperature": 0.7, "top_k": 50}, {"temperature": 0.7}):
            treatment = Treatment(warpers(**filters), samples=True)  # type: ignore[arg-type]
            generators = [torch.Generator().manual_seed(i) for i in range(4)]
            results.append([treatment.choose(scores.clone(), generators)[0].tolist() for _ in range(3)])
    assert results[:2] == results[2:]


@given(st.integers(1, 6), st.integers(1, 9), st.data())
def test_best_is_argmax(rows: int, vocab: int, data: st.DataObject) -> None:
    values = st.sampled_from([0.0, 1.0, -1.0, float("inf"), float("-inf"), float("nan")])
    scores = torch.tensor(
        data.draw(st.lists(st.lists(values, min_size=vocab, max_size=vocab), min_size=rows, max_size=rows))
    )
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    ids, usable = draws.best(scores.to(dtype))
    assert ids.tolist() == scores.argmax(dim=-1).tolist()
    for row, fine in zip(scores, usable.tolist(), strict=True):
        assert fine == (not row.isnan().any() and row.max() > -torch.inf)
