"""Block ids handed out by reference count. Ids only, never tensors."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from radixkv.core.block_states import (
    CACHED,
    FREE,
    IDLE,
    REFERENCE,
    BlockIds,
    BlockStates,
    Index,
    disjoint,
    get,
    joined,
    put,
)
from radixkv.core.errors import CacheCorruptionError, InvalidRequestError, OutOfBlocksError

BlockIdsLike = int | Iterable[int] | npt.NDArray[Any]

States = int | npt.NDArray[np.int32]


def checks_requested() -> bool:
    """Whether `RADIXKV_CHECK=1` asks for `check()` after every change. Read at construction."""
    return os.environ.get("RADIXKV_CHECK", "") == "1"


class BlockPool:
    """Block ids handed out by reference count.

    The pool is the only place that counts references. The tree's own reference on a cached block is one of
    them; the pool also knows which blocks are cached, so that it can tell at any time, without a walk, how many
    of them nobody else holds (*idle* ones).

    Invariants, all verified by `check()`:

    1. A block is free exactly when its reference count is 0: `num_free + num_held == num_blocks`.
    2. The free list holds no id twice, and every id is in `[0, num_blocks)`.
    3. A cached block has at least one reference, the tree's, which only the tree can give back.
    4. The counters of cached and idle blocks, and of the rows that are not filled in them, equal a recount.
    5. A watched block is cached and held by others.

    `allocate`, `retain` and `release` are O(number of ids), with a constant number of numpy calls; now and then
    `allocate` sorts the free list, which costs O(log num_blocks) per block released since the last time.
    `check` is O(num_blocks). Every method may be called from any thread: one lock guards the pool and the tree
    on it.

    Args:
        num_blocks: Blocks in the pool, at least 1.
    """

    def __init__(self, num_blocks: int) -> None:
        if isinstance(num_blocks, bool) or not isinstance(num_blocks, (int, np.integer)):
            raise InvalidRequestError(f"num_blocks must be an integer, got {num_blocks!r}")
        if not 1 <= num_blocks < 2**30:
            raise InvalidRequestError(f"num_blocks must be in [1, 2**30), got {num_blocks}")
        self._num_blocks = n = int(num_blocks)
        self.lock = threading.RLock()
        self._states = BlockStates(n)
        self._state = self._states.array
        self.index = self._states.index
        self.remember = self._states.remember
        # A stack that grows upwards and is popped from its end, highest id first: a run of ids goes in and
        # comes out as one slice, reversed.
        self._stack = np.arange(n - 1, -1, -1, dtype=np.int32)
        self._num_free = n
        self._released_since_sort = 0
        self._mark = np.zeros(n, np.int32)  # scratch, to find repeated ids
        self._checks = checks_requested()
        # What the tree tells.
        self._tree: weakref.ref[Any] | None = None
        self._block_size = 0
        self._gaps = np.zeros(n, np.int32)  # rows of cached tails that are not filled; 0 for all other blocks
        self._num_tails = 0
        self._num_cached = self._cached_gaps = 0
        self._num_idle = self._idle_gaps = 0
        self._watched = np.zeros(n, np.bool_)
        self._num_watched = 0
        self._woken: list[int] = []

    def __repr__(self) -> str:
        return (
            f"BlockPool(num_blocks={self._num_blocks}, num_free={self._num_free}, cached={self._num_cached})"
        )

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool."""
        return self._num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return self._num_free

    @property
    def num_held(self) -> int:
        """Blocks with at least one reference."""
        return self._num_blocks - self._num_free

    @property
    def num_cached(self) -> int:
        """Blocks that the tree holds."""
        return self._num_cached

    @property
    def num_idle(self) -> int:
        """Cached blocks that nobody but the tree holds."""
        return self._num_idle

    @property
    def num_cached_rows(self) -> int:
        """Filled rows (tokens) of the cached blocks."""
        return self._num_cached * self._block_size - self._cached_gaps

    @property
    def num_idle_rows(self) -> int:
        """Filled rows (tokens) of the idle blocks."""
        return self._num_idle * self._block_size - self._idle_gaps

    @property
    def refcounts(self) -> npt.NDArray[np.int32]:
        """References of all blocks as they are now, `int32[num_blocks]`, read-only. O(num_blocks)."""
        counts = self._state >> 1
        counts.flags.writeable = False
        return counts

    def refcount(self, block: int) -> int:
        """References on one `block`, the tree's included; 0 for a free one.

        Raises:
            InvalidRequestError: There is no such block.
        """
        if not 0 <= block < self._num_blocks:
            raise InvalidRequestError(f"block {block} is not in [0, {self._num_blocks})")
        return self._state.item(block) >> 1

    # -- for everybody ---------------------------------------------------------------------------------------

    def allocate(self, n: int) -> BlockIds:
        """Take `n` free blocks, each with one reference; ascending, and consecutive where possible.

        Returns:
            `int32[n]`, their ids.

        Raises:
            OutOfBlocksError: Fewer than `n` are free. Nothing is taken.
            InvalidRequestError: `n` is negative.
        """
        if n < 0:
            raise InvalidRequestError(f"cannot allocate {n} blocks")
        with self.lock:
            top = self._num_free
            if n > top:
                raise OutOfBlocksError(n, top, self._num_idle)
            if n == 0:
                return np.empty(0, np.int32)
            ids = self._stack[top - n : top][::-1].copy()
            index = self.index(ids)
            if n > 1 and not (isinstance(index, list) and len(index) == 1):
                if top > n and self._released_since_sort >= top:
                    # Sorting costs O(top log top), and at least as many blocks came back since the last time.
                    self._stack[:top] = np.sort(self._stack[:top])[::-1]
                    self._released_since_sort = 0
                    ids = self._stack[top - n : top][::-1].copy()
                    index = self.index(ids)
                elif isinstance(index, list):
                    index = sorted(index)
                    ids = get(self._states.ramp, index)
                else:
                    ids.sort()
                    index = self.index(ids)
            self._states.set_all(index, REFERENCE)
            self._num_free = top - n
            if self._checks:
                self.check()
            return ids

    def retain(self, ids: BlockIdsLike) -> None:
        """Add one reference to each block of `ids`; an id that is named twice gets two.

        Args:
            ids: One id, or any iterable or array of them.

        Raises:
            InvalidRequestError: An id is out of range or free. Nothing is changed.
        """
        blocks = as_block_ids(ids)
        if not len(blocks):
            return
        with self.lock:
            index, state = self._look_up(blocks)
            times: Any = 1
            if not self._is_distinct(blocks, index):
                blocks, times = np.unique(blocks, return_counts=True)
                index, state = self._look_up(blocks)
            if np.minimum.reduce(state) < REFERENCE:
                free = int(blocks[(state < REFERENCE).argmax()])
                raise InvalidRequestError(f"block {free} is free: it cannot be retained, only allocated")
            self._hold(index, state, times)
            if self._checks:
                self.check()

    def release(self, ids: BlockIdsLike) -> None:
        """Give back one reference on each block of `ids`; an id that is named twice gives back two.

        Blocks whose last reference goes become free.

        Args:
            ids: One id, or any iterable or array of them.

        Raises:
            InvalidRequestError: An id is out of range, or more references would go than callers hold (the
                tree's own reference on a cached block does not count). Nothing is changed.
        """
        blocks = as_block_ids(ids)
        if not len(blocks):
            return
        with self.lock:
            index = self.index(blocks)
            if isinstance(index, list) and disjoint(index):
                # The usual ends of a request: all is cached, and nobody else holds it; or nothing is cached.
                if self._states.all_are(index, IDLE + REFERENCE):
                    self._states.set_all(index, IDLE)
                    self._rest(blocks)
                elif self._states.all_are(index, REFERENCE):
                    self._states.set_all(index, FREE)
                    self._push(blocks)
                else:
                    self._release(blocks)
            else:
                self._release(blocks)
            if self._checks:
                self.check()

    def check(self) -> None:
        """Raise `CacheCorruptionError`, with values, at the first invariant broken. For tests."""
        with self.lock:
            refs, cached = self._state >> 1, (self._state & CACHED) == CACHED
            if (refs < 0).any():
                raise CacheCorruptionError(
                    f"pool invariant 1: block {int(refs.argmin())} has {int(refs.min())} references"
                )
            free = self._stack[: self._num_free]
            if len(free) and not 0 <= int(free.min()) <= int(free.max()) < self._num_blocks:
                raise CacheCorruptionError(f"pool invariant 2: free list from {free.min()} to {free.max()}")
            listed = np.bincount(free, minlength=self._num_blocks)
            if (listed > 1).any():
                raise CacheCorruptionError(f"pool invariant 2: block {int(listed.argmax())} is free twice")
            wrong = (refs == 0) != (listed == 1)
            if wrong.any():
                block = int(wrong.argmax())
                raise CacheCorruptionError(
                    f"pool invariant 1: block {block}, refs={int(refs[block])}, free={bool(listed[block])}"
                )
            if (cached & (refs == 0)).any():
                raise CacheCorruptionError(
                    f"pool invariant 3: block {int((cached & (refs == 0)).argmax())} is free"
                )
            idle = cached & (refs == 1)
            gaps = self._gaps
            have = (self._num_cached, self._num_idle, self._cached_gaps, self._idle_gaps, self._num_tails)
            true = (
                int(cached.sum()),
                int(idle.sum()),
                int(gaps[cached].sum(dtype=np.int64)),
                int(gaps[idle].sum(dtype=np.int64)),
                int((gaps > 0).sum()),
            )
            if have != true or (gaps[~cached] != 0).any():
                raise CacheCorruptionError(
                    f"pool invariant 4: cached, idle, gaps, idle gaps, tails are {have}, recount {true}"
                )
            if self._num_watched != int(self._watched.sum()) or (self._watched & (~cached | idle)).any():
                watched = np.flatnonzero(self._watched).tolist()
                raise CacheCorruptionError(f"pool invariant 5: {self._num_watched} watched, of {watched}")

    # -- for the tree, which holds the lock; except where errors are named, ids are distinct and right ---------

    def attach_tree(self, tree: Any, block_size: int) -> None:
        """Make `tree` the one that owns the cached blocks of this pool.

        Raises:
            InvalidRequestError: The pool has a tree already, or cached blocks of one that is gone.
        """
        if self._tree is not None and self._tree() is not None:
            raise InvalidRequestError("this pool has a tree already: use that one, or a pool of its own")
        if self._num_cached:
            raise InvalidRequestError(
                f"{self._num_cached} blocks belong to a tree that is gone: use a new pool"
            )
        self._tree = weakref.ref(tree)
        self._block_size = block_size

    def look_up_private(self, ids: BlockIds) -> tuple[Index, States]:
        """Index and state of blocks that the tree is to take over; one number if all have the same state.

        Raises:
            InvalidRequestError: One is named twice, free or cached.
        """
        index = self.index(ids)
        if isinstance(index, list) and disjoint(index) and self._states.all_are(index, REFERENCE):
            return index, REFERENCE
        index, state = self._look_up(ids)
        if not self._is_distinct(ids, index):
            raise _named_twice(ids)
        if np.count_nonzero(state == REFERENCE) == len(ids):
            return index, REFERENCE
        if np.minimum.reduce(state) < REFERENCE:
            raise _not_held(int(ids[(state < REFERENCE).argmax()]))
        if np.bitwise_or.reduce(state) & CACHED:
            block = int(ids[(state & CACHED).argmax()])
            raise InvalidRequestError(f"block {block} is cached already, under other tokens")
        return index, state

    def require_held(self, ids: BlockIds) -> None:
        """Make sure that somebody beside the tree holds each of these blocks.

        Raises:
            InvalidRequestError: One is not, or is named twice.
        """
        index, state = self._look_up(ids)
        if not self._is_distinct(ids, index):
            raise _named_twice(ids)
        if np.minimum.reduce(state) <= IDLE:
            not_held = (state < REFERENCE) | (state == IDLE)
            if np.count_nonzero(not_held):
                raise _not_held(int(ids[not_held.argmax()]))

    def hold(self, index: Index) -> None:
        """Add one reference to each of these held blocks."""
        self._hold(index, get(self._state, index), 1)

    def hold_path(self, ids: BlockIds, index: Index) -> None:
        """Like `hold`, for leading blocks of a path, of which only the last may be a tail."""
        if self._states.all_are(index, IDLE):
            self._states.set_all(index, IDLE + REFERENCE)
            self._num_idle -= len(ids)
            if self._idle_gaps:
                self._idle_gaps -= self._gaps.item(ids.item(-1))
        else:
            self._hold(index, get(self._state, index), 1)

    def is_idle(self, block: int) -> bool:
        """Whether nobody but the tree holds a cached block."""
        return self._state.item(block) == IDLE

    def idle_suffix(self, ids: BlockIds, index: Index) -> int:
        """How many of these cached blocks, counted from the last one, nobody but the tree holds."""
        if self._states.all_are(index, IDLE):
            return len(ids)
        idle = get(self._state, index) == IDLE
        return len(ids) if idle.all() else int(idle[::-1].argmin())

    def cache(self, ids: BlockIds, index: Index, state: States, gap: int) -> None:
        """Take the tree's reference on blocks in that state; `gap` rows of the last are not filled."""
        if isinstance(state, int):
            self._states.set_all(index, state + IDLE)
        else:
            put(self._state, index, state + IDLE)
        self._num_cached += len(ids)
        if gap:
            self._set_gap(ids.item(-1), gap)

    def grow(self, block: int, rows: int) -> None:
        """`rows` rows of a cached block, more than before, are filled now."""
        self._set_gap(block, self._block_size - rows)

    def uncache(self, block: int) -> None:
        """Give back the tree's reference on one block, whoever else holds it."""
        self.unwatch(block)
        self._set_gap(block, 0)
        self._num_cached -= 1
        if self.is_idle(block):
            self._num_idle -= 1
            self._push(np.array([block], np.int32))
        self._state[block] -= REFERENCE + CACHED

    def drop_idle(self, ids: BlockIds, index: Index) -> None:
        """Free cached blocks that nobody but the tree holds."""
        self._forget_idle(ids)
        self._states.set_all(index, FREE)
        self._push(ids)

    def take_idle(self, ids: BlockIds, index: Index) -> None:
        """Like `drop_idle` and then `allocate`: the tree's reference on these becomes the caller's."""
        self._forget_idle(ids)
        self._states.set_all(index, REFERENCE)

    def complete(self, taken: list[tuple[BlockIds, Index]]) -> BlockIds:
        """What `allocate` would return: all that is free, and these blocks of `take_idle`."""
        if self._num_free:
            ids = self.allocate(self._num_free)
            taken.append((ids, self.index(ids)))
        runs = joined([index if isinstance(index, list) else None for _, index in taken])
        if runs is None:
            ids = np.concatenate([ids for ids, _ in taken])
            ids.sort()
            return ids
        if len(runs) == 1:
            start, stop = runs[0]
            return self._states.ramp[start:stop].copy()
        runs = sorted(runs)
        ids = get(self._states.ramp, runs)
        self._states.remember(ids, runs)
        return ids

    def watch(self, block: int) -> None:
        """Let `take_woken` name this block, held by others now, once only the tree holds it."""
        self._watched[block] = True
        self._num_watched += 1

    def unwatch(self, block: int) -> None:
        """Forget `watch`, if there was one."""
        if self._watched[block]:
            self._watched[block] = False
            self._num_watched -= 1

    def take_woken(self) -> list[int]:
        """Watched blocks that became idle; each is named once and no longer watched."""
        woken, self._woken = self._woken, []
        return woken

    # -- inner -----------------------------------------------------------------------------------------------

    def _look_up(self, ids: BlockIds) -> tuple[Index, npt.NDArray[np.int32]]:
        """Index and state of these blocks; the state may be a view.

        Raises:
            InvalidRequestError: An id is out of range.
        """
        index = self.index(ids)
        try:
            return index, get(self._state, index)
        except IndexError:
            wrong = (ids < 0) | (ids >= self._num_blocks)
            raise InvalidRequestError(
                f"block {int(ids[wrong.argmax()])} is not in [0, {self._num_blocks})"
            ) from None

    def _is_distinct(self, ids: BlockIds, index: Index) -> bool:
        if isinstance(index, list):
            return disjoint(index)
        if is_ascending(ids):
            return True
        n = len(ids)
        if n > self._num_blocks:
            return False
        ramp = self._states.ramp[:n]
        self._mark[index] = ramp  # of a repeated id, the last one stays
        return bool(np.count_nonzero(self._mark[index] == ramp) == n)

    def _hold(self, index: Index, state: npt.NDArray[np.int32], times: Any) -> None:
        if self._num_idle:
            idle = state == IDLE
            num_idle = int(np.count_nonzero(idle))
            if num_idle:
                self._num_idle -= num_idle
                if self._idle_gaps:
                    self._idle_gaps -= int(np.add.reduce(get(self._gaps, index)[idle]))
        put(self._state, index, state + REFERENCE * times)

    def _release(self, blocks: BlockIds) -> None:
        """`release` for all cases."""
        index, state = self._look_up(blocks)
        times: Any = 1
        if not self._is_distinct(blocks, index):
            blocks, times = np.unique(blocks, return_counts=True)
            index, state = self._look_up(blocks)
        left = state - REFERENCE * times
        lowest = np.minimum.reduce(left)
        # Nobody may take the tree's reference (which leaves 1) or one that is not there (below 0).
        if lowest < 0 or (lowest < REFERENCE and np.count_nonzero(left == CACHED)):
            self._refuse_release(blocks, left)
        put(self._state, index, left)
        if lowest == FREE:
            gone = left == FREE
            self._push(blocks if gone.all() else blocks[gone])
        if self._num_cached and lowest <= IDLE:
            idle = left == IDLE
            if np.count_nonzero(idle):
                self._rest(blocks[idle])

    def _rest(self, blocks: BlockIds) -> None:
        """Book that these cached blocks became idle."""
        self._num_idle += len(blocks)
        if self._num_tails:
            self._idle_gaps += int(np.add.reduce(self._gaps[blocks]))
        if self._num_watched:
            woken = blocks[self._watched[blocks]]
            self._watched[woken] = False
            self._num_watched -= len(woken)
            self._woken += woken.tolist()

    def _forget_idle(self, ids: BlockIds) -> None:
        """Book that these idle blocks are not cached any more."""
        if self._num_tails:
            gaps = self._gaps[ids]
            num_tails = int(np.count_nonzero(gaps))
            if num_tails:
                gap = int(np.add.reduce(gaps))
                self._num_tails -= num_tails
                self._cached_gaps -= gap
                self._idle_gaps -= gap
                self._gaps[ids] = 0
        self._num_cached -= len(ids)
        self._num_idle -= len(ids)

    def _refuse_release(self, blocks: BlockIds, left: npt.NDArray[np.int32]) -> None:
        block = int(blocks[((left < 0) | (left == CACHED)).argmax()])
        state = self._state.item(block)
        held = (state >> 1) - (state & CACHED)
        tree = " beside the one of the tree" if state & CACHED else ""
        raise InvalidRequestError(
            f"block {block} is released more often than the {held} times it is held{tree}"
        )

    def _set_gap(self, block: int, gap: int) -> None:
        """Note how many rows of a cached block are not filled."""
        before = self._gaps.item(block)
        self._gaps[block] = gap
        self._num_tails += (gap > 0) - (before > 0)
        self._cached_gaps += gap - before
        if self.is_idle(block):
            self._idle_gaps += gap - before

    def _push(self, blocks: BlockIds) -> None:
        top = self._num_free
        n = len(blocks)
        self._stack[top : top + n] = blocks[::-1]
        self._num_free = top + n
        self._released_since_sort += n


