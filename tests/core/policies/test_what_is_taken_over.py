"""What is known of a block outlasts that another request uses it, or puts a fuller one in its place."""

from __future__ import annotations

import random

import numpy as np
import pytest

from radixkv.core import BlockPool, RadixTree, Retention, policy_names
from radixkv.core.eviction import make_policy
from radixkv.core.policies.reuse_rates import CLASS_MASK, CLASS_OF_USES

SIZE = 4


def make(policy, num_blocks=40):
    made = make_policy(policy, num_blocks)
    made.use_clock(lambda: 0.0)
    return RadixTree(BlockPool(num_blocks), SIZE, made)


def store(tree, tokens, retention=None):
    own = tree.allocate(-(-len(tokens) // SIZE))
    tree.pool.release(tree.insert(tokens, own, retention=retention).blocks)


def go_on(tree, tokens, table, more, in_place, retention):
    """A request goes on behind its tail, which is cached: in the tail's own block, or in a copy of it."""
    match = tree.match(tokens + more, retention=retention)
    assert match.num_tokens == len(tokens)
    match.release()
    if not in_place:
        copy = tree.allocate(1)
        tree.pool.release(table[-1:])
        table = np.concatenate((table[:-1], copy))
    own = tree.allocate(-(-len(tokens + more) // SIZE) - len(table))
    table = np.concatenate((table, own))
    result = tree.insert(tokens + more, table, retention=retention)
    assert result.blocks is table
    assert result.num_new_blocks == len(own) + (not in_place)
    tree.check()
    if hasattr(tree._policy, "check_all"):
        tree._policy.check_all()
    tree.pool.release(table)


def victims(tree, prompts):
    """What is left of each prompt after each block that goes."""
    order = []
    while tree.num_cached_blocks:
        tree.evict(1)
        order.append([tree.match_length(tokens) for tokens in prompts])
    return order


def run(policy, seed, in_place):
    rng, tree = random.Random(seed), make(policy)

    def retention():
        if not tree._policy.retains or rng.random() < 0.4:
            return None
        return Retention(rng.randint(-2, 2), rng.choice([None, 5, 9]))

    prompts, tables = [], []
    for number in range(6):
        prompts.append([number] * rng.choice([2, 3, 6, 7]))
        table = tree.allocate(-(-len(prompts[-1]) // SIZE))
        tables.append(tree.insert(prompts[-1], table, retention=retention()).blocks)
        store(tree, [60 + number])
    for _ in range(10):
        tree.match(rng.choice(prompts), retention=retention()).release()
        if rng.random() < 0.5:
            tree.match([60]).release()
    if rng.random() < 0.5:
        tree.evict(6)  # those that nobody holds
    for number in range(4):
        more = [50] * rng.choice([1, 2, 5])
        go_on(tree, prompts[number], tables[number], more, in_place, retention())
        prompts[number] = prompts[number] + more
    for table in tables[4:]:
        tree.pool.release(table)
    return tree, prompts


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("policy", [name for name in policy_names() if name not in ("fifo", "hit-density")])
def test_a_fuller_block_goes_when_its_tail_would_have_gone(policy, seed):
    tree, prompts = run(policy, seed, in_place=True)
    assert victims(*run(policy, seed, in_place=False)) == victims(tree, prompts)


@pytest.mark.parametrize("seed", range(6))
def test_hit_density_goes_on_counting_uses(seed):
    in_place, prompts = run("hit-density", seed, in_place=True)
    in_copies, _ = run("hit-density", seed, in_place=False)
    for tokens in prompts:
        uses = []
        for tree in (in_place, in_copies):
            match = tree.match(tokens, again=True)
            match.release()
            uses.append(tree._policy._uses[match.blocks].tolist())
            kinds = tree._policy._cells[match.blocks] & CLASS_MASK
            assert (kinds - CLASS_OF_USES[uses[-1]] < 8).all()
            assert (kinds >= CLASS_OF_USES[uses[-1]]).all()
        assert uses[0] == uses[1]


# -- priorities: nobody can take away what another was given -----------------------------------------------------------


def left_of_two(tree):
    """After an eviction of one block: of a prompt of ones, and of one of nines that nobody has said anything about."""
    own = tree.allocate(1)
    tree.pool.release(tree.insert([9] * SIZE, own).blocks)
    tree.evict(1)
    tree.check()
    return tree.match_length([1] * SIZE), tree.match_length([9] * SIZE)


def test_who_inserts_the_same_takes_nothing_away():
    tree = make("priority")
    first, second = tree.allocate(1), tree.allocate(1)
    for priority in (10, -5):
        tree.match([1] * SIZE, retention=Retention(priority)).release()
    tables = [
        tree.insert([1] * SIZE, blocks, retention=Retention(priority)).blocks
        for blocks, priority in ((first, 10), (second, -5))
    ]
    for table in tables:
        tree.pool.release(table)
    assert left_of_two(tree) == (SIZE, 0)


def test_nor_does_who_comes_back_after_a_pause():
    tree = make("priority")
    store(tree, [1] * SIZE, Retention(10))
    tree.match([1] * SIZE, again=True, retention=Retention(-5)).release()
    assert left_of_two(tree) == (SIZE, 0)


def test_but_who_inserted_it_may():
    tree = make("priority")
    table = tree.insert([1] * SIZE, tree.allocate(1), retention=Retention(10)).blocks
    tree.pool.release(tree.insert([1] * SIZE, table, retention=Retention(-5)).blocks)
    assert left_of_two(tree) == (0, SIZE)


def test_nor_does_who_puts_a_fuller_block_in_its_place():
    tree = make("priority")
    store(tree, [1] * 3, Retention(10))
    store(tree, [1] * 4)
    assert left_of_two(tree) == (SIZE, 0)
    store(tree, [2] * 3, Retention(10))
    store(tree, [2] * 4, Retention(-5))
    store(tree, [8] * 4)
    tree.evict(1)
    assert tree.match_length([2] * 4) == SIZE
