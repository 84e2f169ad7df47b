"""Why a prompt missed: what `MissNotes` says against plain sets of everything that ever happened."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.cache.key_table import KeyTable
from radixkv.cache.miss_notes import MissNotes, readable
from radixkv.core.block_pool import BlockPool
from radixkv.core.listener import TreeListener
from radixkv.core.namespace import canonical_namespace
from radixkv.core.radix_tree import RadixTree
from radixkv.observe.requests import MISS_REASONS, MissNote, RequestStats

NAMES = [None, "a", "b"]
KEYS = [canonical_namespace(name) for name in NAMES]


def prefixes(tokens):
    return {tuple(tokens[:stop]) for stop in range(1, len(tokens) + 1)}


class Diary(TreeListener):
    """Every prefix that was ever cached, passed through or not kept, token by token."""

    def __init__(self):
        self.cached = {key: {} for key in KEYS}  # prefix -> whether it was cached since the last clear
        self.bypassed = {key: set() for key in KEYS}
        self.not_kept = {key: set() for key in KEYS}

    def on_stored(self, namespace, tokens, first, blocks, parent):
        self.cached[namespace].update(dict.fromkeys(prefixes(tokens.tolist()), True))

    def clear(self, keys):
        for key in keys:
            self.cached[key] = dict.fromkeys(self.cached[key], False)

    def reasons(self, key, prefix):
        """All that is true of a prefix that is not cached, the nearest first."""
        found = []
        if prefix in self.cached[key]:
            found.append("evicted" if self.cached[key][prefix] else "cleared")
        if prefix in self.not_kept[key]:
            found.append("not_kept")
        if prefix in self.bypassed[key]:
            found.append("bypassed")
        if any(prefix in self.cached[other] for other in KEYS if other != key):
            found.append("other_namespace")
        return found or ["never_seen"]


class World:
    """A small tree that both listen to. Namespaces are numbers."""

    def __init__(self, num_blocks=8, block_size=4, num_rows=1 << 16):
        self.tree = RadixTree(BlockPool(num_blocks), block_size=block_size)
        self.notes = MissNotes(num_blocks, block_size, num_rows=num_rows)
        self.diary = Diary()
        self.tree.add_listener(self.diary)
        self.tree.add_listener(self.notes)

    def ask(self, which, tokens):
        """The note of a lookup, and all that would be true to say."""
        with self.tree.match(tokens, NAMES[which], max_tokens=len(tokens) - 1) as match:
            num_hit, note = match.num_tokens, match.note
        if num_hit == len(tokens) - 1:
            assert note is None
            return None, []
        assert note.diverged_at == num_hit
        return note, self.diary.reasons(KEYS[which], tuple(tokens[: num_hit + 1]))

    def store(self, which, tokens):
        """Cache a prompt as far as there is room."""
        size, pool = self.tree.block_size, self.tree.pool
        held = self.tree.match(tokens, NAMES[which], partial=False, again=True).take()
        wanted = -(-len(tokens) // size) - len(held)
        room = min(wanted, pool.num_free + self.tree.num_evictable_blocks)
        held = np.concatenate((held, self.tree.allocate(room)))
        kept = tokens[: len(held) * size]
        held = self.tree.insert(kept, held, NAMES[which]).blocks
        pool.release(held)
        if len(kept) < len(tokens):
            self.notes.not_kept(KEYS[which], np.array(tokens), len(held))
            self.diary.not_kept[KEYS[which]] |= prefixes(tokens) - prefixes(kept)

    def bypass(self, which, tokens):
        self.notes.bypassed(KEYS[which], np.array(tokens))
        self.diary.bypassed[KEYS[which]] |= prefixes(tokens)

    def clear(self, which):
        self.tree.clear(b"" if which == 0 else NAMES[which])
        self.notes.cleared({KEYS[which]})
        self.diary.clear([KEYS[which]])

    def clear_all(self):
        self.tree.clear()
        self.diary.clear(KEYS)


PROMPTS = st.lists(st.integers(0, 1), min_size=2, max_size=24)
KINDS = ["ask", *["ask and store"] * 4, "store", "bypass", "evict"]


def events(*more):
    return st.lists(
        st.tuples(st.sampled_from([*KINDS, *more]), st.sampled_from([0, 0, 1, 2]), PROMPTS), max_size=40
    )


def play(world, events):
    """Every note, with all that would be true to say."""
    said = []
    for what, which, tokens in events:
        if what.startswith("ask"):
            said.append(world.ask(which, tokens))
        if what.endswith("store"):
            world.store(which, tokens)
        elif what == "bypass":
            world.bypass(which, tokens)
        elif what == "evict":
            world.tree.evict(min(3, world.tree.num_evictable_blocks))
        elif what == "clear":
            world.clear(which)
        elif what == "clear all":
            world.clear_all()
    return [(note, true) for note, true in said if note is not None]


@given(events(), st.integers(1, 5), st.integers(2, 8))
def test_the_reason_is_the_nearest_true_one(events, block_size, num_blocks):
    """With room for everything, it is known of every token."""
    for note, true in play(World(num_blocks, block_size), events):
        assert note.reason == true[0], (note, true)


@given(events("clear", "clear all"), st.integers(1, 5), st.integers(2, 8))
def test_after_a_clear_it_is_still_a_true_one(events, block_size, num_blocks):
    """A block that is cached anew with another continuation replaces what was known of it before the clear."""
    for note, true in play(World(num_blocks, block_size), events):
        assert note.reason in [*true, "unknown"], (note, true)


@given(events("clear", "clear all"), st.integers(1, 5), st.integers(2, 8))
def test_a_table_that_is_too_small_says_unknown_and_nothing_wrong(events, block_size, num_blocks):
    for note, true in play(World(num_blocks, block_size, num_rows=4), events):
        assert note.reason in [*true, "unknown"], (note, true)


def test_what_is_unknown_stays_rare_while_there_is_room():
    """A system prompt that ends inside a block, and thousands of questions behind it."""
    rng = np.random.default_rng(0)
    system = rng.integers(0, 1000, 37).tolist()
    questions = [[*system, *rng.integers(0, 1000, rng.integers(2, 60)).tolist()] for _ in range(800)]
    world = World(num_blocks=200, block_size=16, num_rows=1 << 14)
    notes = []
    for tokens in questions:
        notes.append(world.ask(0, tokens))
        world.store(0, tokens)
    notes += [world.ask(0, tokens) for tokens in questions[:400]]
    notes = [(note.reason, true[0]) for note, true in notes if note is not None]
    assert {true for _, true in notes} == {"never_seen", "evicted"}
    unsure = [pair for pair in notes if pair[0] != pair[1]]
    assert len(notes) > 1000
    assert len(unsure) < 20
    assert {said for said, _ in unsure} <= {"unknown"}


def test_what_was_generated_is_remembered_too():
    """The next turn of a chat contains an answer that nobody asked for."""
    world = World()
    world.store(0, list(range(10)))
    world.tree.evict(8)
    note, _ = world.ask(0, list(range(14)))
    assert note == MissNote(0, "evicted")
    world.store(0, list(range(4)))
    note, _ = world.ask(0, list(range(14)))
    assert note == MissNote(4, "evicted")
    note, _ = world.ask(0, [0, 1, 2, 3, 9, 9])
    assert note == MissNote(4, "never_seen")


def test_the_namespace_is_named():
    world = World()
    world.notes.learn(canonical_namespace("a"), canonical_namespace(("tenant", "x")))
    world.store(1, [1, 2, 3])
    note, _ = world.ask(0, [1, 2, 3])
    assert note == MissNote(0, "other_namespace", "('tenant', 'x')")
    world.notes.learn(canonical_namespace("b"), canonical_namespace(("tenant", "x")))
    note, _ = world.ask(2, [1, 2, 3])
    assert note.seen_in == "('tenant', 'x'), under other weights, adapters or settings of the model"


def test_more_namespaces_than_are_remembered():
    tree = RadixTree(BlockPool(8), block_size=4)
    notes = MissNotes(8, 4)
    tree.add_listener(notes)
    for i in range(1000):
        tree.match([1, 2, 3], f"tenant {i}", max_tokens=2).release()
    with tree.match([1, 2, 3], "tenant 0", max_tokens=2) as match:
        assert match.note.reason == "unknown", "it may have been in a namespace that was forgotten"


def test_invalidated_is_cleared_and_another_namespace_is_not():
    notes = MissNotes(8, 4)
    tokens = np.arange(6)
    for key, user in ((b"old", b"u"), (b"other", b"v")):
        notes.learn(key, user)
        notes.on_stored(key, tokens, 0, np.zeros(2, np.int32), -1)
    notes.cleared({b"old"}, forever=True)
    notes.learn(b"new", b"u")
    assert notes.on_matched(b"new", tokens, 0, 5, False) == MissNote(0, "other_namespace", "b'v'")
    notes = MissNotes(8, 4)
    notes.learn(b"old", b"u")
    notes.on_stored(b"old", tokens, 0, np.zeros(2, np.int32), -1)
    notes.cleared(None, forever=True)
    notes.learn(b"new", b"u")
    assert notes.on_matched(b"new", tokens, 0, 5, False) == MissNote(0, "cleared")


def test_time_that_runs_out():
    notes = MissNotes(8, 4)
    notes.on_stored(b"", np.arange(6), 0, np.zeros(2, np.int32), -1)
    notes._time = 2**32 - 1
    notes.on_stored(b"", np.arange(7, 13), 0, np.zeros(2, np.int32), -1)
    assert notes.on_matched(b"", np.arange(6), 0, 5, False).reason == "unknown"
    assert notes.on_matched(b"", np.arange(7, 13), 0, 5, False).reason == "evicted"


@pytest.mark.parametrize("num_blocks", [1, 100, 10_000, 10_000_000])
@pytest.mark.parametrize("block_size", [1, 16, 256])
def test_memory_is_bounded(num_blocks, block_size):
    notes = MissNotes(num_blocks, block_size)
    assert notes.num_bytes <= 80 << 20
    row = 12 + 4 * block_size
    assert notes.num_bytes <= 2 * max(1024, 32 * num_blocks) * (row + 1 + 4 * 13)


@given(st.lists(st.lists(st.integers(1, 2**64 - 1), unique=True, max_size=30), max_size=12))
def test_a_table_finds_what_it_has_and_knows_where_it_lost_something(batches):
    table, put = KeyTable(8, width=1), {}
    for time, batch in enumerate(batches, 1):
        keys = np.array(batch, np.uint64)
        places, before = table.put(keys, time)
        for key, then in zip(batch, before.tolist(), strict=True):
            assert then in (put.get(key, 0), 0)
        put.update(dict.fromkeys(batch, time))
        there = places >= 0
        assert (table.find(keys)[there] == places[there]).all()
        assert (table.times[places[there]] == time).all()
    everything = np.array(list(put), np.uint64)
    places, forgotten = table.find(everything), table.may_have_forgotten(everything)
    for key, place, lost in zip(put, places.tolist(), forgotten.tolist(), strict=True):
        assert lost if place < 0 else table.times[place] == put[key]


@pytest.mark.parametrize(
    "name", [None, "a", b"a", "", (), ("a",), ("a", "bc"), (("x", None), b"\0", "ü"), ("s3:abc", "t2:")]
)
def test_namespaces_are_printed_as_they_were_given(name):
    assert readable(canonical_namespace(name)) == repr(name)


@pytest.mark.parametrize("odd", [b"x", b"s9:a", b"t2:n;", b"n;n;", b"s:"])
def test_bytes_that_are_no_namespace_are_printed_as_bytes(odd):
    assert readable(odd) == repr(odd)


def test_every_reason_makes_a_sentence():
    said = {RequestStats.of(900, 512, MissNote(512, reason)).explain() for reason in MISS_REASONS}
    assert len(said) == len(MISS_REASONS)
    assert "hit 512 of 900 tokens; position 512 on was cached before and has been evicted" in said
