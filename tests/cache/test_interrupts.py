"""Ctrl-C inside the library: the books balance, the model is as it was, and nothing is lost afterwards."""

from __future__ import annotations

import os
import random
import signal
import threading
import time

import pytest
import torch
from hf_testkit import books, greedy, make_cache, prompt, tiny, twin

from radixkv.cache.locking import BooksLock, InterruptsHeld, books_are_open


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_an_interrupt_is_held_back_and_then_delivered() -> None:
    handler = signal.getsignal(signal.SIGINT)
    reached = []
    lock = BooksLock()

    def guarded() -> None:
        with lock:
            interrupt()
            for _ in range(1000):  # any of these lines would raise
                reached.append(1)
            with lock, InterruptsHeld():
                reached.append(2)
            assert books_are_open()
        reached.append(3)

    with pytest.raises(KeyboardInterrupt):
        guarded()
    assert reached[-1] == 2
    assert not books_are_open()
    assert signal.getsignal(signal.SIGINT) is handler
    taken: list[bool] = []
    thread = threading.Thread(target=lambda: (lock.__enter__(), taken.append(True), lock.__exit__()))
    thread.start()
    thread.join(5)
    assert taken, "the lock is still held"


def test_own_handlers_are_called_and_kept() -> None:
    calls: list[int] = []
    before = signal.signal(signal.SIGINT, lambda *_: calls.append(1))
    try:
        with BooksLock():
            interrupt()
            assert not calls
        assert calls == [1]
    finally:
        signal.signal(signal.SIGINT, before)


def test_interrupts_at_random_moments() -> None:
    """Sent by another thread, wherever the main thread is: in a forward, a lookup, a store, a hook going on or off."""
    model = tiny()
    reference = twin(model)
    cache = make_cache(model, num_blocks=64)
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks), set(m.__dict__)) for m in model.modules()]
    rng = random.Random(0)
    prompts = [prompt(20, seed=i % 3) for i in range(6)]
    expected = {i: greedy(reference, ids, 4).tolist() for i, ids in enumerate(prompts)}
    delivered = 0
    for _ in range(60):
        try:
            timer = threading.Timer(rng.uniform(0.0, 0.12), interrupt)
            timer.start()
            while timer.is_alive():
                which = rng.randrange(len(prompts))
                if rng.random() < 0.5:
                    with cache.attached(model):
                        assert greedy(model, prompts[which], 4).tolist() == expected[which]
                else:
                    with cache.session(prompts[which]) as past, torch.no_grad():
                        n = past.num_cached_tokens
                        model(prompts[which][:, n:], past_key_values=past)
            timer.join()
            time.sleep(0.3)  # one that came while a finalizer ran is delivered a moment later
        except KeyboardInterrupt:
            delivered += 1
    assert delivered > 20
    assert hooks == [
        (len(m._forward_hooks), len(m._forward_pre_hooks), set(m.__dict__)) for m in model.modules()
    ]
    for which, ids in enumerate(prompts):
        with cache.attached(model):
            assert greedy(model, ids, 4).tolist() == expected[which]
    books(cache)
    cache.check()
    cache.clear()
    assert cache.num_free_blocks == cache.num_blocks


def test_a_second_interrupt_goes_through_where_the_block_may_be_left() -> None:
    handler = signal.getsignal(signal.SIGINT)
    reached = []

    def insisting() -> None:
        held = InterruptsHeld()
        with held:
            interrupt()
            interrupt()
            for _ in range(1000):
                reached.append(1)  # not here
            with held.insisting():
                interrupt()
                for _ in range(1000):
                    reached.append(2)

    with pytest.raises(KeyboardInterrupt):
        insisting()
    assert 1000 <= len(reached) < 2000
    assert signal.getsignal(signal.SIGINT) is handler


def test_one_interrupt_waits_for_the_end_of_the_block_even_in_an_insisting_part() -> None:
    reached = []

    def insisting() -> None:
        held = InterruptsHeld()
        with held:
            with held.insisting():
                interrupt()
                reached.append(1)
            reached.append(2)

    with pytest.raises(KeyboardInterrupt):
        insisting()
    assert reached == [1, 2]
