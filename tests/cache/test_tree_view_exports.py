"""What tree_view writes: every format parses, whatever the tokens say, and says the same."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
import sys
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pydot
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from radixkv import BlockPool, RadixTree, TreeView, errors, tree_view
from radixkv.cache.tree_view.labels import Labels, age, block_ranges, namespace_label, one_line, shorten
from radixkv.core import canonical_namespace

HOSTILE = [
    "</script><script>alert(1)</script>",
    "<!--",
    "]]>",
    "%%LINES%%",
    "a\nb\r\nc\td\x00e\x07f\x1b[31mred\x1b[0m",
    "\"quoted\" 'single' \\backslash\\",
    "\\",
    '\\"',
    "&amp; &lt; &#0; &",
    "\ud800 lone \udfff",
    "\ufffd\ufffe\uffff",
    "\u202eright to left\u2066\u200b",
    "\u2028\u2029\x85\x0b\x0c",
    "[bold red]markup[/bold red] [/] :smile: {x} %s",
    "漢字 🎉 e\u0301",
    "}; n0 -> n1; //",
    "</pre><b>",
]
VOID = {"meta", "input", "br", "link", "hr"}


class Page(HTMLParser):
    """Fails where a tag is not closed in order, and keeps the text of rows and all scripts."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.scripts: list[str] = []
        self.labels: list[str] = []
        self.attributes: list[tuple[str, str, str | None]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)
        if tag == "script":
            self.scripts.append("")
        if tag == "bdi":
            self.labels.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts[-1] += data
        if self.open and self.open[-1] == "bdi":
            self.labels[-1] += data

    def handle_comment(self, data: str) -> None:
        raise AssertionError(f"a comment: {data}")


def parsed(html: str) -> Page:
    page = Page()
    page.feed(html)
    page.close()
    assert page.open == []
    return page


def shown_in_dot(source: str) -> dict[str, str]:
    """The labels of all boxes, as Graphviz reads them."""
    (graph,) = pydot.graph_from_dot_data(source)
    labels = {}
    for node in graph.get_nodes():
        if node.get_name() in ("node", "edge", "graph"):
            continue
        text = node.get("label")
        assert text[0] == text[-1] == '"'
        labels[node.get_name()] = text[1:-1]
    assert all(edge.get_source() in labels and edge.get_destination() in labels for edge in graph.get_edges())
    return labels


def unescaped(label: str) -> str:
    """The inverse of Graphviz's escapes: `\\n` ends a row, a backslash keeps the next character, entities."""
    import html

    text = re.sub(r"\\(.)", lambda found: "\n" if found[1] == "n" else found[1], label, flags=re.S)
    return html.unescape(text)


def view_of(texts: list[str], **options: Any) -> TreeView:
    """A tree whose tokens stand for whole texts."""
    tree = RadixTree(BlockPool(max(1, 2 * len(texts))), 1)
    for number in range(len(texts)):
        tokens = [number, number]
        own = tree.allocate(2)
        tree.pool.release(tree.insert(tokens, own, namespace=texts[number]).blocks)
    return tree_view(tree, tokenizer=lambda ids: texts[ids[0]], max_nodes=1000, **options)


ANY_TEXT = st.text(st.characters(exclude_categories=[]), max_size=80)


@given(st.lists(ANY_TEXT | st.sampled_from(HOSTILE), min_size=1, max_size=4, unique=True))
@example(HOSTILE)
def test_every_format_parses_and_shows_the_same_labels(texts: list[str]) -> None:
    view = view_of(texts)
    wanted = [line.label for line in view.lines]
    assert all(label.isprintable() for label in wanted)

    text = str(view)
    assert len(text.splitlines()) == len(wanted) + 2
    assert all(row.endswith(label.rstrip()) for row, label in zip(text.splitlines()[2:], wanted, strict=True))

    assert parsed(view._repr_html_()).attributes[0][0] == "pre"
    page = parsed(view.to_html())
    assert page.labels == wanted
    assert len(page.scripts) == 1
    assert not [a for a in page.attributes if a[1].startswith("on") or a[1] in ("src", "href")]
    assert page.scripts == parsed(view_of(["plain"]).to_html()).scripts

    svg = ElementTree.fromstring(view.to_svg())
    space = "{http://www.w3.org/2000/svg}"
    groups = svg.findall(f"{space}g")
    assert [group.find(f"{space}text").text for group in groups] == wanted
    assert {element.tag.removeprefix(space) for element in svg.iter()} == {
        *("svg", "title", "style", "rect", "text", "path", "g")
    }

    dot = shown_in_dot(view.to_dot())
    assert [unescaped(label).split("\n")[0] for label in dot.values()] == wanted

    again = json.loads(view.to_json())
    assert again == view.to_dict()
    assert [line["label"] for line in again["lines"]] == wanted

    ascii_only = view.to_text(ascii_only=True)
    assert ascii_only.isascii()
    assert len(ascii_only.splitlines()) == len(wanted) + 2


