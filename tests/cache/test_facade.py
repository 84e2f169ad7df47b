"""PrefixCache: statistics, looking, pinning, namespaces, clearing, and what it says to bad input."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hf_testkit import (
    books,
    cache_keyword,
    expect_hits,
    expect_totals,
    greedy,
    join,
    make_cache,
    needs_cache,
    pad_left,
    prompt,
    right_or_clear_error,
    rows,
    same,
    tiny,
    twin,
)

import radixkv
from radixkv import errors

pytestmark = [needs_cache, pytest.mark.filterwarnings("default")]

IDS = prompt(21)


@pytest.fixture
def model() -> Any:
    return tiny()


@pytest.fixture
def cache(model: Any) -> Any:
    """With the 21 prompt tokens and 7 of the answer in it."""
    cache = make_cache(model)
    with cache.attached(model):
        greedy(model, IDS)
    return cache


def generate(cache: Any, model: Any, ids: torch.Tensor, n: int = 4, **kwargs: Any) -> torch.Tensor:
    with cache.attached(model, **kwargs):
        return greedy(model, ids, n)


# ---------------------------------------------------------------------------------------------- statistics


def test_a_new_cache_has_zeros(model: Any) -> None:
    cache = make_cache(model)
    stats = cache.stats
    assert (stats.requests, stats.prompt_tokens, stats.hit_tokens, stats.computed_tokens) == (0, 0, 0, 0)
    assert stats.hit_rate == 0.0
    assert not any(stats.bypasses.values())
    assert stats.evicted_blocks == stats.cow_copies == 0
    assert stats.prefill_seconds_saved == 0
    assert not cache.last_requests
    books(cache)


def test_hit_and_computed_are_counted_once(cache: Any, model: Any) -> None:
    """FC-34 and FC-35."""
    assert (cache.stats.requests, cache.stats.prompt_tokens, cache.stats.hit_tokens) == (1, 21, 0)
    generate(cache, model, IDS)
    assert (cache.stats.requests, cache.stats.prompt_tokens, cache.stats.hit_tokens) == (2, 42, 20)
    generate(cache, model, join(IDS, prompt(9, seed=1)))
    stats = cache.stats
    assert stats.requests == 3
    assert stats.prompt_tokens == 42 + 30
    assert stats.hit_tokens == 20 + rows(cache)[0][1]
    assert stats.computed_tokens == stats.prompt_tokens - stats.hit_tokens
    with cache.attached(model):
        model.generate(**pad_left([IDS, IDS[:, :4]]), max_new_tokens=3, do_sample=False)
    assert cache.stats.requests == 5
    assert cache.stats.prompt_tokens == stats.prompt_tokens + 25, "padding is not counted"
    assert cache.stats.hit_tokens == stats.hit_tokens + 20 + 3
    expect_totals(cache)


def test_sessions_are_counted_too(cache: Any, model: Any) -> None:
    cache.reset_stats()
    for _ in range(2):
        with cache.session(IDS) as past, torch.no_grad():
            model(IDS[:, past.num_cached_tokens :], **{cache_keyword(model): past})
    assert (cache.stats.requests, cache.stats.prompt_tokens, cache.stats.hit_tokens) == (2, 42, 40)
    expect_totals(cache)


def test_stats_are_a_snapshot_and_can_be_reset(cache: Any, model: Any) -> None:
    before = cache.stats
    generate(cache, model, IDS)
    assert before.requests == 1
    assert cache.stats.requests == 2
    cached = cache.num_cached_tokens
    cache.reset_stats()
    stats = cache.stats
    assert (stats.requests, stats.prompt_tokens, stats.hit_tokens, stats.evicted_blocks) == (0, 0, 0, 0)
    assert cache.num_cached_tokens == cached, "the content stays"
    generate(cache, model, IDS)
    assert cache.stats.hit_rate == pytest.approx(20 / 21)
    assert cache.stats.prefill_seconds_saved >= 0
    assert pickle.loads(pickle.dumps(cache.stats)) == cache.stats


def test_evictions_and_copies_are_counted(model: Any) -> None:
    cache = make_cache(model, num_blocks=8, block_size=4)
    for i in range(4):
        generate(cache, model, prompt(20, seed=i))
        books(cache)
    assert cache.stats.evicted_blocks > 0
    cache.clear()
    cache.reset_stats()
    generate(cache, model, prompt(10), 1)
    generate(cache, model, join(prompt(10)[:, :6], prompt(5, seed=1)), 1)
    books(cache)


# ------------------------------------------------------------------------------------------------- looking


def test_match_length_in_every_form_of_tokens(cache: Any) -> None:
    tokens = IDS[0].tolist()
    forms = [
        tokens,
        tuple(tokens),
        np.array(tokens),
        np.array(tokens, dtype=np.int32),
        np.array(tokens, dtype=np.uint8),
        IDS[0],
        IDS[0].to(torch.int32),
        IDS[0].to(torch.uint8),
        torch.stack([IDS[0], IDS[0]], 1)[:, 0],
    ]
    for form in forms:
        assert cache.match_length(form) == 21
    assert cache.match_length(range(3, 9)) == 0
    assert cache.match_length([*tokens[:10], 1, 1]) == 10


def test_match_length_changes_nothing(model: Any) -> None:
    """Not even the order of eviction: A is looked at, and is still the one to go."""
    cache = make_cache(model, num_blocks=6, block_size=4)
    a, b, c = (prompt(9, seed=i)[:, :8] for i in (1, 2, 3))
    assert len({row[0, 0].item() for row in (a, b, c)}) == 3
    generate(cache, model, a, 1)
    generate(cache, model, b, 1)
    before = cache.stats
    assert cache.match_length(a[0]) == 8
    assert cache.stats == before
    generate(cache, model, c, 9)  # needs four blocks, two are free
    assert cache.match_length(a[0]) < 8
    assert cache.match_length(b[0]) == 8
    books(cache)


def test_a_hit_counts_as_use(model: Any) -> None:
    """FC-26 through the plug-in."""
    cache = make_cache(model, num_blocks=6, block_size=4)
    a, b, c = (prompt(9, seed=i)[:, :8] for i in (1, 2, 3))
    generate(cache, model, a, 1)
    generate(cache, model, b, 1)
    generate(cache, model, a, 1)
    generate(cache, model, c, 9)
    assert cache.match_length(a[0]) == 8
    assert cache.match_length(b[0]) < 8
    books(cache)


BAD_TOKENS = {
    "floats": [1.5, 2.0],
    "float array": np.array([1.0, 2.0]),
    "float tensor": torch.tensor([1.0, 2.0]),
    "bools": [True, False],
    "bool tensor": torch.tensor([True, False]),
    "negative": [3, -1],
    "negative tensor": torch.tensor([3, -1]),
    "two-dimensional": np.array([[1, 2], [3, 4]]),
    "two-dimensional tensor": torch.tensor([[1, 2], [3, 4]]),
    "nested": [[1, 2], [3]],
    "text": "hello",
    "bytes of text": ["a", "b"],
    "none": None,
    "a number": 7,
    "a zero-dimensional tensor": torch.tensor(7),
    "none inside": [1, None],
    "too large": [1 << 70],
}


@pytest.mark.parametrize("what", BAD_TOKENS)
def test_bad_tokens(cache: Any, what: str) -> None:
    tokens = BAD_TOKENS[what]
    for call in (cache.match_length, cache.pin):
        with pytest.raises(errors.InvalidRequestError) as caught:
            call(tokens)
        assert len(str(caught.value)) > 10
    books(cache)


@pytest.mark.parametrize(
    "what", [name for name in BAD_TOKENS if name not in ("two-dimensional", "two-dimensional tensor")]
)
def test_bad_tokens_for_a_session(cache: Any, what: str) -> None:
    before = cache.stats.requests

    def use() -> None:
        with cache.session(BAD_TOKENS[what]):
            pass

    with pytest.raises(errors.InvalidRequestError):
        use()
    assert cache.stats.requests == before
    books(cache)


@pytest.mark.parametrize(
    "empty", [[], torch.zeros(1, 0, dtype=torch.long), torch.zeros(0, 5, dtype=torch.long), np.zeros(0, int)]
)
def test_empty_prompts(cache: Any, empty: Any) -> None:
    """FC-16: an error of its own; the cache goes on."""

    def use() -> None:
        with cache.session(empty):
            pass

    with pytest.raises(errors.InvalidRequestError):
        use()
    if getattr(empty, "ndim", 1) == 1:
        right_or_clear_error(lambda: cache.match_length(empty), lambda n: same(n, 0))
    books(cache)
    assert cache.match_length(IDS[0]) == 21


def test_an_empty_prompt_into_generate_fails_or_works_as_without(cache: Any, model: Any) -> None:
    empty = torch.zeros(1, 0, dtype=torch.long)

    def outcome(m: Any) -> Any:
        try:
            return m.generate(empty, max_new_tokens=3, do_sample=False).tolist()
        except Exception as error:
            return type(error).__name__

    expected = outcome(twin(model))
    with cache.attached(model):
        assert outcome(model) == expected
    books(cache)


@pytest.mark.parametrize("token", [64, 1000, 1 << 40])
def test_tokens_outside_of_the_vocabulary(cache: Any, model: Any, token: int) -> None:
    """The model's own error, from inside a forward; nothing is pinned, and nothing wrong is stored."""
    wrong = join(IDS[:, :10], torch.tensor([[token]]), IDS[:, 10:])
    with pytest.raises(Exception), cache.attached(model):  # noqa: B017
        greedy(model, wrong)
    books(cache)
    assert cache.match_length(wrong[0]) == 10
    same(generate(cache, model, IDS), greedy(twin(model), IDS, 4))
    expect_hits(cache, 20)


