"""Leases that end by themselves, and requests that say how long to keep their blocks."""

from __future__ import annotations

import gc
import math
import os
import subprocess
import sys
import threading
import time
import weakref
from fractions import Fraction

import numpy as np
import pytest
import torch
from hf_testkit import greedy, prompt, tiny, twin

from radixkv import PrefixCache, Retention
from radixkv.cache.alarms import Alarms, alarms
from radixkv.errors import InvalidRequestError


def wait_until(condition, seconds=10.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.005)


def filled(**options):
    model = tiny("llama_gqa")
    cache = PrefixCache.for_model(model, block_size=4, num_blocks=24, **options)
    with cache.attached(model):
        greedy(model, prompt(16), 1)
    return model, cache


def test_a_lease_ends_when_its_time_is_over():
    _, cache = filled()
    cached = cache.num_cached_blocks
    lease = cache.pin(prompt(16)[0], ttl=0.05)
    assert lease.num_tokens == 16
    assert not lease.expired
    assert cache.num_evictable_blocks < cached
    wait_until(lambda: lease.expired)
    assert cache.num_evictable_blocks == cached
    lease.release()  # no error: nobody can know when it ends
    with pytest.raises(InvalidRequestError):
        cache.pin(prompt(16)[0], ttl=0)
    assert not cache.timed_leases
    cache.check()


def test_a_lease_that_nobody_keeps_lasts_as_long_as_it_should(monkeypatch):
    class Held(Alarms):  # collecting garbage may take longer than any time to live that a test can wait for
        def after(self, seconds, callback):
            rings.append(callback)
            return super().after(seconds, callback)

    rings = []
    monkeypatch.setattr("radixkv.cache.leases.alarms", Held())
    _, cache = filled()
    cached = cache.num_cached_blocks
    cache.pin(prompt(16)[0], ttl=3600)
    gc.collect()
    assert cache.num_evictable_blocks < cached
    rings[0]()
    assert cache.num_evictable_blocks == cached


def test_a_lease_released_in_time_is_released_once():
    _, cache = filled()
    with cache.pin(prompt(16)[0], ttl=1.0) as lease:
        pass
    with pytest.raises(InvalidRequestError):
        lease.release()
    time.sleep(1.1)
    assert not lease.expired
    assert not cache.timed_leases
    assert cache.num_evictable_blocks == cache.num_cached_blocks


def test_a_timed_lease_does_not_keep_its_cache_alive():
    model, cache = filled()
    cache.pin(prompt(16)[0], ttl=3600)
    gone = weakref.ref(cache)
    del cache, model
    gc.collect()
    assert gone() is None


def test_alarms_ring_in_order_and_their_thread_ends():
    alarms, rung, before = Alarms(), [], threading.active_count()
    for delay in (0.06, 0.02, 0.04, 0.02):
        alarms.after(delay, lambda delay=delay: rung.append(delay))
    wait_until(lambda: len(rung) == 4)
    assert rung == [0.02, 0.02, 0.04, 0.06]
    wait_until(lambda: threading.active_count() == before)
    alarms.after(0.0, lambda: rung.append(0))
    wait_until(lambda: len(rung) == 5)


def test_alarms_that_are_cancelled_do_not_ring_and_are_let_go():
    alarms, rung, before = Alarms(), [], threading.active_count()

    class Large:
        pass

    large = [Large() for _ in range(1000)]
    gone = [weakref.ref(each) for each in large]
    far = [alarms.after(3600, lambda each=each: rung.append(each)) for each in large]
    near = [alarms.after(0.05 + i / 1000, lambda i=i: rung.append(i)) for i in range(20)]
    del large
    for alarm in [*far[:999], *near[1::2]]:
        alarm.cancel()
        alarm.cancel()  # no harm
    gc.collect()
    assert sum(ref() is not None for ref in gone) == 1
    assert len(alarms._waiting) < 30
    wait_until(lambda: len(rung) == 10)
    assert rung == list(range(0, 20, 2))
    near[0].cancel()  # it rang
    far[999].cancel()
    wait_until(lambda: threading.active_count() == before)
    alarms.after(0.0, lambda: rung.append("last"))
    wait_until(lambda: rung[-1] == "last")


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt, SystemExit])
def test_alarms_go_on_after_one_that_fails(error, caplog):
    alarms, rung = Alarms(), []

    def fail():
        raise error

    alarms.after(0.0, fail)
    alarms.after(0.05, lambda: rung.append(1))
    wait_until(lambda: rung == [1])
    assert "an alarm failed" in caplog.text
    assert error.__name__ in caplog.text


