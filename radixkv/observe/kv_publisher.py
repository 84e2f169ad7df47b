"""Publishing KV events over ZeroMQ."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence

from radixkv.observe.kv_endpoints import check_endpoint
from radixkv.observe.kv_messages import KVCacheEvent, pick_dialect
from radixkv.observe.kv_sender import EventSource, Kept, Sender, Sockets

__all__ = ["EventSource", "KVEventPublisher"]

_LARGEST = 2**31 - 2  # ZeroMQ's options are 32 bits wide


class KVEventPublisher:
    """Sends batches of KV events to whoever subscribes, from a thread of its own.

    Nothing here waits for a reader: one that is too slow loses batches, which it notices by a gap in the
    sequence numbers and can ask for again on the replay socket. What does not fit into the queue is dropped with
    its number, the same way.

    On the wire, a batch is three frames, `(topic, sequence number, msgpack)`, on a PUB socket; the number has 8 bytes,
    big-endian. A replay request is a number in the same form; the answer is every kept batch from that number on,
    and then the number -1 with an empty payload.

    Args:
        endpoint: Where to publish. Port `*` lets the system pick one; `endpoint` of the object says which.
        replay_endpoint: Where to answer replay requests; None for nowhere.
        bind: Listen on `endpoint`; False connects to a reader that listens there.
        topic: First frame of every message.
        dialect: `"vllm"`, `"sglang"` or `"array"`: see `kv_messages.DIALECTS`.
        rank: Data-parallel rank, sent with every batch.
        buffer_steps: Batches kept for replay, and
        buffer_bytes: what they may take together.
        hwm: Messages queued by ZeroMQ for one reader before it loses some.
        max_queue_size: Batches of `publish` that may wait for the thread.
        linger_ms: How long events are gathered into one batch.
        source: Where events come from beside `publish`; asked after each `wake()`. After one that raised it is asked
            again by itself, less and less often.
        announce: Ask the source for everything that is cached when a reader subscribes: at once for the first one,
            then every 5 seconds at most, and for no more than a twentieth of the time.

    Raises:
        ValueError: An option makes no sense.
        OSError: An endpoint cannot be had, such as a port in use.
    """

    def __init__(
        self,
        endpoint: str = "tcp://127.0.0.1:5557",
        *,
        replay_endpoint: str | None = None,
        bind: bool = True,
        topic: str = "",
        dialect: str = "vllm",
        rank: int = 0,
        buffer_steps: int = 10_000,
        buffer_bytes: int = 64 << 20,
        hwm: int = 100_000,
        max_queue_size: int = 100_000,
        linger_ms: float = 10.0,
        source: EventSource | None = None,
        announce: bool = True,
    ) -> None:
        check_endpoint(endpoint, "endpoint", bind=bind)
        if replay_endpoint is not None:
            check_endpoint(replay_endpoint, "replay_endpoint")
            if replay_endpoint == endpoint and not endpoint.endswith((":*", ":0")):
                raise ValueError(
                    f"{endpoint!r} cannot be both endpoint and replay_endpoint: take another port"
                )
        for name, value, least, most in (
            ("rank", rank, 0, _LARGEST),
            ("buffer_steps", buffer_steps, 0, _LARGEST),
            ("buffer_bytes", buffer_bytes, 0, math.inf),
            ("hwm", hwm, 1, _LARGEST),
            ("max_queue_size", max_queue_size, 1, math.inf),
        ):
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
                upper = f" and at most {most}" if most < math.inf else ""
                raise ValueError(f"{name} must be an integer of at least {least}{upper}, got {value!r}")
        if (
            isinstance(linger_ms, bool)
            or not isinstance(linger_ms, (int, float))
            or not 0 <= linger_ms <= 1e6
        ):
            raise ValueError(f"linger_ms must be a number from 0 to 1,000,000, got {linger_ms!r}")
        if not isinstance(topic, str):
            raise ValueError(f"topic must be a str, got {topic!r}")
        for name, value in (("bind", bind), ("announce", announce)):
            if not isinstance(value, bool):
                raise ValueError(f"{name} must be True or False, got {value!r}")
        self._sender = sender = Sender(
            Sockets(endpoint, replay_endpoint, bind, topic.encode(), hwm, buffer_steps),
            pick_dialect(dialect),
            rank,
            Kept(buffer_steps, buffer_bytes),
            max_queue_size,
            linger_ms / 1000,
            source,
            announce,
        )
        self.endpoint = sender.sockets.endpoint
        self.replay_endpoint = sender.sockets.replay_endpoint
        sender.thread.start()
        # When nobody holds this object any more; the thread does not. A collection of garbage must not wait.
        self._finalizer = weakref.finalize(self, sender.ask_to_stop)
        self._finalizer.atexit = False

    @property
    def num_batches(self) -> int:
        """Batches sent."""
        return self._sender.num_sent

    @property
    def num_dropped_batches(self) -> int:
        """Batches that did not fit into the queue or could not be sent: gaps in the numbers, unknown to replay."""
        return self._sender.num_dropped

    @property
    def next_sequence(self) -> int:
        """Number of the next batch."""
        return self._sender.next_sequence

    @property
    def closed(self) -> bool:
        """Whether nothing is sent any more."""
        return self._sender.stopping

    def publish(self, events: Sequence[KVCacheEvent]) -> bool:
        """Queue one batch of `events`; never blocks, and after `close()` does nothing.

        Returns:
            False if it was dropped, because the queue is full or the publisher closed.
        """
        return self._sender.put(list(events))

    def wake(self) -> None:
        """Say that the source has something. Costs next to nothing when it has been said already."""
        self._sender.ring()

    def flush(self, timeout: float = 5.0) -> bool:
        """Wait until all that was published before is handed to ZeroMQ.

        Args:
            timeout: Seconds to wait, at most.

        Returns:
            False if that took too long, or fails.
        """
        return self._sender.flush(timeout)

    def close(self, timeout: float = 3.0) -> bool:
        """Send what is queued, and close the sockets. Twice is once.

        Returns:
            False if that took longer than `timeout` seconds; it goes on in the background.
        """
        self._finalizer.detach()
        return self._sender.stop(timeout)

    def __enter__(self) -> KVEventPublisher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
