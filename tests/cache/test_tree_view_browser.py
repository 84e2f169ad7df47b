"""The page of tree_view in a real browser: keys, mouse, search. Skipped where there is none."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from radixkv import BlockPool, RadixTree, tree_view

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium")

HOSTILE = "</script><script>document.title='hacked'</script><img src=x onerror=\"document.title='hacked'\">"

# Runs after the page's own script; what `say` is given ends up in an attribute that --dump-dom shows.
DRIVER = """
<script>
const said = [];
const rows = () => [...document.querySelectorAll("[role=row]:not(.head)")].filter((row) => row.offsetParent);
const name = (row) => row.querySelector("bdi").textContent;
const focused = () => {
  const at = document.activeElement;
  return at.matches("[role=row]") ? name(at) : at.tagName;
};
const say = () => said.push([rows().map(name), focused()]);
const key = (key) => document.activeElement.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
const type = (text) => {
  document.getElementById("find").value = text;
  document.getElementById("find").dispatchEvent(new Event("input"));
};
%s
document.documentElement.dataset.said = JSON.stringify(said);
</script>
"""


@pytest.fixture
def tree() -> RadixTree:
    """A trunk with two leaves, one of them hostile, in the default namespace, and one prompt elsewhere."""
    tree = RadixTree(BlockPool(32), 1)
    for tokens, space in (([0, 0, 0, 1], None), ([0, 0, 0, 2], None), ([3], "acme")):
        held = tree.match(tokens, space).take()
        own = tree.allocate(len(tokens) - len(held))
        tree.pool.release(tree.insert(tokens, [*held, *own], space).blocks)
    return tree


def text_of(ids: list[int]) -> str:
    return ["trunk", "leaf", HOSTILE, "elsewhere"][ids[0]]


def run(page: str, script: str, folder: Path) -> tuple[list[Any], str]:
    """What the script said, and the DOM at the end."""
    path = folder / "page.html"
    path.write_text(page.replace("</body>", DRIVER % script + "</body>"), encoding="utf-8")
    done = subprocess.run(
        [
            BROWSER,
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            f"--user-data-dir={folder / 'profile'}",
            "--dump-dom",
            path.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    found = re.search(r'data-said="([^"]*)"', done.stdout)
    assert found, done.stdout[:500] + done.stderr[-2000:]
    return json.loads(html.unescape(found[1])), done.stdout


def test_keys_mouse_and_search(tree: RadixTree, tmp_path: Path) -> None:
    view = tree_view(tree, tokenizer=text_of, max_chars=120)
    top, trunk, *_ = labels = [line.label for line in view.lines]
    leaves = labels[2:4]
    other, elsewhere = labels[4:]
    assert [line.depth for line in view.lines] == [0, 1, 2, 2, 0, 1]
    steps: list[tuple[str, list[str], str]] = [
        ("", labels, "BODY"),
        ("rows()[0].focus()", labels, top),
        ("key('ArrowDown')", labels, trunk),
        ("key('ArrowLeft')", [top, trunk, other, elsewhere], trunk),
        ("key('ArrowRight')", labels, trunk),
        ("key('ArrowRight')", labels, leaves[0]),
        ("key('ArrowLeft')", labels, trunk),
        ("key('Enter')", [top, trunk, other, elsewhere], trunk),
        ("key(' ')", labels, trunk),
        ("key('End')", labels, elsewhere),
        ("key('Home')", labels, top),
        ("key('ArrowUp')", labels, top),
        ("rows()[4].click()", [*labels[:4], other], other),
        ("document.getElementById('close').click()", [top, other], other),
        ("rows()[0].click()", [top, trunk, other], top),
        ("document.getElementById('open').click()", labels, top),
        ("type('SCRIPT')", [top, trunk, leaves[1]], top),
        ("type('nothing like it')", [], "BODY"),
        ("type('')", labels, "BODY"),
    ]
    said, dom = run(view.to_html(), "\n".join(f"{step}; say();" for step, *_ in steps), tmp_path)
    assert [(step, *got) for (step, *_), got in zip(steps, said, strict=True)] == steps
    assert "<title>Radix tree</title>" in dom
    assert "<img" not in dom


def test_a_large_view_begins_closed_and_opens(tmp_path: Path) -> None:
    tree = RadixTree(BlockPool(2000), 1)
    for number in range(1000):
        own = tree.allocate(2)
        tree.pool.release(tree.insert([number % 20, number], own, str(number % 4)).blocks)
    view = tree_view(tree, max_nodes=5000)
    script = "say(); document.getElementById('open').click(); say();"
    said, _ = run(view.to_html(), script, tmp_path)
    assert len(said[0][0]) < 100
    assert len(said[1][0]) == len(view.lines)
