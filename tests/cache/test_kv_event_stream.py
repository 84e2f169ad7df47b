"""KV events of a live cache on real sockets, and the real radixview drawing it."""

from __future__ import annotations

import contextlib
import gc
import inspect
import json
import os
import socket
import threading
import time
import urllib.error
import urllib.request
import weakref
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import zmq

import radixkv
from radixkv import PrefixCache
from radixkv.cache.event_stream import KVEventStream
from radixkv.core import BlockPool, RadixTree
from radixkv.core.namespace import canonical_namespace
from radixkv.errors import InvalidRequestError
from radixkv.observe.kv_publisher import KVEventPublisher
from radixkv.store.layout import KVLayout, LayerLayout
from tests.cache.kv_event_testkit import Mirror, cached_paths, decode, store

ANY = "tcp://127.0.0.1:*"


def tiny_cache(num_blocks=64, block_size=4):
    layers = (LayerLayout(1, 2, 2),)
    layout = KVLayout(layers, torch.float32, torch.device("cpu"))
    return PrefixCache(layout, num_blocks=num_blocks, block_size=block_size)


class Source:
    """KV of any tokens: zeros."""

    first_position = 0

    def rows(self, layer, start, stop):
        return torch.zeros(1, stop - start, 2), torch.zeros(1, stop - start, 2)


def commit(cache, tokens, namespace=None):
    return cache.commit(np.asarray(tokens, np.int64), canonical_namespace(namespace), Source())


@contextlib.contextmanager
def reading(stream, topic=b""):
    context = zmq.Context()
    sub = context.socket(zmq.SUB)
    sub.set_hwm(0)
    sub.setsockopt(zmq.SUBSCRIBE, topic)
    sub.connect(stream.endpoint)
    try:
        yield sub
    finally:
        sub.close(linger=0)
        context.term()


def follow(sub, mirror, wait=300):
    """Apply what arrives; the numbers seen."""
    numbers = []
    while sub.poll(wait):
        _, number, payload = sub.recv_multipart()
        numbers.append(int.from_bytes(number, "big"))
        mirror.apply(decode(payload)[1])
    return numbers


def test_one_line_and_a_late_reader():
    tree = RadixTree(BlockPool(50), 4)
    store(tree, range(20))
    with KVEventStream(tree, ANY) as stream:
        store(tree, [0, 1, 2, 3, 9, 9, 9, 9, 9])
        stream.flush()
        with reading(stream) as sub:
            mirror = Mirror(4)
            follow(sub, mirror, 1000)
            assert mirror.paths().keys() == cached_paths(tree, {b"": (None, None)}).keys()
            tree.evict(2)
            store(tree, range(30, 40))
            follow(sub, mirror)
            assert mirror.paths().keys() == cached_paths(tree, {b"": (None, None)}).keys()
            assert len(mirror.blocks) == 6


def test_numbers_go_on_and_replay_fills_what_was_missed():
    cache = tiny_cache()
    stream = cache.publish_events(ANY, replay_endpoint=ANY, medium="GPU", linger_ms=0)
    stream.flush()
    for i in range(8):
        commit(cache, range(i * 100, i * 100 + 10))
        stream.flush()
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.connect(stream.replay_endpoint)
    dealer.send_multipart([b"", (0).to_bytes(8, "big")])
    mirror, numbers = Mirror(4), []
    while dealer.poll(2000):
        _, _, number, payload = dealer.recv_multipart()
        if not payload:
            break
        numbers.append(int.from_bytes(number, "big"))
        mirror.apply(decode(payload)[1])
    assert numbers == list(range(9))
    assert mirror.paths().keys() == cached_paths(cache.tree, {b"": (None, None)}).keys()
    dealer.close()
    context.term()
    stream.close()


