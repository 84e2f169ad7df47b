"""Filling a fresh cache: what is cached is copied in, what is missing and worth it is computed."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from radixkv.cache.locking import InterruptsHeld
from radixkv.cache.prefix_cache import PrefixCache
from radixkv.core.radix_tree import Match
from radixkv.hf.compat import ForwardCall, bare_cache, fresh_layers
from radixkv.hf.layers import RowsLayer, SessionLayer
from radixkv.hf.paged_session import PagedLayer, PagedRowsLayer, Pages
from radixkv.hf.prefill import Climb, Row, Shared, plan_shared, plan_staircase
from radixkv.hf.session import Origin
from radixkv.hf.support import base_of
from radixkv.observe.stats import RequestStats

__all__ = ["Filled", "Filler"]

# A forward of its own has to save about as many token computations as its fixed cost is worth.
_MIN_SAVED = {"cpu": 8}
_MIN_SAVED_ELSEWHERE = 64
# A hit turns the causal kernel of a prefill into one with a mask, which costs some per cent: a hit on less than
# this share of the prompt (its begin token, say) would not even pay for that.
_MIN_HIT_SHARE = 64

_CROP_SLACK = 32  # tokens that a crop may go back below a hit, in sliding layers


@dataclass
class Filled:
    """Layers ready for the caller's forward.

    Attributes:
        layers: One for each cache index.
        skip: Leading columns that they hold, and the forward has to leave out.
        rows: The prompts.
        notes: What was said of each when it was looked up (`Match.note`).
    """

    layers: list[Any]
    skip: int
    rows: list[Row]
    notes: list[object | None]

    @property
    def computed_ahead(self) -> int:
        """Tokens that went through the model already."""
        return sum(row.computed for row in self.rows)

    def requests(self) -> list[RequestStats]:
        """What each prompt is spared."""
        result = []
        for row, note in zip(self.rows, self.notes, strict=True):
            total = len(row.tokens)
            hit = min(total, max(0, self.skip - row.pad - row.computed))
            result.append(RequestStats.of(total, hit, note, required=total - row.limit))
        return result


class Filler:
    """Fills caches of one model from one `PrefixCache`.

    Args:
        cache: Where KV is looked up.
        model: The causal LM.
        may_compute: Whether parts of a prompt may be computed in forwards of their own (not so when rotary
            angles depend on the length of the whole prompt).
    """

    def __init__(self, cache: PrefixCache, model: Any, may_compute: bool) -> None:
        self._cache = cache
        self._model = model
        self._base = base_of(model)
        self._call = ForwardCall(self._base)
        self._may_compute = may_compute
        self._min_saved = _MIN_SAVED.get(cache.layout.device.type, _MIN_SAVED_ELSEWHERE)
        self._local = threading.local()

    @property
    def running(self) -> bool:
        """Whether this thread is inside a forward that the filler makes itself."""
        return getattr(self._local, "running", False)

    def fill(
        self,
        ids: Tensor,
        mask: Tensor | None,
        pads: np.ndarray,
        origin: Origin,
        ahead: int,
        pages: Pages | None = None,
    ) -> Filled:
        """Match, copy and compute.

        Args:
            ids: `[rows, columns]` token ids, left-padded.
            mask: `[rows, columns]`, or None without padding.
            pads: `[rows]`, columns of padding.
            origin: Where in the tree to look, and how long to keep what is found.
            ahead: Columns at the end that the caller's forward has to do in any case.
            pages: Where the rows are to lie, if not in buffers of their own.
        """
        try:
            return self._filled(ids, mask, pads, origin, ahead, pages)
        except BaseException:
            if pages is not None:
                pages.release()
            raise

    def _filled(
        self,
        ids: Tensor,
        mask: Tensor | None,
        pads: np.ndarray,
        origin: Origin,
        ahead: int,
        pages: Pages | None,
    ) -> Filled:
        columns = ids.shape[1]
        host = ids.detach().cpu().numpy().astype(np.int64, copy=False)
        rows = [
            Row(np.ascontiguousarray(host[i, pad:]), pad, max(0, columns - ahead - pad))
            for i, pad in enumerate(pads.tolist())
        ]
        layers = self._new_layers(pages)
        if pages is not None:
            pages.columns = columns
        # An interrupt in here would leave blocks held that nobody knows of.
        with InterruptsHeld():
            shared, climbs, skip, notes = self._fill_cached(layers, rows, pads, origin, columns, ahead, pages)
        if skip == 0:
            return Filled(layers, 0, rows, notes)
        for step in shared:
            self._compute_row(layers, rows, step.leader, ids, step.start, step.stop)
            for follower in step.followers:
                if pages is not None and pages.live:
                    pages.share(step.leader, follower, step.stop)
                else:
                    _copy_row(layers, rows, step.leader, follower, step.copy_from, step.stop)
        for climb in climbs:
            self._climb(layers, rows, climb, ids, mask)
        for layer in _kv(layers):
            layer.length = skip
        return Filled(layers, skip, rows, notes)

    def _fill_cached(
        self,
        layers: list[Any],
        rows: list[Row],
        pads: np.ndarray,
        origin: Origin,
        columns: int,
        ahead: int,
        pages: Pages | None,
    ) -> tuple[list[Shared], list[Climb], int, list[object | None]]:
        """Copy in what is cached. What is left to compute, the column that all rows then reach, and notes of misses."""
        matches: list[Match] = []
        shared: list[Shared] = []
        climbs: list[Climb] = []
        try:
            with self._cache.lock:  # all rows see the same tree: what one finds of a shared prefix, all find
                for row in rows:
                    match = self._cache.lookup(
                        row.tokens, origin.key, matches, row.limit, retention=origin.retention
                    )
                    row.have = match.num_tokens
            cached = [row.have for row in rows]
            skip = min(row.column for row in rows)
            if len(rows) > 1 and self._may_compute and ahead < columns:
                shared = plan_shared(rows, self._min_saved)
                climbs, skip = plan_staircase(rows, self._min_saved)
            skip = min(skip, columns - ahead)
            if not shared and not climbs and skip * _MIN_HIT_SHARE < columns and not pads.any():
                skip = 0
            notes = [match.note for match in matches]
            if pages is not None:
                for i, match in enumerate(matches):
                    pages.adopt(i, match)
            elif skip > 0:
                self._allocate(layers, rows, cached, columns)
                self._gather(layers, rows, matches)
            return shared, climbs, max(0, skip), notes
        finally:
            with self._cache.lock:
                for match in matches:
                    if not match.released:
                        self._cache.release(match)

    def _new_layers(self, pages: Pages | None) -> list[Any]:
        shapes = self._cache.layout.layers
        layers: list[Any] = fresh_layers(self._model) if None in shapes else [None] * len(shapes)
        for i, shape in enumerate(shapes):
            if shape is not None:
                layers[i] = SessionLayer(shape) if pages is None else pages.layer(i, shape)
        return layers

    def _allocate(self, layers: list[Any], rows: list[Row], cached: list[int], columns: int) -> None:
        layout = self._cache.layout
        size = self._cache.block_size
        for layer in _kv(layers):
            base = 0
            if layer.window is not None:
                # Attention needs the window before the first new token, or before one that a crop goes back to;
                # storing needs the block that token falls into.
                base = min(
                    row.pad + min(have - layer.window + 1 - _CROP_SLACK, have // size * size)
                    for row, have in zip(rows, cached, strict=True)
                )
            layer.allocate(len(rows), columns, max(0, base), layout.dtype, layout.device)
        _blank_padding(layers, rows)

    def _gather(self, layers: list[Any], rows: list[Row], matches: list[Match]) -> None:
        began = time.perf_counter()
        store = self._cache.store
        copies = 0
        for i, (row, match) in enumerate(zip(rows, matches, strict=True)):
            have = match.num_tokens
            if not have:
                continue
            blocks = match.blocks
            if match.tail is not None:
                blocks = np.append(blocks, np.int32(match.tail.block))
                copies += 1
            places: dict[int, Any] = {}
            for index, layer in enumerate(layers):
                if not isinstance(layer, SessionLayer):
                    continue
                start = max(0, layer.base - row.pad)
                if start >= have:
                    continue
                if start not in places:
                    places[start] = store.locate(blocks, start, have)
                keys, values = layer.view(slice(i, i + 1), row.pad + start, row.pad + have)
                store.read(index, places[start], keys[0], values[0])
        self._cache.recorder.add(gather_seconds=time.perf_counter() - began, cow_copies=copies)

    def _climb(
        self, layers: list[Any], rows: list[Row], climb: Climb, ids: Tensor, mask: Tensor | None
    ) -> None:
        group = climb.rows
        if len(group) == 1:
            pad = rows[group[0]].pad
            self._compute_row(layers, rows, group[0], ids, max(0, climb.start - pad), climb.stop - pad)
            return
        index = torch.tensor(group, device=ids.device)
        consecutive = group == tuple(range(group[0], group[-1] + 1))
        which = slice(group[0], group[-1] + 1) if consecutive else index
        pads = torch.tensor([rows[i].pad for i in group], device=ids.device)[:, None]
        padded = bool(pads.any())
        positions = torch.arange(climb.start, climb.stop, device=ids.device)[None]
        self._forward(
            layers,
            group,
            which,
            origin=0,
            length=climb.start,
            ids=ids[index, climb.start : climb.stop],
            mask=mask[index, : climb.stop] if padded and mask is not None else None,
            positions=(positions - pads).clamp(min=0),
        )
        if padded and _pages_of(layers) is None:
            _blank_padding(layers, rows)

    def _compute_row(
        self, layers: list[Any], rows: list[Row], index: int, ids: Tensor, start: int, stop: int
    ) -> None:
        """Positions `start..stop` of one row, seen without its padding."""
        if start < stop:
            pad = rows[index].pad
            self._forward(
                layers,
                (index,),
                slice(index, index + 1),
                origin=pad,
                length=start,
                ids=ids[index : index + 1, pad + start : pad + stop],
                mask=None,
                positions=torch.arange(start, stop, device=ids.device)[None],
            )

    def _forward(
        self,
        layers: list[Any],
        rows: tuple[int, ...],
        which: slice | Tensor,
        *,
        origin: int,
        length: int,
        ids: Tensor,
        mask: Tensor | None,
        positions: Tensor,
    ) -> None:
        """Run the base model on some rows; their KV lands in `layers`."""
        plain = fresh_layers(self._model) if None in self._cache.layout.layers else []
        pages = _pages_of(layers)
        step = None if pages is None else pages.begin(length, ids.shape[1], rows, origin)

        def seen(index: int, layer: Any) -> Any:
            if not isinstance(layer, SessionLayer):
                return plain[index]
            if step is not None:
                return PagedRowsLayer(step, index, layer.window, length)
            return RowsLayer(layer, which, origin, length)

        view = bare_cache([seen(i, layer) for i, layer in enumerate(layers)])
        call: dict[str, Any] = {"input_ids": ids, self._call.cache_name: view, "use_cache": True}
        if mask is not None:
            call["attention_mask"] = mask
        if self._call.accepts("position_ids"):
            call["position_ids"] = positions
        self._local.running = True
        try:
            with torch.no_grad():
                if step is None:
                    self._base(**call)
                else:
                    step.around(lambda: self._base(**call))
        finally:
            self._local.running = False
            if pages is not None:
                pages.end_step()


def _kv(layers: list[Any]) -> list[SessionLayer]:
    return [layer for layer in layers if isinstance(layer, SessionLayer)]


def _pages_of(layers: list[Any]) -> Pages | None:
    """Where the rows lie, as long as that is the pool."""
    leader = _kv(layers)[0]
    return leader.pages if isinstance(leader, PagedLayer) and leader.pages.live else None


def _blank_padding(layers: list[Any], rows: list[Row]) -> None:
    # Masked scores become weights of 0, but 0 times a stray NaN is NaN.
    for layer in _kv(layers):
        for i, row in enumerate(rows):
            if row.pad > layer.base:
                for part in layer.view(slice(i, i + 1), layer.base, row.pad):
                    part.zero_()


def _copy_row(layers: list[Any], rows: list[Row], source: int, target: int, start: int, stop: int) -> None:
    """Copy positions `start..stop` from one row to another, as far as both hold them."""
    from_pad, to_pad = rows[source].pad, rows[target].pad
    for layer in _kv(layers):
        first = max(start, layer.base - from_pad, layer.base - to_pad)
        if first < stop:
            keys, values = layer.view(slice(source, source + 1), from_pad + first, from_pad + stop)
            layer.put(slice(target, target + 1), to_pad + first, keys, values)
