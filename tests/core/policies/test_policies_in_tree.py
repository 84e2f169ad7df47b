"""Any order of calls to the tree, with every policy: hits, blocks and all books stay right."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule, run_state_machine_as_test

from radixkv.core import (
    BlockPool,
    CacheCorruptionError,
    InvalidRequestError,
    RadixTree,
    Retention,
    eviction,
    policy_names,
    register_policy,
)
from radixkv.core.eviction import EvictionPolicy, LRUPolicy, make_policy
from radixkv.core.policies import (
    AgedLFUPolicy,
    CostAwarePolicy,
    HitDensityPolicy,
    RetentionPolicy,
    SLRUPolicy,
)
from tests.core.test_radix_tree import TreeMachine, TreeModel, namespaces, token_lists

ALL = policy_names()


class AnyVictim(TreeModel):
    """Which leaf goes is the policy's; that it is a leaf that nobody holds, and one at a time, is the tree's."""

    def victims(self):
        inner = {(space, self.parent_of(tokens)) for space, tokens in self.entries}
        return [k for k, e in self.entries.items() if k not in inner and not self.held[e.block]]


class PolicyMachine(TreeMachine):
    policy = "lru"

    model_class = AnyVictim

    def make_policy(self, num_blocks):
        self.time = 0.0
        if self.policy == "priority":
            return RetentionPolicy(num_blocks, clock=lambda: self.time)
        if self.policy == "hit-density":
            return HitDensityPolicy(num_blocks, num_ghosts=5)  # so few that they are forgotten all the time
        return self.policy

    @rule(
        space=namespaces, tokens=token_lists, priority=st.integers(-1, 2), ttl=st.sampled_from([None, 1, 3])
    )
    def retain(self, space, tokens, priority, ttl):
        if not self.tree._policy.retains:
            return
        self.time += 1
        match = self.match_both(space, tokens, len(tokens), False)
        with self.pool.lock:
            again = self.tree.match(tokens, space, retention=Retention(priority, ttl), partial=False)
        again.release()
        match.release()
        self.model.held.subtract(match.blocks.tolist())
        if len(match.blocks):
            self.model.now += 1

    @invariant()
    def the_policy_is_sound(self):
        if hasattr(self, "tree") and hasattr(self.tree._policy, "check_all"):
            self.tree._policy.check_all()


@pytest.mark.parametrize("policy", [name for name in ALL if not name.startswith("test-")])
def test_any_order_of_calls(policy):
    run_state_machine_as_test(type("Machine", (PolicyMachine,), {"policy": policy}))


def store(tree, tokens, namespace=b"", **options):
    own = tree.allocate(-(-len(tokens) // tree.block_size))
    result = tree.insert(tokens, own, namespace, **options)
    tree.pool.release(result.blocks)


# -- names -----------------------------------------------------------------------------------------------------


def test_policies_come_by_name():
    assert {"lru", "lfu", "lfu-aged", "fifo", "slru", "priority", "cost-aware", "hit-density"} <= set(ALL)
    for name in ALL:
        assert RadixTree(BlockPool(4), 4, name).policy == name
        assert type(make_policy(name, 4)).__doc__
    with pytest.raises(InvalidRequestError, match="'arc': there is cost-aware, fifo, "):
        RadixTree(BlockPool(4), 4, "arc")


def test_a_policy_serves_one_tree_of_its_size():
    policy = SLRUPolicy(8, min_hits=1)
    with pytest.raises(InvalidRequestError, match="made for 8 blocks, the pool has 9"):
        RadixTree(BlockPool(9), 4, policy)
    RadixTree(BlockPool(8), 4, policy)
    with pytest.raises(InvalidRequestError, match="another tree"):
        RadixTree(BlockPool(8), 4, policy)


def test_a_class_is_made_for_the_pool():
    tree = RadixTree(BlockPool(5), 4, SLRUPolicy)
    assert type(tree._policy) is SLRUPolicy
    assert tree._policy.num_blocks == 5
    assert type(RadixTree(BlockPool(5), 4, SLRUPolicy)._policy) is SLRUPolicy


@pytest.mark.parametrize("policy", [["lru"], {}, None, 3, int, BlockPool, b"lru"])
def test_what_is_no_policy_is_refused(policy):
    with pytest.raises(InvalidRequestError, match="an eviction policy is a name"):
        RadixTree(BlockPool(4), 4, policy)


def test_a_name_is_given_once():
    with pytest.raises(InvalidRequestError, match="already the eviction policy 'lru'"):
        register_policy(type("Other", (LRUPolicy,), {}))
    assert register_policy(LRUPolicy) is LRUPolicy


def test_a_class_that_is_defined_anew_takes_its_own_place(monkeypatch):
    monkeypatch.setattr("radixkv.core.eviction._POLICIES", dict(eviction._POLICIES))

    def cell():
        @register_policy
        class Mine(LRUPolicy):
            name = "test-mine"

        return Mine

    first, second = cell(), cell()
    assert first is not second
    assert type(make_policy("test-mine", 3)) is second


@pytest.mark.parametrize(
    "make",
    [
        lambda: SLRUPolicy(8, min_hits=0),
        lambda: SLRUPolicy(8, protected_share=1.5),
        lambda: CostAwarePolicy(8, attention_equals_at=0),
        lambda: CostAwarePolicy(8, attention_equals_at=float("nan")),
        lambda: HitDensityPolicy(8, num_ghosts=-1),
        lambda: Retention(1.5),
        lambda: Retention(True),
        lambda: Retention(1, 0),
        lambda: Retention(1, float("nan")),
    ],
)
def test_settings_that_make_no_sense(make):
    with pytest.raises(InvalidRequestError):
        make()


# -- checks that find damage -------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ALL)
def test_a_leaf_filed_wrongly_is_found(policy):
    tree = RadixTree(BlockPool(16), 2, policy)
    store(tree, [1, 2, 3, 4])
    store(tree, [1, 2, 5, 6])
    tree.check()
    own = tree._policy
    if isinstance(own, HitDensityPolicy):
        own._cells[:] += 1
    else:
        own.priority[:] -= 1
    with pytest.raises(CacheCorruptionError):
        tree.check()


def test_miscounts_are_found():
    for make, damage in (
        (SLRUPolicy, lambda p: setattr(p, "_num_protected", 1)),
        (SLRUPolicy, lambda p: p._uses.clear()),
        (AgedLFUPolicy, lambda p: p.rank.__iadd__(5)),
        (HitDensityPolicy, lambda p: p._rates.open.__iadd__(1)),
        (HitDensityPolicy, lambda p: p._leaves._counts.__iadd__(1)),
        (HitDensityPolicy, lambda p: setattr(p._leaves, "_num", 7)),
    ):
        policy = make(16)
        tree = RadixTree(BlockPool(16), 2, policy)
        for _ in range(4):
            tree.match([1, 2, 3, 4]).release()
            store(tree, [1, 2, 3, 4])
        policy.check_all()
        damage(policy)
        with pytest.raises(CacheCorruptionError):
            policy.check_all()


# -- retentions --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [name for name in ALL if name != "priority"])
def test_other_policies_refuse_retentions_and_change_nothing(policy):
    tree = RadixTree(BlockPool(16), 2, policy)
    own = tree.allocate(2)
    with pytest.raises(InvalidRequestError, match="policy='priority'"):
        tree.insert([1, 2, 3, 4], own, retention=Retention(1))
    with pytest.raises(InvalidRequestError, match="policy='priority'"):
        tree.match([1, 2], retention=Retention(1))
    assert tree.num_cached_blocks == 0
    tree.pool.release(own)
    tree.check()


def test_what_is_no_retention_is_refused():
    tree = RadixTree(BlockPool(16), 2, "priority")
    with pytest.raises(InvalidRequestError, match="Retention"):
        tree.match([1, 2], retention=(1, None))


def test_a_retention_outlasts_others_until_it_expires():
    time = [0.0]
    tree = RadixTree(BlockPool(16), 2, RetentionPolicy(16, clock=lambda: time[0]))
    store(tree, [1, 1], retention=Retention(5, ttl=10))
    store(tree, [2, 2])
    store(tree, [3, 3], retention=Retention(-1))
    store(tree, [4, 4], retention=Retention(5))
    gone = []
    for _ in range(2):
        tree.evict(1)
        gone.append([n for n in (1, 2, 3, 4) if not tree.match_length([n, n])])
    assert gone == [[3], [2, 3]]
    time[0] = 11
    store(tree, [5, 5])
    tree.evict(1)  # 1 has expired, and is older than 5
    assert [tree.match_length([n, n]) for n in (1, 4, 5)] == [0, 2, 2]
    tree.check()


def test_of_equal_priorities_the_one_that_lasts_longest_counts():
    time = [0.0]
    tree = RadixTree(BlockPool(16), 1, RetentionPolicy(16, clock=lambda: time[0]))
    for token, ttls in ((1, (5, 20)), (2, (20, 5)), (3, (5, 5)), (4, (5, None)), (5, (None, 5))):
        store(tree, [token], retention=Retention(1, ttls[0]))
        tree.match([token], retention=Retention(1, ttls[1])).release()
    store(tree, [6], retention=Retention(2, ttl=5))
    tree.match([6], retention=Retention(1, ttl=50)).release()  # lower, so it does not count, now or later
    time[0] = 10
    store(tree, [7])
    tree.evict(3)
    assert [n for n in range(1, 8) if tree.match_length([n])] == [1, 2, 4, 5]
    time[0] = 25
    store(tree, [8])
    tree.evict(2)
    assert [n for n in range(1, 9) if tree.match_length([n])] == [4, 5, 8]
    tree.check()


def test_the_time_to_live_starts_anew_when_the_request_ends():
    time = [0.0]
    tree = RadixTree(BlockPool(16), 1, RetentionPolicy(16, clock=lambda: time[0]))
    store(tree, [1])
    match = tree.match([1], retention=Retention(1, ttl=5))
    time[0] = 4
    tree.pool.release(tree.insert([1], match.take(), retention=Retention(1, ttl=5)).blocks)
    for now, left in ((6, [1, 3]), (10, [3])):
        time[0] = now
        store(tree, [2 if now == 6 else 3])
        store(tree, [3])
        tree.evict(1)
        assert [n for n in (1, 2, 3) if tree.match_length([n])] == left
    tree.check()


def test_an_insert_alone_can_retain_all_of_its_path():
    tree = RadixTree(BlockPool(16), 2, "priority")
    store(tree, [1, 1])
    store(tree, [2, 2])
    store(tree, [1, 1], retention=Retention(1))  # nothing new
    own = tree.match([2, 2]).take()
    tree.pool.release(tree.insert([2, 2, 3], np.append(own, tree.allocate(1)), retention=Retention(2)).blocks)
    store(tree, [4, 4])
    for left in ([1, 2], [2]):
        tree.evict(1)
        assert [n for n in (1, 2, 4) if tree.match_length([n, n])] == left
    tree.check()


# -- single policies ---------------------------------------------------------------------------------------------


def test_what_is_sent_back_on_probation_needs_one_more_hit():
    policy = SLRUPolicy(10, min_hits=2, protected_share=0.4)
    tree = RadixTree(BlockPool(10), 1, policy)

    def hit(tokens):
        match = tree.match(tokens)
        protected = policy.rank[match.blocks].tolist()
        match.release()
        policy.check_all()
        tree.check()
        return protected

    for tokens in ([1, 2, 3], [4, 5, 6]):
        store(tree, tokens)
        assert hit(tokens) == [0, 0, 0]
    assert hit([1, 2, 3]) == [1, 1, 1]
    assert hit([4, 5, 6]) == [1, 1, 1]  # 4 of 10 at most: the end of the other goes back
    assert hit([1]) == [1]
    assert [policy.rank[block] for block in tree.match([1, 2, 3], again=True).take()] == [1, 0, 0]
    assert hit([1, 2, 3]) == [1, 1, 1]  # one hit is enough this time, and now it is the others' turn
    assert policy._num_protected == 4
    assert hit([4]) == [1]


def test_what_is_sent_back_counts_as_just_used():
    policy = SLRUPolicy(8, min_hits=1, protected_share=0.25)
    tree = RadixTree(BlockPool(8), 1, policy)
    for tokens in ([1], [2], [3], [4], [5]):
        store(tree, tokens)
    for tokens in ([1], [2], [3]):  # two may be protected: 1 is sent back, behind 4 and 5, which came later
        tree.match(tokens).release()
    gone = []
    for _ in range(5):
        tree.evict(1)
        gone += [n for n in range(1, 6) if n not in gone and not tree.match_length([n])]
    assert gone == [4, 5, 1, 2, 3]


def test_a_deep_block_is_worth_more_to_cost_aware():
    tree = RadixTree(BlockPool(64), 4, CostAwarePolicy(64, attention_equals_at=16))
    store(tree, list(range(32)))
    store(tree, [90, 91, 92, 93])  # younger, but at position 0
    tree.evict(1)
    assert tree.match_length([90, 91, 92, 93]) == 0
    assert tree.match_length(list(range(32))) == 32


def test_a_tail_costs_as_much_as_it_has_rows():
    policy = CostAwarePolicy(8, attention_equals_at=8)
    tree = RadixTree(BlockPool(8), 4, policy)
    own = tree.allocate(2)
    tree.insert([1, 2, 3, 4, 5], own)
    assert policy._cost[own].tolist() == [1 + 2 / 8, 0.25 * (1 + 4.5 / 8)]
    tree.insert([1, 2, 3, 4, 5, 6, 7], own)
    assert policy.rank[own[1]] == policy._cost[own[1]] == 0.75 * (1 + 5.5 / 8)
    tree.pool.release(own)
    tree.check()


def test_a_policy_of_ones_own():
    """The least that a policy must do: an order of leaves."""

    class Newest(EvictionPolicy):
        name = "newest"

        def __init__(self, num_blocks):
            super().__init__(num_blocks)
            self.leaves = []

        def file(self, leaf, block):
            leaf.entry = block
            self.leaves.append(leaf)

        def unfile(self, leaf):
            leaf.entry = None
            self.leaves.remove(leaf)

        def first(self):
            return self.leaves[-1] if self.leaves else None

        def num_to_cut(self, leaf, ids):
            return len(ids)

        def num_filed(self):
            return len(self.leaves)

    tree = RadixTree(BlockPool(8), 2, Newest(8))
    store(tree, [1, 1])
    store(tree, [2, 2])
    tree.evict(1)
    assert (tree.match_length([1, 1]), tree.match_length([2, 2])) == (2, 0)
    tree.check()