def test_many_threads_on_one_cache_end_with_the_same_blocks():
    cache = tiny_cache(num_blocks=40)
    with cache.publish_events(ANY, medium="GPU") as stream, reading(stream) as sub:
        mirror = Mirror(4)
        follow(sub, mirror, 1000)
        chance = np.random.default_rng(0)
        prompts = [chance.integers(0, 3, chance.integers(1, 60)) for _ in range(300)]

        def work(mine):
            for prompt in mine:
                commit(cache, prompt)

        threads = [threading.Thread(target=work, args=(prompts[i::4],)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert stream.flush()
        numbers = follow(sub, mirror)
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
        assert mirror.paths().keys() == cached_paths(cache.tree, {b"": (None, None)}).keys()
        assert stream.num_dropped_batches == 0


# The types that readers of vLLM's events declare: `vllm/distributed/kv_events.py`, fields without default required.
class Event(msgspec.Struct, tag=True):
    pass


class BlockStored(Event):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None


class BlockRemoved(Event):
    block_hashes: list[bytes | int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(Event):
    pass


class Batch(msgspec.Struct, array_like=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


class OldEvent(msgspec.Struct, tag=True, array_like=True):
    pass


class OldStored(OldEvent, tag="BlockStored"):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None


class OldRemoved(OldEvent, tag="BlockRemoved"):
    block_hashes: list[int]


class OldCleared(OldEvent, tag="AllBlocksCleared"):
    pass


class OldBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[OldStored | OldRemoved | OldCleared]


@pytest.mark.parametrize(("dialect", "batch"), [("vllm", Batch), ("sglang", Batch), ("array", OldBatch)])
def test_readers_with_declared_types_decode_it(dialect, batch):
    cache = tiny_cache()
    with cache.publish_events(ANY, dialect=dialect, linger_ms=0) as stream, reading(stream) as sub:
        decoder = msgspec.msgpack.Decoder(type=batch)
        commit(cache, range(10))
        commit(cache, range(10), ("lora", "sql", "alice"))
        cache.tree.evict(1)
        cache.clear("nobody")
        cache.clear(("lora", "sql", "alice"))
        cache.clear()
        stream.flush()
        kinds = set()
        while sub.poll(1000 if not kinds else 300):
            kinds |= {
                type(event).__name__.replace("Old", "")
                for event in decoder.decode(sub.recv_multipart()[2]).events
            }
        assert "AllBlocksCleared" in kinds or "Cleared" in kinds


def test_namespaces_and_media(tiny_llama):
    cache = PrefixCache.for_model(tiny_llama, num_blocks=64, block_size=4)
    with cache.publish_events(ANY, linger_ms=0) as stream, reading(stream) as sub:
        assert sub.poll(1000)
        ids = torch.arange(1, 14)[None]
        for namespace in (None, "alice", ("lora", "sql")):
            with cache.attached(tiny_llama, namespace=namespace):
                tiny_llama.generate(ids, max_new_tokens=1)
            cache.match_length([1])  # what was computed is stored by now
        stream.flush()
        told = []
        while sub.poll(300):
            told += decode(sub.recv_multipart()[2])[1]
        stored = [event for event in told if event["type"] == "BlockStored"]
        assert {event["medium"] for event in stored} == {"CPU"}
        labels = [(event["lora_name"], event.get("cache_salt"), event.get("extra_keys")) for event in stored]
        plain, salted, adapted = (
            (None, None, None),
            (None, "alice", [["alice"], None, None]),
            ("sql", None, [["sql"]] * 3),
        )
        assert labels[-3:] == [plain, salted, adapted]
        assert len({event["block_hashes"][0] for event in stored}) == 3
        assert all(event["token_ids"] == list(range(1, 13)) for event in stored)


def test_a_salt_is_the_users_whenever_the_events_are_read():
    """Between what is stored and what is sent, the namespace may be cleared."""
    cache = tiny_cache()
    key = canonical_namespace(("model", "some weights", canonical_namespace("tenant")))
    with cache.publish_events(ANY, announce=False, linger_ms=100) as stream, reading(stream) as sub:
        time.sleep(0.3)
        for _ in range(3):
            cache.commit(np.arange(8), key, Source(), canonical_namespace("tenant"))
            cache.clear("tenant")
            cache.commit(np.arange(8), canonical_namespace(b"s6:tenant"), Source())
            cache.clear(b"s6:tenant")
            stream.flush()
        cache.commit(np.arange(8), key, Source(), canonical_namespace("tenant"))
        cache.tree.evict(1)
        stream.flush()
        told = []
        while sub.poll(300):
            told += decode(sub.recv_multipart()[2])[1]
    salts = [event["cache_salt"] for event in told if event["type"] == "BlockStored"]
    assert salts
    assert set(salts) == {"tenant", "b9:s6:tenant"}
    assert salts[-1] == "tenant"


def test_a_stream_that_failed_once_recovers_by_itself(monkeypatch):
    tree = RadixTree(BlockPool(50), 4)
    with KVEventStream(tree, ANY) as stream, reading(stream) as sub:
        mirror = Mirror(4)
        follow(sub, mirror, 1000)
        translate, failures = stream._events._translate, []

        def failing(changes):
            if len(failures) < 2:
                failures.append(changes)
                raise RuntimeError("once")
            return translate(changes)

        monkeypatch.setattr(stream._events, "_translate", failing)
        store(tree, range(10))
        numbers = follow(sub, mirror, 1000)
        assert mirror.paths().keys() == cached_paths(tree, {b"": (None, None)}).keys()
        assert len(mirror.blocks) == 2
        assert failures
        assert stream.num_dropped_batches == 1
        store(tree, range(50, 60))
        assert follow(sub, mirror, 1000)[0] == numbers[-1] + 2
        assert mirror.paths().keys() == cached_paths(tree, {b"": (None, None)}).keys()
        assert len(mirror.blocks) == 4


def test_one_namespace_for_each_user_costs_no_more_with_time():
    cache = tiny_cache(num_blocks=16)
    with cache.publish_events(ANY, linger_ms=0) as stream:
        for i in range(5000):
            commit(cache, range(8), f"user {i}")
        assert stream.flush(30)
        assert len(cache._owners) <= 256
        assert len(stream._events._labels) <= 4096
        assert len(stream._events._announced) <= 16


def test_the_engine_publishes_too(tiny_llama):
    cache = PrefixCache.for_model(tiny_llama, num_blocks=64, block_size=4)
    engine = radixkv.Engine(tiny_llama, cache=cache)
    with cache.publish_events(ANY, medium="GPU") as stream, reading(stream) as sub:
        mirror = Mirror(4)
        follow(sub, mirror, 1000)
        shared = list(range(1, 30))
        engine.generate(
            [[*shared, 40, 41], [*shared, 50], [7, 8, 9, 10, 11]],
            sampling=radixkv.SamplingParams(max_new_tokens=9),
        )
        stream.flush()
        follow(sub, mirror)
        names = {node.namespace: (None, None) for node in cache.tree.nodes()}
        assert mirror.paths().keys() == cached_paths(cache.tree, names).keys()
        assert len(mirror.blocks) >= 10


def test_a_stream_that_nobody_holds_lives_as_long_as_its_cache():
    cache = tiny_cache()
    cache.publish_events(ANY, http="127.0.0.1:0")
    gc.collect()
    ours = [thread for thread in threading.enumerate() if thread.name.startswith("radixkv-kv")]
    assert len(ours) == 2
    there = weakref.ref(cache)
    del cache
    gc.collect()
    for thread in ours:
        thread.join(5)
        assert not thread.is_alive()
    assert there() is None


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_has_no_part_in_it():
    """It notes nothing, and the ports are free when the parent is done with them, whatever the child does."""
    tree = RadixTree(BlockPool(50), 4)
    stream = KVEventStream(tree, ANY, replay_endpoint=ANY, http="127.0.0.1:0")
    with reading(stream) as sub:
        mirror = Mirror(4)
        follow(sub, mirror, 1000)
        done, go_on = os.pipe(), os.pipe()
        child = os.fork()
        if child == 0:
            try:
                store(tree, range(10))
                tree.clear_all()
                noted = list(stream._events._changes)
                begin = time.monotonic()
                quiet = stream.closed and not stream.flush(1) and not list(stream._events.collect())
                stream.close()
                assert (noted, quiet) == ([], True)
                assert time.monotonic() - begin < 1
                os.write(done[1], b"+")
                os.read(go_on[0], 1)
                os._exit(0)
            finally:
                os.write(done[1], b"-")
                os._exit(1)
        assert os.read(done[0], 1) == b"+"
        assert get(f"{stream.url}/server_info")
        store(tree, range(50, 60))
        follow(sub, mirror)
        assert len(mirror.blocks) == 2
        stream.close()
        again = KVEventStream(
            RadixTree(BlockPool(8), 4),
            stream.endpoint,
            replay_endpoint=stream.replay_endpoint,
            http=stream.url.removeprefix("http://"),
        )
        assert again.url == stream.url
        again.close()
        os.write(go_on[1], b"!")
        assert os.waitpid(child, 0)[1] == 0
        for end in (*done, *go_on):
            os.close(end)


def test_closing_lets_the_cache_go_on_alone():
    cache = tiny_cache()
    listeners = cache.tree._listeners
    stream = cache.publish_events(ANY, replay_endpoint=ANY, http="127.0.0.1:0")
    assert len(cache.tree._listeners) == len(listeners) + 1
    stream.close()
    stream.close()
    assert stream.closed
    assert "closed" in repr(stream)
    commit(cache, range(10))
    assert cache.tree._listeners == listeners
    again = cache.publish_events(stream.endpoint, replay_endpoint=stream.replay_endpoint)
    assert again.endpoint == stream.endpoint
    again.close()


def test_two_streams_of_one_cache():
    cache = tiny_cache()
    with cache.publish_events(ANY) as one, cache.publish_events(ANY, dialect="array") as two:
        commit(cache, range(10))
        assert one.flush()
        assert two.flush()
        assert one.endpoint != two.endpoint


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"endpoint": "5557"}, "endpoint='5557' is no endpoint"),
        ({"replay_endpoint": "udp://x:1"}, "replay_endpoint='udp://x:1' is no endpoint"),
        ({"topic": None}, "topic must be a str, got None"),
        ({"topic": b"kv"}, "topic must be a str"),
        ({"rank": "a"}, "rank must be an integer of at least 0 and at most 2147483646, got 'a'"),
        ({"rank": -1}, "rank must be"),
        ({"rank": True}, "rank must be"),
        ({"medium": 3}, "medium must be a str, got 3"),
        ({"bind": "no"}, "bind must be True or False, got 'no'"),
        ({"announce": None}, "announce must be"),
        ({"linger_ms": float("nan")}, "linger_ms must be a number"),
        ({"linger_ms": float("inf")}, "linger_ms must be a number"),
        ({"buffer_steps": 1.5}, "buffer_steps must be an integer"),
        ({"buffer_steps": 2**31}, "buffer_steps must be an integer"),
        ({"hwm": 2**40}, "hwm must be an integer"),
        ({"buffer_bytes": None}, "buffer_bytes must be an integer"),
        ({"dialect": ["vllm"]}, r"dialect=\['vllm'\] is unknown"),
        ({"hashes": {}}, "hashes={} is unknown"),
        ({"dialect": "trt"}, "dialect='trt' is unknown"),
        ({"hashes": "sha"}, "hashes='sha' is unknown"),
        ({"http": "30000"}, "http='30000' is no address: write HOST:PORT"),
        ({"http": "127.0.0.1:x"}, "is no address"),
        ({"endpoint": "inproc://x", "http": "127.0.0.1:0"}, "publish to tcp://"),
        ({"http": "127.0.0.1:0", "tokenizer": 3}, "tokenizer=3 has no decode"),
        ({"http": "203.0.113.7:30000"}, "cannot listen on http='203.0.113.7:30000'"),
    ],
)
def test_what_makes_no_sense_is_refused_and_leaves_nothing(options, message):
    cache = tiny_cache()
    before, listeners = threading.active_count(), cache.tree._listeners
    with pytest.raises(InvalidRequestError, match=message):
        cache.publish_events(**{"endpoint": ANY, **options})
    assert cache.tree._listeners == listeners
    assert threading.active_count() == before


