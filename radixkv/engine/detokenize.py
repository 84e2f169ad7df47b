"""Text of a growing row of tokens, given out piece by piece."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["TextStream", "decode"]

_INCOMPLETE = "\ufffd"  # what half a character of several tokens decodes to


def decode(tokenizer: Any, token_ids: Sequence[int]) -> str:
    """The text of some tokens, special ones left out."""
    text: str = tokenizer.decode(list(token_ids), skip_special_tokens=True)
    return text


class TextStream:
    """Gives out text as soon as it cannot change any more.

    A token may be part of a character, and how a token is written may depend on the one before it, so a few tokens
    are decoded together and only what they add is given out. Text that may be the beginning of a stop
    string is held back until that is decided.

    Args:
        tokenizer: Decodes.
        stop: Stop strings.

    Source: decoding with a prefix of a few tokens is the way of text-generation-inference and vLLM.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._tokens: list[int] = []
        self._before = 0  # tokens from here to `_done` are decoded again as context
        self._done = 0  # tokens whose text was taken over into `_held`
        self._held = ""

    def add(self, token: int) -> str:
        """Take one more token; returns the text that is certain now, perhaps none."""
        self._tokens.append(token)
        known = decode(self._tokenizer, self._tokens[self._before : self._done])
        text = decode(self._tokenizer, self._tokens[self._before :])
        if len(text) > len(known) and not text.endswith(_INCOMPLETE):
            self._held += text[len(known) :]
            self._before, self._done = self._done, len(self._tokens)
        ready = self._certain()
        out, self._held = self._held[:ready], self._held[ready:]
        return out

    def _certain(self) -> int:
        """Characters of what is held that lie before a stop string, and before what may begin one."""
        found = [at for at in (self._held.find(stop) for stop in self._stop) if at >= 0]
        if found:
            return min(found)
        longest = 0
        for stop in self._stop:
            for size in range(min(len(stop) - 1, len(self._held)), longest, -1):
                if self._held.endswith(stop[:size]):
                    longest = size
                    break
        return len(self._held) - longest
