"""Models that are compiled by torch in part or in place: the same tokens, and hits as ever.

The graphs are run by torch itself (`eager`), which needs no C++ compiler; what matters here is what is traced,
guarded and traced again around our hooks and cache layers.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hf_testkit import books, expect_hits, greedy, join, make_cache, needs_cache, prompt, same, tiny, twin

from radixkv import errors

pytestmark = [pytest.mark.slow, needs_cache]
BACKEND = "eager"


def in_place(model: Any) -> None:
    model.compile(backend=BACKEND)


def its_forward(model: Any) -> None:
    model.forward = torch.compile(model.forward, backend=BACKEND)


def a_layer(model: Any) -> None:
    model.model.layers[0] = torch.compile(model.model.layers[0], backend=BACKEND)


def all_layers_in_place(model: Any) -> None:
    for layer in model.model.layers:
        layer.compile(backend=BACKEND)


@pytest.fixture(autouse=True)
def fresh_graphs():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("decode", ["contiguous", "paged"])
@pytest.mark.parametrize(
    ("part", "when"),
    [
        (in_place, "before"),
        (in_place, "made"),
        (in_place, "attached"),
        (its_forward, "before"),
        (its_forward, "attached"),
        (a_layer, "before"),
        (all_layers_in_place, "before"),
    ],
)
def test_compiled_parts_give_the_same_tokens(part: Callable[[Any], None], when: str, decode: str) -> None:
    model, first = tiny(), prompt(40)
    plain = twin(model)
    longer = join(first, prompt(9, seed=1))
    calls = [first, first, longer]
    expected = [greedy(plain, ids, 3) for ids in calls]
    if when == "before":
        part(model)
    cache = make_cache(model, decode=decode)
    if when == "made":
        part(model)
    with cache.attached(model):
        if when == "attached":
            part(model)
        for ids, tokens in zip(calls, expected, strict=True):
            same(greedy(model, ids, 3), tokens)
    expect_hits(cache, 40)
    assert cache.stats.hit_tokens == 39 + 40
    gc.collect()  # what dynamo traced may hold a cache object in a cycle
    books(cache)


@pytest.mark.parametrize("decode", ["contiguous", "paged"])
@pytest.mark.parametrize("part", [in_place, its_forward])
def test_what_ran_before_it_was_attached_knows_of_no_hooks(part: Callable[[Any], None], decode: str) -> None:
    """Torch looks for hooks only while it traces. The tokens are right; hits come once it traces again."""
    model, ids = tiny(), prompt(40)
    expected = greedy(twin(model), ids, 3)
    part(model)
    same(greedy(model, ids, 3), expected)
    cache = make_cache(model, decode=decode)
    with cache.attached(model):
        for _ in range(2):
            same(greedy(model, ids, 3), expected)
        assert cache.stats.hit_tokens == 0
        torch.compiler.reset()
        for _ in range(2):
            same(greedy(model, ids, 3), expected)
    assert cache.stats.hit_tokens == 39
    # And the hooks that were traced do nothing when they are off the model.
    same(greedy(model, ids, 3), expected)
    assert cache.stats.requests == 2
    gc.collect()
    books(cache)


def test_a_compiled_model_object_is_refused() -> None:
    with pytest.raises(errors.UnsupportedModelError, match="pass the original model"):
        make_cache(torch.compile(tiny(), backend=BACKEND))
