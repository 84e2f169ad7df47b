"""A step's plan as tensors: indices and masks, made once for all layers of a kind."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from radixkv.attention.interface import AttentionSpec
from radixkv.attention.padded_rows import PaddedRows
from radixkv.attention.step_tables import Int64s
from radixkv.attention.torch_calls import Call, PaddedCall, Round, Rows

__all__ = [
    "MASKED",
    "Bands",
    "BoundCall",
    "BoundChunk",
    "BoundPadded",
    "BoundRound",
    "Scratch",
    "bind_rounds",
    "rebind_rounds",
]

# A masked logit. Not minus infinity: a row that sees no key of a part gets a log-sum-exp so low that the merge
# gives the part no weight, where infinities would make NaN.
MASKED = -1e30

# With a mask, the heads of a group are folded into rows up to so many rows: the mask is repeated for each head.
_MAX_FOLDED_ROWS = 256


_NOTHING = torch.empty(0)


@dataclass(slots=True)
class BoundChunk:
    """`Chunk` with its mask, `[1, 1, rows, keys]` of 0 and `MASKED`; None if the one row sees all keys."""

    first_row: int
    num_rows: int
    first_key: int
    num_keys: int
    mask: Tensor | None


@dataclass(slots=True)
class BoundCall:
    """`Call` with tensors in the place of arrays.

    `mask` is `[1, 1, rows, keys]`; `folded_mask` the same with each row repeated for the heads of a group, where
    that is small. `room` is where to copy keys and values that do not lie in consecutive slots.
    """

    first_row: int
    num_rows: int
    row_index: Tensor | None
    slot: int
    slots: Tensor | None
    num_keys: int
    mask: Tensor | None
    folded_mask: Tensor | None
    chunks: list[BoundChunk] | None
    room: tuple[Tensor, Tensor] | None


@dataclass(slots=True)
class BoundPadded:
    """`PaddedCall` with tensors.

    `slots` is flat, `mask` `[rows, 1, 1, keys]` or None if all lengths are equal, `room` where to copy keys and
    values.
    """

    first_row: int
    num_rows: int
    row_index: Tensor | None
    slots: Tensor
    num_keys: int
    mask: Tensor | None
    room: tuple[Tensor, Tensor] | None


@dataclass(slots=True)
class BoundRound:
    """`Round` with tensors.

    `order`, in round 0 only, says where each row's result lies among those of the calls put together.
    """

    calls: list[BoundCall | BoundPadded]
    first_row: int
    num_rows: int
    row_index: Tensor | None
    order: Tensor | None


def as_mask(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where a key is seen, `MASKED` where it is hidden."""
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, MASKED)


class Scratch:
    """Memory for copies of keys and values, the same for every call: it stays in the cache, and in the process.

    Fresh memory for each copy made them up to twice as slow, from page faults alone.

    Args:
        max_elements: Larger copies get no room here.
        dtype: Of the pool.
        device: Of the pool.
    """

    def __init__(self, max_elements: int, dtype: torch.dtype, device: torch.device) -> None:
        self.max_elements = max_elements
        self._rooms: dict[tuple[int, int, int, int], tuple[Tensor, Tensor]] = {}
        self._flat = [torch.empty(0, dtype=dtype, device=device) for _ in range(2)]

    def room(self, slots: int, spec: AttentionSpec) -> tuple[Tensor, Tensor] | None:
        """`[slots, kv_heads, dim]` for keys and for values, valid until the next call uses its own; None: too large."""
        if slots * spec.num_kv_heads * (spec.key_dim + spec.value_dim) > self.max_elements:
            return None
        key = slots, spec.num_kv_heads, spec.key_dim, spec.value_dim
        known = self._rooms.get(key)
        if known is not None:
            return known
        if len(self._rooms) >= 1024:
            self._rooms.clear()
        found = []
        for index, dim in enumerate((spec.key_dim, spec.value_dim)):
            elements = slots * spec.num_kv_heads * dim
            if self._flat[index].numel() < elements:
                # With room to spare: the contexts of decodes grow in each step.
                self._flat[index] = self._flat[index].new_empty(elements + elements // 4)
                self._rooms.clear()
            found.append(self._flat[index][:elements].view(slots, spec.num_kv_heads, dim))
        self._rooms[key] = found[0], found[1]
        return found[0], found[1]


class _Binder:
    def __init__(self, spec: AttentionSpec, bands: Bands, scratch: Scratch) -> None:
        self.spec, self.group, self.bands, self.scratch = spec, spec.group, bands, scratch
        self.dtype, self.device = bands.dtype, bands.device
        self._groups: dict[int, list[tuple[Tensor, Tensor | None]]] = {}

    def tensor(self, array: Int64s) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)

    def index(self, rows: Rows) -> Tensor | None:
        return None if rows.index is None else self.tensor(rows.index)

    def below(self, lows: Tensor, num_keys: int) -> Tensor:
        """Mask of the keys before each row's first."""
        hidden = torch.arange(num_keys, device=self.device) < lows[:, None]
        return as_mask(hidden, self.dtype)

    def call(self, call: Call) -> BoundCall:
        mask = folded = None
        if call.lows is not None:
            plain = self.below(self.tensor(call.lows), call.num_keys)
            mask = plain[None, None]
            if 1 < self.group <= _MAX_FOLDED_ROWS // len(call.rows):
                folded = plain.repeat_interleave(self.group, 0)[None, None]
        chunks = None
        if call.chunks is not None:
            chunks = [
                BoundChunk(
                    chunk.start,
                    chunk.stop - chunk.start,
                    chunk.first_key,
                    chunk.num_keys,
                    self.bands.mask(chunk.stop - chunk.start, chunk.before),
                )
                for chunk in call.chunks
            ]
        slots = None if call.slots is None else self.tensor(call.slots)
        room = None if slots is None else self.scratch.room(call.num_keys, self.spec)
        rows = call.rows
        return BoundCall(
            rows.start,
            len(rows),
            self.index(rows),
            call.slot,
            slots,
            call.num_keys,
            mask,
            folded,
            chunks,
            room,
        )

    def padded(self, call: PaddedCall) -> BoundPadded:
        rows = call.rows
        bound = BoundPadded(rows.start, len(rows), self.index(rows), _NOTHING, 0, None, None)
        self.fill(bound, call)
        return bound

    def fill(self, bound: BoundPadded, call: PaddedCall) -> None:
        """Put what a call reads now into its tensors."""
        group = self._groups.get(id(call.group))
        if group is None:
            group = self._groups[id(call.group)] = self._group(call.group)
        num_keys, rows = call.group.widths[call.number], bound.num_rows
        bound.slots, mask = group[call.number]
        bound.mask = None if mask is None else mask.view(rows, 1, 1, num_keys)
        if num_keys != bound.num_keys:
            bound.num_keys, bound.room = num_keys, self.scratch.room(rows * num_keys, self.spec)

    def _group(self, group: PaddedRows) -> list[tuple[Tensor, Tensor | None]]:
        """Flat slots and masks of all calls of a group, in one transfer."""
        sizes = group.sizes
        slots = self.tensor(group.flat).split(sizes)
        if group.hidden is None:
            return [(each, None) for each in slots]
        masks = as_mask(torch.from_numpy(group.hidden).to(self.device), self.dtype).split(sizes)
        return [
            (each, None if whole else mask)
            for each, mask, whole in zip(slots, masks, group.whole, strict=True)
        ]


