"""Faults that hostile tests of the scheduler found, each with what should have happened."""

from __future__ import annotations

import numpy as np
import pytest

from radixkv import BlockPool, RadixTree, Scheduler, SchedulerConfig
from radixkv.errors import InvalidRequestError


def make(num_blocks: int = 16, block_size: int = 4, host_blocks: int = 0, **options: object) -> Scheduler:
    tree = RadixTree(BlockPool(num_blocks), block_size=block_size)
    host = BlockPool(host_blocks) if host_blocks else None
    return Scheduler(tree, SchedulerConfig(**options), host)  # type: ignore[arg-type]


def step(scheduler: Scheduler, token: int = 7) -> bool:
    planned = scheduler.schedule()
    if planned is None:
        return False
    scheduler.complete(planned, np.full(len(planned.sampling), token))
    scheduler.check(exclusive=True)
    return True


@pytest.mark.parametrize("host_blocks", [0, 8])
@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("block_size", [4, 16])
def test_completions_that_fit_one_after_the_other_all_end_whole(
    n: int, block_size: int, host_blocks: int
) -> None:
    # Once the others of a shared tail are preempted, no copy of it is needed any more.
    prompt, new = 20, 8
    fits = -(-(prompt + new - 1) // block_size)
    scheduler = make(fits, block_size, host_blocks)
    request = scheduler.add(range(prompt), max_new_tokens=new, n=n)
    steps = 0
    while scheduler.has_unfinished:
        assert step(scheduler)
        steps += 1
        assert steps < 100
    assert [(seq.finish_reason, len(seq.output_tokens)) for seq in request.sequences] == [("length", new)] * n


def test_a_restart_with_a_wrong_namespace_changes_nothing() -> None:
    scheduler = make()
    first, second = scheduler.add([1, 2, 3], max_new_tokens=3), scheduler.add([4, 5, 6], max_new_tokens=3)
    step(scheduler)
    with pytest.raises(InvalidRequestError, match="namespace"):
        scheduler.restart(lambda request: b"new" if request is first else 5)  # type: ignore[arg-type,return-value]
    scheduler.check(exclusive=True)
    while scheduler.has_unfinished:
        assert step(scheduler)
    assert len(second.sequences[0].output_tokens) == 3


def test_what_is_aborted_behind_one_that_cannot_enter_is_forgotten() -> None:
    scheduler = make(num_blocks=4, max_num_seqs=4)
    scheduler.add(range(12), max_new_tokens=1000)
    step(scheduler)
    scheduler.add(range(100, 116), max_new_tokens=1)
    for rank in range(3000):
        scheduler.add(range(8), max_new_tokens=1, rid=("late", rank))
        scheduler.abort(("late", rank))
    assert len(scheduler._admission.queue._new) < 200


def test_a_name_of_the_callers_own_may_look_like_one_of_ours() -> None:
    scheduler = make()
    for rid in (1, 2, 0):
        scheduler.add([1, 2], max_new_tokens=1, rid=rid)
    assert scheduler.add([1, 2], max_new_tokens=1).rid not in (0, 1, 2)
    with pytest.raises(InvalidRequestError, match="hashable"):
        scheduler.add([1, 2], max_new_tokens=1, rid=[1])  # type: ignore[arg-type]


@pytest.mark.parametrize("who", [0, 1, 2])
def test_dropped_in_the_step_that_samples_it(who: int) -> None:
    scheduler = make()
    request = scheduler.add(range(6), max_new_tokens=4, n=3)
    planned = scheduler.schedule()
    assert planned is not None
    at = planned.sampling_seqs.index(request.sequences[who])
    scheduler.drop(request.sequences[who], "error")
    done = scheduler.complete(planned, np.array([70, 71, 72]))
    assert at in done.ignored
    for i, seq in enumerate(planned.sampling_seqs):
        expected = [] if i in done.ignored else [70 + i]
        assert seq.output_tokens.tolist() == expected
    scheduler.check(exclusive=True)
    while scheduler.has_unfinished:
        assert step(scheduler)
    assert sum(seq.finish_reason == "length" for seq in request.sequences) == 2


def test_the_leader_dropped_in_a_step_that_fails() -> None:
    scheduler = make()
    scheduler.add(range(1, 8), max_new_tokens=1)
    step(scheduler)
    request = scheduler.add([1, 2, 3, 4, 5, 6, 9, 9], max_new_tokens=2, n=2)
    planned = scheduler.schedule()
    assert planned is not None
    assert planned.copies.num_blocks == 1
    scheduler.drop(request.sequences[0], "error")
    scheduler.fail(planned)
    scheduler.check(exclusive=True)
    again = scheduler.schedule()
    assert again is not None
    assert again.copies.num_blocks == 1, "the copy was never made"
    scheduler.complete(again, np.full(len(again.sampling), 5))
    while scheduler.has_unfinished:
        assert step(scheduler)
    assert scheduler.stats.prompt_tokens == 7 + 8


def test_rows_for_a_thousand_million_sequences_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="max_num_seqs"):
        make(max_num_seqs=10**9)
