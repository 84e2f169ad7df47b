"""From what a radix tree tells its listeners to KV events."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from itertools import repeat
from typing import NamedTuple

import numpy as np
import xxhash

from radixkv.core.block_states import BlockIds
from radixkv.core.hashing import chain_digests, root_digest
from radixkv.core.listener import TreeListener
from radixkv.core.radix_tree import NodeInfo, RadixTree
from radixkv.core.tokens import TOKEN_BYTES, TokenArray, token_bytes
from radixkv.observe.kv_messages import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Hash,
    KVCacheEvent,
    external_hashes,
)

__all__ = ["Label", "TreeEvents", "label_of"]

# Events of so many tokens make a batch; a batch that is lost, and asked for again, should not be the whole cache.
_BATCH_TOKENS = 1 << 16
_BATCH_BLOCKS = 1 << 12
_MOST_ENDS = 4096

_Told = list[KVCacheEvent]


class Label(NamedTuple):
    """What a namespace is called in events; block hashes differ between namespaces whatever they are called.

    Attributes:
        lora_name: Adapter, or None.
        salt: What else sets it apart, as text, or None.
    """

    lora_name: str | None = None
    salt: str | None = None


# A block that readers know of: its hash, its parent's, its tokens as bytes, its namespace. Tuples are made fastest.
_Announced = tuple[Hash, Hash | None, bytes, bytes]


class _Stored(NamedTuple):
    namespace: bytes
    tokens: TokenArray
    first: int
    blocks: BlockIds


class _Removed(NamedTuple):
    blocks: BlockIds


_CLEARED = None
_Change = _Stored | _Removed | None


class TreeEvents(TreeListener):
    """Notes what the tree does, and makes events of it later, on another thread.

    Only whole blocks are announced: a partly filled one when it has become full. Nothing is removed that was not
    announced. Under the lock of the tree, a change costs a copy of its tokens. Should too much be noted that
    nobody fetched, then all of it is forgotten, and the next events say that everything is gone and announce anew
    what is cached.

    Args:
        tree: The tree to listen to; `start()` begins.
        hashes: Form of block hashes, see `external_hashes`.
        medium: Where the KV lies.
        label: What a tree namespace (canonical, or the bytes that were given) is called; called on the thread that
            fetches events.
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
        wake: Callable[[], None] | None = None,
        max_pending_tokens: int = 1 << 23,
    ) -> None:
        self._tree = tree
        self._size = tree.block_size
        self._external = external_hashes(hashes)
        self._medium = medium
        self._label_of = label or label_of
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
        # Addresses of last blocks, by a hash of the path to their end.
        self._ends: OrderedDict[bytes, bytes] = OrderedDict()
        self._labels: dict[bytes, Label] = {}

    # -- under the lock of the tree --------------------------------------------------------------------------

    def start(self) -> None:
        """Listen from now on; the first events announce what is cached already."""
        with self._tree.pool.lock:
            self._changes.clear()
            self._anew = True
            self._tree.add_listener(self)
        self.wake()

    def stop(self) -> None:
        """Listen no more."""
        self._tree.remove_listener(self)

    def on_stored(
        self, namespace: bytes, tokens: TokenArray, first: int, blocks: BlockIds, parent: int
    ) -> None:
        """See `TreeListener`."""
        num = len(tokens) // self._size - first
        if num > 0 and self._has_room((first + num) * self._size):
            path = tokens[: (first + num) * self._size].copy()
            self._changes.append(_Stored(namespace, path, first, blocks[:num].copy()))
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

    def collect(self, newcomers: bool = False) -> Iterator[_Told]:
        """Batches of events since the last time; an empty one stands for some that were lost.

        Args:
            newcomers: Some reader knows nothing yet: announce, after that, all that is cached.
        """
        nodes: list[NodeInfo] | None = None
        with self._tree.pool.lock:
            changes, self._changes, self._pending = self._changes, [], 0
            overflowed, self._overflowed = self._overflowed, False
            if self._anew:
                nodes, self._anew = list(self._tree.nodes()), False
        done = False
        try:
            if overflowed:
                yield []
            if nodes is None:
                yield from _batches(self._translate(changes))
            else:
                self._learn(nodes)
            if newcomers or nodes is not None:
                yield from _batches(self._everything())
            done = True
        finally:
            if not done:  # an event did not get out, so that readers and we no longer agree
                with self._tree.pool.lock:
                    self._changes, self._anew = [], True

    def _translate(self, changes: Iterable[_Change]) -> Iterator[KVCacheEvent]:
        for change in changes:
            if isinstance(change, _Stored):
                yield from self._stored(change)
            elif isinstance(change, _Removed):
                known = [self._announced.pop(block, None) for block in change.blocks[::-1].tolist()]
                hashes = [block[0] for block in known if block is not None]
                if hashes:
                    yield BlockRemoved(hashes, self._medium)
            else:
                self._announced.clear()
                yield AllBlocksCleared()

    def _stored(self, change: _Stored) -> Iterator[KVCacheEvent]:
        namespace, tokens, first, blocks = change
        split = first * self._size
        parent = self._end_of(namespace, tokens[:split]) if first else None
        digest = self._announce(namespace, tokens[split:], blocks.tolist(), parent)
        self._remember_end(self._path_key(namespace, tokens), digest)
        run = [self._announced[block] for block in blocks.tolist()]
        yield from self._runs([block[0] for block in run], run[0][1], tokens[split:], namespace)

    def _announce(
        self, namespace: bytes, tokens: TokenArray, blocks: list[int], parent: bytes | None
    ) -> bytes:
        """Note blocks that follow the one with address `parent`; returns the address of the last."""
        start = root_digest(self._size, namespace) if parent is None else parent
        digests = chain_digests(start, tokens, len(blocks), self._size)
        hashes = self._external(digests)
        before = [None if parent is None else self._external([parent])[0], *hashes]
        data, step = tokens.tobytes(), self._size * TOKEN_BYTES
        pieces = [data[i : i + step] for i in range(0, len(blocks) * step, step)]
        self._announced.update(
            zip(blocks, zip(hashes, before, pieces, repeat(namespace), strict=False), strict=True)
        )
        return digests[-1]

    def _learn(self, nodes: list[NodeInfo]) -> None:
        """All that is cached, from the tree itself."""
        self._announced.clear()
        last: list[bytes | None] = []  # address of the last block of each node
        for node in nodes:
            num = len(node.tokens) // self._size
            digest = None if node.parent < 0 else last[node.parent]
            if num:
                blocks = node.blocks[:num].tolist()
                digest = self._announce(node.namespace, node.tokens[: num * self._size], blocks, digest)
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

    def _runs(
        self, hashes: list[Hash], parent: Hash | None, tokens: TokenArray, namespace: bytes
    ) -> Iterator[KVCacheEvent]:
        label = self._labels.get(namespace)
        if label is None:
            label = self._labels[namespace] = self._label_of(_as_given(namespace))
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

    # -- addresses of parents ----------------------------------------------------------------------------------

    def _path_key(self, namespace: bytes, tokens: TokenArray) -> bytes:
        return xxhash.xxh3_128_digest(token_bytes(tokens)) + namespace

    def _end_of(self, namespace: bytes, tokens: TokenArray) -> bytes:
        """Address of the last block of a path. A sequence that grows asks for the end it had before."""
        key = self._path_key(namespace, tokens)
        digest = self._ends.get(key)
        if digest is None:
            num = len(tokens) // self._size
            digest = chain_digests(root_digest(self._size, namespace), tokens, num, self._size)[-1]
            self._remember_end(key, digest)
        else:
            self._ends.move_to_end(key)
        return digest

    def _remember_end(self, key: bytes, digest: bytes) -> None:
        self._ends[key] = digest
        if len(self._ends) > _MOST_ENDS:
            self._ends.popitem(last=False)


