"""`PrefixCache`: what is cached, where it lies, and the way a model plugs in."""

from __future__ import annotations

import importlib
import time
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from torch import Tensor

from radixkv.cache.attaching import Attached, ModelPlug
from radixkv.cache.key_owners import KeyClaim, KeyOwners
from radixkv.cache.leases import Lease
from radixkv.cache.locking import BooksLock, InterruptsHeld
from radixkv.cache.miss_notes import MissNotes
from radixkv.cache.tree_view import TreeView, ViewOptions, make_view, take_snapshot
from radixkv.core.block_pool import BlockPool
from radixkv.core.block_table import BlockTable
from radixkv.core.errors import CacheCorruptionError, InvalidRequestError
from radixkv.core.eviction import EvictionPolicy, Retention, require_ttl
from radixkv.core.namespace import Namespace, canonical_namespace
from radixkv.core.radix_tree import Match, RadixTree
from radixkv.core.tokens import as_tokens
from radixkv.observe.stats import CacheStats, RequestStats, StatsRecorder
from radixkv.store.kv_store import KVStore
from radixkv.store.layout import KVLayout
from radixkv.store.sizing import pick_num_blocks

if TYPE_CHECKING:
    from radixkv.cache.event_stream import KVEventStream

__all__ = ["KVSource", "Lease", "ModelPlug", "PrefixCache"]


