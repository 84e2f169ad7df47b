"""`Recipe`: the lists that `generate()` makes for one prompt, made for another one without asking it again.

Asking takes a millisecond or more, and most of what `generate()` makes knows nothing of the prompt. What does, does so
for a reason that is known: it holds a length, it starts a clock, it keeps state. Which numbers are lengths is found out
by asking a second time with other lengths: a number that is larger by the difference counts from there.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.generation.stopping_criteria import MaxTimeCriteria

from radixkv.engine.processors import is_copyable, is_shareable, knows_lengths

__all__ = ["Asked", "Recipe"]

# Makes one entry of a list, from the user's own objects, the prompt's length and the most new tokens.
_Make = Callable[[Sequence[Any], int, int], Any]


@dataclass(frozen=True)
class Asked:
    """What `generate()` answered.

    Attributes:
        processors: Its logits processors, the user's among them.
        criteria: Those of its stopping criteria that matter, the user's among them.
        prompt_len: Length of the prompt it was asked with.
        max_new_tokens: Most new tokens it was asked with.
    """

    processors: Sequence[Any]
    criteria: Sequence[Any]
    prompt_len: int
    max_new_tokens: int

    @property
    def knows_lengths(self) -> bool:
        """Whether it must be asked a second time, with other lengths."""
        return any(map(knows_lengths, self.processors))


class Recipe:
    """Makes processors and criteria for one more sequence, as `generate()` would.

    Attributes:
        constant: They are the same objects for every sequence.
    """

    def __init__(self, processors: Sequence[_Make], criteria: Sequence[_Make], constant: bool) -> None:
        self._processors = tuple(processors)
        self._criteria = tuple(criteria)
        self.constant = constant

    @classmethod
    def portable(cls, asked: Asked, other: Asked | None, own: Sequence[Any], model: Any) -> Recipe | None:
        """One for all prompts, or None if something in the answer is not understood.

        Args:
            asked: The answer.
            other: The answer to the same with other lengths, if `asked.knows_lengths`.
            own: The user's objects that were asked with; only their places are kept.
            model: Not to be copied.
        """
        places = {id(item): place for place, item in enumerate(own)}
        if other is not None and len(asked.processors) != len(other.processors):
            return None
        makers: list[_Make] = []
        constant = True
        for place, item in enumerate((*asked.processors, *asked.criteria)):
            if id(item) in places:
                make: _Make | None = _the_users(places[id(item)])
                constant = False
            elif is_shareable(item):
                make = _always(item)
            elif knows_lengths(item):
                assert other is not None
                make = _with_lengths(item, other.processors[place], asked, other)
                constant = False
            elif type(item) is MaxTimeCriteria:
                make = _with_clock(item.max_time)
                constant = False
            else:
                make = _copied(item, model) if is_copyable(item) else None
                constant = False
            if make is None:
                return None
            makers.append(make)
        num = len(asked.processors)
        return cls(makers[:num], makers[num:], constant)

    @classmethod
    def for_request(cls, asked: Asked, own: Sequence[Any], model: Any) -> Recipe | None:
        """One for the other sequences of the same request, or None if something cannot be copied.

        To be made before anything in `asked` was used.
        """
        places = {id(item): place for place, item in enumerate(own)}

        def maker(item: Any) -> _Make:
            if id(item) in places:
                return _the_users(places[id(item)])
            return _always(item) if is_shareable(item) else _copied(_copy(item, model), model)

        try:
            return cls(list(map(maker, asked.processors)), list(map(maker, asked.criteria)), False)
        except Exception:  # whatever a class that nobody knows says to being copied
            return None

    def make(
        self, own: Sequence[Any], prompt_len: int, max_new_tokens: int
    ) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Processors and criteria of one more sequence.

        Args:
            own: The user's objects, of the same types and in the same order as those that were asked with.
            prompt_len: Length of its prompt.
            max_new_tokens: Its most new tokens.
        """
        return (
            tuple([make(own, prompt_len, max_new_tokens) for make in self._processors]),
            tuple([make(own, prompt_len, max_new_tokens) for make in self._criteria]),
        )


def _always(item: Any) -> _Make:
    return lambda own, prompt_len, max_new_tokens: item


def _the_users(place: int) -> _Make:
    return lambda own, prompt_len, max_new_tokens: own[place]


def _with_clock(seconds: float) -> _Make:
    return lambda own, prompt_len, max_new_tokens: MaxTimeCriteria(seconds)


def _copy(item: Any, model: Any) -> Any:
    return copy.deepcopy(item, {id(model): model})


def _copied(item: Any, model: Any) -> _Make:
    return lambda own, prompt_len, max_new_tokens: _copy(item, model)


def _with_lengths(item: Any, other: Any, asked: Asked, again: Asked) -> _Make | None:
    """Makes it with its numbers moved by what the lengths differ; None if it differs in another way."""
    by_prompt, by_new = again.prompt_len - asked.prompt_len, again.max_new_tokens - asked.max_new_tokens
    known = {0: (0, 0), by_new: (0, 1), by_prompt + by_new: (1, 1), by_prompt: (1, 0)}
    if not by_prompt:
        known = {0: (0, 0), by_new: (0, 1)}
    names = vars(item).keys()
    if type(item) is not type(other) or names != vars(other).keys():
        return None
    moves: list[tuple[str, int, tuple[int, int]]] = []
    for name in names:
        one, two = getattr(item, name), getattr(other, name)
        if type(one) is int and type(two) is int:
            if two - one not in known:
                return None
            if two != one:
                moves.append((name, one, known[two - one]))
        elif not _same(one, two):
            return None

    def make(own: Sequence[Any], prompt_len: int, max_new_tokens: int) -> Any:
        made = copy.copy(item)
        longer, more = prompt_len - asked.prompt_len, max_new_tokens - asked.max_new_tokens
        for name, value, (from_prompt, from_new) in moves:
            setattr(made, name, value + from_prompt * longer + from_new * more)
        return made

    return make


def _same(one: Any, two: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(two, Tensor):
        return isinstance(one, Tensor) and isinstance(two, Tensor) and torch.equal(one, two)
    try:
        return bool(one == two)
    except (RuntimeError, ValueError):  # tensors in it
        return False
