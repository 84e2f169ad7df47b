"""`stream`, `step` and text: pieces that add up, and nothing left behind by readers who go away."""

from __future__ import annotations

import gc
from typing import Any

import pytest
from engine_testkit import alone, drained, make_engine, params, tokens_of, twin

from radixkv.demo.tiny import make_tiny
from radixkv.engine.detokenize import TextStream

TEXT = "The quick brown fox jumps over the lazy dog. "


@pytest.fixture(scope="module")
def pair() -> Any:
    return make_tiny()


def test_the_pieces_of_a_stream_are_the_whole(pair: Any) -> None:
    model, tokenizer = pair
    engine = make_engine(model, tokenizer=tokenizer)
    (whole,) = engine.generate([TEXT], params(20))
    outs = list(engine.stream(TEXT, params(20)))
    assert [o.token_id for o in outs] == whole.token_ids
    assert "".join(o.text or "" for o in outs) == whole.text
    assert [o.finished for o in outs] == [False] * 19 + [True]
    assert outs[-1].completion is not None
    assert outs[-1].completion.token_ids == whole.token_ids
    assert outs[-1].completion.num_cached_tokens > 0
    assert whole.token_ids == alone(twin(model), tokenizer(TEXT)["input_ids"], 20)
    drained(engine)


def test_two_streams_and_a_request_take_turns(pair: Any) -> None:
    model, tokenizer = pair
    engine = make_engine(model, tokenizer=tokenizer)
    expected = [c.token_ids for c in engine.generate([TEXT, TEXT + "x", "y"], params(9))]
    rid = engine.add_request("y", params(9))
    one, two = engine.stream(TEXT, params(9)), engine.stream(TEXT + "x", params(9))
    got: list[list[Any]] = [[], []]
    for a, b in zip(one, two, strict=True):
        got[0].append(a.token_id)
        got[1].append(b.token_id)
    assert got == expected[:2]
    outs = []
    while engine.has_unfinished:
        outs += engine.step()
    assert [o.token_id for o in outs] == expected[2]
    assert {o.rid for o in outs} == {rid}
    drained(engine)


def test_generate_leaves_the_outputs_of_others_to_them(pair: Any) -> None:
    model, tokenizer = pair
    engine = make_engine(model, tokenizer=tokenizer)
    (expected,) = tokens_of(engine.generate(["y"], params(9)))
    engine.add_request("y", params(9))
    engine.generate([TEXT], params(20))
    assert [o.token_id for o in engine.step()] == expected
    drained(engine)


@pytest.mark.parametrize("how", ["close", "with", "drop", "unread"])
def test_a_reader_who_goes_away_leaves_nothing(pair: Any, how: str) -> None:
    model, tokenizer = pair
    engine = make_engine(model, tokenizer=tokenizer)
    stream = engine.stream(TEXT, params(50))
    if how != "unread":
        next(stream)
    if how == "close":
        stream.close()
        assert list(stream) == []
    elif how == "with":
        with stream:
            next(stream)
    del stream
    gc.collect()
    assert not engine.has_unfinished
    drained(engine)


class _Broken:
    """Decodes what another tokenizer decodes, but for the nth call."""

    def __init__(self, tokenizer: Any, nth: int) -> None:
        self._tokenizer, self._left = tokenizer, nth

    def __call__(self, text: str) -> Any:
        return self._tokenizer(text)

    def decode(self, ids: Any, **kwargs: Any) -> str:
        self._left -= 1
        if self._left == 0:
            raise RuntimeError("a token of no text")
        return str(self._tokenizer.decode(ids, **kwargs))


