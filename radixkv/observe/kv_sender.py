"""The thread that owns the sockets of KV events."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from radixkv.errors import install_hint

try:
    import zmq
except ImportError as error:
    raise ImportError(f"KV events need msgspec and pyzmq: {install_hint('observe')}") from error

from radixkv.observe.kv_endpoints import close_inherited, open_endpoint
from radixkv.observe.kv_messages import Dialect, KVCacheEvent, encode_batch

__all__ = ["EventSource", "Kept", "Sender", "Sockets", "senders"]

EventSource = Callable[[bool], Iterable[Sequence[KVCacheEvent]]]
"""Gives batches of events; told whether a reader came who knows nothing yet. Called on the publisher's thread."""

_log = logging.getLogger(__name__)

# Between two announcements of everything, which all readers get: a reader that comes and goes must neither keep the
# others from their work nor keep this thread busy.
_ANNOUNCE_SECONDS = 5.0
_ANNOUNCE_SHARE = 20  # times as long as the last one took
_RETRY_SECONDS = 0.1, 10.0  # after a failure of the source: the first time, and at most
_END = (-1).to_bytes(8, "big", signed=True)
_SUBSCRIBED = b"\x01"  # first byte of what an XPUB socket receives from a new reader


class Sockets:
    """Opened by whoever makes the publisher, so that errors reach it; then used by the thread alone."""

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str | None,
        bind: bool,
        topic: bytes,
        hwm: int,
        buffer_steps: int,
    ) -> None:
        # Endpoints inside a process are known within one context only.
        shared = endpoint.startswith("inproc://") or (replay_endpoint or "").startswith("inproc://")
        self.context = zmq.Context.instance() if shared else zmq.Context()
        self.topic = topic
        self.replay: Any = None
        self.replay_endpoint: str | None = None
        self.bound: list[str] = []
        # To readers the same as a PUB socket; it also says when one of them comes.
        self.pub: Any = self.context.socket(zmq.XPUB)
        try:
            self.pub.setsockopt(zmq.XPUB_VERBOSE, 1)
            self.pub.set_hwm(hwm)
            if replay_endpoint is not None:
                self.replay = self.context.socket(zmq.ROUTER)
                # What does not fit is lost without a word, and a whole replay goes out in one go.
                self.replay.setsockopt(zmq.SNDHWM, buffer_steps + 1)
                self.replay_endpoint = open_endpoint(self.replay, replay_endpoint, "replay_endpoint")
                self.bound.append(self.replay_endpoint)
            self.endpoint = open_endpoint(self.pub, endpoint, "endpoint", bind=bind)
            if bind:
                self.bound.append(self.endpoint)
        except BaseException:
            self.close(0)
            raise

    def close(self, linger_ms: int) -> None:
        """Close the sockets; what is queued has so many milliseconds to go out."""
        for one in (self.pub, self.replay):
            if one is not None:
                one.close(linger=linger_ms)
        if self.context is not zmq.Context.instance():
            self.context.term()


class Kept:
    """The last batches, for replay."""

    def __init__(self, most: int, most_bytes: int) -> None:
        self._batches: deque[tuple[int, bytes]] = deque()
        self._most, self._most_bytes, self._bytes = most, most_bytes, 0

    def add(self, number: int, payload: bytes) -> None:
        """Keep a batch, and drop the oldest ones beyond the limits."""
        batches = self._batches
        batches.append((number, payload))
        self._bytes += len(payload)
        while len(batches) > self._most or (self._bytes > self._most_bytes and batches):
            self._bytes -= len(batches.popleft()[1])

    def since(self, number: int) -> list[tuple[int, bytes]]:
        """All kept batches from that number on, as `(number, payload)`."""
        return [batch for batch in self._batches if batch[0] >= number]


