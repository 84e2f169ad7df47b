"""Why a prompt missed, through the plug-in and the engine: each reason, brought about on purpose."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hf_testkit import books, cache_keyword, greedy, join, make_cache, needs_cache, pad_left, prompt, tiny

import radixkv

pytestmark = needs_cache

IDS = prompt(45)


@pytest.fixture
def model() -> Any:
    return tiny()


@pytest.fixture
def cache(model: Any) -> Any:
    return make_cache(model, num_blocks=20, block_size=4)


def ask(cache: Any, model: Any, ids: torch.Tensor = IDS, **kwargs: Any) -> Any:
    """The record of a prompt through `generate()`."""
    with cache.attached(model, **kwargs):
        greedy(model, ids, 2)
    (record,) = cache.last_requests
    books(cache)
    return record


def reason(record: Any) -> tuple[Any, Any]:
    return record.diverged_at, record.miss_reason


def test_new_then_full_then_branching(cache: Any, model: Any) -> None:
    assert reason(ask(cache, model)) == (0, "never_seen")
    record = ask(cache, model)
    assert reason(record) == (None, None)
    assert record.explain() == "hit 44 of 45 tokens; only the last one had to be computed"
    other = join(IDS[:, :30], (IDS[:, 30:] + 1) % 50 + 1)
    record = ask(cache, model, other)
    assert reason(record) == (30, "never_seen")
    assert record.explain() == "hit 30 of 45 tokens; from position 30 on, never cached before"
    stats = cache.stats
    assert (stats.full_hits, stats.partial_hits, stats.no_hits) == (1, 1, 1)
    assert stats.misses == {"never_seen": 2}
    assert stats.prefill_flops_saved > 0


def test_evicted(cache: Any, model: Any) -> None:
    ask(cache, model)
    for seed in range(1, 4):
        ask(cache, model, prompt(45, seed=seed))
    before = cache.stats
    record = ask(cache, model)
    assert record.miss_reason == "evicted"
    assert "on, cached before and evicted since" in record.explain()
    between = cache.stats - before
    assert (between.requests, between.misses) == (1, {"evicted": 1})
    assert cache.stats.evicted_tokens > cache.stats.evicted_blocks * 3


def test_an_answer_is_remembered_when_it_comes_back_in_a_chat(cache: Any, model: Any) -> None:
    with cache.attached(model):
        chat = greedy(model, IDS[:, :10], 6)
    for seed in range(1, 4):
        ask(cache, model, prompt(60, seed=seed))
    assert cache.match_length(chat[0]) == 0
    ask(cache, model, IDS[:, :10])
    record = ask(cache, model, join(chat, prompt(5, seed=9)))
    assert record.miss_reason == "evicted"
    assert record.diverged_at >= 10


def test_cleared(model: Any) -> None:
    cache = make_cache(model, num_blocks=40, block_size=4)
    ask(cache, model)
    ask(cache, model, namespace="a")
    cache.clear(namespace="a")
    assert reason(ask(cache, model, namespace="a")) == (0, "cleared")
    assert ask(cache, model).miss_reason is None
    cache.clear()
    assert reason(ask(cache, model)) == (0, "cleared")
    cache.invalidate()
    assert reason(ask(cache, model)) == (0, "cleared")


def test_other_namespace(cache: Any, model: Any) -> None:
    ask(cache, model, namespace=("tenant", "a"))
    record = ask(cache, model)
    assert reason(record) == (0, "other_namespace")
    assert record.explain().endswith("from position 0 on, cached in another namespace: ('tenant', 'a')")


def test_other_weights(cache: Any, model: Any) -> None:
    ask(cache, model)
    with torch.no_grad():
        next(model.parameters()).mul_(1.01)
    record = ask(cache, model)
    assert reason(record) == (0, "other_namespace")
    assert record.seen_in == "None, under other weights, adapters or settings of the model"
    said = "from position 0 on, cached under other weights, adapters or settings of the model"
    assert record.explain().endswith(said)


def test_bypassed(cache: Any, model: Any) -> None:
    with cache.attached(model, namespace="a"):
        model.generate(IDS, max_new_tokens=2, do_sample=False, use_cache=False)
    record = ask(cache, model, namespace="a")
    assert reason(record) == (0, "bypassed")
    assert ask(cache, model, join(IDS[:, :20], prompt(3, seed=3)), namespace="b").miss_reason != "bypassed"


def test_bypassed_rows_are_remembered_without_their_padding(cache: Any, model: Any) -> None:
    batch = pad_left([IDS, IDS[:, 20:40]])
    with cache.attached(model):
        model.generate(**batch, max_new_tokens=2, do_sample=False, use_cache=False)
    assert reason(ask(cache, model, IDS[:, 20:40])) == (0, "bypassed")


def test_a_session_that_cannot_be_served(cache: Any, model: Any) -> None:
    model.train()
    with cache.session(IDS) as past:
        assert past.num_cached_tokens == 0
    model.eval()
    (record,) = cache.last_requests
    assert (record.outcome, *reason(record)) == ("none", 0, "bypassed")
    assert reason(ask(cache, model)) == (0, "bypassed")


def test_no_room_to_keep_it(model: Any) -> None:
    cache = make_cache(model, num_blocks=4, block_size=4)
    ask(cache, model)
    record = ask(cache, model)
    assert (record.miss_reason, record.hit_tokens) == ("not_kept", record.diverged_at)


def test_sessions(cache: Any, model: Any) -> None:
    for _ in range(2):
        with cache.session(IDS) as past, torch.no_grad():
            model(IDS[:, past.num_cached_tokens :], **{cache_keyword(model): past})
    assert [r.outcome for r in cache.recent_requests()] == ["none", "full"]
    assert [r.miss_reason for r in cache.recent_requests(1)] == [None]


def test_rows_of_a_batch(cache: Any, model: Any) -> None:
    rows = [join(IDS[:, :32], prompt(8, seed=i)) for i in range(3)]
    with cache.attached(model):
        model.generate(**pad_left(rows), max_new_tokens=2, do_sample=False)
    records = cache.last_requests
    assert [r.miss_reason for r in records] == ["never_seen"] * 3
    assert sum(r.hit_tokens for r in records) == 64
    said = [r.explain() for r in records]
    assert sum("32 of which another prompt of the same batch computed" in line for line in said) == 2
    assert cache.stats.hit_rate <= 1


def test_a_pin_and_a_look_are_no_requests(cache: Any, model: Any) -> None:
    ask(cache, model)
    before = cache.stats
    with cache.pin(IDS[0]):
        cache.match_length(IDS[0])
    assert (cache.stats - before).requests == 0
    assert len(cache.recent_requests()) == 1


def test_reset_forgets_records_and_not_what_was_cached(cache: Any, model: Any) -> None:
    ask(cache, model)
    lifetime = cache.lifetime_stats
    cache.reset_stats()
    assert cache.recent_requests() == ()
    assert cache.stats.misses == {}
    assert cache.lifetime_stats == lifetime
    assert ask(cache, model).miss_reason is None


# ------------------------------------------------------------------------------------------------ the engine


def test_the_engine_names_its_requests(cache: Any, model: Any) -> None:
    engine = radixkv.Engine(model, cache=cache)
    for rid, ids in (("first", IDS), ("second", IDS), ("third", join(IDS[:, :20], prompt(9, seed=1)))):
        engine.add_request(ids[0].tolist(), radixkv.SamplingParams(max_new_tokens=2), rid=rid)
        while engine.has_unfinished:
            engine.step()
    records = {r.rid: r for r in cache.recent_requests()}
    assert reason(records["first"]) == (0, "never_seen")
    assert records["second"].outcome == "full"
    assert reason(records["third"]) == (20, "never_seen")
    stats = engine.stats
    assert stats.finished_by_reason == {"length": 3}
    assert (stats.ttft.count, stats.latency.count) == (3, 3)
    assert 0 < stats.ttft.mean <= stats.latency.mean
    assert stats.peak_used_blocks >= 12
    assert stats.used_blocks == 0


def test_a_prefix_that_another_request_computes_meanwhile(cache: Any, model: Any) -> None:
    """Two at once: the second waits for what both share, and is asked about where they part."""
    engine = radixkv.Engine(model, cache=cache)
    prompts = [join(IDS[:, :32], prompt(5, seed=i))[0].tolist() for i in range(2)]
    engine.generate(prompts, radixkv.SamplingParams(max_new_tokens=2))
    first, second = cache.recent_requests()
    assert reason(first) == (0, "never_seen")
    assert reason(second) == (32, "never_seen")
    assert second.hit_tokens == 32


@pytest.mark.parametrize("how", ["recompute", "swap"])
def test_what_preempted_requests_find_again_is_no_hit(model: Any, how: str) -> None:
    cache = make_cache(model, num_blocks=24, block_size=4)
    memory = {"host_memory": "1MiB"} if how == "swap" else {}
    engine = radixkv.Engine(model, cache=cache, preemption=how, **memory)
    prompts = [prompt(17, seed=seed)[0].tolist() for seed in range(5)]
    assert len(np.unique([row[0] for row in prompts])) > 1
    engine.generate(prompts, radixkv.SamplingParams(max_new_tokens=20))
    stats, of_engine = cache.stats, engine.stats
    assert of_engine.preemptions > 0
    assert stats.requests == 5
    assert stats.prompt_tokens == sum(map(len, prompts))
    assert stats.hit_tokens == of_engine.hit_tokens
    assert (stats.resumed_tokens, stats.recomputed_tokens) == (
        of_engine.resumed_tokens,
        of_engine.recomputed_tokens,
    )
    assert stats.resumed_tokens + stats.recomputed_tokens > 0
    if how == "swap":
        assert stats.resumed_tokens > 0
    engine.check()
