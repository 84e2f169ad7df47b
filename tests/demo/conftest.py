from __future__ import annotations

import pytest

from radixkv.demo.runner import DemoResult, RequestResult, Run, WorkloadResult


def make_result(changed_token: int | None = None) -> DemoResult:
    """Two workloads; the cache halves time to first token, or changes one token of the last answer."""

    def request(label: str, hit_tokens: int, tokens: list[int], with_tokens: list[int]) -> RequestResult:
        return RequestResult(
            label, 100, hit_tokens, Run(tokens, 0.4, 1.0), Run(with_tokens, 0.2, 0.8), "text"
        )

    last = [1, 2, 3]
    changed = [99 if i == changed_token else token for i, token in enumerate(last)]
    return DemoResult(
        [
            WorkloadResult("few_shot", "Few-shot classification", [request("message 1", 0, [5], [5])]),
            WorkloadResult("chat", "Chat that grows", [request("turn 1", 90, last, changed)]),
        ],
        seconds_with={"lookup": 0.1, "gather": 0.1, "prefill": 0.2, "commit": 0.1, "decode": 1.0},
        seconds_without={"prefill": 0.8, "decode": 1.0},
        cache={
            "block_size": 16,
            "pool_blocks": 64,
            "free_blocks": 60,
            "cached_blocks": 4,
            "cached_tokens": 60,
            "evicted_blocks": 0,
            "cow_copies": 1,
            "memory_bytes": 2**20,
            "bypasses": {},
        },
    )


SETTING = {
    "model": {
        "name": "some model",
        "architecture": "X",
        "parameters": 10**6,
        "dtype": "float32",
        "device": "cpu",
    },
    "threads": 1,
    "max_new_tokens": 8,
    "quick": False,
    "versions": {},
}


@pytest.fixture
def result() -> DemoResult:
    return make_result()


@pytest.fixture
def changed_result() -> DemoResult:
    return make_result(changed_token=1)


@pytest.fixture
def setting() -> dict:
    return SETTING
