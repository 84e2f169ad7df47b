"""What stands on a line: tokens or text, namespaces, ages; whatever they hold, one line that is safe to print."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

from radixkv.core.errors import InvalidRequestError
from radixkv.core.namespace import namespace_text
from radixkv.core.tokens import TokenArray

__all__ = [
    "Labels",
    "age",
    "block_ranges",
    "digest",
    "namespace_label",
    "one_line",
    "percent",
    "plural",
    "shorten",
]

ELLIPSIS = "…"
_SHORT_ESCAPES = {"\n": "\\n", "\r": "\\r", "\t": "\\t", "\\": "\\\\", '"': '\\"'}


def one_line(text: str) -> str:
    """The text with all escaped that does not print as itself: controls, line ends, bidi marks, surrogates."""
    if text.isprintable() and "\\" not in text and '"' not in text:
        return text
    return "".join(map(_escaped, text))


def _escaped(char: str) -> str:
    if char in _SHORT_ESCAPES:
        return _SHORT_ESCAPES[char]
    if char.isprintable():
        return char
    code = ord(char)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def shorten(text: str, max_chars: int) -> str:
    """`one_line` of the text, cut in the middle if it is longer; never inside an escape."""
    if len(text) <= max_chars:
        whole = one_line(text)
        if len(whole) <= max_chars:
            return whole
    # Each character gives at least one, so no more of them than `max_chars` can be needed from either end.
    return _ends(text[:max_chars], text[-max_chars:], max_chars, cut=True)


def _ends(head: str, tail: str, max_chars: int, cut: bool) -> str:
    """Two thirds of the room for the beginning, the rest for the end."""
    room = max_chars - 1
    start = _fit(head, room - room // 3)
    end = _fit(tail[::-1], room - sum(map(len, start)))
    return "".join(start) + ELLIPSIS * cut + "".join(reversed(end))


def _fit(text: str, room: int) -> list[str]:
    taken: list[str] = []
    for char in text:
        piece = _escaped(char)
        room -= len(piece)
        if room < 0:
            break
        taken.append(piece)
    return taken


class Labels:
    """Names runs of tokens: by their text with a tokenizer, else by their ids.

    Args:
        tokenizer: Something with `decode(ids) -> str`, such as a transformers tokenizer, or such a function; None
            for ids.
        max_chars: Characters of a label, quotes and brackets not counted.

    Attributes:
        num_undecodable: Labels that show ids because the tokenizer raised.
        trouble: What it raised last, in one line.

    Raises:
        InvalidRequestError: `tokenizer` cannot decode.
    """

    def __init__(self, tokenizer: Any, max_chars: int) -> None:
        self._decode: Callable[..., Any] | None = None
        if tokenizer is not None:
            decode = getattr(tokenizer, "decode", tokenizer)
            if not callable(decode):
                raise InvalidRequestError(
                    f"tokenizer must have a method decode(ids) -> str, or be such a function, "
                    f"got {type(tokenizer).__name__}"
                )
            self._decode = decode
        self._max_chars = max_chars
        self.num_undecodable = 0
        self.trouble = ""

    def of(self, pieces: Sequence[TokenArray]) -> str:
        """The label of the tokens on the edges of a chain, in order.

        Args:
            pieces: int64 arrays, at least one; none is empty.
        """
        # A character of text may take several tokens, as a rule not more than four; an id takes a digit and a comma.
        most = self._max_chars * 4 if self._decode is not None else self._max_chars // 2 + 1
        head = _leading(pieces, most)
        num_tokens = sum(map(len, pieces))
        tail = [] if num_tokens <= most else _trailing(pieces, min(most, num_tokens - most))
        if self._decode is not None:
            try:
                return f'"{self._text(head, tail)}"'
            except InvalidRequestError:
                raise
            except (
                Exception
            ) as error:  # ids out of its vocabulary, for one: a view of the rest is still of use
                self.num_undecodable += 1
                self.trouble = shorten(f"{type(error).__name__}: {error}", 100)
        return f"[{self._ids(head, tail)}]"

    def _text(self, head: list[int], tail: list[int]) -> str:
        start = self._decoded(head)
        if not tail:
            return shorten(start, self._max_chars)
        # Where the run is cut, half a character may be left.
        start, end = start.rstrip("\ufffd"), self._decoded(tail).lstrip("\ufffd")
        return _ends(start, end, self._max_chars, cut=True)

    def _decoded(self, ids: list[int]) -> str:
        assert self._decode is not None
        try:
            text = self._decode(ids, skip_special_tokens=False)
        except TypeError:  # not every tokenizer knows the option
            text = self._decode(ids)
        if not isinstance(text, str):
            raise InvalidRequestError(
                f"the tokenizer's decode must give a str, it gave {type(text).__name__}"
            )
        return text

    def _ids(self, head: list[int], tail: list[int]) -> str:
        whole = [str(token) for token in head]
        short = sum(map(len, whole)) + 2 * len(whole) - 2 <= self._max_chars
        if not tail and (short or len(whole) == 1):
            return ", ".join(whole)
        room = self._max_chars - len(ELLIPSIS) - 2
        start = _fit_ids(whole, room - room // 3) or whole[:1]
        ends = [str(token) for token in tail] if tail else whole[len(start) :]
        end = _fit_ids(ends[::-1], room - len(", ".join(start)))
        return f"{', '.join(start)} {ELLIPSIS} {', '.join(reversed(end))}".rstrip()


def _fit_ids(ids: Sequence[str], room: int) -> list[str]:
    taken: list[str] = []
    for text in ids:
        room -= len(text) + 2
        if room < -2:
            break
        taken.append(text)
    return taken


def _leading(pieces: Sequence[TokenArray], num_tokens: int) -> list[int]:
    out: list[int] = []
    for piece in pieces:
        out += piece[: num_tokens - len(out)].tolist()
        if len(out) == num_tokens:
            break
    return out


def _trailing(pieces: Sequence[TokenArray], num_tokens: int) -> list[int]:
    out: list[int] = []
    for piece in reversed(pieces):
        missing = num_tokens - len(out)
        out = piece[max(0, len(piece) - missing) :].tolist() + out
        if len(out) == num_tokens:
            break
    return out


def digest(namespace: bytes) -> str:
    """16 hex digits that stand for a namespace that has no name."""
    return hashlib.blake2b(namespace, digest_size=8).hexdigest()


def namespace_label(canonical: bytes, max_chars: int = 60) -> str:
    """What the user wrote for a canonical namespace: `"tenant"`, `("lora", "x")`.

    Its `digest` if that cannot be told, and `default` for the default one.
    """
    if not canonical:
        return "default"
    label = namespace_text(canonical, _quoted)
    if label is None:
        return digest(canonical)
    return label if len(label) <= max_chars else _cut_line(label, max_chars)


def _cut_line(line: str, max_chars: int) -> str:
    room = max_chars - 1
    return line[: room - room // 3] + ELLIPSIS + line[-(room // 3) :]


def _quoted(part: str | bytes | None) -> str:
    return f'"{one_line(part)}"' if isinstance(part, str) else repr(part)


def percent(part: int, whole: int) -> str:
    """A share with one decimal."""
    return f"{part / whole * 100:.1f}%" if whole else "0.0%"


def age(seconds: float) -> str:
    """A time in its largest unit: `8 s`, `12 min`, `5 h`, `3 d`."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    if seconds < 3600:
        return f"{seconds / 60:.0f} min"
    if seconds < 48 * 3600:
        return f"{seconds / 3600:.0f} h"
    return f"{seconds / 86400:.0f} d"


def plural(number: int, word: str) -> str:
    """`1 node`, `2,048 nodes`."""
    return f"{number:,} {word}{'' if number == 1 else 's'}"


def block_ranges(ids: Sequence[int], most: int = 6) -> str:
    """Block ids as runs: `0-7, 12`; after `most` runs how many blocks are left out."""
    runs: list[list[int]] = []
    for block in ids:
        if runs and block == runs[-1][1] + 1:
            runs[-1][1] = block
        else:
            runs.append([block, block])
    shown = [str(first) if first == last else f"{first}-{last}" for first, last in runs[:most]]
    left = len(ids) - sum(last - first + 1 for first, last in runs[:most])
    return ", ".join(shown) + (f", {ELLIPSIS} {left:,} more" if left else "")
