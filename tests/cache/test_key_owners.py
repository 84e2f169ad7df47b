"""Which keys belong to whom: everything that is cached is found by its user's namespace, whatever came between."""

from __future__ import annotations

import gc

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from radixkv.cache import key_owners
from radixkv.cache.key_owners import KeyOwners
from radixkv.core import BlockPool, RadixTree
from radixkv.core.namespace import canonical_namespace
from tests.cache.kv_event_testkit import store
from tests.cache.test_kv_event_stream import commit, tiny_cache

USERS = st.integers(0, 5).map(lambda i: canonical_namespace(f"user {i}"))


class OwnersMachine(RuleBasedStateMachine):
    """Against a dict that forgets nothing."""

    def __init__(self):
        super().__init__()
        self.tree = RadixTree(BlockPool(6), 1)
        self.owners = KeyOwners(self.tree)
        self.owners._prune_at = 2
        self.before, key_owners._PRUNE_AT = key_owners._PRUNE_AT, 2
        self.all = {}  # key -> user
        self.claims = []

    @rule(user=USERS, epoch=st.integers(0, 3), later=st.booleans())
    def add(self, user, epoch, later):
        key = b"%d;%b" % (epoch, user)
        self.all[key] = user
        if later:
            self.claims.append((self.owners.claim(user, key), key))
        else:
            self.owners.add(user, key)
            store(self.tree, [1, 2], key)

    @rule()
    def a_claim_is_used(self):
        if self.claims:
            _claim, key = self.claims.pop(0)
            store(self.tree, [3], key)

    @rule(user=USERS)
    def clear(self, user):
        self.tree.clear_all(self.owners.keys_of(user))
        for node in self.tree.nodes():
            assert next(u for k, u in self.all.items() if canonical_namespace(k) == node.namespace) != user

    @invariant()
    def what_is_cached_has_its_user(self):
        for key, user in self.all.items():
            if canonical_namespace(key) in self.tree._roots or key in [key for _, key in self.claims]:
                assert key in self.owners.keys_of(user)
                assert self.owners.user_of(canonical_namespace(key)) == user
                assert self.owners.users()[canonical_namespace(key)] == user

    def teardown(self):
        key_owners._PRUNE_AT = self.before


TestOwners = OwnersMachine.TestCase


def test_one_namespace_for_each_user_does_not_pile_up():
    cache = tiny_cache(num_blocks=16)
    for i in range(3000):
        commit(cache, range(8), f"user {i}")
        assert len(cache._owners) <= 256
    assert cache.clear("user 0") == 0
    assert cache.clear("user 2999") == 2


def test_a_claim_holds_for_as_long_as_it_is_kept():
    cache = tiny_cache(num_blocks=16)
    key = canonical_namespace(("model", "slow"))
    claim = cache.register_key("slow", key)
    for i in range(1000):
        commit(cache, range(8), f"user {i}")
    assert cache._owners.user_of(canonical_namespace(key)) == canonical_namespace("slow")
    blocks = cache.tree.allocate(2)
    cache.pool.release(cache.tree.insert(np.arange(8), blocks, key).blocks)
    del claim
    assert cache.clear("slow") == 2
    gc.collect()
    for i in range(1000):
        commit(cache, range(8), f"user {i}")
    assert canonical_namespace(key) not in cache._owners.users()


@pytest.mark.parametrize("wanted", ["tenant", None])
def test_what_is_stored_after_a_clear_is_the_users_again(wanted):
    """A request that was registered before the clear may store after it."""
    cache = tiny_cache()
    key = canonical_namespace(("model", "tenant"))
    claim = cache.register_key("tenant", key)
    cache.clear(wanted)
    cache.pool.release(cache.tree.insert(np.arange(8), cache.tree.allocate(2), key).blocks)
    assert cache.clear("tenant") == 2
    assert claim.key == key
