"""The publisher of KV events on real sockets, read with plain pyzmq and msgpack."""

from __future__ import annotations

import gc
import itertools
import os
import subprocess
import sys
import textwrap
import threading
import time

import msgpack
import pytest
import zmq

from radixkv.observe import kv_sender
from radixkv.observe.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEventPublisher,
    external_hashes,
)
from radixkv.observe.kv_sender import senders

ANY = "tcp://127.0.0.1:*"
END = b"\xff" * 8


def events(i):
    return [BlockStored([i], None, [i, i], 2, None, "GPU", None)]


def eight(number):
    return number.to_bytes(8, "big")


@pytest.fixture
def sockets():
    context = zmq.Context()
    made = []

    def make(kind, endpoint, subscribe=b"", hwm=None):
        one = context.socket(kind)
        if hwm is not None:
            one.set_hwm(hwm)
        if kind == zmq.SUB:
            one.setsockopt(zmq.SUBSCRIBE, subscribe)
        one.connect(endpoint)
        made.append(one)
        return one

    yield make
    for one in made:
        one.close(linger=0)
    context.term()


def joined(publisher, sub):
    """Publish until the subscription has arrived; returns the number of the batch that was heard first."""
    for _ in range(200):
        publisher.publish(events(0))
        if sub.poll(20):
            while sub.poll(60):
                number = sub.recv_multipart()[1]
            return int.from_bytes(number, "big")
    raise AssertionError("nothing arrives")


def received(sub, wait=300):
    got = []
    while sub.poll(wait):
        topic, number, payload = sub.recv_multipart()
        got.append((topic, int.from_bytes(number, "big"), msgpack.unpackb(payload)))
    return got


def replayed(dealer, start, request=None):
    dealer.send_multipart([b"", eight(start) if request is None else request])
    answers = []
    while dealer.poll(2000):
        empty, *frames = dealer.recv_multipart()
        assert empty == b""
        if frames[-2] == END:
            assert frames[-1] == b""
            return answers, frames
        answers.append(frames)
    raise AssertionError("no end marker")


def test_batches_arrive_in_order_with_numbers(sockets):
    with KVEventPublisher(ANY, topic="kv-events", rank=3) as publisher:
        sub = sockets(zmq.SUB, publisher.endpoint, b"kv-")
        last = joined(publisher, sub)
        before = time.time()
        for i in range(100):
            assert publisher.publish(
                [*events(i), BlockRemoved([i], "CPU"), AllBlocksCleared()],
            )
        assert publisher.flush()
        got = received(sub)
        assert [number for _, number, _ in got] == list(range(last + 1, last + 101))
        assert publisher.num_batches == publisher.next_sequence == last + 101
    for i, (topic, _, (ts, told, rank)) in enumerate(got):
        assert (topic, rank) == (b"kv-events", 3)
        assert before <= ts <= time.time()
        assert told == [
            {
                "type": "BlockStored",
                "block_hashes": [i],
                "parent_block_hash": None,
                "token_ids": [i, i],
                "block_size": 2,
                "lora_id": None,
                "medium": "GPU",
                "lora_name": None,
            },
            {"type": "BlockRemoved", "block_hashes": [i], "medium": "CPU"},
            {"type": "AllBlocksCleared"},
        ]


def test_events_by_position(sockets):
    with KVEventPublisher(ANY, dialect="array") as publisher:
        sub = sockets(zmq.SUB, publisher.endpoint)
        joined(publisher, sub)
        adapted = BlockStored([1, 2], 7, [1, 2, 3, 4], 2, None, "GPU", "sql", [("sql",), ("sql",)])
        salted = BlockStored([1], None, [1, 2], 2, None, "GPU", None, [("salt",)], "salt")
        publisher.publish([*events(5), adapted, salted, BlockRemoved([5], "GPU"), AllBlocksCleared()])
        ((_, _, (_, told, _)),) = received(sub)
    assert told == [
        ["BlockStored", [5], None, [5, 5], 2, None, "GPU"],
        ["BlockStored", [1, 2], 7, [1, 2, 3, 4], 2, None, "GPU", "sql", [["sql"], ["sql"]]],
        ["BlockStored", [1], None, [1, 2], 2, None, "GPU", None, [["salt"]]],
        ["BlockRemoved", [5], "GPU"],
        ["AllBlocksCleared"],
    ]


