"""Finding out whether the attention of sessions can be computed from the pool: once for each model, by trying it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from radixkv.attention.interface import AttentionBackend
from radixkv.core.block_pool import BlockPool
from radixkv.core.errors import UnsupportedModelError
from radixkv.hf.attention_survey import AttentionSurvey, LayerKind
from radixkv.hf.compat import ForwardCall, bare_cache, fresh_layers, text_config
from radixkv.hf.paged_session import Pages, Room
from radixkv.hf.paged_session_step import PagedAttention
from radixkv.hf.routing import Routing, attention_configs
from radixkv.hf.trials import ModelTrials
from radixkv.observe.stats import StatsRecorder
from radixkv.store.kv_store import KVStore
from radixkv.store.layout import KVLayout

__all__ = ["find_out"]

_BLOCK_SIZE = 4
# Columns of two rows in each forward: a prompt in two parts, then decodes.
_SCRIPT = (5, 4, 1, 1)
_PAD = 3


def find_out(
    model: Any,
    layout: KVLayout,
    take_backend: Callable[[], AttentionBackend],
    give_backend: Callable[[AttentionBackend], None],
) -> PagedAttention:
    """How a model's attention is taken over. Nothing of the model stays changed.

    A small padded batch is run over a pool of its own, and its logits are compared with those of plain forwards.

    Args:
        model: The causal LM.
        layout: Its KV.
        take_backend: Gives a backend.
        give_backend: Takes it back.

    Raises:
        UnsupportedModelError: It cannot be; the message says why.
    """
    trial = _Trial(model, layout)
    backend = take_backend()
    try:
        kinds = trial.survey(backend)
    finally:
        give_backend(backend)
    how = PagedAttention(trial.configs, kinds, take_backend, give_backend)
    trial.check(how)
    return how


class _Trial(ModelTrials):
    def __init__(self, model: Any, layout: KVLayout) -> None:
        super().__init__(model, layout.device)
        self._layout = layout
        self._call = ForwardCall(model)
        self.configs = attention_configs(model)
        self._pads = (0, _PAD) if self._call.accepts("position_ids") else (0, 0)
        vocab = int(text_config(model).vocab_size)
        rows = [(np.arange(sum(_SCRIPT)) * 7 + 1 + 13 * row) % vocab for row in (0, 1)]
        self._ids = torch.from_numpy(np.stack(rows)).to(layout.device)

    def survey(self, backend: AttentionBackend) -> dict[Any, LayerKind]:
        """What every attention module computes."""
        self.require_interface()
        watch = AttentionSurvey(self._layout)

        def trial() -> None:
            ids = self._ids[:1]
            plain = self._forward(ids, self._fresh_cache())
            Routing(self.configs, watch).around(lambda: self._forward(ids, watch.cache(), placed=True))
            watch.conclude(backend)
            other = Routing(self.configs, None).around(lambda: self._forward(ids, self._fresh_cache()))
            self.compare(plain, other, "when its attention implementation has another name")

        self.undisturbed(trial, "a forward whose attention is watched")
        return watch.kinds

    def check(self, how: PagedAttention) -> None:
        """Run the script over the pool."""

        def trial() -> None:
            columns = sum(_SCRIPT)
            size = _BLOCK_SIZE
            blocks = 2 * -(-columns // size) + 1
            store = KVStore(self._layout, blocks, size)
            for tensor in (*store.keys, *store.values):
                if tensor is not None:
                    tensor.fill_(float("nan"))  # memory as it comes may hold that, too
            pool = BlockPool(blocks)
            room = Room(pool, store, nullcontext(), pool.allocate, StatsRecorder())
            pages = Pages(room, how, self._pads, lambda reason: None)
            layers: list[Any] = fresh_layers(self._model)
            layers += [None] * (len(self._layout.layers) - len(layers))
            for i, shape in enumerate(self._layout.layers):
                if shape is not None:
                    layers[i] = pages.layer(i, shape)
            cache = bare_cache(layers)
            plain = [
                self._forward(self._ids[row : row + 1, pad:], self._fresh_cache())
                for row, pad in enumerate(self._pads)
            ]
            start = 0
            try:
                for q in _SCRIPT:
                    got = self._step(pages, cache, start, q)
                    start += q
                    for row, pad in enumerate(self._pads):
                        self.compare(plain[row][0, start - 1 - pad], got[row, -1], "over the pool")
            finally:
                pages.release()

        self.undisturbed(trial, "a forward over keys and values in the pool")

    def _step(self, pages: Pages, cache: Any, start: int, q: int) -> Tensor:
        step = pages.begin(start, q)
        if step is None:
            raise UnsupportedModelError("the trial's pool is too small")
        ids = self._ids[:, start : start + q]
        pads = torch.tensor(self._pads, device=ids.device)[:, None]
        places = torch.arange(start + q, device=ids.device)[None] - pads
        padded = self._pads[1] > 0
        logits: Tensor = step.around(
            lambda: self._forward(
                ids,
                cache,
                mask=(places >= 0).to(torch.int64) if padded else None,
                positions=places[:, start:].clamp(min=0),
            )
        )
        pages.end_step()
        return logits

    def _fresh_cache(self) -> Any:
        return bare_cache(fresh_layers(self._model))

    def _forward(
        self,
        ids: Tensor,
        cache: Any,
        placed: bool = False,
        mask: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """Logits `[rows, q, vocab]`."""
        arguments: dict[str, Any] = {"input_ids": ids, self._call.cache_name: cache, "use_cache": True}
        if placed:
            positions = torch.arange(ids.shape[1], device=ids.device)[None]
        if mask is not None:
            arguments["attention_mask"] = mask
        if positions is not None and self._call.accepts("position_ids"):
            arguments["position_ids"] = positions
        output = self._model(**arguments)
        logits: Tensor = output.logits if hasattr(output, "logits") else output[0]
        return logits