# ------------------------------------------------------------------------------------------------- pinning


def test_a_pinned_prefix_stays(model: Any) -> None:
    cache = make_cache(model, num_blocks=12, block_size=4)
    kept = prompt(16)
    generate(cache, model, kept, 1)
    lease = cache.pin(kept[0])
    assert lease.num_tokens == 16
    cache.check()
    assert cache.num_evictable_blocks < cache.num_cached_blocks
    for i in range(8):
        same(generate(cache, model, prompt(25, seed=i + 1)), greedy(twin(model), prompt(25, seed=i + 1), 4))
        cache.check()
    assert cache.match_length(kept[0]) == 16
    lease.release()
    books(cache)
    for i in range(8):
        generate(cache, model, prompt(45, seed=i + 1))
    assert cache.match_length(kept[0]) < 16
    books(cache)


def test_pins_count_and_are_released_once(cache: Any) -> None:
    one, two = cache.pin(IDS[0]), cache.pin(IDS[0, :9])
    one.release()
    assert cache.num_evictable_blocks < cache.num_cached_blocks
    with pytest.raises(errors.InvalidRequestError):
        one.release()
    assert cache.num_evictable_blocks < cache.num_cached_blocks, "the other lease still holds"
    two.release()
    books(cache)
    with cache.pin(IDS[0]) as lease:
        assert lease.num_tokens == 21
        cache.check()
    books(cache)


