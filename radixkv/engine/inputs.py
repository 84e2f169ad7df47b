"""Turning what users have into token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from radixkv.core.errors import InvalidRequestError
from radixkv.core.tokens import to_int64
from radixkv.engine.sampling_params import SamplingParams
from radixkv.hf.compat import text_config
from radixkv.hf.rope import RopeRule

__all__ = ["as_prompts", "longest_sequence", "one_sampling", "prompt_ids", "sampling_for"]


def as_prompts(prompts: Any) -> list[Any]:
    """One entry a prompt, from what `generate` accepts.

    A text, a row of ids or a chat is one prompt; a list of those, a `[rows, tokens]` tensor, or what a tokenizer
    returns (`input_ids` and `attention_mask`, padding is taken off) are several.

    Raises:
        InvalidRequestError: It is none of these.
    """
    if isinstance(prompts, Mapping):  # includes transformers' BatchEncoding, which is a UserDict
        return _rows_of(prompts)
    if hasattr(prompts, "data") and isinstance(getattr(prompts, "data", None), Mapping):
        return _rows_of(prompts.data)
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, (torch.Tensor, np.ndarray)):
        if prompts.ndim == 2:
            return list(prompts)
        return [prompts]
    if isinstance(prompts, range):
        return [prompts]
    if not isinstance(prompts, Sequence) or isinstance(prompts, (bytes, bytearray)):
        raise InvalidRequestError(
            f"prompts are a list of texts, of token ids or of chats, got {type(prompts).__name__}"
        )
    if len(prompts) and all(isinstance(item, (int, np.integer)) for item in prompts):
        return [prompts]
    if len(prompts) and all(isinstance(item, Mapping) and "role" in item for item in prompts):
        return [prompts]
    return list(prompts)


def _rows_of(encoded: Mapping[str, Any]) -> list[Any]:
    if "input_ids" not in encoded:
        raise InvalidRequestError(
            f"a mapping of prompts needs input_ids, as a tokenizer returns them, got {sorted(map(str, encoded))}"
        )
    ids, masks = encoded["input_ids"], encoded.get("attention_mask")
    for name, value in (("input_ids", ids), ("attention_mask", masks)):
        if (value is not None and not hasattr(value, "__len__")) or (name == "input_ids" and value is None):
            raise InvalidRequestError(f"{name} must be rows of integers, got {type(value).__name__}")
    if len(ids) and np.ndim(ids[0]) == 0:
        ids, masks = [ids], None if masks is None else [masks]
    if masks is None:
        return list(ids)
    if len(masks) != len(ids):
        raise InvalidRequestError(f"{len(ids)} rows of input_ids, but {len(masks)} of attention_mask")
    rows = []
    for row, mask in zip(ids, masks, strict=True):
        tokens, kept = to_int64(row), _as_mask(mask)
        if len(tokens) != len(kept) or ((kept != 0) & (kept != 1)).any():
            raise InvalidRequestError("an attention_mask row holds one 0 or 1 for each of its input_ids")
        where = np.flatnonzero(kept)
        if len(where) and where[-1] - where[0] + 1 != len(where):
            raise InvalidRequestError("an attention_mask may be 0 on padding only, not between tokens")
        rows.append(tokens[kept == 1])
    return rows


def _as_mask(mask: Any) -> npt.NDArray[np.int64]:
    """One row of an attention mask: integers, or what stands for them."""
    array = np.asarray(mask.detach().cpu()) if isinstance(mask, torch.Tensor) else np.asarray(mask)
    if array.ndim != 1 or array.dtype.kind not in "biuf" or not np.isin(array, (0, 1)).all():
        raise InvalidRequestError("an attention_mask row holds one 0 or 1 for each of its input_ids")
    return array.astype(np.int64)


def prompt_ids(prompt: Any, tokenizer: Any, vocab_size: int) -> npt.NDArray[np.int64]:
    """Token ids of one prompt, checked: int64 `[num_tokens]`.

    Args:
        prompt: Text (special tokens are added, as the tokenizer does by default), token ids of any integer type, or
            a chat: a list of messages, put through the tokenizer's chat template with the opening of an answer.
        tokenizer: Needed for text and chats; else it may be None.
        vocab_size: Ids lie below it.

    Raises:
        InvalidRequestError: It is empty, not ids, or there is no tokenizer for it.
    """
    is_chat = isinstance(prompt, Sequence) and len(prompt) > 0 and all(isinstance(m, Mapping) for m in prompt)
    if isinstance(prompt, str) or is_chat:
        if tokenizer is None:
            kind = "a text" if isinstance(prompt, str) else "a chat"
            raise InvalidRequestError(
                f"the prompt is {kind} and the engine has no tokenizer: give Engine(model, tokenizer=...) or token ids"
            )
        ids: Any
        if isinstance(prompt, str):
            ids = tokenizer(prompt)["input_ids"]
        else:
            if getattr(tokenizer, "chat_template", None) is None:
                raise InvalidRequestError("the prompt is a chat, and the tokenizer has no chat template")
            ids = tokenizer.apply_chat_template(list(prompt), add_generation_prompt=True, tokenize=True)
            if isinstance(ids, Mapping) or hasattr(ids, "data"):
                ids = ids["input_ids"]
    else:
        ids = prompt
        if isinstance(ids, (torch.Tensor, np.ndarray)) and ids.ndim == 2 and ids.shape[0] == 1:
            ids = ids[0]
        if isinstance(ids, Mapping) and "input_ids" in ids:  # a BatchEncoding
            raise InvalidRequestError(
                "a prompt is a text, token ids or a chat: of what a tokenizer returns, pass one row of its input_ids"
            )
        if ids is None or isinstance(ids, (bytes, bytearray, Mapping, float, set, frozenset)):
            raise InvalidRequestError(f"a prompt is a text, token ids or a chat, got {type(ids).__name__}")
        if isinstance(ids, (list, tuple)) and ids and all(isinstance(item, str) for item in ids):
            raise InvalidRequestError(
                "this is a list of texts: pass one prompt at a time, or call generate()"
            )
    tokens = to_int64(ids)
    if not len(tokens):
        raise InvalidRequestError(
            "the prompt is empty: it needs at least one token, such as the begin-of-sequence token"
        )
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= vocab_size:
        raise InvalidRequestError(
            f"token ids must lie in 0..{vocab_size - 1}, the model's vocabulary, got {low if low < 0 else high}"
        )
    return np.array(tokens, np.int64)  # a copy of our own: the caller may go on writing to theirs


def longest_sequence(model: Any, wanted: int | None) -> int:
    """Tokens that one sequence may have, prompt and answer.

    Args:
        model: The causal LM, whose positions set the limit.
        wanted: A lower limit, or None.

    Raises:
        InvalidRequestError: `wanted` makes no sense, or is more than the model allows.
    """
    rope = RopeRule.of(model)
    limit = int(getattr(text_config(model), "max_position_embeddings", 0) or 0) or 2**31 - 1
    what = "the model is made for"
    if rope.kind != "plain" and rope.limit < limit:
        # Beyond it the angles of all keys depend on the longest sequence of a forward.
        limit, what = rope.limit, f"its {rope.kind} rotary embedding leaves unchanged"
    if wanted is None:
        return limit
    if isinstance(wanted, bool) or not isinstance(wanted, (int, np.integer)) or not wanted >= 2:
        raise InvalidRequestError(f"max_seq_len must be an integer of at least 2, got {wanted!r}")
    if wanted > limit:
        raise InvalidRequestError(f"max_seq_len={wanted} is more than the {limit} tokens that {what}")
    return int(wanted)


def one_sampling(sampling: Any) -> SamplingParams:
    """The sampling parameters of one request; None is greedy."""
    if sampling is None:
        return SamplingParams()
    if not isinstance(sampling, SamplingParams):
        raise InvalidRequestError(f"sampling must be SamplingParams, got {type(sampling).__name__}")
    return sampling


def sampling_for(items: list[Any], sampling: Any) -> list[SamplingParams]:
    """The sampling parameters of each prompt, from one for all or a list."""
    if isinstance(sampling, (list, tuple)):
        if len(sampling) != len(items):
            raise InvalidRequestError(
                f"{len(sampling)} sampling parameters for {len(items)} prompts: give one each"
            )
        return [one_sampling(entry) for entry in sampling]
    return [one_sampling(sampling)] * len(items)
