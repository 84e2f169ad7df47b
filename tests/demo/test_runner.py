from __future__ import annotations

from contextlib import contextmanager

import pytest

import radixkv
from radixkv.demo.runner import RequestResult, Run, Runner
from radixkv.demo.tiny import make_tiny
from radixkv.demo.workloads import Prompt, Workload


@pytest.fixture(scope="module")
def tiny():
    return make_tiny()


@pytest.fixture
def runner(tiny):
    model, tokenizer = tiny
    return Runner(model, tokenizer, radixkv.PrefixCache.for_model(model, num_tokens=4096), max_new_tokens=6)


START = "The ferry to Aldersund left twice a day in summer and once in winter. "


def test_a_repeated_start_is_hit_and_the_tokens_are_those_of_plain_generate(runner):
    first = runner.compare(Prompt("first", START + "Ines"))
    second = runner.compare(Prompt("second", START + "Nobody"))
    assert first.same_tokens
    assert second.same_tokens
    assert (first.prompt_tokens, first.hit_tokens) == (len(START) + 5, 0)
    assert second.hit_tokens == len(START) + 1
    assert len(second.without.tokens) == 6
    for run in (second.without, second.with_cache):
        assert 0 < run.ttft_s < run.total_s


def test_plain_runs_never_meet_the_cache(runner, monkeypatch):
    before = {name: len(hooks) for name, hooks in hooks_of(runner.model).items()}
    seen = []
    generate = runner.generate

    def spy(ids, new_tokens):
        seen.append({name: len(hooks) for name, hooks in hooks_of(runner.model).items()} == before)
        return generate(ids, new_tokens)

    monkeypatch.setattr(runner, "generate", spy)
    runner.compare(Prompt("one", START))
    runner.compare(Prompt("two", START))
    assert seen == [True, False, False, True]  # in turns the one or the other first


def hooks_of(model):
    return {name: module._forward_pre_hooks for name, module in model.named_modules()}


def test_extra_rounds_are_cold_and_leave_nothing(runner):
    result = runner.compare(Prompt("cold", START, rounds=3))
    assert runner.cache.stats.requests == 3
    assert runner.cache.stats.hit_tokens == 0
    assert result.hit_tokens == 0
    blocks = runner.cache.num_cached_blocks
    assert blocks == -(-(result.prompt_tokens + 5) // runner.cache.block_size)


def test_a_prompt_may_ask_for_fewer_tokens_and_an_end_token_ends(tiny, runner):
    model, tokenizer = tiny
    assert len(runner.compare(Prompt("short", START, max_new_tokens=2)).without.tokens) == 2
    answer = runner.compare(Prompt("long", START)).without.tokens
    ending = Runner(model, tokenizer, runner.cache, max_new_tokens=6, end_ids=[answer[2]])
    assert ending.compare(Prompt("ended", START)).with_cache.tokens == answer[: answer.index(answer[2]) + 1]


def test_all_workloads_get_the_answer_and_report_progress(runner):
    answers, progress = [], []

    def stream():
        answers.append((yield Prompt("one", START)))
        answers.append((yield Prompt("two", START + answers[0])))

    workload = Workload("w", "A workload", 2, stream)
    result = runner.run([workload], lambda w, label: progress.append((w.name, label)))
    assert progress == [("w", "one"), ("w", "two"), ("w", None)]
    assert [request.answer for request in result.requests] == [answers[0], result.requests[1].answer]
    # The second prompt holds the first and its answer: all of that is hit, save what was never computed.
    assert result.requests[1].hit_tokens == len(START) + 1 + 6 - 1
    assert result.same_tokens
    assert result.cache["pool_blocks"] == 4096 // 16
    total = sum(request.with_cache.total_s for request in result.requests)
    assert sum(result.seconds_with.values()) == pytest.approx(total, rel=0.05)
    assert set(result.seconds_with) == {"lookup", "gather", "prefill", "commit", "decode"}


def test_warming_up_leaves_the_cache_as_new(runner):
    runner.warm_up()
    assert runner.cache.num_cached_blocks == 0
    assert runner.cache.stats.requests == 0


class LyingCache:
    """Attaches something that changes the model's answer."""

    def __init__(self, cache):
        self._cache = cache

    def __getattr__(self, name):
        return getattr(self._cache, name)

    @contextmanager
    def attached(self, model, namespace=None):
        saved = model.generation_config.suppress_tokens
        model.generation_config.suppress_tokens = [*saved, *range(ord("a"), ord("z") + 1), ord(",")]
        try:
            yield self
        finally:
            model.generation_config.suppress_tokens = saved


def test_a_different_output_is_seen(tiny, runner):
    model, tokenizer = tiny
    liar = Runner(model, tokenizer, LyingCache(runner.cache), max_new_tokens=12)
    result = liar.compare(Prompt("changed", START))
    assert not result.same_tokens
    index = result.first_difference
    assert result.without.tokens[:index] == result.with_cache.tokens[:index]
    assert result.without.tokens[index] != result.with_cache.tokens[index]


@pytest.mark.parametrize(
    ("without", "with_cache", "expected"),
    [([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1, 2], [1], 1), ([1], [1, 2], 1), ([1], [], 0)],
)
def test_first_difference(without, with_cache, expected):
    result = RequestResult("", 2, 1, Run(without, 0.2, 1.0), Run(with_cache, 0.1, 1.0), "")
    assert result.first_difference == expected
    assert result.same_tokens == (expected is None)
    assert (result.skipped, result.speedup) == (0.5, 2.0)
