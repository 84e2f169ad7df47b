"""`GrowingText`: the text that each new token adds, without decoding all tokens before it."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["INCOMPLETE", "GrowingText", "common_start"]

INCOMPLETE = "\ufffd"  # what part of a character decodes to
_WINDOW = 8  # tokens of context, at least
_STUCK = 32  # tokens of no character, after which nobody waits for one any more
_PARTS = 3  # bytes of a character that is not complete, at most
_SILENT = 4  # tokens without text that stay in the window


class GrowingText:
    """Text of a growing row of tokens.

    How a token is written depends on its neighbours: a character may be spread over several tokens, spaces and
    punctuation may come and go. So a window of some last tokens is decoded again with each new one. It is cut only
    where characters are complete and never down to tokens that have no text, because how those begin that follow would
    be decided by the window's border. Its length is bounded whatever comes: where no character is ever complete,
    and where tokens have no text at all (special tokens that are left out), too.

    Attributes:
        fresh: Text that the last `add` brought. If that left the text unsettled, its complete characters so far; the
            next `add` brings them again.
        revised: So many characters before `fresh`, of the text settled earlier, are no longer what they were.

    Args:
        decode: From token ids to text, with U+FFFD for parts of characters.

    Decoding again from a few tokens back is the way of text-generation-inference and vLLM.
    """

    __slots__ = ("_decode", "_known", "_mark", "_mark_text", "_tokens", "_unread", "fresh", "revised")

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._tokens: list[int] = []  # the window
        self._known = ""  # the beginning of its text, that was settled
        self._mark = 0  # tokens of it after which all characters were complete: it may be cut there
        self._mark_text = ""
        self._unread = 0  # tokens since characters were last complete
        self.fresh = ""
        self.revised = 0

    def fork(self) -> GrowingText:
        """One that goes on from here by itself."""
        other: GrowingText = object.__new__(GrowingText)
        for name in self.__slots__:
            setattr(other, name, getattr(self, name))
        other._tokens = list(self._tokens)
        return other

    def add(self, token: int) -> bool:
        """Take one more token; returns whether `fresh` is settled, that is, not to be brought again."""
        text = self._decode([*self._tokens, token])
        self._tokens.append(token)
        end = len(text.rstrip(INCOMPLETE))
        whole = end == len(text)
        self._unread = 0 if whole else self._unread + 1
        settled = whole or self._unread > _STUCK
        if settled:
            # Of what will never be characters, the last bytes may still become one with those that follow.
            end = max(end, len(text) - _PARTS)
        start = min(common_start(self._known, text), end)
        self.fresh, self.revised = text[start:end], len(self._known) - start
        if settled:
            self._known = text[:end]
            self._shorten(text, whole)
        return settled

    def _shorten(self, text: str, whole: bool) -> None:
        tokens = self._tokens
        if not whole:
            if len(tokens) > 2 * _STUCK:
                left = self._decode(tokens[-_WINDOW:])
                del tokens[:-_WINDOW]
                self._known = left[: max(0, len(left) - (len(text) - len(self._known)))]
                self._mark, self._mark_text = len(tokens), left
        elif len(tokens) >= self._mark + _WINDOW:
            if text == self._mark_text:
                del tokens[self._mark : -_SILENT]
                return
            left = self._decode(tokens[self._mark :])
            del tokens[: self._mark]
            self._known = self._mark_text = left
            self._mark = len(tokens)


def common_start(a: str, b: str) -> int:
    """How many characters two texts have in common from the start."""
    if b.startswith(a):
        return len(a)
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