class KVSource(Protocol):
    """Computed KV of one sequence, outside the pool, that `PrefixCache.commit` can store.

    Attributes:
        first_position: Positions below this one can no longer be read (a sliding layer dropped them).
    """

    first_position: int

    def rows(self, layer: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Keys and values of positions `start..stop` in `layer`: `[num_kv_heads, stop - start, dim]` each."""


class PrefixCache:
    """A prefix cache over one pool of KV blocks. Thread-safe.

    Most users make one with `for_model` and wrap their loop in `attached`. Without a model it is the
    store, tree and pool of an engine: `lookup`, `store.read`, `commit`.

    `check()` verifies the invariants of its pool and tree; between calls, blocks that are neither free nor
    cached are held by a request in another thread.

    Args:
        layout: Shapes of the KV of the model.
        block_size: Tokens in a block. Reuse is by token whatever the block size; it sets the grain of
            allocation and eviction.
        num_blocks: Size of the pool in blocks, or
        num_tokens: in tokens, or
        memory: `"2GiB"`, bytes, or a fraction (float) of the device's free memory. With none of the three,
            a fifth of free host memory or half of free GPU memory.
        policy: Who is evicted first: the name of a policy (`radixkv.core.policy_names()`), its class, or one made
            for a pool of `num_blocks`.

    Attributes:
        layout: As given, or as read off the model.
        pool: Its `BlockPool`.
        tree: Its `RadixTree`.
        store: Its `KVStore`.

    Raises:
        InvalidRequestError: An option makes no sense or the memory cannot be had; the message says which.

    Sources: the tree follows RadixAttention (Zheng et al., SGLang, 2024, arXiv:2312.07104), blocks and
    copy-on-write PagedAttention (Kwon et al., vLLM, 2023, arXiv:2309.06180).
    """

    def __init__(
        self,
        layout: KVLayout,
        *,
        block_size: int = 16,
        num_blocks: int | None = None,
        num_tokens: int | None = None,
        memory: str | int | float | None = None,
        policy: str | type[EvictionPolicy] | EvictionPolicy = "lru",
    ) -> None:
        size = pick_num_blocks(
            layout, block_size, num_blocks=num_blocks, num_tokens=num_tokens, memory=memory
        )
        self.layout = layout
        self.pool = BlockPool(size)
        self.tree = RadixTree(self.pool, block_size=block_size, policy=policy)
        self.store = KVStore(layout, size, block_size)
        self._recorder = StatsRecorder()
        self._notes = MissNotes(size, block_size, lock=self.pool.lock)
        self.tree.add_listener(self._notes)
        # One lock over pool and tree. KV is copied outside of it: a leased block does not change, and a
        # freshly allocated one is known to nobody else.
        self._lock = BooksLock()
        self._generation = 0  # counts what makes entries under way obsolete
        self._owners = KeyOwners(self.tree)
        self.timed_leases: set[Lease] = set()  # which may have been dropped by whoever asked for them
        self._plug: ModelPlug | None = None

    # -- plugging into a model ------------------------------------------------------------------------------

    @classmethod
    def for_model(
        cls,
        model: Any,
        *,
        block_size: int = 16,
        num_blocks: int | None = None,
        num_tokens: int | None = None,
        memory: str | int | float | None = None,
        policy: str | type[EvictionPolicy] | EvictionPolicy = "lru",
        decode: str = "auto",
    ) -> PrefixCache:
        """A cache with the KV shapes, dtype and device of a transformers causal LM.

        The shapes are read off a forward of a few tokens, which also proves that the model can continue
        from cached KV; its config is not trusted for this.

        Args:
            model: The model, in evaluation mode.
            block_size: As for the constructor, like all below but the last.
            num_blocks: The pool in blocks, or
            num_tokens: in tokens, or
            memory: in bytes.
            policy: Who is evicted first.
            decode: Where `generate()` and sessions keep the KV of what they compute. `"contiguous"`: in a buffer of
                their own, which hits are copied to, and which is copied to the pool. `"paged"`: in blocks of the
                pool, with attention read from there and no second copy; calls that this cannot serve, or that
                the pool has no room for, are contiguous (counted in `stats.contiguous`). `"auto"`: paged on a GPU
                where FlashInfer computes every kind of layers of the model, else contiguous.

        Raises:
            UnsupportedModelError: KV of a prefix cannot stand for the prefix in this model (encoder-decoder,
                recurrent or hybrid state, bidirectional attention, ...); the message says why.
            InvalidRequestError: As the constructor.
        """
        # The one call upwards: the plug-in layer is found by name, so that this layer and everything below
        # it works, and is tested, without transformers.
        if decode not in ("auto", "paged", "contiguous"):
            raise InvalidRequestError(f'decode is "auto", "paged" or "contiguous", got {decode!r}')
        plug_in = importlib.import_module("radixkv.hf")
        layout = plug_in.probe_model(model)
        cache = cls(
            layout,
            block_size=block_size,
            num_blocks=num_blocks,
            num_tokens=num_tokens,
            memory=memory,
            policy=policy,
        )
        cache._plug = plug_in.HFPlug(cache, model, decode)
        return cache

    def attach(self, model: Any, namespace: Namespace = None, *, retention: Retention | None = None) -> None:
        """Let every `model.generate()` and forward use the cache, until `detach()`.

        Args:
            model: The model the cache was made for (or a PEFT wrapper around it).
            namespace: What must be equal, beside the tokens, for KV to be shared. Weights and active adapters
                are taken into account without being named here.
            retention: How long to keep the blocks that these calls use, where the cache has `policy="priority"`.

        Raises:
            InvalidRequestError: The model is not the cache's, or is attached already; or the policy has no retentions.
            UnsupportedModelError: The model changed into one that cannot be served.
        """
        self.tree.require_retention(retention)
        self._need_plug().attach(model, namespace, retention=retention)

    def detach(self) -> None:
        """Undo `attach`: the model is as it was before.

        Raises:
            InvalidRequestError: Nothing is attached.
        """
        self._need_plug().detach()

    def attached(
        self, model: Any, namespace: Namespace = None, *, retention: Retention | None = None
    ) -> AbstractContextManager[PrefixCache]:
        """`attach` for the length of a `with` block; the model is restored on exceptions, too.

        Args:
            model: As for `attach`, like the rest.
            namespace: What must be equal, beside the tokens, for KV to be shared.
            retention: How long to keep the blocks that these calls use.

        Returns:
            A context manager that gives the cache itself.

        Raises:
            InvalidRequestError: As `attach`.
            UnsupportedModelError: As `attach`.
        """
        self.tree.require_retention(retention)
        return Attached(self, self._need_plug(), model, namespace, retention)

    def session(
        self,
        input_ids: Any,
        namespace: Namespace = None,
        attention_mask: Any = None,
        *,
        retention: Retention | None = None,
    ) -> AbstractContextManager[Any]:
        """A transformers cache already filled with what is known of `input_ids`, for hand-written loops.

        Args:
            input_ids: `[batch, tokens]` or `[tokens]`, integers; the prompt.
            namespace: As in `attach`.
            attention_mask: `[batch, tokens]`, 0 on left padding; None if there is none.
            retention: As in `attach`.

        Returns:
            A context manager that gives the cache object `past`. `past.num_cached_tokens` leading columns
            of `input_ids` are to be left out of the first forward (at least one column is never cached). What
            was computed is stored at the end of the block, and dropped if it ends with an exception.

        Raises:
            InvalidRequestError: `input_ids` are not token ids, or the mask does not fit them.
        """
        self.tree.require_retention(retention)
        return self._need_plug().session(input_ids, namespace, attention_mask, retention)

    # -- asking and steering --------------------------------------------------------------------------------

    def match_length(self, tokens: Any, namespace: Namespace = None) -> int:
        """Leading tokens whose KV is cached. Changes nothing, not even recency.

        Args:
            tokens: A prompt: list, array or tensor of one dimension.
            namespace: As in `attach`.

        Raises:
            InvalidRequestError: These are no tokens, or that is no namespace.
        """
        array = as_tokens(tokens)
        self._flush()
        with self._lock:
            return self.tree.match_length(array, self._key(namespace, len(array)))

    def pin(self, tokens: Any, namespace: Namespace = None, *, ttl: float | None = None) -> Lease:
        """Keep the cached part of `tokens` from being evicted until the lease is released.

        Args:
            tokens: The prefix.
            namespace: As in `attach`.
            ttl: Seconds after which the lease ends by itself, whether or not somebody still has it; None for never.

        Raises:
            InvalidRequestError: These are no tokens, or the time to live is not above 0.
        """
        array = as_tokens(tokens)
        require_ttl(ttl, "a lease")
        self._flush()
        holder: list[Match] = []
        try:
            lease = Lease(self, self.lookup(array, self._key(namespace, len(array)), holder, again=True))
            if ttl is not None:
                lease.end_after(float(ttl))
            return lease
        except BaseException:
            for match in holder:
                self.release(match)
            raise

    def clear(self, namespace: Namespace = None) -> int:
        """Forget everything cached, or everything in one namespace. All or nothing.

        Args:
            namespace: Which one, as in `attach`; None for all. (For only the default namespace, pass `b""`.)

        Returns:
            Blocks freed.

        Raises:
            InvalidRequestError: Leases or running requests still hold some of it. Nothing was changed.
        """
        wanted = None if namespace is None else canonical_namespace(namespace)
        if self._plug is not None:
            self._plug.vacate(wanted)
        with self._lock:
            keys = None if wanted is None else self._owners.keys_of(wanted)
            freed = self.tree.clear_all(keys)
            if keys is not None:  # else the tree has told it
                self._notes.cleared({canonical_namespace(key) for key in keys})
            self._generation += 1
            if self._plug is not None:
                self._plug.discard(wanted)
            return freed

    def invalidate(self) -> None:
        """Say that the weights changed in a way that cannot be seen from outside: nothing cached is used again.

        Changes made by optimizers, `load_state_dict`, in-place operations and adapters are noticed without
        this call. Requests that run meanwhile go on, and are not stored.
        """
        with self._lock:
            if self._plug is not None:
                self._plug.invalidate()
                self._plug.discard(None)
            self._generation += 1
            self.tree.drop_evictable()
            self._notes.cleared(None, forever=self._plug is not None)

    @property
    def stats(self) -> CacheStats:
        """A snapshot of the counters since the start or the last `reset_stats()`."""
        self._flush()
        with self._lock:
            return self._recorder.snapshot(*self._evicted())

    @property
    def lifetime_stats(self) -> CacheStats:
        """A snapshot of the counters since the cache was made, whatever `reset_stats()` does; for monitoring.

        Unlike `stats` it does not first store what sessions of this thread have computed, so that it may be
        called from a thread that has nothing to do with the model.
        """
        with self._lock:
            return self._recorder.totals(*self._evicted())

    @property
    def last_requests(self) -> tuple[RequestStats, ...]:
        """The prompts of the most recent call of any thread, one entry for each row."""
        return self._recorder.last_requests

    def recent_requests(self, num: int = 20) -> tuple[RequestStats, ...]:
        """The latest prompts of all calls, the newest last; `RequestStats.explain()` says why one hit or did not.

        The last 1,000 are kept, until `reset_stats()`.

        Args:
            num: How many, at most.
        """
        return self._recorder.recent_requests(num)

    def reset_stats(self) -> None:
        """Start counting from zero; what is cached stays."""
        with self._lock:
            self._recorder.reset(*self._evicted())

    def publish_events(
        self,
        endpoint: str = "tcp://127.0.0.1:5557",
        *,
        replay_endpoint: str | None = None,
        http: str | None = None,
        tokenizer: Any = None,
        dialect: str = "vllm",
        hashes: str | None = None,
        medium: str | None = None,
        topic: str = "",
        rank: int = 0,
        bind: bool = True,
        announce: bool = True,
        linger_ms: float = 10.0,
        buffer_steps: int = 10_000,
        buffer_bytes: int = 64 << 20,
        hwm: int = 100_000,
    ) -> KVEventStream:
        """Tell routers and viewers what is cached, over ZeroMQ, as vLLM and SGLang do.

        Goes on until the stream is closed or the cache is gone; the stream need not be kept. Tokens are sent in the
        clear to whoever connects: an endpoint such as `tcp://*:5557` is for a network that you trust.

        Args:
            endpoint: Where to publish: `tcp://HOST:PORT`, `ipc://PATH` or `inproc://NAME`.
            replay_endpoint: Where readers can ask for batches that they missed; None for nowhere.
            http: `HOST:PORT` where radixview finds the stream; None for nowhere.
            tokenizer: Turns token ids into text for it.
            dialect: `"vllm"`, `"sglang"` or `"array"` (what both sent before 2026).
            hashes: Form of block hashes: `"uint64"`, `"int64"` or `"bytes"`; None for the dialect's own.
            medium: Where readers are told the KV lies; None for `"GPU"` or `"CPU"`, where the pool is.
            topic: First frame of every message; readers subscribe to what it starts with.
            rank: Data-parallel rank of this cache, sent with every batch.
            bind: Listen on `endpoint`; False connects to a reader that listens there.
            announce: When a reader subscribes, tell all of them everything that is cached.
            linger_ms: How long events are gathered into one batch.
            buffer_steps: Batches kept for `replay_endpoint`, and
            buffer_bytes: what they may take together.
            hwm: Messages queued by ZeroMQ for one reader before it loses some.

        Raises:
            InvalidRequestError: An option makes no sense, or an endpoint cannot be had; the message says which.
            ImportError: msgspec or pyzmq is missing.
        """
        from radixkv.cache.event_stream import KVEventStream

        on = "GPU" if self.layout.device.type == "cuda" else "CPU"
        return KVEventStream(
            self.tree,
            endpoint,
            replay_endpoint=replay_endpoint,
            http=http,
            tokenizer=tokenizer,
            dialect=dialect,
            hashes=hashes,
            medium=on if medium is None else medium,
            topic=topic,
            rank=rank,
            bind=bind,
            announce=announce,
            linger_ms=linger_ms,
            buffer_steps=buffer_steps,
            buffer_bytes=buffer_bytes,
            hwm=hwm,
            user_of=self._owners.user_of,
        )

    def tree_view(self, *, namespace: Namespace = None, tokenizer: Any = None, **options: Any) -> TreeView:
        """Look at what is cached: print it, or `save` it as `.html`, `.svg`, `.dot`, `.json` or `.txt`.

        Requests of other threads wait while the tree is copied, not while the view is made.

        Args:
            namespace: Of the user, as in `attach`; only this one. None for all, `b""` for the default one.
            tokenizer: Shows text in place of token ids.
            options: The others of `radixkv.tree_view`: `sort`, `max_nodes`, `max_depth`, `min_blocks`, ...

        Raises:
            InvalidRequestError: An option makes no sense; the message says which.
        """
        wanted = ViewOptions(namespace=namespace, tokenizer=tokenizer, **options)
        self._flush()
        with self._lock:
            # The tree takes a key for a namespace like any other, and writes it in its own way.
            users = self._owners.users()
            snapshot = take_snapshot(self.tree)
        return make_view(snapshot, wanted, users)

    def check(self) -> None:
        """Verify the books of pool and tree.

        Raises:
            CacheCorruptionError: An invariant is broken; the message gives the values.
        """
        self._flush()
        with self._lock:
            self.pool.check()
            self.tree.check()
            if self.tree.num_cached_blocks > self.pool.num_held:
                raise CacheCorruptionError(
                    f"{self.tree.num_cached_blocks} blocks are cached, but only {self.pool.num_held} are held"
                )

    @property
    def block_size(self) -> int:
        """Tokens in a block."""
        return self.tree.block_size

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool."""
        return self.pool.num_blocks

    @property
    def num_free_blocks(self) -> int:
        """Blocks that hold nothing."""
        return self.pool.num_free

    @property
    def num_cached_blocks(self) -> int:
        """Blocks the tree holds, pinned ones included."""
        return self.tree.num_cached_blocks

    @property
    def num_cached_tokens(self) -> int:
        """Tokens the tree holds."""
        return self.tree.num_cached_tokens

    @property
    def num_evictable_blocks(self) -> int:
        """Cached blocks that nobody but the tree holds."""
        return self.tree.num_evictable_blocks

    @property
    def memory_bytes(self) -> int:
        """Bytes of the pool's tensors."""
        return self.store.num_bytes

    def __repr__(self) -> str:
        return (
            f"PrefixCache({self.num_blocks} blocks of {self.block_size} tokens, {self.num_cached_blocks} cached, "
            f"{self.num_free_blocks} free)"
        )

    # -- for plug-ins and engines ---------------------------------------------------------------------------

    def lookup(
        self,
        tokens: np.ndarray,
        key: bytes,
        holder: list[Match],
        max_tokens: int | None = None,
        again: bool = False,
        retention: Retention | None = None,
    ) -> Match:
        """Match and hold the longest cached prefix; give it back with `release`.

        Args:
            tokens: int64 `[num_tokens]`.
            key: Tree namespace.
            holder: The match is appended here while interrupts are held back, so that an exception right
                after cannot lose it.
            max_tokens: Upper limit of the match.
            again: This is no request of its own.
            retention: How long to keep what is found, as in `RadixTree.match`.
        """
        begin = time.perf_counter()
        with self._lock:
            match = self.tree.match(tokens, key, max_tokens=max_tokens, again=again, retention=retention)
            holder.append(match)
        self._recorder.add(lookup_seconds=time.perf_counter() - begin)
        return match

    def learn_key(self, key: bytes, namespace: bytes) -> None:
        """The tree namespace `key` belongs to a user's namespace (canonical): records of misses will name that."""
        with self._lock:
            self._notes.learn(canonical_namespace(key), namespace)

    def note_bypass(self, tokens: np.ndarray, namespace: bytes) -> None:
        """A prompt of a user's namespace (canonical) is passed through: remember that, in case it comes again.

        Args:
            tokens: int64 `[num_tokens]`.
            namespace: Canonical.
        """
        with self._lock:
            self._notes.bypassed(namespace, tokens)

    def release(self, match: Match) -> None:
        """Give a `match` of `lookup` back.

        Raises:
            InvalidRequestError: It was given back before.
        """
        with self._lock:
            match.release()

    def commit(
        self,
        tokens: np.ndarray,
        key: bytes,
        source: KVSource,
        namespace: bytes | None = None,
        retention: Retention | None = None,
    ) -> int:
        """Store the KV of `tokens`, as much of it as there is room for, and make it known.

        Blocks that are cached already are not copied again. Evicts what is needed; blocks are visible to
        others only once they are written. Never raises for lack of room.

        Args:
            tokens: int64 `[num_tokens]`.
            key: Tree namespace.
            source: Where their KV is.
            namespace: Canonical namespace of the user that `key` belongs to, for `clear`; None if it is the key.
            retention: How long to keep the blocks, as in `RadixTree.insert`.

        Returns:
            Leading tokens that are cached now.
        """
        with InterruptsHeld():  # between two steps, nobody would know who holds the blocks
            return self._commit(tokens, key, source, namespace, retention)

    def _commit(
        self,
        tokens: np.ndarray,
        key: bytes,
        source: KVSource,
        namespace: bytes | None,
        retention: Retention | None,
    ) -> int:
        begin = time.perf_counter()
        size = self.block_size
        held = np.empty(0, dtype=np.int32)
        num_new = 0
        try:
            with self._lock:
                generation = self._generation
                match = self.tree.match(tokens, key, partial=False, again=True, retention=retention)
                known = match.num_tokens
                held = match.take()
                if known == len(tokens) or known < source.first_position:
                    return known
                wanted = -(-len(tokens) // size) - len(held)
                room = min(wanted, self.pool.num_free + self.tree.num_evictable_blocks)
                if room < wanted:
                    self._notes.not_kept(canonical_namespace(key), tokens, len(held) + room)
                if room == 0:
                    return known
                held = np.concatenate((held, self.tree.allocate(room)))
            tokens = tokens[: len(held) * size]
            where = self.store.locate(held, known, len(tokens))
            for layer, kind in enumerate(self.layout.layers):
                if kind is not None:
                    self.store.write(layer, where, *source.rows(layer, known, len(tokens)))
            with self._lock:
                if generation != self._generation:  # cleared meanwhile: what was forgotten must not come back
                    return 0
                user = key if namespace is None else namespace
                self._notes.learn(self._owners.add(user, key), user)
                result = self.tree.insert(tokens, held, key, retention=retention)
                held, num_new = result.blocks, result.num_new_tokens
        finally:
            with self._lock:
                self.pool.release(held)
                held = held[:0]
            self._recorder.add(commit_seconds=time.perf_counter() - begin, stored_tokens=num_new)
        return len(tokens)

    def keep(
        self,
        tokens: np.ndarray,
        key: bytes,
        table: BlockTable,
        namespace: bytes | None = None,
        retention: Retention | None = None,
    ) -> int:
        """Make known what lies in blocks of the pool already: like `commit`, without a copy.

        Args:
            tokens: int64 `[num_tokens]`, leading ones of those that the table has room for.
            key: Tree namespace.
            table: Where their KV is. Where the tree has some of it already, it names the tree's blocks afterwards.
            namespace: As for `commit`.
            retention: As for `commit`.

        Returns:
            Leading tokens that are cached now.
        """
        begin = time.perf_counter()
        with InterruptsHeld(), self._lock:
            blocks = table.blocks[: -(-len(tokens) // self.block_size)]
            user = key if namespace is None else namespace
            self._notes.learn(self._owners.add(user, key), user)
            result = self.tree.insert(tokens, blocks, key, retention=retention)
            table.replace(result.blocks)
        self._recorder.add(commit_seconds=time.perf_counter() - begin, stored_tokens=result.num_new_tokens)
        return len(tokens)

    @property
    def lock(self) -> BooksLock:
        """Guards pool and tree; hold it to read or change both together."""
        return self._lock

    @property
    def plug(self) -> ModelPlug:
        """What knows the model of this cache.

        Raises:
            InvalidRequestError: The cache was made without a model.
        """
        return self._need_plug()

    def register_key(self, namespace: Namespace, key: bytes) -> KeyClaim:
        """Say that entries under the tree namespace `key` belong to a user's namespace, so that `clear` finds them.

        Returns:
            To be kept until nothing will be stored under the key any more.
        """
        with self._lock:
            user = canonical_namespace(namespace)
            claim = self._owners.claim(user, key)
            self._notes.learn(canonical_namespace(key), user)
            return claim

    @property
    def recorder(self) -> StatsRecorder:
        """Where plug-ins count what they did."""
        return self._recorder

    def _need_plug(self) -> ModelPlug:
        if self._plug is None:
            raise InvalidRequestError(
                "this cache was made without a model: make it with PrefixCache.for_model(model) to plug it in"
            )
        return self._plug

    def _evicted(self) -> tuple[int, int]:
        """Blocks and tokens evicted since the cache was made."""
        return self.tree.num_evicted_blocks_total, self.tree.num_evicted_tokens_total

    def _flush(self) -> None:
        if self._plug is not None:
            self._plug.flush()

    def _key(self, namespace: Namespace, num_tokens: int) -> bytes:
        if self._plug is not None:
            return self._plug.key(namespace, num_tokens)
        return canonical_namespace(namespace)
