"""Guarding a cache that is filled before the loop starts.

transformers slices a prompt by the length of the cache, never compares ids, and in some modes does not slice at
all: then a filled cache is silently wrong. Here every forward of the prompt is compared with what the session
was opened for. What can be set right is set right; what cannot is refused.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from radixkv.core.errors import InvalidRequestError
from radixkv.hf.calls import OuterCall, trimmed
from radixkv.hf.session import Session

__all__ = ["guard_prompt"]


def guard_prompt(
    session: Session, call: dict[str, Any], outer: OuterCall, cache_name: str, takes_positions: bool
) -> dict[str, Any]:
    """Fit a forward during the prompt phase of an explicit session to what its cache holds.

    Returns:
        The call to make. Without the session's cache, if caching is off and the whole prompt is given.

    Raises:
        InvalidRequestError: The forward does not continue what the session was opened for.
    """
    ids = call.get("input_ids")
    if ids is None:
        raise InvalidRequestError(
            "this session was opened with token ids, and the forward brings inputs_embeds"
        )
    if ids.dim() == 2 and ids.shape[0] != session.num_rows and ids.shape[0] % session.num_rows == 0:
        session.expand(ids.shape[0] // session.num_rows)
    prompt, done, q = session.prompt, session.columns, ids.shape[-1]
    from_start = _agrees(prompt, 0, ids)
    if call.get("use_cache") is False:
        if not from_start or q < prompt.shape[1]:
            raise InvalidRequestError(
                "use_cache=False with a part of the prompt, while the rest lies in the cache: leave use_cache out"
            )
        session.trusted = False
        return {**call, cache_name: None}
    starts_over = from_start and done > 0 and _first_position(call, q) == 0
    skip = 0
    if starts_over or not _agrees(prompt, done, ids):
        if not from_start:
            raise InvalidRequestError(
                f"the forward brings other token ids than this session was opened for: it holds {done} of "
                f"{prompt.shape[1]} prompt columns, so feed it input_ids[:, {done}:]"
            )
        # Not sliced: leave out what is there, but never all of it, nor positions whose logits are wanted.
        keep = outer.keep if isinstance(outer.keep, int) else 1
        skip = max(0, min(done, q - max(1, keep)))
        session.rewind(skip)
        skip = session.columns
    return _placed(session, trimmed(call, skip), takes_positions)


def _placed(session: Session, call: dict[str, Any], takes_positions: bool) -> dict[str, Any]:
    """Give the forward positions and mask that fit the session's padding, where the caller's do not."""
    ids = call["input_ids"]
    total = session.columns + ids.shape[1]
    mask = call.get("attention_mask")
    fits = isinstance(mask, Tensor) and mask.dim() == 2 and mask.shape[1] == total
    if not session.pads.any():
        if mask is not None and isinstance(mask, Tensor) and mask.dim() == 2 and not fits:
            call["attention_mask"] = None
        return call
    if not takes_positions:
        raise InvalidRequestError("this model takes no position_ids, so a padded batch cannot be continued")
    pads = torch.as_tensor(session.pads, device=ids.device)[:, None]
    columns = torch.arange(total, device=ids.device)[None]
    if not fits:
        call["attention_mask"] = (columns >= pads).to(torch.int64)
    if call.get("position_ids") is None:
        call["position_ids"] = (columns[:, session.columns :] - pads).clamp(min=0)
    return call


def _agrees(prompt: Tensor, start: int, ids: Tensor) -> bool:
    """Whether `ids` are the prompt from column `start` on, as far as the prompt goes."""
    if ids.dim() != 2 or ids.shape[0] != prompt.shape[0]:
        return False
    n = min(ids.shape[1], prompt.shape[1] - start)
    return n > 0 and bool((prompt[:, start : start + n] == ids[:, :n].to(prompt.device)).all())


def _first_position(call: dict[str, Any], q: int) -> int | None:
    """The position that the caller thinks a forward starts at, if it says so."""
    for name in ("cache_position", "position_ids"):
        where = call.get(name)
        if isinstance(where, Tensor) and where.shape[-1] == q:
            return int(where.reshape(-1, q)[:, 0].max())
    return None