@pytest.mark.parametrize("name", ["replay", "topicc", "max_queue_size", "source"])
def test_names_of_options_are_checked(name):
    with pytest.raises(TypeError, match=name):
        tiny_cache().publish_events(ANY, **{name: "x"})
    with pytest.raises(TypeError, match=name):
        KVEventStream(tiny_cache().tree, ANY, **{name: "x"})


def test_a_stream_has_the_options_of_its_publisher_and_a_cache_those_of_its_stream():
    def options(function):
        return {
            name: given.default
            for name, given in inspect.signature(function).parameters.items()
            if given.kind == 3
        }

    publisher, stream = options(KVEventPublisher.__init__), options(KVEventStream.__init__)
    cache = options(PrefixCache.publish_events)
    assert publisher.items() - stream.items() == {("max_queue_size", 100_000), ("source", None)}
    assert stream.items() - cache.items() == {("medium", "GPU"), ("label", None), ("user_of", None)}
    assert cache.items() - stream.items() == {("medium", None)}


def test_ports_in_use_are_named():
    cache = tiny_cache()
    with cache.publish_events(ANY, http="127.0.0.1:0") as stream:
        with pytest.raises(InvalidRequestError, match=r"cannot open endpoint='tcp.*' ?: it is in use"):
            cache.publish_events(stream.endpoint)
        address = stream.url.removeprefix("http://")
        with pytest.raises(InvalidRequestError, match=r"cannot listen on http=.*in use"):
            cache.publish_events(ANY, http=address)


