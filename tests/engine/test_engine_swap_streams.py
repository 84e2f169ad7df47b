"""Swapping beside the computation: no block changes hands before its copy is ordered, and the tokens stay the same.

On a CPU a double takes the place of the streams: it leaves copies undone as long as nobody waits for them, and raises
at the first operation on a block that is not ordered behind what the other stream does with it.
"""

from __future__ import annotations

import os
import random
import signal
from typing import Any

import pytest
import torch
from engine_testkit import alone, balanced, drained, family, make_engine, params, tiny, tokens_of, twin
from test_engine_failures import Boom, failing

from radixkv import Engine
from radixkv.store import HostTier
from radixkv.store.copy_stream import CudaCopyStream
from tests.store.stream_double import OrderError, StreamDouble, watch_runner, watch_store

PROMPTS = family(9, 2, 6, 7, 11) + family(0, 3, 17, 4, seed=5)
LENGTH = 14
NAMES = ["llama_gqa", "gemma3"]


def swapping(
    model: Any, monkeypatch: pytest.MonkeyPatch, double: StreamDouble, num_blocks: int = 10, **kwargs: Any
) -> Engine:
    """An engine that must swap, on streams of the double, which is told of all that touches a block."""
    monkeypatch.setattr("radixkv.store.host_tier.copy_stream", lambda device: double)
    kwargs = {"preemption": "swap", "host_memory": "64KiB", "max_batched_tokens": 12, **kwargs}
    engine = make_engine(model, num_blocks=num_blocks, **kwargs)
    watch_store(engine.cache.store, double, monkeypatch)
    watch_runner(engine.cache.store, double, monkeypatch)
    return engine


def expected_of(model: Any, prompts: Any = PROMPTS, length: int = LENGTH) -> list[list[int]]:
    reference = twin(model)
    return [alone(reference, p, length) for p in prompts]


def steps(engine: Engine, tokens: dict[Any, list[int]], errors: Any = ()) -> int:
    """Drive the engine to the end; how many steps raised one of these errors."""
    raised = 0
    while engine.has_unfinished:
        try:
            outs = engine.step()
        except errors:
            raised += 1
            balanced(engine)
            continue
        for out in outs:
            if out.token_id is not None:
                tokens.setdefault(out.rid, []).append(out.token_id)
    return raised