class Sender:
    """What the thread of a publisher knows. It must not know the publisher, or that would never be collected."""

    def __init__(
        self,
        sockets: Sockets,
        dialect: Dialect,
        rank: int,
        kept: Kept,
        max_queue_size: int,
        linger: float,
        source: EventSource | None,
        announce: bool,
    ) -> None:
        self.sockets, self._dialect, self._rank, self._kept = sockets, dialect, rank, kept
        self._linger, self._source, self._announce = linger, source, announce and source is not None
        self._queue: deque[list[Any]] = deque()  # [events, batches dropped right after them]
        self._most_queued = max_queue_size
        # Reentrant: a collection of garbage may run other people's finalizers anywhere, and they may come here.
        self._state = threading.Condition(threading.RLock())
        self._asked = self._done = 0  # flushes
        self._rung = False
        self._hurry = False
        self._newcomers: float | None = None  # when the first of them came
        self._announced_at = -1e9
        self._announce_took = 0.0
        self._retry_at: float | None = None  # when to ask the source again, which failed
        self._retry_after = _RETRY_SECONDS[0]
        self.num_sent = self.num_dropped = self.next_sequence = 0
        self.stopping = self._finished = self._abandoned = False
        self._bell, self._ear = socket.socketpair()
        self._bell.setblocking(False)
        self._ear.setblocking(False)
        self.thread = threading.Thread(target=self._run, name="radixkv-kv-events", daemon=True)
        senders.add(self)

    # -- from any thread -------------------------------------------------------------------------------------

    def put(self, events: list[KVCacheEvent]) -> bool:
        """Queue a batch; False if it was dropped."""
        with self._state:
            if self.stopping:
                return False
            if len(self._queue) >= self._most_queued:
                self._queue[-1][1] += 1
                self.num_dropped += 1
                return False
            self._queue.append([events, 0])
        self.ring()
        return True

    def ring(self) -> None:
        """Wake the thread."""
        # The thread clears the flag before it looks: whoever sees it set after adding something will be served.
        if not self._rung and not self._abandoned:
            self._rung = True
            with contextlib.suppress(OSError):  # full, which is as good; or closed
                self._bell.send(b"!")

    def flush(self, timeout: float) -> bool:
        """Wait until what was queued before has been handed to ZeroMQ; False if that took too long."""
        with self._state:
            if self._abandoned or self._finished or threading.current_thread() is self.thread:
                return self._finished
            self._asked += 1
            ticket = self._asked
            self._hurry = True
        self._rung = False
        self.ring()
        with self._state:
            self._state.wait_for(lambda: self._done >= ticket or self._finished, timeout)
            return self._done >= ticket

    def ask_to_stop(self) -> None:
        """Takes no lock and waits for nothing: a finalizer may run on any thread, in the middle of anything."""
        self.stopping = self._hurry = True
        self._rung = False
        self.ring()

    def stop(self, timeout: float) -> bool:
        """Ask the thread to send what is queued and end; False if that took longer than `timeout` seconds."""
        self.ask_to_stop()
        if self._abandoned:
            return True
        if threading.current_thread() is self.thread or not self.thread.is_alive():
            return self._finished
        self.thread.join(timeout)
        return not self.thread.is_alive()

    def abandon(self) -> None:
        """In a forked child: the sockets are the parent's, and the thread is not here."""
        self._abandoned = self.stopping = True
        self._state = threading.Condition(threading.RLock())
        if not self._finished:
            self._bell.close()
            self._ear.close()
            for endpoint in self.sockets.bound:
                close_inherited(endpoint)

    # -- the thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._ear.fileno(), zmq.POLLIN)
        poller.register(self.sockets.pub, zmq.POLLIN)
        if self.sockets.replay is not None:
            poller.register(self.sockets.replay, zmq.POLLIN)
        try:
            while True:
                with self._state:
                    ticket, last = self._asked, self.stopping
                    at_once, self._hurry = self._hurry, False
                self._rung = False
                sent = self._send_all(at_once)
                with self._state:
                    if sent:
                        self._done = ticket
                    self._state.notify_all()
                if last:
                    break
                self._wait(poller)
        finally:
            self.sockets.close(linger_ms=1000)
            with self._state:
                self._finished = self.stopping = True
                self._state.notify_all()
            self._bell.close()
            self._ear.close()

    def _wait(self, poller: Any) -> None:
        """Serve readers until there is something to send, and then a moment longer, for a larger batch."""
        heard: float | None = None
        while not (self._hurry and heard is not None):
            due = [] if heard is None else [heard + self._linger]
            if self._retry_at is not None:
                due.append(self._retry_at)
            elif self._newcomers is not None:
                due.append(self._announce_at())
            rest = min(due) - time.monotonic() if due else None
            if rest is not None and rest <= 0:
                return
            for who, _ in poller.poll(None if rest is None else int(rest * 1000) + 1):
                if who is self.sockets.pub:
                    self._hear_subscribers()
                elif who is self.sockets.replay:
                    self._guarded(self._answer)
                else:
                    with contextlib.suppress(OSError):
                        self._ear.recv(4096)
                    heard = time.monotonic() if heard is None else heard

    def _announce_at(self) -> float:
        assert self._newcomers is not None
        pause = max(_ANNOUNCE_SECONDS, _ANNOUNCE_SHARE * self._announce_took)
        return max(self._newcomers + self._linger, self._announced_at + pause)

    def _send_all(self, at_once: bool) -> bool:
        """Send what there is; False if the source failed, and is to be asked again.

        Args:
            at_once: Ask the source even if it failed a moment ago.
        """
        sent = self._retry_at is None
        if self._retry_at is not None and time.monotonic() >= self._retry_at:
            at_once = True
        if self._source is not None and (sent or at_once):
            sent = self._ask_source()
        for _ in range(
            len(self._queue)
        ):  # what comes meanwhile waits, so that replay requests get their turn
            events, dropped = self._next()
            if events and not self._guarded(lambda events=events: self._send(events)):  # type: ignore[misc]
                self._skip()
            self.next_sequence += dropped
        return sent

    def _ask_source(self) -> bool:
        waiting = self._newcomers
        newcomers = waiting is not None and time.monotonic() >= self._announce_at()
        if newcomers:
            self._newcomers = None
        begin = time.monotonic()
        sent = self._guarded(lambda: self._send_from_source(newcomers))
        if not sent:
            # Something is lost, which readers see by a number that is left out.
            self._skip()
            if newcomers:
                self._newcomers = waiting
            self._retry_at = time.monotonic() + self._retry_after
            self._retry_after = min(2 * self._retry_after, _RETRY_SECONDS[1])
            return False
        self._retry_at, self._retry_after = None, _RETRY_SECONDS[0]
        if newcomers:
            self._announced_at = time.monotonic()
            self._announce_took = self._announced_at - begin
        return True

    def _send_from_source(self, newcomers: bool) -> None:
        assert self._source is not None
        for events in self._source(newcomers):
            if events:
                self._send(events)
            else:
                self._skip()

    def _skip(self) -> None:
        self.num_dropped += 1
        self.next_sequence += 1

    def _next(self) -> tuple[list[KVCacheEvent], int]:
        with self._state:
            events, dropped = self._queue.popleft()
            return events, dropped

    def _send(self, events: Sequence[KVCacheEvent]) -> None:
        payload = encode_batch(events, time.time(), self._rank, self._dialect)
        number = self.next_sequence
        self.sockets.pub.send_multipart((self.sockets.topic, number.to_bytes(8, "big"), payload))
        self.next_sequence += 1
        self.num_sent += 1
        if self.sockets.replay is not None:
            self._kept.add(number, payload)

    def _hear_subscribers(self) -> None:
        for _ in range(1000):
            try:
                frame = self.sockets.pub.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            ours = frame[:1] == _SUBSCRIBED and self.sockets.topic.startswith(frame[1:])
            if ours and self._announce and self._newcomers is None:
                self._newcomers = time.monotonic()

    def _answer(self) -> None:
        """Serve one replay request. Requests come with or without the empty frame that a REQ socket puts first."""
        *envelope, wanted = self.sockets.replay.recv_multipart()
        topic = [self.sockets.topic] if self._dialect.replay_topic else []
        if len(wanted) == 8:
            for number, payload in self._kept.since(int.from_bytes(wanted, "big")):
                self.sockets.replay.send_multipart([*envelope, *topic, number.to_bytes(8, "big"), payload])
        else:
            _log.warning(
                "a replay request of %d bytes: it must be a number in 8 bytes, big-endian", len(wanted)
            )
        end = [b""] if topic else []
        self.sockets.replay.send_multipart([*envelope, *end, _END, b""])

    def _guarded(self, action: Callable[[], None]) -> bool:
        """One message that cannot be sent must not end the stream. Returns whether it was."""
        try:
            action()
        except Exception:
            _log.exception("KV events: a batch or an answer was not sent")
            return False
        return True


senders: weakref.WeakSet[Sender] = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    """What is queued at the end of the process still goes out."""
    for sender in list(senders):
        sender.stop(1.0)


def _abandon_all() -> None:
    for sender in list(senders):
        sender.abandon()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_abandon_all)
