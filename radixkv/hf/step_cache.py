"""Cache objects that live for one forward: they keep nothing, the pool does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from radixkv.core.errors import InvalidRequestError
from radixkv.hf.compat import CacheLayerMixin, not_traced

__all__ = ["FlatLayer", "StepCache", "StepLayer"]

Write = Callable[[int, Tensor, Tensor], None]


def _refuse(*_: Any, **__: Any) -> NoReturn:
    raise InvalidRequestError("a cache of one engine step cannot be cropped, reordered or moved")


class StepCache(Cache):  # type: ignore[misc]
    """A `Cache` over a full list of layers, one for each cache index of the model."""

    def __init__(self, layers: list[Any]) -> None:
        super().__init__(layers=layers)

    # The base class looks for lazily made and offloaded layers first, in each layer of each step.
    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Hand `[batch, heads, tokens, dim]` to layer `layer_idx`; what its attention is to read comes back."""
        return self.layers[layer_idx].update(key_states, value_states, *args, **kwargs)

    def __len__(self) -> int:
        return len(self.layers)


class StepLayer(CacheLayerMixin):  # type: ignore[misc]
    """What transformers asks of a layer, in the spelling of every version from 4.57 on.

    Args:
        window: Keys that a query of this layer sees, itself included; None for full attention.
        length: Tokens that the layer holds before the forward.
    """

    is_compileable = False
    is_croppable = False
    supports_early_init = False
    is_initialized = True
    record_past = False

    def __init__(self, window: int | None, length: int) -> None:
        self.window = window
        self.is_sliding = window is not None
        if window is not None:
            self.sliding_window = window
        self.length = length
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def lazy_initialization(self, *_: Any) -> None:
        """The pool is there already."""

    def get_seq_length(self, *_: Any) -> int:
        """Columns before this forward."""
        return self.length

    def get_max_length(self) -> int:
        """-1: no limit."""
        return -1

    get_max_cache_shape = get_max_length

    def get_mask_sizes(self, query: int | Tensor) -> tuple[int, int]:
        """Columns that the queries see, and the first of them."""
        q = int(query.shape[0]) if isinstance(query, torch.Tensor) else int(query)
        if self.window is None:
            return self.length + q, 0
        return min(self.length, self.window - 1) + q, max(self.length - self.window + 1, 0)

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Take new keys and values of the forward."""
        raise NotImplementedError

    crop = reset = reorder_cache = offload = prefetch = _refuse
    batch_repeat_interleave = batch_select_indices = activate_past_recording = _refuse


class FlatLayer(StepLayer):
    """A layer of a flattened step: new keys and values go to the pool, and come back as they are.

    All sequences of the step lie in one row, which is why the layer has no length and asks for no window: its
    attention is not computed from what it returns (see `radixkv.hf.paged`).

    Args:
        index: Of the layer.
        write: Called with the index, keys `[1, heads, T, dim]` and values.
    """

    def __init__(self, index: int, write: Write) -> None:
        super().__init__(None, 0)
        self.index = index
        self.write = write

    def get_mask_sizes(self, query: int | Tensor) -> tuple[int, int]:
        """The columns of the step itself, from 0."""
        return (int(query.shape[0]) if isinstance(query, torch.Tensor) else int(query)), 0

    @not_traced
    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Hand `[1, heads, T, dim]` to the pool; they come back as they are."""
        self.write(self.index, key_states, value_states)
        return key_states, value_states