@pytest.mark.parametrize("nth", [1, 2, 5, 9])
def test_a_tokenizer_that_raises_ends_its_own_sequence_only(pair: Any, nth: int) -> None:
    model, tokenizer = pair
    expected = tokens_of(make_engine(model, tokenizer=tokenizer).generate(["a", "b", "c"], params(6)))
    engine = make_engine(model, tokenizer=_Broken(tokenizer, nth))
    rids = [engine.add_request(text, params(6)) for text in "abc"]
    done = {}
    while engine.has_unfinished:
        for out in engine.step():
            if out.completion is not None:
                done[out.rid] = out.completion
    failed = [rid for rid in rids if done[rid].error is not None]
    assert len(failed) == 1
    assert done[failed[0]].finish_reason == "error"
    for rid, tokens in zip(rids, expected, strict=True):
        assert done[rid].token_ids == tokens[: len(done[rid].token_ids)]
        assert rid in failed or done[rid].token_ids == tokens
    drained(engine)
    engine = make_engine(model, tokenizer=_Broken(tokenizer, min(nth, 3)))
    with pytest.warns(UserWarning, match="no text"):
        outs = engine.generate(["a", "b", "c"], params(6))
    assert sum(out.error is not None for out in outs) == 1
    drained(engine)


def test_stop_strings_cut_the_text(pair: Any) -> None:
    model, tokenizer = pair
    engine = make_engine(model, tokenizer=tokenizer)
    (whole,) = engine.generate([TEXT], params(40))
    assert whole.text is not None
    stop = whole.text[12:15]
    at = whole.text.index(stop)
    (out,) = engine.generate([TEXT], params(40, stop=stop))
    assert out.finish_reason == "stop"
    assert out.text == whole.text[:at]
    assert out.token_ids == whole.token_ids[: len(out.token_ids)]
    outs = list(engine.stream(TEXT, params(40, stop=[stop, "never there"])))
    assert "".join(o.text or "" for o in outs) == whole.text[:at]
    drained(engine)


def test_a_stop_string_may_stay_in_the_text(pair: Any) -> None:
    model, tokenizer = pair
    engine = make_engine(model, tokenizer=tokenizer)
    (whole,) = engine.generate([TEXT], params(40))
    assert whole.text is not None
    stop = whole.text[12:15]
    wanted = params(40, stop=[stop, "never there"], include_stop_str_in_output=True)
    (out,) = engine.generate([TEXT], wanted)
    assert out.text == whole.text[: whole.text.index(stop) + len(stop)]
    assert "".join(o.text or "" for o in engine.stream(TEXT, wanted)) == out.text
    drained(engine)


def test_a_stop_string_that_comes_too_soon_does_not_silence_the_stream(pair: Any) -> None:
    model, tokenizer = pair
    engine = make_engine(model, tokenizer=tokenizer)
    (whole,) = engine.generate([TEXT], params(30))
    assert whole.text is not None
    stop = whole.text[3:5]
    assert stop not in whole.text[5:]
    outs = list(engine.stream(TEXT, params(30, stop=stop, min_new_tokens=12)))
    assert "".join(out.text or "" for out in outs) == whole.text
    assert sum(bool(out.text) for out in outs) > 20
    drained(engine)


def test_chats_go_through_the_template(pair: Any) -> None:
    model, tokenizer = pair
    template = tokenizer.chat_template
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    try:
        engine = make_engine(model, tokenizer=tokenizer)
        chat = [{"role": "user", "content": "hello"}]
        text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        expected = alone(twin(model), ids, 6)
        assert tokens_of(engine.generate([chat, chat], params(6))) == [expected] * 2
        assert tokens_of(engine.generate(chat, params(6))) == [expected]
    finally:
        tokenizer.chat_template = template
    engine = make_engine(model, tokenizer=tokenizer)
    with pytest.warns(UserWarning, match="no chat template"):
        engine.generate([chat], params(6))


class _Letters:
    """Token ids are bytes of UTF-8."""

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return bytes(ids).decode("utf-8", errors="replace")


@pytest.mark.parametrize("text", ["plain", "żółć 漢字 🙂 end", "aab", "stop", "xSTOx", ""])
@pytest.mark.parametrize("stop", [(), ("STOP",), ("aab", "ab")])
def test_pieces_never_hold_half_a_character_or_half_a_stop_string(text: str, stop: tuple[str, ...]) -> None:
    stream = TextStream(_Letters(), stop)
    end = min([at for at in map(text.find, stop) if at >= 0], default=len(text))
    given = ""
    for byte in text.encode():
        given += stream.add(byte)
        assert text[:end].startswith(given)
    held = text[len(given) : end]
    assert not held or any(word.startswith(held) for word in stop)
