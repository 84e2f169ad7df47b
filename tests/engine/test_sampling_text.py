"""The text of a growing row of tokens, piece by piece, is the text of the whole."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizer_testkit import CORPUS, KINDS, SPECIAL, Plain, byte_level, sentencepiece_like

from radixkv.engine.detokenize import TextStream, decode
from radixkv.engine.growing_text import GrowingText
from radixkv.engine.stopping import StopStrings

BOUND = 100  # tokens that are decoded again, at most


class Watched:
    """Notes how many tokens are decoded at a time."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.longest = 0

    def decode(self, ids: list[int], **options: Any) -> str:
        self.longest = max(self.longest, len(ids))
        if isinstance(self.tokenizer, Plain):
            return self.tokenizer.decode(ids)
        text: str = self.tokenizer.decode(ids, **options)
        return text


class Silent:
    """Ids above 255 have no text, as special tokens that are left out; the others are bytes of UTF-8."""

    def decode(self, ids: list[int], **_: Any) -> str:
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")


class Decoder:
    """A `Plain` that takes options."""

    def __init__(self, plain: Plain) -> None:
        self.plain = plain

    def decode(self, ids: list[int], **_: Any) -> str:
        return self.plain.decode(ids)


def text_of(tokenizer: Any, ids: list[int]) -> str:
    return decode(Decoder(tokenizer) if isinstance(tokenizer, Plain) else tokenizer, ids)


def pieces(tokenizer: Any, ids: list[int], falls_back: bool = False) -> str:
    """What a stream gives out of these tokens; at every moment it is the beginning of their text.

    `falls_back`: while the last character of a run of bytes is incomplete, the tokenizer shows none of the run.
    """
    watched = Watched(tokenizer)
    stream, given = TextStream(watched), ""
    for n, token in enumerate(ids, 1):
        given += stream.add(token)
        whole = text_of(tokenizer, ids[:n])
        assert whole.startswith(given) or (falls_back and whole.endswith("\ufffd"))
        assert len(given) == len(whole) or whole.endswith("\ufffd")
    assert watched.longest <= BOUND
    return given


