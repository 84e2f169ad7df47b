"""What a scheduler does, one thing at a time."""

from __future__ import annotations

import re

import numpy as np
import pytest

from radixkv.core import BlockPool, CacheCorruptionError, InvalidRequestError, RadixTree
from radixkv.sched import Scheduler, SchedulerConfig
from tests.sched.sched_testkit import Caller, reference


def test_one_request_from_start_to_end():
    caller = Caller(num_blocks=8, block_size=4)
    request = caller.add(range(1, 7), new=5)
    assert (request.rid, request.arrival, request.n, request.state) == (0, 0, 1, "waiting")
    step = caller.scheduler.schedule()
    assert (step.number, step.num_decodes, step.num_seqs, step.num_tokens) == (0, 0, 1, 6)
    assert step.query_lens.tolist() == step.context_lens.tolist() == [6]
    assert step.token_ids.tolist() == [1, 2, 3, 4, 5, 6]
    assert step.positions.tolist() == list(range(6))
    assert step.slot_mapping.tolist() == list(range(6))  # consecutive blocks, from a new pool
    assert step.sampling.tolist() == [0]
    assert step.sampling_seqs == step.admitted == request.sequences
    seq = caller.scheduler.sequence(int(step.rows[0]))
    assert seq is request.sequences[0]
    assert (seq.state, request.state, seq.num_computed) == ("running", "running", 0)
    done = caller.scheduler.complete(step, [9])
    assert (done.finished, done.forked, done.ignored) == ([], [], [])
    assert (seq.num_computed, seq.num_tokens, seq.output_tokens.tolist()) == (6, 7, [9])
    step = caller.scheduler.schedule()
    assert (step.num_decodes, step.num_tokens) == (1, 1)
    assert (step.token_ids.tolist(), step.positions.tolist(), step.slot_mapping.tolist()) == ([9], [6], [6])
    done = caller.scheduler.complete(step, [8], {0: "stop"})
    assert done.finished == [seq]
    assert (seq.state, seq.finish_reason, request.state) == ("finished", "stop", "finished")
    assert (seq.row, seq.all_tokens().tolist()) == (-1, [1, 2, 3, 4, 5, 6, 9, 8])
    assert not caller.scheduler.has_unfinished
    assert caller.scheduler.schedule() is None
    assert caller.tree.match_length([1, 2, 3, 4, 5, 6, 9, 8]) == 7  # the last token was never computed


def test_a_sequence_says_where_its_blocks_are():
    caller = Caller(num_blocks=8, block_size=4, host_blocks=8, preemption="swap", watermark=0.0)
    (older,) = caller.add(range(14), new=16).sequences
    (younger,) = caller.add(range(20, 28), new=16).sequences
    assert len(older.block_table) == len(older.host_blocks) == 0
    caller.step()
    assert (older.block_table.tolist(), younger.block_table.tolist()) == ([0, 1, 2, 3], [4, 5])
    assert older.block_table.dtype == younger.host_blocks.dtype == np.int32
    older.block_table[:] = 7  # a copy
    assert older.block_table.tolist() == [0, 1, 2, 3]
    step = caller.scheduler.schedule()
    assert step.block_tables[0, :4].tolist() == older.block_table.tolist()
    caller.move(step)
    caller.complete(step, *caller.sample(step, caller.forward(step)))
    while younger.state == "running":
        held = younger.block_table.tolist()
        caller.step()
    assert len(younger.host_blocks) == len(held)
    assert younger.host_blocks.dtype == np.int32
    younger.host_blocks[:] = 7
    assert sorted(younger.host_blocks.tolist()) == list(range(len(held)))
    assert len(younger.block_table) == 0
    caller.run()
    for seq in (older, younger):
        assert len(seq.block_table) == len(seq.host_blocks) == 0


def test_the_arrays_of_a_step_have_their_types():
    caller = Caller(max_batched_tokens=12)
    caller.add(range(9), new=6)
    caller.step()
    caller.add(range(20, 50), new=3, n=2)
    for _ in range(4):
        step = caller.scheduler.schedule()
        for name in ("rows", "query_lens", "query_starts", "context_lens", "block_tables", "sampling"):
            assert getattr(step, name).dtype == np.int32, name
        for name in ("token_ids", "positions", "slot_mapping"):
            assert getattr(step, name).dtype == np.int64, name
        for moves in (step.swap_out, step.swap_in, step.copies):
            assert moves.src.dtype == moves.dst.dtype == np.int32
        caller.move(step)
        caller.complete(step, *caller.sample(step, caller.forward(step)))


