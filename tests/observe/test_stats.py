"""Counters and records against a plain count of everything that was recorded."""

from __future__ import annotations

import json
import math
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.engine.stats import EngineStats
from radixkv.observe import CacheStats, HistogramStats, MissNote, PrefillCost, RequestStats, StatsRecorder
from radixkv.observe.histogram import SHARES, Histogram

REQUESTS = st.integers(1, 200).flatmap(
    lambda total: st.builds(
        lambda hit, at, required: RequestStats.of(total, hit, at and MissNote(at - 1, "evicted"), required=required),
        st.integers(0, total - 1),
        st.one_of(st.none(), st.integers(1, total)),
        st.integers(1, 3),
    )
)  # fmt: skip
WHAT = st.one_of(
    st.lists(REQUESTS, max_size=4),
    st.tuples(st.integers(1, 100), st.floats(0.001, 1)),
    st.sampled_from(["grad", "labels", "reset"]),
)


@given(st.lists(WHAT, max_size=12))
def test_totals_are_the_sums_of_the_records(events):
    recorder, records, bypasses, prefills = StatsRecorder(), [], [], []
    recorder.cost = PrefillCost(1000, ((None, 64), (16, 32)))
    before = recorder.snapshot(0)
    for i, event in enumerate(events):
        if event == "reset":
            recorder.reset(i)
            records, bypasses = [], []
            before = recorder.snapshot(i)
            assert before.requests == before.evicted_blocks == before.hit_tokens == 0
        elif isinstance(event, str):
            recorder.record_bypass(event)
            bypasses.append(event)
        elif isinstance(event, tuple):
            recorder.record_prefill(*event)
            prefills.append(event)
        else:
            recorder.record_requests(event)
            records += event
    stats = recorder.snapshot(len(events))
    assert stats.requests == len(records) == stats.full_hits + stats.partial_hits + stats.no_hits
    assert stats.prompt_tokens == sum(r.prompt_tokens for r in records)
    assert stats.hit_tokens == sum(r.hit_tokens for r in records)
    assert stats.computed_tokens == sum(r.computed_tokens for r in records)
    assert 0 <= stats.hit_rate <= 1
    assert sum(stats.misses.values()) == sum(r.outcome != "full" for r in records)
    assert sum(stats.bypasses.values()) == len(bypasses)
    assert stats.hit_shares.count == len(records)
    assert stats.prefill_flops_saved == sum(recorder.cost.flops(r.hit_tokens) for r in records)
    if any(tokens >= 32 for tokens, _ in prefills):
        assert (stats.prefill_seconds_saved > 0) >= (stats.hit_tokens > 0)
    elif not any(event == "reset" for event in events):
        assert stats.prefill_seconds_saved == 0, "prefills of less than 32 tokens set no rate"
    assert recorder.recent_requests(10**6) == tuple(records)
    assert recorder.recent_requests(2) == tuple(records[-2:])
    assert json.loads(json.dumps(stats.to_dict()))["hit_rate"] == stats.hit_rate
    assert pickle.loads(pickle.dumps(stats)) == stats
    assert (stats - before).requests == stats.requests


@given(st.lists(st.lists(REQUESTS, max_size=3), min_size=1, max_size=6), st.data())
def test_a_difference_is_what_came_between(calls, data):
    recorder, snapshots, counts = StatsRecorder(), [], []
    for call in calls:
        snapshots.append(recorder.snapshot(len(snapshots), 3 * len(snapshots)))
        recorder.record_requests(call)
        recorder.record_bypass("grad")
        counts.append(sum(r.hit_tokens for r in call))
    snapshots.append(recorder.snapshot(len(snapshots), 3 * len(snapshots)))
    a = data.draw(st.integers(0, len(calls)))
    b = data.draw(st.integers(a, len(calls)))
    between = snapshots[b] - snapshots[a]
    assert between.hit_tokens == sum(counts[a:b])
    assert between.evicted_blocks == b - a
    assert between.evicted_tokens == 3 * (b - a)
    assert between.bypasses == ({"grad": b - a} if b > a else {})
    assert 0 <= between.hit_rate <= 1
    if any(counts[a:b]):
        with pytest.raises(ValueError, match="subtract the earlier snapshot from the later one"):
            snapshots[a] - snapshots[b]


def test_hits_from_before_a_measurement_are_priced_by_the_first():
    recorder = StatsRecorder()
    recorder.record_requests([RequestStats(100, 50, 50)])
    recorder.record_prefill(31, 100.0)
    assert recorder.snapshot(0).prefill_seconds_saved == 0
    recorder.record_prefill(100, 1.0)
    assert recorder.snapshot(0).prefill_seconds_saved == pytest.approx(0.5)
    assert recorder.snapshot(0).prefill_seconds == pytest.approx(101.0)
    recorder.record_prefill(100, 3.0)
    recorder.record_requests([RequestStats(100, 50, 50)])
    assert recorder.snapshot(0).prefill_seconds_saved == pytest.approx(0.5 + 1.0)


def test_the_ring_is_bounded():
    recorder = StatsRecorder()
    recorder.record_requests([RequestStats(2, 1, 1)] * 5000)
    assert len(recorder.recent_requests(10**6)) == 1000
    assert recorder.recent_requests(0) == ()


@given(st.integers(0, 300), st.integers(1, 50), st.integers(1, 5))
def test_flops_are_those_counted_token_by_token(num, window, heads):
    cost = PrefillCost(7, ((None, heads * 6), (window, heads * 10)))
    by_hand = 0
    for i in range(num):
        by_hand += 2 * 7  # a multiplication and an addition for each weight
        by_hand += 2 * (i + 1) * heads * 6
        by_hand += 2 * min(i + 1, window) * heads * 10
    assert cost.flops(num) == by_hand


