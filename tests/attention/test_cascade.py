"""The cut of a step into shared and own parts, against brute force over every entry and position."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.attention.cascade import cascade, shared_blocks

JUNK = [-1, -7, 2**31 - 1, 0, 3]


@st.composite
def batches(draw):
    """Tables of few distinct blocks, so that prefixes are often shared, with junk after their end."""
    block_size = draw(st.integers(1, 4))
    entries = draw(st.integers(0, 8))
    width = draw(st.integers(1, 7))
    # Block j of a table is one of three, as in a tree: sequences share a prefix, never a middle.
    tables = np.array([[draw(st.integers(0, 2)) for _ in range(width)] for _ in range(entries)], np.int32)
    tables = tables.reshape(entries, width)
    contexts = np.array([draw(st.integers(1, width * block_size)) for _ in range(entries)], np.int64)
    queries = np.array([draw(st.integers(1, int(c))) for c in contexts], np.int64)
    used = -(-contexts // block_size)
    for entry in range(entries):
        for column in range(int(used[entry]), width):
            tables[entry, column] = draw(st.sampled_from(JUNK))
    return tables, contexts, queries, block_size


def brute_shared(tables, limits, entry, column):
    """Who has the same blocks as `entry` up to and including `column`."""
    return {
        other
        for other in range(len(tables))
        if limits[other] > column
        and tables[other, : column + 1].tolist() == tables[entry, : column + 1].tolist()
    }


@given(batches())
def test_every_shared_block_is_in_exactly_one_node_and_none_other_is(batch):
    tables, contexts, queries, block_size = batch
    limits = (contexts - queries) // block_size
    nodes = shared_blocks(tables, limits)
    seen = {}
    for index, node in enumerate(nodes):
        assert node.parent < index
        assert node.start < node.stop
        assert node.start == (nodes[node.parent].stop if node.parent >= 0 else 0)
        assert node.entries.tolist() == sorted(set(node.entries.tolist()))
        for entry in node.entries.tolist():
            for column in range(node.start, node.stop):
                assert (entry, column) not in seen
                seen[entry, column] = set(node.entries.tolist())
    for entry in range(len(tables)):
        for column in range(int(limits[entry])):
            sharing = brute_shared(tables, limits, entry, column)
            assert seen.pop((entry, column), {entry}) == sharing
    assert not seen


@given(batches(), st.sampled_from([None, 1, 2, 3, 5, 9]), st.integers(0, 12))
def test_every_position_an_entry_sees_is_covered_exactly_once(batch, window, threshold):
    tables, contexts, queries, block_size = batch
    firsts = contexts - queries
    lows = np.zeros_like(firsts) if window is None else np.maximum(0, firsts + 1 - window)
    nodes = shared_blocks(tables, firsts // block_size)
    cut = cascade(nodes, lows, block_size, lambda entries, tokens: (len(entries) - 1) * tokens >= threshold)
    covered = [[] for _ in contexts]
    for segment in cut.segments:
        assert len(segment.entries) >= 2
        assert (len(segment.entries) - 1) * (segment.stop - segment.start) >= threshold
        assert segment.stop % block_size == 0
        read = range(segment.start // block_size, segment.stop // block_size)
        assert len({tuple(tables[entry, read]) for entry in segment.entries}) == 1
        assert segment.lows.min() == segment.start
        for entry, low in zip(segment.entries.tolist(), segment.lows.tolist(), strict=True):
            assert segment.stop <= firsts[entry]
            assert low == max(segment.start, lows[entry])
            covered[entry] += range(low, segment.stop)
    for entry, positions in enumerate(covered):
        assert cut.own_starts[entry] <= firsts[entry]
        positions += range(int(cut.own_starts[entry]), int(contexts[entry]))
        assert positions == list(range(int(lows[entry]), int(contexts[entry])))


def test_levels_of_a_small_tree():
    tables = np.array([[5, 6, 7, 1], [5, 6, 7, 2], [5, 6, 8, 3], [9, 6, 7, 4], [5, 6, 8, 3]], np.int32)
    nodes = shared_blocks(tables, np.array([4, 3, 3, 4, 4]))
    found = {(tuple(node.entries.tolist()), node.start, node.stop) for node in nodes}
    assert found == {((0, 1, 2, 4), 0, 2), ((0, 1), 2, 3), ((2, 4), 2, 3)}


def test_a_level_that_does_not_pay_goes_to_the_level_below():
    tables = np.array([[5, 6, 1], [5, 6, 2], [5, 7, 3]], np.int32)
    nodes = shared_blocks(tables, np.array([2, 2, 2]))
    cut = cascade(nodes, np.zeros(3, np.int64), 16, lambda entries, tokens: tokens >= 32)
    assert [(s.entries.tolist(), s.start, s.stop) for s in cut.segments] == [([0, 1], 0, 32)]
    assert cut.own_starts.tolist() == [32, 32, 0]


@pytest.mark.parametrize("limits", [[0, 0], [0, 2], [2, 0]])
def test_nothing_is_shared_with_an_entry_without_whole_blocks(limits):
    assert shared_blocks(np.array([[1, 2], [1, 2]], np.int32), np.array(limits)) == []
