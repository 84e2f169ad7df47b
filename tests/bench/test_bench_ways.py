from __future__ import annotations

import copy
import logging

import pytest
import torch
import transformers

from radixkv.bench.continuous import ContinuousBatchingFailed, continuous_batch
from radixkv.bench.ways import EngineWay, GenerateBatch, NotMeasured, OneByOne, Padded, Setting

# `generate_batch` of older versions cannot run without a GPU.
continuous_works = pytest.mark.skipif(
    not hasattr(transformers, "ContinuousBatchingConfig"), reason="generate_batch of this version needs a GPU"
)


@pytest.fixture
def setting(tiny):
    return Setting(tiny[0], max_new_tokens=5, end_ids=(), pad_id=0, bytes_per_token=1000)


@pytest.fixture
def prompts(tiny):
    return [tiny[1](text).input_ids for text in ("The ferry left", "Good morning to you all.", "Six lights")]


def plain(model, prompt: list[int], n: int) -> list[int]:
    """Greedy by hand, without any cache."""
    suppressed = model.generation_config.suppress_tokens
    ids = list(prompt)
    with torch.inference_mode():
        for _ in range(n):
            logits = model(torch.tensor([ids]), use_cache=False).logits[0, -1]
            logits[suppressed] = -torch.inf
            ids.append(int(logits.argmax()))
    return ids[len(prompt) :]


def test_one_by_one_and_padded_give_the_greedy_tokens(setting, prompts):
    expected = [plain(setting.model, prompt, 5) for prompt in prompts]
    assert OneByOne(setting).run(prompts).tokens == expected
    for batch_size in (1, 2, 3, 10):
        assert Padded(setting, batch_size).run(prompts).tokens == expected


def test_peaks_of_contiguous_batches(setting, prompts):
    short, long, middle = map(len, prompts)
    assert short < long > middle
    assert OneByOne(setting).run(prompts).peak_kv_bytes == (long + 5) * 1000
    assert Padded(setting, 3).run(prompts).peak_kv_bytes == 3 * (long + 5) * 1000
    assert Padded(setting, 2).run(prompts).peak_kv_bytes == 2 * (long + 5) * 1000


@continuous_works
def test_generate_batch_gives_the_greedy_tokens_and_changes_nothing(setting, prompts):
    model = setting.model
    before = copy.deepcopy(model.generation_config), model.config._attn_implementation
    outcome = GenerateBatch(setting, 64).run(prompts)
    assert outcome.tokens == [plain(model, prompt, 5) for prompt in prompts]
    assert outcome.hit_tokens is None
    assert outcome.peak_kv_bytes == 3 * 256 * 1000
    assert (model.generation_config, model.config._attn_implementation) == before


@continuous_works
def test_a_broken_generate_batch_says_why_and_is_silent(setting, prompts, monkeypatch, capsys, caplog):
    def fail(*args, **kwargs):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(setting.model, "forward", fail)
    with caplog.at_level(logging.WARNING), pytest.raises(NotMeasured, match="no such kernel"):
        GenerateBatch(setting, 64).run(prompts)
    assert capsys.readouterr() == ("", "")
    assert not [r for r in caplog.records if r.name == "ContinuousBatchingLogger"]
    assert not logging.getLogger("ContinuousBatchingLogger").filters


def test_a_version_without_generate_batch(setting, prompts, monkeypatch):
    class Old:
        generation_config = setting.model.generation_config

    with pytest.raises(ContinuousBatchingFailed, match="has no generate_batch"):
        continuous_batch(Old(), prompts, max_new_tokens=2)


def test_a_lost_answer_is_no_answer(setting, prompts, monkeypatch):
    monkeypatch.setattr(setting.model, "generate_batch", lambda *args, **kwargs: {}, raising=False)
    with pytest.raises(NotMeasured, match="0 of 3 requests"):
        GenerateBatch(setting, 64).run(prompts)


def test_answers_end_before_an_end_token(tiny, setting, prompts, fake_engine):
    answers = [plain(tiny[0], prompt, 5) for prompt in prompts]
    end = next(row[at] for row in answers for at in (2, 3, 4) if row[at] not in row[:at])
    ending = Setting(tiny[0], 5, (end,), 0, 1000)
    expected = [row[: row.index(end)] if end in row else row for row in answers]
    assert any(0 < len(row) < 5 for row in expected)
    ways = [OneByOne(ending), Padded(ending, 3), EngineWay(ending, fake_engine(tiny[0]))]
    if hasattr(transformers, "ContinuousBatchingConfig"):
        ways.append(GenerateBatch(ending, 64))
    for way in ways:
        assert way.run(prompts).tokens == expected, way.name


def test_the_engine_way(tiny, setting, prompts, fake_engine):
    engine = fake_engine(tiny[0])
    way = EngineWay(setting, engine)
    outcome = way.run(prompts)
    assert outcome.tokens == [plain(tiny[0], prompt, 5) for prompt in prompts]
    assert outcome.hit_tokens == 9
    assert outcome.peak_kv_bytes == 6 * 16 * 1000  # neither free nor evictable
    assert outcome.problems == ()
    way.reset()
    assert engine.cleared == 1
    failed = EngineWay(setting, fake_engine(tiny[0], reason="capacity")).run(prompts)
    assert failed.problems == ("request 3 ended with 'capacity'",)
