"""Learning from a plain forward what every attention module of a model computes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from radixkv.attention.interface import AttentionBackend, AttentionSpec
from radixkv.core.errors import UnsupportedModelError
from radixkv.hf.routing import AttentionCall, Diversion, plain_mask
from radixkv.hf.step_cache import FlatLayer, StepCache
from radixkv.store.layout import KVLayout

__all__ = ["AttentionSurvey", "LayerKind", "passed_on"]

_NO_MASK_FUNCTION = object()


@dataclass(frozen=True)
class LayerKind:
    """What one attention module computes, and where its keys and values lie.

    Attributes:
        layer: Index in the pool. Modules without KV of their own read that of an earlier layer.
        spec: For the backend.
        passed: `(scaling, sliding_window, softcap)` as the module passes them.
        last: Whether no later module reads the same keys.
        has_sinks: Whether the sinks that it passes count.
    """

    layer: int
    spec: AttentionSpec
    passed: tuple[Any, Any, Any]
    last: bool = True
    has_sinks: bool = False


class AttentionSurvey(Diversion):
    """Watches a plain forward of one row to learn what every attention module of a model computes.

    Masks and attention stay the model's own.

    Args:
        layout: The model's KV layers.
    """

    def __init__(self, layout: KVLayout) -> None:
        self.kinds: dict[Any, LayerKind] = {}
        self._layout = layout
        self._keys: list[Tensor | None] = [None] * len(layout.layers)
        self._windows: set[int | None] = {layer.window for layer in layout.layers if layer is not None}
        self._masks: list[Any] = []

    def cache(self) -> StepCache:
        """The cache to run the forward with."""
        return StepCache([FlatLayer(index, self._note) for index in range(len(self._layout.layers))])

    def _note(self, layer: int, keys: Tensor, values: Tensor) -> None:
        self._keys[layer] = keys

    def mask(self, original: str, args: Any, kwargs: Any) -> Any:
        """Note which function the mask is made of, and make the mask."""
        self._masks.append(kwargs.get("mask_function", _NO_MASK_FUNCTION))
        return plain_mask(original, args, kwargs)

    def attend(self, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
        """Note what kind of attention a layer asks for, and compute it as the model would."""
        kind = self._kind(call)
        for module, earlier in self.kinds.items():
            if earlier.layer == kind.layer:
                self.kinds[module] = replace(earlier, last=False)
        self.kinds[call.module] = kind
        return call.plain()

    def _kind(self, call: AttentionCall) -> LayerKind:
        query, key, value, kwargs = call.query, call.key, call.value, call.kwargs
        name = type(call.module).__name__
        layer = next((i for i, known in enumerate(self._keys) if known is key), None)
        shape = None if layer is None else self._layout.layers[layer]
        if layer is None or shape is None:
            raise UnsupportedModelError(f"{name} changes keys and values after they are cached")
        for argument in ("position_bias", "head_mask"):
            if kwargs.get(argument) is not None:
                raise UnsupportedModelError(f"{name} adds a {argument} to its attention")
        passed = passed_on(kwargs)
        scaling, window, softcap = passed
        if window is not None and window != shape.window:
            raise UnsupportedModelError(
                f"{name} asks for a window of {window} in layer {layer}, whose cache has {shape.window}"
            )
        dims = (key.shape[1], query.shape[3], value.shape[3])
        if dims != (shape.num_kv_heads, shape.key_dim, shape.value_dim):
            raise UnsupportedModelError(f"{name} caches keys and values in another form than it attends over")
        spec = AttentionSpec(
            num_heads=query.shape[1],
            num_kv_heads=shape.num_kv_heads,
            key_dim=shape.key_dim,
            value_dim=shape.value_dim,
            scale=float(query.shape[3] ** -0.5 if scaling is None else scaling),
            window=shape.window,
            softcap=None if softcap is None else float(softcap),
        )
        sinks = kwargs.get("s_aux")
        if softcap is None and sinks is None:
            return LayerKind(layer, spec, passed)
        # Some implementations take a soft cap or sinks and leave them, and then so must we.
        got = call.plain()[0].float()
        spec, sinks = min(
            ((s, a) for s in (spec, replace(spec, softcap=None)) for a in (sinks, None)),
            key=lambda chosen: float((_computed(call, *chosen) - got).norm()),
        )
        return LayerKind(layer, spec, passed, has_sinks=sinks is not None)

    def conclude(self, backend: AttentionBackend) -> dict[Any, LayerKind]:
        """What was seen, by attention module.

        Raises:
            UnsupportedModelError: It is not something that a backend could compute from the pool.
        """
        cached = {i for i, layer in enumerate(self._layout.layers) if layer is not None}
        if {kind.layer for kind in self.kinds.values()} != cached:
            raise UnsupportedModelError("its attention does not go through transformers' AttentionInterface")
        masks = {_window_of(function, self._windows) for function in self._masks}
        if not self._windows <= masks:
            raise UnsupportedModelError("it does not make the masks that its cache layers call for")
        for kind in self.kinds.values():
            reason = backend.unsupported(kind.spec)
            if reason is not None:
                raise UnsupportedModelError(f"attention backend {backend.name!r}: {reason}")
        return self.kinds


def _computed(call: AttentionCall, spec: AttentionSpec, sinks: Tensor | None) -> Tensor:
    """Attention of one row over its own keys, `[1, T, num_heads, value_dim]` float32."""
    query = call.query.float()
    key, value = (part.float().repeat_interleave(spec.group, dim=1) for part in (call.key, call.value))
    logits = query @ key.transpose(2, 3) * spec.scale
    if spec.softcap is not None:
        logits = spec.softcap * torch.tanh(logits / spec.softcap)
    seen = torch.ones(logits.shape[2:], dtype=torch.bool, device=logits.device).tril()
    if spec.window is not None:
        seen &= ~seen.tril(-spec.window)
    logits = logits.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        column = sinks.float()[None, :, None, None].expand(*logits.shape[:3], 1)
        logits = torch.cat([logits, column], dim=3)
    weights = logits.softmax(dim=3)[..., : key.shape[2]]
    return (weights @ value).transpose(1, 2)


def passed_on(kwargs: dict[str, Any]) -> tuple[Any, Any, Any]:
    """`(scaling, sliding_window, softcap)` of the keyword arguments of an attention call."""
    return kwargs.get("scaling"), kwargs.get("sliding_window"), kwargs.get("softcap")


def _window_of(function: Any, windows: set[int | None]) -> int | None:
    """The window of a causal mask, asked of its function at the edges of all windows there are.

    Raises:
        UnsupportedModelError: It is another mask (chunked attention, attention in both directions, ...).
    """
    widths = [4, *(w for w in windows if w is not None)]
    edges = sorted({n * w + d for w in widths for n in range(4) for d in range(3)})
    queries = torch.tensor(edges)[:, None]
    keys = torch.tensor(sorted({max(0, e - d) for e in edges for d in (0, 1)} | {edges[-1] + 3}))[None]
    seen = None
    try:
        zero = torch.zeros((), dtype=torch.int64)
        seen = torch.as_tensor(function(zero, zero, queries, keys)).broadcast_to(len(edges), keys.shape[1])
    except Exception:  # a function that looks something up by these indices is none of ours
        pass
    for window in windows | {None}:
        expected = keys <= queries
        if window is not None:
            expected = expected & (keys > queries - window)
        if seen is not None and torch.equal(seen.cpu(), expected):
            return window
    raise UnsupportedModelError("its attention masks are neither causal nor those of a sliding window")
