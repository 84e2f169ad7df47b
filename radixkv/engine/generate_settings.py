"""What `model.generate()` itself would do to the scores of a request, and where it would stop."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from transformers.generation.stopping_criteria import EosTokenCriteria

from radixkv.core.errors import InvalidRequestError
from radixkv.engine.asking import GenerateAsker, vocabulary_of
from radixkv.engine.processors import OutputPenalty, forked
from radixkv.engine.recipe import Asked, Recipe
from radixkv.engine.sampling_params import SamplingParams

__all__ = ["GenerateSettings", "Lists"]

_UNSET: Any = object()
_NO_END = 2**31 - 1  # new tokens of a sequence that may be as long as it gets
_LONGER, _MORE = 3, 1000  # so much prompt and new tokens differ where it is asked a second time
_REMEMBERED = 1024
_BASIC = frozenset((type(None), bool, int, float, str, list, tuple, dict))


@dataclass(frozen=True)
class Lists:
    """How one sequence is sampled and stopped.

    Attributes:
        processors: In the order in which `generate()` applies them.
        criteria: Stopping criteria beyond length, end-of-sequence ids and stop strings.
        stop_ids: Ids that end the sequence: the model's, unless they are to be ignored, and the request's.
        stop_strings: The model's and the request's.
        given: `id()` of the objects that are the user's, in both lists.
    """

    processors: tuple[Any, ...]
    criteria: tuple[Any, ...]
    stop_ids: frozenset[int]
    stop_strings: tuple[str, ...]
    given: frozenset[int] = frozenset()


@dataclass(frozen=True)
class _Own:
    """The user's objects for one sequence, and the penalties on its output."""

    processors: list[Any]
    criteria: list[Any]
    given: frozenset[int]

    @classmethod
    def of(cls, params: SamplingParams, prompt_len: int) -> _Own:
        processors = [forked(processor) for processor in params.logits_processors]
        criteria = [forked(criterion) for criterion in params.stopping_criteria]
        given = frozenset(map(id, (*processors, *criteria)))
        if params.presence_penalty or params.frequency_penalty:
            penalty = OutputPenalty(params.presence_penalty, params.frequency_penalty, prompt_len)
            processors.insert(0, penalty)
        return cls(processors, criteria, given)

    @property
    def all(self) -> list[Any]:
        return [*self.processors, *self.criteria]


class _Known:
    """What was found out about some settings: lists for any further sequence."""

    def __init__(self, recipe: Recipe, stop_ids: frozenset[int], stop_strings: tuple[str, ...]) -> None:
        self._recipe = recipe
        self._stops = stop_ids, stop_strings
        self._fixed = self._made(_Own([], [], frozenset()), 0, 0) if recipe.constant else None

    def lists(self, own: _Own, prompt_len: int, max_new_tokens: int) -> Lists:
        return self._fixed if self._fixed is not None else self._made(own, prompt_len, max_new_tokens)

    def _made(self, own: _Own, prompt_len: int, max_new_tokens: int) -> Lists:
        return Lists(*self._recipe.make(own.all, prompt_len, max_new_tokens), *self._stops, own.given)


