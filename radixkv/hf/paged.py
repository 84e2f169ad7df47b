"""Attention over the paged pool inside an unmodified transformers model.

transformers asks `AttentionInterface` for the attention function that a config names, and
`AttentionMaskInterface` for the mask function. Under the name that is put into the configs for the length of a
forward, both look at a context variable: inside a `PagedForward` they compute attention from the pool and make
no mask, everywhere else (another thread that runs the same model, say) they do what the model does without us.
The name carries the implementation that the model had, so nothing has to be looked up for that.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Sequence
from contextvars import ContextVar, Token
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from radixkv.attention.interface import AttentionBackend, AttentionSpec
from radixkv.cache.locking import InterruptsHeld
from radixkv.core.errors import InvalidRequestError, UnsupportedModelError
from radixkv.hf.step_cache import FlatLayer, StepCache
from radixkv.hf.support import base_of
from radixkv.store.kv_store import KVStore
from radixkv.store.layout import KVLayout

__all__ = ["AttentionSurvey", "LayerKind", "PagedForward", "PoolWriter", "Routing", "attention_configs"]

_PREFIX = "radixkv_paged_"
_NO_MASK_FUNCTION = object()


# -- the registered functions -------------------------------------------------------------------------------


@dataclass
class _AttentionCall:
    """What a module handed to the attention function, and the name of the one it meant."""

    original: str
    module: Any
    query: Tensor
    key: Tensor
    value: Tensor
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def plain(self) -> Any:
        """What the model would have computed."""
        function = plain_attention(self.original, self.module)
        return function(self.module, self.query, self.key, self.value, *self.args, **self.kwargs)


class _Diverted:
    """What takes attention and masks over while it is the current one of this thread."""

    def attend(self, call: _AttentionCall) -> tuple[Tensor, Tensor | None]:
        raise NotImplementedError

    def mask(self, original: str, args: Any, kwargs: Any) -> Any:
        raise NotImplementedError


_current: ContextVar[_Diverted | None] = ContextVar("radixkv_paged_forward", default=None)
_lock = threading.RLock()
_names: dict[str, str] = {}


def _name_for(original: str) -> str:
    """The registered name under which a model that had `original` falls through to it."""
    if original.startswith(_PREFIX):  # a copy of a config that was made during a forward
        return original
    with _lock:
        if original not in _names:
            name = _PREFIX + original
            AttentionInterface.register(name, functools.partial(_attention, original))
            AttentionMaskInterface.register(name, functools.partial(_mask, original))
            _names[original] = name
        return _names[original]


def _attention(
    original: str, module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
) -> Any:
    call = _AttentionCall(original, module, query, key, value, args, kwargs)
    diverted = _current.get()
    return call.plain() if diverted is None else diverted.attend(call)


def _mask(original: str, *args: Any, **kwargs: Any) -> Any:
    diverted = _current.get()
    return _plain_mask(original, args, kwargs) if diverted is None else diverted.mask(original, args, kwargs)


def _plain_mask(original: str, args: Any, kwargs: Any) -> Any:
    function = ALL_MASK_ATTENTION_FUNCTIONS.get(original)
    return None if function is None else function(*args, **kwargs)


def plain_attention(original: str, module: Any) -> Any:
    """The function that the attention module would have called under the name `original`.

    Raises:
        UnsupportedModelError: There is none to be found.
    """
    for kind in type(module).__mro__:  # a class derived elsewhere runs the forward of the file it comes from
        names = vars(sys.modules.get(kind.__module__, object))
        interface = names.get("ALL_ATTENTION_FUNCTIONS")
        if interface is None:
            continue
        if original in interface:  # a file may have functions of its own
            return interface[original]
        if original == "eager" and "eager_attention_forward" in names:
            return names["eager_attention_forward"]
    if original in ALL_ATTENTION_FUNCTIONS:
        return ALL_ATTENTION_FUNCTIONS[original]
    raise UnsupportedModelError(f"{type(module).__name__} has no attention function of the name {original!r}")


# -- putting the name into configs ----------------------------------------------------------------------------


def attention_configs(model: Any) -> tuple[Any, ...]:
    """The configs in which the decoder layers of a model, and what makes their masks, look the name up."""
    base = base_of(model)
    found = {id(base.config): base.config}
    by_name = dict(base.named_modules())
    for path, module in by_name.items():
        if getattr(module, "layer_idx", None) is None:
            continue
        parts = path.split(".")
        for depth in range(len(parts) + 1):
            config = getattr(by_name[".".join(parts[:depth])], "config", None)
            if hasattr(config, "_attn_implementation_internal"):
                found[id(config)] = config
    return tuple(found.values())


@dataclass
class _Route:
    config: Any
    original: str
    users: int


_routes: dict[int, _Route] = {}  # by id of the config; a route holds its config


class Routing:
    """Diverts the attention of a model, in this thread, for the length of a call.

    Args:
        configs: From `attention_configs`; empty where nothing is to be diverted.
        diverted: What takes over; None falls through, as in any other thread.
    """

    def __init__(self, configs: Sequence[Any], diverted: _Diverted | None) -> None:
        self._configs = configs
        self._diverted = diverted
        self._routed: list[Any] = []
        self._token: Token[_Diverted | None] | None = None

    def around(self, forward: Callable[[], Any]) -> Any:
        """The result of `forward()`. Model and thread are afterwards as they were, also when it raises."""
        try:
            try:
                self._open()
                return forward()
            finally:
                self._close()
        finally:  # once more: Ctrl-C may have come at the first line of the other
            self._close()

    def _open(self) -> None:
        with InterruptsHeld(), _lock:
            self._token = _current.set(self._diverted)
            for config in self._configs:
                _divert(config)
                self._routed.append(config)

    def _close(self) -> None:
        if self._token is None:
            return
        with InterruptsHeld(), _lock:
            while self._routed:
                _restore(self._routed.pop())
            _current.reset(self._token)
            self._token = None


def _divert(config: Any) -> None:
    route = _routes.get(id(config))
    if route is None:
        original = config._attn_implementation
        if not isinstance(original, str):
            raise UnsupportedModelError(
                f"the attention implementation of the model is {original!r}, not a name"
            )
        name = _name_for(original)
        _routes[id(config)] = route = _Route(config, original, 0)
        # Past the setter, which would hand the name on to the configs of vision towers and the like.
        vars(config)["_attn_implementation_internal"] = name
    route.users += 1


def _restore(config: Any) -> None:
    route = _routes[id(config)]
    route.users -= 1
    if route.users == 0:
        del _routes[id(config)]
        # Somebody may have set another one meanwhile, which then stays.
        if config._attn_implementation == _name_for(route.original):
            vars(config)["_attn_implementation_internal"] = route.original


# -- what the attention of a model does -----------------------------------------------------------------------


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


class AttentionSurvey(_Diverted):
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
        self._masks.append(kwargs.get("mask_function", _NO_MASK_FUNCTION))
        return _plain_mask(original, args, kwargs)

    def attend(self, call: _AttentionCall) -> tuple[Tensor, Tensor | None]:
        kind = self._kind(call)
        for module, earlier in self.kinds.items():
            if earlier.layer == kind.layer:
                self.kinds[module] = replace(earlier, last=False)
        self.kinds[call.module] = kind
        return call.plain()

    def _kind(self, call: _AttentionCall) -> LayerKind:
        query, key, value, kwargs = call.query, call.key, call.value, call.kwargs
        name = type(call.module).__name__
        layer = next((i for i, known in enumerate(self._keys) if known is key), None)
        shape = None if layer is None else self._layout.layers[layer]
        if layer is None or shape is None:
            raise UnsupportedModelError(f"{name} changes keys and values after they are cached")
        for argument in ("position_bias", "head_mask"):
            if kwargs.get(argument) is not None:
                raise UnsupportedModelError(f"{name} adds a {argument} to its attention")
        passed = _passed(kwargs)
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


def _computed(call: _AttentionCall, spec: AttentionSpec, sinks: Tensor | None) -> Tensor:
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


def _passed(kwargs: dict[str, Any]) -> tuple[Any, Any, Any]:
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


# -- one forward ----------------------------------------------------------------------------------------------


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


def _by_slot(pool: Tensor) -> Tensor:
    return pool.view(-1, *pool.shape[2:])


class PagedForward(_Diverted):
    """One flattened forward: its cache writes to the pool, its attention is computed from the pool.

    Args:
        store: The pool.
        backend: Planned for this step.
        kinds: From `AttentionSurvey.conclude`.
        writer: Aimed at this step's slots.
    """

    def __init__(
        self, store: KVStore, backend: AttentionBackend, kinds: dict[Any, LayerKind], writer: PoolWriter
    ) -> None:
        self.cache = StepCache([FlatLayer(index, self._write) for index in range(len(store.layout.layers))])
        self._store = store
        self._backend = backend
        self._kinds = kinds
        self._writer = writer
        self._fresh: dict[int, Tensor] = {}
        self._attended = 0

    def _write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        self._writer.write(layer, keys, values)
        self._fresh[layer] = keys

    def mask(self, original: str, args: Any, kwargs: Any) -> Any:
        """None: who sees whom follows from the block tables."""
        return None

    def attend(self, call: _AttentionCall) -> tuple[Tensor, Tensor | None]:
        """Attention of one layer, `[1, T, num_heads, value_dim]`; no weights."""
        kind = self._kinds.get(call.module)
        if kind is None or self._fresh.get(kind.layer) is not call.key:
            raise InvalidRequestError(
                f"{type(call.module).__name__} attends over other keys than were just cached: if the model was "
                "changed, make a new engine"
            )
        if (call.args[0] if call.args else call.kwargs.get("attention_mask")) is not None:
            raise InvalidRequestError(f"{type(call.module).__name__} brings an attention mask of its own")
        if _passed(call.kwargs) != kind.passed:
            raise InvalidRequestError(
                f"{type(call.module).__name__} asks for another attention than it did before: if the model was "
                "changed, make a new engine"
            )
        if kind.last:
            del self._fresh[kind.layer]
        keys, values = self._store.keys[kind.layer], self._store.values[kind.layer]
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