@pytest.mark.skipif(shutil.which("dot") is None, reason="Graphviz is not installed")
def test_graphviz_draws_it() -> None:
    view = view_of(HOSTILE)
    done = subprocess.run(
        ["dot", "-Tsvg"], input=view.to_dot().encode(), capture_output=True, check=True, timeout=60
    )
    assert done.stderr == b""
    drawn = ElementTree.fromstring(done.stdout)
    texts = {element.text for element in drawn.iter("{http://www.w3.org/2000/svg}text")}
    plain = {line.label for line in view.lines if line.label == line.label.strip() and "  " not in line.label}
    assert {text.replace("\xa0", " ") for text in texts} >= plain


def test_colours_are_not_taken_from_the_text() -> None:
    from rich.console import Console

    view = view_of(HOSTILE)
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=60, color_system="truecolor")
    console.print(view)
    rows = out.getvalue().splitlines()
    assert len(rows) == len(view.lines) + 2
    plain = [re.sub(r"\x1b\[[0-9;]*m", "", row) for row in rows]
    assert not any("\x1b" in row for row in plain)
    assert any("[bold red]markup" in row for row in plain)
    assert "\x1b[31m" not in out.getvalue()
    capture = io.StringIO()
    view.print(Console(file=capture, width=200))
    assert capture.getvalue().split() == str(view).split()


def test_print_without_rich_and_on_a_terminal_that_knows_only_ascii(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    view = view_of(["äöü", "two"])
    view.print()
    assert capsys.readouterr().out == f"{view}\n"
    monkeypatch.setitem(sys.modules, "rich.console", None)
    view.print()
    assert capsys.readouterr().out == f"{view}\n"
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    view.print()
    sys.stdout.flush()
    assert raw.getvalue().decode() == view.to_text(ascii_only=True) + "\n"


# ------------------------------------------------------------------------------------------------------ labels


@given(ANY_TEXT, st.integers(8, 40))
def test_labels_fit_and_keep_both_ends(text: str, room: int) -> None:
    label = shorten(text, room)
    whole = one_line(text)
    assert len(label) <= room
    if len(whole) <= room:
        assert label == whole
    else:
        start, _, end = label.partition("…") if "…" not in text else (label[:1], "", label[-1:])
        assert whole.startswith(start)
        assert whole.endswith(end)


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=400), st.integers(8, 60), st.data())
def test_ids_fit_and_keep_both_ends(tokens: list[int], room: int, data: Any) -> None:
    cut = data.draw(st.integers(0, len(tokens) - 1))
    pieces = [np.array(part, np.int64) for part in (tokens[:cut], tokens[cut:]) if part]
    label = Labels(None, room).of(pieces)[1:-1]
    if "…" not in label:
        assert label == ", ".join(map(str, tokens))
        assert len(label) <= room or len(tokens) == 1
        return
    assert len(label) <= room
    start, end = ([int(token) for token in part.split(",") if token.strip()] for part in label.split("…"))
    assert start
    assert tokens[: len(start)] == start
    assert not end or tokens[-len(end) :] == end
    assert len(start) + len(end) < len(tokens)


@given(st.text(max_size=300), st.integers(8, 40))
def test_text_of_bytes_cut_anywhere(text: str, room: int) -> None:
    tokens = np.frombuffer(text.encode() or b"x", np.uint8).astype(np.int64)
    label = Labels(lambda ids: bytes(ids).decode(errors="replace"), room).of([tokens])
    assert label[0] == label[-1] == '"'
    assert len(label) <= room + 2
    if "…" not in text:
        start, _, end = label[1:-1].partition("…")
        whole = one_line(text or "x")
        assert whole.startswith(start)
        assert whole.endswith(end)


