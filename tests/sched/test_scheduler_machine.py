"""Random calls in any order, with everything checked after each."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.sched.sched_testkit import Caller

BASE = [0, 1, 2, 0, 0, 1, 1, 2, 2, 1, 0, 2]

# Prompts that begin alike, and go on differently.
prompts = st.builds(
    lambda shared, own: BASE[:shared] + own, st.integers(0, 9), st.lists(st.integers(0, 2), max_size=4)
).filter(len)

# What would end most that could happen, if it happened often.
seldom = st.sampled_from([False] * 3 + [True])

idle = precondition(lambda self: self.out is None)
busy = precondition(lambda self: self.out is not None)


class SchedulerMachine(RuleBasedStateMachine):
    """Whatever is called when: memory, books and outputs are right, and nobody waits for ever.

    The alphabet is small, so that prompts and outputs share prefixes and compute the same blocks twice.
    """

    @initialize(
        data=st.data(),
        block_size=st.integers(1, 4),
        num_blocks=st.integers(4, 20),
        host_blocks=st.sampled_from([0, 3, 30, 30]),
    )
    def start(self, data, block_size, num_blocks, host_blocks):
        modes = ["recompute", "auto"] + ["swap"] * 2 * (host_blocks > 0)
        self.caller = Caller(
            num_blocks,
            block_size,
            host_blocks,
            vocab=3,
            stop=data.draw(st.sampled_from([None, 1])),
            preemption=data.draw(st.sampled_from(modes)),
            order=data.draw(st.sampled_from(["fcfs", "prefix"])),
            max_num_seqs=data.draw(st.sampled_from([6, 4, 3, 2, 1])),
            max_batched_tokens=data.draw(st.sampled_from([64, 16, 5, 2, 1])),
            max_seq_len=data.draw(st.sampled_from([None, None, 12])),
            max_overtakes=data.draw(st.sampled_from([0, 2, 64])),
            watermark=data.draw(st.sampled_from([0.0, 0.2])),
            share_prefixes=data.draw(st.sampled_from([True, True, True, False])),
            keep_cached=data.draw(st.sampled_from([True, True, False])),
            swap_cost=data.draw(st.sampled_from([0.1, 0.4, 2.0])),
        )
        self.scheduler = self.caller.scheduler
        self.requests, self.judged = [], []
        self.out = None
        self.calm = True  # nothing happened that may cost somebody more pauses
        self.pins, self.guests = [], []

    def live(self, *states):
        states = states or ("waiting", "running", "swapped")
        return [seq for request in self.requests for seq in request.sequences if seq.state in states]

    # -- requests --------------------------------------------------------------------------------------------

    @rule(
        prompt=st.lists(st.integers(0, 2), min_size=1, max_size=10),
        new=st.integers(1, 10),
        n=st.integers(1, 3),
    )
    def add(self, prompt, new, n):
        size, config = self.caller.block_size, self.scheduler.config
        longest = min(self.caller.pool.num_blocks * size, (config.max_seq_len or 99) - 1)
        request = self.caller.add(prompt[:longest], new, n=min(n, config.max_num_seqs))
        self.requests.append(request)
        self.judged.append(request)

    @rule(some=st.lists(st.tuples(prompts, st.integers(4, 12)), min_size=2, max_size=6))
    def add_many(self, some):
        for prompt, new in some:
            self.add(prompt, new, 1)

    @precondition(lambda self: self.live())
    @rule(data=st.data(), do=seldom)
    def abort(self, data, do):
        if not do:
            return
        request = data.draw(st.sampled_from(self.live())).request
        assert self.scheduler.abort(request.rid)
        assert not self.scheduler.abort(request.rid)
        assert request.state == "finished"

    @precondition(lambda self: self.live())
    @rule(data=st.data(), do=seldom)
    def drop(self, data, do):
        if do:
            self.scheduler.drop(data.draw(st.sampled_from(self.live())), "test")

    @idle
    @precondition(lambda self: self.live())
    @rule(data=st.data(), do=seldom)
    def finish(self, data, do):
        if do:
            self.scheduler.finish(data.draw(st.sampled_from(self.live())), "test")

    @idle
    @precondition(lambda self: self.live() and self.scheduler._rows.num_free and len(self.live()) < 12)
    @rule(data=st.data())
    def fork(self, data):
        self.caller.fork(data.draw(st.sampled_from(self.live())))
        self.calm = False

    @idle
    @rule(do=seldom)
    def restart(self, do):
        if not do:
            return
        self.caller.change_weights()
        self.judged = []  # what comes now, the reference does not know
        self.calm = False

    # -- others who use the same pool ------------------------------------------------------------------------

    @rule(prompt=prompts, do=seldom)
    def pin(self, prompt, do):
        if do and len(self.caller.guests) < 2:
            name = b"w%d" % self.caller.weights if self.caller.weights else b""
            self.caller.guests.append(self.caller.tree.match(prompt, name))
            self.calm = False

    @precondition(lambda self: self.caller.guests)
    @rule()
    def unpin(self):
        self.caller.guests.pop().release()

    @rule(num=st.integers(0, 3))
    def evict(self, num):
        self.caller.tree.evict(num)

    # -- steps -----------------------------------------------------------------------------------------------

    @idle
    @rule()
    def schedule(self):
        self.out = self.caller.schedule()
        if self.out is None:
            assert not self.scheduler.has_unfinished

    @busy
    @rule()
    def complete(self):
        step, self.out = self.out, None
        self.caller.move(step)
        tokens, reasons = self.caller.sample(step, self.caller.forward(step))
        self.caller.complete(step, tokens, reasons)

    @busy
    @rule(progress=st.integers(0, 4))
    def fail(self, progress):
        step, self.out = self.out, None
        self.caller.fail(step, progress)

    @idle
    @rule(num=st.integers(1, 8))
    def some_steps(self, num):
        for _ in range(num):
            self.caller.step()

    # -- checks ----------------------------------------------------------------------------------------------

    @invariant()
    def all_is_well(self):
        if not hasattr(self, "caller"):
            return
        if self.out is None:
            self.caller.check()
        else:
            self.scheduler.check(exclusive=not self.caller.guests)
            self.caller.tree.check()
        live = self.live()
        assert self.scheduler.num_running == sum(seq.state == "running" for seq in live)
        assert self.scheduler.num_waiting == sum(seq.state == "waiting" for seq in live)
        assert self.scheduler.num_swapped == sum(seq.state == "swapped" for seq in live)
        assert self.scheduler.has_unfinished == bool(live)
        stats = self.scheduler.stats
        assert 0 <= stats.hit_tokens <= stats.prompt_tokens
        assert (
            0
            <= stats.filled_slots
            <= stats.held_slots
            <= self.caller.pool.num_blocks * self.caller.block_size
        )
        if self.calm:
            assert all(seq.num_preemptions <= 2 for r in self.requests for seq in r.sequences)

    def teardown(self):
        if not hasattr(self, "caller"):
            return
        if self.out is not None:
            self.complete()
        while self.caller.guests:
            self.caller.guests.pop().release()
        self.caller.run(most=3000)
        self.caller.check_outputs(self.judged)
        self.all_is_well()
        self.caller.check_empty()


TestSchedulerMachine = SchedulerMachine.TestCase
