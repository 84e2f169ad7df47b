"""Hits that end inside a block: the matching rows are copied, and counted."""

from __future__ import annotations

import pytest
from hf_testkit import greedy, join, make_cache, prompt, tiny, twin


@pytest.mark.parametrize("shared", [8, 9, 15, 16])
def test_rows_of_a_block_are_copied_and_counted(shared: int) -> None:
    model = tiny()
    reference = twin(model)
    cache = make_cache(model, block_size=8)
    first = prompt(24)
    branch = join(first[:, :shared], (first[:, shared : shared + 1] - 2) % 61 + 3, prompt(7, seed=2))
    with cache.attached(model):
        greedy(model, first, 2)
        assert cache.stats.cow_copies == 0
        assert greedy(model, branch, 4).tolist() == greedy(reference, branch, 4).tolist()
    assert cache.last_requests[0].hit_tokens == shared
    assert cache.stats.cow_copies == (shared % 8 != 0)
    cache.check()
