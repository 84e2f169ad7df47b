"""Why a prompt missed: what `MissNotes` says against plain sets of everything that ever happened."""

from __future__ import annotations

import sys
import threading
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.cache import miss_notes
from radixkv.cache.key_table import KeyTable
from radixkv.cache.miss_notes import MissNotes, readable
from radixkv.cache.prefix_keys import PrefixKeys
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


@given(events(), st.integers(1, 5), st.integers(2, 8), st.integers(1, 2))
def test_namespaces_that_are_no_longer_known(events, block_size, num_blocks, num_names):
    with mock.patch.multiple(miss_notes, _MAX_NAMES=num_names, _MAX_EARLY=num_names - 1):
        world = World(num_blocks, block_size)
        for note, true in play(world, events):
            assert note.reason in [*true, "unknown"], (note, true)


def test_what_nobody_had_is_told_from_what_somebody_unknown_had():
    rng, unsure, last = np.random.default_rng(0), [], []
    with mock.patch.multiple(miss_notes, _MAX_NAMES=1, _MAX_EARLY=0):
        world = World(num_blocks=16)
        for _ in range(600):
            which, new = int(rng.integers(3)), rng.integers(0, 1000, rng.integers(4, 12)).tolist()
            last = tokens = last[: rng.integers(0, 12)] + new
            note, true = world.ask(which, tokens)
            world.store(which, tokens)
            if note is not None and true == ["never_seen"]:
                unsure.append(note.reason == "unknown")
    assert len(unsure) > 300
    assert sum(unsure) < 0.05 * len(unsure), "only by chance"


@given(events("clear", "clear all"), st.integers(1, 5), st.integers(2, 8))
def test_all_of_it_at_once(events, block_size, num_blocks):
    with mock.patch.multiple(miss_notes, _MAX_NAMES=2, _MAX_EARLY=1):
        for note, true in play(World(num_blocks, block_size, num_rows=4), events):
            assert note.reason in [*true, "unknown"], (note, true)


@given(events(), st.integers(1, 5), st.integers(1, 4))
def test_prompts_of_more_than_one_span(events, block_size, span):
    world = World(8, block_size)
    world.notes._prefixes = PrefixKeys(span)
    for note, true in play(world, events):
        assert note.reason == true[0], (note, true)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(1, 12), st.data())