def test_a_prompt_is_computed_in_chunks_beside_decodes():
    caller = Caller(num_blocks=64, block_size=4, max_batched_tokens=8)
    first, second = caller.add(range(5), new=12), caller.add(range(50, 70), new=2)
    caller.run()
    lens = [end - start for seq, start, end in caller.computed if seq is second.sequences[0]]
    assert lens == [3, 7, 7, 3, 1]  # what the other one leaves of the budget
    caller.check_outputs([first, second])
    caller.check_empty()


def test_completions_of_one_prompt_compute_it_once_and_share_its_blocks():
    caller = Caller(num_blocks=32, block_size=4)
    request = caller.add(range(10), new=4, n=3)
    step = caller.scheduler.schedule()
    assert step.sampling.tolist() == [0, 0, 0]
    assert step.sampling_seqs == request.sequences
    tokens, reasons = caller.sample(step, caller.forward(step))
    done = caller.complete(step, tokens, reasons)
    assert done.forked == request.sequences[1:]
    assert caller.pool.num_held == 3
    step = caller.scheduler.schedule()
    assert step.copies.num_blocks == 2  # the last one has the block to itself by then
    assert len(set(step.copies.src.tolist())) == 1
    caller.move(step)
    caller.complete(step, *caller.sample(step, caller.forward(step)))
    assert caller.pool.num_held == 5
    caller.run()
    caller.check_outputs([request])
    assert sum(end - start for _, start, end in caller.computed) == 10 + 3 * 3
    caller.check_empty()


def test_a_fork_goes_on_from_where_it_was_made():
    caller = Caller(num_blocks=32, block_size=4)
    request = caller.add(range(7), new=8)
    seq = request.sequences[0]
    for _ in range(3):
        caller.step()
    assert seq.num_computed == 9
    child = caller.fork(seq)
    assert child is request.sequences[1]
    assert child.all_tokens().tolist() == seq.all_tokens().tolist()
    caller.run()
    assert child.output_tokens.tolist() == seq.output_tokens.tolist()  # the same model, the same index
    assert caller.scheduler.stats.cow_copies == 1
    assert re.fullmatch(
        r"steps: \d+; admissions: 1; 0 of 7 prompt tokens hit \(0.0%\); computed tokens: \d+; preemptions: 0",
        str(caller.scheduler.stats),
    )
    caller.check_empty()


def test_wrong_configurations_are_refused():
    for wrong in (
        {"max_num_seqs": 0},
        {"max_num_seqs": True},
        {"max_batched_tokens": 1.5},
        {"max_seq_len": 1},
        {"preemption": "drop"},
        {"order": "lifo"},
        {"watermark": 1.0},
        {"watermark": float("nan")},
        {"swap_cost": -1},
        {"max_overtakes": -1},
    ):
        with pytest.raises(InvalidRequestError, match=next(iter(wrong))):
            SchedulerConfig(**wrong)
    with pytest.raises(InvalidRequestError, match="host_pool"):
        Scheduler(RadixTree(BlockPool(4)), SchedulerConfig(preemption="swap"))


def test_wrong_requests_are_refused_and_change_nothing():
    caller = Caller(num_blocks=8, block_size=4, max_num_seqs=4, max_seq_len=24)
    caller.add([1, 2, 3], rid="here")
    for prompt, options, message in (
        ([], {}, "empty"),
        ([1.5], {}, "integers"),
        (["a"], {}, "integers"),
        (np.ones((1, 2), int), {}, "one-dimensional"),
        ([1, -2], {}, "negative"),
        ([1], {"new": 0}, "max_new_tokens"),
        ([1], {"new": 2.0}, "max_new_tokens"),
        ([1], {"n": 0}, "n must be"),
        ([1], {"n": 5}, "max_num_seqs is 4"),
        (range(24), {}, "max_seq_len is 24"),
        ([1], {"rid": "here"}, "already"),
        ([1], {"namespace": 7}, "namespace"),
    ):
        with pytest.raises(InvalidRequestError, match=message):
            caller.add(prompt, **options)
    with pytest.raises(InvalidRequestError, match="needs 9 blocks of 4, the pool has 8"):
        Caller(num_blocks=8, block_size=4).add(range(33))
    assert caller.scheduler.num_waiting == 1
    caller.run()
    caller.check_empty()


def test_the_callers_array_may_change_afterwards():
    caller = Caller()
    prompt = np.arange(5)
    request = caller.add(prompt)
    prompt[:] = 0
    assert request.tokens.tolist() == [0, 1, 2, 3, 4]


