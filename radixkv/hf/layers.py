"""Cache layers that append in place into room allocated ahead, and hand out views.

The buffers are `[batch, num_kv_heads, capacity, dim]`, the shape attention reads, so a decode step copies
one token per layer where `DynamicLayer` copies everything it holds.
"""

from __future__ import annotations

import copy
import weakref
from typing import Any, Protocol

import torch
from torch import Tensor

from radixkv.core.errors import InvalidRequestError
from radixkv.hf.compat import CROP_ZERO_REMOVES_NOTHING, CacheLayerMixin, not_traced
from radixkv.store.layout import LayerLayout

__all__ = ["Book", "RowsLayer", "SessionLayer", "without_gradient"]

_MIN_ROOM = 256  # tokens of room to grow into, at least


class Book(Protocol):
    """Who keeps count of what the rows of the layers hold (see `radixkv.hf.session`)."""

    def cropped(self, length: int) -> None:
        """All rows were cut to so many columns."""

    def reordered(self, index: Tensor) -> None:
        """Row `i` is what row `index[i]` was."""

    def expanded(self, repeats: int) -> None:
        """Every row was repeated, each copy behind its original."""


class _AttentionLayer(CacheLayerMixin):  # type: ignore[misc]
    """What transformers asks of a layer, in the spelling of every version from 4.57 on."""

    is_compileable = False
    is_croppable = True
    supports_early_init = False
    is_initialized = True
    record_past = False

    # Class attributes of `CacheLayerMixin` instances that its __init__ would set to None:
    # subclasses compute `keys` and `values` instead.
    def __init__(self, window: int | None) -> None:
        self.window = window
        self.is_sliding = window is not None
        if window is not None:
            self.sliding_window = window
        self.length = 0

    def lazy_initialization(self, *_: Any) -> None:
        """Buffers are made by the first `update`."""

    ended = False

    def get_seq_length(self, *_: Any) -> int:
        if self.ended:
            self.refuse()
        return self.length

    def refuse(self) -> None:
        """Raise the error of a layer that is used after its end."""
        raise InvalidRequestError(
            "this session has ended, and its cache with it: open another with cache.session(...)"
        )

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length

    def get_mask_sizes(self, query: int | Tensor) -> tuple[int, int]:
        q = int(query.shape[0]) if isinstance(query, Tensor) else int(query)
        if self.window is None:
            return self.length + q, 0
        return min(self.length, self.window - 1) + q, max(self.length - self.window + 1, 0)

    def activate_past_recording(self) -> None:
        """Nothing to do: sliding layers keep some columns more than their window for crops."""


class _WithoutGradient(torch.autograd.Function):
    """Passes cached keys and values on, and refuses to be differentiated: they have no graph."""

    @staticmethod
    def forward(ctx: Any, keys: Tensor, values: Tensor, reason: Tensor) -> tuple[Tensor, Tensor]:
        return keys.view_as(keys), values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise InvalidRequestError(
            "gradients cannot flow through KV of a radixkv session, the cached part would be missing: call the "
            "model without its cache for that"
        )


def without_gradient(attended: Tensor, reason: Tensor) -> Tensor:
    """The same tensor; a gradient that comes back to it is refused. `reason` is what would have had one."""
    passed: Tensor = _WithoutGradient.apply(attended, attended, reason)[0]
    return passed


