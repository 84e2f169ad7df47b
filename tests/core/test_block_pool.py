"""The pool against a plain counter of references."""

from __future__ import annotations

import pickle
from collections import Counter

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from radixkv.core import BlockPool, CacheCorruptionError, InvalidRequestError, OutOfBlocksError, RadixTree


class PoolMachine(RuleBasedStateMachine):
    """Any order of calls leaves the pool equal to a counter of references; a refused call changes nothing."""

    @initialize(num_blocks=st.integers(1, 12))
    def start(self, num_blocks):
        self.pool, self.refs, self.num_blocks = BlockPool(num_blocks), Counter(), num_blocks

    @rule(n=st.integers(0, 6))
    def allocate(self, n):
        free = self.num_blocks - len(+self.refs)
        if n > free:
            with pytest.raises(OutOfBlocksError) as error:
                self.pool.allocate(n)
            assert (error.value.needed, error.value.free, error.value.evictable) == (n, free, 0)
            return
        ids = self.pool.allocate(n)
        assert ids.dtype == np.int32
        assert ids.tolist() == sorted(set(ids.tolist()))
        assert not set(ids.tolist()) & set(+self.refs)
        self.refs.update(ids.tolist())

    @rule(data=st.data(), form=st.sampled_from([list, np.array, tuple]))
    def retain(self, data, form):
        ids = data.draw(st.lists(st.integers(0, self.num_blocks - 1), max_size=6))
        if all(self.refs[i] for i in ids):
            self.pool.retain(form(ids) if ids else ids)
            self.refs.update(ids)
        else:
            with pytest.raises(InvalidRequestError):
                self.pool.retain(form(ids))

    @rule(data=st.data())
    def release_some(self, data):
        """Repeated ids count once each; more than are held are refused."""
        ids = data.draw(st.lists(st.integers(0, self.num_blocks - 1), max_size=6))
        if all(self.refs[i] >= n for i, n in Counter(ids).items()):
            self.pool.release(ids)
            self.refs.subtract(ids)
        else:
            with pytest.raises(InvalidRequestError):
                self.pool.release(ids)

    @precondition(lambda self: +self.refs)
    @rule(data=st.data())
    def release_all_of_one(self, data):
        block = data.draw(st.sampled_from(sorted(+self.refs)))
        self.pool.release([block] * self.refs[block])
        self.refs[block] = 0

    @rule(wrong=st.sampled_from([-1, -(2**31), 2**31, 99, 1.0, True, "1", None, [[1]], [0.5], [None]]))
    def refuse_what_is_no_block(self, wrong):
        for call in (self.pool.retain, self.pool.release):
            with pytest.raises(InvalidRequestError):
                call(wrong)

    @invariant()
    def agrees(self):
        if hasattr(self, "pool"):
            self.pool.check()
            assert self.pool.refcounts.tolist() == [self.refs[i] for i in range(self.num_blocks)]
            assert [self.pool.refcount(i) for i in range(self.num_blocks)] == self.pool.refcounts.tolist()
            assert self.pool.num_held == len(+self.refs)
            assert self.pool.num_free == self.num_blocks - len(+self.refs)


TestPoolMachine = PoolMachine.TestCase


def test_new_blocks_are_consecutive():
    pool = BlockPool(100)
    assert pool.allocate(30).tolist() == list(range(30))
    assert pool.allocate(70).tolist() == list(range(30, 100))


def test_what_comes_back_goes_out_in_the_same_order():
    pool = BlockPool(1000)
    first = pool.allocate(600)
    pool.allocate(100)
    pool.release(first)
    assert (pool.allocate(600) == first).all()


def test_ids_become_consecutive_again():
    """However scattered blocks came back, once enough of them did, runs are handed out again."""
    pool = BlockPool(4096)
    rng = np.random.default_rng(0)
    for _ in range(4):
        pool.release(rng.permutation(pool.allocate(4096)))
        first = pool.allocate(64)
        assert (np.diff(first) == 1).all()
        pool.release(first)


def test_refcounts_cannot_be_written():
    pool = BlockPool(4)
    with pytest.raises(ValueError, match="read-only"):
        pool.refcounts[0] = 1