def test_calls_at_the_wrong_time_are_refused():
    caller = Caller(checks=False)
    scheduler = caller.scheduler
    request = caller.add([1, 2, 3], new=3)
    seq = request.sequences[0]
    step = scheduler.schedule()
    for call in (
        scheduler.schedule,
        scheduler.restart,
        lambda: scheduler.fork(seq),
        lambda: scheduler.finish(seq, "stop"),
    ):
        with pytest.raises(InvalidRequestError, match="complete or fail it first"):
            call()
    for tokens, reasons, message in (
        ([1, 2], None, "samples 1 tokens, got 2"),
        ([-1], None, "negative"),
        ([1.5], None, "integers"),
        ([1], {1: "stop"}, "finished names"),
    ):
        with pytest.raises(InvalidRequestError, match=message):
            scheduler.complete(step, tokens, reasons)
    scheduler.complete(step, [5])
    for call in (lambda: scheduler.complete(step, [5]), lambda: scheduler.fail(step)):
        with pytest.raises(InvalidRequestError, match="no step is out"):
            call()
    scheduler.finish(seq, "stop")
    with pytest.raises(InvalidRequestError, match="finished already"):
        scheduler.finish(seq, "stop")
    with pytest.raises(InvalidRequestError, match="cannot be forked"):
        seq.fork()
    with pytest.raises(InvalidRequestError, match="no sequence has row 0"):
        scheduler.sequence(0)
    assert scheduler.abort(request.rid) is False
    scheduler.check(exclusive=True)


def test_a_fork_needs_a_row():
    caller = Caller(max_num_seqs=2)
    request = caller.add([1, 2, 3], new=6)
    caller.step()
    request.sequences[0].fork()
    with pytest.raises(InvalidRequestError, match="no row is free"):
        request.sequences[0].fork()


def test_max_seq_len_ends_a_sequence():
    caller = Caller(num_blocks=16, block_size=4, max_seq_len=10)
    request = caller.add(range(6), new=100)
    caller.run()
    assert request.sequences[0].finish_reason == "length"
    assert request.sequences[0].num_tokens == 10
    assert request.sequences[0].output_tokens.tolist() == reference(range(6), 4)


def test_a_pool_that_is_filled_to_the_last_slot():
    caller = Caller(num_blocks=3, block_size=4)
    request = caller.add(range(12), new=1)
    caller.run()
    assert request.sequences[0].finish_reason == "length"
    # Its whole prompt is cached; there is no block for a copy of the last one, so that this one is computed.
    again = caller.add(range(12), new=1)
    caller.run()
    assert again.num_cached_tokens == 8
    caller.check_outputs([request, again])
    caller.check_empty()


def test_nothing_is_shared_or_kept_unless_wanted():
    for options, hits in (({"share_prefixes": False}, 0), ({"keep_cached": False}, 8)):
        caller = Caller(num_blocks=32, block_size=4, **options)
        one, two = caller.add(range(10), new=6), caller.add([*range(8), 50], new=6)
        caller.step()
        caller.step()
        assert two.num_cached_tokens == hits
        caller.run()
        caller.check_outputs([one, two])
        assert caller.tree.num_cached_blocks == 0
        assert caller.pool.num_free == 32


def test_the_checker_sees_damage():
    def damaged(damage):
        caller = Caller(num_blocks=32, block_size=4, checks=False)
        caller.add(range(10), new=6, n=2)
        caller.add(range(20, 25), new=6)
        caller.step()
        caller.step()
        caller.check()
        damage(caller, caller.scheduler._books, caller.scheduler._rows)
        with pytest.raises(CacheCorruptionError):
            caller.scheduler.check(exclusive=True)

    damaged(lambda caller, books, rows: caller.pool.retain(int(rows.tables[0, 0])))
    damaged(lambda caller, books, rows: rows.computed.__setitem__(0, 3))
    damaged(lambda caller, books, rows: rows.last.__setitem__(0, 99))
    damaged(lambda caller, books, rows: books.decoding.reverse())
    damaged(lambda caller, books, rows: books.decoding.pop())
    damaged(lambda caller, books, rows: books.num.__setitem__("waiting", 1))
    damaged(lambda caller, books, rows: rows._free.pop())
    damaged(lambda caller, books, rows: rows.shared.__setitem__(0, True))
    damaged(lambda caller, books, rows: rows.tables.__setitem__((0, 1), rows.tables[0, 0]))
    damaged(lambda caller, books, rows: setattr(books, "num_strict", 1))
