"""A step of decodes is a few array operations, whatever their number. Counted, not timed."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

import radixkv.sched
from radixkv.core import BlockPool, RadixTree
from radixkv.sched import Scheduler, SchedulerConfig

OURS = str(Path(radixkv.sched.__file__).parent.parent)


def bytecodes(call):
    """How many bytecodes of our own a call executes."""
    count = 0

    def local(frame, event, arg):
        nonlocal count
        count += event == "opcode"
        return local

    def trace(frame, event, arg):
        if not frame.f_code.co_filename.startswith(OURS):
            return None
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        return local

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


def decoding(num, lengths, **options):
    config = SchedulerConfig(**{"max_num_seqs": num, "max_batched_tokens": 2**20, **options})
    scheduler = Scheduler(RadixTree(BlockPool(40 * num), 16), config)
    rng = np.random.default_rng(0)
    for i in range(num):
        scheduler.add(rng.integers(0, 1000, lengths[i % len(lengths)]), max_new_tokens=200)
    step(scheduler)
    step(scheduler)
    return scheduler


def step(scheduler):
    made = scheduler.schedule()
    scheduler.complete(made, np.zeros(len(made.sampling), np.int64))
    return made


@pytest.mark.parametrize(
    "lengths",
    [range(20, 36), [34], [36]],
    ids=["one in sixteen at a border", "all at the same offset", "none"],
)
def test_bytecodes_of_a_step_do_not_grow_with_its_sequences(lengths):
    counts = []
    for num in (16, 256):
        scheduler = decoding(num, list(lengths))
        counts.append([bytecodes(lambda s=scheduler: step(s)) for _ in range(16)])
        assert scheduler.num_running == num
    few, many = counts
    assert sum(many) < 1.1 * sum(few)
    assert max(many) < 1.5 * max(few)


def test_the_counter_would_see_a_loop():
    scheduler = decoding(64, [20])
    assert bytecodes(lambda: [scheduler.sequence(row) for row in range(64)]) > 64 * 5


@pytest.mark.parametrize("order", ["fcfs", "prefix"])
@pytest.mark.parametrize("lacks", ["a row", "room"])
def test_a_step_costs_no_more_while_many_wait(order, lacks):
    counts = []
    for num_waiting in (0, 2000):
        scheduler = decoding(16, [20], order=order, max_num_seqs=16 + (lacks == "room"))
        pool = scheduler.tree.pool
        pool.allocate(pool.num_free - 120)  # enough for those that decode, not for a big prompt
        for i in range(num_waiting):
            scheduler.add([*range(3000), i], max_new_tokens=4)
        step(scheduler)
        counts.append(bytecodes(lambda s=scheduler: [step(s) for _ in range(10)]))
        assert scheduler.num_waiting == num_waiting
    assert counts[1] <= 1.15 * counts[0]