class GenerateSettings:
    """How a model's `generate()` would sample requests, asked once for settings that are new.

    Args:
        model: A model of transformers. One without `generate()` gets the settings of `SamplingParams` and its
            end-of-sequence ids.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._asker = GenerateAsker(model)
        self._vocab_size = vocabulary_of(model)
        self._config_seen: Any = _UNSET
        self._known: dict[Any, _Known] = {}
        self._last: tuple[Any, npt.NDArray[np.int64], _Known] | None = None

    @property
    def config(self) -> Any:
        """The model's `generation_config`, or None."""
        return self._asker.config

    def lists(self, params: SamplingParams, prompt: npt.NDArray[np.int64], index: int = 0) -> Lists:
        """What applies to one new sequence.

        Where `generate()` answers with something that is not understood, it is asked again for every request, but not
        for every sequence of it.

        Args:
            params: The request's.
            prompt: `[length]` int64 ids.
            index: Which of the sequences of the request.

        Raises:
            InvalidRequestError: `generate()` refuses these settings, they name tokens that do not exist, or the model's
                own config asks for something that the engine does not do.
        """
        self._notice_changes()
        own = _Own.of(params, len(prompt))
        key = self._key(params, len(prompt), own)
        max_new_tokens = params.max_new_tokens or _NO_END
        known = self._known.get(key)
        if known is None and index and self._last is not None:
            last_key, last_prompt, last_known = self._last
            if key == last_key and np.array_equal(prompt, last_prompt):
                known = last_known
        if known is not None:
            return known.lists(own, len(prompt), max_new_tokens)
        return self._find(params, prompt, max_new_tokens, own, key)

    def _notice_changes(self) -> None:
        """Forget what was known if somebody changed the model's `generation_config`."""
        config = self.config
        now = {} if config is None else dict(vars(config))
        for name, value in now.items():
            if type(value) not in _BASIC and hasattr(value, "to_dict"):
                now[name] = value.to_dict()  # the object itself may be equal to one of other contents
        try:
            if self._config_seen is not _UNSET and bool(now == self._config_seen):
                return
        except (RuntimeError, ValueError):  # tensors among the values cannot be compared like this
            pass
        self._config_seen = copy.deepcopy(now)
        self._known.clear()
        self._last = None

    @staticmethod
    def _key(params: SamplingParams, prompt_len: int, own: _Own) -> Any:
        """Equal where `generate()` gives the same answer, but for lengths."""
        key: tuple[Any, ...] = (
            params.temperature,
            params.top_k,
            params.top_p,
            params.min_p,
            params.repetition_penalty,
            params.min_new_tokens,
            params.logit_bias,
            params.allowed_token_ids,
            params.bad_words_ids,
            params.stop_token_ids,
            params.stop,
            params.ignore_eos,
            prompt_len == 1,  # with such a prompt, some processors count from elsewhere
        )
        if not own.processors and not own.criteria:
            return key
        # Of the user's objects, generate() looks at the type, and leaves out what is equal to another.
        for items in (own.processors, own.criteria):
            key += (tuple(map(type, items)), tuple(map(items.index, items)))
        return key

    def _find(
        self,
        params: SamplingParams,
        prompt: npt.NDArray[np.int64],
        max_new_tokens: int,
        own: _Own,
        key: Any,
    ) -> Lists:
        """Ask, and remember what may be remembered."""
        self._refuse_unknown_ids(params)
        stops = self._stops(params, own.criteria)
        asked = self._asker.ask(params, prompt, max_new_tokens, own.processors, own.criteria)
        other: Asked | None = None
        if asked.knows_lengths:
            longer = prompt if len(prompt) == 1 else np.resize(prompt, len(prompt) + _LONGER)
            more = max_new_tokens + _MORE
            other = self._asker.ask(params, longer, more, own.processors, own.criteria)
        recipe = Recipe.portable(asked, other, own.all, self._model)
        if recipe is not None:
            if len(self._known) >= _REMEMBERED:
                self._known.clear()
            known = self._known[key] = _Known(recipe, *stops)
            return known.lists(own, len(prompt), max_new_tokens)
        self._last = None
        recipe = Recipe.for_request(asked, own.all, self._model) if params.n > 1 else None
        if recipe is not None:
            self._last = key, prompt.copy(), _Known(recipe, *stops)
        return Lists(tuple(asked.processors), tuple(asked.criteria), *stops, own.given)

    def _refuse_unknown_ids(self, params: SamplingParams) -> None:
        size = self._vocab_size
        if size is None:
            return
        named: dict[str, Iterable[int]] = {
            "logit_bias": dict(params.logit_bias or ()),
            "allowed_token_ids": params.allowed_token_ids or (),
            "bad_words_ids": [token for row in params.bad_words_ids or () for token in row],
            "stop_token_ids": params.stop_token_ids,
        }
        for name, ids in named.items():
            beyond = [token for token in ids if token >= size]
            if beyond:
                raise InvalidRequestError(
                    f"{name} {beyond} do not exist: the vocabulary has {size} tokens, from 0 to {size - 1}"
                )

    def _stops(self, params: SamplingParams, criteria: list[Any]) -> tuple[frozenset[int], tuple[str, ...]]:
        """Ids and strings that end a sequence."""
        ids: Iterable[int] = self._asker.stop_ids(params) or ()
        if any(type(criterion) is EosTokenCriteria for criterion in criteria):
            ids = params.stop_token_ids  # as in generate(), the user's own takes the place of the model's
        strings = getattr(self.config, "stop_strings", None) or ()
        if isinstance(strings, str):
            strings = (strings,)
        return frozenset(ids), tuple(dict.fromkeys((*strings, *params.stop)))
