"""One backend through many steps gives what a fresh one gives for each, whatever changes from step to step.

A plan that is kept where it should not be gives wrong numbers and no error, so every step is compared with a fresh
backend and with the plain formula.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import radixkv.attention.torch_backend as torch_backend
from radixkv.attention import AttentionBatch, AttentionSpec, TorchBackend
from radixkv.attention.decode_steps import MAX_KEPT_STEPS
from tests.attention.attention_testkit import JUNK_IDS, Scene, dense_attention
from tests.attention.flashinfer_testkit import OVER_DOUBLE_COSTS, over_double
from tests.attention.test_backends import COSTS, plain_spec

POOL = 400


@dataclass
class Entry:
    blocks: list[int]
    context: int
    queries: int = 1


@dataclass
class World:
    """Sequences, a pool, and arrays that may be the same ones in each step, as a caller may keep them."""

    specs: list[AttentionSpec]
    costs: object
    block_size: int
    rng: np.random.Generator
    reuse_arrays: bool
    entries: list[Entry] = field(default_factory=list)
    nan_before_windows = 1  # in whole runs of so many slots

    def __post_init__(self):
        self.free = self.rng.permutation(POOL).tolist()
        self.backend = self.make()
        generator = torch.Generator().manual_seed(int(self.rng.integers(1000)))
        self.pools = {
            spec: tuple(
                torch.randn(
                    POOL, self.block_size, spec.num_kv_heads, dim, generator=generator, dtype=torch.float64
                )
                for dim in (spec.key_dim, spec.value_dim)
            )
            for spec in self.specs
        }
        self.buffers = np.zeros(40, np.int32), np.zeros(40, np.int32), np.zeros((40, 300), np.int32)

    def make(self):
        return TorchBackend(costs=self.costs)

    def exact(self):
        """How near a backend that was planned before comes to a fresh one, and to the formula."""
        return 1e-10, 1e-9

    def block(self, entry):
        """The block behind the last one if it is free, sometimes; else any."""
        following = entry.blocks[-1] + 1 if entry.blocks else -1
        if following in self.free and self.rng.random() < 0.5:
            self.free.remove(following)
            return following
        return self.free.pop() if self.free else int(self.rng.integers(POOL))

    def lengthen(self, entry, tokens):
        entry.context += tokens
        while len(entry.blocks) * self.block_size < entry.context:
            entry.blocks.append(self.block(entry))

    def join(self, context, parent=None, shared=0):
        entry = Entry([], 0)
        if parent is not None:
            entry.blocks = parent.blocks[: min(shared, (parent.context - 1) // self.block_size)]
        self.lengthen(entry, max(context, len(entry.blocks) * self.block_size + 1))
        self.entries.insert(int(self.rng.integers(len(self.entries) + 1)), entry)

    def any(self):
        return self.entries[int(self.rng.integers(len(self.entries)))]

    def change(self, what):
        """Something between two steps."""
        for entry in self.entries:
            entry.queries = 1
        if what == "join" or not self.entries:
            self.join(int(self.rng.integers(1, 30)))
        elif what == "fork":
            self.join(int(self.rng.integers(1, 30)), self.any(), int(self.rng.integers(1, 9)))
        elif what == "leave":
            self.entries.remove(self.any())
        elif what == "order":
            self.rng.shuffle(self.entries)
        elif what == "block":
            entry = self.any()
            entry.blocks[int(self.rng.integers(len(entry.blocks)))] = int(self.rng.integers(POOL))
        elif what == "blocks":  # also shared ones, at the same place of each table
            old = self.any().blocks[0]
            new = int(self.rng.integers(POOL))
            for entry in self.entries:
                entry.blocks = [new if block == old else block for block in entry.blocks]
        elif what == "share":
            parent = self.any()
            for entry in self.entries:
                count = min(parent.context - 1, entry.context - 1) // self.block_size
                entry.blocks[:count] = parent.blocks[:count]
        elif what == "shrink":
            entry = self.any()
            entry.context = int(self.rng.integers(1, entry.context + 1))
            del entry.blocks[-(-entry.context // self.block_size) :]
        elif what == "shrink all":
            for entry in self.entries:
                entry.context = max(1, entry.context - 1)
                del entry.blocks[-(-entry.context // self.block_size) :]
        elif what == "prompt":
            entry = self.any()
            entry.queries = min(entry.context, 3)
        elif what == "idle":
            self.any().queries = 0
        elif what == "jump":
            self.lengthen(self.any(), 2)
        elif what == "one":
            self.lengthen(self.any(), 1)
        elif what == "twins":  # a block that is filled by two at once, in place of two
            twins = [entry for entry in self.entries if entry.context % self.block_size == 0]
            for entry in twins:
                entry.blocks[-1] = twins[0].blocks[-1]
        else:
            assert what in ("grow", "again")
        if what in ("grow", "twins"):
            for entry in self.entries:
                self.lengthen(entry, 1)

    def batch(self):
        count = len(self.entries)
        width = max((len(entry.blocks) for entry in self.entries), default=1) + int(self.rng.integers(3))
        starts, contexts, tables = (
            (self.buffers[0][: count + 1], self.buffers[1][:count], self.buffers[2][:count, :width])
            if self.reuse_arrays
            else (
                np.zeros(count + 1, np.int32),
                np.zeros(count, np.int32),
                np.zeros((count, width), np.int32),
            )
        )
        starts[0] = 0
        np.cumsum([entry.queries for entry in self.entries], out=starts[1:])
        contexts[:] = [entry.context for entry in self.entries]
        tables[:] = self.rng.choice(np.array(JUNK_IDS), size=(count, width))
        for row, entry in zip(tables, self.entries, strict=True):
            row[: len(entry.blocks)] = entry.blocks
        return AttentionBatch(starts, contexts, tables, self.block_size, 0)

    def hidden(self, spec):
        """bool `[POOL, block_size]`: slots that no query sees."""
        hidden = np.ones((POOL, self.block_size), bool)
        for entry in self.entries:
            low = 0 if spec.window is None else max(0, entry.context - entry.queries + 1 - spec.window)
            low -= low % self.nan_before_windows
            positions = np.arange(low if entry.queries else entry.context, entry.context)
            blocks = np.array(entry.blocks)[positions // self.block_size]
            hidden[blocks, positions % self.block_size] = False
        return torch.from_numpy(hidden)

    def step(self):
        batch = self.batch()
        self.backend.plan(batch, self.specs)
        fresh, (near, nearly) = self.make(), self.exact()
        fresh.plan(batch, self.specs)
        for spec in self.specs:
            keys, values = (pool.clone() for pool in self.pools[spec])
            hidden = self.hidden(spec)
            keys[hidden], values[hidden] = float("nan"), float("nan")
            rows = int(batch.query_starts[-1])
            query = torch.from_numpy(self.rng.standard_normal((rows, spec.num_heads, spec.key_dim)))
            scene = Scene(spec, batch, query, keys, values, None, [entry.blocks for entry in self.entries])
            got = self.backend.run(spec, query, keys, values)
            torch.testing.assert_close(got, fresh.run(spec, query, keys, values), rtol=near, atol=near)
            torch.testing.assert_close(got, dense_attention(scene), rtol=nearly, atol=nearly)
        # The step is over: its arrays are the caller's again.
        for array in (batch.query_starts, batch.context_lens, batch.block_tables):
            array[:] = -7


class FlashInferWorld(World):
    """The same over a FlashInfer that is strict about when a plan may replace another."""

    def __post_init__(self):
        self.nan_before_windows = self.block_size
        super().__post_init__()

    def make(self):
        return over_double(costs=self.costs)

    def exact(self):
        return 1e-5, 1e-5  # its log-sum-exps are float32


CHANGES = [
    "join", "fork", "leave", "order", "block", "blocks", "share", "shrink", "shrink all", "prompt", "idle", "jump",
    "one", "twins", "again",
]  # fmt: skip


@st.composite
def worlds(draw, kind=World, costs=COSTS):
    window = draw(st.sampled_from([1, 2, 3, 6, 11, 25]))
    heads = draw(st.sampled_from([(2, 2), (4, 2), (3, 1)]))
    specs = [plain_spec(None, *heads, 4), plain_spec(window, *heads, 4)]
    world = kind(
        specs,
        draw(st.sampled_from(costs)),
        draw(st.sampled_from([1, 2, 3, 4, 8])),
        np.random.default_rng(draw(st.integers(0, 2**20))),
        draw(st.booleans()),
    )
    context = draw(st.sampled_from([1, 6, 20]))
    for number in range(draw(st.integers(1, 6))):
        parent = world.any() if number and draw(st.booleans()) else None
        world.join(context + draw(st.integers(0, 5)), parent, draw(st.integers(1, 5)))
    return world


growth = st.integers(1, 9).map(lambda steps: ["grow"] * steps)
changes = st.lists(st.one_of(growth, growth, st.sampled_from(CHANGES).map(lambda one: [one])), max_size=8)


@given(worlds(), changes)
def test_every_step_equals_a_fresh_plan(world, several):
    world.step()
    for change in itertools.chain.from_iterable(several):
        world.change(change)
        world.step()


@given(worlds(FlashInferWorld, OVER_DOUBLE_COSTS), changes)
def test_every_step_over_flashinfer_equals_a_fresh_plan(world, several):
    world.step()
    for change in itertools.chain.from_iterable(several):
        world.change(change)
        world.step()


@pytest.mark.parametrize("costs", [None, COSTS[1], COSTS[-1]])
@pytest.mark.parametrize(("window", "shared"), [(4, 0), (45, 0), (45, 9), (70, 9)])
def test_long_growth_past_windows_and_shared_parts(costs, window, shared):
    world = World([plain_spec(), plain_spec(window)], costs, 4, np.random.default_rng(window), True)
    for number in range(5):
        world.join(38 + 3 * number, world.entries[0] if shared and number else None, shared)
    for _ in range(2 * MAX_KEPT_STEPS + 5):
        world.step()
        world.change("grow")


def count_plans(monkeypatch):
    made = []
    plan_step = torch_backend.plan_step

    def counted(*args):
        made.append(1)
        return plan_step(*args)

    monkeypatch.setattr(torch_backend, "plan_step", counted)
    return made


def test_plans_are_kept_while_only_lengths_change(monkeypatch):
    made = count_plans(monkeypatch)
    backend, specs = TorchBackend(), [plain_spec(), plain_spec(500)]
    tables = np.arange(64 * 40, dtype=np.int32).reshape(64, 40)
    tables[:, :20] = tables[0, :20]
    starts = np.arange(65, dtype=np.int32)
    for step in range(MAX_KEPT_STEPS + 1):
        contexts = (330 + np.arange(64) % 17 + step).astype(np.int32)
        backend.plan(AttentionBatch(starts, contexts, tables.copy(), 16, 64), specs)
    assert len(made) == len(specs)
    backend.plan(AttentionBatch(starts, contexts, tables, 16, 64), specs)  # the same step again
    assert len(made) == len(specs)
    backend.plan(AttentionBatch(starts, contexts + 1, tables, 16, 64), specs)
    assert len(made) == 2 * len(specs)


@pytest.mark.parametrize("case", ["block", "length", "specs", "block size", "order", "fewer", "failure"])
def test_any_other_change_is_planned_anew(monkeypatch, case):
    backend, specs = TorchBackend(), [plain_spec()]
    tables = np.arange(4 * 10, dtype=np.int32).reshape(4, 10)
    starts, contexts, size = np.arange(5, dtype=np.int32), np.full(4, 50, np.int32), 8
    backend.plan(AttentionBatch(starts, contexts, tables, size, 4), specs)
    made = count_plans(monkeypatch)
    contexts = contexts + 1
    if case == "block":
        tables[2, 3] = 77
    elif case == "length":
        contexts[1] += 1
    elif case == "specs":
        specs = [plain_spec(9)]
    elif case == "block size":
        size = 16
    elif case == "order":
        tables = tables[::-1].copy()
    elif case == "fewer":
        starts, contexts, tables = starts[:4], contexts[:3], tables[:3]
    else:
        with pytest.raises((IndexError, ValueError)):
            backend.plan(AttentionBatch(starts, contexts + 500, tables, size, 4), specs)
        made.clear()
    backend.plan(AttentionBatch(starts, contexts, tables, size, 4), specs)
    assert len(made) == 1


def test_a_block_that_becomes_shared_is_planned_anew(monkeypatch):
    # Two sequences that are given one block for what both are about to fill.
    made = count_plans(monkeypatch)
    backend, specs = TorchBackend(), [plain_spec()]
    tables = np.array([[0, 1, 2, 3], [0, 1, 2, 4]], np.int32)
    starts = np.arange(3, dtype=np.int32)
    for context in range(9, 17):
        backend.plan(AttentionBatch(starts, np.full(2, context, np.int32), tables, 4, 2), specs)
    # 9 at first; block 2 is full and seen by both from 13 on.
    assert len(made) == 2
