"""Who is next: order of arrival, longest cached prefix, ageing, and waiting for a prefix that another one computes."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.sched.sched_testkit import Caller


def admitted(caller):
    """Run to the end; the arrival ranks of requests in the order of their first admission."""
    out = []
    while True:
        step = caller.schedule()
        if step is None:
            return out
        out += [seq.request.arrival for seq in step.admitted]
        caller.move(step)
        caller.complete(step, *caller.sample(step, caller.forward(step)))


def overtakes(order):
    """By how many later ones each was passed."""
    place = {arrival: at for at, arrival in enumerate(order)}
    return [sum(place[j] < place[i] for j in range(i + 1, len(order))) for i in range(len(order))]


def groups(num_groups, each, shared=12, own=3, seed=0):
    """Prompts in groups that share a prefix, in random order."""
    rng = np.random.default_rng(seed)
    heads = rng.integers(0, 97, (num_groups, shared))
    prompts = [np.concatenate((head, rng.integers(0, 97, own))) for head in heads for _ in range(each)]
    return [prompts[i] for i in rng.permutation(len(prompts))]


def test_fcfs_is_the_order_of_arrival():
    caller = Caller(num_blocks=24, max_num_seqs=3)
    for prompt in groups(18, 1):
        caller.add(prompt, 3)
    order = admitted(caller)
    assert order == sorted(order)


def test_nobody_overtakes_a_request_that_lacks_room():
    caller = Caller(num_blocks=10, block_size=4, watermark=0.0)
    caller.add(range(16), 8)
    caller.step()
    big, small = caller.add(range(30, 58), 2), caller.add([90], 2)
    caller.step()
    assert (big.state, small.state) == ("waiting", "waiting")
    assert admitted(caller) == [1, 2]


def test_the_prefix_order_hits_what_the_best_order_hits():
    """All are there from the start, and the pool holds the prefixes of two of eight groups."""
    prompts = groups(8, 6, shared=16)
    hits = {}
    for name, order, given_prompts in (
        ("fcfs", "fcfs", prompts),
        ("prefix", "prefix", prompts),
        ("best", "fcfs", sorted(prompts, key=lambda p: p.tolist())),
    ):
        caller = Caller(20, 4, order=order, max_num_seqs=2, max_overtakes=10**6, preemption="recompute")
        requests = [caller.add(prompt, 3) for prompt in given_prompts]
        caller.run()
        caller.check_outputs(requests)
        hits[name] = caller.scheduler.stats.hit_tokens
    assert hits["best"] >= 8 * 5 * 16
    assert hits["prefix"] >= 0.99 * hits["best"]
    assert hits["fcfs"] < hits["best"] / 2


def test_the_prefix_order_goes_to_what_is_cached_already():
    caller = Caller(num_blocks=32, block_size=4, order="prefix", max_num_seqs=1)
    caller.add(range(12), 2)
    caller.run()
    caller.add([50], 12)
    caller.step()
    cold, warm, warmer = (
        caller.add(range(60, 72), 2),
        caller.add([0, 1, 2, 3, 9], 2),
        caller.add(range(11), 2),
    )
    assert admitted(caller) == [warmer.arrival, warm.arrival, cold.arrival]


def test_an_estimate_that_eviction_made_wrong_is_mended():
    caller = Caller(num_blocks=32, block_size=4, order="prefix", max_num_seqs=1)
    for prompt in (range(12), range(20, 28)):
        caller.add(prompt, 2)
        caller.run()
    caller.add([50], 12)
    caller.step()
    was_first, now_first = caller.add(range(12), 2), caller.add(range(20, 28), 2)
    keep = caller.tree.match(range(20, 28))
    caller.tree.evict(32)
    keep.release()
    assert admitted(caller) == [now_first.arrival, was_first.arrival]


@given(
    st.data(),
    st.sampled_from(["fcfs", "prefix"]),
    st.sampled_from([0, 1, 3, 10]),
    st.integers(1, 4),
    st.sampled_from([5, 64]),
)
def test_nobody_is_passed_too_often(data, order, most, seqs, budget):
    seed = data.draw(st.integers(0, 2**16))
    rng = random.Random(seed)
    caller = Caller(
        40, 4, order=order, max_overtakes=most, max_num_seqs=seqs, max_batched_tokens=budget, checks=False
    )
    order_of_admission = []
    prompts = groups(4, 6, seed=seed)
    while prompts or caller.scheduler.has_unfinished:
        for _ in range(min(len(prompts), rng.choice([0, 1, 5]))):
            caller.add(prompts.pop(), rng.randint(1, 6))
        step = caller.schedule()
        if step is not None:
            order_of_admission += [seq.request.arrival for seq in step.admitted]
            caller.move(step)
            caller.complete(step, *caller.sample(step, caller.forward(step)))
    assert sorted(order_of_admission) == list(range(24))
    assert max(overtakes(order_of_admission)) <= most
    caller.check_empty()


def test_never_to_be_passed_is_fcfs():
    caller = Caller(num_blocks=40, order="prefix", max_overtakes=0, max_num_seqs=2)
    for prompt in groups(4, 5):
        caller.add(prompt, 3)
    order = admitted(caller)
    assert order == sorted(order)


# -- waiting for a prefix ------------------------------------------------------------------------------------


def test_a_crowd_with_one_prefix_computes_it_once():
    caller = Caller(num_blocks=2000, block_size=4, max_num_seqs=64, max_batched_tokens=256, checks=False)
    prompts = [[*range(90), 1 + i // 90, i % 90] for i in range(1500)]
    requests = [caller.add(prompt, 1) for prompt in prompts]
    step = caller.scheduler.schedule()
    # It had a look at many, but not at all of them, and none of those computes anything yet.
    assert step.admitted == requests[0].sequences
    parked = sum(request.sequences[0]._blocker is not None for request in requests)
    assert parked == 128
    caller.complete(step, *caller.sample(step, caller.forward(step)))
    caller.run()
    work = Counter(seq.request.arrival for seq, start, end in caller.computed for _ in range(start, end))
    assert work[0] == 92
    assert all(work[i] <= 2 + 2 for i in range(1, 1500))  # its own two tokens, and no more of its last block
    caller.check_outputs(requests[::100])
    caller.check_empty()


def test_a_chain_of_prefixes():
    """Each waits for the one before it, which has a longer part of its prompt than any other."""
    caller = Caller(num_blocks=64, block_size=4)
    prompts = [list(range(4 * (i + 1))) + [90 - i] * 4 for i in range(5)]
    requests = [caller.add(prompt, 2) for prompt in prompts]
    caller.run()
    # The first block of all is computed once, the second one once by the second request, and so on.
    assert [request.num_cached_tokens for request in requests] == [0, 4, 8, 12, 16]
    caller.check_outputs(requests)


@pytest.mark.parametrize("order", ["fcfs", "prefix"])
def test_it_waits_for_the_part_that_it_needs_and_no_longer(order):
    caller = Caller(num_blocks=64, block_size=4, max_batched_tokens=16, order=order)
    long = caller.add(range(12), 1)
    caller.step()
    del long
    blocker = caller.add(range(30, 90), 2)
    caller.step()
    short = caller.add([*range(30, 42), 7], 2)
    other = caller.add([8, 8, 8], 2)
    step = caller.scheduler.schedule()
    caller.complete(step, *caller.sample(step, caller.forward(step)))
    assert blocker.sequences[0].num_computed == 32
    del other
    step_until_running = 0
    while short.state == "waiting":
        caller.step()
        step_until_running += 1
        assert step_until_running < 8
    assert short.num_cached_tokens == 12
    caller.run()
    caller.check_outputs([blocker, short])


@pytest.mark.parametrize("end", ["abort", "finish", "drop", "fail"])
def test_it_does_not_wait_for_one_that_is_gone(end):
    caller = Caller(num_blocks=64, block_size=4, max_batched_tokens=64)
    blocker = caller.add(range(20), 2)
    waits = caller.add([*range(20), 9], 2)
    step = caller.scheduler.schedule()
    assert waits.sequences[0]._blocker is blocker.sequences[0]
    if end == "fail":
        caller.fail(step, 0)
        assert waits.sequences[0]._blocker is None
        caller.scheduler.abort(blocker.rid)
    elif end == "finish":
        caller.fail(step, 0)
        caller.scheduler.finish(blocker.sequences[0], "test")
    else:
        if end == "abort":
            caller.scheduler.abort(blocker.rid)
        else:
            caller.scheduler.drop(blocker.sequences[0], "test")
        assert waits.sequences[0]._blocker is None
        caller.move(step)
        caller.complete(step, *caller.sample(step, caller.forward(step)))
    caller.check()
    assert caller.step()
    assert waits.state == "running"
    assert waits.num_cached_tokens == 0
    caller.run()
    caller.check_outputs([waits])
    caller.check_empty()


def test_it_does_not_wait_in_another_namespace():
    caller = Caller(num_blocks=64, block_size=4)
    one, two = caller.add(range(20), 2, namespace=b"a"), caller.add(range(20), 2, namespace=b"b")
    caller.step()
    assert one.state == two.state == "running"
    assert two.num_cached_tokens == 0


def test_one_that_waits_may_be_aborted_while_it_does():
    caller = Caller(num_blocks=64, block_size=4)
    blocker, waits = caller.add(range(20), 2), caller.add([*range(20), 9], 2)
    step = caller.scheduler.schedule()
    assert waits.sequences[0]._blocker is not None
    caller.scheduler.abort(waits.rid)
    assert blocker.sequences[0]._waiters == []
    caller.complete(step, *caller.sample(step, caller.forward(step)))
    caller.run()
    caller.check_empty()
