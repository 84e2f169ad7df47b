"""Traces in all their shapes, and what is wrong with those that are none."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import os
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.core import Retention
from radixkv.errors import InvalidRequestError
from radixkv.replay import read_trace
from radixkv.replay.kv_size import kv_size
from radixkv.replay.tokenizing import as_tokenizer

GOOD = {"timestamp": 5, "input_length": 700, "output_length": 3, "hash_ids": [0, 1]}


def write(path, *lines):
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return path


class Letters:
    """A tokenizer: one id for each letter, a begin token, and a template that writes roles."""

    chat_template = "{{ messages }}"

    def encode(self, text, add_special_tokens=True):
        return [0] * add_special_tokens + [ord(letter) for letter in text]

    def apply_chat_template(self, messages, tools=None, tokenize=True, add_generation_prompt=False):
        assert not tokenize
        assert add_generation_prompt
        if messages[0]["role"] == "nobody":
            raise ValueError("roles must\nalternate")
        said = "".join(f"<{m['role']}>{m['content']}" for m in messages)
        return f"{json.dumps(tools) if tools else ''}{said}<assistant>"


# -- shapes --------------------------------------------------------------------------------------------------


def test_hash_ids(tmp_path):
    trace = read_trace(write(tmp_path / "t.jsonl", GOOD, {**GOOD, "timestamp": 5.5, "hash_ids": [0, 2]}))
    assert (trace.shape, trace.by_blocks, trace.block_size, len(trace)) == ("hash_ids", True, 512, 2)
    first, second = trace.requests
    assert (first.line, first.num_tokens, first.timestamp) == (1, 700, 5.0)
    assert second.tokens().tolist() == [0, 2]
    assert second.tokens().dtype == np.int64
    assert (trace.prompt_tokens, trace.num_blocks) == (1400, 4)


def test_hash_ids_of_another_block_size():
    assert read_trace([{"input_length": 33, "hash_ids": [4, 5, 6]}], block_size=16).block_size == 16


def test_token_ids(tmp_path):
    trace = read_trace(write(tmp_path / "t.jsonl", {"token_ids": [3, 2**40]}, {"token_ids": [1]}))
    assert (trace.shape, trace.by_blocks, trace.block_size) == ("token_ids", False, 16)
    assert [r.tokens().tolist() for r in trace.requests] == [[3, 2**40], [1]]
    assert [r.num_tokens for r in trace.requests] == [2, 1]


def test_prompts():
    trace = read_trace([{"prompt": "ab"}], tokenizer=Letters())
    assert trace.requests[0].tokens().tolist() == [0, 97, 98]


def test_messages_go_through_the_template_and_get_no_second_begin_token():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    chats = [
        {"messages": [{"role": "user", "content": "hi"}]},
        {"messages": [{"role": "user", "content": parts}], "tools": [{"name": "t"}]},
        {"messages": [{"role": "assistant", "content": None, "tool_calls": []}]},
    ]
    texts = ["<user>hi<assistant>", '[{"name": "t"}]<user>a\nb<assistant>', "<assistant><assistant>"]
    trace = read_trace(chats, tokenizer=Letters())
    assert ["".join(map(chr, r.tokens())) for r in trace.requests] == texts


def test_a_real_tokenizer_by_its_file_and_by_its_folder(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[unk]": 0, "a": 1, "b": 2, ":": 3}, "[unk]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    prompts = [{"prompt": "a b a c"}]
    assert read_trace(prompts, tokenizer=tmp_path / "tokenizer.json").requests[0].tokens().tolist() == [
        1, 2, 1, 0,
    ]  # fmt: skip
    assert read_trace(prompts, tokenizer=made).requests[0].tokens().tolist() == [1, 2, 1, 0]
    folder = tmp_path / "model"
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=made, unk_token="[unk]")
    fast.chat_template = "{% for m in messages %}{{ m.role }} : {{ m.content }} {% endfor %}b"
    fast.save_pretrained(folder)
    chats = [{"messages": [{"role": "a", "content": "b"}]}]
    assert read_trace(chats, tokenizer=str(folder)).requests[0].tokens().tolist() == [1, 3, 2, 2]
    with pytest.raises(InvalidRequestError, match="no chat template"):
        read_trace(chats, tokenizer=str(tmp_path / "tokenizer.json"), skip_bad=True)
    fast.chat_template = None
    with pytest.raises(InvalidRequestError, match="no chat template"):
        read_trace(chats, tokenizer=fast)


def test_retention():
    items = [
        {"token_ids": [1], "timestamp": 0},
        {"token_ids": [1], "timestamp": 0, "priority": -2},
        {"token_ids": [1], "timestamp": 0, "ttl": 1.5},
        {"token_ids": [1], "timestamp": 0, "priority": 3, "ttl": 60},
    ]
    said = [request.retention for request in read_trace(items).requests]
    assert said == [None, Retention(-2), Retention(1, 1.5), Retention(3, 60.0)]


# -- sources -------------------------------------------------------------------------------------------------


def test_gzip_is_recognised_whatever_its_name(tmp_path):
    lines = write(tmp_path / "t.jsonl", GOOD, GOOD).read_bytes()
    for name in ("t.jsonl.gz", "t.log"):
        (tmp_path / name).write_bytes(gzip.compress(lines))
        assert len(read_trace(tmp_path / name)) == 2
    # Members one behind the other, as logs that were rotated and joined.
    (tmp_path / "t.gz").write_bytes(gzip.compress(lines) + gzip.compress(lines))
    assert len(read_trace(str(tmp_path / "t.gz"))) == 4


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_standard_input(monkeypatch, pack):
    data = pack((json.dumps(GOOD) + "\n").encode())

    class Stdin:
        buffer = io.BytesIO(data)

    monkeypatch.setattr(sys, "stdin", Stdin)
    trace = read_trace("-")
    assert (trace.name, len(trace)) == ("stdin", 1)


def test_a_file_object_stays_open(tmp_path):
    path = write(tmp_path / "t.jsonl", GOOD)
    with path.open("rb") as file:
        assert len(read_trace(file)) == 1
        assert not file.closed
    with path.open() as file, pytest.raises(InvalidRequestError, match="open it with 'rb'"):
        read_trace(file)


def test_blank_lines_windows_line_ends_and_byte_order_marks(tmp_path):
    path = tmp_path / "t.jsonl"
    line = json.dumps(GOOD).encode()
    path.write_bytes(b"\xef\xbb\xbf" + line + b"\r\n\r\n  \n" + line)
    assert [request.line for request in read_trace(path).requests] == [1, 4]


def test_limit_reads_no_further(tmp_path):
    path = write(tmp_path / "t.jsonl", GOOD, GOOD, "nonsense")
    assert len(read_trace(path, limit=2)) == 2


def test_progress_reaches_the_size_of_the_file(tmp_path):
    path = write(tmp_path / "t.jsonl", *[GOOD] * 500)
    calls = []
    read_trace(path, progress=lambda *call: calls.append(call))
    size = os.path.getsize(path)
    assert {(what, total) for what, _, total in calls} == {("Reading", size)}
    done = [done for _, done, _ in calls]
    assert done == sorted(done)
    assert done[-1] == size


# -- what is wrong -------------------------------------------------------------------------------------------

BAD_LINES = [
    ('{"hash_ids": [1], "input_length": 5', "line 2: not JSON"),
    ("[1, 2]", "line 2: a request is a JSON object, this is a list"),
    ("3", "this is the number 3"),
    ('"text"', "this is a text"),
    ("null", "this is null"),
    ("[" * 100_000, "nested too deeply"),
    ('{"hash_ids": [0, 1], "input_length": 1' + "0" * 5000 + "}", "line 2: not JSON of a request"),
    ({"token_ids": [1]}, "no hash_ids"),
    ({"hash_ids": [0, 1]}, "no input_length"),
    ({**GOOD, "input_length": -700}, "input_length must be at least 1, got -700"),
    ({**GOOD, "input_length": 0, "hash_ids": []}, "input_length must be at least 1, got 0"),
    ({**GOOD, "input_length": 700.0}, "input_length must be an integer, got the number 700.0"),
    ({**GOOD, "input_length": True}, "input_length must be an integer, got true or false"),
    ({**GOOD, "input_length": 10**30}, "fits into int64"),
    ({**GOOD, "output_length": -1}, "output_length must be at least 0, got -1"),
    ({**GOOD, "output_length": "many"}, "output_length must be an integer, got a text"),
    ({**GOOD, "hash_ids": [0, 1, 2]}, "3 hash_ids, but an input_length of 700 fills 2 blocks of 512"),
    ({**GOOD, "hash_ids": [0]}, "1 hash_ids, but an input_length of 700 fills 2 blocks of 512"),
    ({**GOOD, "hash_ids": [0, -1]}, "hash_ids: ids must not be negative, got -1"),
    ({**GOOD, "hash_ids": [0, 2**63]}, "hash_ids: an id does not fit into int64"),
    ({**GOOD, "hash_ids": [0, "1"]}, "hash_ids: ids must be integers, got str among them"),
    ({**GOOD, "hash_ids": [0, True]}, "hash_ids: ids must be integers, got bool among them"),
    ({**GOOD, "hash_ids": [0, [1]]}, "hash_ids: ids must be integers, got list among them"),
    ({**GOOD, "hash_ids": "01"}, "hash_ids must be a list of integers, got a text"),
    ({**GOOD, "timestamp": 4}, "timestamp 4 goes back: line 1 has 5"),
    ({**GOOD, "timestamp": "noon"}, "timestamp must be a number, got a text"),
    ('{"hash_ids": [0], "input_length": 5, "timestamp": NaN}', "timestamp must be a finite number"),
    ({**GOOD, "timestamp": 10**400}, "timestamp must be a finite number"),
    ({**GOOD, "priority": 1.5}, "priority must be an integer"),
    ({**GOOD, "priority": 10**300}, "priority does not fit into int64"),
    ({**GOOD, "ttl": 0}, "ttl must be a number of seconds above 0, got 0"),
    ({**GOOD, "timestamp": None, "ttl": 5}, "a ttl without a timestamp"),
]


@pytest.mark.parametrize(("line", "reason"), BAD_LINES)
def test_a_bad_line_is_named_with_the_reason_or_skipped(tmp_path, line, reason):
    path = write(tmp_path / "t.jsonl", GOOD, line, GOOD)
    with pytest.raises(InvalidRequestError) as caught:
        read_trace(path)
    assert "line 2: " in str(caught.value)
    assert reason in str(caught.value)
    assert len(str(caught.value)) < 400
    trace = read_trace(path, skip_bad=True)
    assert [request.line for request in trace.requests] == [1, 3]
    assert trace.num_skipped == 1


@pytest.mark.parametrize(
    ("item", "reason"),
    [
        ({"prompt": ["a"]}, "prompt must be a text, got a list"),
        ({"messages": []}, "messages must be a list of at least one message"),
        ({"messages": "hi"}, "messages must be a list"),
        ({"messages": ["hi"]}, "a message is an object with a role"),
        ({"messages": [{"content": "hi"}]}, "a message is an object with a role"),
        ({"messages": [{"role": "user", "content": 3}]}, "content of a message must be a text"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "a part of type image_url"),
        ({"messages": [{"role": "nobody", "content": ""}]}, "the tokenizer refuses it: roles must"),
    ],
)
def test_bad_texts(item, reason):
    with pytest.raises(InvalidRequestError, match="line 1: .*" + reason):
        read_trace([item], tokenizer=Letters())


def test_empty_token_lists_are_no_requests():
    with pytest.raises(InvalidRequestError, match="line 1: token_ids is empty"):
        read_trace([{"token_ids": []}])


def test_the_first_good_line_tells_the_shape(tmp_path):
    path = write(tmp_path / "t.jsonl", "?", {"id": 1}, {"token_ids": [1]})
    trace = read_trace(path, skip_bad=True)
    assert (trace.shape, trace.num_skipped) == ("token_ids", 2)
    with pytest.raises(InvalidRequestError, match="line 1: not JSON"):
        read_trace(path)


@pytest.mark.parametrize("shape", ["prompt", "messages"])
@pytest.mark.parametrize("skip_bad", [False, True])
def test_texts_need_a_tokenizer(shape, skip_bad):
    with pytest.raises(InvalidRequestError, match="--tokenizer"):
        read_trace([{shape: "x"}], skip_bad=skip_bad)


class TransportError(Exception):
    """As httpx names it."""


@pytest.mark.parametrize(
    ("error", "options"),
    [
        (None, {}),
        (ValueError("a name that no hub takes"), {}),
        (ConnectionError("no network"), {"local_files_only": True}),
        (type("ConnectError", (TransportError,), {})(), {"local_files_only": True}),
    ],
)
def test_the_hub_is_asked_once(monkeypatch, error, options):
    hub = pytest.importorskip("huggingface_hub.utils")
    transformers = pytest.importorskip("transformers")
    asked, loaded = [], []

    def ask(url, timeout):
        asked.append(url)
        if error is not None:
            raise error
        return SimpleNamespace(status_code=404)  # an answer, whatever it says

    def load(name, **given):
        loaded.append((name, given))
        raise OSError("cannot connect.")

    monkeypatch.setattr(hub, "get_session", lambda: SimpleNamespace(head=ask))
    for kind in ("AutoTokenizer", "AutoConfig"):
        monkeypatch.setattr(getattr(transformers, kind), "from_pretrained", load)
    for use, what in ((as_tokenizer, "a tokenizer.json"), (kv_size, "a config.json")):
        with pytest.raises(InvalidRequestError, match="cannot be loaded: cannot connect") as caught:
            use("some/model")
        assert str(caught.value).endswith(f"give a folder or {what})") == bool(options)
    assert len(asked) == 2
    assert asked[0].endswith("/some/model/resolve/main/config.json")
    assert loaded == [("some/model", options)] * 2


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("none.json", "no such file"),
        ("./none", "no such folder"),
        ("bad.json", "cannot be loaded"),
        (3, "got int"),
    ],
)
def test_tokenizers_that_cannot_be_had(tmp_path, monkeypatch, name, reason):
    pytest.importorskip("tokenizers")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(InvalidRequestError, match=reason) as caught:
        read_trace([{"prompt": "x"}], tokenizer=name)
    assert "\n" not in str(caught.value)


def test_packages_that_are_missing_are_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    for name in ("some/model", "tokenizer.json"):
        with pytest.raises(InvalidRequestError, match='install the extra "hf"'):
            read_trace([{"prompt": "x"}], tokenizer=name)


def test_nothing_in_it(tmp_path):
    for data in (b"", b"\n\n", gzip.compress(b"")):
        (tmp_path / "t.jsonl").write_bytes(data)
        for skip_bad in (False, True):
            with pytest.raises(InvalidRequestError, match="is empty"):
                read_trace(tmp_path / "t.jsonl", skip_bad=skip_bad)
    with pytest.raises(InvalidRequestError, match=r"all 2 lines were skipped, the first because of .*line 1"):
        read_trace(write(tmp_path / "t.jsonl", "?", "?"), skip_bad=True)


@pytest.mark.parametrize("skip_bad", [False, True])
def test_binary_files(tmp_path, skip_bad):
    path = tmp_path / "t.jsonl"
    path.write_bytes(b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR")
    with pytest.raises(InvalidRequestError, match="binary"):
        read_trace(path, skip_bad=skip_bad)
    path.write_bytes(gzip.compress(bytes(100)))
    with pytest.raises(InvalidRequestError, match="binary"):
        read_trace(path, skip_bad=skip_bad)
    path.write_bytes(b"\xff\xfe\xfa rubbish\n")
    with pytest.raises(InvalidRequestError, match=r"line 1: not UTF-8|all 1 lines were skipped"):
        read_trace(path, skip_bad=skip_bad)


@pytest.mark.parametrize("skip_bad", [False, True])
def test_damaged_gzip(tmp_path, skip_bad):
    packed = gzip.compress("".join(json.dumps({**GOOD, "timestamp": i}) + "\n" for i in range(5000)).encode())
    path = tmp_path / "t.gz"
    path.write_bytes(packed[: len(packed) // 2])
    with pytest.raises(InvalidRequestError, match=r"after line \d+: .* ends too early"):
        read_trace(path, skip_bad=skip_bad)
    damaged = bytearray(packed)
    damaged[len(packed) // 2 :] = os.urandom(len(packed) - len(packed) // 2)
    path.write_bytes(damaged)
    with pytest.raises(InvalidRequestError, match=r"damaged|too early|line"):
        read_trace(path)
    path.write_bytes(packed[:-8] + b"12345678")
    with pytest.raises(InvalidRequestError, match="damaged"):
        read_trace(path, skip_bad=skip_bad)


JSON_LIKE = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
FIELDS = ["hash_ids", "token_ids", "prompt", "messages", "input_length", "output_length", "timestamp", "ttl"]
REQUEST_LIKE = st.dictionaries(st.sampled_from([*FIELDS, "priority", "tools"]), JSON_LIKE, max_size=4)


@given(lines=st.lists(REQUEST_LIKE | JSON_LIKE, max_size=4), skip_bad=st.booleans())
def test_whatever_a_line_says_it_is_a_request_or_refused(lines, skip_bad):
    data = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
    with contextlib.suppress(InvalidRequestError):
        read_trace(io.BytesIO(data), tokenizer=Letters(), skip_bad=skip_bad)


@given(data=st.binary(max_size=200), packed=st.booleans(), skip_bad=st.booleans())
def test_whatever_bytes_a_file_holds_it_is_a_trace_or_refused(data, packed, skip_bad):
    data = b"\x1f\x8b" + data if packed else data
    with contextlib.suppress(InvalidRequestError):
        read_trace(io.BytesIO(data), skip_bad=skip_bad)


def test_sources_that_cannot_be_read(tmp_path, monkeypatch):
    for source, reason in [
        (tmp_path / "none.jsonl", "no such file"),
        (tmp_path, "is a folder"),
        ("a\0b", "cannot be read"),
        (3, "a path, a file or an iterable, got int"),
        (b"path", "got bytes"),
    ]:
        with pytest.raises(InvalidRequestError, match=reason):
            read_trace(source)
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(InvalidRequestError, match="standard input is closed"):
        read_trace("-")
    with pytest.raises(InvalidRequestError, match="block_size"):
        read_trace([GOOD], block_size=0)
    with pytest.raises(InvalidRequestError, match="limit"):
        read_trace([GOOD], limit=0)


def test_a_request_that_fits_nowhere_is_named():
    trace = read_trace([{"token_ids": [1] * 10}, {"token_ids": [1] * 50}, {"token_ids": [1] * 49}])
    with pytest.raises(InvalidRequestError, match=r"line 2: 50 tokens need 4 blocks of 16, .* at least 4"):
        trace.require_room(3)
    trace.require_room(4)
    assert trace.fitting(4) is trace
    assert [r.line for r in trace.fitting(1).requests] == [1]
    assert trace.fitting(1).num_skipped == 2
    with pytest.raises(InvalidRequestError, match="line 1"):
        read_trace([{"token_ids": [1] * 50}]).fitting(3)
