"""What a scheduler shares with others, and what happens when something raises in the middle of it."""

from __future__ import annotations

import random
import threading

import pytest

from radixkv.core import OutOfBlocksError
from radixkv.sched import SchedulerConfig
from tests.sched.sched_testkit import Caller
from tests.sched.test_random_sessions import Session


class Boom(RuntimeError):
    pass


@pytest.mark.parametrize("method", ["allocate", "match"])
@pytest.mark.parametrize("seed", range(8))
def test_an_error_inside_schedule_leaves_everything_as_it_was(monkeypatch, method, seed):
    rng = random.Random(seed)
    caller = Caller(14, 4, 12, preemption="swap", max_num_seqs=4, max_batched_tokens=16, watermark=0.0)
    requests = [caller.add(range(i % 3, 6 + i), 8, n=1 + i % 2) for i in range(8)]
    original = getattr(caller.tree, method)
    after = 0

    def raises(*args, **options):
        nonlocal after
        after -= 1
        if after == 0:
            raise Boom
        return original(*args, **options)

    monkeypatch.setattr(caller.tree, method, raises)
    hurt = 0
    while caller.scheduler.has_unfinished:
        after = rng.choice([0, 1, 1, 2])
        try:
            step = caller.schedule()
        except Boom:
            hurt += 1
            caller.check()
            continue
        after = 0
        caller.move(step)
        caller.complete(step, *caller.sample(step, caller.forward(step)))
    assert hurt > 0
    caller.check_outputs(requests)
    caller.check_empty()


def test_checks_after_every_call_if_the_environment_asks_for_them(monkeypatch):
    monkeypatch.setenv("RADIXKV_CHECK", "1")
    Session(3).run(num_requests=8, trouble=0.1)


def test_other_threads_may_use_the_tree_meanwhile():
    caller = Caller(30, 4, 30, preemption="swap", max_num_seqs=6, max_batched_tokens=16, checks=False)
    caller.guests.append(None)
    rng, stop, wrong = random.Random(1), threading.Event(), []
    bases = [[rng.randrange(97) for _ in range(16)] for _ in range(3)]

    def guest(seed):
        own = random.Random(seed)
        try:
            while not stop.is_set():
                match = caller.tree.match(own.choice(bases))
                try:
                    mine = caller.tree.allocate(own.randint(1, 3))
                    caller.pool.release(mine)
                except OutOfBlocksError:
                    pass
                match.release()
        except Exception as error:
            wrong.append(error)

    guests = [threading.Thread(target=guest, args=(i,)) for i in range(2)]
    for thread in guests:
        thread.start()
    requests = []
    try:
        for i in range(150):
            own = [rng.randrange(97) for _ in range(rng.randint(1, 6))]
            requests.append(caller.add(rng.choice(bases)[: rng.choice([0, 8, 16])] + own, rng.randint(1, 12)))
            if i % 3 == 0:
                caller.step()
        while caller.scheduler.has_unfinished:
            caller.step()
    finally:
        stop.set()
        for thread in guests:
            thread.join(30)
    assert wrong == []
    caller.guests.clear()
    caller.check_outputs(requests)  # those that found no room beside the guests ended with "capacity"
    caller.check_empty()


def test_blocks_are_consecutive_where_they_can_be():
    caller = Caller(num_blocks=64, block_size=4)
    caller.add(range(40), 2)
    caller.add(range(50, 75), 2)
    caller.step()
    for row, num in ((0, 10), (1, 7)):
        table = caller.scheduler._rows.table(row)
        assert (table[1:] - table[:-1] == 1).all()
        assert len(table) == num


def test_utilisation_counts_a_shared_block_once():
    caller = Caller(num_blocks=64, block_size=4)
    caller.add(range(9), 20, n=3)
    assert caller.scheduler.stats.block_utilisation == 1.0  # nobody runs
    caller.step()
    stats = caller.scheduler.stats
    assert (stats.held_slots, stats.filled_slots) == (12, 9)
    caller.step()
    stats = caller.scheduler.stats
    assert (stats.held_slots, stats.filled_slots) == (2 * 4 + 3 * 4, 8 + 3 * 2)
    assert stats.block_utilisation == 14 / 20


def test_auto_swaps_where_that_costs_less():
    for swap_cost, swaps in ((0.4, True), (0.6, False)):
        caller = Caller(
            12, 4, 12, preemption="auto", swap_cost=swap_cost, watermark=0.0, share_prefixes=False
        )
        requests = [caller.add(range(i, i + 12), 16) for i in (0, 40)]
        caller.run()
        stats = caller.scheduler.stats
        assert (stats.preemptions_swap > 0, stats.preemptions_recompute > 0) == (swaps, not swaps)
        caller.check_outputs(requests)


def test_when_the_host_tier_is_full_it_recomputes():
    caller = Caller(12, 4, 2, preemption="swap", watermark=0.0)
    requests = [caller.add(range(i, i + 12), 16) for i in (0, 40)]
    caller.run()
    stats = caller.scheduler.stats
    assert (stats.preemptions_swap, stats.preemptions_recompute > 0) == (0, True)
    caller.check_outputs(requests)


def test_a_budget_below_the_number_of_decodes():
    caller = Caller(64, 4, max_num_seqs=8, max_batched_tokens=3)
    requests = [caller.add([i, i + 1], 5) for i in range(8)]
    caller.run()
    caller.check_outputs(requests)


def test_the_watermark_is_left_free_beside_others():
    for watermark, admitted in ((0.0, 2), (0.5, 1)):
        caller = Caller(8, 4, watermark=watermark)
        for i in range(2):
            caller.add(range(40 * i, 40 * i + 12), 1)
        step = caller.scheduler.schedule()
        assert len(step.admitted) == admitted


def test_the_defaults_make_sense_alone():
    config = SchedulerConfig()
    assert (config.order, config.preemption, config.max_num_seqs) == ("fcfs", "auto", 256)
    # With "auto" and no host tier it recomputes.
    caller = Caller(12, 4, watermark=0.0)
    requests = [caller.add(range(i, i + 12), 16) for i in (0, 40)]
    caller.run()
    assert caller.scheduler.stats.preemptions_recompute > 0
    caller.check_outputs(requests)
