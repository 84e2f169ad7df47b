"""FC-50: after detach, an exception or Ctrl-C the model is exactly as it was, and the books balance."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from hf_testkit import (
    MAIN_ARCHS,
    NULL,
    books,
    both_ways,
    expect_same,
    greedy,
    join,
    make_cache,
    needs_cache,
    pad_left,
    prompt,
    same,
    snapshot,
    tiny,
    twin,
)
from transformers import StoppingCriteria, StoppingCriteriaList

pytestmark = pytest.mark.filterwarnings("default")

IDS = prompt(21)


class Interrupting:
    """Raises from a streamer at the n-th put."""

    def __init__(self, error: BaseException, at: int) -> None:
        self.error, self.left = error, at

    def put(self, value: Any) -> None:
        self.left -= 1
        if self.left == 0:
            raise self.error

    def end(self) -> None: ...


class StopByError(StoppingCriteria):
    def __init__(self, error: BaseException, at: int) -> None:
        self.error, self.left = error, at

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        self.left -= 1
        if self.left == 0:
            raise self.error
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


@both_ways
@pytest.mark.parametrize("arch", MAIN_ARCHS)
def test_nothing_is_left_after_detach(arch: str) -> None:
    model = tiny(arch)
    before = snapshot(model)
    cache = make_cache(model)
    assert snapshot(model) == before, "making a cache changes nothing"
    with cache.attached(model):
        greedy(model, IDS)
        model.generate(**pad_left([IDS, prompt(5)]), max_new_tokens=4, num_beams=2, do_sample=False)
    assert snapshot(model) == before
    cache.attach(model)
    greedy(model, IDS)
    cache.detach()
    assert snapshot(model) == before
    with cache.session(IDS) as past:
        greedy(model, IDS, past_key_values=past)
    assert snapshot(model) == before
    books(cache)


@both_ways
@pytest.mark.parametrize("error", [RuntimeError("mine"), KeyboardInterrupt(), SystemExit(3)], ids=repr)
@pytest.mark.parametrize("where", ["streamer", "criteria", "body"])
def test_an_error_in_the_middle(where: str, error: BaseException) -> None:
    model = tiny()
    reference = twin(model)
    before = snapshot(model)
    cache = make_cache(model)
    with cache.attached(model):
        greedy(model, IDS[:, :9])

    def run(at: int) -> None:
        with cache.attached(model):
            if where == "streamer":
                greedy(model, IDS, streamer=Interrupting(error, at))
            elif where == "criteria":
                greedy(model, IDS, stopping_criteria=StoppingCriteriaList([StopByError(error, at)]))
            else:
                greedy(model, IDS, at)
                raise error

    for at in (1, 2, 5):
        with pytest.raises(type(error)):
            run(at)
        error.__traceback__ = None  # it holds the frames, and they the cache object
        assert snapshot(model) == before
        gc.collect()
        books(cache)
        expect_same(cache, model, lambda m: greedy(m, IDS), reference)
        if not NULL:
            cache.clear()


@both_ways
@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("cold", [True, False])
def test_an_error_inside_a_forward(cold: bool, layer: int) -> None:
    """A layer fails half-way through the prefill or through a decode step: layers before it have grown already."""
    model = tiny()
    reference = twin(model)
    cache = make_cache(model)
    if not cold:
        with cache.attached(model):
            greedy(model, IDS[:, :10])
    mlp = model.model.layers[layer].mlp
    for fail_at in (1, 2, 3):
        calls = 0

        def failing(module: Any, args: Any, fail_at: int = fail_at) -> None:
            nonlocal calls
            calls += 1
            if calls == fail_at:
                raise ZeroDivisionError("in a layer")

        handle = mlp.register_forward_pre_hook(failing)
        before = snapshot(model)
        with pytest.raises(ZeroDivisionError), cache.attached(model):
            greedy(model, IDS)
        assert snapshot(model) == before
        handle.remove()
        gc.collect()
        books(cache)
        for text in (IDS, join(IDS, prompt(3, seed=1))):
            expect_same(cache, model, lambda m, ids=text: greedy(m, ids), reference)
        if not NULL and cold:
            cache.clear()


@both_ways
def test_an_error_in_a_cold_batch() -> None:
    """The prefill of a batch has several forwards of its own; each may fail."""
    model = tiny()
    reference = twin(model)
    cache = make_cache(model)
    batch = pad_left([join(prompt(12), prompt(3 + i, seed=i)) for i in range(4)])
    expected = reference.generate(**batch, max_new_tokens=4, do_sample=False)
    for fail_at in range(1, 6):
        calls = 0

        def failing(module: Any, args: Any, fail_at: int = fail_at) -> None:
            nonlocal calls
            calls += 1
            if calls == fail_at:
                raise KeyboardInterrupt

        handle = model.model.layers[1].register_forward_pre_hook(failing)
        try:
            with cache.attached(model):
                model.generate(**batch, max_new_tokens=4, do_sample=False)
        except KeyboardInterrupt:
            pass
        handle.remove()
        gc.collect()
        books(cache)
        with cache.attached(model):
            same(model.generate(**batch, max_new_tokens=4, do_sample=False), expected)
        books(cache)
        if not NULL:
            cache.clear()


@both_ways
def test_generate_goes_on_while_attached_after_an_interrupt() -> None:
    """In a notebook: Ctrl-C in a cell, the next cell calls again."""
    model = tiny()
    reference = twin(model)
    cache = make_cache(model)
    cache.attach(model)
    try:
        for at in (1, 2, 4, 7):
            with pytest.raises(KeyboardInterrupt):
                greedy(model, IDS, streamer=Interrupting(KeyboardInterrupt(), at))
            gc.collect()
            books(cache)
            same(greedy(model, IDS), greedy(reference, IDS))
            longer = join(greedy(reference, IDS), prompt(2, seed=at))
            same(greedy(model, longer), greedy(reference, longer))
    finally:
        cache.detach()


def test_settings_changed_while_attached_are_kept() -> None:
    """Detaching restores what the cache changed, not what the user did in the meantime."""
    model = tiny()
    cache = make_cache(model)
    with cache.attached(model):
        greedy(model, IDS)
        handle = model.register_forward_hook(lambda *_: None)
        model.train()
        model.generation_config.max_new_tokens = 3
        model.note = "mine"
    assert model.training
    assert model.note == "mine"
    assert model.generation_config.max_new_tokens == 3
    assert handle.id in model._forward_hooks


@both_ways
def test_backward_after_a_call_that_failed() -> None:
    model = tiny()
    reference = twin(model)
    cache = make_cache(model)
    with pytest.raises(KeyboardInterrupt), cache.attached(model):
        greedy(model, IDS, streamer=Interrupting(KeyboardInterrupt(), 3))
    for m in (model, reference):
        m.train()
        m(IDS, labels=IDS).loss.backward()
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


@needs_cache
def test_the_model_can_be_freed() -> None:
    """Neither a detached cache nor a dropped one keeps hooks in the model, nor the model its cache."""
    model = tiny()
    cache = make_cache(model)
    with cache.attached(model):
        greedy(model, IDS)
    gone = weakref.ref(cache)
    del cache
    gc.collect()
    assert gone() is None
    same(greedy(model, IDS), greedy(twin(model), IDS))


@needs_cache
def test_nested_attach_leaves_the_first_alone() -> None:
    from radixkv import errors

    model = tiny()
    reference = twin(model)
    before = snapshot(model)
    cache = make_cache(model)
    with cache.attached(model):
        with pytest.raises(errors.InvalidRequestError):
            cache.attach(model)
        same(greedy(model, IDS), greedy(reference, IDS))
        same(greedy(model, IDS), greedy(reference, IDS))
        assert cache.last_requests[0].hit_tokens == 20
    assert snapshot(model) == before
