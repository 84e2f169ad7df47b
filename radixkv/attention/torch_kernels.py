"""Attention of some query rows over some slots, with the log-sum-exp of their logits.

Two kernels compute the same. `FlashLayer` calls torch's fused kernel for CPUs, `MathLayer` is made of matrix
products and does everything else: other devices, soft-capped logits, values of another size than keys.
Both take tensors bound to a plan (`torch_bind`) and give `[rows, num_heads, value_dim]` and `[rows, num_heads]`.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from radixkv.attention.interface import AttentionSpec
from radixkv.attention.torch_bind import BoundCall, BoundPadded

__all__ = ["FlashLayer", "LayerKernel", "MathLayer", "flash_can_run", "flat_slots"]

# Not in every build of torch, and not in every version's public interface: looked up once.
_flash = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)

# Logits that `MathLayer` holds at a time.
_MAX_LOGITS = 1 << 23


class LayerKernel(Protocol):
    """A kernel with the tensors of one layer."""

    def call(self, call: BoundCall) -> tuple[Tensor, Tensor]:
        """Rows that read the same keys."""

    def padded(self, call: BoundPadded) -> tuple[Tensor, Tensor]:
        """Single rows, each with keys of its own."""


def flash_can_run(spec: AttentionSpec, device: torch.device) -> bool:
    """Whether torch's fused CPU kernel computes such layers."""
    return (
        _flash is not None
        and device.type == "cpu"
        and spec.softcap is None
        and spec.key_dim == spec.value_dim
    )


def flat_slots(pool: Tensor) -> Tensor | None:
    """`[num_blocks, block_size, heads, dim]` as `[slots, heads, dim]` without a copy; None if strides forbid it."""
    blocks, size, heads, dim = pool.shape
    if blocks > 1 and size > 1 and pool.stride(0) != size * pool.stride(1):
        return None
    return pool.view(blocks * size, heads, dim)