def test_keys_of_prefixes(tokens, span, data):
    keys, array = PrefixKeys(span), np.array(tokens)
    of_all = [keys.key(array, stop) for stop in range(len(tokens) + 1)]
    assert len(set(of_all)) == len(tokens) + 1
    start = data.draw(st.integers(0, len(tokens) - 1))
    assert keys.following(array, start, of_all[start]).tolist() == of_all[start + 1 :]
    assert keys.key(array, len(tokens), start, of_all[start]) == of_all[-1]
    other = data.draw(st.permutations(tokens))
    assert (keys.key(np.array(other), len(tokens)) == of_all[-1]) == (other == tokens)
    assert len(keys._factors) <= span


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
    """One salt for each user."""
    tree = RadixTree(BlockPool(8), block_size=4)
    notes = MissNotes(8, 4, num_rows=1 << 16)
    tree.add_listener(notes)

    def ask(tokens, name):
        with tree.match(tokens, name, max_tokens=len(tokens) - 1) as match:
            return match.note.reason

    def store(tokens, name):
        tree.pool.release(tree.insert(tokens, tree.allocate(-(-len(tokens) // 4)), name).blocks)

    # Of tokens that count up, the keys do, too, and chance would be all or nothing.
    prompts = np.random.default_rng(0).integers(0, 1 << 40, (1000, 5)).tolist()
    said = []
    for i, tokens in enumerate(prompts):
        said.append(ask(tokens, f"tenant {i}"))
        store(tokens, f"tenant {i}")
        said.append(ask([*tokens[:3], 9, 9], f"tenant {i}"))  # inside a block
    assert set(said) <= {"never_seen", "unknown"}
    assert said.count("unknown") < 0.03 * len(said), "only by chance"
    assert ask(prompts[5], "tenant 5") == "evicted"
    assert ask(prompts[5], "somebody new") == "other_namespace", "of the first ones"
    assert ask(prompts[995], "somebody new") == "other_namespace", "of the last ones"
    assert ask(prompts[500], "somebody new") == "unknown", "of one that was dropped from the list"
    assert ask(prompts[500], "tenant 500") == "evicted", "though it was dropped from the list"


def test_a_miss_costs_no_more_with_many_namespaces():
    notes = MissNotes(64, 4, num_rows=1 << 16)
    tables, asked = notes._rows, []
    rng = np.random.default_rng(0)
    for i in range(1000):
        notes.on_stored(b"%d" % i, rng.integers(0, 1 << 40, 4), 0, np.array([i % 64], np.int32), -1)
    find = tables.find
    with mock.patch.object(tables, "find", side_effect=lambda keys: asked.append(len(keys)) or find(keys)):
        for _ in range(20):
            notes.on_matched(b"990", rng.integers(0, 1 << 40, 4), 0, 3, False)
    assert sorted(asked)[10] <= 3 + 16, "all but those that look like another by chance"


def test_a_new_block_costs_the_same_wherever_it_is():
    """What stands before it is not looked at again: its key is that of its parent, continued."""
    notes, tokens = MissNotes(64, 4), np.arange(200)
    notes.on_stored(b"", tokens[:100], 0, np.arange(25, dtype=np.int32), -1)
    for first in range(25, 50):
        path = tokens[: 4 * first + 4].copy()
        path[: 4 * first] = -1
        notes.on_stored(b"", path, first, np.array([first], np.int32), first - 1)
    for num_hit in range(200):
        assert notes.on_matched(b"", tokens, num_hit, 200, False) == MissNote(num_hit, "evicted")
    other = tokens.copy()
    other[150] += 1
    assert notes.on_matched(b"", other, 150, 200, False) == MissNote(150, "never_seen")
    late = MissNotes(64, 4)  # which did not hear of the parent
    late.on_stored(b"", tokens, 30, np.arange(30, 50, dtype=np.int32), 29)
    assert late.on_matched(b"", tokens, 150, 200, False) == MissNote(150, "evicted")


def test_a_prompt_that_is_much_longer_than_the_memory():
    notes, calls = MissNotes(8, 16, num_rows=1024), []
    tokens = np.random.default_rng(0).integers(0, 50_000, 1_000_000)
    replace = notes._rows._replace
    with mock.patch.object(notes._rows, "_replace", side_effect=lambda *a: calls.append(1) or replace(*a)):
        notes.bypassed(b"u", tokens)
    assert len(calls) <= 2, "not once for each of the keys that fall into one set"
    notes.learn(b"u", b"u")
    assert notes.on_matched(b"u", tokens, 0, len(tokens), False) == MissNote(0, "bypassed")
    assert notes.on_matched(b"u", tokens, 900_000, len(tokens), False).reason in ("bypassed", "unknown")


def test_it_is_told_from_several_threads():
    """The tree tells it under the lock of the pool, the cache under another one."""
    tree = RadixTree(BlockPool(64), block_size=4)
    notes = MissNotes(64, 4, lock=tree.pool.lock)
    tree.add_listener(notes)
    tokens, failed = np.arange(64), []

    def match(i):
        tree.match(tokens, f"a{i % 400}").release()

    def learn(i):
        notes.learn(canonical_namespace(f"b{i % 400}"), b"u")

    def tell(i):
        notes.not_kept(canonical_namespace(f"c{i % 400}"), tokens[: i % 64 + 1], 0)
        notes.bypassed(b"u", tokens[: i % 64 + 1])
        notes.cleared({canonical_namespace(f"a{i % 400}")})

    def run(call):
        try:
            for i in range(1500):
                call(i)
        except Exception as error:
            failed.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=run, args=(call,)) for call in (match, learn, tell)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not failed
    known = {**notes._early, **notes._late}
    assert sorted(name.place for name in known.values()) == list(range(256))
    assert all(notes._places[name.place] is name for name in known.values())
    assert all(notes._seeds[name.place] == name.seed for name in known.values())


@pytest.mark.parametrize("what", ["learn", "not_kept", "bypassed", "cleared"])
def test_what_the_cache_tells_waits_for_the_tree(what):
    lock = threading.RLock()
    notes = MissNotes(8, 4, lock=lock)
    arguments = {"learn": (b"a", b"b"), "not_kept": (b"a", np.arange(6), 0), "bypassed": (b"a", np.arange(6))}
    thread = threading.Thread(target=getattr(notes, what), args=arguments.get(what, (None,)))
    with lock:
        thread.start()
        thread.join(0.1)
        assert thread.is_alive()
    thread.join(10)
    assert not thread.is_alive()


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
    fixed = (1 << 20) + 8 * num_blocks
    assert notes.num_bytes <= (88 << 20) + fixed
    row = 12 + 4 * block_size
    assert notes.num_bytes <= 2 * max(1024, 32 * num_blocks) * (row + 1 + 4 * 13 + block_size) + fixed
    parts = [notes._rows, notes._singles, notes._prefixes]
    arrays = [
        a for part in parts for a in vars(part).values() if isinstance(a, np.ndarray) and a.base is None
    ]
    arrays += [a for a in vars(notes).values() if isinstance(a, np.ndarray)]
    assert sum(a.nbytes for a in arrays) <= notes.num_bytes + 8 * 256
    if num_blocks == 100:
        notes.bypassed(b"", np.zeros(3_000_000, np.int64))
        assert notes._prefixes._factors.nbytes == notes._prefixes.num_bytes == 1 << 20


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
    assert "hit 512 of 900 tokens; from position 512 on, cached before and evicted since" in said
