"""KV events of one tree: listener, publisher and directory together."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from radixkv.cache.event_listener import Label, TreeEvents
from radixkv.core.errors import InvalidRequestError
from radixkv.core.radix_tree import RadixTree
from radixkv.observe.kv_discovery import EventDirectory
from radixkv.observe.kv_messages import KVCacheEvent, pick_dialect
from radixkv.observe.kv_publisher import EventSource, KVEventPublisher

__all__ = ["KVEventStream"]


class KVEventStream:
    """Publishes what a tree caches, until `close()` or until the tree is gone; also a context manager.

    The first batch says that nothing is cached, and then what is. So does one more when a reader subscribes,
    which therefore need not have been there from the start.

    Made by `PrefixCache.publish_events`; a bare `RadixTree` will do, too.

    Args:
        tree: What to publish.
        endpoint: Where to: `tcp://HOST:PORT`, `ipc://PATH` or `inproc://NAME`. It is listened on (see `bind`).
        replay_endpoint: Where readers can ask for batches they missed; None for nowhere.
        http: `HOST:PORT` of a directory for readers such as radixview, see `EventDirectory`; None for none.
        tokenizer: Turns token ids into text for the directory: has a `decode`, or is called itself.
        dialect: `"vllm"`, `"sglang"` or `"array"`.
        hashes: `"uint64"`, `"int64"` or `"bytes"`; None for the dialect's own.
        medium: Where the KV lies, as readers are told.
        topic: First frame of every message; readers subscribe to what it starts with.
        rank: Data-parallel rank of this cache, sent with every batch.
        bind: Listen on `endpoint`; False connects to a reader that listens there.
        announce: When a reader subscribes, tell all of them everything that is cached.
        linger_ms: How long events are gathered into one batch.
        buffer_steps: Batches kept for `replay_endpoint`, and
        buffer_bytes: what they may take together.
        hwm: Messages queued by ZeroMQ for one reader before it loses some.
        label: What a canonical namespace is called in events, see `TreeEvents`; None reads it off the namespace itself.
        user_of: Which user's namespace one of the tree belongs to, see `TreeEvents`; None for itself.

    Attributes:
        endpoint: As it came out, port included.
        replay_endpoint: The same of the replay socket, or None.
        url: Of the directory, or None.

    Raises:
        InvalidRequestError: An option makes no sense, or an endpoint cannot be had; the message says which and why.
        ImportError: msgspec or pyzmq is missing.
    """

    def __init__(
        self,
        tree: RadixTree,
        endpoint: str = "tcp://127.0.0.1:5557",
        *,
        replay_endpoint: str | None = None,
        http: str | None = None,
        tokenizer: Any = None,
        dialect: str = "vllm",
        hashes: str | None = None,
        medium: str = "GPU",
        topic: str = "",
        rank: int = 0,
        bind: bool = True,
        announce: bool = True,
        linger_ms: float = 10.0,
        buffer_steps: int = 10_000,
        buffer_bytes: int = 64 << 20,
        hwm: int = 100_000,
        label: Callable[[bytes], Label] | None = None,
        user_of: Callable[[bytes], bytes] | None = None,
    ) -> None:
        self._directory: EventDirectory | None = None
        try:
            form = pick_dialect(dialect).hashes if hashes is None else hashes
            self._events = events = TreeEvents(tree, hashes=form, medium=medium, label=label, user_of=user_of)
            self._publisher = KVEventPublisher(
                endpoint,
                replay_endpoint=replay_endpoint,
                dialect=dialect,
                source=_source_of(events),
                topic=topic,
                rank=rank,
                bind=bind,
                announce=announce,
                linger_ms=linger_ms,
                buffer_steps=buffer_steps,
                buffer_bytes=buffer_bytes,
                hwm=hwm,
            )
            if http is not None:
                try:
                    self._directory = EventDirectory(
                        http,
                        endpoint=self._publisher.endpoint,
                        topic=topic,
                        block_size=tree.block_size,
                        detokenize=_decoder(tokenizer),
                    )
                except BaseException:
                    self._publisher.close()
                    raise
        except (ValueError, OSError) as error:
            raise InvalidRequestError(str(error)) from error
        self.endpoint = self._publisher.endpoint
        self.replay_endpoint = self._publisher.replay_endpoint
        self.url = None if self._directory is None else self._directory.url
        events.wake = self._publisher.wake
        events.owner = self  # the tree keeps the stream: nobody else need hold it
        events.start()

    @property
    def num_batches(self) -> int:
        """Batches sent."""
        return self._publisher.num_batches

    @property
    def num_dropped_batches(self) -> int:
        """Times that all had to be announced anew: the cache was too far ahead of the thread, or something failed."""
        return self._publisher.num_dropped_batches

    @property
    def closed(self) -> bool:
        """Whether nothing is published any more."""
        return self._publisher.closed

    def flush(self, timeout: float = 5.0) -> bool:
        """Wait until all that the cache did before is handed to ZeroMQ.

        Args:
            timeout: Seconds to wait, at most.

        Returns:
            False if that took too long.
        """
        return self._publisher.flush(timeout)

    def close(self) -> None:
        """Publish what the cache did before, then stop. Twice is once."""
        if self._directory is not None:
            self._directory.close()
        self._events.stop()
        self._publisher.close()
        self._events.owner = None

    def __enter__(self) -> KVEventStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"{self.num_batches} batches sent"
        return f"KVEventStream({self.endpoint}, {state})"


def _source_of(events: TreeEvents) -> EventSource:
    """The thread of the publisher must not keep the tree, and with it the KV, alive."""
    reference = weakref.ref(events)

    def source(newcomers: bool) -> Iterable[Sequence[KVCacheEvent]]:
        there = reference()
        return () if there is None else there.collect(newcomers)

    return source


def _decoder(tokenizer: Any) -> Callable[[Sequence[int]], str] | None:
    if tokenizer is None:
        return None
    decode = getattr(tokenizer, "decode", tokenizer)
    if not callable(decode):
        raise ValueError(f"tokenizer={tokenizer!r} has no decode() and cannot be called")
    return decode
