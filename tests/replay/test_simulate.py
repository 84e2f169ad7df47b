"""`simulate`: what it reports, and that it is the same however it is asked for."""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
import time

import pytest

import radixkv
from radixkv.core import PriorityPolicy, policy_names
from radixkv.core.block_states import fill
from radixkv.core.policies.retention import RetentionPolicy
from radixkv.errors import InvalidRequestError
from radixkv.replay import OPTIMA, ceiling, default_policies, read_trace, simulate


def chats(num, seed=0, symbols=6):
    """Token ids of chats that go on from one another."""
    rng = random.Random(seed)
    requests = [[1, 2, 3]]
    for _ in range(num):
        start = rng.choice(requests)
        start = start[: rng.randrange(len(start) + 1)]
        requests.append((start + [rng.randrange(symbols) for _ in range(rng.randrange(1, 20))])[:80])
    return [{"token_ids": tokens} for tokens in requests[1:]]


def blocks(num, seed=0):
    return [
        {"hash_ids": r["token_ids"], "input_length": 512 * len(r["token_ids"]) - 9} for r in chats(num, seed)
    ]


class OldestFirst(PriorityPolicy):
    """A policy that is not registered."""

    name = "oldest"

    def on_insert(self, index, first, tokens, seed, now):
        fill(self.priority, index, now)


def test_numbers_agree_with_each_other():
    result = simulate(chats(200), block_size=4, policy=[*policy_names(), *OPTIMA])
    document = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    trace, rows = document["trace"], document["results"]
    assert trace["requests"] == 200
    assert trace["prompt_tokens"] == sum(len(r["token_ids"]) for r in chats(200))
    assert list(dict.fromkeys(row["policy"] for row in rows)) == [*policy_names(), *OPTIMA]
    for row in rows:
        assert (row["requests"], row["prompt_tokens"]) == (200, trace["prompt_tokens"])
        assert row["hit_tokens"] + row["computed_tokens"] == row["prompt_tokens"]
        assert row["hit_rate"] == row["prefill_skipped"] == row["hit_tokens"] / row["prompt_tokens"]
        assert row["capacity_tokens"] == row["capacity_blocks"] * 4
        assert 0 <= row["share_of_optimum"] <= 1
        assert row["hit_rate"] <= trace["unlimited"]["hit_rate"]
        assert row["capacity_bytes"] is None
    assert [row["capacity_blocks"] for row in rows] == sorted(row["capacity_blocks"] for row in rows)
    last = [row for row in rows if row["capacity_blocks"] == trace["unlimited"]["blocks"]]
    assert {row["hit_tokens"] for row in last} == {trace["unlimited"]["hit_tokens"]}
    assert {row["share_of_optimum"] for row in last} == {1.0}
    assert {row["evicted_blocks"] for row in last} == {0, None}


def test_shares_of_both_optima():
    result = simulate(blocks(100), capacity=100, policy=["lru", *OPTIMA])
    lru, optimal, pinned = result.results
    assert optimal.share_of_optimum == pinned.share_of_optimal_pin == 1.0
    assert optimal.share_of_optimal_pin is None
    assert lru.share_of_optimum == lru.hit_blocks / optimal.hit_blocks < 1
    assert lru.share_of_optimal_pin == lru.hit_blocks / pinned.hit_blocks
    (lru,) = simulate(blocks(100), capacity=100, policy="lru").results
    assert lru.share_of_optimal_pin is None


def test_nothing_to_hit_has_no_share():
    (row,) = simulate([{"token_ids": [1, 2, 3]}], capacity=5, policy="lru").results
    assert (row.share_of_optimum, row.hit_rate) == (None, 0.0)


def test_defaults():
    names = default_policies()
    assert names[0] == "lru"
    assert names[-1] == "optimal"
    assert ("hit-density" in names) == ("hit-density" in policy_names())
    rows = simulate(blocks(50)).results
    assert [row.policy for row in rows[: len(names)]] == names


def test_one_or_several_and_in_any_form():
    trace = read_trace(blocks(60))
    assert len(trace.longest.content) <= 80
    plain = simulate(trace, capacity=100, policy="lru").results
    assert plain == simulate(trace, capacity="100", policy=["lru"]).results
    assert plain == simulate(trace, capacity=["100", 100], policy=("lru", "lru")).results
    assert plain == simulate(trace, capacity=[f"{100 * 512}tok"], policy=["lru"]).results
    assert plain == simulate(blocks(60), capacity=iter([100]), policy=iter(["lru"])).results
    most = simulate(trace, capacity="unlimited", policy="lru")
    assert most.results[0].capacity_blocks == most.trace["unlimited"]["blocks"]
    half = simulate(trace, capacity=100, policy="lru", limit=30)
    assert half.results == simulate(blocks(60), capacity=100, policy="lru", limit=30).results
    assert half.trace["requests"] == 30