def test_pin_what_is_not_there(cache: Any) -> None:
    with cache.pin([3, 1, 4, 1, 5]) as lease:
        assert lease.num_tokens == 0
    with cache.pin([*IDS[0, :6].tolist(), 1, 1]) as lease:
        assert lease.num_tokens <= 6
    books(cache)


def test_a_lease_that_is_dropped(cache: Any) -> None:
    """Forgetting a lease must not unpin anything behind the back of others, nor break the books."""
    import gc

    lease = cache.pin(IDS[0])
    del lease
    gc.collect()
    cache.check()
    assert cache.match_length(IDS[0]) == 21


# ---------------------------------------------------------------------------------------------- namespaces


def test_namespaces_never_mix(model: Any) -> None:
    """FC-10: same tokens, other tenant; the exact repeat hits in full."""
    cache = make_cache(model)
    names = [
        None,
        "a",
        b"a",
        ("lora", "x"),
        ("salt", "x"),
        ("a", "bc"),
        ("ab", "c"),
        (("a",), "b"),
        ("a", ("b",)),
        "",
        (),
    ]
    expected = greedy(twin(model), IDS, 4)
    for name in names:
        same(generate(cache, model, IDS, namespace=name), expected)
        expect_hits(cache, 0)
    for name in names:
        same(generate(cache, model, IDS, namespace=name), expected)
        expect_hits(cache, 20)
        assert cache.match_length(IDS[0], namespace=name) == 21
    assert cache.match_length(IDS[0]) == 21
    assert cache.match_length(IDS[0], namespace="elsewhere") == 0
    books(cache)


def test_no_namespace_has_two_spellings(cache: Any) -> None:
    assert cache.match_length(IDS[0], namespace=b"") == cache.match_length(IDS[0], namespace=None) == 21


def test_sessions_and_pins_keep_to_their_namespace(cache: Any, model: Any) -> None:
    with cache.session(IDS, namespace="tenant") as past, torch.no_grad():
        assert past.num_cached_tokens == 0
        model(IDS, **{cache_keyword(model): past})
    with cache.session(IDS, namespace="tenant") as past:
        assert past.num_cached_tokens == 20
    with cache.pin(IDS[0], namespace="other") as lease:
        assert lease.num_tokens == 0
    with cache.pin(IDS[0], namespace="tenant") as lease:
        assert lease.num_tokens == 21
    books(cache)


