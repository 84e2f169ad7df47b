"""Public names in the text of any page become links to their entries in the API pages (`hooks:` in mkdocs.yml)."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

from mkdocs.structure.pages import Page

_DOCS = Path(__file__).resolve().parents[1]
_ENTRY = re.compile(r"^::: (radixkv[\w.]+)$", re.M)
_PARTS = re.compile(
    r"<(/?)(a|b|h[1-6]|pre|strong|summary|svg|title)\b[^>]*>|<code>([A-Za-z_][\w.]*)(?:\(\))?</code>"
)


def _entries() -> dict[str, list[str]]:
    """Full names of all entries by their last word."""
    known = defaultdict(list)
    for page in sorted(_DOCS.rglob("*.md")):
        for name in _ENTRY.findall(page.read_text(encoding="utf-8")):
            known[name.rpartition(".")[2]].append(name)
    return known


_KNOWN = _entries()


def on_page_content(html: str, page: Page, **_: object) -> str:
    """Link `<code>Name</code>`, but not in headings, links and blocks of code."""
    here = set(_ENTRY.findall(page.markdown or ""))
    inside = 0

    def link(found: re.Match[str]) -> str:
        nonlocal inside
        closing, tag, said = found.groups()
        if tag:
            inside += -1 if closing else 1
        elif inside == 0 and (name := _meant(said, here)):
            # Resolved by mkdocs-autorefs, which leaves the text as it is where there is no such entry.
            return f'<autoref identifier="{name}" optional>{found[0]}</autoref>'
        return found[0]

    return _PARTS.sub(link, html)


def _meant(said: str, here: set[str]) -> str | None:
    """The full name of what is called `Name`, `Class.member` or `radixkv.layer.name`; None if that is not sure."""
    head, _, member = said.partition(".")
    if head == "radixkv":
        return said if member else None
    named = _KNOWN.get(head, [])
    near = [name for name in named if name in here] or named
    if len(near) != 1:
        return None
    if head[0].islower() and near[0] not in here:  # an argument or a method may be called the same
        return None
    return f"{near[0]}.{member}" if member else near[0]
