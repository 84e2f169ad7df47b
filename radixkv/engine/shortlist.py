"""Sampling with a filter over a large vocabulary, without filtering the large vocabulary.

Top-k, top-p and min-p leave a few likely tokens. Sorting 262,144 scores for that takes longer than a decode step of a
small model. So the likeliest tokens are picked first, the filters run on those, and where the first filter has
removed the least likely of them, it would have removed every token beyond as well, because it removes none that is
likelier than one it keeps. Where it has not, the row is left to be done in full.

What comes out are the tokens that the filters would have let through over the whole row, except where rounding in the
last bit of float32 decides (probabilities are summed over fewer terms).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

__all__ = ["Shortlist"]

_FILTERS = (TopKLogitsWarper, TopPLogitsWarper, MinPLogitsWarper)
_SMALLEST_VOCABULARY = 8192  # below, filters cost little
_LENGTH = 1024
_TIES = 64  # room for tokens as likely as the k-th


class Shortlist:
    """Filters that can run on the likeliest tokens alone.

    Args:
        processors: Temperature or none, then top-k, top-p and min-p, in any order and any number of them but none.
    """

    def __init__(self, processors: Sequence[Any]) -> None:
        self._temperature = [p for p in processors if type(p) is TemperatureLogitsWarper]
        self._filters = [p for p in processors if type(p) in _FILTERS]
        first = self._filters[0]
        self._length = first.top_k + _TIES if type(first) is TopKLogitsWarper else _LENGTH

    @staticmethod
    def for_processors(processors: Sequence[Any]) -> Shortlist | None:
        """A shortlist for these, or None if they are not of that kind."""
        kinds = [type(processor) for processor in processors]
        if kinds[:1] == [TemperatureLogitsWarper]:
            kinds = kinds[1:]
        if not kinds or any(kind not in _FILTERS for kind in kinds):
            return None
        if any(getattr(p, "filter_value", None) != -torch.inf for p in processors if type(p) in _FILTERS):
            return None
        if any(getattr(p, "min_tokens_to_keep", 1) != 1 for p in processors):
            return None
        return Shortlist(processors)

    def fits(self, vocab_size: int) -> bool:
        """Whether it saves anything with so many tokens."""
        return vocab_size >= _SMALLEST_VOCABULARY and self._length <= vocab_size // 8

    def __call__(self, scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The tokens that are left and their probabilities.

        Args:
            scores: `[rows, vocabulary]` float32. Only read.

        Returns:
            `[rows, length]` float32 probabilities, 0 where a token was filtered out; `[rows, length]` int64 ids of
            these tokens; and `[rows]` bool: whether they are right. Where not, the whole row must be filtered.
        """
        values, ids = scores.topk(self._length, dim=-1, sorted=False)
        ids, order = ids.sort(dim=-1)  # as in the whole row, where the first of equals wins a draw
        values = self._apply(self._temperature, values.gather(1, order))
        least = values.amin(dim=-1, keepdim=True)
        decided = torch.ones(len(scores), dtype=torch.bool, device=scores.device)
        left = values
        for place, processor in enumerate(self._filters):
            before = left
            if place == 0 and type(processor) is TopPLogitsWarper:
                left = self._top_p(processor.top_p, scores, values, ids)
            else:
                left = self._apply([processor], before)
            if place == 0:
                # Tokens beyond may be as likely as the least likely one here: none of its like may be left.
                decided &= ~((values == least) & (left > -torch.inf)).any(dim=-1)
            if type(processor) is TopPLogitsWarper:
                # It may part equals, by the order in which its sort happens to leave them: nothing to go by.
                weakest = left.masked_fill(left == -torch.inf, torch.inf).amin(dim=-1, keepdim=True)
                decided &= ~((before == weakest) & (left == -torch.inf)).any(dim=-1)
        return left.softmax(dim=-1), ids, decided

    @staticmethod
    def _apply(processors: Sequence[Any], scores: Tensor) -> Tensor:
        no_ids = torch.empty((len(scores), 0), dtype=torch.int64, device=scores.device)
        for processor in processors:
            scores = processor(no_ids, scores)
        return scores

    def _top_p(self, top_p: float, scores: Tensor, values: Tensor, ids: Tensor) -> Tensor:
        """Top-p of a whole row, for its likeliest tokens.

        `TopPLogitsWarper` sums probabilities from the least likely token up, and removes while the sum is at most
        `1 - top_p`. The sum up to a token is the sum of all, less that of the likelier tokens, which are all here.
        """
        probabilities = self._apply(self._temperature, scores).softmax(dim=-1)
        total = probabilities.sum(dim=-1, keepdim=True, dtype=torch.float64)
        order = values.sort(dim=-1).indices
        own = probabilities.gather(1, ids.gather(1, order)).double()
        after = own.flip(-1).cumsum(dim=-1).flip(-1) - own
        removed = (total - after).float() <= 1 - top_p
        removed[:, -1] = False  # the likeliest always stays
        return values.masked_fill(torch.empty_like(removed).scatter_(1, order, removed), -torch.inf)
