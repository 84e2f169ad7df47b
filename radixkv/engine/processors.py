"""What is done to the scores of a token before it is chosen: penalties of our own, and what is known of others.

The processors themselves are transformers'. This module knows which of them look at the scores alone, so that
equal ones can work on many sequences in one call, and which do something only at certain lengths, so that they cost
nothing at all others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.generation import logits_process
from transformers.generation.stopping_criteria import MaxTimeCriteria

__all__ = [
    "OutputPenalty",
    "active_lengths",
    "depends_on_scores_only",
    "forked",
    "is_copyable",
    "is_repeatable",
    "is_shareable",
    "knows_lengths",
    "signature",
]


class OutputPenalty:
    """Takes `presence + frequency * count` off the logit of each token that was generated `count > 0` times.

    A logits processor for one sequence, of transformers' shape. Tokens of the prompt do not count. It counts each
    token once, when it comes, so that a step costs the distinct tokens and not the whole output.

    Args:
        presence: Taken off once.
        frequency: Taken off for each time.
        prompt_len: Leading tokens that do not count.

    Source: "Frequency and presence penalties" in OpenAI's API reference,
    `mu[j] -> mu[j] - c[j] * alpha_frequency - float(c[j] > 0) * alpha_presence`, where `c[j]` is how often token `j`
    was sampled before.
    """

    def __init__(self, presence: float, frequency: float, prompt_len: int) -> None:
        self.presence = presence
        self.frequency = frequency
        self.prompt_len = prompt_len
        self._forget()

    def _forget(self) -> None:
        self._seen = self.prompt_len
        self._places: dict[int, int] = {}
        self._tokens = np.empty(16, np.int64)
        self._penalties = np.empty(16, np.float32)

    def fork(self) -> OutputPenalty:
        """One that goes on from here by itself."""
        other = OutputPenalty(self.presence, self.frequency, self.prompt_len)
        other._seen, other._places = self._seen, dict(self._places)
        other._tokens, other._penalties = self._tokens.copy(), self._penalties.copy()
        return other

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """The scores `[1, vocabulary]` after `input_ids` `[1, length]`, penalised; the ones given stay as they are."""
        if len(input_ids) != 1:
            raise ValueError(f"one sequence at a time: got ids of shape {tuple(input_ids.shape)}")
        length = input_ids.shape[1]
        if length < self._seen:
            self._forget()
        try:
            for token in input_ids[0, self._seen : length].tolist():
                self._count(token)
            self._seen = max(length, self._seen)
        except BaseException:  # it may have been counted in part: count all again the next time
            self._forget()
            raise
        num = len(self._places)
        if not num:
            return scores
        ids = torch.from_numpy(self._tokens[:num]).to(scores.device)
        penalties = torch.from_numpy(self._penalties[:num]).to(scores)
        return scores.index_add(1, ids, penalties[None], alpha=-1)

    def _count(self, token: int) -> None:
        place = self._places.get(token)
        if place is not None:
            self._penalties[place] += self.frequency
            return
        place = self._places[token] = len(self._places)
        if place == len(self._tokens):
            self._tokens = np.concatenate([self._tokens, np.empty_like(self._tokens)])
            self._penalties = np.concatenate([self._penalties, np.empty_like(self._penalties)])
        self._tokens[place] = token
        self._penalties[place] = self.presence + self.frequency


def _classes(*names: str) -> frozenset[type]:
    """Those that this version of transformers has."""
    return frozenset(getattr(logits_process, name) for name in names if hasattr(logits_process, name))


# They change every row by itself, whatever its ids are, and have no state. Not among them are those that would
# raise for a row of NaN: one bad row must not be the end of others.
_SCORES_ONLY = _classes(
    "TemperatureLogitsWarper",
    "TopKLogitsWarper",
    "TopPLogitsWarper",
    "MinPLogitsWarper",
    "TypicalLogitsWarper",
    "EpsilonLogitsWarper",
    "SuppressTokensLogitsProcessor",
    "InfNanRemoveLogitsProcessor",
    "LogitNormalization",
)
# They look at the ids, but no more: the same object may serve any sequence, of any prompt. The function of a
# `PrefixConstrainedLogitsProcessor` is one of ours; a watermark's generator is seeded anew for each token.
_NO_STATE = _SCORES_ONLY | _classes(
    "RepetitionPenaltyLogitsProcessor",
    "NoRepeatNGramLogitsProcessor",
    "NoBadWordsLogitsProcessor",
    "SequenceBiasLogitsProcessor",
    "PrefixConstrainedLogitsProcessor",
    "ForcedBOSTokenLogitsProcessor",
    "EtaLogitsWarper",
    "TopHLogitsWarper",
    "WatermarkLogitsProcessor",
)
# They hold lengths of one prompt, and no state.
_LENGTHS = _classes(
    "MinLengthLogitsProcessor",
    "MinNewTokensLengthLogitsProcessor",
    "ForcedEOSTokenLogitsProcessor",
    "SuppressTokensAtBeginLogitsProcessor",
    "ExponentialDecayLengthPenalty",
)
# They hold a prompt, and no state.
_PROMPT = _classes("EncoderRepetitionPenaltyLogitsProcessor", "EncoderNoRepeatNGramLogitsProcessor")
# They keep state, which a copy takes along, and know no prompt.
_STATE = _classes("SynthIDTextWatermarkLogitsProcessor")


def _lengths(
    name: str, find: Callable[[Any], tuple[float, float]]
) -> dict[type, Callable[[Any], tuple[float, float]]]:
    return dict.fromkeys(_classes(name), find)


_ACTIVE: dict[type, Callable[[Any], tuple[float, float]]] = {
    **_lengths("MinLengthLogitsProcessor", lambda p: (0, p.min_length)),
    **_lengths(
        "MinNewTokensLengthLogitsProcessor", lambda p: (0, p.prompt_length_to_skip + p.min_new_tokens)
    ),
    **_lengths("ForcedBOSTokenLogitsProcessor", lambda p: (1, 2)),
    **_lengths("ForcedEOSTokenLogitsProcessor", lambda p: (p.max_length - 1, p.max_length)),
    **_lengths("SuppressTokensAtBeginLogitsProcessor", lambda p: (p.begin_index, p.begin_index + 1)),
}
_ALWAYS = (0.0, math.inf)


def depends_on_scores_only(processor: Any) -> bool:
    """Whether it ignores the ids, so that one call may serve rows of different sequences."""
    return type(processor) in _SCORES_ONLY


def is_shareable(processor: Any) -> bool:
    """Whether one object may serve several sequences, because it remembers nothing and knows no prompt."""
    return type(processor) in _NO_STATE


def knows_lengths(processor: Any) -> bool:
    """Whether numbers in it may be lengths of one prompt, while nothing else in it is of that prompt."""
    return type(processor) in _LENGTHS


def is_copyable(processor: Any) -> bool:
    """Whether a copy of one that was not used yet may serve another sequence, of any prompt."""
    return type(processor) in _STATE


def is_repeatable(processor: Any) -> bool:
    """Whether it does the same when it is called again with the same ids and scores."""
    kind = type(processor)
    return (
        kind in _NO_STATE or kind in _LENGTHS or kind in _PROMPT or kind in (OutputPenalty, MaxTimeCriteria)
    )


def active_lengths(processor: Any) -> tuple[float, float]:
    """`(first, end)`: it changes scores only where that many tokens are known, `first <= length < end`."""
    find = _ACTIVE.get(type(processor))
    if find is None:
        return _ALWAYS
    try:
        return find(processor)
    except AttributeError:  # another version keeps them under another name
        return _ALWAYS


def signature(processor: Any) -> Hashable | None:
    """Equal for processors that do the same to scores; None if that cannot be told."""
    values: list[Any] = [type(processor)]
    for name, value in sorted(vars(processor).items()):
        if isinstance(value, Tensor):
            value = (tuple(value.shape), str(value.device), tuple(value.flatten().tolist()))
        elif not (value is None or isinstance(value, (bool, int, float, str))):
            return None
        values += [name, value]
    return tuple(values)


def forked(processor: Any) -> Any:
    """One for another sequence: what its `fork()` gives, or itself if it has none."""
    fork = getattr(processor, "fork", None)
    return fork() if callable(fork) else processor
