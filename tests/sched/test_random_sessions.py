"""Long random sessions: requests come and go, steps fail, the pool is far too small, and all comes out right."""

from __future__ import annotations

import random

import pytest

from tests.sched.sched_testkit import Caller


class Session:
    """What may happen to a scheduler, drawn from one seed."""

    def __init__(self, seed, **options):
        self.random = rng = random.Random(seed)
        host = rng.choice([0, 3, 40])
        self.vocab = rng.choice([2, 3, 97])
        config = {
            "preemption": rng.choice(["recompute", "auto", *["swap"] * 3 * (host > 0)]),
            "order": rng.choice(["fcfs", "prefix"]),
            "max_num_seqs": rng.choice([2, 4, 8, 8]),
            "max_batched_tokens": rng.choice([1, 3, 8, 16, 64]),
            "max_seq_len": rng.choice([None, None, 20]),
            "max_overtakes": rng.choice([0, 1, 5, 64]),
            "watermark": rng.choice([0.0, 0.01, 0.2]),
            "share_prefixes": rng.random() < 0.85,
            "keep_cached": rng.random() < 0.75,
            "swap_cost": rng.choice([0.1, 0.4, 2.0]),
        }
        shape = {
            "num_blocks": rng.randint(4, 28),
            "block_size": rng.choice([1, 2, 3, 4]),
            "host_blocks": host,
            "vocab": self.vocab,
            "stop": rng.choice([None, 1]),
        }
        self.caller = Caller(**{**shape, **config, **options})
        self.scheduler = self.caller.scheduler
        self.bases = [[rng.randrange(self.vocab) for _ in range(40)] for _ in range(3)]
        self.requests, self.judged = [], []
        self.calm = True

    def add(self):
        rng, caller, config = self.random, self.caller, self.scheduler.config
        shared = rng.choice(self.bases)[: rng.choice([0, 3, 8, 16])]
        prompt = shared + [rng.randrange(self.vocab) for _ in range(rng.randint(0, 6))] or [0]
        longest = min(caller.pool.num_blocks * caller.block_size, (config.max_seq_len or 99) - 1)
        n = min(rng.choice([1, 1, 1, 1, 2, 3]), config.max_num_seqs)
        request = caller.add(prompt[:longest], rng.randint(1, 16), n=n)
        self.requests.append(request)
        self.judged.append(request)

    def some(self):
        """A live sequence, or None."""
        live = [seq for request in self.requests for seq in request.sequences if seq.state != "finished"]
        self.requests = [request for request in self.requests if request.state != "finished"]
        return self.random.choice(live) if live else None

    def between_steps(self, chance):
        rng = self.random
        seq = self.some() if rng.random() < chance else None
        if seq is None:
            return
        what = rng.choice(["fork", "fork", "finish", "abort", "restart", "guest", "evict"])
        if what == "fork":
            if self.scheduler._rows.num_free and len(seq.request.sequences) < 5:
                self.caller.fork(seq)
                self.calm = False
        elif what == "finish":
            self.scheduler.finish(seq, "test")
        elif what == "abort":
            assert self.scheduler.abort(seq.request.rid)
        elif what == "restart" and rng.random() < 0.2:
            self.caller.change_weights()
            self.judged, self.calm = [], False
        elif what == "guest":
            if self.caller.guests:
                self.caller.guests.pop().release()
            else:
                self.caller.guests.append(self.caller.tree.match(self.bases[0][:12]))
                self.calm = False
        elif what == "evict":
            self.caller.tree.evict(rng.randint(0, 3))

    def step(self, trouble):
        """Schedule; then perhaps abort somebody or add one; then complete or fail."""
        rng, caller = self.random, self.caller
        step = caller.schedule()
        if step is None:
            assert not self.scheduler.has_unfinished
            return False
        if rng.random() < trouble:
            seq = self.some()
            if seq is not None:
                if rng.random() < 0.5:
                    self.scheduler.abort(seq.request.rid)
                else:
                    self.scheduler.drop(seq, "test")
                self.scheduler.check(exclusive=not caller.guests)
        if rng.random() < trouble:
            self.add()
        if rng.random() < trouble:
            caller.fail(step, rng.randint(0, 4))
        else:
            caller.move(step)
            caller.complete(step, *caller.sample(step, caller.forward(step)))
        if caller.checks:
            caller.check()
        if self.calm and caller.checks:
            assert all(s.num_preemptions <= 2 for request in self.requests for s in request.sequences)
        return True

    def run(self, num_requests, trouble):
        rng, left = self.random, num_requests
        while left or self.scheduler.has_unfinished:
            if left and len(self.scheduler._requests) < 60 and rng.random() < 0.4:
                for _ in range(min(left, rng.choice([1, 1, 2, 6]))):
                    self.add()
                    left -= 1
            self.between_steps(trouble)
            self.step(trouble)
        while self.caller.guests:
            self.caller.guests.pop().release()
        if self.calm:
            assert all(seq.num_preemptions <= 2 for r in self.judged for seq in r.sequences)
        self.caller.check_outputs(self.judged)
        self.caller.check_empty()


@pytest.mark.parametrize("seed", range(60))
def test_a_session_with_trouble(seed):
    Session(seed).run(num_requests=12, trouble=0.15)


@pytest.mark.parametrize("seed", range(20))
def test_a_session_without_trouble(seed):
    session = Session(1000 + seed)
    session.run(num_requests=20, trouble=0)
    assert {s.finish_reason for r in session.judged for s in r.sequences} <= {"length", "stop", "capacity"}


@pytest.mark.parametrize(
    ("preemption", "order"),
    [
        ("swap", "fcfs"),
        ("recompute", "prefix"),
        pytest.param("swap", "prefix", marks=pytest.mark.slow),
        pytest.param("recompute", "fcfs", marks=pytest.mark.slow),
    ],
)
def test_soak(preemption, order):
    """2,000 requests through a pool that preempts all the time."""
    session = Session(
        7,
        num_blocks=24,
        block_size=4,
        host_blocks=30,
        preemption=preemption,
        order=order,
        max_num_seqs=8,
        max_batched_tokens=16,
        max_seq_len=None,
        watermark=0.0,
        share_prefixes=True,
        keep_cached=True,
        stop=None,
        vocab=97,
        checks=False,
    )
    session.run(num_requests=2000, trouble=0.02)
    stats = session.scheduler.stats
    assert stats.preemptions > 250
    assert stats.hit_tokens > 2000
    assert (stats.preemptions_swap > 250) == (preemption == "swap")