@pytest.mark.parametrize("wrong", [0, -1, 2**31, True, 1.5, "8", None])
def test_sizes_that_make_no_sense(wrong):
    with pytest.raises(InvalidRequestError, match="num_blocks"):
        BlockPool(wrong)


def test_negative_allocation():
    with pytest.raises(InvalidRequestError):
        BlockPool(4).allocate(-1)


def test_refcount_of_an_unknown_block():
    for block in (-1, 4):
        with pytest.raises(InvalidRequestError):
            BlockPool(4).refcount(block)


def test_release_of_long_runs_and_of_long_shuffles():
    pool = BlockPool(3000)
    ids = pool.allocate(3000)
    pool.retain(ids)
    pool.release(np.random.default_rng(1).permutation(ids))
    assert pool.num_free == 0
    with pytest.raises(InvalidRequestError, match="block 7 is released"):
        pool.release(np.append(ids, [7]))
    assert (pool.refcounts == 1).all()
    pool.release(np.arange(3000, dtype=np.int64))
    assert pool.num_free == 3000
    pool.check()


def test_the_trees_reference_cannot_be_released_by_others():
    pool = BlockPool(4)
    tree = RadixTree(pool, 2)
    ids = pool.allocate(2)
    tree.insert([1, 2, 3, 4], ids)
    pool.release(ids)
    with pytest.raises(InvalidRequestError, match="beside the one of the tree"):
        pool.release(ids)
    tree.check()
    assert tree.num_evictable_blocks == 2


def test_checks_run_after_every_change_when_asked(monkeypatch):
    monkeypatch.setenv("RADIXKV_CHECK", "1")
    pool = BlockPool(4)
    monkeypatch.delenv("RADIXKV_CHECK")  # read once
    pool.allocate(1)
    pool._stack[0] = pool._stack[1]
    with pytest.raises(CacheCorruptionError):
        pool.allocate(1)
    quiet = BlockPool(4)
    quiet._stack[0] = quiet._stack[1]
    quiet.allocate(1)


@pytest.mark.parametrize(
    "damage",
    [
        lambda p: p._stack.__setitem__(0, p._stack[1]),
        lambda p: p._stack.__setitem__(0, 99),
        lambda p: p._stack.__setitem__(0, -1),
        lambda p: p._state.__setitem__(0, 0),
        lambda p: p._state.__setitem__(0, -2),
        lambda p: p._state.__setitem__(7, 2),
        lambda p: p._state.__setitem__(7, 1),
        lambda p: setattr(p, "_num_free", p._num_free - 1),
        lambda p: setattr(p, "_num_cached", 1),
        lambda p: setattr(p, "_num_idle", 0),
        lambda p: setattr(p, "_idle_gaps", 5),
        lambda p: p._gaps.__setitem__(0, 1),
        lambda p: p._watched.__setitem__(0, True),
        lambda p: setattr(p, "_num_watched", 1),
    ],
)
def test_the_checker_finds_damage(damage):
    pool = BlockPool(8)
    ids = pool.allocate(4)
    tree = RadixTree(pool, 2)
    tree.insert([1, 2, 3], ids[2:])
    pool.release(ids[2:])
    pool.check()
    damage(pool)
    with pytest.raises(CacheCorruptionError):
        pool.check()


def test_one_tree_for_one_pool():
    pool = BlockPool(4)
    tree = RadixTree(pool, 2)
    with pytest.raises(InvalidRequestError, match="has a tree"):
        RadixTree(pool, 2)
    del tree
    tree = RadixTree(pool, 2)  # nothing was cached, so a new one may have it
    ids = pool.allocate(1)
    tree.insert([1, 2], ids)
    del tree
    with pytest.raises(InvalidRequestError, match="a tree that is gone"):
        RadixTree(pool, 2)


def test_out_of_blocks_says_what_there_was_and_pickles():
    error = pickle.loads(pickle.dumps(OutOfBlocksError(5, 1, 2)))
    assert (error.needed, error.free, error.evictable) == (5, 1, 2)
    assert str(error) == "need 5 blocks, have 1 free and 2 evictable: raise num_blocks or run fewer requests"
