"""Block ids handed out by reference count. Ids only, never tensors."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from radixkv.core.errors import CacheCorruptionError, InvalidRequestError, OutOfBlocksError

BlockIds = npt.NDArray[np.int32]
BlockIdsLike = int | Iterable[int] | npt.NDArray[Any]
# What selects blocks in the per-block arrays: a slice for consecutive ids, which numpy serves several times faster.
Index = slice | npt.NDArray[np.intp]
LONG = 256  # ids; with fewer, looking whether they are consecutive costs more than it saves


def checks_requested() -> bool:
    """Whether `RADIXKV_CHECK=1` asks for `check()` after every change. Read at construction."""
    return os.environ.get("RADIXKV_CHECK", "") == "1"


class BlockPool:
    """Block ids handed out by reference count.

    The pool is the only place that counts references. The tree's own reference on a cached block is one of
    them; the pool also knows which blocks are cached and how many rows (tokens) of each, so that it can tell at
    any time, without a walk, how many cached blocks nobody else holds.

    Invariants, all verified by `check()`:

    1. A block is free exactly when its reference count is 0: `num_free + num_held == num_blocks`.
    2. The free list holds no id twice, and every id is in `[0, num_blocks)`.
    3. A cached block has at least one reference, the tree's, which only the tree can give back.
    4. The counters of cached and of idle blocks and tokens equal a recount.

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
        if not 1 <= num_blocks < 2**31:
            raise InvalidRequestError(f"num_blocks must be in [1, 2**31), got {num_blocks}")
        self._num_blocks = n = int(num_blocks)
        self.lock = threading.RLock()
        self._refs = np.zeros(n, np.int32)
        self._rows = np.zeros(n, np.int32)  # rows the tree holds of a block; 0: not cached
        self._watched = np.zeros(n, np.bool_)  # report to the tree when only its reference is left
        self._num_watched = 0
        self._woken: list[int] = []
        self._num_cached = self._cached_tokens = 0
        self._num_idle = self._idle_tokens = 0  # cached, and held by nobody but the tree
        # A stack that grows upwards and is popped from its end, highest id first: a run of ids goes in and
        # comes out as one slice, reversed.
        self._stack = np.arange(n - 1, -1, -1, dtype=np.int32)
        self._num_free = n
        self._released_since_sort = 0
        self._mark = np.empty(n, np.int32)  # scratch, to find repeated ids
        self._ramp = np.arange(n, dtype=np.int32)
        self._tree: weakref.ref[Any] | None = None
        self._checks = checks_requested()

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
    def refcounts(self) -> npt.NDArray[np.int32]:
        """`int32[num_blocks]`, a read-only view that follows the pool."""
        view = self._refs.view()
        view.flags.writeable = False
        return view

    def refcount(self, block: int) -> int:
        """References on one block, the tree's included; 0 for a free one."""
        if not 0 <= block < self._num_blocks:
            raise InvalidRequestError(f"block {block} is not in [0, {self._num_blocks})")
        return int(self._refs[block])

    # -- for everybody ---------------------------------------------------------------------------------------

    def allocate(self, n: int) -> BlockIds:
        """Take `n` free blocks, each with one reference; ascending and consecutive where possible.

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
            ids = self._stack[top - n : top][::-1]
            first = ids.item(0)
            run = ids.item(n - 1) - first == n - 1
            if not run and self._released_since_sort >= top:
                # Sorting costs O(top log top), and at least as many blocks came back since the last time.
                self._stack[:top] = np.sort(self._stack[:top])[::-1]
                self._released_since_sort = 0
            ids = ids.copy()
            self._refs[self.index(ids)] = 1
            self._num_free = top - n
            if self._checks:
                self.check()
            return ids

    def retain(self, ids: BlockIdsLike) -> None:
        """Add one reference to each block; an id that is named twice gets two.

        Raises:
            InvalidRequestError: An id is out of range or free. Nothing is changed.
        """
        blocks = as_block_ids(ids)
        if not len(blocks):
            return
        with self.lock:
            index, refs = self._look_up(blocks)
            add: Any = 1
            if not self._is_distinct(index):
                blocks, add = np.unique(blocks, return_counts=True)
                index, refs = self._look_up(blocks)
            if np.minimum.reduce(refs) < 1:
                free = int(blocks[(refs == 0).argmax()])
                raise InvalidRequestError(f"block {free} is free: it cannot be retained, only allocated")
            self._hold(index, refs, add)
            if self._checks:
                self.check()

    def release(self, ids: BlockIdsLike) -> None:
        """Give back one reference on each block; an id that is named twice gives back two.

        Blocks whose last reference goes become free.

        Raises:
            InvalidRequestError: An id is out of range, or more references would go than callers hold (the
                tree's own reference on a cached block does not count). Nothing is changed.
        """
        blocks = as_block_ids(ids)
        if not len(blocks):
            return
        with self.lock:
            index, refs = self._look_up(blocks)
            take: Any = 1
            if not self._is_distinct(index):
                blocks, take = np.unique(blocks, return_counts=True)
                index, refs = self._look_up(blocks)
            left = refs - take
            lowest = np.minimum.reduce(left)
            if lowest >= 2:  # nothing becomes idle or free
                self._refs[index] = left
            else:
                self._release(blocks, index, left, int(lowest))
            if self._checks:
                self.check()

    def _release(self, blocks: BlockIds, index: Index, left: npt.NDArray[np.int32], lowest: int) -> None:
        rows = self._rows[index]
        cached = rows > 0
        if lowest < 1 and np.count_nonzero(left < cached):
            block = int(blocks[(left < cached).argmax()])
            kept = bool(self._rows[block])
            raise InvalidRequestError(
                f"block {block} is released more often than it is held: "
                f"{int(self._refs[block]) - kept} references{' beside the one of the tree' if kept else ''}"
            )
        idle = left == 1
        idle &= cached
        self._refs[index] = left
        num_idle = int(np.count_nonzero(idle))
        if num_idle:
            self._num_idle += num_idle
            self._idle_tokens += int(np.add.reduce(rows if num_idle == len(blocks) else rows[idle]))
            if self._num_watched:
                self._wake(blocks[idle])
        if lowest < 1:
            self._push(blocks[left == 0])

    def check(self) -> None:
        """Raise `CacheCorruptionError`, with values, at the first invariant broken. For tests."""
        with self.lock:
            free = self._stack[: self._num_free]
            if len(free) and not 0 <= int(free.min()) <= int(free.max()) < self._num_blocks:
                raise CacheCorruptionError(f"pool invariant 2: free list from {free.min()} to {free.max()}")
            listed = np.bincount(free, minlength=self._num_blocks)
            if (listed > 1).any():
                raise CacheCorruptionError(f"pool invariant 2: block {int(listed.argmax())} is free twice")
            if (self._refs < 0).any():
                raise CacheCorruptionError(
                    f"pool invariant 1: block {int(self._refs.argmin())} has negative refs"
                )
            wrong = (self._refs == 0) != (listed == 1)
            if wrong.any():
                block = int(wrong.argmax())
                raise CacheCorruptionError(
                    f"pool invariant 1: block {block}, refs={int(self._refs[block])}, free={bool(listed[block])}"
                )
            cached = self._rows > 0
            if (self._rows < 0).any() or (cached & (self._refs == 0)).any():
                raise CacheCorruptionError("pool invariant 3: a cached block is free")
            idle = cached & (self._refs == 1)
            have = (self._num_cached, self._cached_tokens, self._num_idle, self._idle_tokens)
            true = (
                int(cached.sum()),
                int(self._rows.sum(dtype=np.int64)),
                int(idle.sum()),
                int(self._rows[idle].sum(dtype=np.int64)),
            )
            if have != true:
                raise CacheCorruptionError(f"pool invariant 4: counters {have}, recount {true}")
            if self._num_watched != int(self._watched.sum()) or (self._watched & ~(self._refs > 1)).any():
                raise CacheCorruptionError(
                    f"pool: {self._num_watched} watched, of {self._watched.nonzero()[0]}"
                )

    # -- for the tree, which holds the lock and passes ids that are distinct and right ------------------------

    def attach_tree(self, tree: Any) -> None:
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

    def index(self, ids: BlockIds) -> Index:
        """What selects these blocks in a per-block array; a slice only if they are consecutive and ascending.

        Ids out of range make an array that numpy refuses with an IndexError.
        """
        n = len(ids)
        if n > LONG and ids.item(-1) - ids.item(0) == n - 1 and _is_ascending(ids):
            first = ids.item(0)
            if 0 <= first <= self._num_blocks - n:
                return slice(first, first + n)
        return ids.view(np.uint32).astype(np.intp)  # unsigned: a negative id must not count from the end

    def look_up_held(self, ids: BlockIds) -> tuple[Index, npt.NDArray[np.int32]]:
        """Index and references of blocks, after making sure they are distinct and each held by a caller.

        Raises:
            InvalidRequestError: They are not.
        """
        index, refs = self._look_up(ids)
        if not self._is_distinct(index):
            values, counts = np.unique(ids, return_counts=True)
            raise InvalidRequestError(f"block {int(values[counts.argmax()])} is named twice")
        held = refs > (self._rows[index] > 0)
        if np.count_nonzero(held) != len(ids):
            raise InvalidRequestError(f"block {int(ids[held.argmin()])} is not held by the caller")
        return index, refs

    def hold(self, index: Index) -> None:
        """`retain` for distinct held blocks."""
        self._hold(index, self._refs[index], 1)

    def num_held_by_others(self, index: Index) -> int:
        """How many of these cached blocks somebody beside the tree holds."""
        return int(np.count_nonzero(self._refs[index] > 1))

    def cache(self, ids: BlockIds, index: Index, rows: int, rows_of_last: int) -> None:
        """Take the tree's reference on blocks that somebody holds and that are not cached."""
        self._refs[index] += 1
        self._rows[index] = rows
        self._rows[ids.item(-1)] = rows_of_last
        self._num_cached += len(ids)
        self._cached_tokens += (len(ids) - 1) * rows + rows_of_last

    def grow(self, block: int, rows: int) -> None:
        """More rows of a cached block are filled now, `rows` in all."""
        added = rows - self._rows.item(block)
        self._rows[block] = rows
        self._cached_tokens += added
        if self._refs[block] == 1:
            self._idle_tokens += added

    def uncache(self, block: int) -> None:
        """Give back the tree's reference on one block, whoever else holds it."""
        rows = self._rows.item(block)
        self.unwatch(block)
        self._rows[block] = 0
        self._refs[block] -= 1
        self._num_cached -= 1
        self._cached_tokens -= rows
        if self._refs[block] == 0:
            self._num_idle -= 1
            self._idle_tokens -= rows
            self._push(np.array([block], np.int32))

    def drop_idle(self, ids: BlockIds, index: Index, num_tokens: int) -> None:
        """Free cached blocks that nobody but the tree holds; `num_tokens` rows of them are filled."""
        self._refs[index] = 0
        self._rows[index] = 0
        self._num_cached -= len(ids)
        self._num_idle -= len(ids)
        self._cached_tokens -= num_tokens
        self._idle_tokens -= num_tokens
        self._push(ids)

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
        """Watched blocks that only the tree holds by now; each is named once and no longer watched."""
        woken, self._woken = self._woken, []
        return woken

    # -- inner -----------------------------------------------------------------------------------------------

    def _look_up(self, ids: BlockIds) -> tuple[Index, npt.NDArray[np.int32]]:
        """Index and references of these blocks; for a slice, the references are a view.

        Raises:
            InvalidRequestError: An id is out of range.
        """
        index = self.index(ids)
        try:
            return index, self._refs[index]
        except IndexError:
            wrong = (ids < 0) | (ids >= self._num_blocks)
            raise InvalidRequestError(
                f"block {int(ids[wrong.argmax()])} is not in [0, {self._num_blocks})"
            ) from None

    def _is_distinct(self, index: Index) -> bool:
        if isinstance(index, slice):
            return True
        n = len(index)
        if n == 1:
            return True
        if n > self._num_blocks:
            return False
        ramp = self._ramp[:n]
        self._mark[index] = ramp
        return bool(np.count_nonzero(self._mark[index] == ramp) == n)

    def _hold(self, index: Index, refs: npt.NDArray[np.int32], add: Any) -> None:
        """Add references to distinct held blocks; `refs` is what they have now."""
        if self._num_idle:
            idle = refs == 1
            if np.count_nonzero(idle):
                rows = self._rows[index]
                idle &= rows > 0
                num_idle = int(np.count_nonzero(idle))
                self._num_idle -= num_idle
                self._idle_tokens -= int(np.add.reduce(rows if num_idle == len(rows) else rows[idle]))
        self._refs[index] = refs + add

    def _wake(self, blocks: BlockIds) -> None:
        woken = blocks[self._watched[blocks]]
        if len(woken):
            self._watched[woken] = False
            self._num_watched -= len(woken)
            self._woken += woken.tolist()

    def _push(self, blocks: BlockIds) -> None:
        top = self._num_free
        n = len(blocks)
        self._stack[top : top + n] = blocks[::-1]
        self._num_free = top + n
        self._released_since_sort += n


def _is_ascending(ids: BlockIds) -> bool:
    return len(ids) == 1 or bool(np.count_nonzero(ids[1:] > ids[:-1]) == len(ids) - 1)


def as_block_ids(ids: BlockIdsLike) -> BlockIds:
    """Block ids as int32; one id, a list, or an array of any integer type.

    Raises:
        InvalidRequestError: They are not integers, not one-dimensional, or do not fit into int32.
    """
    if isinstance(ids, np.ndarray):
        array = ids
        if array.dtype == np.int32 and array.ndim == 1:
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