def test_alarms_go_on_after_a_thread_that_could_not_be_started(monkeypatch):
    alarms, rung = Alarms(), []
    with monkeypatch.context() as patch:
        patch.setattr(
            threading.Thread, "start", lambda self: (_ for _ in ()).throw(RuntimeError("no more threads"))
        )
        with pytest.raises(RuntimeError, match="no more threads"):
            alarms.after(0.0, lambda: rung.append("never set"))
    assert not alarms._waiting
    alarms.after(0.0, lambda: rung.append("set"))
    wait_until(lambda: rung == ["set"])


def test_a_lease_whose_alarm_cannot_be_set_is_no_lease(monkeypatch):
    _, cache = filled()
    with monkeypatch.context() as patch:
        patch.setattr(
            "radixkv.cache.leases.alarms", Alarms()
        )  # nothing waits there, so that there is no thread
        patch.setattr(
            threading.Thread, "start", lambda self: (_ for _ in ()).throw(RuntimeError("no more threads"))
        )
        with pytest.raises(RuntimeError, match="no more threads"):
            cache.pin(prompt(16)[0], ttl=5)
    assert not cache.timed_leases
    assert cache.num_evictable_blocks == cache.num_cached_blocks


def test_leases_that_are_released_leave_nothing_behind():
    _, cache = filled()
    waiting = len(alarms._waiting)
    gone = []
    for _ in range(200):
        lease = cache.pin(prompt(16)[0], ttl=3600)
        gone.append(weakref.ref(lease))
        lease.release()
        del lease
    gc.collect()
    assert len(alarms._waiting) <= waiting + 1
    assert not any(ref() is not None for ref in gone)
    assert not cache.timed_leases


def test_what_is_no_time_to_live():
    _, cache = filled()
    for ttl in ("5", b"5", True, False, 0, -1.0, math.nan, -math.inf, [1], 1j, 10**400):
        with pytest.raises(InvalidRequestError, match="the ttl of a lease is seconds above 0, or None"):
            cache.pin(prompt(16)[0], ttl=ttl)
        with pytest.raises(InvalidRequestError, match="the ttl of a retention is seconds above 0, or None"):
            Retention(1, ttl)
    assert cache.num_evictable_blocks == cache.num_cached_blocks


def test_what_is_a_time_to_live():
    _, cache = filled()
    for ttl in (5, 5.5, math.inf, np.float32(3), np.int64(7), Fraction(7, 2)):
        with cache.pin(prompt(16)[0], ttl=ttl) as lease:
            assert not lease.expired
        assert Retention(1, ttl).ttl == ttl


def test_it_can_be_imported_where_there_is_no_fork():
    code = (
        "import os, random, torch\n"
        "if hasattr(os, 'register_at_fork'): del os.register_at_fork\n"
        "import radixkv.cache.prefix_cache, threading\n"
        "from radixkv.cache.alarms import alarms\n"
        "rung = threading.Event(); alarms.after(0, rung.set); assert rung.wait(10)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_starts_without_alarms():
    alarms, rung = Alarms(), []
    alarms.after(0.5, lambda: rung.append("parent"))
    child = os.fork()
    if not child:
        ok = not alarms._waiting
        alarms.after(0.0, lambda: rung.append("child"))
        end = time.monotonic() + 5
        while not rung and time.monotonic() < end:
            time.sleep(0.005)
        os._exit(0 if ok and rung == ["child"] else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_a_retention_goes_through_generate_and_sessions():
    model, cache = filled(policy="priority")
    plain = twin(model)
    kept, session_kept = prompt(16, 1), prompt(16, 2)
    with cache.attached(model, retention=Retention(3)):
        greedy(model, kept, 1)
    with cache.session(session_kept, retention=Retention(2, ttl=3600)) as past, torch.no_grad():
        model(session_kept[:, past.num_cached_tokens :], past_key_values=past)
    cache.attach(model, retention=Retention(-1))
    greedy(model, prompt(16, 3), 1)
    cache.detach()
    with cache.attached(model):
        for seed in range(4, 12):
            greedy(model, prompt(16, seed), 1)
            assert cache.match_length(kept[0]) == 16
            assert cache.match_length(session_kept[0]) == 16
        assert cache.match_length(prompt(16, 3)[0]) < 4
        assert greedy(model, kept, 4).tolist() == greedy(plain, kept, 4).tolist()
    cache.check()


@pytest.mark.parametrize("way", ["attached", "attach", "session"])
def test_a_retention_that_nobody_would_heed_is_refused(way):
    model, cache = filled()
    with pytest.raises(InvalidRequestError, match="policy='priority'"):
        getattr(cache, way)(prompt(4) if way == "session" else model, retention=Retention(1))
    with cache.attached(model):
        greedy(model, prompt(8, 5), 1)
