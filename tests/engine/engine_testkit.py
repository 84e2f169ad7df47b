"""Helpers for tests of the engine. What is right always comes from a twin model that no engine ever touched."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from hf_testkit import greedy, prompt, tiny, twin

import radixkv
from radixkv import Engine, SamplingParams

__all__ = [
    "alone",
    "balanced",
    "drained",
    "family",
    "greedy",
    "make_engine",
    "params",
    "prompt",
    "tiny",
    "twin",
]


def make_engine(model: Any, **kwargs: Any) -> Engine:
    """An engine with a pool of 256 blocks of 4 tokens unless told otherwise."""
    if "cache" not in kwargs:
        kwargs.setdefault("num_blocks", 256)
        kwargs.setdefault("block_size", 4)
    return Engine(model, **kwargs)


def params(length: int = 8, **kwargs: Any) -> SamplingParams:
    return SamplingParams(max_new_tokens=length, **kwargs)


def alone(model: Any, ids: Any, n: int = 8, **kwargs: Any) -> list[int]:
    """The new greedy tokens of plain `generate()` on one prompt."""
    ids = torch.as_tensor(ids).reshape(1, -1)
    return greedy(model, ids, n, **kwargs)[0, ids.shape[1] :].tolist()


def family(shared: int, *own: int, seed: int = 0) -> list[list[int]]:
    """Prompts that share their first `shared` tokens and have `own` tokens of their own each."""
    head = prompt(shared, seed)[0].tolist() if shared else []
    return [head + prompt(size, seed + 100 + i)[0].tolist() for i, size in enumerate(own)]


def balanced(engine: Engine) -> None:
    """No invariant is broken."""
    engine.check()
    cache = engine.cache
    assert cache.num_free_blocks + cache.pool.num_held == cache.num_blocks


def drained(engine: Engine) -> None:
    """Nothing runs, and every block is free or cached and evictable; after clearing the pool is as new."""
    balanced(engine)
    assert not engine.is_at_work
    if engine.has_unfinished:  # outputs that nobody has read
        assert engine.step()
    assert not engine.has_unfinished
    cache = engine.cache
    assert cache.num_free_blocks + cache.num_cached_blocks == cache.num_blocks
    assert cache.num_evictable_blocks == cache.num_cached_blocks, "a block is still pinned"
    stats = engine.stats
    assert (stats.running, stats.waiting, stats.swapped) == (0, 0, 0)


def tokens_of(completions: Sequence[radixkv.Completion]) -> list[list[int]]:
    return [completion.token_ids for completion in completions]