def test_a_missing_package_is_named(monkeypatch):
    import sys

    for name in list(sys.modules):
        if name.startswith(("radixkv.observe.kv", "radixkv.cache.event")):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "msgspec", None)
    with pytest.raises(ImportError, match='install the extra "observe"'):
        tiny_cache().publish_events(ANY)


# ------------------------------------------------------------------------------------------------- directory


def get(url, body=None):
    request = urllib.request.Request(url, data=None if body is None else json.dumps(body).encode())
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=5) as answer:
        return json.load(answer)


def test_the_directory():
    cache = tiny_cache()
    with cache.publish_events(
        ANY, topic="kv", http="127.0.0.1:0", tokenizer=lambda ids: "/".join(map(str, ids))
    ) as s:
        info = get(f"{s.url}/server_info")
        assert info["kv_events"] == {
            "publisher": "zmq",
            "endpoint_host": "*",
            "endpoint_port_base": int(s.endpoint.rpartition(":")[2]),
            "topic": "kv",
            "block_size": 4,
            "dp_size": 1,
        }
        assert get(f"{s.url}/detokenize", {"tokens": [1, 2]}) == {"text": "1/2"}
        for path, body, code in (
            ("/", None, 404),
            ("/../etc/passwd", None, 404),
            ("/x", {}, 404),
            ("/detokenize", {}, 400),
            ("/detokenize", {"tokens": 7}, 400),
        ):
            with pytest.raises(urllib.error.HTTPError) as error:
                get(s.url + path, body)
            assert error.value.code == code
            error.value.close()


