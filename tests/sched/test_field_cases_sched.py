"""The field cases on scheduling, preemption, chunked prefill, admission, swap and aborts.

Each test is named for its case.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from radixkv.core import InvalidRequestError
from tests.sched.sched_testkit import JUNK, Caller, reference


def step_until(caller, done, most=500):
    for _ in range(most):
        if done():
            return
        assert caller.step()
    raise AssertionError("it never came")


def cached(caller, prompt, new=1):
    """Let a request with this prompt run to its end."""
    request = caller.add(prompt, new)
    caller.run()
    return request


def computed_by(caller, seq):
    return [(start, end) for who, start, end in caller.computed if who is seq]


def test_fc06_two_copies_of_one_prefix_made_in_the_same_step():
    # The second waits rather than making its own copy; with sharing off there are two copies, none cached.
    caller = Caller(num_blocks=16, block_size=4)
    a, b = caller.add([*range(8), 20], 8), caller.add([*range(8), 30], 3)
    step = caller.scheduler.schedule()
    assert step.admitted == a.sequences
    caller.complete(step, *caller.sample(step, caller.forward(step)))
    caller.step()
    assert b.num_cached_tokens == 8
    caller.scheduler.finish(a.sequences[0], "test")
    c = caller.add([*range(8), 40], 3)
    caller.step()
    assert c.num_cached_tokens == 8
    caller.run()
    caller.check_outputs([a, b, c])
    caller.check_empty()


def test_fc06_a_copy_made_by_somebody_else_meanwhile_is_dropped_for_theirs():
    caller = Caller(num_blocks=16, block_size=4)
    request = caller.add([*range(8), 20], 4)
    step = caller.scheduler.schedule()
    caller.move(step)
    tokens, reasons = caller.sample(step, caller.forward(step))
    theirs = caller.pool.allocate(2)  # a session in another thread computes and publishes the same
    caller.memory[theirs] = caller.memory[caller.scheduler._rows.table(0)[:2]]
    caller.tree.insert(np.arange(8), theirs)
    caller.complete(step, tokens, reasons)
    assert caller.scheduler._rows.table(0)[:2].tolist() == theirs.tolist()
    caller.pool.release(theirs)
    caller.run()
    caller.check_outputs([request])
    caller.check_empty()


@pytest.mark.parametrize(("more", "fits"), [(4, False), (3, True)])
def test_fc08_unlocked_hits_are_not_spare_room(more, fits):
    # Six blocks, and one that somebody holds who runs, so that the request may wait.
    caller = Caller(num_blocks=7, block_size=4, watermark=0.0)
    cached(caller, range(12))
    runner = caller.add([90, 91], 2)
    caller.step()
    assert (caller.pool.num_free, caller.tree.num_evictable_blocks) == (3, 3)
    request = caller.add([*range(12), *range(50, 50 + 4 * more)], 1)
    content = caller.memory.copy()
    step = caller.scheduler.schedule()
    assert (request.state == "running") is fits
    if fits:
        table = caller.scheduler._rows.table(request.sequences[0].row)
        assert request.num_cached_tokens == 12
        assert not set(step.slot_mapping // 4) & set(table[:3].tolist())
    else:
        assert step.admitted == []
        assert caller.tree.num_evictable_blocks == 3
    caller.move(step)
    caller.complete(step, *caller.sample(step, caller.forward(step)))
    match = caller.tree.match(range(12))
    assert match.num_tokens == 12
    assert (caller.memory[match.blocks] == content[match.blocks]).all()
    match.release()
    caller.run()
    caller.check_outputs([runner, request])
    caller.check_empty()


def test_fc13_the_whole_prompt_is_in_the_cache():
    caller = Caller(num_blocks=16, block_size=4)
    cached(caller, range(12))
    for length, hit in ((12, 11), (13, 12)):
        caller.computed.clear()
        request = caller.add(range(length), 3)
        caller.run()
        assert request.num_cached_tokens == hit
        assert computed_by(caller, request.sequences[0])[0] == (hit, length)
        caller.check_outputs([request])


@pytest.mark.parametrize("block_size", [1, 16])
def test_fc14_how_much_of_a_finished_answer_can_be_reused(block_size):
    caller = Caller(num_blocks=200 // block_size, block_size=block_size)
    first = cached(caller, range(60), 25)
    again = caller.add([*first.sequences[0].all_tokens().tolist(), *range(60, 90)], 2)
    caller.run()
    # 84 with whole blocks of 1, 80 with 16; by the row it is 84 either way. The last token was never computed.
    assert again.num_cached_tokens == 84
    caller.check_outputs([first, again])


@pytest.mark.parametrize("variant", ["aborted", "failed", "same step"])
def test_fc18_not_visible_until_written(variant):
    caller = Caller(num_blocks=16, block_size=4)
    first = caller.add(range(13), 3)
    step = caller.scheduler.schedule()
    assert step.admitted == first.sequences
    second = caller.add(range(13), 3)
    assert caller.tree.num_cached_blocks == 0
    if variant == "aborted":
        caller.scheduler.abort(first.rid)
        caller.memory[:] = JUNK
        caller.complete(step, np.array([5]))
    elif variant == "failed":
        caller.fail(step, 0)
        caller.scheduler.abort(first.rid)
    if variant != "same step":
        assert caller.tree.match_length(range(13)) == 0
        step = caller.scheduler.schedule()
        assert step.admitted == second.sequences
        assert second.num_cached_tokens == 0
    caller.move(step)
    caller.complete(step, *caller.sample(step, caller.forward(step)))
    caller.run()
    assert second.num_cached_tokens == (12 if variant == "same step" else 0)
    caller.check_outputs([second])
    caller.check_empty()


@pytest.mark.parametrize("hit", [0, 16, 48, 96])
def test_fc19_a_hit_that_ends_inside_a_chunk(hit):
    caller = Caller(num_blocks=20, block_size=16, max_batched_tokens=24)
    if hit:
        cached(caller, range(hit))
    caller.computed.clear()
    request = caller.add(range(100), 2)
    caller.run()
    spans = computed_by(caller, request.sequences[0])
    positions = [i for start, end in spans for i in range(start, end)]
    assert positions == list(range(hit, 101))
    assert all(end - start <= 24 for start, end in spans)
    caller.check_outputs([request])


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_fc20_resume_after_a_pause(preemption):
    caller = Caller(num_blocks=8, block_size=16, host_blocks=8, preemption=preemption, watermark=0.0)
    older = caller.add(range(100, 162), 40)  # 4 blocks, and 3 more in time
    seq = caller.add(range(40), 60).sequences[0]  # 3 blocks, and 4 more in time
    step_until(caller, lambda: seq.num_preemptions)
    paused_at = seq.num_tokens
    assert older.state == "running"
    assert seq.state == ("waiting" if preemption == "recompute" else "swapped")
    caller.computed.clear()
    step_until(caller, lambda: seq.state == "running" and seq.num_tokens > paused_at)
    (start, end), *_ = computed_by(caller, seq)
    assert end == paused_at
    assert 0 <= start <= paused_at - 1
    if preemption == "swap":
        assert start == paused_at - 1
        # What is still cached need not be copied back.
        assert 0 < caller.scheduler.stats.swapped_in_blocks <= caller.scheduler.stats.swapped_out_blocks
    else:
        assert caller.scheduler.stats.recomputed_tokens == paused_at - 1 - start
    caller.run()
    assert seq.finish_reason == "length"
    caller.check_outputs([older, seq.request])
    assert seq.request.num_cached_tokens == 0  # what it computed itself is no hit
    assert caller.scheduler.stats.hit_tokens == 0
    caller.check_empty()


def test_fc20_what_is_still_cached_at_the_resume_is_used_with_generated_tokens():
    caller = Caller(num_blocks=32, block_size=16)
    request = caller.add(range(40), 30)
    seq = request.sequences[0]
    step_until(caller, lambda: seq.num_tokens == 50)
    # Pause it by hand, as if for lack of room.
    plan = caller.scheduler.schedule()
    caller.fail(plan, 0)
    from radixkv.sched.plan import Plan

    caller.scheduler._growth._preempt(seq, Plan())
    caller.check()
    caller.computed.clear()
    caller.step()
    assert computed_by(caller, seq) == [(49, 50)]  # 48 with whole blocks; the tail is reused by the row
    caller.run()
    caller.check_outputs([request])


def test_fc21_can_never_fit():
    caller = Caller(num_blocks=8, block_size=16, max_seq_len=4096)
    with pytest.raises(InvalidRequestError, match="200 tokens needs 13 blocks of 16, the pool has 8"):
        caller.add(range(200), 10)
    short = [caller.add(range(i, i + 10), 10) for i in range(3)]
    caller.run()
    caller.check_outputs(short)
    caller.check_empty()


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("num", [2, 3, 6])
def test_fc22_no_ping_pong(preemption, num):
    """The pool holds one request at its full length; several arrive together."""
    caller = Caller(10, 4, 40, preemption=preemption, watermark=0.0)
    requests = [caller.add([i, i, i, i], 36) for i in range(num)]
    seqs = [request.sequences[0] for request in requests]
    at_pause = {}
    while caller.scheduler.has_unfinished:
        before = {seq: seq.num_preemptions for seq in seqs}
        assert caller.step()
        for seq in seqs:
            if seq.num_preemptions > before[seq]:
                assert seq.num_tokens > at_pause.get(seq, 0)
                at_pause[seq] = seq.num_tokens
    assert max(seq.num_preemptions for seq in seqs) <= 2
    assert caller.scheduler.stats.preemptions > 0
    assert {seq.finish_reason for seq in seqs} == {"length"}
    caller.check_outputs(requests)
    caller.check_empty()


def test_fc23_nobody_left_to_pause():
    caller = Caller(num_blocks=4, block_size=4, max_num_seqs=1)
    big, waits = caller.add(range(6), 100), caller.add(range(50, 56), 4)
    caller.run()
    (seq,) = big.sequences
    assert seq.finish_reason == "capacity"
    assert seq.output_tokens.tolist() == reference(range(6), 11)  # 16 slots, and one token that needs none
    assert waits.sequences[0].finish_reason == "length"
    caller.check_outputs([waits])
    caller.check_empty()


def test_fc23_others_outside_hold_the_blocks():
    caller = Caller(num_blocks=4, block_size=4)
    caller.guests.append(None)
    lease = caller.pool.allocate(3)
    request = caller.add(range(6), 2, n=2)
    small = caller.add(range(3), 1)
    step = caller.scheduler.schedule()
    assert step.finished == request.sequences
    assert {seq.finish_reason for seq in request.sequences} == {"capacity"}
    caller.complete(step, *caller.sample(step, caller.forward(step)))
    caller.run()
    assert small.sequences[0].finish_reason == "length"
    caller.pool.release(lease)
    caller.guests.clear()
    caller.check_empty()


@pytest.mark.parametrize("ending", ["complete", "fail"])
def test_fc30_blocks_are_not_handed_out_while_they_are_copied_out(ending):
    caller = Caller(num_blocks=8, block_size=4, host_blocks=8, preemption="swap", watermark=0.0)
    older, younger = caller.add(range(12), 12), caller.add(range(50, 62), 12)
    step = None
    while True:
        step = caller.scheduler.schedule()
        if step.swap_out.num_blocks:
            break
        caller.move(step)
        caller.complete(step, *caller.sample(step, caller.forward(step)))
    (victim,) = younger.sequences
    assert step.preempted == [victim]
    assert victim.state == "swapped"
    sources = set(step.swap_out.src.tolist())
    assert all(caller.pool.refcount(block) for block in sources)
    assert not sources & set(step.slot_mapping // 4)
    with pytest.raises(Exception, match="need 1 blocks, have 0 free and 0 evictable"):
        caller.tree.allocate(1)
    if ending == "fail":
        # The copy is called off: nothing in the host tier is believed, and the victim runs on where it was.
        held = victim.block_table.tolist()
        caller.host_memory[:] = JUNK
        caller.scheduler.fail(step)
        caller.check()
        assert victim.state == "running"
        assert victim.num_preemptions == 0
        assert victim.block_table.tolist() == held
        assert caller.host.num_free == 8
        assert caller.scheduler.stats.preemptions == 0
    else:
        caller.move(step)
        original = caller.memory[sorted(sources)].copy()
        caller.complete(step, *caller.sample(step, caller.forward(step)))
        assert all(caller.pool.refcount(block) <= 1 for block in sources)
        assert sorted(caller.host_memory[victim.host_blocks[victim.host_blocks >= 0]].tolist()) == sorted(
            original.tolist()
        )
    caller.run()
    caller.check_outputs([older, younger])
    caller.check_empty()


def test_fc30_only_what_nobody_else_holds_is_copied_out():
    caller = Caller(num_blocks=11, block_size=4, host_blocks=11, preemption="swap", watermark=0.0)
    request = caller.add(range(18), 16, n=2)  # four whole blocks are shared, and none of them may go
    step_until(caller, lambda: request.sequences[1].state == "swapped")
    stats = caller.scheduler.stats
    host_blocks = request.sequences[1].host_blocks
    assert stats.swapped_out_blocks == (host_blocks >= 0).sum() <= 4
    assert (host_blocks[:4] == -1).all()
    caller.run()
    caller.check_outputs([request])
    caller.check_empty()


def test_fc31_books_per_tier():
    """Per tier: free is a recount and within bounds, after every step of random traffic over two tiny tiers."""
    rng = np.random.default_rng(3)
    caller = Caller(num_blocks=4, block_size=2, host_blocks=4, vocab=5, preemption="swap", max_num_seqs=3)
    for _ in range(300):
        if rng.random() < 0.5:
            caller.add(rng.integers(0, 5, rng.integers(1, 5)), int(rng.integers(1, 6)))
        step = caller.scheduler.schedule()
        for pool in (caller.pool, caller.host):
            assert 0 <= pool.num_free <= pool.num_blocks == 4
            assert pool.num_free == int((pool.refcounts == 0).sum())
            pool.check()
        caller.scheduler.check(exclusive=True)
        if step is not None:
            caller.move(step)
            caller.complete(step, *caller.sample(step, caller.forward(step)))
    stats = caller.scheduler.stats
    assert stats.swapped_out_blocks > 20
    assert stats.swapped_in_blocks > 20
    caller.run()
    caller.check_empty()


def test_fc34_count_once():
    caller = Caller(num_blocks=10, block_size=16, watermark=0.0)
    cached(caller, range(32))
    runner = caller.add([99], 40)
    caller.step()
    lease = caller.pool.allocate(7)  # somebody else has the rest for five steps
    caller.guests.append(None)
    request = caller.add(range(64), 2)
    before = caller.scheduler.stats
    for _ in range(5):
        caller.step()
        assert request.state == "waiting"
    assert caller.scheduler.stats.prompt_tokens == before.prompt_tokens
    caller.pool.release(lease)
    caller.guests.clear()
    caller.step()
    assert request.state == "running"
    after = caller.scheduler.stats
    assert after.prompt_tokens - before.prompt_tokens == 64
    assert after.hit_tokens - before.hit_tokens == 32
    assert after.admissions - before.admissions == 1
    caller.run()
    caller.check_outputs([runner, request])
    assert caller.scheduler.stats.prompt_tokens == after.prompt_tokens


def test_fc34_a_failed_admission_is_not_counted():
    caller = Caller(num_blocks=16, block_size=4)
    cached(caller, range(8))
    before = caller.scheduler.stats
    request = caller.add(range(12), 2)
    for _ in range(3):
        step = caller.scheduler.schedule()
        assert request.num_cached_tokens == 8
        caller.fail(step, 1)
        assert request.num_cached_tokens == 0
    assert caller.scheduler.stats == before
    caller.run()
    after = caller.scheduler.stats
    assert after.prompt_tokens - before.prompt_tokens == 12
    assert after.hit_tokens - before.hit_tokens == request.num_cached_tokens == 8
    assert after.steps - before.steps == 2


def test_fc35_bounded_and_true_totals():
    """Prompts served by the cache, by the host tier, by both and by neither: each token is counted once."""
    caller = Caller(14, 4, 6, preemption="swap", max_num_seqs=6, watermark=0.0)
    rng = np.random.default_rng(5)
    base = rng.integers(0, 97, 12)
    requests = []
    for i in range(40):
        own = rng.integers(0, 97, rng.integers(1, 8))
        requests.append(
            caller.add(own if i % 3 == 0 else np.concatenate((base[: rng.integers(1, 13)], own)), 9)
        )
        caller.step()
    caller.run()
    stats = caller.scheduler.stats
    assert stats.swapped_in_blocks > 0
    assert stats.recomputed_tokens > 0
    first_time = stats.computed_tokens - stats.recomputed_tokens
    assert first_time == sum(len(r.tokens) - r.num_cached_tokens + 8 for r in requests)
    assert stats.hit_tokens == sum(r.num_cached_tokens for r in requests)
    assert stats.prompt_tokens == sum(len(r.tokens) for r in requests)
    assert all(0 <= r.num_cached_tokens < len(r.tokens) for r in requests)
    assert 0 < stats.hit_rate < 1
    assert stats.computed_tokens == sum(end - start for _, start, end in caller.computed)


def test_fc36_a_reused_block_forgets_its_past():
    caller = Caller(num_blocks=2, block_size=4)
    cached(caller, range(8))
    cached(caller, range(50, 58))
    assert caller.tree.match_length(range(8)) == 0
    assert caller.tree.match_length(range(50, 58)) == 8
    assert caller.tree.num_cached_blocks == 2


def test_fc40_reset_tells_the_truth():
    caller = Caller(num_blocks=16, block_size=4)
    request = caller.add(range(10), 8)
    caller.step()
    caller.step()
    with pytest.raises(InvalidRequestError, match="in use"):
        caller.tree.clear()
    assert request.state == "running"
    caller.check()
    caller.scheduler.restart()  # or: re-queue what runs first
    assert request.state == "waiting"
    caller.tree.clear()
    assert caller.pool.num_free == 16
    caller.run()
    caller.check_outputs([request])
    caller.tree.clear()
    assert (caller.tree.num_cached_blocks, caller.pool.num_free) == (0, 16)


@pytest.mark.parametrize("n", [1, 3])
def test_fc40_new_weights_and_old_kv_are_never_mixed(n):
    caller = Caller(14, 4, 8, preemption="swap", max_batched_tokens=8, watermark=0.0)
    requests = [caller.add(range(i, i + 9), 14, n=n) for i in range(4)]
    step_until(caller, lambda: caller.scheduler.num_swapped)
    for _ in range(2):
        caller.change_weights()
        caller.check()
        assert (caller.scheduler.num_running, caller.scheduler.num_swapped) == (0, 0)
        assert caller.host.num_free == 8
        for _ in range(4):
            caller.step()
    caller.run()  # the caller would see old KV at the first read
    assert all(seq.num_output_tokens == 14 for request in requests for seq in request.sequences)
    caller.check_empty()


def between_chunks(seq, step):
    return step is None and 0 < seq.num_computed <= 16


MOMENTS = {
    # While no step is out.
    "waiting": lambda seq, step: step is None,
    "between two chunks": between_chunks,
    "before the last chunk": lambda seq, step: step is None and 16 < seq.num_computed < 24,
    "decoding": lambda seq, step: step is None and seq.state == "running" and seq.num_output_tokens > 1,
    "swapped": lambda seq, step: step is None and seq.state == "swapped",
    # While a step is out.
    "waiting beside a step": lambda seq, step: step is not None,
    "parked": lambda seq, step: seq._blocker is not None,
    "matched and scheduled": lambda seq, step: step is not None and seq in step.admitted,
    "in the middle of a prefill": lambda seq, step: step is not None and 0 < seq.num_computed <= 16,
    "in the step that gives the first token": lambda seq, step: (
        step is not None and seq in step.sampling_seqs
    ),
    "in a decode": lambda seq, step: step is not None and seq.num_output_tokens > 2,
    "while it is copied out": lambda seq, step: step is not None and step.swap_out.num_blocks > 0,
    "while it is copied in": lambda seq, step: step is not None and step.swap_in.num_blocks > 0,
}


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("ending", ["complete", "fail"])
def test_fc41_cancel_at_any_moment(moment, n, ending):
    caller = Caller(16, 4, 40, preemption="swap", max_batched_tokens=8, watermark=0.0, max_num_seqs=6)
    scheduler, reached = caller.scheduler, MOMENTS[moment]
    if moment == "parked":
        older = caller.add(range(30, 37), 40)
        victim = caller.add([*range(30, 37), 80, 81], 20, n=n)
    else:
        older = caller.add(range(60, 70), 40)
        for _ in range(2):
            caller.step()
        victim = caller.add(range(30, 54), 20, n=n)
    step = None
    while not any(reached(seq, step) for seq in victim.sequences):
        if step is None:
            step = caller.schedule()
            assert victim.state != "finished"
        else:
            caller.move(step)
            caller.complete(step, *caller.sample(step, caller.forward(step)))
            step = None
    assert scheduler.abort(victim.rid) is True
    assert scheduler.abort(victim.rid) is False  # twice in a row
    assert {seq.state for seq in victim.sequences} == {"finished"}
    scheduler.check(exclusive=True)
    if step is not None and ending == "complete":
        caller.move(step)
        caller.complete(step, *caller.sample(step, caller.forward(step)))
    elif step is not None:
        caller.fail(step, 3)
    caller.check()
    # Nothing is held but by the one that runs on.
    assert all(seq.row == -1 and seq._host is None for seq in victim.sequences)
    assert caller.host.num_free == 40
    held = len(scheduler._rows.table(0)) if older.state == "running" else 0
    assert caller.pool.num_held - caller.tree.num_evictable_blocks == held
    # Somebody else is paused after that, and comes out right.
    late = caller.add(range(4), 50)
    caller.run()
    assert scheduler.stats.preemptions > 0
    caller.check_outputs([older, victim, late])
    caller.check_empty()


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_fc42_fork_inside_a_block(order):
    caller = Caller(num_blocks=24, block_size=4)
    request = caller.add(range(6), 30, n=3)
    caller.step()
    assert caller.pool.num_held == 2
    step = caller.scheduler.schedule()
    assert step.copies.num_blocks == 2  # the half-filled block, and not the full one
    caller.move(step)
    caller.complete(step, *caller.sample(step, caller.forward(step)))
    assert caller.pool.num_held == 4
    for i in order:
        for _ in range(3):
            caller.step()
        caller.scheduler.finish(request.sequences[i], "test")
        caller.check()
    caller.check_outputs([request])
    caller.check_empty()


def test_fc48_junk_after_the_end():
    caller = Caller(num_blocks=64, block_size=4)
    caller.scheduler._rows.tables[:] = 2**31 - 1  # out of range, wherever nothing has been written
    caller.memory[:] = JUNK
    requests = [caller.add(range(i, i + 5 + i), 9 + i) for i in range(5)]
    for _ in range(40):
        step = caller.scheduler.schedule()
        if step is None:
            break
        for i, context in enumerate(step.context_lens.tolist()):
            step.block_tables[i, -(-context // 4) :] = -7
        assert (step.slot_mapping < 64 * 4).all()
        caller.move(step)
        caller.complete(step, *caller.sample(step, caller.forward(step)))
    assert not caller.scheduler.has_unfinished
    caller.check_outputs(requests)