def encoded(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


@pytest.mark.parametrize("kind", ["bytes", "words", "plain"])
@pytest.mark.parametrize("seed", range(10))
def test_any_tokens(kind: str, seed: int) -> None:
    tokenizer, rng = KINDS[kind](), random.Random(seed)
    ids: list[int] = []
    while len(ids) < 150:
        if rng.random() < 0.5:
            ids += encoded(tokenizer, rng.choice(CORPUS)[rng.randrange(20) :][: rng.randrange(1, 20)])
        else:
            ids += [rng.randrange(len(tokenizer)) for _ in range(rng.randrange(1, 60))]
    pieces(tokenizer, ids)


@pytest.mark.parametrize("kind", ["bytes", "byte fallback", "plain"])
@pytest.mark.parametrize(
    "text", ["🙂🙃" * 40, "żółw " * 30, "漢字かな交じり文" * 12, "a🙂" * 30, " " * 90, "\n\n a" * 30]
)
def test_characters_of_several_tokens(kind: str, text: str) -> None:
    tokenizer = KINDS[kind]()
    ids = encoded(tokenizer, text)
    assert len(ids) > BOUND / 2
    assert pieces(tokenizer, ids, kind == "byte fallback") == text_of(tokenizer, ids)


@pytest.mark.parametrize(
    "unit", [[0xE2], [0x82], [0xE2, 0x82], [0xF0, 0x9F, 0x99], [0xFF], [0xC3, 0x28, 0xE2]], ids=str
)
def test_bytes_that_never_become_characters(unit: list[int]) -> None:
    ids = unit * (300 // len(unit))
    plain = Plain()
    given = pieces(plain, ids)
    whole = plain.decode(ids)
    assert len(given) >= len(whole) - 40, "it does not wait for ever"
    for tail in ("€ and text", "x"):
        more = [*ids, *tail.encode()]
        assert pieces(plain, more) == plain.decode(more)
        search = StopStrings(plain, [tail[0]])
        hits = [n for n, token in enumerate(more, 1) if search.add(token)]
        assert hits[0] == next(n for n in range(1, len(more) + 1) if tail[0] in plain.decode(more[:n]))


@pytest.mark.parametrize("count", [1, 5, 17, 33, 300])
def test_tokens_without_text(count: int) -> None:
    watched = Watched(Silent())
    stream = TextStream(watched)
    ids = [*"żó".encode(), *[300] * count, *"łw".encode(), *[301] * count, 0xE2, 300, 0x82, 301, 0xAC]
    assert "".join(map(stream.add, ids)) == "żółw€"
    assert watched.longest <= BOUND


@pytest.mark.parametrize("kind", ["bytes", "byte fallback"])
def test_special_tokens_that_are_left_out(kind: str) -> None:
    """The space before a word after them is not lost, as it would be if nothing but them were decoded again."""
    tokenizer = KINDS[kind]()
    special = tokenizer.convert_tokens_to_ids(SPECIAL[2])
    for count in (1, 4, 16, 40, 200):
        ids = [
            *encoded(tokenizer, "the quick"),
            *[special] * count,
            *encoded(tokenizer, " brown fox 🙂 " * 6),
        ]
        for row in (ids, ids[2:], [special] * count + ids):
            assert pieces(tokenizer, row, kind == "byte fallback") == decode(tokenizer, row)


def test_a_stop_string_far_into_a_run_of_bytes() -> None:
    """A decoder that falls back on bytes shows none of a run of them while its last character is incomplete."""
    tokenizer = sentencepiece_like()
    ids = encoded(tokenizer, "🙂🙃" * 30 + "🙃🙃" + "🙂" * 9)
    search = StopStrings(tokenizer, ["🙃🙃"])
    first = next(n for n, token in enumerate(ids, 1) if search.add(token))
    assert decode(tokenizer, ids[:first]).endswith("🙃🙃")
    match = search.match(ids[:first])
    assert match is not None
    assert match.text.endswith("🙃🙂")


class Tidy:
    """Letters; a space before a mark is taken away when the mark comes."""

    def decode(self, ids: list[int], **_: Any) -> str:
        return bytes(ids).decode().replace(" .", ".").replace(" ,", ",")


@given(st.text(" .,ab", max_size=60))
def test_text_that_is_taken_back(text: str) -> None:
    """What was given out is not taken back; all that comes after has its place in the whole."""
    stream, grown, tidy = TextStream(Tidy()), GrowingText(lambda ids: Tidy().decode(ids)), Tidy()
    given, rebuilt = "", ""
    for n, letter in enumerate(text.encode(), 1):
        given += stream.add(letter)
        assert grown.add(letter)
        rebuilt = rebuilt[: len(rebuilt) - grown.revised] + grown.fresh
        assert rebuilt == tidy.decode(list(text[:n].encode()))
        assert len(given) == max(len(tidy.decode(list(text[:k].encode()))) for k in range(n + 1))


@given(st.text("ab ,", max_size=40), st.lists(st.text("ab,", min_size=1, max_size=3), min_size=1, max_size=2))
def test_a_stop_string_in_text_that_is_taken_back(text: str, stops: list[str]) -> None:
    tidy, search = Tidy(), StopStrings(Tidy(), stops)
    for n, letter in enumerate(text.encode(), 1):
        whole = tidy.decode(list(text[:n].encode()))
        found = any(stop in whole for stop in stops)
        assert search.add(letter) == found
        if found:
            return


def test_a_fork_goes_on_by_itself() -> None:
    tokenizer = byte_level()
    ids = encoded(tokenizer, CORPUS[1] * 3)
    decoded = GrowingText(lambda row: decode(tokenizer, row))
    for token in ids[:40]:
        decoded.add(token)
    other = decoded.fork()
    for token in encoded(tokenizer, "something else altogether, and more of it than fits the window"):
        other.add(token)
    text = ""
    for token in ids[40:]:
        if decoded.add(token):
            text += decoded.fresh
    assert text
    assert decode(tokenizer, ids).endswith(text)


def test_a_decoder_that_raises_leaves_no_trace() -> None:
    broken = [False]

    def decoder(ids: list[int]) -> str:
        if broken[0]:
            raise MemoryError
        return bytes(ids).decode(errors="replace")

    text = GrowingText(decoder)
    got = ""
    for n, letter in enumerate("żółw 🙂 ".encode() * 12):
        if n % 7 == 0:
            broken[0] = True
            with pytest.raises(MemoryError):
                text.add(letter)
            broken[0] = False
        if text.add(letter):
            got += text.fresh
    assert got == "żółw 🙂 " * 12