@pytest.mark.parametrize(("dialect", "topic"), [("vllm", [b"t"]), ("sglang", []), ("array", [])])
def test_replay(sockets, dialect, topic):
    with KVEventPublisher(ANY, replay_endpoint=ANY, topic="t", dialect=dialect) as publisher:
        for i in range(20):
            publisher.publish(events(i))
        assert publisher.flush()
        dealer = sockets(zmq.DEALER, publisher.replay_endpoint)
        for start in (0, 13, 19, 20, 10**6):
            answers, end = replayed(dealer, start)
            assert [frames[:-2] for frames in answers] == [topic] * max(0, 20 - start)
            assert [int.from_bytes(frames[-2], "big") for frames in answers] == list(range(start, 20))
            assert end == [b""] * len(topic) + [END, b""]
            for i, frames in enumerate(answers, start):
                payload = msgpack.unpackb(frames[-1])
                assert payload[1] in ([["BlockStored", [i], None, [i, i], 2, None, "GPU"]], payload[1])
                assert (payload[1][0]["token_ids"] if dialect != "array" else payload[1][0][3]) == [i, i]


def test_replay_over_req_gives_the_first_answer_as_with_vllm(sockets):
    """The example of vLLM asks with a REQ socket, which takes one answer for one request."""
    with KVEventPublisher(ANY, replay_endpoint=ANY) as publisher:
        publisher.publish(events(0))
        publisher.publish(events(1))
        assert publisher.flush()
        req = sockets(zmq.REQ, publisher.replay_endpoint)
        for number in (0, 1):
            req.send(eight(number))
            assert req.poll(2000)
            assert req.recv_multipart()[1] == eight(number)


def test_replay_without_the_empty_frame(sockets):
    with KVEventPublisher(ANY, replay_endpoint=ANY) as publisher:
        publisher.publish(events(0))
        assert publisher.flush()
        dealer = sockets(zmq.DEALER, publisher.replay_endpoint)
        dealer.send(eight(0))
        assert dealer.poll(2000)
        assert dealer.recv_multipart()[:2] == [b"", eight(0)]
        assert dealer.recv_multipart() == [b"", END, b""]


def test_nonsense_on_the_replay_socket_is_answered_with_the_end(sockets):
    with KVEventPublisher(ANY, replay_endpoint=ANY) as publisher:
        publisher.publish(events(0))
        assert publisher.flush()
        dealer = sockets(zmq.DEALER, publisher.replay_endpoint)
        for request in (b"", b"abc", b"x" * 1000):
            assert replayed(dealer, 0, request)[0] == []
        assert len(replayed(dealer, 0)[0]) == 1


def test_replay_keeps_so_many_batches_or_bytes(sockets):
    with KVEventPublisher(ANY, replay_endpoint=ANY, buffer_steps=5) as publisher:
        for i in range(20):
            publisher.publish(events(i))
        publisher.flush()
        dealer = sockets(zmq.DEALER, publisher.replay_endpoint)
        assert [frames[1] for frames in replayed(dealer, 0)[0]] == [eight(i) for i in range(15, 20)]
    with KVEventPublisher(ANY, replay_endpoint=ANY, buffer_bytes=1000) as publisher:
        for i in range(20):
            publisher.publish(events(i))
        publisher.flush()
        answers = replayed(sockets(zmq.DEALER, publisher.replay_endpoint), 0)[0]
        assert 1 < len(answers) < 10
        assert 800 < sum(len(frames[-1]) for frames in answers) <= 1000


def test_a_whole_replay_fits_through_the_socket(sockets):
    """ZeroMQ drops, without a word, what exceeds the queue of a ROUTER socket: 1,000 messages by default."""
    with KVEventPublisher(ANY, replay_endpoint=ANY) as publisher:
        for i in range(8000):
            publisher.publish(events(i))
        assert publisher.flush()
        answers, _ = replayed(sockets(zmq.DEALER, publisher.replay_endpoint, hwm=0), 0)
        assert len(answers) == 8000


