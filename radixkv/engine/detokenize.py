"""Text of a growing row of tokens, given out piece by piece."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from radixkv.engine.growing_text import GrowingText

__all__ = ["TextStream", "decode"]


def decode(tokenizer: Any, token_ids: Sequence[int]) -> str:
    """The text of some tokens, special ones left out."""
    text: str = tokenizer.decode(list(token_ids), skip_special_tokens=True)
    return text


class TextStream:
    """Gives out text as soon as it cannot change any more.

    Characters are given out when they are complete. Text that may be the beginning of a stop string is held back until
    that is decided, and what follows a stop string is left to whoever knows whether it counts.

    Args:
        tokenizer: Decodes.
        stop: Stop strings.
        min_tokens: One that is complete before so many tokens does not count.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = (), min_tokens: int = 0) -> None:
        self._text = GrowingText(lambda ids: decode(tokenizer, ids))
        self._stop = tuple(stop)
        self._tokens_to_go = min_tokens
        self._held = ""
        self._ahead = (
            0  # characters given out that were taken back since: so many of those to come are left out
        )
        self._stopped = False

    def add(self, token: int) -> str:
        """Take one more token; returns the text that is certain now, perhaps none."""
        self._tokens_to_go -= 1
        if self._stopped or not self._text.add(token):
            return ""
        fresh, revised = self._text.fresh, self._text.revised
        if revised:
            kept = max(0, len(self._held) - revised)
            self._ahead += revised - (len(self._held) - kept)
            self._held = self._held[:kept]
        if self._ahead:
            skipped = min(self._ahead, len(fresh))
            self._ahead -= skipped
            fresh = fresh[skipped:]
        self._held += fresh
        ready = self._certain()
        out, self._held = self._held[:ready], self._held[ready:]
        return out

    def _certain(self) -> int:
        """Characters of what is held that lie before a stop string, and before what may begin one."""
        found = [at for at in (self._held.find(stop) for stop in self._stop) if at >= 0]
        if found and self._tokens_to_go <= 0:
            self._stopped = True
            return min(found)
        longest = 0
        for stop in self._stop:
            for size in range(min(len(stop) - 1, len(self._held)), longest, -1):
                if self._held.endswith(stop[:size]):
                    longest = size
                    break
        return len(self._held) - longest
