"""Guarding a cache that is filled before the loop starts.

transformers slices a prompt by the length of the cache, never compares ids, and in some modes does not slice at
all: then a filled cache is silently wrong. Here every forward of the prompt is compared with what the session
was opened for. What can be set right is set right; what cannot is refused.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from radixkv.core.errors import InvalidRequestError
from radixkv.hf.calls import OuterCall, trimmed
from radixkv.hf.session import Session

__all__ = ["GenerateGuard", "guard_prompt", "place"]


class GenerateGuard:
    """Lets `generate()` show its whole `input_ids` while sessions are open.

    `generate()` slices off what a filled cache holds before any forward, so the hooks on forwards never see those
    tokens. It goes through `prepare_inputs_for_generation` first; that method is wrapped on the model object from
    the first `enter` to the last `leave`, and only looks at calls that bring the cache of a session.

    Args:
        model: The causal LM.
        session_of: Finds the explicit session of a cache object.
    """

    def __init__(self, model: Any, session_of: Callable[[Any], Session | None]) -> None:
        self._model = model
        self._session_of = session_of
        self._lock = threading.RLock()
        self._users = 0
        self._own: Any = None

    def enter(self) -> None:
        """One more user; the first one puts the check in place."""
        with self._lock:
            self._users += 1
            if self._users > 1 or not hasattr(self._model, "prepare_inputs_for_generation"):
                return
            prepare = self._model.prepare_inputs_for_generation
            self._own = self._model.__dict__.get("prepare_inputs_for_generation")

            @functools.wraps(prepare)
            def checked(input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
                for name in ("cache", "past_key_values"):
                    session = self._session_of(kwargs.get(name))
                    if session is not None:
                        _check_continues(session, input_ids)
                return prepare(input_ids, *args, **kwargs)

            self._model.prepare_inputs_for_generation = checked

    def leave(self) -> None:
        """One user less; the last one leaves the model as it was found."""
        with self._lock:
            self._users -= 1
            if self._users == 0:
                self._model.__dict__.pop("prepare_inputs_for_generation", None)
                if self._own is not None:
                    self._model.prepare_inputs_for_generation = self._own
                    self._own = None


def _check_continues(session: Session, input_ids: Tensor) -> None:
    """Raise unless `input_ids` begin with what the session's cache holds, and with its prompt."""
    if input_ids.dim() != 2:
        return
    if session.columns < session.prompt.shape[1] and input_ids.shape[1] < session.prompt.shape[1]:
        # A chunk of the prompt, from the start or from where the cache ends.
        prompt = _expanded(session.prompt, input_ids)
        if _agrees(prompt, 0, input_ids) or _agrees(prompt, session.columns, input_ids):
            return
    elif all(_begins_with(input_ids, _expanded(held, input_ids)) for held in (session.ids(), session.prompt)):
        return
    raise InvalidRequestError(
        f"generate() was given other token ids than this session holds ({session.columns} columns, opened with "
        f"{session.prompt.shape[1]}): pass the ids it was opened with, followed by what was generated in it"
    )


def _expanded(held: Tensor, input_ids: Tensor) -> Tensor:
    """Rows repeated as `generate()` does for beams, where the session has not seen that yet."""
    if held.shape[0] != input_ids.shape[0] and input_ids.shape[0] % held.shape[0] == 0:
        return held.repeat_interleave(input_ids.shape[0] // held.shape[0], dim=0)
    return held


def _begins_with(input_ids: Tensor, held: Tensor) -> bool:
    n = held.shape[1]
    return n <= input_ids.shape[1] and bool((input_ids[:, :n].to(held.device) == held).all())


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
        if isinstance(outer.keep, Tensor):
            raise InvalidRequestError(
                f"logits_to_keep names positions of the whole prompt, {done} of which are cached: feed "
                f"input_ids[:, {done}:] and count from there"
            )
        keep = outer.keep or 1
        skip = max(0, min(done, q - max(1, keep)))
        session.rewind(skip)
        skip = session.columns
    call = place(session, trimmed(call, skip), takes_positions)
    _check_placement(session, call)
    return call


def place(session: Session, call: dict[str, Any], takes_positions: bool) -> dict[str, Any]:
    """Give a forward the mask and positions that fit the session's padding, where the caller gives none.

    A mask of ones of another length says nothing about padding either.
    """
    ids = call["input_ids"]
    mask = call.get("attention_mask")
    padded = bool(session.pads.any())
    total = session.columns + ids.shape[1]
    if isinstance(mask, Tensor) and mask.dim() == 2 and mask.shape[1] != total and bool((mask == 1).all()):
        call["attention_mask"] = mask = None
    if not padded:
        return call
    if not takes_positions:
        raise InvalidRequestError("this model takes no position_ids, so a padded batch cannot be continued")
    if mask is None:
        call["attention_mask"] = _expected_mask(session, total, ids).to(torch.int64)
    if call.get("position_ids") is None:
        call["position_ids"] = _expected_positions(session, total, ids).clamp(min=0)
    return call


def _expected_mask(session: Session, total: int, like: Tensor) -> Tensor:
    pads = torch.as_tensor(session.pads, device=like.device)[:, None]
    return torch.arange(total, device=like.device)[None] >= pads


def _expected_positions(session: Session, total: int, like: Tensor) -> Tensor:
    """Positions of the columns from where the cache ends; negative on padding."""
    pads = torch.as_tensor(session.pads, device=like.device)[:, None]
    return torch.arange(session.columns, total, device=like.device)[None] - pads


def _check_placement(session: Session, call: dict[str, Any]) -> None:
    """Raise if a forward of the prompt has another mask or other positions than its cached part."""
    ids = call["input_ids"]
    total = session.columns + ids.shape[1]
    mask, positions = call.get("attention_mask"), call.get("position_ids")
    if isinstance(mask, Tensor):
        expected = _expected_mask(session, total, ids)
        if mask.dim() != 2 or mask.shape != expected.shape or not bool(((mask == 1) == expected).all()):
            raise InvalidRequestError(
                "the attention mask differs from the padding this session was opened with: pass the same mask to "
                "cache.session(..., attention_mask=mask), zeros on the left and then ones"
            )
    if isinstance(positions, Tensor):
        wanted = _expected_positions(session, total, ids)
        fits = positions.dim() == 2 and positions.shape[1] == wanted.shape[1]
        if not fits or bool(((positions != wanted) & (wanted >= 0)).any()):
            raise InvalidRequestError(
                f"position_ids do not go on from the {session.columns} columns in this session: leave them out, or "
                "count from there without the padding"
            )


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