@pytest.mark.parametrize("name", [3, 1.5, ["a"], ("a", 3), {"a": "b"}, {"a"}], ids=str)
def test_names_of_the_wrong_kind(cache: Any, model: Any, name: Any) -> None:
    for call in (
        lambda: cache.match_length(IDS[0], namespace=name),
        lambda: cache.pin(IDS[0], namespace=name),
        lambda: cache.attach(model, namespace=name),
        lambda: cache.session(IDS, namespace=name).__enter__(),
        lambda: cache.clear(namespace=name),
    ):
        with pytest.raises(errors.InvalidRequestError):
            call()
    books(cache)
    same(generate(cache, model, IDS), greedy(twin(model), IDS, 4))


# ------------------------------------------------------------------------------------------------ clearing


def test_clear(cache: Any, model: Any) -> None:
    generate(cache, model, IDS, namespace="tenant")
    cache.clear(namespace="tenant")
    assert cache.match_length(IDS[0], namespace="tenant") == 0
    assert cache.match_length(IDS[0]) == 21
    books(cache)
    generate(cache, model, IDS, namespace="tenant")
    cache.clear()
    assert cache.num_cached_blocks == cache.num_cached_tokens == 0
    assert cache.num_free_blocks == cache.num_blocks
    assert cache.match_length(IDS[0]) == cache.match_length(IDS[0], namespace="tenant") == 0
    cache.clear()
    same(generate(cache, model, IDS), greedy(twin(model), IDS, 4))
    expect_hits(cache, 0)


def test_clear_while_something_is_held(cache: Any, model: Any) -> None:
    """FC-40: it fails and changes nothing; afterwards it works."""
    generate(cache, model, prompt(30, seed=7))
    before = cache.num_cached_blocks
    with cache.pin(IDS[0, :8]):
        with pytest.raises(errors.InvalidRequestError):
            cache.clear()
        assert cache.num_cached_blocks == before
        assert cache.match_length(IDS[0]) == 21
        assert cache.match_length(prompt(30, seed=7)[0]) == 30
        cache.check()
    cache.clear()
    assert cache.num_free_blocks == cache.num_blocks
    books(cache)


def test_clear_during_a_session(cache: Any, model: Any) -> None:
    """Refused, or the session goes on rightly with what it has."""
    ids = join(IDS, prompt(5, seed=2))
    with torch.no_grad():
        expected = twin(model)(ids).logits[:, -1].argmax(-1)
    with cache.session(ids) as past, torch.no_grad():
        right_or_clear_error(cache.clear, lambda _: None)
        cache.check()
        got = model(ids[:, past.num_cached_tokens :], **{cache_keyword(model): past}).logits[:, -1].argmax(-1)
    same(got, expected)
    books(cache)
    same(generate(cache, model, ids), greedy(twin(model), ids, 4))


# ----------------------------------------------------------------------------------- attach and detach, twice


def test_attach_twice(cache: Any, model: Any) -> None:
    cache.attach(model)
    with pytest.raises(errors.InvalidRequestError):
        cache.attach(model)
    with pytest.raises(errors.InvalidRequestError):
        cache.attached(model).__enter__()
    same(greedy(model, IDS, 4), greedy(twin(model), IDS, 4))
    expect_hits(cache, 20)
    cache.detach()
    right_or_clear_error(cache.detach, lambda _: None)
    same(generate(cache, model, IDS), greedy(twin(model), IDS, 4))
    books(cache)


def test_two_caches_on_one_model(cache: Any, model: Any) -> None:
    other = make_cache(model)

    def both() -> torch.Tensor:
        with cache.attached(model), other.attached(model):
            return greedy(model, IDS, 4)

    for _ in range(2):
        right_or_clear_error(both, lambda got: same(got, greedy(twin(model), IDS, 4)))
    same(generate(cache, model, IDS), greedy(twin(model), IDS, 4))
    same(generate(other, model, IDS), greedy(twin(model), IDS, 4))
    books(cache)
    books(other)


def test_detach_without_attach(cache: Any) -> None:
    right_or_clear_error(cache.detach, lambda _: None)
    books(cache)


def test_detached_in_the_middle_of_a_with(cache: Any, model: Any) -> None:
    with cache.attached(model):
        cache.detach()
        same(greedy(model, IDS, 4), greedy(twin(model), IDS, 4))
    books(cache)


# ----------------------------------------------------------------------------------------------- the checker


def test_the_check_finds_damage(cache: Any) -> None:
    """A checker that never complains would make this whole suite worthless."""
    own = list(vars(cache).values())
    pools = [value for value in own if isinstance(value, radixkv.BlockPool)]
    pools += [value.pool for value in own if isinstance(value, radixkv.RadixTree)]
    pool = pools[0]
    stolen = pool.allocate(1)
    try:
        with pytest.raises((errors.CacheCorruptionError, AssertionError)):
            books(cache)
    finally:
        pool.release(stolen)
    books(cache)
