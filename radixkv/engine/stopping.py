"""When a sequence is done: stop strings in its text, and criteria of the user or of transformers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from radixkv.engine.growing_text import INCOMPLETE, GrowingText, common_start

__all__ = ["StopMatch", "StopStrings", "says_stop"]

_REVISED = 32  # characters that a token may take back, and a stop string still be found


@dataclass(frozen=True)
class StopMatch:
    """Where a stop string was found in the text of a sequence's new tokens.

    Attributes:
        string: The stop string.
        num_tokens: New tokens that lie wholly before it.
        text: The text before it, special tokens left out.
    """

    string: str
    num_tokens: int
    text: str

    def cut(self, text: str, keep_string: bool = False) -> str:
        """A text of all new tokens, cut before the stop string, or behind it if it is to be kept."""
        kept = self.string if keep_string else ""
        if text.startswith(self.text):
            return self.text + kept
        at = text.rfind(self.string)  # decoded by other rules, such as those that tidy spaces up
        return (self.text if at < 0 else text[:at]) + kept


class StopStrings:
    """Looks for stop strings in the text of one sequence's new tokens, as they come.

    The text is decoded, rather than tokens matched with strings, so that it holds for every tokenizer: a stop string
    may begin and end inside tokens, and special tokens may be part of it. Text that belongs to the prompt is not
    looked at. Each step decodes a few last tokens only.

    Args:
        tokenizer: Anything with `decode(ids)`.
        strings: What to look for.
        min_tokens: A string that is complete before so many tokens does not count.

    `transformers`' own `StopStringCriteria` is not used: it prepares a table over the whole vocabulary for each set of
    strings, which takes minutes with 262,144 tokens, up to version 5 it knows no parts of characters, and it counts
    what the end of the prompt contributes.
    """

    def __init__(self, tokenizer: Any, strings: Sequence[str], min_tokens: int = 0) -> None:
        self.tokenizer = tokenizer
        self._decode = _decoder(tokenizer)
        self.strings = tuple(strings)
        self._min_tokens = min_tokens
        self._keep = max(map(len, self.strings)) - 1 + _REVISED
        self._num_tokens = 0
        self._text = GrowingText(self._decode)
        self._tail = ""  # last characters of the settled text

    def fork(self) -> StopStrings:
        """One that goes on from here by itself."""
        other: StopStrings = object.__new__(StopStrings)
        other.__dict__.update(self.__dict__)
        other._text = self._text.fork()
        return other

    def add(self, token: int) -> bool:
        """Take one more token; returns whether it completes a stop string."""
        self._num_tokens += 1
        settled = self._text.add(token)
        before = self._tail[: max(0, len(self._tail) - self._text.revised)]
        region, old = before + self._text.fresh, len(before)
        found = self._num_tokens >= self._min_tokens and any(
            region.find(string, max(0, old - len(string) + 1)) >= 0 for string in self.strings
        )
        if settled:
            self._tail = region[-self._keep :]
        return found

    def match(self, tokens: Sequence[int]) -> StopMatch | None:
        """Where the stop string begins that the last of a sequence's new `tokens` completed.

        Of several that it completed, the one that begins first counts, and the longest of those.
        """
        ids = list(tokens)
        whole = self._decode(ids)
        # A string that was complete before the last token would have ended the sequence then, unless it was too early.
        before = self._decode(ids[:-1])
        unchanged = common_start(before.rstrip(INCOMPLETE), whole)
        places = []
        for string in self.strings:
            at = whole.find(string, max(0, unchanged - len(string) + 1))
            if at >= 0:
                places.append((at, -len(string), string))
        if not places:
            return None
        at, _, string = min(places)
        first = self._token_at(ids, at)
        head = self._decode(ids[:first]).rstrip(INCOMPLETE)
        text = self._decode(ids[:first], True).rstrip(INCOMPLETE)
        is_special = not self._decode([ids[first]], True) and self._decode([ids[first]])
        if whole.startswith(head) and not is_special:
            text += whole[len(head) : at]
        return StopMatch(string, first, text)

    def _token_at(self, ids: list[int], at: int) -> int:
        """The token that the character at `at` of their text belongs to, the first of them if several."""
        low, high = 0, len(ids) - 1
        while low < high:  # the text of the first `middle + 1` reaches beyond `at`?
            middle = (low + high) // 2
            if len(self._decode(ids[: middle + 1]).rstrip(INCOMPLETE)) > at:
                high = middle
            else:
                low = middle + 1
        return low


def _decoder(tokenizer: Any) -> Callable[..., str]:
    """`decode(ids, skip_special_tokens=False)`, the text with its spaces as they are."""
    # Not every tokenizer knows all options: leave out one after another until it takes them.
    known = ["skip_special_tokens", "clean_up_tokenization_spaces", "spaces_between_special_tokens"]

    def decode(ids: list[int], skip_special_tokens: bool = False) -> str:
        while True:
            options = dict.fromkeys(known, False)
            if skip_special_tokens and known:
                options[known[0]] = True
            try:
                return str(tokenizer.decode(ids, **options))
            except (TypeError, ValueError):
                if not known:
                    raise
                known.pop()

    return decode


def says_stop(criterion: Callable[..., Any], ids: Tensor, scores: tuple[Tensor, ...]) -> bool:
    """What a stopping criterion says about one sequence: `ids` `[1, length]`, `scores` a tuple of `[1, vocabulary]`."""
    answer = criterion(ids, scores)
    if isinstance(answer, torch.Tensor):
        if answer.numel() != 1:
            raise ValueError(f"it must return one value for one sequence, got shape {tuple(answer.shape)}")
        return bool(answer.item())
    return bool(answer)
