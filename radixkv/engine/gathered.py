"""Forwards of one sequence at a time over the paged pool, for models that cannot be flattened."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from radixkv.hf.compat import fresh_layers
from radixkv.hf.step_cache import StepCache, StepLayer
from radixkv.store.kv_store import KVStore, SlotRuns

__all__ = ["gathered_cache"]


class _Places:
    """Slots of one sequence, worked out once for all layers.

    Args:
        store: The pool.
        blocks: int32 block table, covering at least `stop` tokens.
        start: Tokens with KV before the forward.
        stop: And after it.
    """

    def __init__(self, store: KVStore, blocks: npt.NDArray[np.int32], start: int, stop: int) -> None:
        self.store = store
        self.start = start
        self.stop = stop
        self.new = store.locate(blocks, start, stop)
        self._blocks = blocks
        self._read: dict[int, SlotRuns] = {}

    def read(self, first: int) -> SlotRuns:
        """Slots of the tokens `first..stop`."""
        if first not in self._read:
            self._read[first] = self.store.locate(self._blocks, first, self.stop)
        return self._read[first]


class GatheredLayer(StepLayer):
    """One layer of one sequence: appends to the pool, and hands out what the new queries may see.

    Where that lies in one run of slots it is a view of the pool, else a copy.
    """

    def __init__(self, index: int, window: int | None, places: _Places) -> None:
        super().__init__(window, places.start)
        self.index = index
        self.places = places

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Append `[1, heads, q, dim]`; keys and values `[1, heads, seen, dim]` come back."""
        places = self.places
        store = places.store
        store.write(self.index, places.new, key_states[0], value_states[0])
        self.length = places.stop
        first = 0 if self.window is None else max(0, places.start - self.window + 1)
        where = places.read(first)
        pool_keys, pool_values = store.keys[self.index], store.values[self.index]
        assert pool_keys is not None
        assert pool_values is not None
        if len(where.runs) == 1:
            ((slot, count),) = where.runs
            keys, values = (
                pool.view(-1, *pool.shape[2:])[slot : slot + count].transpose(0, 1)
                for pool in (pool_keys, pool_values)
            )
        else:
            keys, values = (
                pool.new_empty(pool.shape[2], where.num_tokens, pool.shape[3])
                for pool in (pool_keys, pool_values)
            )
            store.read(self.index, where, keys, values)
        keys, values = keys[None], values[None]
        if None in store.layout.layers:  # later layers may come and read them; else copies would pile up
            self.keys, self.values = keys, values
        return keys, values


def gathered_cache(
    model: Any, store: KVStore, blocks: npt.NDArray[np.int32], start: int, stop: int
) -> StepCache:
    """The cache for a forward over the tokens `start..stop` of one sequence.

    Args:
        model: The causal LM, asked for the layers that have no KV in the pool.
        store: The pool.
        blocks: int32, the sequence's block table.
        start: Tokens whose KV is in the pool.
        stop: Tokens whose KV will be after the forward.
    """
    places = _Places(store, blocks, start, stop)
    layers = store.layout.layers
    plain = fresh_layers(model) if None in layers else []
    return StepCache(
        [
            plain[index] if layer is None else GatheredLayer(index, layer.window, places)
            for index, layer in enumerate(layers)
        ]
    )