@pytest.mark.parametrize("late", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("name", NAMES)
def test_swapping_on_two_streams_changes_no_token(
    name: str, late: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny(name)
    expected = expected_of(model)
    double = StreamDouble(late)
    engine = swapping(model, monkeypatch, double)
    for _ in range(2):
        assert tokens_of(engine.generate(PROMPTS, params(LENGTH))) == expected
        drained(engine)
    roomy = make_engine(model, preemption="recompute")
    assert tokens_of(roomy.generate(PROMPTS, params(LENGTH))) == expected
    assert engine.stats.swapped_in_blocks > 0
    assert double.num_copies > 2
    assert roomy.stats.preemptions == 0
    assert not double.queue


def test_a_model_that_runs_one_sequence_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("llama_gqa")
    expected = expected_of(model)
    double = StreamDouble()
    engine = swapping(model, monkeypatch, double)
    engine._runner.fallback_reason = "for this test"
    assert tokens_of(engine.generate(PROMPTS, params(LENGTH))) == expected
    assert engine.stats.swapped_in_blocks > 0
    drained(engine)


def test_an_attached_model_writes_into_the_same_pool_between_the_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny("llama_gqa")
    expected = expected_of(model)
    others = family(9, 5, 8, 13, seed=3)
    alone_others = expected_of(model, others, 4)
    double = StreamDouble()
    engine = swapping(model, monkeypatch, double, num_blocks=12)
    tokens: dict[Any, list[int]] = {}
    rids = [engine.add_request(p, params(LENGTH)) for p in PROMPTS]
    turn = 0
    while engine.has_unfinished:
        for out in engine.step():
            if out.token_id is not None:
                tokens.setdefault(out.rid, []).append(out.token_id)
        with engine.cache.attached(model):
            assert alone(model, others[turn % 3], 4) == alone_others[turn % 3]
        turn += 1
    assert [tokens[rid] for rid in rids] == expected
    assert engine.stats.swapped_out_blocks > 0
    drained(engine)


# -- the double notices -------------------------------------------------------------------------------------------


def _no_fence_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = HostTier.swap_in

    def swap_in(tier: HostTier, *args: Any) -> None:
        monkeypatch.setattr(HostTier, "fence", fence)
        whole(tier, *args)
        monkeypatch.setattr(HostTier, "fence", lambda tier: None)

    fence = HostTier.fence
    monkeypatch.setattr(HostTier, "fence", lambda tier: None)
    monkeypatch.setattr(HostTier, "swap_in", swap_in)


def _no_fence_behind_a_swap_in(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = HostTier.swap_in

    def swap_in(tier: HostTier, *args: Any) -> None:
        fence = HostTier.fence
        monkeypatch.setattr(HostTier, "fence", lambda tier: None)
        whole(tier, *args)
        monkeypatch.setattr(HostTier, "fence", fence)

    monkeypatch.setattr(HostTier, "swap_in", swap_in)


def _copies_do_not_wait_for_main(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StreamDouble, "wait", lambda double, event: None)


@pytest.mark.parametrize(
    "fault", [_no_fence_at_the_end, _no_fence_behind_a_swap_in, _copies_do_not_wait_for_main]
)
def test_a_missing_wait_is_noticed(fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("llama_gqa")
    engine = swapping(model, monkeypatch, StreamDouble())
    fault(monkeypatch)
    with pytest.raises(OrderError, match="before operation"):
        engine.generate(PROMPTS, params(LENGTH))


@pytest.mark.parametrize("fault", [_no_fence_at_the_end, _no_fence_behind_a_swap_in])
def test_a_missing_wait_does_harm(fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("llama_gqa")
    expected = expected_of(model)
    double = StreamDouble(raises=False)
    engine = swapping(model, monkeypatch, double)
    for tensor in (*engine.cache.store.keys, *engine.cache.store.values):
        assert tensor is not None
        tensor.zero_()  # what was never written must not end as NaN
    fault(monkeypatch)
    assert tokens_of(engine.generate(PROMPTS, params(LENGTH))) != expected


# -- trouble in the middle ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no room"), Boom("the copy failed")])
@pytest.mark.parametrize("late", [0.0, 1.0])
def test_a_copy_that_fails_now_and_then_costs_no_token(
    late: float, error: Exception, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny("llama_gqa")
    expected = expected_of(model)
    double = StreamDouble(late)
    engine = swapping(model, monkeypatch, double)

    def fail(number: int, moment: str) -> None:
        if number % 3 == 1 and moment == when:
            raise error

    double.before_copy = fail
    tokens: dict[Any, list[int]] = {}
    rids = [engine.add_request(p, params(LENGTH)) for p in PROMPTS]
    raised = steps(engine, tokens, type(error))
    assert raised > 1
    assert [tokens[rid] for rid in rids] == expected
    assert engine.stats.swapped_in_blocks > 0
    drained(engine)


def test_a_copy_that_fails_ends_generate_and_the_engine_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("llama_gqa")
    expected = expected_of(model)
    double = StreamDouble()
    engine = swapping(model, monkeypatch, double)

    def fail(number: int, moment: str) -> None:
        if number == 2 and moment == "after":
            raise Boom("the copy failed")

    double.before_copy = fail
    with pytest.raises(Boom):
        engine.generate(PROMPTS, params(LENGTH))
    drained(engine)
    assert tokens_of(engine.generate(PROMPTS, params(LENGTH))) == expected
    drained(engine)


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("number", [1, 2, 3])
def test_ctrl_c_twice_in_a_copy(number: int, moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("llama_gqa")
    expected = expected_of(model)
    double = StreamDouble()
    engine = swapping(model, monkeypatch, double)

    def interrupt(at: int, when: str) -> None:
        if (at, when) == (number, moment):
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGINT)

    double.before_copy = interrupt
    tokens: dict[Any, list[int]] = {}
    rids = [engine.add_request(p, params(LENGTH)) for p in PROMPTS]
    assert steps(engine, tokens, KeyboardInterrupt) == 1
    assert [tokens[rid] for rid in rids] == expected
    drained(engine)


@pytest.mark.parametrize("insisting", [False, True])
@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_ctrl_c_in_the_forward_behind_a_copy(
    number: int, insisting: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny("llama_gqa")
    expected = expected_of(model)
    double = StreamDouble()
    engine = swapping(model, monkeypatch, double)
    sent = []

    def interrupt(*_: Any) -> None:
        if double.num_copies == number and not sent:
            sent.append(number)
            for _ in range(1 + insisting):
                os.kill(os.getpid(), signal.SIGINT)

    handle = model.base_model.layers[1].register_forward_pre_hook(interrupt)
    tokens: dict[Any, list[int]] = {}
    rids = [engine.add_request(p, params(LENGTH)) for p in PROMPTS]
    interrupted = steps(engine, tokens, KeyboardInterrupt)
    handle.remove()
    assert interrupted == 1
    assert [tokens[rid] for rid in rids] == expected
    drained(engine)


def test_a_forward_that_fails_beside_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("llama_gqa")
    expected = expected_of(model)
    double = StreamDouble()
    engine = swapping(model, monkeypatch, double)
    seen: set[int] = set()

    def once_for_each_copy(*_: Any) -> bool:
        new = double.num_copies not in seen
        seen.add(double.num_copies)
        return new

    with failing(model, once_for_each_copy):
        assert tokens_of(engine.generate(PROMPTS, params(LENGTH))) == expected
    assert len(seen) > 2
    drained(engine)


@pytest.mark.parametrize("seed", range(3))
def test_aborts_and_forks_at_random_moments(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("llama_gqa")
    reference = twin(model)
    rng = random.Random(seed)
    double = StreamDouble(late=0.7, seed=seed)
    engine = swapping(model, monkeypatch, double, num_blocks=14, host_memory="32KiB")
    expected: dict[Any, list[int]] = {}
    done: dict[Any, Any] = {}
    live: list[Any] = []
    rounds = 0
    while rounds < 40 or engine.has_unfinished:
        rounds += 1
        if rounds <= 40 and rng.random() < 0.6:
            ids = family(9, rng.randint(1, 20), seed=rng.randint(0, 3))[0]
            rid = engine.add_request(ids, params(8, n=rng.choice([1, 1, 2])))
            expected[rid] = alone(reference, ids, 8)
            live.append(rid)
        if live and rng.random() < 0.2:
            engine.abort(live.pop(rng.randrange(len(live))))
        for out in engine.step():
            if out.completion is not None:
                done[out.rid, out.index] = out.completion
        balanced(engine)
    drained(engine)
    assert engine.stats.swapped_out_blocks > 0
    for (rid, _), completion in done.items():
        length = len(completion.token_ids)
        assert completion.token_ids == expected[rid][:length]
        assert length == 8 or completion.finish_reason == "abort"


# -- on a GPU -----------------------------------------------------------------------------------------------------


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("pinned", [True, False])
def test_swapping_on_a_gpu_changes_no_token(name: str, pinned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny(name).cuda()
    if not pinned:
        monkeypatch.setattr("radixkv.store.host_tier.pin", lambda memory: "for this test")
    # In float32 on torch kernels, so that batches of other shapes do not decide between near ties.
    roomy = make_engine(model, attention="torch")
    expected = tokens_of(roomy.generate(PROMPTS, params(LENGTH)))
    engine = make_engine(
        model,
        attention="torch",
        num_blocks=10,
        preemption="swap",
        host_memory="64KiB",
        max_batched_tokens=12,
    )
    assert engine._tier is not None
    assert (engine._tier.pageable_reason is None) == pinned
    for _ in range(3):
        assert tokens_of(engine.generate(PROMPTS, params(LENGTH))) == expected
        drained(engine)
    assert engine.stats.swapped_in_blocks > 0


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_copy_that_fails_now_and_then_on_a_gpu(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing(CudaCopyStream):
        count = 0

        def run(self, work: Any, reads: Any, writes: Any) -> None:
            self.count += 1
            if self.count % 3 == 1 and when == "before":
                raise Boom("the copy failed")
            super().run(work, reads, writes)
            if self.count % 3 == 1:
                raise Boom("the copy failed")

    model = tiny("llama_gqa").cuda()
    expected = tokens_of(make_engine(model, attention="torch").generate(PROMPTS, params(LENGTH)))
    monkeypatch.setattr("radixkv.store.host_tier.copy_stream", Failing)
    engine = make_engine(
        model,
        attention="torch",
        num_blocks=10,
        preemption="swap",
        host_memory="64KiB",
        max_batched_tokens=12,
    )
    tokens: dict[Any, list[int]] = {}
    rids = [engine.add_request(p, params(LENGTH)) for p in PROMPTS]
    assert steps(engine, tokens, Boom) > 1
    assert [tokens[rid] for rid in rids] == expected
    drained(engine)
