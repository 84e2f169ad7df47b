"""What differs between transformers' versions, found by looking and not by version number."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from radixkv.core.errors import UnsupportedModelError, install_hint

try:
    from transformers import DynamicCache
    from transformers.cache_utils import CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer
except ImportError as error:  # pragma: no cover - needs an environment without transformers
    raise UnsupportedModelError(
        f"plugging into a model needs transformers 4.57 or newer: {install_hint('hf')}"
    ) from error

__all__ = [
    "CROP_ZERO_REMOVES_NOTHING",
    "CacheLayerMixin",
    "DynamicCache",
    "ForwardCall",
    "bare_cache",
    "cache_length",
    "fresh_layers",
    "install_layers",
    "is_fresh_dynamic",
    "layer_window",
    "not_traced",
    "text_config",
]

# For a model that was compiled in part, or in place. What we do around a forward and in a layer's update looks up
# trees, locks and times: traced by dynamo, it would be guarded and compiled anew for each call. About 1 us a call.
not_traced = torch.compiler.disable

# `crop(n)` once took the new length; since `is_croppable` exists it takes minus the tokens to remove.
CROP_ZERO_REMOVES_NOTHING = hasattr(DynamicLayer, "is_croppable")

_PLAIN = {"DynamicLayer", "DynamicSlidingWindowLayer", "DummyLayer"}


class ForwardCall:
    """The signature of a module's forward, to read and edit calls by name.

    Attributes:
        names: Its parameters in order.
        cache_name: The one that takes the KV cache: `cache` from 5.24 on, `past_key_values` before.
    """

    def __init__(self, module: Any) -> None:
        parameters = inspect.signature(module.forward).parameters
        self.names = [
            name for name, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
        ]
        known = [name for name in ("cache", "past_key_values") if name in parameters]
        if not known:
            raise UnsupportedModelError(
                f"{type(module).__name__}.forward takes no KV cache: there is nothing to reuse in this model"
            )
        self.cache_name = known[0]

    def accepts(self, name: str) -> bool:
        """Whether the forward has an argument of this name."""
        return name in self.names

    def by_name(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """All arguments by name; the older name of the cache argument is folded into the present one."""
        call = {**dict(zip(self.names, args, strict=False)), **kwargs}
        for alias in ("past_key_values", "cache"):
            if alias != self.cache_name and alias in call and call.get(self.cache_name) is None:
                call[self.cache_name] = call.pop(alias)
        return call


def text_config(model: Any) -> Any:
    """The config of the decoder, also in a model that wraps it."""
    return model.config.get_text_config(decoder=True)


def fresh_layers(model: Any) -> list[Any]:
    """The empty layers that transformers itself would use, one for each cache index."""
    config = text_config(model)
    layers = list(DynamicCache(config=config).layers)
    while len(layers) < int(
        getattr(config, "num_hidden_layers", 0)
    ):  # KV-shared layers are not listed in 4.57
        layers.append(DynamicLayer())
    return layers


def layer_window(layer: Any) -> int | None:
    """Window of a layer of `fresh_layers`; None for full attention.

    Raises:
        UnsupportedModelError: The layer keeps something else than plain keys and values.
    """
    kind = type(layer)
    if kind.__name__ not in _PLAIN or not kind.__module__.startswith("transformers.cache_utils"):
        raise UnsupportedModelError(
            f"this model caches {kind.__name__}, whose state cannot be cut at a prefix: only attention over "
            "plain keys and values can be shared"
        )
    if kind is DynamicSlidingWindowLayer:
        return int(layer.sliding_window)
    return None


def cache_length(cache: Any) -> int:
    """Tokens in a cache object of any kind; -1 when it cannot tell."""
    try:
        return int(cache.get_seq_length())
    except Exception:  # foreign classes may raise anything here; they are left alone in any case
        return -1


def is_fresh_dynamic(cache: Any) -> bool:
    """Whether this is the empty cache `generate()` makes, which may be filled in its place."""
    return (
        type(cache) is DynamicCache and not getattr(cache, "offloading", False) and cache_length(cache) == 0
    )


def bare_cache(layers: list[Any]) -> Any:
    """A `DynamicCache` object made of the given layers."""
    cache = DynamicCache()
    install_layers(cache, layers)
    return cache


def install_layers(cache: Any, layers: list[Any]) -> Callable[[], None]:
    """Give an empty `DynamicCache` our layers. The object stays the same, so whoever holds it sees them.

    Returns:
        What gives it back its own.
    """
    before = (cache.layers, cache.layer_class_to_replicate)

    def restore() -> None:
        cache.layers, cache.layer_class_to_replicate = before

    cache.layers, cache.layer_class_to_replicate = layers, None
    return restore