def test_a_slow_reader_loses_batches_and_gets_them_by_replay(sockets):
    big = [BlockStored([1], None, list(range(20_000)), 20_000, None, "GPU", None)]
    with KVEventPublisher(ANY, replay_endpoint=ANY, hwm=2) as publisher:
        sub = sockets(zmq.SUB, publisher.endpoint, hwm=2)
        first = joined(publisher, sub) + 1
        begin = time.monotonic()
        for _ in range(400):
            publisher.publish(big)
        assert publisher.flush()
        assert time.monotonic() - begin < 5, "a slow reader held up the publisher"
        numbers = [number for _, number, _ in received(sub)]
        assert numbers == sorted(numbers)
        missed = set(range(first, first + 400)) - set(numbers)
        assert missed, "this machine swallowed 30 MB at once: send more"
        dealer = sockets(zmq.DEALER, publisher.replay_endpoint, hwm=0)
        answers, _ = replayed(dealer, min(missed))
        assert missed <= {int.from_bytes(frames[1], "big") for frames in answers}
        assert publisher.num_dropped_batches == 0


def test_a_full_queue_never_blocks_and_leaves_a_gap(sockets):
    inside, go = threading.Event(), threading.Event()

    def source(_):
        inside.set()
        go.wait(10)
        return ()

    with KVEventPublisher(ANY, max_queue_size=10, linger_ms=0, source=source, announce=False) as publisher:
        sub = sockets(zmq.SUB, publisher.endpoint)
        assert inside.wait(5)
        time.sleep(0.3)  # until the subscription is there
        kept = [publisher.publish(events(i)) for i in range(25)]
        go.set()
        assert publisher.flush()
        assert kept == [True] * 10 + [False] * 15
        assert publisher.num_dropped_batches == 15
        assert publisher.publish(events(25))
        assert [number for _, number, _ in received(sub)] == [*range(10), 25]


def test_a_late_reader_is_told_everything(sockets, monkeypatch):
    monkeypatch.setattr(kv_sender, "_ANNOUNCE_SECONDS", 0.5)
    asked = []

    def source(newcomers):
        asked.append(newcomers)
        return [events(77)] if newcomers else []

    with KVEventPublisher(ANY, topic="kv", source=source) as publisher:
        sub = sockets(zmq.SUB, publisher.endpoint, b"kv")
        ((_, _, (_, told, _)),) = received(sub, 1000)
        assert told[0]["token_ids"] == [77, 77]
        other = sockets(zmq.SUB, publisher.endpoint, b"something else")
        assert received(other) == received(sub) == []
        assert asked.count(True) == 1
        third = sockets(zmq.SUB, publisher.endpoint, b"kv")
        assert len(received(third, 1000)) == 1
        assert len(received(sub)) == 1


def test_many_readers_at_once_are_told_together(sockets):
    asked = []
    with KVEventPublisher(ANY, source=lambda newcomers: asked.append(newcomers) or ()) as publisher:
        for _ in range(30):
            sockets(zmq.SUB, publisher.endpoint)
        time.sleep(1.3)
        assert 1 <= asked.count(True) <= 3


@pytest.mark.parametrize("took", [0.0, 0.2])
def test_a_reader_that_comes_and_goes_does_not_keep_the_others_busy(sockets, monkeypatch, took):
    """The first is told everything at once; then all are, so often, or for so large a share of the time, at most."""
    monkeypatch.setattr(kv_sender, "_ANNOUNCE_SECONDS", 0.1 if took else 1.0)
    monkeypatch.setattr(kv_sender, "_ANNOUNCE_SHARE", 5)
    asked = []

    def source(newcomers):
        if newcomers:
            asked.append(time.monotonic())
            time.sleep(took)
            yield [AllBlocksCleared()]

    with KVEventPublisher(ANY, source=source) as publisher:
        begin = time.monotonic()
        context = zmq.Context()
        while time.monotonic() - begin < 3:
            flapping = context.socket(zmq.SUB)
            flapping.setsockopt(zmq.SUBSCRIBE, b"")
            flapping.connect(publisher.endpoint)
            time.sleep(0.05)
            flapping.close(0)
        context.term()
    assert 2 <= len(asked) <= 5
    assert asked[0] - begin < 0.9
    assert min(b - a for a, b in itertools.pairwise(asked)) >= 0.99


