"""What was made fast says what the slow way says."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.core import BlockPool, InvalidRequestError, PriorityPolicy, RadixTree, as_tokens
from radixkv.core.node import FIRST_PIECE, LARGEST_PIECE, below, common_bytes

PIECES = [0, FIRST_PIECE, 4 * FIRST_PIECE, 5 * FIRST_PIECE, LARGEST_PIECE, 2 * LARGEST_PIECE]


@given(
    at=st.one_of(
        st.integers(0, 40), st.sampled_from([n // 8 + d for n in PIECES for d in (0, 1, 2)]), st.none()
    ),
    more=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    guess=st.integers(0, 5000),
)
def test_common_bytes_is_where_two_runs_of_tokens_part(at, more, guess):
    size = 2 * LARGEST_PIECE // 8 + 100 if at is None or at > 40 else 60
    ours = np.arange(size + more[0])
    theirs = np.arange(size + more[1])
    if at is not None:
        theirs[at] += 1 << 40  # only the upper half of the number differs
    expected = min(len(ours), len(theirs)) if at is None else at
    data = memoryview(theirs).cast("B")
    assert common_bytes(bytearray(ours.tobytes()), data) == expected * 8
    assert common_bytes(bytearray(ours.tobytes()), data, guess * 8) == expected * 8
    assert common_bytes(bytearray(ours.tobytes()), data, expected * 8) == expected * 8


@pytest.mark.parametrize("at", [1, 5, 6, 7, 9])
def test_a_split_gives_each_part_its_tokens_and_blocks(at):
    pool = BlockPool(64)
    tree = RadixTree(pool, 2)
    tokens = np.arange(20)
    tree.insert(tokens, pool.allocate(10))
    other = np.append(tokens[: 2 * at], [77, 78])
    match = tree.match(other, partial=False)
    tree.insert(other, np.concatenate((match.take(), pool.allocate(1))))
    tree.check()
    assert [len(node.blocks) for node in tree.nodes() if node.start == 0] == [at]
    assert tree.match_length(tokens) == 20
    assert tree.match_length(other) == len(other)


def test_tokens_that_were_matched_are_not_looked_at_again_but_others_are():
    pool = BlockPool(8)
    tree = RadixTree(pool, 2)
    tokens = np.arange(6)
    tree.match(tokens)
    assert tree._was_checked(tokens)
    assert tree._was_checked(tokens[:4])
    assert not tree._was_checked(tokens.copy())
    assert tree.insert(tokens[:4], pool.allocate(2)).num_new_tokens == 4
    blocks = pool.allocate(2)
    with pytest.raises(InvalidRequestError, match="negative"):
        tree.insert(np.array([9, 9, -1, 9]), blocks)
    with pytest.raises(InvalidRequestError, match="negative"):
        tree.insert([9, 9, -1, 9], blocks)
    tree.match(tokens[:4])
    assert not tree._was_checked(tokens)  # the rest of it was not seen
    tree.check()


def test_an_array_that_is_gone_is_not_mistaken_for_another():
    tree = RadixTree(BlockPool(8), 2)
    tree.match([1, 2, 3, 4])
    assert not tree._was_checked(np.arange(4))
    assert not tree._was_checked(as_tokens([1, 2, 3, 4]))


@pytest.mark.parametrize("place", [0, 100, 40_000])
@pytest.mark.parametrize("wrong", [True, False, 1.0, 2**63, None])
def test_a_long_list_is_read_whole(place, wrong):
    items = [5] * 40_001
    assert as_tokens(items).tolist() == items
    items[place] = 1
    assert as_tokens(items)[place] == 1
    items[place] = wrong
    with pytest.raises(InvalidRequestError):
        as_tokens(items)


def test_many_runs_are_not_remembered():
    """Each insert that continues a match adds a run; with many, one array of ids is faster."""
    pool = BlockPool(64)
    tree = RadixTree(pool, 2)
    tokens = np.arange(60)
    spacers = []
    for end in range(2, 61, 2):
        match = tree.match(tokens[:end])
        table = np.concatenate((match.take(), pool.allocate(1)))
        pool.release(tree.insert(tokens[:end], table).blocks)
        spacers.append(pool.allocate(1))
    assert len(pool._states._known_runs) <= 8
    tree.match(tokens).release()
    tree.check()


@pytest.mark.parametrize("method", ["match", "match_length", "insert"])
def test_blocks_of_one_token_have_no_parts_to_look_for(method, monkeypatch):
    """No order of children is kept for that, either: with partial matches as without."""
    tree = RadixTree(BlockPool(64), block_size=1)
    for i in range(20):
        tree.pool.release(tree.insert([1, 2, 100 + i], tree.allocate(3)).blocks)

    def never(*arguments):
        raise AssertionError("looked for the closest child")

    monkeypatch.setattr(tree, "_closest", never)
    if method == "match":
        with tree.match([1, 2, 7, 7]) as match:
            assert (match.num_tokens, match.tail) == (2, None)
        assert tree.match([9]).num_tokens == 0
    elif method == "match_length":
        assert tree.match_length([1, 2, 7, 7]) == 2
        assert tree.match_length([1, 2, 105, 7]) == 3
    else:
        tree.pool.release(tree.insert([1, 2, 7], tree.allocate(3)).blocks)
        assert tree.match_length([1, 2, 7]) == 3
    assert all(node.index is None for root in tree._roots.values() for node in (root, *below(root)))
    tree.check()


def test_the_heap_of_leaves_forgets_what_does_not_stand():
    """Leaves taken out in any order, filed anew, and all gone: the heap never keeps many old entries."""
    rng = np.random.default_rng(0)
    policy = PriorityPolicyForTest(400)
    leaves = [Leaf(serial) for serial in range(300)]
    filed: dict[int, tuple[int, Leaf]] = {}
    for step in range(6000):
        leaf = leaves[rng.integers(300)]
        policy.priority[leaf.serial] = rng.integers(50)
        if leaf.serial in filed and step % 3:
            policy.unfile(leaf)
            del filed[leaf.serial]
        elif leaf.serial in filed:
            policy.refile(leaf, leaf.serial)
            filed[leaf.serial] = policy.priority.item(leaf.serial), leaf
        else:
            policy.file(leaf, leaf.serial)
            filed[leaf.serial] = policy.priority.item(leaf.serial), leaf
        order = sorted((value, serial) for serial, (value, _) in filed.items())
        assert policy.num_filed() == len(order)
        first = policy.first()
        assert (first and first.serial) == (order[0][1] if order else None)
        if first is not None:
            assert policy._second() == (order[1][0] if len(order) > 1 else None)
        assert len(policy._heap) <= 1.2 * len(order) + 20
    for _, leaf in filed.values():
        policy.unfile(leaf)
    assert policy.first() is None
    assert policy._heap == []


class PriorityPolicyForTest(PriorityPolicy):
    name = "for-test"


class Leaf:
    """What a policy needs of a node."""

    def __init__(self, serial):
        self.serial, self.entry = serial, None
