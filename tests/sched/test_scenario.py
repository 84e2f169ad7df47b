"""Six requests through pools of every size: what comes out depends on none of it.

The memory behind the pool is checked at every read: see `sched_testkit`.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.sched.sched_testkit import Caller

BLOCK = 4
# Number 2 has the prompt of number 0.
SHAPES = [(14, 12), (9, 20), (14, 16), (21, 10), (3, 30), (17, 7)]
RNG = np.random.default_rng(11)
PROMPTS = [RNG.integers(0, 97, prompt) for prompt, _ in SHAPES]
PROMPTS[2] = PROMPTS[0]
LARGEST = max(-(-(prompt + new - 1) // BLOCK) for prompt, new in SHAPES)

MODES = [("recompute", 0), ("swap", 64), ("swap", 6), ("auto", 64)]


def run(num_blocks, preemption="recompute", host_blocks=0, n=1, **options):
    options = {"max_batched_tokens": 64, "max_num_seqs": 6 * n, **options}
    caller = Caller(num_blocks, BLOCK, host_blocks, preemption=preemption, swap_cost=0.2, **options)
    requests = [caller.add(p, new, n=n) for p, (_, new) in zip(PROMPTS, SHAPES, strict=True)]
    caller.run()
    caller.check_outputs(requests)
    assert {seq.finish_reason for request in requests for seq in request.sequences} == {"length"}
    caller.check_empty()
    return caller, requests


@pytest.mark.parametrize(("preemption", "host_blocks"), MODES)
def test_every_pool_size(preemption, host_blocks):
    preempted = 0
    for num_blocks in range(LARGEST, 65):
        caller, requests = run(num_blocks, preemption, host_blocks, checks=num_blocks % 4 == 0)
        stats = caller.scheduler.stats
        preempted += stats.preemptions
        assert stats.prompt_tokens == sum(len(prompt) for prompt in PROMPTS)
        assert requests[2].num_cached_tokens in (0, 12, 13)
        assert all(seq.num_preemptions <= 2 for request in requests for seq in request.sequences)
    assert preempted > 0


def test_a_pool_of_28_blocks():
    caller, requests = run(28)
    # Numbers 0 and 2 arrive together: the second waits for the first and takes all but the last token.
    assert requests[2].num_cached_tokens == 13
    assert caller.scheduler.stats.hit_tokens == 13


def test_a_pool_that_holds_all_preempts_nobody_and_computes_everything_once():
    caller, _ = run(64)
    stats = caller.scheduler.stats
    assert stats.preemptions == stats.recomputed_tokens == 0
    assert stats.computed_tokens == sum(prompt + new - 1 for prompt, new in SHAPES) - stats.hit_tokens


@pytest.mark.parametrize("budget", [1, 3, 7, 16])
@pytest.mark.parametrize("order", ["fcfs", "prefix"])
def test_chunks_and_order_change_nothing(budget, order):
    for num_blocks in (LARGEST, 14, 28):
        run(num_blocks, "auto", 20, max_batched_tokens=budget, order=order)


@pytest.mark.parametrize(("preemption", "host_blocks"), MODES)
def test_with_several_completions_each(preemption, host_blocks):
    for num_blocks in (LARGEST, 10, 13, 19, 28, 64):
        run(num_blocks, preemption, host_blocks, n=3)


@pytest.mark.parametrize("options", [{"share_prefixes": False}, {"keep_cached": False}, {"max_num_seqs": 1}])
def test_without_sharing_and_without_company(options):
    for num_blocks in (LARGEST, 12, 28):
        for preemption, host_blocks in MODES:
            run(num_blocks, preemption, host_blocks, **options)
