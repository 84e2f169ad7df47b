"""Hit density: its counts against plain ones, its victims against a look at all leaves, and what it promises."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.core import BlockPool, RadixTree, block_keys
from radixkv.core.policies import HitDensityPolicy, hit_density
from radixkv.core.policies.ghosts import GhostTable
from radixkv.core.policies.reuse_rates import (
    CLASS_BITS,
    CLASS_MASK,
    EDGES,
    HORIZON,
    NUM_BINS,
    NUM_CLASSES,
    ReuseRates,
    _best_ratios,
)
from tests.core.policies.test_policies_brute_force import conversations, serve


def make(num_blocks, block_size=1, **options):
    return RadixTree(BlockPool(num_blocks), block_size, HitDensityPolicy(num_blocks, **options))


def uses_of(tree, tokens):
    match = tree.match(tokens, again=True)
    match.release()
    return tree._policy._uses[match.blocks].tolist()


def class_of(tree, tokens):
    match = tree.match(tokens, again=True)
    match.release()
    return (tree._policy._cells[match.blocks] & CLASS_MASK).tolist()


# -- what is counted ---------------------------------------------------------------------------------------------


class PlainCounts:
    """Blocks by name; nothing is ever forgotten, every block counts."""

    def __init__(self):
        self.time, self.uses, self.last, self.kind = 0, {}, {}, {}
        self.used, self.seen = np.zeros((NUM_BINS, 64)), np.zeros((NUM_BINS, 64))

    def bin(self, age):
        return max(b for b in range(NUM_BINS) if EDGES[b] <= age)

    def request(self, tokens):
        self.time += 1
        blocks = [tokens[: i + 1] for i in range(len(tokens))]
        for block, last in self.last.items():
            age = self.time - last
            if age in EDGES:
                self.seen[self.bin(age), self.kind[block]] += 1
        known = sum(block in self.last for block in blocks)
        quarter = min(4 * (len(blocks) - known) // len(blocks), 3)
        for block in blocks:
            if block in self.last:
                self.used[self.bin(self.time - self.last[block]), self.kind[block]] += 1
            self.uses[block] = min(self.uses.get(block, 0) + 1, 9)
            bucket = [0, 0, 1, 2, 2, 3, 3, 3, 3, 4][self.uses[block]]
            self.kind[block] = bucket * 8 + 4 * (len(block) == len(tokens)) + quarter
            self.last[block] = self.time


@pytest.mark.parametrize("capacity", [45, 400, 5000])
def test_rates_are_those_of_all_blocks_ever_seen(capacity):
    """Whether cached or evicted since: as long as no ghost is forgotten, a small cache sees what a large one does."""
    tree, plain = make(capacity, num_ghosts=2**20), PlainCounts()
    for request in conversations(3, 400):
        serve(tree, request)
        plain.request(request)
    rates = tree._policy._rates
    assert (rates._used == plain.used).all()
    assert (rates._seen == plain.seen).all()
    assert rates._used.sum() > 1000
    tree._policy.check_all()


def test_counts_survive_that_nearly_all_ghosts_are_forgotten():
    tree = make(45, num_ghosts=10)
    for request in conversations(3, 300):
        serve(tree, request)
        tree._policy.check_all()
    assert (tree._policy._rates.open >= 0).all()


def test_long_requests_are_counted_by_a_sample():
    tree = make(1500)
    rng = np.random.default_rng(0)
    heads = [rng.integers(0, 1000, rng.integers(200, 700)) for _ in range(6)]
    for number in range(150):
        serve(tree, (*heads[rng.integers(6)].tolist(), *range(10_000 + 9 * number, 10_009 + 9 * number)))
        if number % 10 == 0 or 60 < number < 70:
            tree._policy.check_all()
            tree.check()
    policy = tree._policy
    assert policy._rates.stride == 4  # 450 blocks on average
    cached = policy._cells > 0
    assert 0.2 < policy._counted[cached].mean() < 0.3
    uses = uses_of(tree, heads[0])
    assert uses == sorted(uses, reverse=True)


def test_requests_that_interleave_find_what_was_noted_of_them():
    tree = make(64, 2)
    a, b = np.arange(16), np.arange(100, 116)
    for request in (a, b):
        serve(tree, request.tolist())
    tree.evict(64)
    assert tree._policy._ghosts.cells().size == 16
    for tokens in (a, b):  # both are asked for before either is computed
        tree.match(tokens).release()
    tables = {id(t): tree.allocate(8) for t in (a, b)}
    for stop in (3, 6, 8):  # and computed in chunks, in turn
        for tokens in (a, b):
            tree.insert(tokens[: stop * 2], tables[id(tokens)][:stop])
            tree._policy.check_all()
    for tokens in (a, b):
        assert uses_of(tree, tokens) == [2] * 8
        assert class_of(tree, tokens) == [8] * 7 + [
            12
        ]  # used twice, nothing new; the last one of its request
        tree.pool.release(tables[id(tokens)])
    tree.check()


def test_generated_tokens_are_new_whatever_came_before():
    tree = make(64, 2)
    prompt, answer = [1, 2, 3, 4, 5], [6, 7, 8, 9]
    tree.match(prompt).release()
    own = tree.allocate(3)
    tree.insert(prompt, own)
    assert class_of(tree, prompt[:4]) == [3, 3]
    table = np.append(own, tree.allocate(2))
    tree.insert(prompt + answer, table)  # the tail grows in its block
    tree._policy.check_all()
    assert class_of(tree, prompt + answer)[3:] == [3]
    tree.pool.release(table)
    keys = tree._policy._keys[table].tolist()
    seed = next(iter(tree._roots.values())).seed
    assert keys == block_keys(np.array(prompt + answer), 2, seed).tolist()


def test_a_hit_inside_a_block_is_a_use_of_that_block_alone():
    tree = make(64, 4)
    serve(tree, list(range(8)))
    other = [0, 1, 2, 3, 4, 5, 99, 98]
    match = tree.match(other)
    assert match.num_tokens == 6
    own = match.take()
    tree.pool.release(tree.insert(other, np.append(own, tree.allocate(1))).blocks)
    assert uses_of(tree, other) == [2, 1]
    assert uses_of(tree, range(8)) == [2, 2]
    tree._policy.check_all()


def test_namespaces_do_not_meet_among_the_ghosts():
    tree = make(64, 2)
    for space in ("a", "b"):
        tree.match([1, 2, 3, 4], space).release()
        own = tree.allocate(2)
        tree.insert([1, 2, 3, 4], own, space)
        tree.pool.release(own)
        tree.evict(64)
    ghosts = tree._policy._ghosts
    assert len(ghosts.cells()) == 4
    assert ghosts._uses[ghosts._cells > 0].tolist() == [1] * 4


def test_what_one_namespace_asked_for_is_not_what_another_inserts():
    tree = make(64, 2)
    tree.match([1, 2, 3, 4], "a").release()
    tree.pool.release(tree.insert([1, 2, 3, 4], tree.allocate(2), "b").blocks)
    expected = tree._policy._ghosts.cells()  # what "a" asked for is remembered
    assert len(expected) == 2
    tree._policy.check_all()


def test_a_tree_that_is_only_inserted_into_keeps_what_came_last():
    """Without requests to learn from, inserts count as such."""
    tree = make(12)

    def insert(tokens):
        table = tree.allocate(len(tokens))
        tree.pool.release(tree.insert(tokens, table).blocks)
        tree._policy.check_all()

    for start in (10, 20, 30):
        insert(range(start, start + 3))
    insert(range(10, 13))
    tree.evict(3)
    assert [start for start in (10, 20, 30) if tree.match_length([start])] == [10, 30]
    tree.check()


# -- who goes ----------------------------------------------------------------------------------------------------


class WatchedPolicy(HitDensityPolicy):
    """Compares each leaf it names with all leaves."""

    num_compared = num_not_lru = 0

    def leaf_entries(self):
        return [entry for file in self._leaves._files for entry in file]

    def worth(self, entry):
        age = self._rates.time - entry[0]
        if age >= HORIZON:
            return -1.0
        if age == 0:
            return float("inf")
        bin_ = max(b for b in range(NUM_BINS) if EDGES[b] <= age)
        return float(self._rates.index[bin_, entry[2]])

    def begin(self):
        super().begin()
        self.bound = 2 * min((w for e in self.leaf_entries() if 0 <= (w := self.worth(e)) < 1e9), default=0)

    def rank(self, entry):
        worth = self.worth(entry)
        return (worth if worth < 0 else max(worth, self.bound)), entry[0]

    def first(self):
        leaf = super().first()
        entries = self.leaf_entries()
        if entries:
            best = min(map(self.rank, entries))
            assert self.rank(leaf.entry) == best
            self.num_compared += 1
            self.num_not_lru += leaf.entry[0] != min(entries)[0]
        else:
            assert leaf is None
        return leaf


@pytest.mark.parametrize("capacity", [45, 150])
def test_the_leaf_that_goes_is_the_worst_of_all(capacity):
    policy = WatchedPolicy(capacity)
    tree = RadixTree(BlockPool(capacity), 1, policy)
    for request in conversations(4, 500):
        serve(tree, request)
    tree.evict(capacity)  # from the best to the last
    assert tree.num_cached_blocks == 0
    assert policy.num_compared > 1000
    assert policy.num_not_lru > 100


def test_what_nobody_asked_for_in_a_long_time_goes_by_lru():
    tree = make(300)
    for request in conversations(6, 120):
        serve(tree, request)
    for _ in range(HORIZON):
        tree.match([]).release()
    tree._policy.check_all()
    num_left = tree.num_cached_blocks
    assert num_left > 200
    while num_left:
        nodes = list(tree.nodes())
        last = tree._policy._cells >> CLASS_BITS
        oldest = min(last[n.blocks[-1]] for n in nodes if not n.num_children)
        tree.evict(1)
        gone = {b for n in nodes for b in n.blocks.tolist()} - {
            b for n in tree.nodes() for b in n.blocks.tolist()
        }
        assert [last[block] for block in gone] == [oldest]
        num_left -= 1
        assert tree.num_cached_blocks == num_left
    tree.check()


def test_it_hits_more_than_lru_where_prompts_differ_in_popularity():
    rng = np.random.default_rng(1)
    heads = [tuple(range(100 * i, 100 * i + int(rng.integers(5, 60)))) for i in range(200)]
    weights = 1 / np.arange(1, 201)
    hits = {"lru": 0, "hit-density": 0}
    trees = {name: RadixTree(BlockPool(400), 1, name) for name in hits}
    for number, head in enumerate(rng.choice(200, 1500, p=weights / weights.sum())):
        for name, tree in trees.items():
            hits[name] += serve(tree, (*heads[head], 50_000 + number))
    assert hits["hit-density"] > 1.15 * hits["lru"]


def test_it_is_lru_where_only_recent_use_counts():
    """An LRU stack model: nothing but the time since the last use says anything."""
    rng = np.random.default_rng(2)
    stack, hits = [], {"lru": 0, "hit-density": 0}
    trees = {name: RadixTree(BlockPool(300), 1, name) for name in hits}
    for number in range(2000):
        depth = int(60 * rng.pareto(1.2))
        if rng.random() < 0.25 or depth >= len(stack):
            item = tuple(range(100 * number, 100 * number + int(rng.integers(3, 30))))
        else:
            item = stack.pop(-1 - depth)
        stack.append(item)
        for name, tree in trees.items():
            hits[name] += serve(tree, item)
    assert hits["lru"] > 1000
    assert abs(hits["hit-density"] / hits["lru"] - 1) < 0.02


# -- parts -------------------------------------------------------------------------------------------------------


@given(seed=st.integers(0, 10_000), scale=st.sampled_from([0.01, 0.3, 1.0]))
def test_the_index_is_the_best_ratio_over_all_times_to_keep(seed, scale):
    rate = np.random.default_rng(seed).random((NUM_BINS, NUM_CLASSES)) ** 3 * scale
    scratch = [np.empty((NUM_BINS, NUM_BINS, NUM_CLASSES)) for _ in range(2)]
    index = _best_ratios(rate, *scratch)
    widths = np.append(np.diff(EDGES), HORIZON / 2)
    for kind in (0, 17, NUM_CLASSES - 1):
        for start in (0, 5, 20, NUM_BINS - 1):
            best = hits = time = 0.0
            alive = 1.0
            for b in range(start, NUM_BINS):
                p = min(rate[b, kind], 0.999)
                hits += alive * p
                time += alive * (1 - p / 2) * widths[b]
                alive *= 1 - p
                best = max(best, hits / time)
            assert index[start, kind] == pytest.approx(best, rel=1e-9)


def test_without_evidence_all_classes_are_alike():
    rates = ReuseRates()
    for _ in range(40):
        rates.advance()
        rates.enter(np.array([3, 3, 7]))
        rates.count_request(3)
    assert np.ptp(rates.index[:, 20]) < np.ptp(rates.index) + 1e-12
    assert (rates.index > 0).all()


keys = st.lists(st.integers(1, 60), min_size=1, max_size=12, unique=True)


@given(
    steps=st.lists(st.tuples(st.booleans(), keys), max_size=40),
    size=st.integers(1, 30),
    limit=st.integers(1, 30),
)
def test_ghosts_are_found_until_they_are_forgotten(steps, size, limit):
    """What goes in is at last taken out, named as gone, or still there, once each; what is found is right."""
    table, inside, number = GhostTable(size), {}, 0
    for adds, chosen in steps:
        array = np.array(chosen, np.uint64)
        found, cells, uses = table.take(array)
        for at, cell, use in zip(found.tolist(), cells.tolist(), uses.tolist(), strict=True):
            assert inside.pop(cell) == (chosen[at], use)
        if adds:
            fresh = np.arange(number + 1, number + 1 + len(chosen))
            number += len(chosen)
            marks = (fresh % 9).astype(np.uint8)
            gone = table.add(array, fresh, marks)
            inside |= dict(zip(fresh.tolist(), zip(chosen, marks.tolist(), strict=True), strict=True))
            for cell in gone.tolist():
                del inside[cell]
        assert sorted(inside) == sorted(table.cells().tolist())
    for cell in table.limit(limit).tolist():
        del inside[cell]
    assert sorted(inside) == sorted(table.cells().tolist())
    assert len(inside) <= min(size, limit)


def test_most_ghosts_are_found_again():
    table, rng = GhostTable(4096), np.random.default_rng(0)
    keys_in = rng.integers(1, 2**63, 4096).astype(np.uint64)
    for part in np.split(keys_in, 64):
        table.add(part, np.full(64, 99), np.ones(64, np.uint8))
    found, _, _ = table.take(keys_in)
    assert len(found) > 0.85 * 4096


def test_memory_is_bounded_by_what_the_docs_say():
    num = 100_000
    policy = HitDensityPolicy(num)
    per_block = sum(a.nbytes for a in (policy._keys, policy._cells, policy._uses, policy._counted)) / num
    ghosts = policy._ghosts
    per_ghost = sum(a.nbytes for a in (ghosts._keys, ghosts._cells, ghosts._uses, ghosts._slots))
    assert per_block == 18
    assert per_ghost / (hit_density.GHOSTS_PER_BLOCK * num) <= 17 + 4 * 8
