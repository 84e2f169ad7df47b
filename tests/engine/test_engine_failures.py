"""A model that raises, Ctrl-C, aborts at any moment, changed weights: the books balance and the rest is right."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import signal
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from engine_testkit import (
    alone,
    balanced,
    drained,
    family,
    make_engine,
    params,
    prompt,
    tiny,
    tokens_of,
    twin,
)
from hf_testkit import snapshot
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from radixkv import Engine
from radixkv.errors import InvalidRequestError, OutOfBlocksError


class Boom(RuntimeError):
    pass


@contextlib.contextmanager
def failing(model: Any, when: Any, layer: int = 1) -> Iterator[list[int]]:
    """`when(call number, ids in the forward)` decides whether that decoder layer raises."""
    calls: list[int] = []
    ids: list[torch.Tensor] = []

    def note(module: Any, args: Any, kwargs: Any) -> None:
        ids[:] = [kwargs["input_ids"] if "input_ids" in kwargs else args[0]]

    def hook(*_: Any) -> None:
        calls.append(1)
        if when(len(calls), ids[0]):
            raise Boom(f"call {len(calls)}")

    inner = model.base_model
    handles = [
        inner.register_forward_pre_hook(note, with_kwargs=True),
        inner.layers[layer].register_forward_pre_hook(hook),
    ]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


@pytest.mark.parametrize("nth", [1, 2, 5])
def test_a_failure_that_passes_costs_nobody_anything(nth: int) -> None:
    model = tiny("llama_gqa")
    prompts = family(17, 2, 6, 9)
    expected = [alone(twin(model), p, 6) for p in prompts]
    engine = make_engine(model)
    before = snapshot(model)
    with failing(model, lambda n, _: n == nth):
        outs = engine.generate(prompts, params(6))
    assert tokens_of(outs) == expected
    assert snapshot(model) == before
    drained(engine)


def test_a_request_that_always_fails_ends_alone() -> None:
    model = tiny("llama_gqa")
    good = family(17, 2, 6, 9)
    reference = twin(model)
    expected = [alone(reference, p, 6) for p in good]
    poison = next(t for t in range(3, 64) if not any(t in row for row in (*good, *expected)))
    bad = [*good[0], poison]
    engine = make_engine(model)
    before = snapshot(model)
    with failing(model, lambda _, ids: bool((ids == poison).any())):
        with pytest.warns(UserWarning, match="Boom"):
            outs = engine.generate([good[0], bad, *good[1:]], params(6))
        assert outs[1].finish_reason == "error"
        assert isinstance(outs[1].error, Boom)
        assert tokens_of([outs[0], *outs[2:]]) == expected
        drained(engine)
    assert snapshot(model) == before
    # What the failed request left in the cache, if anything, is right.
    (again,) = engine.generate([bad], params(6))
    assert again.token_ids == alone(reference, bad, 6)
    drained(engine)


def test_a_model_that_always_fails_ends_every_request_with_an_error() -> None:
    model = tiny("llama_gqa")
    engine = make_engine(model)
    with failing(model, lambda *_: True), pytest.warns(UserWarning, match="3 of 3"):
        outs = engine.generate(family(17, 2, 6, 9), params(6))
    assert [type(c.error) for c in outs] == [Boom] * 3
    drained(engine)
    assert engine.cache.num_cached_blocks == 0
    ids = prompt(9)[0].tolist()
    assert tokens_of(engine.generate([ids], params(3))) == [alone(twin(model), ids, 3)]


def test_a_long_prompt_fails_between_two_chunks() -> None:
    model = tiny("llama_gqa")
    reference = twin(model)
    long, short = prompt(60)[0].tolist(), prompt(6, 3)[0].tolist()
    engine = make_engine(model, max_batched_tokens=16)
    with failing(model, lambda n, ids: ids.shape[1] > 1 and n > 3), pytest.warns(UserWarning, match="Boom"):
        outs = engine.generate([long, short], params(4))
    assert outs[0].finish_reason == "error"
    drained(engine)
    outs = engine.generate([long, short], params(4))
    assert tokens_of(outs) == [alone(reference, p, 4) for p in (long, short)]


@pytest.mark.parametrize("kwargs", [{}, {"preemption": "swap", "host_memory": "16KiB"}])
def test_aborts_at_random_moments(kwargs: dict[str, Any]) -> None:
    model = tiny("llama_gqa")
    reference = twin(model)
    rng = random.Random(1)
    engine = make_engine(model, num_blocks=16, max_batched_tokens=12, **kwargs)
    expected: dict[Any, list[int]] = {}
    live: list[Any] = []
    counts: dict[Any, int] = {}
    done: dict[Any, Any] = {}
    for round_ in range(60):
        if round_ < 40 and rng.random() < 0.6:
            ids = family(9, rng.randint(1, 25), seed=rng.randint(0, 3))[0]
            n = rng.choice([1, 1, 2])
            rid = engine.add_request(ids, params(8, n=n))
            counts[rid] = n
            expected[rid] = alone(reference, ids, 8)
            live.append(rid)
        if live and rng.random() < 0.3:
            rid = live.pop(rng.randrange(len(live)))
            running = any((rid, i) not in done for i in range(counts[rid]))
            assert engine.abort(rid) == running
            balanced(engine)
        for out in engine.step():
            if out.completion is not None:
                done[out.rid, out.index] = out.completion
        balanced(engine)
    while engine.has_unfinished:
        for out in engine.step():
            if out.completion is not None:
                done[out.rid, out.index] = out.completion
    drained(engine)
    for (rid, _), completion in done.items():
        if completion.finish_reason == "abort":
            assert completion.token_ids == expected[rid][: len(completion.token_ids)]
        else:
            assert completion.token_ids == expected[rid]
    assert {rid for rid, _ in done} == set(expected)


def test_abort_of_a_lone_request_in_every_state_gives_its_blocks_back() -> None:
    model = tiny("llama_gqa")
    ids = prompt(30)[0].tolist()
    for steps in range(6):
        engine = make_engine(model, max_batched_tokens=12)
        rid = engine.add_request(ids, params(8))
        for _ in range(steps):
            engine.step()
        assert engine.abort(rid)
        drained(engine)


def test_abort_from_a_callback_inside_a_step() -> None:
    model = tiny("llama_gqa")
    first, second = family(9, 3, 5)
    expected = alone(twin(model), second, 6)
    engine = make_engine(model)
    rid = engine.add_request(first, params(6))
    calls: list[bool] = []

    def stop_the_other(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if len(calls) < 2:
            calls.append(engine.abort(rid))
        return scores

    other = engine.add_request(second, params(6, logits_processors=[stop_the_other]))
    got: dict[Any, Any] = {}
    while engine.has_unfinished:
        for out in engine.step():
            if out.completion is not None:
                got[out.rid] = out.completion
    assert got[rid].finish_reason == "abort"
    assert got[other].token_ids == expected
    assert calls == [True, False]
    drained(engine)


@pytest.mark.parametrize("forwards", [1, 2, 4])
def test_ctrl_c_in_the_middle(forwards: int) -> None:
    model = tiny("llama_gqa")
    prompts = family(17, 2, 6, 9)
    expected = [alone(twin(model), p, 6) for p in prompts]
    engine = make_engine(model)
    before = snapshot(model)
    count = []

    def interrupt(*_: Any) -> None:
        count.append(1)
        if len(count) == forwards:
            os.kill(os.getpid(), signal.SIGINT)

    handle = model.base_model.layers[1].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        engine.generate(prompts, params(6))
    handle.remove()
    assert len(count) == forwards, "it ends with the step in which Ctrl-C came"
    assert snapshot(model) == before
    drained(engine)
    assert tokens_of(engine.generate(prompts, params(6))) == expected


def test_a_second_ctrl_c_does_not_wait_for_the_forward() -> None:
    model = tiny("llama_gqa")
    engine = make_engine(model)
    before = snapshot(model)
    reached = []

    def interrupt(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        reached.append(1)
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(1000):
            reached.append(2)

    handle = model.base_model.layers[1].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        engine.generate(family(17, 2, 6), params(6))
    handle.remove()
    assert len(reached) < 1000
    assert snapshot(model) == before
    drained(engine)
    ids = prompt(9)[0].tolist()
    assert tokens_of(engine.generate([ids], params(3))) == [alone(twin(model), ids, 3)]


STAGES = {
    "schedule": "radixkv.sched.scheduler.Scheduler.schedule",
    "move": "radixkv.engine.executing.Executor._move",
    "sample": "radixkv.engine.sampler.Sampler.sample",
    "complete": "radixkv.sched.scheduler.Scheduler.complete",
    "hand out": "radixkv.engine.desk.Desk.hand_out",
}


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("stage", STAGES)
def test_ctrl_c_twice_at_any_stage_loses_no_token(
    stage: str, after: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny("llama_gqa")
    ids = prompt(15)[0].tolist()
    sampled = {"temperature": 1.0, "seed": 5}
    (expected,) = tokens_of(make_engine(model).generate([ids], params(6, **sampled)))
    engine = make_engine(model)
    module, _, name = STAGES[stage].rpartition(".")
    module, _, owner = module.rpartition(".")
    home = getattr(__import__(module, fromlist=[owner]), owner)
    whole = getattr(home, name)
    calls: list[int] = []

    def interrupting(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        twice = len(calls) == 3
        if twice and not after:
            interrupt_twice()
        result = whole(*args, **kwargs)
        if twice and after:
            interrupt_twice()
        return result

    def interrupt_twice() -> None:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(home, name, interrupting)
    rid = engine.add_request(ids, params(6, **sampled))
    tokens: list[int] = []
    interrupted = 0
    while engine.has_unfinished:
        try:
            outs = engine.step()
        except KeyboardInterrupt:
            interrupted += 1
            balanced(engine)
            continue
        tokens += [out.token_id for out in outs if out.token_id is not None]
    assert rid is not None
    assert interrupted == 1
    assert tokens == expected
    drained(engine)


def test_new_weights_in_the_middle_never_mix_with_old_ones() -> None:
    model = tiny("llama_gqa")
    ids = prompt(21)[0].tolist()
    engine = make_engine(model)
    rid = engine.add_request(ids, params(8))
    tokens: list[int] = []
    for _ in range(3):
        tokens += [out.token_id for out in engine.step() if out.token_id is not None]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.25)
    while engine.has_unfinished:
        tokens += [out.token_id for out in engine.step() if out.token_id is not None]
    assert rid is not None
    assert tokens[3:] == alone(twin(model), ids + tokens[:3], 5), "as if the tokens so far had been a prompt"
    assert engine.stats.hit_tokens == 0
    drained(engine)
    # And nothing of the old weights is found by later requests, nor by an attached model.
    assert tokens_of(engine.generate([ids], params(8))) == [alone(twin(model), ids, 8)]


def test_invalidate_while_it_runs() -> None:
    model = tiny("llama_gqa")
    ids = prompt(21)[0].tolist()
    engine = make_engine(model)
    engine.add_request(ids, params(8))
    tokens: list[int] = []
    for _ in range(3):
        tokens += [out.token_id for out in engine.step() if out.token_id is not None]
    for layer in model.base_model.layers:
        rows = layer.self_attn.k_proj.weight.data.numpy()
        rows[3:5] *= 1.5  # leaves no trace
    engine.cache.invalidate()
    while engine.has_unfinished:
        tokens += [out.token_id for out in engine.step() if out.token_id is not None]
    assert tokens[3:] == alone(twin(model), ids + tokens[:3], 5)
    drained(engine)
    assert tokens_of(engine.generate([ids], params(8))) == [alone(twin(model), ids, 8)]


def test_a_plain_forward_in_another_thread_while_it_runs() -> None:
    model = tiny("llama_gqa")
    prompts = family(17, *range(1, 9))
    other = prompt(12, 9)
    expected = [alone(twin(model), p, 10) for p in prompts]
    wanted = twin(model)(other).logits
    engine = make_engine(model)
    worst: list[float] = []
    stop = threading.Event()

    def forward() -> None:
        with torch.no_grad():
            while not stop.is_set():
                worst.append(float((model(other).logits - wanted).abs().max()))

    worker = threading.Thread(target=forward)
    worker.start()
    try:
        assert tokens_of(engine.generate(prompts, params(10))) == expected
    finally:
        stop.set()
        worker.join()
    assert max(worst) < 1e-4
    drained(engine)


def test_dropping_an_engine_in_the_middle_frees_the_model() -> None:
    model = tiny("llama_gqa")
    before = snapshot(model)
    engine: Engine | None = make_engine(model)
    assert engine is not None
    engine.add_request([5, 6, 7], params(8))
    engine.step()
    engine = None
    other = make_engine(model)
    assert tokens_of(other.generate([[5, 6, 7]], params(4))) == [alone(twin(model), [5, 6, 7], 4)]
    assert snapshot(model) == before


def test_the_model_trains_as_before_afterwards() -> None:
    model = tiny("llama_gqa")
    reference = twin(model)
    engine = make_engine(model)
    engine.generate(family(9, 3, 5), params(4))
    ids = prompt(12)
    losses = []
    for each in (model, reference):
        each.train()
        loss = each(ids, labels=ids).loss
        loss.backward()
        losses.append((float(loss), float(each.lm_head.weight.grad.norm())))
    assert losses[0] == pytest.approx(losses[1])


def test_an_error_keeps_no_tensors_of_the_model_alive() -> None:
    model = tiny("llama_gqa")
    engine = make_engine(model)
    kept: list[weakref.ref[torch.Tensor]] = []

    def hook(*_: Any) -> None:
        activations = torch.zeros(1000)
        kept.append(weakref.ref(activations))
        raise Boom("out of memory, say")

    handle = model.base_model.layers[1].register_forward_pre_hook(hook)
    with pytest.warns(UserWarning, match="Boom"):
        (out,) = engine.generate([[5, 6, 7]], params(2))
    handle.remove()
    gc.collect()
    assert isinstance(out.error, Boom)
    assert kept
    assert all(reference() is None for reference in kept)


def test_a_pin_that_leaves_no_room_says_so() -> None:
    model = tiny("llama_gqa")
    engine = make_engine(model, num_blocks=10)
    engine.generate([prompt(30)[0]], params(2))
    with engine.cache.pin(prompt(30)[0]), pytest.warns(UserWarning, match="need 8 blocks, have 2 free"):
        (out,) = engine.generate([prompt(30, 5)[0]], params(2))
    assert out.finish_reason == "capacity"
    assert isinstance(out.error, OutOfBlocksError)
    drained(engine)
    assert engine.generate([prompt(30, 5)[0]], params(2))[0].finish_reason == "length"


@pytest.mark.parametrize("late", [False, True], ids=["between calls", "while it runs"])
def test_another_attention_implementation_is_noticed(late: bool) -> None:
    def sharper(
        module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: float, **kwargs: Any
    ) -> Any:
        return sdpa_attention_forward(module, query, key, value, mask, scaling=scaling * 3, **kwargs)

    AttentionInterface.register("sharper", sharper)
    AttentionMaskInterface.register("sharper", ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    model = tiny("llama_gqa")
    ids = prompt(21)[0].tolist()
    engine = make_engine(model)
    before = alone(twin(model), ids, 8)
    assert tokens_of(engine.generate([ids], params(8))) == [before]
    tokens: list[int] = []
    if late:
        engine.add_request(ids, params(8))
        for _ in range(3):
            tokens += [out.token_id for out in engine.step() if out.token_id is not None]
    model.set_attn_implementation("sharper")
    reference = twin(model)
    expected = tokens + alone(reference, ids + tokens, 8 - len(tokens))
    assert expected != before, "this implementation changes nothing"
    if late:
        while engine.has_unfinished:
            tokens += [out.token_id for out in engine.step() if out.token_id is not None]
    else:
        ((tokens),) = tokens_of(engine.generate([ids], params(8)))
    assert tokens == expected
    with engine.cache.attached(model):
        assert alone(model, ids, 8) == alone(reference, ids, 8)
    assert tokens_of(make_engine(model, cache=engine.cache).generate([ids], params(8))) == [
        alone(reference, ids, 8)
    ]
    model.set_attn_implementation("sdpa")
    assert tokens_of(engine.generate([ids], params(8))) == [before]
    drained(engine)


def test_a_fork_that_fails_leaves_no_ghost() -> None:
    model = tiny("llama_gqa")
    engine = make_engine(model)

    class Unforkable:
        def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            return scores

        def fork(self) -> Any:
            if forks:
                raise Boom("cannot be forked")
            forks.append(1)
            return self

    forks: list[int] = []
    rid = engine.add_request(prompt(9)[0], params(6, logits_processors=[Unforkable()]), rid="r")
    engine.step()
    forks.append(1)
    with pytest.raises(Exception, match="cannot be forked"):
        engine.fork(rid)
    while engine.has_unfinished:
        engine.step()
    drained(engine)
    assert engine.add_request([5, 6], params(1), rid="r") == "r"


def test_more_completions_than_can_run_are_refused_at_once() -> None:
    engine = make_engine(tiny("llama_gqa"))
    for call in (engine.generate, engine.add_request):
        with pytest.raises(InvalidRequestError, match="max_num_seqs"):
            call([5, 6], params(2, n=2**31 - 1))
    drained(engine)


@pytest.mark.parametrize("how", ["raises", "weights"])
def test_a_sequence_that_outgrew_the_pool_ends_though_its_step_is_taken_back(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny("llama_gqa")
    ids = prompt(10)[0].tolist()
    engine = make_engine(model, num_blocks=5, max_num_seqs=1)
    long = engine.add_request(ids, params(30))
    short = engine.add_request(ids[:3], params(3))
    outgrew: list[Any] = []
    run, schedule = engine._executor.run, engine._scheduler.schedule

    def failing(step: Any, *args: Any) -> Any:
        if step.finished and how == "raises":
            raise Boom("in a step that a sequence ended with")
        return run(step, *args)

    def watched() -> Any:
        step = schedule()
        outgrew[:] = [] if step is None else step.finished
        return step

    monkeypatch.setattr(engine._executor, "run", failing)
    monkeypatch.setattr(engine._scheduler, "schedule", watched)
    if how == "weights":
        monkeypatch.setattr(engine._plug, "overtaken", lambda: bool(outgrew))
    ends: dict[Any, str] = {}
    for _ in range(40):
        try:
            outs = engine.step()
        except Boom:
            continue
        ends |= {out.rid: out.completion.finish_reason for out in outs if out.completion is not None}
        balanced(engine)
    assert ends == {long: "capacity", short: "length"}
    drained(engine)