# ------------------------------------------------------------------------------------------------- radixview


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def radixview(server):
    """The real program, on a port of its own; gives a function that asks what its page asks."""
    from radixview.config import MonitorConfig
    from radixview.serve import serve

    port, stop = free_port(), threading.Event()
    thread = threading.Thread(target=serve, args=(MonitorConfig(server, view_port=port), stop))
    thread.start()

    def ask(path):
        return get(f"http://127.0.0.1:{port}{path}")

    try:
        yield ask
    finally:
        stop.set()
        thread.join(10)
        assert not thread.is_alive()


def drawn(ask, blocks, seconds=10):
    """The page's tree once it has so many blocks."""
    end = time.monotonic() + seconds
    while True:
        with contextlib.suppress(urllib.error.URLError):
            seen = ask("/api/tree")
            if seen["stats"]["blocks"] == blocks:
                return seen
        assert time.monotonic() < end, f"radixview shows {seen['stats']}, not {blocks} blocks"
        time.sleep(0.05)


def shape(ask, seen):
    """`{text of the path: (blocks, tokens)}` of what radixview draws."""
    nodes = {node["id"]: node for node in seen["nodes"]}

    def path(node):
        above = "" if node["parent"] is None else path(nodes[node["parent"]]) + " | "
        texts = [block["text"].strip() for block in ask(f"/api/run?id={node['id']}")["blocks"]]
        assert node["preview"] == texts[0]
        return above + " ".join(texts)

    return {path(node): (node["blocks"], node["tokens"]) for node in nodes.values()}


