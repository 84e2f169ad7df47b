"""What comes with the tokens: reasons, times, log-probabilities, counters, the progress bar."""

from __future__ import annotations

import io
import re
import sys
import time
from typing import Any

import pytest
import torch
from engine_testkit import alone, drained, family, make_engine, params, prompt, tiny, tokens_of, twin

from radixkv.engine.progress import Progress
from radixkv.engine.stats import EngineStats


def test_times_lie_within_the_call_and_in_order() -> None:
    engine = make_engine(tiny("llama_gqa"), max_num_seqs=1)
    began = time.perf_counter()
    outs = engine.generate(family(9, 3, 5), params(4))
    spent = time.perf_counter() - began
    for out in outs:
        assert out.ttft_s is not None
        assert 0 < out.ttft_s < out.latency_s < spent
    assert outs[1].ttft_s > outs[0].latency_s - 0.01, "it waited for the first one's row"


def test_logprobs_are_those_of_the_plain_model() -> None:
    model = tiny("llama_gqa")
    prompts = family(17, 2, 6)
    engine = make_engine(model)
    outs = engine.generate(prompts, params(5, logprobs=3))
    for ids, out in zip(prompts, outs, strict=True):
        whole = torch.tensor([ids + out.token_ids])
        with torch.no_grad():
            expected = twin(model)(whole).logits[0, len(ids) - 1 : -1].double().log_softmax(-1)
        assert out.logprobs is not None
        assert len(out.logprobs) == 5
        for row, token, entry in zip(expected, out.token_ids, out.logprobs, strict=True):
            assert entry.token_id == token == int(row.argmax())
            assert entry.logprob == pytest.approx(float(row[token]), abs=2e-3)
            top = row.topk(3)
            assert entry.top_ids == top.indices.tolist()
            assert entry.top_logprobs == pytest.approx(top.values.tolist(), abs=2e-3)
    assert engine.generate(prompts, params(5))[0].logprobs is None


def test_end_of_sequence_is_obeyed_ignored_and_put_off() -> None:
    model = tiny("llama_gqa")
    ids = prompt(12)[0].tolist()
    free = alone(model, ids, 12)
    end = free[3]
    at = free.index(end)
    model.generation_config.eos_token_id = end
    reference = twin(model)
    engine = make_engine(model)
    (out,) = engine.generate([ids], params(12))
    assert (out.finish_reason, out.token_ids) == ("stop", free[: at + 1])
    assert out.token_ids == alone(reference, ids, 12)
    (out,) = engine.generate([ids], params(12, ignore_eos=True))
    assert (out.finish_reason, out.token_ids) == ("length", free)
    (out,) = engine.generate([ids], params(12, min_new_tokens=9))
    assert out.token_ids == alone(reference, ids, 12, min_new_tokens=9)
    (out,) = engine.generate([ids], params(12, stop_token_ids=[free[1]]))
    assert (out.finish_reason, out.token_ids) == ("stop", free[: free.index(free[1]) + 1])
    drained(engine)


def test_a_sequence_ends_at_the_longest_there_may_be() -> None:
    model = tiny("llama_gqa")
    ids = prompt(12)[0].tolist()
    engine = make_engine(model, max_seq_len=20)
    (out,) = engine.generate([ids], params(100))
    assert (out.finish_reason, out.token_ids) == ("length", alone(twin(model), ids, 8))
    drained(engine)


def test_a_lone_sequence_that_outgrows_the_pool_says_so() -> None:
    model = tiny("llama_gqa")
    ids = prompt(10)[0].tolist()
    engine = make_engine(model, num_blocks=5)
    with pytest.warns(UserWarning, match="1 of 2"):
        long, short = engine.generate([ids, ids[:3]], [params(30), params(3)])
    assert long.finish_reason == "capacity"
    assert "need 6 blocks" in str(long.error)
    assert long.token_ids == alone(twin(model), ids, 11), (
        "20 slots: 10 of the prompt, and 10 of 11 new tokens"
    )
    assert short.token_ids == alone(twin(model), ids[:3], 3)
    drained(engine)


def test_counters_add_up_while_it_runs_and_afterwards() -> None:
    model = tiny("llama_gqa")
    prompts = family(12, 3, 7, 5)
    engine = make_engine(model, num_blocks=40)
    for ids in prompts:
        engine.add_request(ids, params(6))
    seen = engine.stats
    assert (seen.running, seen.waiting, seen.block_utilisation, seen.hit_rate) == (0, 3, 1.0, 0.0)
    tokens = 0
    while engine.has_unfinished:
        tokens += sum(out.token_id is not None for out in engine.step())
        stats = engine.stats
        assert stats.generated_tokens == tokens
        assert 0.0 < stats.block_utilisation <= 1.0
        assert stats.running + stats.waiting + stats.swapped == 3 - stats.finished
    assert tokens == 18
    assert stats.prompt_tokens == sum(map(len, prompts))
    assert stats.hit_tokens == 24
    assert stats.hit_rate == pytest.approx(24 / stats.prompt_tokens)
    assert seen.finished == 0, "a snapshot does not change"
    assert str(seen) == (
        "0 running, 3 waiting, 0 swapped, 0 finished; steps: 0; 0 of 0 prompt tokens hit (0.0%); new tokens: 0; "
        "preemptions: 0"
    )
    assert re.fullmatch(
        r"0 running, 0 waiting, 0 swapped, 3 finished; steps: \d+; 24 of 51 prompt tokens hit \(47.1%\); "
        r"new tokens: 18; preemptions: 0; mean time to first token: [\d.e-]+ s",
        str(stats),
    )


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("terminal", [True, False])
def test_the_progress_bar_is_for_terminals(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("llama_gqa")
    out = _Terminal() if terminal else io.StringIO()
    monkeypatch.setattr(sys, "stderr", out)
    engine = make_engine(model)
    prompts = family(9, 3, 5)
    assert tokens_of(engine.generate(prompts, params(4), progress=True)) == [
        alone(twin(model), p, 4) for p in prompts
    ]
    assert bool(out.getvalue()) == terminal


def test_the_progress_bar_says_how_it_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    out: Any = _Terminal()
    monkeypatch.setattr(sys, "stderr", out)
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setattr("radixkv.engine.progress._REFRESH_SECONDS", 0.0)
    stats = EngineStats(running=3, waiting=2, swapped=1, prompt_tokens=100, hit_tokens=25)
    with Progress(7, enabled=True) as bar:
        assert bar.update(1, 50)
        bar.update(4, 50, stats)
        time.sleep(0.3)
    text = out.getvalue()
    for part in ("tokens/s", "3 running", "3 waiting", "25% hits", "4/7"):
        assert part in text