class Skips:
    """Leaves special tokens out unless told not to."""

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return "".join("<s>" * (not skip_special_tokens) if i == 0 else chr(64 + i) for i in ids)


def test_tokenizers() -> None:
    tokens = [np.array([0, 1, 2])]
    assert Labels(Skips(), 20).of(tokens) == '"<s>AB"'
    assert Labels(lambda ids: "".join(chr(64 + i) for i in ids), 20).of(tokens) == '"@AB"'

    def fails(ids: list[int]) -> str:
        raise IndexError(f"{max(ids)} is out of the vocabulary\n")

    labels = Labels(fails, 20)
    assert labels.of(tokens) == "[0, 1, 2]"
    assert (labels.num_undecodable, labels.trouble) == (1, r"IndexError: 2 is out of the vocabulary\n")


def test_a_tokenizer_that_fails_is_named_once() -> None:
    tree = RadixTree(BlockPool(8), 2)
    for number in range(3):
        tree.pool.release(tree.insert([number, 5], tree.allocate(1)).blocks)

    def decode(ids: list[int]) -> str:
        return {0: "zero", 1: "one"}[ids[0]]

    view = tree_view(tree, tokenizer=decode)
    assert [line.label for line in view.lines[1:]] == ['"zero"', '"one"', "[2, 5]"]
    assert view.notes == ("1 line with token ids, as the tokenizer failed: KeyError: 2",)
    assert view.notes[0] in str(view)
    assert view.notes[0] in view.to_html()


def test_a_real_tokenizer() -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"<s>": 0, "hello": 1, "world": 2, "?": 3}, unk_token="?")
    )
    words.add_special_tokens(["<s>"])
    tree = RadixTree(BlockPool(8), 2)
    tree.pool.release(tree.insert([0, 1, 2], tree.allocate(2)).blocks)
    assert tree_view(tree, tokenizer=words).lines[1].label == '"<s> hello world"'


NAMES = st.recursive(
    st.none() | st.text(max_size=5) | st.binary(max_size=5),
    lambda inner: st.lists(inner).map(tuple),
    max_leaves=6,
)


@given(NAMES, NAMES)
def test_namespaces_that_differ_are_called_differently(first: Any, second: Any) -> None:
    a, b = canonical_namespace(first), canonical_namespace(second)
    assert (namespace_label(a, 10_000) == namespace_label(b, 10_000)) == (a == b)
    assert len(namespace_label(a, 30)) <= 30
    assert namespace_label(a).isprintable()


@pytest.mark.parametrize(
    "odd", [b"x", b"s5:a", b"t2:s1:a", b"s", b"s1:as1:b", b"sx:a", b"s1:\xff", b"nx", b"n"]
)
def test_what_is_no_namespace_is_a_digest(odd: bytes) -> None:
    assert re.fullmatch("[0-9a-f]{16}", namespace_label(odd))


def test_units() -> None:
    assert [age(s) for s in (0, 59, 61, 3600, 47 * 3600, 48 * 3600)] == [
        *("0 s", "59 s", "1 min", "1 h", "47 h", "2 d")
    ]
    assert block_ranges([0, 1, 2, 7, 9, 10]) == "0-2, 7, 9-10"
    assert block_ranges([2, 1, 0]) == "2, 1, 0"
    assert block_ranges(range(0, 40, 2)) == "0, 2, 4, 6, 8, 10, … 14 more"


# -------------------------------------------------------------------------------------------------- json, files