def test_memory():
    config = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 8, "dtype": "float16"}
    result = simulate(blocks(60), capacity="3MiB", policy="lru", model_config=config)
    (row,) = result.results
    assert row.capacity_blocks == 3 * 2**20 // (512 * 64) == 96
    assert row.capacity_bytes == 3 * 2**20
    assert result.trace["bytes_per_token"] == 64


def test_a_pool_of_a_billion_blocks_takes_no_memory():
    rows = simulate(chats(20), capacity=10**9, policy=["lru", *OPTIMA]).results
    assert [row.capacity_blocks for row in rows] == [10**9] * 3
    assert {row.share_of_optimum for row in rows} == {1.0}


def test_a_class_is_a_policy():
    trace = read_trace(chats(200), block_size=4)
    own, fifo = simulate(trace, capacity=60, policy=[OldestFirst, "fifo"]).results
    assert own.policy == "oldest"
    assert own.hit_tokens == fifo.hit_tokens


class Counting(RetentionPolicy):
    """Takes arguments of its own, and a clock; counts how often one is made."""

    name = "counting"
    made = 0

    def __init__(self, num_blocks, weight, clock=time.monotonic):
        super().__init__(num_blocks, clock)
        self.weight = weight
        Counting.made += 1

    def on_request(self, index, num_hit, tokens, seed, now):
        assert self.weight == 7
        super().on_request(index, num_hit, tokens, seed, now)


@pytest.mark.parametrize("shape", [chats, blocks])
def test_a_policy_is_made_once_as_it_was_asked_for_and_has_the_time_of_the_trace(shape):
    Counting.made = 0
    items = [{**item, "timestamp": 1000 * i} for i, item in enumerate(shape(120))]
    for item in items[::3]:
        item.update(priority=5, ttl=20.0)
    options = {"capacity": 90, "block_size": 4 if shape is chats else 512}
    ours, theirs = simulate(items, policy=[lambda n: Counting(n, weight=7), "priority"], **options).results
    assert Counting.made == 1
    assert ours.hit_tokens == theirs.hit_tokens
    assert ours.hit_tokens != simulate(items, policy="lru", **options).results[0].hit_tokens
    for item in items[::3]:
        item["ttl"] = 1e9
    forever = simulate(items, policy="priority", **options).results[0]
    assert ours.hit_tokens != forever.hit_tokens, "time passes"


@pytest.mark.parametrize("shape", [chats, blocks])
@pytest.mark.parametrize("policies", [["lru"], ["optimal"], ["lru", *OPTIMA]])
def test_the_ceiling_is_computed_once_for_each_capacity(shape, policies, monkeypatch):
    asked = []

    def counting(paths, capacity):
        asked.append(capacity)
        return ceiling(paths, capacity)

    for module in ("simulation", "runs"):
        monkeypatch.setattr(f"radixkv.replay.{module}.ceiling", counting)
    trace = read_trace(shape(60), block_size=4 if shape is chats else 512)
    most = simulate(trace, capacity=10**6, policy="lru").trace["unlimited"]["blocks"]
    assert most > 90
    asked.clear()
    capacities = [90, most + 50, most + 100]
    rows = simulate(trace, capacity=capacities, policy=policies).results
    assert sorted(asked) == [90, most]
    assert rows == [row for c in capacities for row in simulate(trace, capacity=c, policy=policies).results]


@pytest.mark.parametrize("guarded", [True, False])
def test_a_script_that_asks_for_processes(tmp_path, guarded):
    script = tmp_path / "script.py"
    call = "print(len(simulate([{'token_ids': [1, 2, 3]}] * 3, capacity=10, policy=['lru', 'fifo'], jobs=2).results))"
    if guarded:
        call = f"if __name__ == '__main__':\n    {call}"
    script.write_text(f"from radixkv.replay import simulate\n{call}\n")
    found = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120)
    if guarded:
        assert (found.returncode, found.stdout) == (0, "2\n"), found.stderr
    else:
        assert found.returncode == 1
        last = found.stderr.strip().splitlines()[-1]
        assert "InvalidRequestError: jobs=2" in last
        assert 'call simulate below if __name__ == "__main__":' in last
        assert "bootstrapping" not in found.stderr, "nothing is said twice"


def test_several_processes_find_the_same():
    trace = read_trace(chats(100), block_size=4)
    calls = []
    alone = simulate(trace, policy=["lru", "optimal"])
    together = simulate(trace, policy=["lru", "optimal"], jobs=2, progress=lambda *call: calls.append(call))
    assert together == alone
    assert calls[-1][1] == calls[-1][2] == 100 * (1 + len(alone.results))


def test_progress_never_goes_back_and_ends():
    calls = []
    result = simulate(chats(300), policy=["lru", "optimal"], progress=lambda *call: calls.append(call))
    steps = [done for what, done, _ in calls if what == "Replaying"]
    assert steps == sorted(steps)
    assert calls[-1] == ("Replaying", steps[-1], steps[-1])
    assert steps[-1] == 300 * (1 + len(result.results))