def test_a_source_that_fails_is_asked_again(sockets, caplog):
    """Without anybody waking it; what was lost leaves gaps, and the reader who came is not forgotten."""
    asked = []

    def source(newcomers):
        asked.append(newcomers)
        if len(asked) == 1:
            return
        yield events(len(asked))
        if len(asked) < 4:
            raise RuntimeError("not now")

    with KVEventPublisher(ANY, source=source, linger_ms=0) as publisher:
        sub = sockets(zmq.SUB, publisher.endpoint)
        got = received(sub, 1500)
        assert [(number, told[0]["token_ids"][0]) for _, number, (_, told, _) in got] == [
            (0, 2),
            (2, 3),
            (4, 4),
        ]
        assert asked == [False, True, True, True]
        assert publisher.num_dropped_batches == 2
        assert publisher.flush()
    assert caplog.text.count("was not sent") == 2


def test_a_source_that_fails_is_asked_less_and_less(sockets, caplog):
    asked = []

    def source(newcomers):
        asked.append(newcomers)
        raise RuntimeError("never")

    publisher = KVEventPublisher(ANY, source=source, linger_ms=0)
    sockets(zmq.SUB, publisher.endpoint)
    begin, busy = time.monotonic(), time.process_time()
    while time.monotonic() - begin < 1.5:
        publisher.wake()
        time.sleep(0.01)
    assert 3 <= len(asked) <= 6
    assert time.process_time() - busy < 0.9
    assert not publisher.flush(0.3)
    publisher.publish(events(1))
    assert publisher.close()
    assert publisher.num_batches == 1, "what others publish goes out all the same"


def test_a_batch_that_cannot_be_written_leaves_a_gap(sockets, caplog):
    with KVEventPublisher(ANY) as publisher:
        sub = sockets(zmq.SUB, publisher.endpoint)
        last = joined(publisher, sub)
        publisher.publish([BlockStored([object()], None, [], 1, None, None, None)])
        publisher.publish(events(9))
        assert publisher.flush()
        assert [number for _, number, _ in received(sub)] == [last + 2]
        assert publisher.num_dropped_batches == 1


def test_garbage_collected_on_the_sending_thread_in_the_middle_of_its_work():
    """The finalizer of a forgotten publisher runs wherever the collector happens to run."""
    code = """
    import faulthandler, gc, threading, time
    faulthandler.dump_traceback_later(20, exit=True)
    from radixkv.observe.kv_events import KVEventPublisher
    gc.disable()

    def make():
        publisher = KVEventPublisher("tcp://127.0.0.1:*")
        publisher.flush()
        publisher.itself = publisher
        return publisher._sender

    sender = make()
    notify = sender._state.notify_all

    def notify_all():
        if threading.current_thread() is sender.thread:
            gc.collect()  # an automatic collection would come just here
        notify()

    sender._state.notify_all = notify_all
    sender.ring()
    sender.thread.join(10)
    print(sender.thread.is_alive(), sender._state.acquire(timeout=1))
    """
    child = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60
    )
    assert (child.returncode, child.stdout) == (0, "False True\n"), child.stderr


def test_announce_can_be_left_off(sockets):
    asked = []
    with KVEventPublisher(
        ANY, source=lambda newcomers: asked.append(newcomers) or (), announce=False
    ) as publisher:
        sub = sockets(zmq.SUB, publisher.endpoint)
        joined(publisher, sub)
        assert True not in asked


def test_events_are_gathered_for_a_moment(sockets):
    changes = []

    def source(_):
        mine, changes[:] = list(changes), []
        return [mine] if mine else []

    with KVEventPublisher(ANY, source=source, linger_ms=300) as publisher:
        sub = sockets(zmq.SUB, publisher.endpoint)
        time.sleep(0.5)
        for i in range(50):
            changes += events(i)
            publisher.wake()
        ((_, _, (_, told, _)),) = received(sub, 1500)
        assert len(told) == 50


def test_one_bad_batch_does_not_end_the_stream(sockets, caplog):
    with KVEventPublisher(ANY) as publisher:
        sub = sockets(zmq.SUB, publisher.endpoint)
        joined(publisher, sub)
        publisher.publish([BlockStored([object()], None, [], 1, None, None, None)])
        publisher.publish(events(9))
        publisher.flush()
        assert [told[0]["token_ids"] for _, _, (_, told, _) in received(sub)] == [[9, 9]]
    assert "was not sent" in caplog.text


