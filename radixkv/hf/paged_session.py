"""Sessions whose keys and values stay in the pool: block tables for the rows, and the layers in front of them.

A `PagedLayer` holds no tensors. In a forward that its `Pages` were told of it writes to the pool, and the attention of
that forward reads the pool (`radixkv.hf.paged_session_step`). Whatever else is asked of it, and when the pool has no
room left, all layers of the session are gathered into contiguous buffers, once, and go on as `SessionLayer`s.
"""

from __future__ import annotations

import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from radixkv.cache.locking import InterruptsHeld, books_are_open
from radixkv.core.block_keys import block_keys
from radixkv.core.block_pool import BlockPool
from radixkv.core.block_states import BlockIds
from radixkv.core.block_table import BlockCopy, BlockTable
from radixkv.core.errors import InvalidRequestError, OutOfBlocksError
from radixkv.core.match import Match
from radixkv.hf.compat import not_traced
from radixkv.hf.layers import SessionLayer
from radixkv.hf.paged import PoolWriter
from radixkv.hf.paged_session_step import PagedAttention, SessionStep, StepPlaces
from radixkv.hf.step_cache import StepLayer
from radixkv.observe.stats import StatsRecorder
from radixkv.store.kv_store import KVStore
from radixkv.store.layout import LayerLayout

__all__ = ["PagedLayer", "PagedRowsLayer", "Pages", "Room"]


@dataclass
class Room:
    """Where blocks come from.

    Attributes:
        pool: Counts references.
        store: Their memory.
        lock: Guards the pool and the tree on it.
        allocate: Gives blocks, evicting if it must.
        recorder: Counts copies.
        writers: Idle ones.
        left_behind: Tables of sessions that ended where the books were open: released a little later.
    """

    pool: BlockPool
    store: KVStore
    lock: AbstractContextManager[Any]
    allocate: Callable[[int], BlockIds]
    recorder: StatsRecorder
    writers: deque[PoolWriter] = field(default_factory=deque)
    left_behind: deque[BlockTable] = field(default_factory=deque)

    def tidy(self) -> None:
        """Release what was left behind, unless the books are open."""
        if not self.left_behind or books_are_open():
            return
        with InterruptsHeld(later=True), self.lock:
            while self.left_behind:
                self.left_behind.popleft().release()