@given(st.lists(st.floats(0, 1)))
def test_a_histogram_counts_by_upper_bounds(values):
    histogram = Histogram(SHARES)
    for value in values:
        histogram.add(value)
    stats = histogram.snapshot()
    so_far = 0
    for bound, count in zip((*stats.bounds, math.inf), stats.counts, strict=True):
        so_far += count
        assert so_far == sum(value <= bound for value in values)
    assert stats.count == len(values)
    assert stats.mean == pytest.approx(sum(values) / len(values) if values else 0)
    assert stats - HistogramStats() == stats
    assert (stats - stats).count == 0
    with pytest.raises(ValueError, match="buckets differ"):
        stats - HistogramStats((1.0,), (0, 0))


@pytest.mark.parametrize(
    ("request_", "outcome", "sentence"),
    [
        (RequestStats.of(900, 899, None), "full", "hit 899 of 900 tokens; only the last one had to be computed"),
        (
            RequestStats.of(900, 895, None, required=5),
            "full",
            "hit 895 of 900 tokens; only the last 5 had to be computed",
        ),
        (RequestStats.of(1, 0, None), "full", "hit none of 1 token; all must be computed in any case"),
        (
            RequestStats.of(900, 512, MissNote(512, "evicted")),
            "partial",
            "hit 512 of 900 tokens; from position 512 on, cached before and evicted since",
        ),
        (
            RequestStats.of(900, 0, MissNote(0, "never_seen")),
            "none",
            "hit none of 900 tokens; from position 0 on, never cached before",
        ),
        (
            RequestStats.of(900, 0, MissNote(5, "never_seen")),
            "none",
            "hit none of 900 tokens, though 5 were cached: taking them was not worth its cost; "
            "from position 5 on, never cached before",
        ),
        (
            RequestStats.of(900, 0, MissNote(1, "never_seen")),
            "none",
            "hit none of 900 tokens, though 1 was cached: taking it was not worth its cost; "
            "from position 1 on, never cached before",
        ),
        (
            RequestStats.of(60, 40, MissNote(24, "never_seen")),
            "partial",
            "hit 40 of 60 tokens, 16 of which another prompt of the same batch computed; "
            "from position 24 on, never cached before",
        ),
        (
            RequestStats.of(60, 40, None),
            "partial",
            "hit 40 of 60 tokens; the rest was cached, but taking it was not worth its cost in this call",
        ),
        (
            RequestStats.of(60, 0, MissNote(0, "other_namespace", "'tenant b'")),
            "none",
            "hit none of 60 tokens; from position 0 on, cached in another namespace: 'tenant b'",
        ),
        (RequestStats(60, 40, 20), "partial", "hit 40 of 60 tokens"),
    ],
)  # fmt: skip
def test_what_a_record_says(request_, outcome, sentence):
    assert request_.outcome == outcome
    assert request_.explain() == sentence
    assert (request_.miss_reason is None) == (outcome == "full") or request_.diverged_at is None
    assert json.loads(json.dumps(request_.to_dict()))["outcome"] == outcome


def test_a_hit_thanks_to_the_batch_is_full():
    request = RequestStats.of(60, 59, MissNote(24, "never_seen"))
    assert (request.outcome, request.diverged_at, request.miss_reason) == ("full", None, None)


def test_engine_statistics_subtract_and_keep_what_stands():
    a = EngineStats(running=3, waiting=1, steps=10, peak_used_blocks=7, finished_by_reason={"stop": 1})
    b = EngineStats(
        running=1, waiting=4, steps=15, peak_used_blocks=9, finished_by_reason={"stop": 2, "length": 1}
    )
    between = b - a
    assert (between.running, between.waiting, between.peak_used_blocks) == (1, 4, 9)
    assert (between.steps, between.finished_by_reason) == (5, {"stop": 1, "length": 1})
    with pytest.raises(ValueError, match="steps went from 15 to 10"):
        a - b
    assert json.loads(json.dumps(b.to_dict()))["finished_by_reason"] == {"stop": 2, "length": 1}
    with pytest.raises(TypeError):
        b - CacheStats()


def test_snapshots_can_be_told_apart_in_a_set():
    recorder, counts = StatsRecorder(), [{"stop": 1, "length": 2}, {"length": 2, "stop": 1}, {"stop": 2}]
    snapshots = []
    for reason in ("grad", "labels", None):
        snapshots += [recorder.snapshot(0), recorder.snapshot(0)]
        if reason is not None:
            recorder.record_bypass(reason)
    assert len(set(snapshots)) == 3
    engines = [EngineStats(finished_by_reason=count) for count in counts]
    assert engines[0] == engines[1] != engines[2]
    assert len(set(engines)) == 2
    assert len({recorder.snapshot(0).hit_shares, HistogramStats(), snapshots[0].hit_shares}) <= 2


def test_a_snapshot_prints_as_one_line():
    stats = CacheStats(
        requests=4,
        prompt_tokens=1000,
        hit_tokens=720,
        full_hits=1,
        partial_hits=2,
        no_hits=1,
        misses={"never_seen": 2, "evicted": 1},
    )
    assert str(stats) == (
        "4 requests, 720 of 1,000 prompt tokens hit (72.0%): 1 full, 2 partial, 1 none; "
        "misses: evicted 1, never_seen 2"
    )
    assert str(CacheStats()) == "0 requests, 0 of 0 prompt tokens hit (0.0%): 0 full, 0 partial, 0 none"