def test_closing_sends_what_is_queued_and_frees_the_port(sockets):
    publisher = KVEventPublisher(ANY, replay_endpoint=ANY)
    sub = sockets(zmq.SUB, publisher.endpoint)
    joined(publisher, sub)
    for i in range(500):
        publisher.publish(events(i))
    assert publisher.close()
    assert publisher.close()
    assert publisher.closed
    assert publisher.flush()
    assert not publisher.publish(events(0))
    publisher.wake()
    assert len(received(sub)) == 500
    KVEventPublisher(publisher.endpoint, replay_endpoint=publisher.replay_endpoint).close()


def test_closed_while_traffic_goes_on(sockets):
    publisher = KVEventPublisher(ANY, replay_endpoint=ANY)
    sub = sockets(zmq.SUB, publisher.endpoint, hwm=0)
    joined(publisher, sub)
    accepted = [0] * 4
    errors = []

    def work(me):
        try:
            while publisher.publish(events(me)):
                accepted[me] += 1
                publisher.wake()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(me,)) for me in range(4)]
    for thread in threads:
        thread.start()
    time.sleep(0.1)
    assert publisher.close(10)
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    assert not errors
    got = [told[0]["token_ids"][0] for _, _, (_, told, _) in received(sub)]
    assert len(got) + publisher.num_dropped_batches >= sum(accepted)
    if not publisher.num_dropped_batches:
        assert [got.count(me) for me in range(4)] == accepted


def count_descriptors():
    return len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0


def test_no_thread_or_socket_is_left(sockets):
    KVEventPublisher(ANY).close()
    threads, descriptors = threading.active_count(), count_descriptors()
    for i in range(20):
        publisher = KVEventPublisher(ANY, replay_endpoint=ANY)
        publisher.publish(events(i))
        publisher.close()
    with pytest.raises(OSError, match="in use"), KVEventPublisher(ANY) as publisher:
        KVEventPublisher(publisher.endpoint)
    gc.collect()
    assert threading.active_count() == threads
    assert count_descriptors() <= descriptors + 2


def test_a_forgotten_publisher_ends():
    publisher = KVEventPublisher(ANY)
    thread = publisher._sender.thread
    assert thread.is_alive()
    del publisher
    gc.collect()
    thread.join(5)
    assert not thread.is_alive()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_keeps_silent(sockets):
    with KVEventPublisher(ANY) as publisher:
        sub = sockets(zmq.SUB, publisher.endpoint)
        joined(publisher, sub)
        child = os.fork()
        if child == 0:
            sent = publisher.publish(events(1))
            publisher.wake()
            publisher.flush(1)
            publisher.close()
            os._exit(0 if not sent and publisher.closed else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert publisher.publish(events(2))
        assert publisher.flush()
        assert [told[0]["token_ids"] for _, _, (_, told, _) in received(sub)] == [[2, 2]]


@pytest.mark.parametrize("ending", ["", "import sys; sys.exit(3)", "raise RuntimeError('x')"])
def test_the_end_of_the_process_flushes(sockets, tmp_path, ending):
    context = zmq.Context()
    sub = context.socket(zmq.SUB)
    sub.setsockopt(zmq.SUBSCRIBE, b"")
    port = sub.bind_to_random_port("tcp://127.0.0.1")
    code = f"""
    from radixkv.observe.kv_events import AllBlocksCleared, KVEventPublisher
    import threading
    there = threading.Event()
    def source(newcomers):
        if newcomers: there.set()
        return ()
    publisher = KVEventPublisher("tcp://127.0.0.1:{port}", bind=False, source=source)
    assert there.wait(10)
    for i in range(200):
        publisher.publish([AllBlocksCleared()])
    {ending}
    """
    begin = time.monotonic()
    child = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stderr=subprocess.PIPE)
    got = []
    while child.poll() is None and time.monotonic() - begin < 60:
        got += received(sub, 50)  # a socket that binds greets readers only while it is used
    said = child.communicate(timeout=10)[1].decode()
    assert child.returncode == {"": 0, "i": 3, "r": 1}[ending[:1]], said
    assert len([*got, *received(sub)]) == 200
    sub.close()
    context.term()