class Pages:
    """The block tables of a session's rows, one for each.

    Token `p` of a row is at column `pads[row] + p`. A table may be ahead of the columns that the layers count: what is
    cached of a row beyond the columns that all rows have is not written again.

    Args:
        room: Where blocks come from.
        how: The model's attention.
        pads: Columns of padding before each row.
        count: Told the reason if the session leaves the pool.

    Attributes:
        tables: One for each row; empty once the session has left the pool.
        live: Whether the keys and values are in the pool.
        step: The forward under way.
        columns: Columns to make room for at least, if the session leaves the pool.
    """

    def __init__(
        self, room: Room, how: PagedAttention, pads: Sequence[int], count: Callable[[str], None]
    ) -> None:
        self.live = True
        self.tables = [BlockTable(room.pool, room.store.block_size) for _ in pads]
        self.pads = list(pads)
        self.step: SessionStep | None = None
        self.columns = 0
        self._room = room
        self._how = how
        self._count = count
        self._layers: list[weakref.ref[PagedLayer]] = []

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self.release()

    @property
    def num_rows(self) -> int:
        """Rows of the session."""
        return len(self.pads)

    @property
    def configs(self) -> tuple[Any, ...]:
        """The configs through which attention is taken over."""
        return self._how.configs

    def layer(self, index: int, shape: LayerLayout) -> PagedLayer:
        """A layer of the session's cache."""
        made = PagedLayer(self, index, shape, leads=not self._layers)
        self._layers.append(weakref.ref(made))
        return made

    # -- rows -----------------------------------------------------------------------------------------------

    def adopt(self, row: int, match: Match) -> None:
        """Let a row, which is empty, begin with what was matched. Takes the match's references over."""
        self.tables[row] = BlockTable.adopt(match)

    def share(self, source: int, target: int, num_tokens: int) -> None:
        """Let a row begin with the first tokens of another one, unless it has as many."""
        if self.tables[target].num_tokens < num_tokens:
            with InterruptsHeld(), self._room.lock:
                table = self.tables[source].fork()
                table.truncate(num_tokens)
                self.tables[target].release()
                self.tables[target] = table

    def cut(self, columns: int) -> None:
        """Keep so many columns at most."""
        with InterruptsHeld(), self._room.lock:
            for table, pad in zip(self.tables, self.pads, strict=True):
                table.truncate(min(table.num_tokens, max(0, columns - pad)))

    def pick(self, index: Sequence[int]) -> None:
        """Let the rows be those of these numbers; the same one several times shares its blocks."""
        with InterruptsHeld(), self._room.lock:
            free = set(range(len(self.tables)))
            picked = []
            for row in index:
                picked.append(self.tables[row] if row in free else self.tables[row].fork())
                free.discard(row)
            for row in free:
                self.tables[row].release()
            self.tables = picked
            self.pads = [self.pads[row] for row in index]

    def unify(self, tokens: Sequence[np.ndarray]) -> None:
        """Let rows that hold the same tokens in whole blocks of their own share them.

        The tree would keep one of these blocks, and nothing that other rows share behind the others.

        Args:
            tokens: int64, leading ones of each row.
        """
        if len(self.tables) < 2:
            return
        size = self._room.store.block_size
        whole = [row[: len(row) // size * size] for row in tokens]
        keys = np.concatenate([block_keys(row, size, 0) for row in whole])
        used = [table.blocks[: len(row) // size] for table, row in zip(self.tables, whole, strict=True)]
        ids = np.concatenate(used)
        order = np.argsort(keys, kind="stable")
        keys, ids = keys[order], ids[order]
        if not ((keys[1:] == keys[:-1]) & (ids[1:] != ids[:-1])).any():
            return
        seen: dict[tuple[int, bytes], int] = {}  # by the block before and the tokens, for keys may collide
        with InterruptsHeld(), self._room.lock:
            for table, row, blocks in zip(self.tables, whole, used, strict=True):
                old, before, new = blocks.tolist(), -1, []
                for i, block in enumerate(old):
                    before = seen.setdefault((before, row[i * size : (i + 1) * size].tobytes()), block)
                    new.append(before)
                if new != old:
                    self._room.pool.retain(new)
                    self._room.pool.release(old)
                    table.replace(new)

    # -- forwards -------------------------------------------------------------------------------------------

    def begin(
        self, start: int, q: int, rows: Sequence[int] | None = None, origin: int = 0
    ) -> SessionStep | None:
        """Make room for the columns `start..start + q`, and plan the forward.

        Args:
            start: First column, counted from `origin`.
            q: Columns.
            rows: Of which rows; None for all.
            origin: Column that is column 0 of the forward.

        Returns:
            What takes the attention of the forward over. None if the session has left the pool, for lack of room.
        """
        chosen = range(self.num_rows) if rows is None else rows
        tables = [self.tables[row] for row in chosen]
        pads = [self.pads[row] - origin for row in chosen]
        known = [table.num_tokens for table in tables]
        assert all(have >= start - pad for have, pad in zip(known, pads, strict=True)), "a row has a gap"
        try:
            self._grow(tables, [start + q - pad for pad in pads], known)
        except OutOfBlocksError:
            self.leave("room")
            return None
        places = StepPlaces.of(tables, pads, known, start, q)
        step = SessionStep(self._room.store, self._room.writers, self._how, places)
        self.step = step
        step.plan()
        return step

    def _grow(self, tables: list[BlockTable], stops: list[int], known: list[int]) -> None:
        self._room.tidy()
        with InterruptsHeld(), self._room.lock:
            try:
                for table, stop in zip(tables, stops, strict=True):
                    if stop > table.num_tokens:
                        # At once: the next row's allocation may evict the block that is copied here.
                        self._copy(table.append(stop - table.num_tokens, self._room.allocate))
            except OutOfBlocksError:
                for table, have in zip(tables, known, strict=True):
                    table.truncate(have)
                raise
            except BaseException:  # a copy failed: its target holds nothing, and is in a table already
                self._drop()
                raise

    def _copy(self, copies: list[BlockCopy]) -> None:
        if copies:
            sources, targets = ([copy[i] for copy in copies] for i in (0, 1))
            self._room.store.copy_blocks(np.array(sources, np.int32), np.array(targets, np.int32))
            self._room.recorder.add(cow_copies=len(copies))

    def finish_step(self) -> None:
        """The forward under way is over, and raised nothing.

        Raises:
            UnsupportedModelError: Not all of it attended over the pool.
        """
        step = self.step
        self.end_step()
        if step is not None:
            step.check_complete()

    def end_step(self) -> None:
        """The forward under way is over, well or not."""
        step, self.step = self.step, None
        if step is not None:
            step.close()

    # -- leaving --------------------------------------------------------------------------------------------

    def leave(self, reason: str) -> None:
        """Gather everything into contiguous layers, and give the blocks back.

        Args:
            reason: Counted in `CacheStats.contiguous`.
        """
        if not self.live:
            return
        self._count(reason)
        began = time.perf_counter()
        layers = [layer for layer in (ref() for ref in self._layers) if layer is not None]
        with InterruptsHeld():
            self.end_step()
            held = [pad + table.num_tokens for pad, table in zip(self.pads, self.tables, strict=True)]
            for layer in layers:
                self._gather(layer, max(self.columns, layer.length, *held))
            self._drop()
        self._room.recorder.add(gather_seconds=time.perf_counter() - began)

    def _gather(self, layer: PagedLayer, columns: int) -> None:
        layout = self._room.store.layout
        layer.allocate(self.num_rows, columns, 0, layout.dtype, layout.device)
        for row, pad in enumerate(self.pads):
            for part in SessionLayer.view(layer, slice(row, row + 1), 0, pad):
                part.zero_()
            self._read(layer.index, row, self.tables[row].num_tokens, pad, layer)

    def _read(self, index: int, row: int, num_tokens: int, pad: int, into: SessionLayer) -> None:
        if num_tokens:
            where = self._room.store.locate(self.tables[row].blocks, 0, num_tokens)
            keys, values = SessionLayer.view(into, slice(row, row + 1), pad, pad + num_tokens)
            self._room.store.read(index, where, keys[0], values[0])

    def copied(self, layer: PagedLayer) -> SessionLayer:
        """A contiguous copy of one layer, which belongs to no session."""
        layout = self._room.store.layout
        twin = SessionLayer(layer.shape)
        twin.length = layer.length
        if layer.length:
            twin.allocate(self.num_rows, layer.length, 0, layout.dtype, layout.device)
            for part in SessionLayer.view(twin, None, 0, layer.length):
                part.zero_()
            for row, pad in enumerate(self.pads):
                self._read(layer.index, row, max(0, layer.length - pad), pad, twin)
        return twin

    def release(self) -> None:
        """Give the blocks back, and hold nothing any more."""
        self.end_step()
        self._drop()

    def _drop(self) -> None:
        with InterruptsHeld(later=True):
            self.live = False
            tables, self.tables = self.tables, []
            self._room.left_behind.extend(tables)
            self._room.tidy()


class PagedLayer(SessionLayer):
    """One layer of a session in the pool. Once its pages are no longer live it is a `SessionLayer` as any other.

    Args:
        pages: Of the session.
        index: Of the layer.
        shape: The layer's layout.
        leads: Whether it is the one that tells the pages what becomes of the rows.
    """

    def __init__(self, pages: Pages, index: int, shape: LayerLayout, leads: bool) -> None:
        super().__init__(shape)
        self.pages = pages
        self.index = index
        self.leads = leads

    @property
    def keys(self) -> Tensor | None:
        """`[rows, heads, columns, key_dim]`, copied from the pool; None before there are any."""
        return self.pages.copied(self).keys if self.pages.live else super().keys

    @property
    def values(self) -> Tensor | None:
        """The same of the values."""
        return self.pages.copied(self).values if self.pages.live else super().values

    @property
    def num_rows(self) -> int:
        """Rows held; 0 before there are any."""
        return self.pages.num_rows if self.pages.live else super().num_rows

    @not_traced
    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Append `[batch, heads, q, dim]`; what was appended comes back, since attention reads the pool."""
        if self.ended:
            self.refuse()
        pages = self.pages
        if pages.live:
            step = pages.step
            if step is not None and step.takes(key_states):
                step.write(self.index, key_states, value_states)
                self.length += key_states.shape[2]
                return key_states, value_states
            pages.leave("outside")
        elif self.length and self._keys is None:
            raise InvalidRequestError(
                "a step failed after its blocks had changed, and the KV of this session is lost: "
                "start anew from the prompt"
            )
        return super().update(key_states, value_states)

    def end(self) -> None:
        """Give the blocks back too; any further use is an error."""
        super().end()
        self.pages.release()

    def forget(self, column: int) -> None:
        """Nothing while the KV is in the pool, whose blocks are given back as a whole."""
        if not self.pages.live:
            super().forget(column)

    def cut(self, length: int) -> None:
        """Keep so many columns; blocks behind them are given back."""
        if self.pages.live and length < self.length:
            if length == 0:  # what follows may be of another shape
                self.pages.release()
            else:
                self.pages.cut(length)
        super().cut(length)

    def _pick(self, index: Tensor) -> None:
        if not self.pages.live:
            super()._pick(index)
        elif self.leads:
            self.pages.pick(index.tolist())

    def __deepcopy__(self, memo: dict[int, Any]) -> SessionLayer:
        if not self.pages.live:
            return super().__deepcopy__(memo)
        memo[id(self)] = twin = self.pages.copied(self)
        return twin


class PagedRowsLayer(StepLayer):
    """A layer for a forward over some rows of a session, while its cache is filled.

    Args:
        step: The forward.
        index: Of the layer.
        window: Of the layer.
        length: Columns before the forward.
    """

    def __init__(self, step: SessionStep, index: int, window: int | None, length: int) -> None:
        super().__init__(window, length)
        self.step = step
        self.index = index

    @not_traced
    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Write `[batch, heads, q, dim]` to the pool; what was written comes back."""
        self.step.write(self.index, key_states, value_states)
        self.length += key_states.shape[2]
        return key_states, value_states
