"""Several requests in flight at once, some never inserted, some aborted: with every policy all books stay right."""

from __future__ import annotations

import random

import numpy as np
import pytest

from radixkv.core import BlockPool, OutOfBlocksError, RadixTree, Retention, policy_names
from radixkv.core.eviction import make_policy
from radixkv.core.policies import HitDensityPolicy
from radixkv.core.policies.ghosts import GhostTable

ALL = [(name, 1) for name in policy_names()] + [("hit-density", 2), ("hit-density", 4)]


def check(tree):
    tree.check()
    if hasattr(tree._policy, "check_all"):
        tree._policy.check_all()


class Driver:
    """Requests that match, compute, insert and end, in any order."""

    def __init__(self, name, stride, seed):
        self.rng = rng = random.Random(seed)
        self.num_blocks, self.size = rng.choice([12, 30, 60]), rng.choice([1, 2, 4])
        if name == "hit-density":
            policy = HitDensityPolicy(self.num_blocks, num_ghosts=rng.choice([5, 40, 1000]))
            policy._rates.stride = stride
            policy._rates.count_request = lambda num_blocks: False  # the stride stays
        else:
            policy = make_policy(name, self.num_blocks)
        self.now = 0.0
        policy.use_clock(lambda: self.now)
        self.tree = RadixTree(BlockPool(self.num_blocks), self.size, policy)
        self.bases = [[rng.randrange(3) for _ in range(6 * self.size)] for _ in range(4)]
        self.running = []  # tokens, table, blocks inserted

    def retention(self):
        if not self.tree._policy.retains or self.rng.random() < 0.4:
            return None
        return Retention(self.rng.randint(-2, 3), self.rng.choice([None, 1, 5]))

    def prompt(self):
        rng = self.rng
        base = rng.choice(self.bases)[: rng.randint(1, 6 * self.size)]
        return base + [rng.randrange(3) for _ in range(rng.choice([0, 1, self.size, 2 * self.size]))]

    def start(self):
        tokens, tree = self.prompt(), self.tree
        again = bool(self.rng.random() < 0.2)
        match = tree.match(
            tokens, max_tokens=len(tokens) - 1, partial=False, again=again, retention=self.retention()
        )
        if self.rng.random() < 0.2:
            match.release()  # it never comes back
            return
        try:
            own = tree.allocate(-(-len(tokens) // self.size) - len(match.blocks))
        except OutOfBlocksError:
            match.release()
            return
        self.running.append([tokens, np.concatenate((match.take(), own)), len(match.blocks)])

    def insert(self):
        if not self.running:
            return
        request = self.rng.choice(self.running)
        tokens, table, _ = request
        num = len(tokens)
        if self.rng.random() < 0.4:
            num = max(self.rng.randint(1, num) // self.size, 1) * self.size  # part of a long prompt
            num = min(num, len(tokens))
        num_blocks = -(-num // self.size)
        result = self.tree.insert(
            np.array(tokens[:num], np.int64), table[:num_blocks], retention=self.retention()
        )
        table[:num_blocks] = result.blocks

    def end(self):
        if self.running:
            self.tree.pool.release(self.running.pop(self.rng.randrange(len(self.running)))[1])

    def step(self):
        what = self.rng.choice(["start"] * 4 + ["insert"] * 4 + ["end"] * 3 + ["evict", "drop", "tick"])
        if what == "evict":
            self.tree.evict(self.rng.randint(1, 4))
        elif what == "drop":
            if self.rng.random() < 0.1:
                self.tree.drop_evictable()
        elif what == "tick":
            self.now += self.rng.choice([0.5, 2, -3])
        else:
            getattr(self, what)()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("name", "stride"), ALL)
def test_any_number_in_flight(name, stride, seed):
    driver = Driver(name, stride, seed)
    for number in range(250):
        driver.step()
        driver.tree.check()
        if number % 5 == 0:
            check(driver.tree)
    while driver.running:
        driver.end()
    check(driver.tree)
    driver.tree.evict(driver.num_blocks)
    check(driver.tree)
    assert driver.tree.pool.num_free == driver.num_blocks
    assert driver.tree.num_nodes == 0


def test_prompts_of_many_blocks_two_at_a_time():
    """Of such a prompt one block in two is counted: of what one request adds to another, there may be none."""
    pool = BlockPool(2500)
    tree = RadixTree(pool, 4, "hit-density")
    rng = np.random.default_rng(0)
    for _ in range(66):
        tokens = rng.integers(0, 2**40, 4 * 140)
        tree.match(tokens).release()
        pool.release(tree.insert(tokens, tree.allocate(140)).blocks)
    assert tree._policy._rates.stride == 2
    for num in range(130, 138):
        both = [np.concatenate((tokens[: 4 * num], rng.integers(0, 9, 4))) for _ in range(2)]
        matches = [tree.match(one) for one in both]
        for one, match in zip(both, matches, strict=True):
            table = np.concatenate((match.take()[:num], tree.allocate(num + 1 - len(match.blocks[:num]))))
            pool.release(match.blocks[num:])
            pool.release(tree.insert(one, table).blocks)
        check(tree)
    assert tree.num_pinned_blocks == 0


def test_no_ghosts_are_added():
    ghosts = GhostTable(4)
    none = np.zeros(0, np.uint64), np.zeros(0, np.int64), np.zeros(0, np.uint8)
    assert len(ghosts.add(*none)) == 0
    assert len(ghosts.cells()) == 0
