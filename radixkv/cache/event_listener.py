"""From what a radix tree tells its listeners to KV events."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Iterable, Iterator
from itertools import repeat
from typing import NamedTuple

import numpy as np

from radixkv.core.block_states import BlockIds
from radixkv.core.hashing import chain_digests, root_digest
from radixkv.core.listener import TreeListener
from radixkv.core.namespace import namespace_parts
from radixkv.core.radix_tree import RadixTree
from radixkv.core.tokens import TOKEN_BYTES, TokenArray
from radixkv.core.tree_copy import TreeCopy, copy_tree
from radixkv.observe.kv_messages import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVCacheEvent,
    external_hashes,
)

__all__ = ["Label", "TreeEvents", "label_of"]

# Events of so many tokens make a batch; a batch that is lost, and asked for again, should not be the whole cache.
_BATCH_TOKENS = 1 << 16
_BATCH_BLOCKS = 1 << 12
_MOST_LABELS = 4096

_log = logging.getLogger(__name__)


class Label(NamedTuple):
    """What a namespace is called in events; block hashes differ between namespaces whatever they are called.

    Attributes:
        lora_name: Adapter, or None.
        salt: What else sets it apart, as text, or None.
    """

    lora_name: str | None = None
    salt: str | None = None


# A block that readers know of: its address, its parent's, its tokens as bytes, and what its namespace is called by.
# Tuples are made fastest.
_Announced = tuple[bytes, bytes | None, bytes, bytes]


class _Stored(NamedTuple):
    namespace: bytes
    name: bytes
    tokens: TokenArray  # of these blocks
    blocks: BlockIds
    parent: int


class _Removed(NamedTuple):
    blocks: BlockIds


_CLEARED = None
_Change = _Stored | _Removed | None


class TreeEvents(TreeListener):
    """Notes what the tree does, and makes events of it later, on another thread.

    Only whole blocks are announced: a partly filled one when it has become full. Nothing is removed that was not
    announced. Under the lock of the tree, a change costs a copy of the tokens that are new. Should too much be noted
    that nobody fetched, then all of it is forgotten, and the next events say that everything is gone and announce
    anew what is cached: for that, and at the start, the tree is copied under its lock.

    Args:
        tree: The tree to listen to; `start()` begins.
        hashes: Form of block hashes, see `external_hashes`.
        medium: Where the KV lies.
        label: What a canonical namespace is called; called on the thread that fetches events. One that raises, or
            returns something else, leaves it at the canonical form.
        user_of: The user's canonical namespace that a tree namespace (canonical) belongs to, which is what `label`
            gets; None leaves it as it is. Called under the lock of the tree, when something is stored: must be
            quick, and must not raise.
        wake: Called after each change, under the lock of the tree: must be quick.
        max_pending_tokens: Most tokens noted and not fetched.
    """

    def __init__(
        self,
        tree: RadixTree,
        *,
        hashes: str = "uint64",
        medium: str = "GPU",
        label: Callable[[bytes], Label] | None = None,
        user_of: Callable[[bytes], bytes] | None = None,
        wake: Callable[[], None] | None = None,
        max_pending_tokens: int = 1 << 23,
    ) -> None:
        self._tree = tree
        self._size = tree.block_size
        self._external = external_hashes(hashes)
        if not isinstance(medium, str):
            raise ValueError(f"medium must be a str, got {medium!r}")
        self._medium = medium
        self._label_of = label or label_of
        self._user_of = user_of or (lambda namespace: namespace)
        self.wake: Callable[[], None] = wake or (lambda: None)
        self.owner: object = None  # kept alive
        self._most_pending = max_pending_tokens
        # Written under the lock of the tree.
        self._changes: list[_Change] = []
        self._pending = 0
        self._anew = False  # readers must be told everything
        self._overflowed = False
        # Of the thread that fetches. A parent stands before its children: it came before them and goes after them.
        self._announced: dict[int, _Announced] = {}
        self._labels: dict[bytes, Label] = {}
        self._complained = False
        self._deaf = False
        _listening.add(self)

    # -- under the lock of the tree --------------------------------------------------------------------------

    def start(self) -> None:
        """Listen from now on; the first events announce what is cached already."""
        with self._tree.pool.lock:
            self._changes, self._pending, self._anew = [], 0, True
            self._tree.add_listener(self)
        self.wake()

    def stop(self) -> None:
        """Listen no more."""
        self._tree.remove_listener(self)

    def abandon(self) -> None:
        """In a forked child: nobody fetches, and whoever held the lock of the tree may not be here."""
        self._deaf = self._anew = True
        self._changes = []

    def on_stored(
        self, namespace: bytes, tokens: TokenArray, first: int, blocks: BlockIds, parent: int
    ) -> None:
        """See `TreeListener`."""
        num = len(tokens) // self._size - first
        if num > 0 and self._has_room(num * self._size):
            fresh = tokens[first * self._size : (first + num) * self._size].copy()
            name = self._user_of(namespace)
            self._changes.append(_Stored(namespace, name, fresh, blocks[:num].copy(), parent))
            self.wake()

    def on_removed(self, blocks: BlockIds) -> None:
        """See `TreeListener`."""
        if self._has_room(len(blocks)):
            self._changes.append(_Removed(blocks.copy()))
            self.wake()

    def on_cleared(self) -> None:
        """See `TreeListener`."""
        if not self._anew:
            self._changes = [_CLEARED]
            self._pending = 0
            self.wake()

    def _has_room(self, num_tokens: int) -> bool:
        if self._anew:
            return False
        self._pending += num_tokens
        if self._pending > self._most_pending:
            self._changes = []
            self._anew = self._overflowed = True
            self.wake()
        return not self._anew

    # -- on the thread that fetches ----------------------------------------------------------------------------

    def collect(self, newcomers: bool = False) -> Iterator[list[KVCacheEvent]]:
        """Batches of events since the last time; an empty one stands for some that were lost.

        Args:
            newcomers: Some reader knows nothing yet: announce, after that, all that is cached.

        Yields:
            One batch after the other, each a list of `KVCacheEvent`.
        """
        cached: TreeCopy | None = None
        with self._tree.pool.lock:
            if self._deaf:
                return
            changes, self._changes, self._pending = self._changes, [], 0
            overflowed, self._overflowed = self._overflowed, False
            if self._anew:
                cached, self._anew = copy_tree(self._tree), False
                names = {namespace: self._user_of(namespace) for namespace in set(cached.namespaces)}
        done = False
        try:
            if overflowed:
                yield []
            if cached is None:
                yield from _batches(self._translate(changes))
            else:
                self._learn(cached, names)
            if newcomers or cached is not None:
                yield from _batches(self._everything())
            done = True
        finally:
            if not done:  # an event did not get out, so that readers and we no longer agree
                with self._tree.pool.lock:
                    self._changes, self._pending, self._anew = [], 0, True

    def _translate(self, changes: Iterable[_Change]) -> Iterator[KVCacheEvent]:
        for change in changes:
            if isinstance(change, _Stored):
                yield from self._stored(change)
            elif isinstance(change, _Removed):
                known = [self._announced.pop(block, None) for block in change.blocks[::-1].tolist()]
                digests = [block[0] for block in known if block is not None]
                if digests:
                    yield BlockRemoved(self._external(digests), self._medium)
            else:
                self._announced.clear()
                yield AllBlocksCleared()

    def _stored(self, change: _Stored) -> Iterator[KVCacheEvent]:
        namespace, name, tokens, ids, parent = change
        before = None if parent < 0 else self._announced[parent][0]
        digests = self._announce(namespace, name, tokens, ids.tolist(), before)
        return self._runs(digests, before, tokens, name)

    def _announce(
        self, namespace: bytes, name: bytes, tokens: TokenArray, blocks: list[int], parent: bytes | None
    ) -> list[bytes]:
        """Note blocks that follow the one with address `parent`; returns their addresses."""
        start = root_digest(self._size, namespace) if parent is None else parent
        digests = chain_digests(start, tokens, len(blocks), self._size)
        before = [parent, *digests]
        data, step = tokens.tobytes(), self._size * TOKEN_BYTES
        pieces = [data[i : i + step] for i in range(0, len(blocks) * step, step)]
        self._announced.update(
            zip(blocks, zip(digests, before, pieces, repeat(name), strict=False), strict=True)
        )
        return digests

    def _learn(self, cached: TreeCopy, names: dict[bytes, bytes]) -> None:
        """All that is cached, from the tree itself."""
        self._announced.clear()
        last: list[bytes | None] = []  # address of the last block of each node
        for node, (namespace, parent) in enumerate(zip(cached.namespaces, cached.parents, strict=True)):
            tokens = cached.tokens_of(node)
            num = len(tokens) // self._size
            digest = None if parent < 0 else last[parent]
            if num:
                blocks = cached.blocks_of(node)[:num].tolist()
                name = names[namespace]
                digest = self._announce(namespace, name, tokens[: num * self._size], blocks, digest)[-1]
            last.append(digest)

    def _everything(self) -> Iterator[KVCacheEvent]:
        """Say that all is gone, then announce all: readers who missed something agree again."""
        yield AllBlocksCleared()
        run: list[_Announced] = []
        for block in self._announced.values():
            # An address stands for the namespace, too; only first blocks have none before them.
            if run and (block[1] != run[-1][0] or len(run) == _BATCH_BLOCKS):
                yield from self._run_of(run)
                run = []
            run.append(block)
        if run:
            yield from self._run_of(run)

    def _run_of(self, run: list[_Announced]) -> Iterator[KVCacheEvent]:
        tokens = np.frombuffer(b"".join([block[2] for block in run]), np.int64)
        return self._runs([block[0] for block in run], run[0][1], tokens, run[0][3])

    def _label(self, name: bytes) -> Label:
        """What a namespace is called: its canonical form, if nothing better can be had just now."""
        label = self._labels.get(name)
        if label is None:
            try:
                lora_name, salt = self._label_of(name)
                label = Label(_sendable(lora_name), _sendable(salt))
            except Exception:
                if not self._complained:
                    self._complained = True
                    _log.exception("KV events: a namespace has no label, and goes by its canonical form")
                return Label(salt=_as_text(name))
            if len(self._labels) == _MOST_LABELS:
                self._labels.clear()
            self._labels[name] = label
        return label

    def _runs(
        self, digests: list[bytes], before: bytes | None, tokens: TokenArray, name: bytes
    ) -> Iterator[KVCacheEvent]:
        label = self._label(name)
        hashes = self._external(digests)
        parent = None if before is None else self._external([before])[0]
        most = max(1, min(_BATCH_BLOCKS, _BATCH_TOKENS // self._size))
        for start in range(0, len(hashes), most):
            part = hashes[start : start + most]
            stored = BlockStored(
                part,
                parent,
                tokens[start * self._size : (start + len(part)) * self._size].tolist(),
                self._size,
                None,
                self._medium,
                label.lora_name,
            )
            if label.salt is not None or label.lora_name is not None:
                stored.extra_keys = _extra_keys(label, len(part), parent is None)
                stored.cache_salt = label.salt
            yield stored
            parent = part[-1]


def _batches(events: Iterable[KVCacheEvent]) -> Iterator[list[KVCacheEvent]]:
    """Events in groups of a bounded number of tokens."""
    batch: list[KVCacheEvent] = []
    num_tokens = 0
    for event in events:
        batch.append(event)
        num_tokens += len(event.token_ids) if isinstance(event, BlockStored) else 1
        if num_tokens >= _BATCH_TOKENS:
            yield batch
            batch, num_tokens = [], 0
    if batch:
        yield batch


def _extra_keys(label: Label, num_blocks: int, at_root: bool) -> list[tuple[str, ...] | None] | None:
    """As vLLM has them: the adapter on every block, the salt on the first one of a prompt."""
    each = None if label.lora_name is None else (label.lora_name,)
    keys: list[tuple[str, ...] | None] = [each] * num_blocks
    if at_root and label.salt is not None:
        keys[0] = (*(each or ()), label.salt)
    return keys if any(keys) else None


def label_of(namespace: bytes) -> Label:
    """What a canonical namespace is called in events; takes any bytes and never raises.

    `None` is the base model without a salt; a plain `str` is a salt, as vLLM's `cache_salt`; `("lora", NAME)`
    is an adapter, and `("lora", NAME, SALT)` both. Anything else is a salt in its canonical form.

    Args:
        namespace: What `radixkv.core.canonical_namespace` gave.
    """
    parts = namespace_parts(namespace)
    match parts:
        case [None]:
            return Label()
        case [str(salt)]:
            return Label(salt=_printable(salt))
        case [2, "lora", str(name)]:
            return Label(_printable(name))
        case [3, "lora", str(name), str(salt)]:
            return Label(_printable(name), _printable(salt))
    return Label(salt=_as_text(namespace))


def _as_text(namespace: bytes) -> str:
    return namespace.decode("utf-8", "backslashreplace")


def _printable(text: str) -> str:
    """Half a surrogate pair cannot be sent."""
    return text.encode("utf-8", "backslashreplace").decode()


def _sendable(text: str | None) -> str | None:
    if text is None:
        return None
    if not isinstance(text, str):
        raise TypeError(f"a label is made of str and None, got {type(text).__name__}")
    return _printable(text)


_listening: weakref.WeakSet[TreeEvents] = weakref.WeakSet()


def _abandon_all() -> None:
    for events in list(_listening):
        events.abandon()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_abandon_all)
