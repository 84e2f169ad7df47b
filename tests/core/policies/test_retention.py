import math

import numpy as np
import pytest

from radixkv import BlockPool, RadixTree, Retention
from radixkv.errors import InvalidRequestError


@pytest.mark.parametrize(
    "priority", [2**63, -(2**63), 2**64, True, 1.0, "1", None, np.float64(1), np.bool_(1)]
)
def test_a_priority_is_an_integer_that_fits(priority):
    with pytest.raises(InvalidRequestError, match="64 bits"):
        Retention(priority)


@pytest.mark.parametrize("ttl", [0, -1, math.nan, "5", [1], True, 10**400, np.float32(0)])
def test_a_time_to_live_is_seconds(ttl):
    with pytest.raises(InvalidRequestError, match="ttl"):
        Retention(0, ttl)


@pytest.mark.parametrize("priority", [2**63 - 1, 1 - 2**63, np.int8(-3), np.uint64(7)])
@pytest.mark.parametrize("ttl", [None, 5, 0.5, np.float32(0.1), math.inf])
def test_what_is_accepted_is_kept_as_plain_numbers_and_works(priority, ttl):
    retention = Retention(priority, ttl)
    assert type(retention.priority) is int
    assert type(retention.ttl) is (type(None) if ttl is None else float)
    pool = BlockPool(3)
    tree = RadixTree(pool, 2, policy="priority")
    pool.release(tree.insert([1, 2, 3, 4], tree.allocate(2), retention=retention).blocks)
    tree.match([1, 2], retention=retention).release()
    tree.check()
    pool.release(tree.insert([5, 6], tree.allocate(1)).blocks)
    tree.evict(1)
    assert tree.match_length([5, 6]) == (2 if priority < 0 else 0)