def is_ascending(ids: BlockIds) -> bool:
    """Whether every id is above the one before it."""
    return len(ids) == 1 or bool(np.count_nonzero(ids[1:] > ids[:-1]) == len(ids) - 1)


def as_block_ids(ids: BlockIdsLike) -> BlockIds:
    """Block ids as int32; one id, a list, or an array of any integer type. An int32 array is not copied.

    Raises:
        InvalidRequestError: They are not integers, not one-dimensional, or do not fit into int32.
    """
    if isinstance(ids, np.ndarray):
        array = ids
        if array.dtype == np.int32 and array.ndim == 1 and array.flags.c_contiguous:
            return array
    elif isinstance(ids, (int, np.integer)) and not isinstance(ids, bool):
        array = np.array([ids])
    elif isinstance(ids, Iterable) and not isinstance(ids, (str, bytes)):
        array = np.array(list(ids))
        if array.size == 0:
            return np.empty(0, np.int32)
    else:
        raise InvalidRequestError(f"block ids must be integers, got {type(ids).__name__}")
    if array.ndim == 0:
        array = array.reshape(1)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise InvalidRequestError(f"block ids must be a row of integers, got {array.dtype} {array.shape}")
    if array.size and not -(2**31) <= int(array.min()) <= int(array.max()) < 2**31:
        raise InvalidRequestError(
            f"block ids must fit into int32, got {int(array.min())} to {int(array.max())}"
        )
    return array.astype(np.int32)


def _named_twice(ids: BlockIds) -> InvalidRequestError:
    values, counts = np.unique(ids, return_counts=True)
    return InvalidRequestError(f"block {int(values[counts.argmax()])} is named twice")


def _not_held(block: int) -> InvalidRequestError:
    return InvalidRequestError(f"block {block} is not held by the caller")