def test_requests_longer_than_the_capacity():
    items = [*blocks(20), {"hash_ids": list(range(100, 250)), "input_length": 150 * 512}]
    with pytest.raises(InvalidRequestError, match=r"line 21: .* need 150 blocks of 512, .* capacity of 100"):
        simulate(items, capacity=[100, 200], policy="lru")
    result = simulate(items, capacity=[100, 200], policy="lru", skip_bad=True)
    assert {row.requests for row in result.results} == {20}
    assert result.trace["skipped"] == 1
    assert result.results == simulate(items[:-1], capacity=[100, 200], policy="lru").results


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"policy": "lur"}, "unknown policy 'lur': there is .*lru.*, optimal, optimal-pin"),
        ({"policy": []}, "no policy"),
        ({"policy": [3]}, "a name or a class"),
        ({"policy": 3}, "a name or a class"),
        ({"policy": OldestFirst(5)}, "a name or a class"),
        ({"policy": lambda num_blocks: num_blocks}, "is no policy"),
        ({"policy": lambda num_blocks: OldestFirst(num_blocks + 1)}, "made for"),
        ({"policy": lambda num_blocks: OldestFirst(num_blocks), "jobs": 2}, "other processes"),
        ({"capacity": []}, "capacity is"),
        ({"capacity": 2.5}, "capacity is"),
        ({"capacity": "x"}, "cannot be understood"),
        ({"capacity": "1GiB"}, "--model-config"),
        ({"jobs": 0}, "jobs"),
        ({"limit": 0}, "limit"),
        ({"block_size": -1}, "block_size"),
    ],
)
def test_nonsense_is_refused(options, reason):
    with pytest.raises(InvalidRequestError, match=reason):
        simulate(chats(3), **options)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"block_size": 32}, "the trace was read with 4"),
        ({"tokenizer": "some/model"}, "read already"),
        ({"block_size": 4.0}, "an integer of at least 1"),
        ({"block_size": True}, "an integer of at least 1"),
        ({"limit": 0}, "an integer of at least 1"),
        ({"limit": -1}, "an integer of at least 1"),
        ({"limit": 2.5}, "an integer of at least 1"),
    ],
)
def test_options_that_come_too_late_for_a_trace(options, reason):
    trace = read_trace(chats(3), block_size=4)
    with pytest.raises(InvalidRequestError, match=reason):
        simulate(trace, capacity=100, policy="lru", **options)
    assert simulate(trace, capacity=100, policy="lru", block_size=4, limit=3).trace["block_size"] == 4


def test_options_are_refused_before_the_trace_is_read():
    def never():
        raise AssertionError("read")
        yield

    for options in ({"policy": "lur"}, {"capacity": "x"}, {"jobs": 0}, {"model_config": {}}):
        with pytest.raises(InvalidRequestError):
            simulate(never(), **options)


@pytest.mark.parametrize("shape", ["token_ids", "hash_ids"])
def test_what_requests_say_of_how_long_to_keep_them(shape):
    """A request that asks to be kept for a second is there after half of one, and not after two."""

    def request(ids, milliseconds, **more):
        content = {shape: ids} if shape == "token_ids" else {shape: ids, "input_length": len(ids)}
        return {**content, "timestamp": milliseconds, **more}

    def hits(wait, **more):
        kept = request([1, 2, 3, 4], 0, **more)
        flood = [request([10 * n + i for i in range(4)], wait) for n in range(1, 5)]
        again = request([1, 2, 3, 4, 5], wait + 1)
        return (
            simulate([kept, *flood, again], capacity=8, policy="priority", block_size=1).results[0].hit_tokens
        )

    assert hits(500) == 0
    assert hits(500, priority=5) == 4
    assert hits(500, ttl=1) == 4
    assert hits(2000, ttl=1) == 0
    lru = [request([1], 0, priority=5), request([2], 0), request([1, 3], 0)]
    assert simulate(lru, capacity=2, policy="lru", block_size=1).results[0].hit_tokens == 1


def test_every_policy_that_is_known_can_be_replayed():
    for policy in policy_names():
        for items in (chats(150), blocks(150)):
            (row,) = simulate(items, capacity=90, policy=policy).results
            assert row.policy == policy
            assert math.isfinite(row.hit_rate)


def test_replay_is_at_hand_without_torch():
    code = (
        "import sys, radixkv\n"
        "r = radixkv.replay.simulate([{'token_ids': [1, 2, 3]}] * 2, capacity=9, policy='lru', block_size=2)\n"
        "assert r.results[0].hit_tokens == 2 and 'torch' not in sys.modules and 'rich' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    assert radixkv.replay.simulate is simulate