def test_other_transports(sockets, tmp_path):
    with KVEventPublisher(
        f"ipc://{tmp_path}/events", replay_endpoint=f"ipc://{tmp_path}/replay"
    ) as publisher:
        sub = sockets(zmq.SUB, publisher.endpoint)
        joined(publisher, sub)
        assert replayed(sockets(zmq.DEALER, publisher.replay_endpoint), 0)[0]
    with KVEventPublisher("inproc://kv-events-here") as publisher:
        sub = zmq.Context.instance().socket(zmq.SUB)
        sub.setsockopt(zmq.SUBSCRIBE, b"")
        sub.connect(publisher.endpoint)
        joined(publisher, sub)
        sub.close()
    assert not zmq.Context.instance().closed


def test_what_a_port_in_use_says():
    with KVEventPublisher(ANY, replay_endpoint=ANY) as publisher:
        with pytest.raises(
            OSError, match=r"cannot open endpoint='tcp://127.0.0.1:\d+': it is in use: another"
        ):
            KVEventPublisher(publisher.endpoint)
        with pytest.raises(OSError, match=r"cannot open replay_endpoint=.* in use"):
            KVEventPublisher(ANY, replay_endpoint=publisher.endpoint)
        with pytest.raises(OSError, match="no such address or interface"):
            KVEventPublisher("tcp://203.0.113.7:5557")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"endpoint": "5557"}, "endpoint='5557' is no endpoint: write tcp://HOST:PORT"),
        ({"endpoint": "tcp://127.0.0.1"}, "is no endpoint"),
        ({"endpoint": "tcp://:5557"}, "is no endpoint"),
        ({"endpoint": "http://127.0.0.1:5557"}, "is no endpoint"),
        ({"endpoint": "tcp://a b:5557"}, "is no endpoint"),
        ({"endpoint": None}, "endpoint=None is no endpoint"),
        ({"endpoint": ""}, "is no endpoint"),
        ({"endpoint": "tcp://127.0.0.1:70000"}, "a port is at most 65535"),
        ({"endpoint": "tcp://*:5557", "bind": False}, "nothing to connect to"),
        ({"endpoint": "tcp://127.0.0.1:0", "bind": False}, "nothing to connect to"),
        ({"replay_endpoint": "x"}, "replay_endpoint='x' is no endpoint"),
        (
            {"endpoint": "tcp://127.0.0.1:5557", "replay_endpoint": "tcp://127.0.0.1:5557"},
            "cannot be both endpoint and replay_endpoint",
        ),
        ({"dialect": "vlm"}, "dialect='vlm' is unknown: choose one of 'vllm', 'sglang', 'array'"),
        ({"hwm": 0}, "hwm must be an integer of at least 1 and at most 2147483646, got 0"),
        ({"buffer_steps": -1}, "buffer_steps must be"),
        ({"buffer_bytes": "1"}, "buffer_bytes must be"),
        ({"max_queue_size": 0}, "max_queue_size must be"),
        ({"linger_ms": -1}, "linger_ms must be"),
    ],
)
def test_options_that_make_no_sense(options, message):
    before = threading.active_count()
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        KVEventPublisher(**{"endpoint": ANY, **options})
    assert threading.active_count() == before


def test_ipv6(sockets):
    try:
        publisher = KVEventPublisher("tcp://[::1]:*")
    except OSError:
        pytest.skip("no IPv6 here")
    with publisher:
        assert publisher.endpoint.startswith("tcp://[::1]:")


def test_hashes():
    digests = [bytes(range(0xF0, 0x100)), bytes(range(16))]
    assert external_hashes("bytes")(digests) == digests
    assert external_hashes("uint64")(digests) == [0xF8F9FAFBFCFDFEFF, 0x08090A0B0C0D0E0F]
    assert external_hashes("int64")(digests) == [0xF8F9FAFBFCFDFEFF - 2**64, 0x08090A0B0C0D0E0F]
    assert external_hashes("int64")([]) == []
    with pytest.raises(ValueError, match="hashes='md5' is unknown"):
        external_hashes("md5")


def test_nothing_of_these_tests_is_left():
    gc.collect()
    assert [sender for sender in senders if sender.thread.is_alive()] == []