def take_slots(pool: Tensor, flat: Tensor | None, slot: int, slots: Tensor | None, num: int) -> Tensor:
    """`[num, heads, dim]`: slots of a layer, as a view where they are consecutive and the pool's strides allow."""
    if flat is not None:
        return flat.narrow(0, slot, num) if slots is None else flat.index_select(0, slots)
    size = pool.shape[1]
    if slots is None:
        slots = torch.arange(slot, slot + num, device=pool.device)
    return pool[slots // size, slots % size]


class FlashLayer:
    """torch's fused kernel for CPUs.

    The query heads of a group read the same keys. Few rows are *folded*: the heads of a group become rows of one
    head, so that the kernel reads the keys once for all of them. Many rows go *wide*: the keys get a stride of 0
    over the group, and nothing is copied.
    """

    def __init__(self, spec: AttentionSpec, query: Tensor, keys: Tensor, values: Tensor) -> None:
        self.scale = spec.scale
        self.num_heads, self.kv_heads, self.group = spec.num_heads, spec.num_kv_heads, spec.group
        self.dim = spec.value_dim
        self.query, self.pools = query, (keys, values)
        self.flat_keys, self.flat_values = flat_slots(keys), flat_slots(values)
        self.in_place = self.flat_keys is not None and self.flat_values is not None
        # One batch row of all query heads where the keys of a group can be had by one stride.
        self.one_batch = self.group == 1 or self.kv_heads == 1
        self._pair: tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None

    def _whole(self) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """The whole pools of keys and values, narrow and wide. Made when first asked for: copies need none."""
        if self._pair is None:
            assert self.flat_keys is not None
            assert self.flat_values is not None
            narrow = self._narrow(self.flat_keys), self._narrow(self.flat_values)
            self._pair = narrow, (self._wide(narrow[0]), self._wide(narrow[1]))
        return self._pair

    def call(self, call: BoundCall) -> tuple[Tensor, Tensor]:
        """Rows that read the same keys."""
        folded = (
            self.group > 1 and call.chunks is None and (call.mask is None or call.folded_mask is not None)
        )
        if self.kv_heads > 1 and call.num_rows > 32:
            folded = False  # the fold would copy the queries, for little
        if call.slots is None and self.in_place:
            narrow, wide = self._whole()
            key, value = narrow if folded else wide
            key, value = key.narrow(2, call.slot, call.num_keys), value.narrow(2, call.slot, call.num_keys)
        else:
            key, value = map(self._narrow, self._take(call, call.slot, call.num_keys))
            if not folded:
                key, value = self._wide(key), self._wide(value)
        query = (
            self.query.narrow(0, call.first_row, call.num_rows)
            if call.row_index is None
            else self.query.index_select(0, call.row_index)
        )
        if folded:
            return self._folded(query, key, value, call.folded_mask)
        query = self._wide_query(query)
        if call.chunks is None:
            return self._unwide(*self._attend(query, key, value, call.mask))
        parts = [
            self._attend(
                query.narrow(2, chunk.first_row, chunk.num_rows),
                key.narrow(2, chunk.first_key, chunk.num_keys),
                value.narrow(2, chunk.first_key, chunk.num_keys),
                chunk.mask,
            )
            for chunk in call.chunks
        ]
        if len(parts) == 1:
            return self._unwide(*parts[0])
        rows = [self._unwide(*part) for part in parts]
        return torch.cat([out for out, _ in rows]), torch.cat([lse for _, lse in rows])

    def padded(self, call: BoundPadded) -> tuple[Tensor, Tensor]:
        """Single rows, each with keys of its own."""
        query = (
            self.query.narrow(0, call.first_row, call.num_rows)
            if call.row_index is None
            else self.query.index_select(0, call.row_index)
        )
        query = query.reshape(call.num_rows, self.kv_heads, self.group, -1)
        key, value = (
            slots.view(call.num_rows, call.num_keys, self.kv_heads, -1).transpose(1, 2)
            for slots in self._take(call, -1, len(call.slots))
        )
        out, lse = self._attend(query, key, value, call.mask)
        return (
            out.reshape(call.num_rows, self.num_heads, self.dim),
            lse.reshape(call.num_rows, self.num_heads),
        )

    def _take(self, call: BoundCall | BoundPadded, slot: int, num: int) -> list[Tensor]:
        """`[num, kv_heads, dim]` of keys and of values."""
        flats = self.flat_keys, self.flat_values
        if call.slots is None or call.room is None or not self.in_place:
            return [
                take_slots(pool, flat, slot, call.slots, num)
                for pool, flat in zip(self.pools, flats, strict=True)
            ]
        return [
            torch.index_select(flat, 0, call.slots, out=room)
            for flat, room in zip(flats, call.room, strict=True)
            if flat is not None
        ]

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        assert _flash is not None
        return _flash(query, key, value, 0.0, False, attn_mask=mask, scale=self.scale)

    def _narrow(self, slots: Tensor) -> Tensor:
        """`[n, kv_heads, dim]` as `[1, kv_heads, n, dim]`."""
        return slots.transpose(0, 1).unsqueeze(0)

    def _wide(self, narrow: Tensor) -> Tensor:
        """`[1, kv_heads, n, dim]` as `[batch, heads, n, dim]` with the keys of a group repeated by stride."""
        if self.group == 1:
            return narrow
        if self.one_batch:
            return narrow.expand(-1, self.group, -1, -1)
        return narrow.transpose(0, 1).expand(-1, self.group, -1, -1)

    def _wide_query(self, query: Tensor) -> Tensor:
        """`[n, heads, dim]` in the same layout."""
        if self.one_batch:
            return query.transpose(0, 1).unsqueeze(0)
        return query.unflatten(1, (self.kv_heads, self.group)).permute(1, 2, 0, 3)

    def _unwide(self, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        """`[batch, heads, n, ...]` as `[n, num_heads, ...]`."""
        if self.one_batch:
            return out[0].transpose(0, 1), lse[0].transpose(0, 1)
        return out.permute(2, 0, 1, 3).flatten(1, 2), lse.permute(2, 0, 1).flatten(1, 2)

    def _folded(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        num = query.shape[0]
        if self.kv_heads == 1:
            query = query.reshape(1, 1, num * self.group, -1)
            out, lse = self._attend(query, key, value, mask)
            return out.view(num, self.group, self.dim), lse.view(num, self.group)
        query = query.unflatten(1, (self.kv_heads, self.group)).transpose(0, 1).flatten(1, 2).unsqueeze(0)
        out, lse = self._attend(query, key, value, mask)
        out = out.unflatten(2, (num, self.group))[0].transpose(0, 1)
        lse = lse.unflatten(2, (num, self.group))[0].transpose(0, 1)
        return out.flatten(1, 2), lse.flatten(1, 2)


class MathLayer:
    """Matrix products and a softmax, in float32 at least; any device, any spec."""

    def __init__(self, spec: AttentionSpec, query: Tensor, keys: Tensor, values: Tensor) -> None:
        self.spec = spec
        self.dtype = torch.promote_types(query.dtype, torch.float32)
        self.query, self.pools = query, (keys, values)
        self.flat_keys, self.flat_values = flat_slots(keys), flat_slots(values)

    def call(self, call: BoundCall) -> tuple[Tensor, Tensor]:
        """Rows that read the same keys."""
        query = self._query(call)
        key, value = (
            take_slots(pool, flat, call.slot, call.slots, call.num_keys).to(self.dtype).transpose(0, 1)
            for pool, flat in zip(self.pools, (self.flat_keys, self.flat_values), strict=True)
        )
        if call.chunks is None:
            return self._rows(query, key, value, call.mask)
        rows = [
            self._rows(
                query.narrow(0, chunk.first_row, chunk.num_rows),
                key.narrow(1, chunk.first_key, chunk.num_keys),
                value.narrow(1, chunk.first_key, chunk.num_keys),
                chunk.mask,
            )
            for chunk in call.chunks
        ]
        return torch.cat([out for out, _ in rows]), torch.cat([lse for _, lse in rows])

    def padded(self, call: BoundPadded) -> tuple[Tensor, Tensor]:
        """Single rows, each with keys of its own."""
        spec, num = self.spec, call.num_rows
        query = self._query(call).view(num, spec.num_kv_heads, spec.group, spec.key_dim)
        key, value = (
            take_slots(pool, flat, -1, call.slots, len(call.slots))
            .to(self.dtype)
            .view(num, call.num_keys, spec.num_kv_heads, -1)
            .transpose(1, 2)
            for pool, flat in zip(self.pools, (self.flat_keys, self.flat_values), strict=True)
        )
        out, lse = self._softmax(self._logits(query, key, call.mask), value)
        return out.flatten(1, 2), lse.flatten(1, 2)

    def _query(self, call: BoundCall | BoundPadded) -> Tensor:
        """`[n, heads, dim]`, scaled."""
        query = (
            self.query.narrow(0, call.first_row, call.num_rows)
            if call.row_index is None
            else self.query.index_select(0, call.row_index)
        )
        return query.to(self.dtype) * self.spec.scale

    def _rows(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Rows `[n, heads, dim]` over `[kv_heads, keys, dim]`, so many at a time as memory allows."""
        spec, num, keys = self.spec, query.shape[0], key.shape[1]
        at_once = max(1, _MAX_LOGITS // (spec.num_heads * keys))
        if num > at_once:
            parts = [
                self._rows(
                    query[start : start + at_once],
                    key,
                    value,
                    None if mask is None else mask[:, :, start : start + at_once],
                )
                for start in range(0, num, at_once)
            ]
            return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts])
        folded = query.view(num, spec.num_kv_heads, spec.group, spec.key_dim).transpose(0, 1).flatten(1, 2)
        if mask is not None and mask.shape[2] > 1:
            mask = mask[0].expand(spec.group, num, keys).transpose(0, 1).reshape(1, num * spec.group, keys)
        out, lse = self._softmax(self._logits(folded, key, mask), value)
        shape = (spec.num_kv_heads, num, spec.group)
        return out.view(*shape, -1).transpose(0, 1).flatten(1, 2), lse.view(shape).transpose(0, 1).flatten(
            1, 2
        )

    def _logits(self, query: Tensor, key: Tensor, mask: Tensor | None) -> Tensor:
        logits = torch.matmul(query, key.transpose(-1, -2))
        if self.spec.softcap is not None:
            logits.div_(self.spec.softcap).tanh_().mul_(self.spec.softcap)
        if mask is not None:
            logits.add_(mask)
        return logits

    @staticmethod
    def _softmax(logits: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        lse = torch.logsumexp(logits, -1)
        return torch.matmul(logits.sub_(lse.unsqueeze(-1)).exp_(), value), lse