class SessionLayer(_AttentionLayer):
    """One layer's KV of all rows of a session.

    Args:
        shape: The layer's layout.
        book: Told about crops and reorderings; only the first layer of a cache has one.
    """

    def __init__(self, shape: LayerLayout, book: Book | None = None) -> None:
        super().__init__(shape.window)
        self.shape = shape
        self.book = book
        self.base = 0  # column of the first one held; above 0 only in sliding layers after a hit
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    @property
    def keys(self) -> Tensor | None:
        """`[rows, heads, columns held, key_dim]`, a view; None before there are any."""
        return None if self._keys is None else self._keys[:, :, : self.length - self.base]

    @property
    def values(self) -> Tensor | None:
        """`[rows, heads, columns held, value_dim]`, a view; None before there are any."""
        return None if self._values is None else self._values[:, :, : self.length - self.base]

    @property
    def book(self) -> Book | None:
        """Held weakly: the buffers must be freed with the cache object, not by a later garbage collection."""
        return None if self._book is None else self._book()

    @book.setter
    def book(self, book: Book | None) -> None:
        self._book = None if book is None else weakref.ref(book)

    def end(self) -> None:
        """Free the buffers; any further use is an error."""
        self.ended = True
        self._keys = self._values = None

    @property
    def num_rows(self) -> int:
        """Rows held; 0 before there are any."""
        return 0 if self._keys is None else self._keys.shape[0]

    def allocate(self, rows: int, columns: int, base: int, dtype: torch.dtype, device: torch.device) -> None:
        """Make room for columns `base..columns` and some more; contents are undefined."""
        self._keys, self._values = (
            self._new(rows, columns - base, dim, dtype, device)
            for dim in (self.shape.key_dim, self.shape.value_dim)
        )
        self.base = base

    def _new(self, rows: int, columns: int, dim: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        room = columns + max(_MIN_ROOM, columns // 4)
        # A tensor born in inference mode could not be written outside of it.
        with torch.inference_mode(False):
            return torch.empty(rows, self.shape.num_kv_heads, room, dim, dtype=dtype, device=device)

    @not_traced
    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Append `[batch, heads, q, dim]`; returns views of all keys and values that the queries may see."""
        if self.ended:
            self.refuse()
        batch, _heads, q, _dim = key_states.shape
        if self._keys is None or self._values is None:
            self.shape = LayerLayout(
                key_states.shape[1], key_states.shape[3], value_states.shape[3], self.shape.window
            )
            self.allocate(batch, q, self.length, key_states.dtype, key_states.device)
        elif batch != self.num_rows and batch % self.num_rows == 0:
            self.batch_repeat_interleave(batch // self.num_rows)
        start, stop = self.length, self.length + q
        self._reserve(stop)
        self.put(None, start, key_states, value_states)
        self.length = stop
        first = self.base if self.window is None else max(self.base, start - self.window + 1)
        keys, values = self.view(None, first, stop)
        if torch.is_grad_enabled() and key_states.requires_grad:
            keys, values = _WithoutGradient.apply(keys, values, key_states)
        return keys, values

    def put(self, rows: slice | Tensor | None, start: int, keys: Tensor, values: Tensor) -> None:
        """Write columns from `start` on, of all or of some rows."""
        assert self._keys is not None
        assert self._values is not None
        first, count = start - self.base, keys.shape[2]
        # Detached: in-place buffers must not collect a graph when the caller forgot `no_grad`.
        if rows is None:
            self._keys.narrow(2, first, count).copy_(keys.detach())
            self._values.narrow(2, first, count).copy_(values.detach())
        else:
            self._keys[rows, :, first : first + count] = keys.detach()
            self._values[rows, :, first : first + count] = values.detach()

    def view(self, rows: slice | Tensor | None, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Columns `start..stop` of all or of some rows (a copy when rows are given by index)."""
        assert self._keys is not None
        assert self._values is not None
        first, count = start - self.base, stop - start
        if rows is None:
            return self._keys.narrow(2, first, count), self._values.narrow(2, first, count)
        span = slice(first, first + count)
        return self._keys[rows, :, span], self._values[rows, :, span]

    def _reserve(self, stop: int) -> None:
        assert self._keys is not None
        assert self._values is not None
        if stop - self.base <= self._keys.shape[2]:
            return
        held = self.length - self.base
        for name in ("_keys", "_values"):
            old: Tensor = getattr(self, name)
            new = self._new(
                old.shape[0],
                max(stop - self.base, old.shape[2] * 5 // 4),
                old.shape[3],
                old.dtype,
                old.device,
            )
            new[:, :, :held].copy_(old[:, :, :held])
            setattr(self, name, new)

    def forget(self, column: int) -> None:
        """Free the columns before `column`, which nobody will read again (sliding layers only)."""
        if self.window is None or column <= self.base or self._keys is None or self._values is None:
            return
        keys, values = self.view(None, column, self.length)
        self.allocate(self.num_rows, self.length, column, keys.dtype, keys.device)
        self._keys[:, :, : keys.shape[2]] = keys
        self._values[:, :, : values.shape[2]] = values

    # -- what generation does to rows and length ------------------------------------------------------------

    def can_cut(self, length: int) -> bool:
        """Whether `cut(length)` leaves a layer that can go on."""
        return self.window is None or length == 0 or self.base <= max(0, length - self.window + 1)

    def cut(self, length: int) -> None:
        """Keep the first `length` columns. Exact at any length that the layer can still serve.

        Raises:
            InvalidRequestError: A sliding layer no longer holds the window before `length`.
        """
        if length >= self.length:
            return
        if not self.can_cut(length):
            raise InvalidRequestError(
                f"cannot crop to {length} tokens: this sliding layer only holds tokens from {self.base} on"
            )
        if length == 0:
            self.base = 0
            self._keys = self._values = None
        self.length = length
        if self.book is not None:
            self.book.cropped(length)

    def crop(self, tokens: int | Tensor) -> None:
        """Positive: the new length. Negative: tokens to remove. Zero: as the installed transformers has it."""
        n = int(tokens)
        if n == 0 and CROP_ZERO_REMOVES_NOTHING:
            return
        self.cut(n if n >= 0 else max(0, self.length + n))

    def reset(self) -> None:
        """Drop everything, as a crop to nothing."""
        self.cut(0)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Put rows in the order of `beam_idx`, `[rows]`; one may be named several times."""
        self._pick(beam_idx)
        if self.book is not None:
            self.book.reordered(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows: indices, or one bool for each row."""
        index = torch.as_tensor(indices)
        if index.dtype == torch.bool:
            index = index.nonzero().flatten()
        self.reorder_cache(index)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row, each copy behind its original."""
        self._pick(torch.arange(max(1, self.num_rows)).repeat_interleave(repeats))
        if self.book is not None:
            self.book.expanded(repeats)

    def _pick(self, index: Tensor) -> None:
        if self._keys is None or self._values is None:
            return
        held = self.length - self.base
        index = index.to(self._keys.device)
        for name in ("_keys", "_values"):
            old: Tensor = getattr(self, name)
            with torch.inference_mode(False), torch.no_grad():
                new = old.new_empty(len(index), *old.shape[1:])
                new[:, :, :held] = old[:, :, :held].index_select(0, index)
            setattr(self, name, new)

    def offload(self) -> None:
        """Not offered: sessions are short-lived."""

    def prefetch(self) -> None:
        """See `offload`."""

    def __deepcopy__(self, memo: dict[int, Any]) -> SessionLayer:
        # The copy is a plain in-place cache layer: it belongs to no session, so nothing of it is stored.
        twin = SessionLayer(self.shape)
        twin.length, twin.base = self.length, self.base
        twin._keys = None if self._keys is None else self._keys.detach().clone()
        twin._values = None if self._values is None else self._values.detach().clone()
        memo[id(self)] = twin
        return twin

    def __reduce_ex__(self, protocol: Any) -> Any:
        twin = copy.deepcopy(self)
        return _restore, (twin.shape, twin.length, twin.base, twin._keys, twin._values)

    def __repr__(self) -> str:
        return f"SessionLayer(rows={self.num_rows}, length={self.length}, window={self.window})"


def _restore(
    shape: LayerLayout, length: int, base: int, keys: Tensor | None, values: Tensor | None
) -> SessionLayer:
    layer = SessionLayer(shape)
    layer.length, layer.base, layer._keys, layer._values = length, base, keys, values
    return layer


class RowsLayer(_AttentionLayer):
    """Some rows of a `SessionLayer`, seen as a cache of their own: what a partial prefill runs on.

    Args:
        parent: Where keys and values are read and written.
        rows: Which rows; a slice is read without copying.
        origin: Column of the parent that is position 0 here (the padding of a single row).
        length: Tokens already there.
    """

    def __init__(self, parent: SessionLayer, rows: slice | Tensor, origin: int, length: int) -> None:
        super().__init__(parent.window)
        self.parent = parent
        self.rows = rows
        self.origin = origin
        self.length = length

    @property
    def keys(self) -> Tensor:
        """`[rows, heads, columns, key_dim]` of these rows, a view where they are a slice."""
        return self._seen(self.parent.base)[0]

    @property
    def values(self) -> Tensor:
        """The same of the values."""
        return self._seen(self.parent.base)[1]

    def _seen(self, first: int) -> tuple[Tensor, Tensor]:
        return self.parent.view(self.rows, max(first, self.origin), self.origin + self.length)

    @not_traced
    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Write new keys and values into the parent's rows; all that the queries see comes back."""
        start = self.origin + self.length
        self.parent.put(self.rows, start, key_states, value_states)
        self.length += key_states.shape[2]
        return self._seen(0 if self.window is None else start - self.window + 1)

    def crop(self, tokens: int) -> None:  # abstract in some versions; nothing crops a prefill
        """Not for a prefill."""
        raise NotImplementedError
