"""A view as text: figures in columns, then the tree."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import compress
from typing import TYPE_CHECKING

from radixkv.cache.tree_view.labels import age, block_ranges, percent

if TYPE_CHECKING:
    from rich.console import Group

    from radixkv.cache.tree_view.view import TreeLine, TreeView

__all__ = ["cells", "to_rich", "to_text"]

COLUMNS = ("tokens", "blocks", "share", "pinned", "refs", "hits", "age")
#: Deeper lines are not moved further right, they give their depth: a tree may be thousands of nodes deep.
MOST_GUIDES = 24
_TO_ASCII = str.maketrans({"│": "|", "├": "|", "└": "`", "─": "-", "…": "~", "·": "-"})
_STYLES = {"namespace": "bold", "nodes": "", "rest": "dim italic"}

Pieces = list[tuple[str, str]]


def cells(view: TreeView, line: TreeLine) -> tuple[str, ...]:
    """The figures of a line, one for each of `COLUMNS`; empty where there is nothing to say."""
    sums = line.subtree if line.kind == "namespace" else line.own
    nodes = line.kind == "nodes"
    return (
        f"{sums.tokens:,}",
        f"{sums.blocks:,}",
        percent(line.subtree.tokens, view.totals.tokens),
        f"{sums.pinned_blocks:,}" if sums.pinned_blocks else "",
        f"{line.references:,}" if nodes and line.references else "",
        f"{line.hits:,}" if nodes else "",
        age(line.age_s) if line.age_s is not None else "",
    )


def to_text(view: TreeView, ascii_only: bool = False) -> str:
    """All lines, without colours."""
    rows = ("".join(text for text, _ in pieces).rstrip() for pieces in _rows(view))
    text = "\n".join(rows)
    if ascii_only:
        text = text.translate(_TO_ASCII).encode("ascii", "backslashreplace").decode("ascii")
    return text


def to_rich(view: TreeView) -> Group:
    """All lines, in colours; lines are cut at the width of the terminal, not wrapped.

    Raises:
        ImportError: `rich` is not installed.
    """
    from rich.console import Group
    from rich.text import Text

    lines = []
    for pieces in _rows(view):
        line = Text(no_wrap=True, overflow="ellipsis")
        for text, style in pieces:
            line.append(text, style or None)
        lines.append(line)
    return Group(*lines)


def _rows(view: TreeView) -> Iterator[Pieces]:
    yield [("Radix tree: ", "bold"), (view.summary(), "")]
    for note in view.notes:
        yield [(note, "yellow")]
    if not view.lines:
        return
    table = [cells(view, line) for line in view.lines]
    used = [any(column) for column in zip(*table, strict=True)]  # no column for pins where nothing is pinned
    names = list(compress(COLUMNS, used))
    table = [tuple(compress(row, used)) for row in table]
    widths = [max(map(len, column)) for column in zip(names, *table, strict=True)]
    yield [("  ".join(name.rjust(n) for name, n in zip(names, widths, strict=True)) + "  prefix", "bold")]
    more: list[bool] = []  # for each depth, whether something follows at it
    for line, row in zip(view.lines, table, strict=True):
        del more[line.depth :]
        pieces: Pieces = []
        for name, cell, width in zip(names, row, widths, strict=True):
            style = "yellow" if name in ("pinned", "refs") else "dim" if line.kind == "rest" else ""
            pieces.append((cell.rjust(width) + "  ", style))
        pieces.append((_guides(more, line), "dim"))
        pieces.append((line.label, _STYLES[line.kind]))
        if line.block_ids is not None:
            pieces.append((f"  blocks {block_ranges(line.block_ids)}", "dim"))
        more.append(not line.last)
        yield pieces


def _guides(more: list[bool], line: TreeLine) -> str:
    if not line.depth:
        return ""
    before = "".join("│  " if follows else "   " for follows in more[1 : MOST_GUIDES + 1])
    depth = f"{line.depth} " if line.depth > MOST_GUIDES + 1 else ""
    return before + depth + ("└─ " if line.last else "├─ ")
