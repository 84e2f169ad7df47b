"""One batched forward of a session whose keys and values lie in the pool."""

from __future__ import annotations

import itertools
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from radixkv.attention.interface import AttentionBackend, AttentionBatch, AttentionSpec
from radixkv.core.block_table import BlockTable
from radixkv.core.errors import UnsupportedModelError
from radixkv.hf.attention_survey import LayerKind, passed_on
from radixkv.hf.layers import without_gradient
from radixkv.hf.paged import PoolWriter
from radixkv.hf.routing import AttentionCall, Diversion, Routing, plain_mask
from radixkv.store.copy_stream import to_device
from radixkv.store.kv_store import KVStore

__all__ = ["PagedAttention", "SessionStep", "StepPlaces"]

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True)
class StepPlaces:
    """Where the tokens of a forward over `[rows, q]` columns lie, padding left out.

    Attributes:
        rows: Of the forward.
        q: Columns.
        batch: For the backend; None if there is padding only.
        read: int64, the columns with queries, counted through row by row; None if all have one.
        write: int64, those whose keys and values are new; None if it is the same as `read`.
        slots: int64, where the new ones go.
    """

    rows: int
    q: int
    batch: AttentionBatch | None
    read: Int64s | None
    write: Int64s | None
    slots: Int64s

    @classmethod
    def of(
        cls, tables: Sequence[BlockTable], pads: Sequence[int], known: Sequence[int], start: int, q: int
    ) -> StepPlaces:
        """The columns `start..start + q` of some rows.

        Args:
            tables: With room for these columns.
            pads: Columns of padding before each row.
            known: Tokens of each row whose KV is in the pool already, and is not written again.
            start: First column.
            q: Columns.
        """
        size = tables[0].block_size if tables else 1
        lens: list[int] = []
        contexts: list[int] = []
        active: list[BlockTable] = []
        read: list[Int64s] = []
        write: list[Int64s] = []
        slots: list[Int64s] = []
        for row, (table, pad, have) in enumerate(zip(tables, pads, known, strict=True)):
            first, stop = max(0, start - pad), start + q - pad
            if stop <= first:
                continue
            active.append(table)
            lens.append(stop - first)
            contexts.append(stop)
            shift = row * q + pad - start  # column of a position, counted through
            if q > 1:
                read.append(np.arange(first + shift, stop + shift))
            if have < stop:
                new = max(first, have)
                slots.append(table.slots(new, stop))
                write.append(np.arange(new + shift, stop + shift))
        if not active:
            return cls(len(tables), q, None, np.empty(0, np.int64), None, np.empty(0, np.int64))
        width = -(-max(contexts) // size)
        blocks = np.zeros((len(active), width), np.int32)
        for i, table in enumerate(active):
            used = -(-contexts[i] // size)
            blocks[i, :used] = table.blocks[:used]
        starts = np.array([0, *itertools.accumulate(lens)], np.int32)
        decodes = len(active) if max(lens) == 1 else 0
        batch = AttentionBatch(starts, np.array(contexts, np.int32), blocks, size, decodes)
        num_read, num_written = int(starts[-1]), sum(map(len, write))
        whole = num_read == len(tables) * q
        if q == 1 and not whole:
            read = [np.array([i for i, pad in enumerate(pads) if start >= pad], np.int64)]
        return cls(
            len(tables),
            q,
            batch,
            None if whole else np.concatenate(read),
            None if num_written == num_read else _joined(write),
            _joined(slots),
        )


def _joined(parts: list[Int64s]) -> Int64s:
    return np.concatenate(parts) if parts else np.empty(0, np.int64)


@dataclass(frozen=True)
class PagedAttention:
    """How a model's attention is taken over; found out by `radixkv.hf.paged_session_probe`.

    Attributes:
        configs: From `attention_configs`.
        kinds: From `AttentionSurvey.conclude`.
        take_backend: A backend that nobody uses just now.
        give_backend: Takes it back.
    """

    configs: tuple[Any, ...]
    kinds: dict[Any, LayerKind]
    take_backend: Callable[[], AttentionBackend]
    give_backend: Callable[[AttentionBackend], None]

    @cached_property
    def specs(self) -> list[AttentionSpec]:
        """The distinct kinds of layers."""
        return list(dict.fromkeys(kind.spec for kind in self.kinds.values()))


class SessionStep(Diversion):
    """Takes attention over from `open` until the last module has attended, or `close`.

    Args:
        store: The pool.
        writers: Idle writers to it.
        how: The model's attention.
        places: Where the tokens lie.
    """

    def __init__(
        self, store: KVStore, writers: deque[PoolWriter], how: PagedAttention, places: StepPlaces
    ) -> None:
        self.places = places
        self._store = store
        self._how = how
        self._routing = Routing(how.configs, self)
        self._writers = writers
        self._writer: PoolWriter | None = None
        self._backend: AttentionBackend | None = None
        self._fresh: dict[int, Tensor] = {}
        self._attended = 0
        self._over = False
        self._read: Tensor | None = None
        self._write: Tensor | None = None

    def plan(self) -> None:
        """Send tables and slots to the device, and plan the kernels."""
        places = self.places
        if places.batch is None:
            return
        parts = [places.slots]
        for index in (places.read, places.write):
            if index is not None:
                parts.append(index)
        sent = list(to_device(np.concatenate(parts), self._store.layout.device).split([*map(len, parts)]))
        try:
            self._writer = self._writers.pop()
        except IndexError:
            self._writer = PoolWriter(self._store)
        self._writer.aim(places.slots, sent.pop(0))
        self._read = sent.pop(0) if places.read is not None else None
        self._write = sent.pop(0) if places.write is not None else self._read
        self._backend = self._how.take_backend()
        self._backend.plan(places.batch, self._how.specs)

    def open(self) -> None:
        """Take over."""
        self._routing.open()

    def close(self) -> None:
        """Let go; the model is as it was. Nothing happens if that is so already."""
        self._let_go()
        backend, self._backend = self._backend, None
        if backend is not None:
            self._how.give_backend(backend)
        writer, self._writer = self._writer, None
        if writer is not None:
            self._writers.append(writer)

    def _let_go(self) -> None:
        self._over = True
        self._routing.close()
        self._fresh.clear()

    def around(self, forward: Callable[[], Any]) -> Any:
        """The result of `forward()`, with attention taken over."""
        try:
            result = self._routing.around(forward)
        finally:
            self.close()
        self.check_complete()
        return result

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self.close()

    # -- called from within the model -----------------------------------------------------------------------

    def takes(self, keys: Tensor) -> bool:
        """Whether `[rows, heads, q, dim]` are keys of the forward that was announced."""
        return not self._over and (keys.shape[0], keys.shape[2]) == (self.places.rows, self.places.q)

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """New keys and values of a layer, `[rows, heads, q, dim]`."""
        self._fresh[layer] = keys
        if self._writer is not None and len(self.places.slots):
            rows = (_picked(_flat(part.detach()), self._write) for part in (keys, values))
            self._writer.write(layer, *(part.transpose(0, 1)[None] for part in rows))

    def mask(self, original: str, args: Any, kwargs: Any) -> Any:
        """None: who sees whom follows from the block tables."""
        return plain_mask(original, args, kwargs) if self._over else None

    def attend(self, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
        """Attention of one module, `[rows, q, num_heads, value_dim]`; no weights. Zeros where there is padding."""
        kind = self._how.kinds.get(call.module)
        if self._over or (kind is None and not self._fresh):
            return call.plain()  # another model, or an interrupt kept us from closing
        given = call.args[0] if call.args else call.kwargs.get("attention_mask")
        if (
            kind is None
            or given is not None
            or self._fresh.get(kind.layer) is not call.key
            or passed_on(call.kwargs) != kind.passed
        ):
            raise UnsupportedModelError(
                f"{type(call.module).__name__} asks for another attention than when the model was looked at: make a "
                'new cache, or take decode="contiguous"'
            )
        if kind.last:
            del self._fresh[kind.layer]
        rows, _, q, _ = call.query.shape
        query = _flat(call.query)
        if self._backend is None:  # padding only
            whole = query.new_zeros(rows * q, kind.spec.num_heads, kind.spec.value_dim)
        else:
            keys, values = self._store.keys[kind.layer], self._store.values[kind.layer]
            assert keys is not None
            assert values is not None
            picked = _picked(query.detach(), self._read).to(keys.dtype)
            sinks = call.kwargs["s_aux"] if kind.has_sinks else None
            with torch.no_grad():
                out = self._backend.run(kind.spec, picked, keys, values, sinks).to(query.dtype)
            if self._read is None:
                whole = out
            else:
                whole = out.new_zeros(rows * q, *out.shape[1:]).index_copy_(0, self._read, out)
        self._attended += 1
        if self._attended == len(self._how.kinds):
            self._let_go()  # not of the backend yet: what it returned lies in its memory
        attended = whole.reshape(rows, q, *whole.shape[1:])
        if torch.is_grad_enabled() and call.query.requires_grad:
            attended = without_gradient(attended, call.query)
        return attended, None

    def check_complete(self) -> None:
        """Raise if some attention of the forward did not come here.

        Raises:
            UnsupportedModelError: The model's attention implementation was set during the forward.
        """
        if self._attended != len(self._how.kinds):
            raise UnsupportedModelError(
                f"{len(self._how.kinds) - self._attended} layers did not attend over the pool: the attention "
                "implementation of the model must not be set during a forward"
            )


def _flat(part: Tensor) -> Tensor:
    """`[rows, heads, q, dim]` as `[rows * q, heads, dim]`."""
    return part.transpose(1, 2).reshape(-1, part.shape[1], part.shape[3])


def _picked(part: Tensor, index: Tensor | None) -> Tensor:
    return part if index is None else part.index_select(0, index)
