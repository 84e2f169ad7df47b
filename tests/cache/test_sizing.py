"""How large the pool becomes, and what is refused when a cache is made."""

from __future__ import annotations

from typing import Any

import pytest
from hf_testkit import books, greedy, needs_cache, prompt, same, tiny, twin

import radixkv
from radixkv import errors

pytestmark = [needs_cache, pytest.mark.filterwarnings("default")]

# tiny("llama_gqa"): 2 layers, K and V, 2 heads of 8 numbers, 4 bytes each.
BYTES_PER_TOKEN = 2 * 2 * 2 * 8 * 4


def make(model: Any = None, **kwargs: Any) -> Any:
    return radixkv.PrefixCache.for_model(tiny() if model is None else model, **kwargs)


@pytest.mark.parametrize("block_size", [1, 5, 16, 64])
def test_by_blocks(block_size: int) -> None:
    cache = make(num_blocks=7, block_size=block_size)
    assert (cache.num_blocks, cache.num_free_blocks, cache.num_cached_blocks) == (7, 7, 0)
    assert cache.block_size == block_size
    assert cache.memory_bytes == 7 * block_size * BYTES_PER_TOKEN
    books(cache)


@pytest.mark.parametrize(("tokens", "blocks"), [(1, 1), (16, 1), (17, 2), (160, 10)])
def test_by_tokens(tokens: int, blocks: int) -> None:
    """Room for at least so many tokens."""
    cache = make(num_tokens=tokens)
    assert cache.block_size == 16, "the default"
    assert cache.num_blocks == blocks


@pytest.mark.parametrize(
    ("memory", "size"),
    [("64KiB", 65536), (" 1 MiB ", 1 << 20), ("1mib", 1 << 20), (100_000, 100_000), ("1MB", 10**6)],
)
def test_by_memory(memory: Any, size: int) -> None:
    cache = make(memory=memory)
    assert cache.num_blocks == size // (16 * BYTES_PER_TOKEN)
    assert cache.memory_bytes <= size


def test_by_a_small_fraction_of_free_memory() -> None:
    import psutil

    free = psutil.virtual_memory().available
    cache = make(memory=0.001)
    assert free * 0.0002 < cache.memory_bytes < free * 0.005


@pytest.mark.parametrize(
    "memory",
    [
        "1PiB",
        "lots",
        "",
        "GiB",
        "-1GiB",
        "2 GiB of it",
        0,
        -5,
        0.0,
        -0.5,
        1.5,
        float("nan"),
        "0",
        1 << 50,
        True,
        [1],
    ],
)
def test_memory_that_cannot_be_had(memory: Any) -> None:
    with pytest.raises(errors.RadixKVError) as caught:
        make(memory=memory)
    assert len(str(caught.value)) > 15


def test_less_memory_than_one_block() -> None:
    with pytest.raises(errors.RadixKVError):
        make(memory=100)


@pytest.mark.parametrize(
    "wrong",
    [
        dict(block_size=0),
        dict(block_size=-1),
        dict(block_size=2.5),
        dict(block_size="16"),
        dict(block_size=None),
        dict(num_blocks=0),
        dict(num_blocks=-3),
        dict(num_blocks=1.5),
        dict(num_blocks="many"),
        dict(num_tokens=0),
        dict(num_tokens=-1),
        dict(num_blocks=1 << 45),
        dict(num_blocks=4, memory="1MiB"),
        dict(num_blocks=4, num_tokens=64),
        dict(num_blocks=4, policy="the best"),
    ],
    ids=str,
)
def test_wrong_sizes(wrong: dict[str, Any]) -> None:
    arguments = {**({} if wrong.keys() & {"num_blocks", "num_tokens"} else {"num_blocks": 8}), **wrong}
    with pytest.raises(errors.RadixKVError) as caught:
        make(**arguments)
    assert len(str(caught.value)) > 15


def test_errors_are_importable_by_their_public_name() -> None:
    from radixkv.errors import (  # noqa: F401
        CacheCorruptionError,
        InvalidRequestError,
        OutOfBlocksError,
        RadixKVError,
        UnsupportedModelError,
    )

    assert issubclass(InvalidRequestError, ValueError)
    assert RadixKVError is errors.RadixKVError


@pytest.mark.parametrize("num_blocks", [1, 2, 3])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_a_prompt_longer_than_the_pool(num_blocks: int, block_size: int) -> None:
    model = tiny()
    reference = twin(model)
    cache = make(model, num_blocks=num_blocks, block_size=block_size)
    ids = prompt(40)
    for _ in range(2):
        with cache.attached(model):
            same(greedy(model, ids), greedy(reference, ids))
        books(cache)


def test_a_model_on_the_meta_device() -> None:
    with pytest.raises(errors.RadixKVError):
        make(tiny().to("meta"), num_blocks=4)


def test_a_model_moved_away_after_the_cache_was_made() -> None:
    model = tiny()
    cache = make(model, num_blocks=4)
    model.to("meta")
    with pytest.raises(errors.RadixKVError):
        cache.attach(model)
    books(cache)


def test_another_model_than_the_cache_was_made_for() -> None:
    cache = make(num_blocks=32)
    for other in (
        tiny("gpt2"),
        tiny("gemma3"),
        tiny("llama_gqa", num_hidden_layers=3),
        tiny("llama_gqa", head_dim=16),
    ):
        with pytest.raises(errors.RadixKVError):
            cache.attach(other)
        same(greedy(other, prompt(9)), greedy(twin(other), prompt(9)))
    books(cache)


def test_another_model_of_the_same_shape() -> None:
    """One clear error, or the right result: never the first model's KV."""
    first, second = tiny(seed=1), tiny(seed=2)
    cache = make(first, num_blocks=32)
    with cache.attached(first):
        greedy(first, prompt(20))
    try:
        with cache.attached(second):
            same(greedy(second, prompt(20)), greedy(twin(second), prompt(20)))
    except errors.RadixKVError as error:
        message = str(error)
        assert len(message) > 15
    with cache.attached(first):
        same(greedy(first, prompt(20)), greedy(twin(first), prompt(20)))
    books(cache)


def test_the_pool_is_not_part_of_the_model() -> None:
    model = tiny()
    before = set(model.state_dict())
    cache = make(model, num_blocks=4)
    with cache.attached(model):
        assert set(model.state_dict()) == before
        assert not any(name.startswith("radix") for name, _ in model.named_modules())
