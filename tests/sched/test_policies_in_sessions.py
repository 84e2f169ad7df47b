"""Random sessions of the scheduler over a tree with each eviction policy."""

from __future__ import annotations

import pytest

from radixkv.core import RadixTree, policy_names
from radixkv.core.policies import HitDensityPolicy
from tests.sched import sched_testkit
from tests.sched.test_random_sessions import Session


def run(policy, stride, seed, monkeypatch):
    def make_tree(pool, block_size):
        made = policy
        if policy == "hit-density":
            made = HitDensityPolicy(pool.num_blocks, num_ghosts=20)
            made._rates.stride = stride
            made._rates.count_request = lambda num_blocks: False  # the stride stays
        return RadixTree(pool, block_size, made)

    monkeypatch.setattr(sched_testkit, "RadixTree", make_tree)
    session = Session(seed)
    session.run(num_requests=12, trouble=0.15)
    made = session.caller.tree._policy
    assert made.name == policy
    assert made.num_filed() == 0
    if hasattr(made, "check_all"):
        made.check_all()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("policy", "stride"), [*((name, 1) for name in policy_names()), ("hit-density", 2), ("hit-density", 4)]
)
def test_a_session_with_trouble(policy, stride, seed, monkeypatch):
    run(policy, stride, 100 + seed, monkeypatch)
