"""KV events of a real tree, read by a strict reader that has to end up with the same blocks."""

from __future__ import annotations

import random

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from radixkv.cache.event_listener import Label, TreeEvents, label_of
from radixkv.core import BlockPool, OutOfBlocksError, RadixTree, content_hashes
from radixkv.core.namespace import canonical_namespace
from radixkv.observe.kv_messages import DIALECTS, encode_batch
from tests.cache.kv_event_testkit import Mirror, cached_paths, decode, store

NAMESPACES = {
    None: (None, None),
    "salt": (None, "salt"),
    ("lora", "a"): ("a", None),
    ("lora", "a", "salt"): ("a", "salt"),
}
LABELS = {canonical_namespace(name): label for name, label in NAMESPACES.items()}


class Reader:
    """Fetches events as the publisher's thread does, and sends them through the wire format."""

    def __init__(self, tree, dialect="vllm", hashes="uint64", **options):
        self.tree, self.dialect, self.hashes = tree, DIALECTS[dialect], hashes
        self.events = TreeEvents(tree, hashes=hashes, **options)
        self.mirror = Mirror(tree.block_size)
        self.num_lost = self.num_batches = 0
        self.events.start()

    def fetch(self, newcomers=False):
        for batch in self.events.collect(newcomers):
            self.num_lost += not batch
            self.num_batches += 1
            self.mirror.apply(decode(encode_batch(batch, 1.5, 0, self.dialect))[1])

    def agrees(self):
        want, got = cached_paths(self.tree, LABELS), self.mirror.paths()
        assert got.keys() == want.keys()
        for (label, path), block in got.items():
            name = next(name for name, known in NAMESPACES.items() if known == label)
            digest = content_hashes(path, self.tree.block_size, name)[-1]
            if self.hashes == "bytes":
                assert block == digest
            else:
                assert block == int.from_bytes(digest[8:], "big", signed=self.hashes == "int64")