@pytest.mark.parametrize("dialect", ["vllm", "sglang", "array"])
def test_radixview_draws_a_live_cache(dialect, caplog):
    words = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
    cache = tiny_cache(num_blocks=64, block_size=4)
    commit(cache, [0, 1, 2, 3, 4, 5, 6, 7])  # before radixview is there
    stream = cache.publish_events(
        ANY,
        dialect=dialect,
        http="127.0.0.1:0",
        tokenizer=lambda ids: "".join(words[i] + " " for i in ids),
        medium="GPU",
    )
    with caplog.at_level("INFO"), stream, radixview(stream.url) as ask:
        drawn(ask, 2)
        commit(cache, [0, 1, 2, 3, 9, 9, 9, 9])
        commit(cache, [0, 1, 2, 3, 4, 5, 6, 7, 8, 8, 8, 8, 8])
        commit(cache, [5, 5, 5, 5], "alice")
        seen = drawn(ask, 5)
        assert seen["stats"] == {"blocks": 5, "tokens": 20, "nodes": 4, "missing": 0}
        assert shape(ask, seen) == {
            "zero one two three": (1, 4),
            "zero one two three | four five six seven eight eight eight eight": (2, 8),
            "zero one two three | nine nine nine nine": (1, 4),
            "five five five five": (1, 4),
        }
        assert {node["medium"] for node in seen["nodes"]} == {"GPU"}
        (found,) = ask("/api/search?q=nine")["ids"]
        (block,) = ask(f"/api/run?id={found}")["blocks"]
        assert (block["text"], block["tokens"]) == ("nine nine nine nine ", 4)

        cache.clear("alice")
        drawn(ask, 4)
        cache.tree.evict(2)  # the tail of eights was the third leaf: it takes a block, too
        left = len(cached_paths(cache.tree, {b"": (None, None)}))
        seen = drawn(ask, left)
        assert sum(node["blocks"] for node in seen["nodes"]) == left
        cache.clear()
        assert drawn(ask, 0)["nodes"] == []
    assert "sequence gap" not in caplog.text
    assert "publisher restarted" not in caplog.text
    assert "dropped malformed" not in caplog.text


def test_radixview_shows_token_ids_without_a_tokenizer():
    cache = tiny_cache()
    with cache.publish_events(ANY, http="127.0.0.1:0") as stream, radixview(stream.url) as ask:
        commit(cache, [17, 4, 99, 3])
        assert shape(ask, drawn(ask, 1)) == {"17 4 99 3": (1, 4)}


def test_radixview_draws_an_engine(tiny_llama):
    cache = PrefixCache.for_model(tiny_llama, num_blocks=64, block_size=4)
    engine = radixkv.Engine(tiny_llama, cache=cache)
    with cache.publish_events(ANY, http="127.0.0.1:0") as stream, radixview(stream.url) as ask:
        shared = list(range(1, 17))
        engine.generate([[*shared, 40], [*shared, 50]], sampling=radixkv.SamplingParams(max_new_tokens=8))
        names = {node.namespace: (None, None) for node in cache.tree.nodes()}
        want = cached_paths(cache.tree, names)
        seen = drawn(ask, len(want))
        assert seen["stats"]["tokens"] == 4 * len(want)
        (root,) = [node for node in seen["nodes"] if node["parent"] is None]
        assert (root["preview"], root["tokens"]) == ("1 2 3 4", 16)
        assert seen["stats"]["missing"] == 0
