"""Flattened forwards: the sequences of a step in one row, keys and values in the pool."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from radixkv.attention.interface import AttentionSpec
from radixkv.core.errors import InvalidRequestError
from radixkv.hf.attention_survey import LayerKind, passed_on
from radixkv.hf.routing import AttentionCall, Diversion
from radixkv.hf.step_cache import FlatLayer, StepCache
from radixkv.store.kv_store import KVStore

__all__ = ["PagedForward", "PoolWriter", "SlotWriter"]


class LayerAttention(Protocol):
    """The part of a backend that computes."""

    def run(
        self, spec: AttentionSpec, query: Tensor, keys: Tensor, values: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        """As `AttentionBackend.run`."""


class LayerWriter(Protocol):
    """Where new keys and values go."""

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Write `[1, heads, T, dim]` of one layer."""


class PoolWriter:
    """Writes the keys and values of a step's tokens to their slots.

    Args:
        store: The pool.
    """

    def __init__(self, store: KVStore) -> None:
        self._flat = [
            None if keys is None or values is None else (_by_slot(keys), _by_slot(values))
            for keys, values in zip(store.keys, store.values, strict=True)
        ]
        self._index: Tensor | None = None
        self._runs: list[tuple[int, int, int]] = []

    def aim(self, slots: npt.NDArray[np.int64], index: Tensor) -> None:
        """Set where the next writes go.

        Args:
            slots: int64 `[T]`, distinct.
            index: The same on the device of the pool.
        """
        starts = [0, *(np.flatnonzero(np.diff(slots) != 1) + 1).tolist()]
        # A run costs a call of its own, but its rows a fraction of what scattered ones do.
        worth = len(slots) // 32 if index.device.type == "cpu" else 0
        self._index = index if len(starts) > max(1, worth) else None
        stops = [*starts[1:], len(slots)]
        self._runs = [(int(slots[a]), a, b - a) for a, b in zip(starts, stops, strict=True)]

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Write `[1, heads, T, dim]` of one layer."""
        pair = self._flat[layer]
        if pair is None:
            raise InvalidRequestError(
                f"layer {layer} caches keys and values, which it did not when it was looked at"
            )
        for flat, rows in zip(pair, (keys, values), strict=True):
            source = rows[0].transpose(0, 1)
            if source.dtype != flat.dtype:  # under autocast
                source = source.to(flat.dtype)
            if self._index is not None:
                flat.index_copy_(0, self._index, source)
            else:
                for slot, start, count in self._runs:
                    flat[slot : slot + count].copy_(source[start : start + count])


class SlotWriter:
    """Writes keys and values to slots that only the device knows, the scratch block's among them.

    Args:
        store: The pool.
        slots: int64 `[T]`, on the device of the pool. Looked at in each write.
    """

    def __init__(self, store: KVStore, slots: Tensor) -> None:
        self._store = store
        self._slots = slots

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Write `[1, heads, T, dim]` of one layer."""
        for pool, rows in (
            (self._store.keys_and_scratch[layer], keys),
            (self._store.values_and_scratch[layer], values),
        ):
            assert pool is not None
            source = rows[0].transpose(0, 1)
            _by_slot(pool).index_copy_(0, self._slots, source.to(pool.dtype))


def _by_slot(pool: Tensor) -> Tensor:
    return pool.view(-1, *pool.shape[2:])


class PagedForward(Diversion):
    """One flattened forward: its cache writes to the pool, its attention is computed from the pool.

    Args:
        store: The pool.
        backend: Planned for this step.
        kinds: From `AttentionSurvey.conclude`.
        writer: Aimed at this step's slots.
        scratch: Whether the backend reads the scratch block, too.
    """

    def __init__(
        self,
        store: KVStore,
        backend: LayerAttention,
        kinds: dict[Any, LayerKind],
        writer: LayerWriter,
        scratch: bool = False,
    ) -> None:
        self._fresh: dict[int, Tensor] = {}
        fresh = self._fresh

        # No method: its cache would hold this object, which holds the cache, and with it the backend.
        def write(layer: int, keys: Tensor, values: Tensor) -> None:
            writer.write(layer, keys, values)
            fresh[layer] = keys

        self.cache = StepCache([FlatLayer(index, write) for index in range(len(store.layout.layers))])
        self._keys = store.keys_and_scratch if scratch else store.keys
        self._values = store.values_and_scratch if scratch else store.values
        self._backend = backend
        self._kinds = kinds
        self._attended = 0

    def mask(self, original: str, args: Any, kwargs: Any) -> Any:
        """None: who sees whom follows from the block tables."""
        return None

    def attend(self, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
        """Attention of one layer, `[1, T, num_heads, value_dim]`; no weights."""
        kind = self._kinds.get(call.module)
        if kind is None or self._fresh.get(kind.layer) is not call.key:
            raise InvalidRequestError(
                f"{type(call.module).__name__} attends over other keys than were just cached: if the model was "
                "changed, make a new engine"
            )
        if (call.args[0] if call.args else call.kwargs.get("attention_mask")) is not None:
            raise InvalidRequestError(f"{type(call.module).__name__} brings an attention mask of its own")
        if passed_on(call.kwargs) != kind.passed:
            raise InvalidRequestError(
                f"{type(call.module).__name__} asks for another attention than it did before: if the model was "
                "changed, make a new engine"
            )
        if kind.last:
            del self._fresh[kind.layer]
        keys, values = self._keys[kind.layer], self._values[kind.layer]
        assert keys is not None
        assert values is not None
        query = call.query[0].transpose(0, 1)
        if query.dtype != keys.dtype:
            query = query.to(keys.dtype)
        sinks = call.kwargs["s_aux"] if kind.has_sinks else None
        out = self._backend.run(kind.spec, query, keys, values, sinks)
        self._attended += 1
        return out[None].to(call.query.dtype), None

    def check_complete(self) -> None:
        """Raise if some attention of the forward did not come here.

        Raises:
            InvalidRequestError: The model's attention implementation was set during the forward.
        """
        if self._attended != len(self._kinds):
            raise InvalidRequestError(
                f"{len(self._kinds) - self._attended} layers did not attend through the engine: the attention "
                "implementation of the model must not be set while the engine runs"
            )
