"""Reading a call of `forward`: can it be served from the cache, and if not, why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from radixkv.core.errors import InvalidRequestError
from radixkv.core.tokens import as_tokens
from radixkv.hf.compat import cache_length, is_fresh_dynamic

__all__ = [
    "WHY",
    "OuterCall",
    "brings_data",
    "bypass_reason",
    "cache_in",
    "left_padding",
    "read_prompt",
    "trimmed",
]

WHY = {
    "use_cache_false": "use_cache=False was given",
    "own_cache": "the call brought a cache that is already filled",
    "foreign_cache": "the call asked for another kind of cache (quantized, offloaded, ...)",
    "static_cache": "the call asked for a static cache",
    "inputs_embeds": "the prompt was given as embeddings, which have no token ids",
    "extra_inputs": "the call has inputs beside text (images, adapter names, token types, ...)",
    "attention_mask": (
        "the attention mask is not 'left padding, then ones' (if the padding is on the right, set "
        'tokenizer.padding_side = "left")'
    ),
    "position_ids": "positions do not count up from 0 over the tokens of each row",
    "training": "the model is in training mode",
    "labels": "labels were given",
    "output_attentions": "attentions of all positions were asked for",
    "output_hidden_states": "hidden states of all positions were asked for",
    "layer_count": "the model was shortened (assistant_early_exit)",
    "full_logits": (
        "a plain forward wants the logits of every position; give logits_to_keep=n if the last n are enough to reuse KV"
    ),
    "grad": "gradients are enabled; wrap the loop in torch.no_grad() or torch.inference_mode()",
    "rope_limit": "its rotary embedding changes with the length of the prompt",
    "dtype": "the model computed KV of another dtype or on another device than the pool's",
    "empty": "the input is empty",
}

_KNOWN = frozenset({"input_ids", "attention_mask", "position_ids", "cache_position"})


@dataclass
class OuterCall:
    """What a call on the whole model asks for; its base model, which we trim, does not see these."""

    keep: Any = None
    labels: bool = False
    attentions: bool = False
    hidden: bool = False
    wants_cache: bool = False

    @classmethod
    def read(cls, call: dict[str, Any], cache_name: str, config: Any) -> OuterCall:
        """Read the arguments of a call, and what the config says where they say nothing."""

        def flag(name: str) -> bool:
            given = call.get(name)
            return bool(getattr(config, name, False) if given is None else given)

        keep = call.get("logits_to_keep")
        return cls(
            keep=keep,
            labels=call.get("labels") is not None,
            attentions=flag("output_attentions"),
            hidden=flag("output_hidden_states"),
            wants_cache=(
                call.get("use_cache") is True
                or call.get(cache_name) is not None
                or (isinstance(keep, int) and keep > 0)
            ),
        )


def bypass_reason(
    call: dict[str, Any],
    cache_name: str,
    outer: OuterCall,
    *,
    training: bool,
    use_cache_default: bool,
    shortened: bool,
    moved: bool,
    differentiable: bool,
) -> str | None:
    """Why the first forward of a cache must be left alone, judged by its arguments; None if it can be served."""
    past = call.get(cache_name)
    use_cache = call.get("use_cache")
    checks = (
        ("training", training),
        ("labels", outer.labels),
        ("use_cache_false", not (use_cache_default if use_cache is None else use_cache)),
        ("inputs_embeds", call.get("input_ids") is None),
        ("output_attentions", outer.attentions or bool(call.get("output_attentions"))),
        ("output_hidden_states", outer.hidden or bool(call.get("output_hidden_states"))),
        ("layer_count", shortened),
        ("dtype", moved),
        ("static_cache", type(past).__name__.startswith("Static")),
        ("own_cache", past is not None and cache_length(past) != 0),
        ("foreign_cache", past is not None and not is_fresh_dynamic(past)),
        ("extra_inputs", brings_data(call, cache_name)),
        ("full_logits", isinstance(outer.keep, Tensor)),
        ("grad", differentiable and torch.is_grad_enabled()),
    )
    for reason, applies in checks:
        if applies:
            return reason
    ids = call["input_ids"]
    return "empty" if ids.dim() != 2 or ids.numel() == 0 else None


def brings_data(call: dict[str, Any], cache_name: str) -> bool:
    """Whether a call has inputs beyond the ones that are understood (flags and names are not)."""
    for name, value in call.items():
        if name in _KNOWN or name == cache_name:
            continue
        if isinstance(value, (Tensor, np.ndarray)) or (isinstance(value, (list, tuple)) and len(value) > 0):
            return True
    return False


def left_padding(call: dict[str, Any], shape: tuple[int, int]) -> tuple[np.ndarray, str | None]:
    """Columns of left padding of each row; a reason to bypass if mask or positions are anything else."""
    rows, columns = shape
    pads = np.zeros(rows, dtype=np.int64)
    mask = call.get("attention_mask")
    if mask is not None:
        if not isinstance(mask, Tensor) or tuple(mask.shape) != (rows, columns):
            return pads, "attention_mask"
        values = mask.detach().cpu().numpy()
        ones = values != 0
        pads = columns - ones.sum(axis=1)
        plain = (ones == (np.arange(columns) >= pads[:, None])).all() and (values[ones] == 1).all()
        if not plain or (pads == columns).any():
            return pads, "attention_mask"
    positions = call.get("position_ids")
    if positions is None:
        return pads, "position_ids" if pads.any() else None
    if not isinstance(positions, Tensor) or positions.dim() != 2 or positions.shape[1] != columns:
        return pads, "position_ids"
    expected = np.arange(columns) - pads[:, None]
    real = positions.detach().cpu().numpy()
    if real.shape[0] not in (1, rows) or ((real != expected) & (expected >= 0)).any():
        return pads, "position_ids"
    return pads, None


def read_prompt(
    input_ids: Any, attention_mask: Any, vocab: int, device: torch.device
) -> tuple[Tensor, np.ndarray]:
    """The prompt of a session: ids `[rows, columns]` on `device`, and the columns of left padding of each row.

    Raises:
        InvalidRequestError: These are no token ids below `vocab`, or the mask does not fit them.
    """
    if isinstance(input_ids, Mapping):
        raise InvalidRequestError(
            f"got a {type(input_ids).__name__}: pass its input_ids (and attention_mask)"
        )
    try:
        array = input_ids if isinstance(input_ids, Tensor) else np.asarray(input_ids)
        if isinstance(array, np.ndarray) and array.dtype.kind in "US":
            what = "strings" if array.ndim else f"a {type(input_ids).__name__}"
            raise InvalidRequestError(f"input_ids are integers, got {what}: tokenize first")
        ids = torch.as_tensor(array)
    except InvalidRequestError:
        raise
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(f"input_ids are [batch, tokens] or [tokens] integers: {error}") from error
    if ids.dim() == 1:
        ids = ids[None]
    if ids.dim() != 2:
        raise InvalidRequestError(f"input_ids are [batch, tokens] or [tokens], got shape {tuple(ids.shape)}")
    if ids.numel() == 0:
        raise InvalidRequestError("the prompt is empty: give at least one token")
    highest = int(as_tokens(ids.reshape(-1)).max())
    if highest >= vocab:
        raise InvalidRequestError(f"token id {highest} is outside the vocabulary of {vocab}")
    ids = ids.to(device=device, dtype=torch.int64)
    pads = np.zeros(ids.shape[0], dtype=np.int64)
    if attention_mask is not None:
        mask = torch.as_tensor(attention_mask)
        mask = mask[None] if mask.dim() == 1 else mask
        pads, reason = left_padding({"attention_mask": mask}, (ids.shape[0], ids.shape[1]))
        if reason == "attention_mask":
            raise InvalidRequestError(
                f"attention_mask must be zeros (left padding), then ones, in the shape {tuple(ids.shape)}"
            )
    return ids, pads


def trimmed(call: dict[str, Any], skip: int) -> dict[str, Any]:
    """The call without its first `skip` columns. The mask stays whole: it covers the cache as well."""
    edited = dict(call)
    if skip:
        edited["input_ids"] = call["input_ids"][:, skip:]
        for name in ("position_ids", "cache_position"):
            if isinstance(call.get(name), Tensor):
                edited[name] = call[name][..., skip:]
    return edited


def cache_in(output: Any) -> Any:
    """The cache object that a forward returned, if any."""
    for name in ("cache", "past_key_values"):
        value = getattr(output, "__dict__", {}).get(name)
        if value is not None:
            return value
    return None