class EventMachine(RuleBasedStateMachine):
    """After any calls, whoever read all events holds exactly the whole blocks that the tree holds."""

    @initialize(
        num_blocks=st.integers(3, 14),
        block_size=st.integers(1, 4),
        dialect=st.sampled_from(sorted(DIALECTS)),
        hashes=st.sampled_from(["uint64", "int64", "bytes"]),
        most=st.sampled_from([40, 1 << 20]),
        early=st.booleans(),
    )
    def start(self, num_blocks, block_size, dialect, hashes, most, early):
        self.pool = BlockPool(num_blocks)
        self.tree = RadixTree(self.pool, block_size)
        self.held = []  # [namespace, tokens, blocks]
        if not early:
            store(self.tree, [1, 2, 1, 2, 3], "salt")
            store(self.tree, [1, 2, 1, 1])
        self.reader = Reader(self.tree, dialect, hashes, max_pending_tokens=most)

    tokens = st.lists(st.integers(1, 2), min_size=1, max_size=14)
    spaces = st.sampled_from(list(NAMESPACES))

    @rule(tokens=tokens, space=spaces, keep=st.booleans())
    def insert(self, tokens, space, keep):
        blocks = store(self.tree, tokens, space, keep)
        if keep and blocks is not None:
            self.held.append([space, tokens, blocks])

    @precondition(lambda self: self.held)
    @rule(data=st.data(), more=st.lists(st.integers(1, 2), min_size=1, max_size=5), copy=st.booleans())
    def grow(self, data, more, copy):
        """Decode: a held sequence becomes longer, in its last block or in a copy of that."""
        entry = data.draw(st.sampled_from(self.held))
        space, tokens, blocks = entry
        size = self.tree.block_size
        kept = len(tokens) // size if copy else len(blocks)
        tokens = tokens + more
        try:
            own = self.tree.allocate(-(-len(tokens) // size) - kept)
        except OutOfBlocksError:
            return
        try:
            grown = self.tree.insert(tokens, np.concatenate((blocks[:kept], own)), space).blocks
        except ValueError:  # the last block belongs to others, who have other tokens in it
            self.pool.release(own)
            return
        self.pool.release(blocks[kept:])
        entry[1:] = tokens, grown

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data):
        at = data.draw(st.integers(0, len(self.held) - 1))
        self.pool.release(self.held.pop(at)[2])

    @rule(num=st.integers(0, 6))
    def evict(self, num):
        self.tree.evict(num)

    @rule(space=st.none() | spaces)
    def clear(self, space):
        try:
            self.tree.clear_all(None if space is None else [space])
        except ValueError:  # held
            self.tree.drop_evictable()

    @rule(newcomers=st.booleans())
    def fetch(self, newcomers):
        self.reader.fetch(newcomers)

    @rule()
    def agree(self):
        self.reader.fetch()
        self.reader.agrees()

    @invariant()
    def books(self):
        self.tree.check()

    def teardown(self):
        if hasattr(self, "reader"):
            self.agree()
            lost = self.reader.num_lost
            assert lost == 0 or self.reader.events._most_pending == 40


TestEvents = EventMachine.TestCase


@pytest.mark.parametrize("dialect", sorted(DIALECTS))
def test_fc44_event_mirror(dialect):
    """1,000 random inserts, splits, evictions and resets: mirror and cache agree after each."""
    chance = random.Random(44)
    tree = RadixTree(BlockPool(60), 4)
    reader = Reader(tree, dialect)
    removed = 0
    for _ in range(1000):
        what = chance.random()
        before = len(reader.mirror.blocks)
        if what < 0.75:
            tokens = [chance.randint(1, 2) for _ in range(chance.randint(1, 40))]
            store(tree, tokens, chance.choice(list(NAMESPACES)))
        elif what < 0.97:
            tree.evict(chance.randint(1, 12))
        elif what < 0.99:
            tree.clear_all([chance.choice(list(NAMESPACES))])
        else:
            tree.clear_all()
        reader.fetch()
        reader.agrees()
        removed += max(0, before - len(reader.mirror.blocks))
    assert removed > 300
    assert reader.num_lost == 0


def fetched(events, newcomers=False):
    return [event for batch in events.collect(newcomers) for event in batch]


def listening(tree, **options):
    events = TreeEvents(tree, **options)
    events.start()
    return events


def listen(tree, **options):
    events = listening(tree, **options)
    list(events.collect())
    return events


def test_what_is_cached_already_comes_first():
    tree = RadixTree(BlockPool(20), 2)
    store(tree, range(7))
    store(tree, [0, 1, 2, 3, 9, 9, 8])
    reader = Reader(tree)
    reader.fetch()
    reader.agrees()
    assert len(reader.mirror.blocks) == 4  # the tails [6] and [8] are not whole


def test_a_tail_is_announced_when_it_is_full():
    tree = RadixTree(BlockPool(20), 4)
    events = listen(tree)
    blocks = store(tree, range(6), keep=True)
    assert [event.token_ids for event in fetched(events)] == [[0, 1, 2, 3]]
    tree.insert(range(7), blocks)
    assert fetched(events) == []
    tree.insert(range(8), blocks)
    (event,) = fetched(events)
    assert event.token_ids == [4, 5, 6, 7]
    assert event.parent_block_hash == int.from_bytes(content_hashes(range(4), 4)[0][8:], "big")


def test_an_evicted_tail_was_never_there():
    tree = RadixTree(BlockPool(20), 4)
    events = listen(tree)
    store(tree, range(3))
    tree.evict(1)
    assert fetched(events) == []


def test_one_event_for_a_run_and_children_go_first():
    tree = RadixTree(BlockPool(20), 2)
    events = listen(tree)
    store(tree, range(8))
    (stored,) = fetched(events)
    assert len(stored.block_hashes) == 4
    tree.evict(3)
    (gone,) = fetched(events)
    assert gone.block_hashes == stored.block_hashes[:0:-1]


def test_clearing_everything_is_one_event():
    tree = RadixTree(BlockPool(20), 2)
    events = listen(tree)
    store(tree, range(8))
    tree.clear_all()
    store(tree, range(2))
    assert [type(event).__name__ for event in fetched(events)] == ["AllBlocksCleared", "BlockStored"]


def test_a_sequence_that_grows_costs_only_what_is_new(monkeypatch):
    """A decode step late in a long context must not copy, or walk, the whole context."""
    from radixkv.cache import event_listener

    counted = []

    def counting(parent, array, num, size):
        counted.append(num)
        return chain(parent, array, num, size)

    chain = event_listener.chain_digests
    monkeypatch.setattr(event_listener, "chain_digests", counting)
    tree = RadixTree(BlockPool(3000), 16)
    events = listen(tree)
    tokens = list(range(32_000))
    blocks = store(tree, tokens, keep=True)
    fetched(events)
    counted.clear()
    for i in range(20):
        tokens += [i] * 16
        blocks = tree.insert(tokens, np.concatenate((blocks, tree.allocate(1)))).blocks
        assert events._pending == 16
        assert [len(change.tokens) for change in events._changes] == [16]
        assert all(change.tokens.base is None for change in events._changes), "a view keeps the whole"
        fetched(events)
    assert sum(counted) == 20


def test_a_cache_far_ahead_of_its_reader_starts_anew():
    tree = RadixTree(BlockPool(100), 2)
    reader = Reader(tree, max_pending_tokens=50)
    reader.fetch()
    for i in range(40):
        store(tree, [i] * 10)
    assert reader.events._changes == []
    reader.fetch()
    reader.agrees()
    assert reader.num_lost == 1
    store(tree, range(7))
    reader.fetch()
    reader.agrees()
    assert reader.num_lost == 1


def test_what_was_cleared_takes_no_room():
    tree = RadixTree(BlockPool(100), 2)
    reader = Reader(tree, max_pending_tokens=50)
    reader.fetch()
    for _ in range(20):
        store(tree, range(10))
        tree.clear_all()
    reader.fetch()
    assert reader.num_lost == 0


def test_a_batch_that_did_not_get_out_is_made_good():
    tree = RadixTree(BlockPool(100), 2)
    reader = Reader(tree)
    reader.fetch()
    store(tree, range(10))
    broken = reader.events.collect()
    next(broken)
    broken.close()  # as when sending raised
    store(tree, range(50, 60))
    reader.fetch()
    reader.agrees()


def test_large_batches_are_cut():
    tree = RadixTree(BlockPool(20_000), 16)
    events = listen(tree)
    store(tree, range(200_000))
    batches = list(events.collect())
    assert len(batches) == 4
    mirror = Mirror(16)
    for batch in [*batches, *events.collect(newcomers=True)]:
        assert sum(len(getattr(event, "token_ids", ())) for event in batch) <= 1 << 16
        mirror.apply(decode(encode_batch(batch, 0.0, 0, DIALECTS["vllm"]))[1])
        assert mirror.children[None] == 1
    assert len(mirror.blocks) == 12_500


def test_after_stop_nothing_is_noted():
    tree = RadixTree(BlockPool(20), 2)
    events = listen(tree)
    events.stop()
    store(tree, range(8))
    assert fetched(events) == []


def test_a_tree_is_copied_in_one_go_when_it_starts(monkeypatch):
    """An object for each node, made under the lock, kept requests waiting ten times as long."""
    tree = RadixTree(BlockPool(50), 2)
    for i in range(10):
        store(tree, [1, 2, i, i, 3], "salt")
    monkeypatch.setattr(RadixTree, "nodes", lambda self: pytest.fail("one by one"))
    told = fetched(listening(tree))
    assert len(told) == 11
    assert {event.cache_salt for event in told[1:]} == {"salt"}


@given(
    st.binary() | st.sampled_from([b"team:1", b"salt", b"s", b"t", b"s4:evil", b"b3:xyz", b"t2:s4:loras1:a"])
)
def test_bytes_are_no_namespace_of_another_kind(name):
    """Bytes that look like the canonical form of a string are not that string."""
    tree = RadixTree(BlockPool(8), 2)
    events = listen(tree)
    store(tree, [1, 2], name)
    (stored,) = fetched(events)
    assert stored.lora_name is None
    if not name:
        assert stored.cache_salt is None
    else:
        shown = name.decode("utf-8", "backslashreplace")
        assert stored.cache_salt == f"b{len(name)}:{shown}"
        encode_batch([stored], 0.0, 0, DIALECTS["vllm"])


@given(st.binary())
def test_any_bytes_have_a_label_that_can_be_sent(namespace):
    for name in (namespace, canonical_namespace(namespace), canonical_namespace(("lora", namespace))):
        label = label_of(name)
        msgpack.packb([label.lora_name, label.salt])


@given(st.text(st.characters() | st.integers(0xD800, 0xDFFF).map(chr)))
def test_any_text_has_a_label_that_can_be_sent(text):
    for name in (text, ("lora", text), ("lora", text, text)):
        msgpack.packb(list(label_of(canonical_namespace(name))))


@pytest.mark.parametrize(
    "bad", [lambda name: 1 / 0, lambda name: None, lambda name: (1, 2), lambda name: Label("x", b"y")]
)
def test_a_label_that_fails_is_the_canonical_form_for_now(bad, caplog):
    how = [bad]
    tree = RadixTree(BlockPool(20), 2)
    events = listen(tree, label=lambda name: how[0](name))
    store(tree, [1, 2], "a")
    store(tree, [3, 4], "a")
    assert [event.cache_salt for event in fetched(events)] == ["s1:a", "s1:a"]
    assert caplog.text.count("has no label") == 1
    how[0] = lambda name: Label("good", "\ud800")
    store(tree, [5, 6], "a")
    (stored,) = fetched(events)
    assert (stored.lora_name, stored.cache_salt) == ("good", "\\ud800")


def test_labels_of_many_namespaces_do_not_pile_up(monkeypatch):
    from radixkv.cache import event_listener

    monkeypatch.setattr(event_listener, "_MOST_LABELS", 16)
    tree = RadixTree(BlockPool(4), 2)
    events = listen(tree)
    for i in range(100):
        store(tree, [1, 2], f"user {i}")
        assert [e.cache_salt for e in fetched(events) if type(e).__name__ == "BlockStored"] == [f"user {i}"]
        assert len(events._labels) <= 16


def test_what_a_namespace_is_called_is_settled_when_it_is_stored():
    users = {canonical_namespace("key"): canonical_namespace("tenant")}
    tree = RadixTree(BlockPool(20), 2)
    events = TreeEvents(tree, user_of=lambda key: users.get(key, key))
    store(tree, [1, 2], "key")
    events.start()
    assert fetched(events)[1].cache_salt == "tenant"
    store(tree, [3, 4], "key")
    users.clear()  # forgotten before the events are fetched
    assert fetched(events)[0].cache_salt == "tenant"
    assert {event.cache_salt for event in fetched(events, newcomers=True)[1:]} == {"tenant"}


@pytest.mark.parametrize(
    ("namespace", "label"),
    [
        (None, Label()),
        ("", Label(salt="")),
        ("alice", Label(salt="alice")),
        ("s1:x", Label(salt="s1:x")),
        (("lora", "sql"), Label("sql")),
        (("lora", "sql", "alice"), Label("sql", "alice")),
        (("lora",), Label(salt="t1:s4:lora")),
        (("lora", "a", "b", "c"), Label(salt="t4:s4:loras1:as1:bs1:c")),
        (("lora", b"a"), Label(salt="t2:s4:lorab1:a")),
        (("salt", "x"), Label(salt="t2:s4:salts1:x")),
        (b"\xff", Label(salt="b1:\\xff")),
        (("lora", ("a", "b")), Label(salt="t2:s4:lorat2:s1:as1:b")),
        ("日本", Label(salt="日本")),
        (("lora", "a:s1:b"), Label("a:s1:b")),
    ],
)
def test_what_namespaces_are_called(namespace, label):
    assert label_of(canonical_namespace(namespace)) == label