class Bands:
    """Masks of the diagonal for one window, cut from one tensor that grows when needed and is kept over steps.

    Args:
        window: Keys that a row sees, its own included.
        dtype: Of the masks: that of the logits. The fused kernel takes a float32 mask with half precision, and
            silently misreads one with float64.
        device: Where they live.
    """

    def __init__(self, window: int | None, dtype: torch.dtype, device: torch.device) -> None:
        self.window, self.dtype, self.device = window, dtype, device
        self._whole: Tensor | None = None
        self._before = 0
        self._cuts: dict[tuple[int, int], Tensor | None] = {}

    def mask(self, num_rows: int, before: int) -> Tensor | None:
        """Row j sees the keys up to `before + j`, the last `window` of them: `[1, 1, num_rows, before + num_rows]`.

        None where that is all keys for each row.
        """
        if num_rows == 1 and (self.window is None or before < self.window):
            return None
        key = (num_rows, before)
        if key not in self._cuts:
            if len(self._cuts) >= 1024:
                self._cuts.clear()
            whole = self._grown(num_rows, before)
            first = self._before - before
            self._cuts[key] = whole[:, :, :num_rows, first : self._before + num_rows]
        return self._cuts[key]

    def _grown(self, num_rows: int, before: int) -> Tensor:
        if self._whole is None or num_rows > self._whole.shape[2] or before > self._before:
            rows = max(num_rows, 0 if self._whole is None else self._whole.shape[2])
            self._before = max(before, 2 * self._before if self.window is None else before, 64)
            row = torch.arange(rows, device=self.device)[:, None]
            # Keys are counted from the first row's own.
            key = torch.arange(-self._before, rows, device=self.device)
            hidden = key > row
            if self.window is not None:
                hidden |= key <= row - self.window
            self._whole = as_mask(hidden, self.dtype)[None, None]
            self._cuts.clear()
        return self._whole


def bind_rounds(rounds: list[Round], spec: AttentionSpec, bands: Bands, scratch: Scratch) -> list[BoundRound]:
    """Make the tensors of a plan.

    Args:
        rounds: From `plan_rounds`.
        spec: The kind of layers.
        bands: Masks of the diagonal for the layers' window; their dtype and device are those of all masks made.
        scratch: Where calls may copy keys and values.
    """
    binder = _Binder(spec, bands, scratch)
    bound = []
    for number, one in enumerate(rounds):
        calls = [
            binder.padded(call) if isinstance(call, PaddedCall) else binder.call(call) for call in one.calls
        ]
        order, rows = None, one.rows
        if number == 0 and rows.index is not None:
            order = binder.tensor(np.argsort(rows.index))
        bound.append(BoundRound(calls, rows.start, len(rows), binder.index(rows), order))
    return bound


def rebind_rounds(
    bound: list[BoundRound], rounds: list[Round], spec: AttentionSpec, bands: Bands, scratch: Scratch
) -> None:
    """Take over what grew in a plan (`torch_growth`); arguments as for `bind_rounds`."""
    binder = _Binder(spec, bands, scratch)
    for one, before in zip(rounds, bound, strict=True):
        bound_calls = before.calls
        for number, (call, old) in enumerate(zip(one.calls, bound_calls, strict=True)):
            if isinstance(call, PaddedCall):
                assert isinstance(old, BoundPadded)
                binder.fill(old, call)
            elif call.slots is None and call.lows is None:
                assert isinstance(old, BoundCall)
                old.slot, old.num_keys, old.mask, old.folded_mask = call.slot, call.num_keys, None, None
            elif spec.window is not None:
                bound_calls[number] = binder.call(call)
