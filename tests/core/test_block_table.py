"""Block tables against plain lists of what every position holds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from radixkv.core import (
    BlockPool,
    BlockTable,
    CacheCorruptionError,
    InvalidRequestError,
    OutOfBlocksError,
    RadixTree,
)


class TableMachine(RuleBasedStateMachine):
    """Tables that are forked, grown and cut in any order never see one another's writes."""

    @initialize(num_blocks=st.integers(1, 20), block_size=st.integers(1, 5))
    def start(self, num_blocks, block_size):
        self.pool, self.size = BlockPool(num_blocks), block_size
        self.memory = np.full(num_blocks * block_size, -1)
        self.tables: list[tuple[BlockTable, list[int]]] = []  # with the value written at each position
        self.counter = 0

    @rule()
    def open(self):
        self.tables.append((BlockTable(self.pool, self.size), []))

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), n=st.integers(0, 9))
    def append(self, data, n):
        table, values = data.draw(st.sampled_from(self.tables))
        before = (table.blocks.tolist(), table.num_tokens, self.pool.refcounts.tolist())
        try:
            copies = table.append(n)
        except OutOfBlocksError:
            assert before == (table.blocks.tolist(), table.num_tokens, self.pool.refcounts.tolist())
            return
        assert len(copies) <= 1
        for copy in copies:
            assert copy.num_rows == len(values) % self.size
            rows = np.arange(copy.num_rows)
            self.memory[copy.dst * self.size + rows] = self.memory[copy.src * self.size + rows]
        new = list(range(self.counter, self.counter + n))
        self.counter += n
        self.memory[table.slots(len(values), len(values) + n)] = new
        values += new

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def fork(self, data):
        table, values = data.draw(st.sampled_from(self.tables))
        self.tables.append((table.fork(), list(values)))

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def truncate(self, data):
        table, values = data.draw(st.sampled_from(self.tables))
        keep = data.draw(st.integers(0, len(values)))
        table.truncate(keep)
        del values[keep:]

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data):
        table, _ = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        table.release()
        with pytest.raises(InvalidRequestError, match="released"):
            table.append(1)
        with pytest.raises(InvalidRequestError, match="released"):
            table.release()

    @invariant()
    def every_table_reads_its_own(self):
        if not hasattr(self, "pool"):
            return
        self.pool.check()
        held = np.zeros(self.pool.num_blocks, int)
        for table, values in self.tables:
            table.check()
            assert table.num_tokens == len(values)
            assert len(table) == -(-len(values) // self.size)
            assert self.memory[table.slots(0, len(values))].tolist() == values
            held[table.blocks] += 1
        assert self.pool.refcounts.tolist() == held.tolist()

    def teardown(self):
        if hasattr(self, "pool"):
            for table, _ in self.tables:
                table.release()
            assert self.pool.num_free == self.pool.num_blocks


TestTableMachine = TableMachine.TestCase


def test_slots_are_block_times_size_plus_offset():
    table = BlockTable(BlockPool(9), 4)
    table.append(10)
    slots = table.slots(3, 9)
    assert slots.dtype == np.int64
    assert slots.tolist() == [table.blocks[i // 4] * 4 + i % 4 for i in range(3, 9)]
    assert table.slots(5, 5).tolist() == []
    for wrong in ((-1, 2), (3, 2), (0, 11)):
        with pytest.raises(InvalidRequestError):
            table.slots(*wrong)


def test_slots_are_64_bit():
    """FC-47: a slot number may be above 2**31."""
    pool = BlockPool(2)
    table = BlockTable(pool, 2**30, blocks=pool.allocate(2), num_tokens=2**31)
    assert table.slots(2**31 - 1, 2**31).tolist() == [2**31 - 1]
    assert (table.blocks.astype(np.int64) * 2**30).tolist() == [0, 2**30]


def test_room_taken_ahead_is_used_and_not_forked():
    pool = BlockPool(8)
    table = BlockTable(pool, 4, blocks=pool.allocate(3), num_tokens=2)
    fork = table.fork()
    assert len(fork) == 1
    table_copy = table.append(10)
    assert len(table_copy) == 1
    assert len(table) == 3
    fork.release()
    table.release()
    assert pool.num_free == 8


def test_adopt_takes_the_match_over_and_copies_its_tail():
    pool = BlockPool(8)
    tree = RadixTree(pool, 4)
    ids = pool.allocate(2)
    pool.release(tree.insert([1, 2, 3, 4, 5, 6], ids).blocks)
    table = BlockTable.adopt(tree.match([1, 2, 3, 4, 5, 9]))
    assert (table.num_tokens, table.blocks.tolist()) == (5, ids.tolist())
    assert tree.num_pinned_blocks == 2
    copies = table.append(3, tree.allocate)
    assert [(c.src, c.num_rows) for c in copies] == [(ids[1], 1)]
    assert tree.num_pinned_blocks == 1
    table.replace(tree.insert([1, 2, 3, 4, 5, 9, 9, 9], table.blocks).blocks)
    table.release()
    tree.check()
    assert tree.num_evictable_tokens == 4 + 2 + 4


def test_a_table_that_holds_less_than_it_says():
    pool = BlockPool(4)
    with pytest.raises(InvalidRequestError, match="do not hold"):
        BlockTable(pool, 4, blocks=pool.allocate(1), num_tokens=5)
    with pytest.raises(InvalidRequestError, match="block_size"):
        BlockTable(pool, 0)


def test_requests_that_make_no_sense():
    table = BlockTable(BlockPool(4), 4)
    table.append(5)
    for call in (lambda: table.append(-1), lambda: table.truncate(6), lambda: table.truncate(-1)):
        with pytest.raises(InvalidRequestError):
            call()
    with pytest.raises(InvalidRequestError):
        table.replace([0, 1, 2])
    with pytest.raises(ValueError, match="read-only"):
        table.blocks[0] = 3


@pytest.mark.parametrize(
    "damage",
    [
        lambda t: setattr(t, "_num_tokens", 99),
        lambda t: t._ids.__setitem__(1, t._ids[0]),
        lambda t: t._ids.__setitem__(1, 3),
    ],
)
def test_the_checker_finds_damage(damage):
    table = BlockTable(BlockPool(4), 4)
    table.append(8)
    table.check()
    damage(table)
    with pytest.raises(CacheCorruptionError):
        table.check()