def _batches(events: Iterable[KVCacheEvent]) -> Iterator[_Told]:
    """Events in groups of a bounded number of tokens."""
    batch: _Told = []
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


def _as_given(namespace: bytes) -> bytes:
    """A namespace that was given to the tree as bytes, as `PrefixCache` does, without what marks it as bytes."""
    head, colon, rest = namespace.partition(b":")
    return rest if colon and head == b"b%d" % len(rest) else namespace


def label_of(namespace: bytes) -> Label:
    """What a canonical namespace is called in events.

    `None` is the base model without a salt; a plain `str` is a salt, as vLLM's `cache_salt`; `("lora", NAME)`
    is an adapter, and `("lora", NAME, SALT)` both. Anything else is a salt in its canonical form.
    """
    if not namespace:
        return Label()
    parts = _texts(namespace)
    if len(parts) == 1 and namespace[:1] == b"s":
        return Label(salt=parts[0])
    if 2 <= len(parts) <= 3 and parts[0] == "lora":
        return Label(lora_name=parts[1], salt=parts[2] if len(parts) == 3 else None)
    return Label(salt=namespace.decode("utf-8", "backslashreplace"))


def _texts(namespace: bytes) -> list[str]:
    """The strings of a canonical namespace that is one string or a flat tuple of strings, else none."""
    rest = namespace
    wanted = 1
    if rest[:1] == b"t":
        head, _, rest = rest.partition(b":")
        wanted = int(head[1:])
    parts: list[str] = []
    while rest[:1] == b"s" and len(parts) < wanted:
        head, _, rest = rest.partition(b":")
        size = int(head[1:])
        parts.append(rest[:size].decode("utf-8", "backslashreplace"))
        rest = rest[size:]
    return parts if len(parts) == wanted and not rest else []
