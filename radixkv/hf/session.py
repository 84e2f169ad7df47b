"""What the rows of a filled cache hold: which tokens, under which key, and whether that can be trusted."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from radixkv.cache.prefix_cache import PrefixCache
from radixkv.core.eviction import Retention
from radixkv.hf.layers import SessionLayer
from radixkv.hf.paged_session import PagedLayer, Pages
from radixkv.hf.rope import RopeRule
from radixkv.hf.watch import State

__all__ = ["Origin", "Session"]

_CROP_SLACK = 128  # tokens that a crop may go back below the window


@dataclass(frozen=True)
class Origin:
    """Under what the KV of a session was computed.

    Attributes:
        key: Namespace in the tree.
        namespace: Canonical form of the user's namespace.
        state: `ModelWatch.state()` at the start.
        circumstances: Adapters, patches and autocast, which must be the same in every forward.
        prompt_tokens: Of the longest row; decides the rotary regime.
        retention: How long to keep the blocks; None leaves it to the policy.
    """

    key: bytes
    namespace: bytes
    state: State
    circumstances: tuple[bytes, int, str]
    prompt_tokens: int
    retention: Retention | None = None


class _RowSource:
    """One row of the layers, as `PrefixCache.commit` reads it."""

    def __init__(self, layers: Sequence[Any], row: int, pad: int) -> None:
        self._layers = layers
        self._row = row
        self._pad = pad
        bases = [layer.base for layer in layers if isinstance(layer, SessionLayer)]
        self.first_position = max(0, max(bases) - pad)

    def rows(self, layer: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        keys, values = self._layers[layer].view(
            slice(self._row, self._row + 1), start + self._pad, stop + self._pad
        )
        return keys[0], values[0]


class Session:
    """Bookkeeping for one cache object that the plug-in filled.

    The layers know how much KV there is, the session knows of which tokens: ids come from the hooks on the
    model, crops and reorderings from the layers. If the two ever disagree, or a forward was not plain
    (positions, mask), the session is no longer trusted and nothing of it is stored.

    Args:
        owner: The plug-in it belongs to.
        origin: See `Origin`.
        layers: One `SessionLayer` for each layer with KV, foreign layers elsewhere.
        pads: int `[rows]`: columns of left padding.
        ids: `[rows, columns]` tokens that the layers hold, or will hold after the forward under way.
        filler: The id that rows are fed with after their end, and the ids that end them.
        explicit: Opened by the user with `session(...)`, and stored only at its end.
    """

    def __init__(
        self,
        owner: Any,
        origin: Origin,
        layers: Sequence[Any],
        pads: np.ndarray,
        ids: Tensor,
        *,
        filler: tuple[int, frozenset[int]] | None,
        explicit: bool,
    ) -> None:
        self.owner = owner
        self.origin = origin
        self._keep: int | None = None
        self.layers = layers
        self.pads = pads
        self.explicit = explicit
        self.trusted = True
        self.wrong_dtype = False
        self.bypassed = False
        self.thread = threading.get_ident()
        self.prompt = ids
        self._filler = filler
        self._chunks: list[Tensor] = []
        self._doubt: Tensor | None = None
        self._stored: dict[int, int] = {}
        self._committed = 0
        leader = self._kv_layers()[0]
        leader.book = self

    def _kv_layers(self) -> list[SessionLayer]:
        return [layer for layer in self.layers if isinstance(layer, SessionLayer)]

    @property
    def pages(self) -> Pages | None:
        """Where the rows' KV lies, if it is in the pool."""
        leader = self._kv_layers()[0]
        return leader.pages if isinstance(leader, PagedLayer) and leader.pages.live else None

    @property
    def num_rows(self) -> int:
        """Rows of the batch."""
        return len(self.pads)

    @property
    def columns(self) -> int:
        """Columns whose KV is present, padding included."""
        return self._kv_layers()[0].length

    @property
    def has_news(self) -> bool:
        """Whether columns came (or went) since the last `commit`."""
        return self.trusted and self.columns != self._committed

    @property
    def consistent(self) -> bool:
        """Whether every layer holds the same columns, and as many as tokens were fed."""
        lengths = {layer.length for layer in self._kv_layers()}
        return lengths == {sum(chunk.shape[1] for chunk in self._chunks)}

    # -- told by the hooks ----------------------------------------------------------------------------------

    def feed(self, ids: Tensor, rope: RopeRule) -> None:
        """A forward is about to append these tokens `[rows, q]`."""
        start = sum(chunk.shape[1] for chunk in self._chunks)
        longest = start + ids.shape[1] - int(self.pads.min())
        if rope.crosses(self.origin.prompt_tokens, longest) and self._keep is None:
            self._keep = start  # from here on, keys of this session belong to another regime
        self._chunks.append(ids.detach().clone())

    def undo(self, columns: int) -> None:
        """The forward that was announced failed: go back to `columns`, in all layers and tokens."""
        for layer in self._kv_layers():
            layer.length = min(layer.length, columns)
        if self.pages is not None:
            self.pages.cut(columns)
        self._chunks = [self.ids()[:, :columns]]

    def expect_plain(self, mask: Tensor | None, positions: Tensor | None, q: int) -> None:
        """Compare a forward's mask and positions with what this session's padding implies.

        Nothing is read back from the device now: a mismatch is remembered and looked at when storing.
        """
        total = self.columns + q
        if mask is not None:
            if mask.dim() != 2 or tuple(mask.shape) != (self.num_rows, total):
                self.trusted = False
                return
            if self.pads.any():
                pads = torch.as_tensor(self.pads, device=mask.device)[:, None]
                wrong = ((mask != 0) != (torch.arange(total, device=mask.device) >= pads)).any()
            else:
                wrong = (mask == 0).any()
            self._suspect(wrong)
        elif self.pads.any():
            self.trusted = False
            return
        if positions is not None:
            if (
                positions.dim() != 2
                or positions.shape[1] != q
                or positions.shape[0] not in (1, self.num_rows)
            ):
                self.trusted = False
                return
            expected = torch.arange(self.columns, total, device=positions.device)[None]
            if self.pads.any():
                expected = expected - torch.as_tensor(self.pads, device=positions.device)[:, None]
                self._suspect(((positions != expected) & (expected >= 0)).any())
            else:
                self._suspect((positions != expected).any())
        elif self.pads.any():
            self.trusted = False

    def _suspect(self, wrong: Tensor) -> None:
        self._doubt = wrong if self._doubt is None else self._doubt | wrong

    # -- told by the first layer ----------------------------------------------------------------------------

    def ids(self) -> Tensor:
        """`[rows, columns]`: the tokens that were fed so far."""
        if len(self._chunks) != 1:
            self._chunks = [torch.cat(self._chunks, dim=1)] if self._chunks else []
        return self._chunks[0] if self._chunks else self.prompt[:, :0]

    def _changed(self) -> None:
        self._stored.clear()
        self._committed = 0

    def cropped(self, length: int) -> None:
        """All rows were cut to so many columns."""
        self._chunks = [self.ids()[:, :length]]
        self._changed()
        if length == 0 and self.pads.any():  # the padding is gone, too: what follows may be anything
            self.trusted = False

    def reordered(self, index: Tensor) -> None:
        """Row `i` is what row `index[i]` was."""
        self._chunks = [chunk.index_select(0, index.to(chunk.device)) for chunk in self._chunks]
        self.prompt = self.prompt.index_select(0, index.to(self.prompt.device))
        self.pads = self.pads[index.cpu().numpy()]
        self._changed()

    def expanded(self, repeats: int) -> None:
        """Every row was repeated, each copy behind its original."""
        self._chunks = [chunk.repeat_interleave(repeats, dim=0) for chunk in self._chunks]
        self.prompt = self.prompt.repeat_interleave(repeats, dim=0)
        self.pads = self.pads.repeat(repeats)
        self._changed()

    # -- asked for by the plug-in ---------------------------------------------------------------------------

    def expand(self, repeats: int) -> None:
        """Repeat every row in all layers, as `generate()` does for beams and `num_return_sequences`."""
        for layer in self._kv_layers():
            layer.batch_repeat_interleave(repeats)

    def rewind(self, length: int) -> None:
        """Go back to `length` columns, or to none at all where a sliding layer cannot go back that far."""
        if not all(layer.can_cut(length) for layer in self._kv_layers()):
            length = 0
        pads, trusted = self.pads, self.trusted
        for layer in self._kv_layers():
            layer.cut(length)
        self.pads, self.trusted = pads, trusted

    # -- storing --------------------------------------------------------------------------------------------

    def commit(self, cache: PrefixCache, state: State, *, tails: bool = True, ends: bool = False) -> None:
        """Store what is new since the last time.

        Args:
            cache: Where to.
            state: `ModelWatch.state()` now; if it differs from the start, nothing is stored.
            tails: Whether to store partly filled last blocks of a session in the pool. Once others know of them,
                the session has to copy them before it goes on.
            ends: No forward will follow.
        """
        if not self.trusted or self.columns == 0:
            return
        if state != self.origin.state:
            self.trusted = False
            return
        if not self.consistent:  # in the middle of a forward, or fed while nobody looked
            return
        if self._doubt is not None:
            if bool(self._doubt):
                self.trusted = False
                return
            self._doubt = None
        if self.pages is not None:
            self._keep_pages(self.pages, cache, tails, ends)
            return
        self._committed = self.columns
        kinds = {
            (layer.keys.dtype, layer.keys.device) for layer in self._kv_layers() if layer.keys is not None
        }
        if kinds != {(cache.layout.dtype, cache.layout.device)}:
            self.trusted = False
            self.wrong_dtype = True
            return
        for row, tokens in enumerate(self._tokens_to_store()):
            if len(tokens) > self._stored.get(row, 0):
                source = _RowSource(self.layers, row, int(self.pads[row]))
                self._stored[row] = cache.commit(
                    tokens, self.origin.key, source, self.origin.namespace, self.origin.retention
                )

    def _keep_pages(self, pages: Pages, cache: PrefixCache, tails: bool, ends: bool) -> None:
        complete = True
        rows = self._tokens_to_store()
        pages.unify(rows)
        for row, tokens in enumerate(rows):
            table = pages.tables[row]
            # A tail is exchanged for one that the tree has already; not where the row has more in that block.
            if ends:
                table.truncate(min(table.num_tokens, len(tokens)))
            elif not tails or table.num_tokens > len(tokens):
                complete &= len(tokens) % cache.block_size == 0
                tokens = tokens[: len(tokens) // cache.block_size * cache.block_size]
            if len(tokens) > self._stored.get(row, 0):
                origin = self.origin
                with cache.lock:
                    if not self.trusted:  # cleared meanwhile: what was forgotten must not come back
                        return
                    self._stored[row] = cache.keep(
                        tokens, origin.key, table, origin.namespace, origin.retention
                    )
        if complete or tails:
            self._committed = self.columns

    def _tokens_to_store(self) -> list[np.ndarray]:
        """int64, for each row."""
        ids = self.ids().cpu().numpy().astype(np.int64, copy=False)
        found = []
        for row, pad in enumerate(self.pads.tolist()):
            tokens = self._without_filler(ids[row, pad:], self.prompt.shape[1] - pad)
            if self._keep is not None:
                tokens = tokens[: max(0, self._keep - pad)]
            found.append(np.ascontiguousarray(tokens))
        return found

    def forget_stored(self, block_size: int) -> None:
        """Let sliding layers drop what lies far before their window, once it is stored.

        A cold prompt leaves all its columns in them. The block that the next token falls into stays, since it
        will be stored again when it is fuller, and some columns more, since drafts may be cropped.
        """
        for layer in self._kv_layers():
            if layer.window is None or layer.length - layer.base < 4 * layer.window + _CROP_SLACK:
                continue
            borders = [
                pad + self._stored.get(row, 0) // block_size * block_size
                for row, pad in enumerate(self.pads.tolist())
            ]
            layer.forget(min([*borders, layer.length - 2 * layer.window - _CROP_SLACK]))

    def _without_filler(self, tokens: np.ndarray, prompt: int) -> np.ndarray:
        """Leave out what a finished row was fed while others went on."""
        if self._filler is None:
            return tokens
        pad, ends = self._filler
        ended = np.flatnonzero(np.isin(tokens[prompt:], list(ends)))
        if len(ended):
            stop = prompt + int(ended[0]) + 1
            if (tokens[stop:] == pad).all():
                return tokens[:stop]
        return tokens

    def close(self) -> None:
        """Let go of everything; the layers refuse further use."""
        self.trusted = False
        for layer in self._kv_layers():
            layer.end()
        self._chunks = []
