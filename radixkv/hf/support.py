"""Which models can be served, and what their KV looks like: asked of the model, not of its config."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from radixkv.core.errors import InvalidRequestError, UnsupportedModelError
from radixkv.hf.compat import DynamicCache, ForwardCall, fresh_layers, layer_window, text_config
from radixkv.store.layout import KVLayout, LayerLayout

__all__ = ["base_of", "check_supported", "probe_model", "quiet_eval", "tolerance", "unwrap_model"]

_PROBE_TOKENS = 7
_PROBE_CUT = 4
# Their forward calls a part of the base model directly, past its hooks.
_DECODER_IS_BASE = {"OPTForCausalLM"}


def unwrap_model(model: Any) -> Any:
    """The transformers causal LM inside a PEFT wrapper, or the model itself.

    Raises:
        InvalidRequestError: It is no transformers model.
        UnsupportedModelError: It is compiled, is an encoder-decoder, or has no head.
    """
    if hasattr(model, "_orig_mod"):
        raise UnsupportedModelError(
            "a torch.compile'd model is not supported, because each hit changes the shapes: pass the original model"
        )
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    if (
        not isinstance(inner, torch.nn.Module)
        or not hasattr(inner, "base_model")
        or not hasattr(inner, "config")
    ):
        raise InvalidRequestError(f"expected a transformers model, got {type(model).__name__}")
    if getattr(inner.config, "is_encoder_decoder", False):
        raise UnsupportedModelError(
            f"{type(inner).__name__} is an encoder-decoder: its decoder's KV depends on the encoder's input"
        )
    if base_of(inner) is inner:
        raise UnsupportedModelError(
            f"{type(inner).__name__} has no language-model head: load it with AutoModelForCausalLM"
        )
    return inner


def base_of(model: Any) -> Any:
    """The part below the head, which sees every forward; the model itself if it has no head."""
    if type(model).__name__ in _DECODER_IS_BASE:
        return model.get_decoder()
    if model.base_model is not model:
        return model.base_model
    # Some models name a part that they do not have (Gemma 3 in transformers 4.57).
    inner = getattr(model, "model", None)
    headed = getattr(model, "lm_head", None) is not None
    return inner if headed and isinstance(inner, torch.nn.Module) and hasattr(inner, "base_model") else model


def check_supported(model: Any) -> None:
    """Refuse what is known to be wrong without running the model.

    Args:
        model: From `unwrap_model`.

    Raises:
        UnsupportedModelError: With the reason.
    """
    name = type(model).__name__
    config = text_config(model)
    if getattr(model, "_is_stateful", False):
        raise UnsupportedModelError(f"{name} keeps a recurrent state, which cannot be cut at a prefix")
    if (
        getattr(config, "use_bidirectional_attention", False) is True
        or getattr(config, "is_causal", True) is False
    ):
        raise UnsupportedModelError(
            f"{name} attends in both directions: KV of a prefix depends on what follows"
        )
    for module in base_of(model).modules():
        if getattr(module, "layer_idx", None) is None:
            continue  # only what caches KV has a layer index; vision towers and the like have none
        for flag in ("is_causal", "is_decoder"):
            if getattr(module, flag, True) is False:
                raise UnsupportedModelError(
                    f"{name} attends in both directions ({type(module).__name__}.{flag} is False): KV of a prefix "
                    "depends on what follows"
                )
    dynamic = getattr(model, "_supports_default_dynamic_cache", None)
    if callable(dynamic) and not dynamic():
        raise UnsupportedModelError(
            f"{name} does not use the default KV cache: its state cannot be cut at a prefix"
        )
    for layer in fresh_layers(model):
        layer_window(layer)
    ForwardCall(base_of(model))


def probe_model(model: Any) -> KVLayout:
    """Shapes of the KV of a model, read off forwards over a few tokens.

    The same tokens are run at once and in two parts. A model whose logits differ then does not really
    continue from cached KV (some ignore the cache without a word), and is refused.

    Raises:
        InvalidRequestError: No transformers model, or one without weights (meta device).
        UnsupportedModelError: The model cannot be served; the message says why.
    """
    inner = unwrap_model(model)
    check_supported(inner)
    parameter = next(inner.parameters())
    if parameter.device.type == "meta":
        raise InvalidRequestError("the model is on the meta device, without weights: load it first")
    vocab = int(text_config(inner).vocab_size)
    ids = (torch.arange(_PROBE_TOKENS, device=parameter.device) * 7 + 1).remainder(vocab)[None]

    seen: list[bool] = []
    watcher = base_of(inner).register_forward_hook(lambda *_: seen.append(True))
    with quiet_eval(inner):
        try:
            whole, cache = _run(inner, ids, None)
            _, part_cache = _run(inner, ids[:, :_PROBE_CUT], None)
            parts, part_cache = _run(inner, ids[:, _PROBE_CUT:], part_cache)
        except UnsupportedModelError:
            raise
        except Exception as error:
            raise UnsupportedModelError(
                f"{type(inner).__name__} failed on a plain forward with a KV cache: {error}"
            ) from error
        finally:
            watcher.remove()
    if not seen:
        raise UnsupportedModelError(
            f"the forward of {type(inner).__name__} does not call its base model, where KV would be reused"
        )
    if min(_length(cache), _length(part_cache)) < _PROBE_TOKENS:
        raise UnsupportedModelError(
            f"{type(inner).__name__} did not fill the KV cache it was given: there is nothing to reuse in this model"
        )
    whole, parts = (logits[0, -1].double() for logits in (whole, parts))
    spread = float((whole - whole.mean()).norm()) or 1.0
    error_share = float((whole - parts).norm()) / spread
    # In fp32 the two runs differ by rounding, near 1e-6. In low precision by some per cent, and more where the
    # routing of a mixture of experts flips.
    if not error_share < tolerance(parameter):
        raise UnsupportedModelError(
            f"{type(inner).__name__} gives other logits when it continues from its own KV cache (relative "
            f"difference {error_share:.2g}): KV of a prefix does not stand for the prefix in this model"
        )
    return _layout_of(inner, cache)


def tolerance(parameter: torch.Tensor) -> float:
    """Relative difference of logits that rounding explains, in a model with parameters like this one."""
    if parameter.dtype not in (torch.float32, torch.float64):
        return 0.3
    return 1e-3 if parameter.device.type == "cpu" else 3e-2  # accelerators may multiply fp32 in TF32


def _layout_of(model: Any, cache: Any) -> KVLayout:
    layers: list[LayerLayout | None] = []
    kinds: set[tuple[torch.dtype, torch.device]] = set()
    for layer in cache.layers:
        window = layer_window(layer)
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if keys is None or values is None or keys.dim() != 4:
            layers.append(None)
            continue
        layers.append(LayerLayout(keys.shape[1], keys.shape[3], values.shape[3], window))
        kinds |= {(keys.dtype, keys.device), (values.dtype, values.device)}
        if values.shape[1] != keys.shape[1]:
            raise UnsupportedModelError(
                "a layer with different numbers of key and value heads is not supported"
            )
    if len(kinds) != 1:
        raise UnsupportedModelError(
            f"{type(model).__name__} keeps KV of several dtypes or on several devices ({sorted(map(str, kinds))}): "
            "one pool cannot hold it yet"
        )
    ((dtype, device),) = kinds
    return KVLayout(tuple(layers), dtype, device)


def _run(model: Any, ids: torch.Tensor, cache: Any) -> tuple[torch.Tensor, Any]:
    name = ForwardCall(model).cache_name
    cache = DynamicCache(config=text_config(model)) if cache is None else cache
    with torch.no_grad():
        out = model(input_ids=ids, use_cache=True, **{name: cache})
    return out.logits, cache


def _length(cache: Any) -> int:
    lengths = [
        int(layer.get_seq_length()) for layer in cache.layers if getattr(layer, "keys", None) is not None
    ]
    return min(lengths, default=0)


@contextmanager
def quiet_eval(model: torch.nn.Module) -> Iterator[None]:
    """Evaluation mode for a moment: dropout would make the two runs differ, and would consume random numbers."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True
