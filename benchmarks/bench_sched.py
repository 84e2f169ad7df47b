"""The scheduler alone, in CPU time: one step is `schedule()` and `complete()`.

    python -m pytest benchmarks/bench_sched.py --benchmark-columns=min,median,max,rounds

Sequences decode in blocks of 16 tokens, each at another offset in its block, so that in every step one in sixteen
needs a block. Every case checks that its steps are what they should be.
"""

from __future__ import annotations

import time

import numpy as np
import pytest

from radixkv.core import BlockPool, RadixTree
from radixkv.sched import Scheduler, SchedulerConfig

# CPU time of this thread: other processes on the machine do not count.
pytestmark = pytest.mark.benchmark(timer=time.thread_time, warmup=False, disable_gc=True)

BLOCK = 16
STEPS = 400


def decoding(num, prompt=256, new=10_000, **config):
    """A scheduler with so many sequences that decode, with prompts of about so many tokens that share nothing."""
    tree = RadixTree(BlockPool(num * (prompt + new + 100) // BLOCK), BLOCK)
    config = {"max_num_seqs": num, "max_batched_tokens": 2**21, **config}
    scheduler = Scheduler(tree, SchedulerConfig(**config))
    rng = np.random.default_rng(0)
    for i in range(num):
        scheduler.add(rng.integers(0, 128_000, prompt + i % BLOCK), max_new_tokens=new)
    step = scheduler.schedule()
    scheduler.complete(step, np.zeros(len(step.sampling), np.int64))
    assert len(step.sampling) == num
    return scheduler


def measure(benchmark, scheduler, num, rounds=STEPS, exclusive=True):
    tokens = np.arange(num, dtype=np.int64)
    before = scheduler._rows.known.copy()

    def step():
        made = scheduler.schedule()
        scheduler.complete(made, tokens)

    benchmark.pedantic(step, rounds=rounds, warmup_rounds=20)
    made = scheduler.schedule()
    assert made.num_decodes == made.num_tokens == num
    assert (made.positions == (before + rounds + 19)[made.rows]).all()
    block, offset = np.divmod(made.positions, BLOCK)
    assert (made.slot_mapping == made.block_tables[np.arange(num), block] * BLOCK + offset).all()
    scheduler.check(exclusive=exclusive)


@pytest.mark.parametrize("num", [16, 64, 256, 1024])
def test_decode(benchmark, num):
    measure(benchmark, decoding(num), num)


def test_decode_256_with_4096_tokens_each(benchmark):
    measure(benchmark, decoding(256, prompt=4096, new=1000), 256)


def test_decode_256_of_which_one_ends_and_one_starts(benchmark):
    """Every step somebody ends, and somebody else is admitted and computes its prompt of 256 tokens."""
    num = 256
    scheduler = decoding(num)
    rng = np.random.default_rng(1)
    prompts = iter(rng.integers(0, 128_000, (STEPS + 20, 256)))

    def add():
        scheduler.add(next(prompts), max_new_tokens=10_000)

    def step():
        made = scheduler.schedule()
        assert len(made.sampling) in (num, num - 1)
        scheduler.complete(made, np.zeros(len(made.sampling), np.int64), {0: "stop"})

    benchmark.pedantic(step, setup=add, rounds=STEPS, warmup_rounds=20)
    assert scheduler.stats.admissions == num + STEPS + 19


def test_admit_256_prompts_of_512_tokens_at_once(benchmark):
    """One step admits them all, and publishes them."""
    prompts = np.random.default_rng(2).integers(0, 128_000, (256, 512))

    def fresh():
        tree = RadixTree(BlockPool(20_000), BLOCK)
        scheduler = Scheduler(tree, SchedulerConfig(max_num_seqs=256, max_batched_tokens=2**20))
        for prompt in prompts:
            scheduler.add(prompt, max_new_tokens=8)
        return (scheduler,), {}

    def step(scheduler):
        made = scheduler.schedule()
        scheduler.complete(made, np.zeros(256, np.int64))
        assert made.num_tokens == 256 * 512

    benchmark.pedantic(step, setup=fresh, rounds=20)


def test_a_blocked_head_costs_a_step_nothing(benchmark):
    """10,000 requests wait, for which there is no room."""
    num = 256
    scheduler = decoding(num, max_num_seqs=num + 1)
    pool = scheduler.tree.pool
    pool.allocate(pool.num_free - 256 * 40)
    prompt = np.random.default_rng(3).integers(0, 128_000, 256 * 45 * BLOCK)
    for _ in range(10_000):
        scheduler.add(prompt[:-1], max_new_tokens=8)
    measure(benchmark, scheduler, num, exclusive=False)
    assert scheduler.num_waiting == 10_000
