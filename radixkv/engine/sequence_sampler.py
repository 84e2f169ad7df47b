"""`SequenceSampler`: what the sampler keeps of one sequence."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from radixkv.engine.draws import fork_seed
from radixkv.engine.generate_settings import Lists
from radixkv.engine.processors import active_lengths, forked, is_repeatable, is_shareable
from radixkv.engine.sampling_params import SamplingParams
from radixkv.engine.stopping import StopMatch, StopStrings
from radixkv.engine.treatment import GREEDY, Treatment, Treatments

__all__ = ["SequenceSampler"]


class SequenceSampler:
    """How one sequence is sampled: its settings, its random numbers, and what it looks for to stop.

    It depends on nothing but the sequence's tokens and itself, so that it may be left alone while the sequence is
    preempted. Made by `Sampler.start` and `Sampler.fork`.

    Attributes:
        params: The request's.
        index: Which of the request's sequences it was made for.
        num_prompt_tokens: Length of the prompt.
        num_tokens: Prompt and the tokens sampled so far.
        stop_token_ids: Tokens that end it: the model's, unless ignored, and the request's.
        strings: Looks for stop strings; None if there are none.
        criteria: Further stopping criteria.
        head: Processors that run for this sequence alone, at its present length.
        tail: What comes after them.
        keeps_state: Whether processors or criteria change when they are called.
        lost: A processor or criterion whose state is not known since a step that failed, and why.
        changes_at: The number of tokens from which on `head` and `tail` must be found anew.
        stop_match: Where a stop string was found in the text, once one was.
    """

    __slots__ = (
        "_forks",
        "_generator",
        "_given",
        "_processors",
        "_seed",
        "changes_at",
        "criteria",
        "head",
        "index",
        "keeps_state",
        "lost",
        "num_prompt_tokens",
        "num_tokens",
        "params",
        "stop_match",
        "stop_token_ids",
        "strings",
        "tail",
    )

    def __init__(
        self,
        params: SamplingParams,
        lists: Lists,
        index: int,
        num_prompt_tokens: int,
        seed: int | None,
        strings: StopStrings | None,
    ) -> None:
        self.params = params
        self.index = index
        self.num_prompt_tokens = self.num_tokens = num_prompt_tokens
        self.stop_token_ids = lists.stop_ids
        self.strings = strings
        self.stop_match: StopMatch | None = None
        self.criteria = lists.criteria
        self.head: Sequence[Any] = ()
        self.tail: Treatment = GREEDY
        self.changes_at = -1.0
        self._processors = lists.processors
        self._given = lists.given
        self._seed = seed
        self._forks = 0
        self._generator: torch.Generator | None = None
        self.lost: tuple[Any, Exception] | None = None
        self.keeps_state = any(map(self._changes, (*self._processors, *self.criteria)))

    def _changes(self, item: Any) -> bool:
        """Whether a processor or criterion is changed by being called, as far as anybody can tell."""
        if id(item) in self._given:
            return callable(getattr(item, "fork", None))
        return not is_repeatable(item)

    @property
    def stop(self) -> tuple[str, ...]:
        """Stop strings: the request's and the model's own."""
        return () if self.strings is None else self.strings.strings

    def cut(self, text: str) -> str:
        """The text of all new tokens, cut at the stop string that ended the sequence, if one did."""
        if self.stop_match is None:
            return text
        return self.stop_match.cut(text, self.params.include_stop_str_in_output)

    def renew(self, treatments: Treatments) -> None:
        """Find out which processors do something at this length, and until when that holds."""
        length, until, active = self.num_tokens, math.inf, []
        for processor in self._processors:
            first, end = active_lengths(processor)
            if first <= length < end:
                active.append(processor)
                until = min(until, end)
            elif length < first:
                until = min(until, first)
        self.head, self.tail = treatments.split(active, not self.params.greedy)
        self.changes_at = until

    def generator(self, device: torch.device) -> torch.Generator:
        """Its random numbers; made at the first draw, where the logits are."""
        if self._generator is None:
            assert self._seed is not None, "a greedy sequence draws nothing"
            self._generator = torch.Generator(device).manual_seed(self._seed)
        return self._generator

    def random_state(self) -> Tensor | None:
        """State of its random numbers; None before the first is drawn."""
        return None if self._generator is None else self._generator.get_state()

    def set_random_state(self, state: Tensor | None) -> None:
        """Draw again from where `random_state` was called."""
        if state is None:
            self._generator = None
        elif self._generator is not None:
            self._generator.set_state(state)

    def copies(self, model: Any) -> list[tuple[Any, Any]]:
        """Pairs of a processor or criterion that keeps state, and one that goes on from here in its place.

        `model` is not copied with them. In place of the second stands what copying raised.
        """
        found = []
        for item in (*self._processors, *self.criteria):
            if self._changes(item):
                try:
                    found.append((item, self._forked(item, {id(model): model})))
                except Exception as error:
                    found.append((item, error))
        return found

    def put_back(self, pairs: Sequence[tuple[Any, Any]]) -> None:
        """Put the second of each of the pairs of `copies` in the place of the first."""
        new: dict[int, Any] = {}
        for old, copied in pairs:
            if not isinstance(copied, Exception):
                new[id(old)] = copied
            elif id(old) in self._given:  # of others it is not known that they keep state
                self.lost = old, copied
        self._processors = tuple([new.get(id(item), item) for item in self._processors])
        self.criteria = tuple([new.get(id(item), item) for item in self.criteria])
        self._given = frozenset(id(new[key]) if key in new else key for key in self._given)
        self.changes_at = -1.0

    def fork(self, model: Any) -> SequenceSampler:
        """One that goes on from here by itself, see `Sampler.fork`; `model` is not copied with a processor."""
        other: SequenceSampler = object.__new__(SequenceSampler)
        for name in self.__slots__:
            setattr(other, name, getattr(self, name))
        if self._seed is not None:
            other._seed = fork_seed(self._seed, self.num_tokens, self._forks)
            self._forks += 1
        other._forks = 0
        other._generator = None
        other.strings = None if self.strings is None else self.strings.fork()
        memo = {id(model): model}
        other._processors = tuple(self._forked(item, memo) for item in self._processors)
        other.criteria = tuple(self._forked(item, memo) for item in self.criteria)
        pairs = zip((*self._processors, *self.criteria), (*other._processors, *other.criteria), strict=True)
        other._given = frozenset(id(new) for old, new in pairs if id(old) in self._given)
        other.changes_at = -1.0
        return other

    def _forked(self, item: Any, memo: dict[int, Any]) -> Any:
        if is_shareable(item):
            return item
        if id(item) in self._given or callable(getattr(item, "fork", None)):
            return forked(item)
        return copy.deepcopy(item, dict(memo))  # made by generate() for this sequence, and may keep state
