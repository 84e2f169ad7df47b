"""Priorities with a time to live, from the request down to the blocks."""

from __future__ import annotations

import pytest
from engine_testkit import alone, drained, make_engine, params, prompt, tiny, twin

from radixkv import PrefixCache, Retention
from radixkv.errors import InvalidRequestError


def test_what_a_request_wants_kept_outlasts_what_came_later() -> None:
    model = tiny("llama_gqa")
    cache = PrefixCache.for_model(model, block_size=4, num_blocks=24, policy="priority")
    engine = make_engine(model, cache=cache)
    kept = prompt(24, 1)[0].tolist()
    assert engine.generate([kept], params(4), retention=Retention(5, ttl=3600))[0].num_cached_tokens == 0
    rid = engine.add_request(prompt(24, 2)[0].tolist(), params(4), retention=Retention(-1))
    while engine.has_unfinished:
        engine.step()
    assert rid is not None
    for _ in engine.stream(prompt(24, 3)[0].tolist(), params(4), retention=Retention(0)):
        pass
    for seed in range(4, 9):
        engine.generate([prompt(24, seed)[0].tolist()], params(4))
    (again,) = engine.generate([kept], params(4))
    assert again.num_cached_tokens == 23
    assert again.token_ids == alone(twin(model), kept, 4)
    assert cache.match_length(prompt(24, 2)[0].tolist()) == 0
    drained(engine)


@pytest.mark.parametrize("call", ["generate", "add_request", "stream"])
def test_a_retention_that_the_policy_ignores_is_refused(call: str) -> None:
    engine = make_engine(tiny("llama_gqa"))
    with pytest.raises(InvalidRequestError, match="priority"):
        getattr(engine, call)(prompt(8)[0].tolist(), params(2), retention=Retention(1))
    drained(engine)
