import gc
import math
import weakref

import numpy as np
import pytest

from radixkv import BlockPool, RadixTree, Retention
from radixkv.core.node import Node
from radixkv.core.policies import RetentionPolicy
from radixkv.errors import InvalidRequestError

# Python does not even write them.
HUGE = pytest.param(10**5000, id="10**5000")
MINUS_HUGE = pytest.param(-(10**5000), id="-10**5000")


@pytest.mark.parametrize(
    "priority",
    [2**63, -(2**63), 2**64, HUGE, MINUS_HUGE, True, 1.0, "1", None, np.float64(1), np.bool_(1)],
)
def test_a_priority_is_an_integer_that_fits(priority):
    with pytest.raises(InvalidRequestError, match="64 bits"):
        Retention(priority)


@pytest.mark.parametrize("ttl", [0, -1, math.nan, "5", [1], True, 10**400, HUGE, np.float32(0)])
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


def store(tree, tokens, retention=None):
    tree.pool.release(tree.insert(tokens, tree.allocate(len(tokens)), retention=retention).blocks)


def test_a_clock_that_goes_back_takes_nothing_back():
    time = [100.0]
    tree = RadixTree(BlockPool(3), 1, RetentionPolicy(3, clock=lambda: time[0]))
    store(tree, [1], Retention(5, ttl=10))
    store(tree, [2])
    store(tree, [3], Retention(7, ttl=50))
    time[0] = 120.0
    tree.evict(0)
    time[0] = 50.0
    tree.evict(0)
    tree.check()
    tree.match([2], retention=Retention(1, ttl=10)).release()  # until 130
    tree.evict(1)
    tree.check()
    assert [tree.match_length([n]) for n in (1, 2, 3)] == [0, 1, 1]
    store(tree, [4])
    time[0] = 131.0
    tree.evict(1)
    assert [tree.match_length([n]) for n in (2, 3, 4)] == [0, 1, 1]


def test_leaves_that_are_gone_are_not_kept_until_they_expire(monkeypatch):
    """They have all their tokens with them."""
    living = weakref.WeakSet()

    class Traced(Node):
        __slots__ = ("__weakref__",)

        def __init__(self, *args):
            super().__init__(*args)
            living.add(self)

    monkeypatch.setattr("radixkv.core.linked_nodes.Node", Traced)
    tree = RadixTree(BlockPool(8), 1, "priority")
    for number in range(0, 4000, 4):
        request = list(range(number, number + 4))
        tree.match(request, retention=Retention(1, ttl=3600)).release()
        store(tree, request, Retention(1, ttl=3600))
    gc.collect()
    assert 0 < len(living) < 40
    tree.check()