def test_json_says_all() -> None:
    tree = RadixTree(BlockPool(16), 4)
    tree.pool.release(tree.insert(range(6), tree.allocate(2), "acme").blocks)
    with tree.match(range(4), "acme"):
        data = json.loads(tree_view(tree, block_ids=True, token_ids=True).to_json())
    assert data["schema"] == 1
    assert data["totals"] == {
        "namespaces": 1,
        "nodes": 1,
        "blocks": 2,
        "tokens": 6,
        "pinned_blocks": 1,
        "pool_blocks": 16,
        "free_blocks": 14,
    }
    line = data["lines"][1]
    assert line.pop("age_s") >= 0
    assert line == {
        "id": 1,
        "parent": 0,
        "depth": 1,
        "kind": "nodes",
        "last": True,
        "label": "[0, 1, 2, 3, 4, 5]",
        "namespace": '"acme"',
        "own": {"nodes": 1, "blocks": 2, "tokens": 6, "pinned_blocks": 1},
        "subtree": {"nodes": 1, "blocks": 2, "tokens": 6, "pinned_blocks": 1},
        "start": 0,
        "references": 1,
        "hits": 1,
        "block_ids": [0, 1],
        "token_ids": [0, 1, 2, 3, 4, 5],
    }
    assert "block_ids" not in tree_view(tree).to_dict()["lines"][1]


@pytest.mark.parametrize("suffix", [".txt", ".dot", ".svg", ".html", ".json", ".HTML"])
def test_save(tmp_path: Path, suffix: str) -> None:
    view = view_of(HOSTILE)
    path = tmp_path / f"view{suffix}"
    path.write_text("old")
    assert view.save(str(path)) == path
    texts = {
        ".txt": f"{view}\n",
        ".dot": view.to_dot(),
        ".svg": view.to_svg(),
        ".html": view.to_html(),
        ".json": view.to_json() + "\n",
    }
    assert path.read_text(encoding="utf-8") == texts[suffix.lower()]
    assert os.listdir(tmp_path) == [path.name]
    umask = os.umask(0)
    os.umask(umask)
    assert path.stat().st_mode & 0o777 == 0o666 & ~umask


def test_save_says_what_it_cannot_do_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    view = view_of(["a"])
    with pytest.raises(errors.InvalidRequestError, match=r"view.png: the name must end in .txt, .dot, .svg"):
        view.save(tmp_path / "view.png")
    with pytest.raises(errors.InvalidRequestError, match="must end in"):
        view.save(tmp_path / "view")
    with pytest.raises(FileNotFoundError):
        view.save(tmp_path / "no folder" / "view.svg")

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    (tmp_path / "view.svg").write_text("old")
    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        view.save(tmp_path / "view.svg")
    assert os.listdir(tmp_path) == ["view.svg"]
    assert (tmp_path / "view.svg").read_text() == "old"


def test_a_page_needs_nothing_else() -> None:
    page = view_of(HOSTILE).to_html()
    assert "default-src 'none'" in page
    assert not re.search(r"(?:src|href|url|@import)\s*[=(]", page.replace("data-", ""))
    svg = view_of(["plain"]).to_svg()
    assert re.findall(r"https?://[^\"]+", svg) == ["http://www.w3.org/2000/svg"]


def test_physical_blocks_are_shown_on_request() -> None:
    tree = RadixTree(BlockPool(16), 1)
    tree.pool.release(tree.insert(range(3), tree.allocate(3)).blocks)
    view = tree_view(tree, block_ids=True)
    for text in (str(view), view.to_dot(), view.to_svg(), view.to_html()):
        assert "blocks 0-2" in text
    view = tree_view(tree)
    for text in (str(view), view.to_dot(), view.to_svg(), view.to_html()):
        assert "blocks 0-2" not in text


def test_the_drawing_in_the_docs_is_the_one_of_its_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    docs = Path(__file__).resolve().parents[2] / "docs"
    blocks = re.findall(
        r"^```python\n(.*?)^```$", (docs / "guides" / "tree-view.md").read_text(), re.M | re.S
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(time, "monotonic", lambda: 1000.0)
    names: dict[str, Any] = {}
    for code in blocks:
        if "for_model" not in code:  # the first needs a model, the others stand alone
            exec(code, names)
    assert (tmp_path / "tree.svg").read_text() == (docs / "assets" / "tree-view.svg").read_text()
    taken = re.compile(r"Taken [^<]*")
    page, shown = (path.read_text() for path in (tmp_path / "tree.html", docs / "assets" / "tree-view.html"))
    assert taken.sub("", page) == taken.sub("", shown), (
        "make it again: view.save('docs/assets/tree-view.html')"
    )
