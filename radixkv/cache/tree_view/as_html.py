"""A view as a page that is complete in itself, and as a piece of a notebook."""

from __future__ import annotations

import time
from functools import cache
from html import escape
from importlib import resources
from typing import TYPE_CHECKING

from radixkv.cache.tree_view.as_text import cells
from radixkv.cache.tree_view.labels import block_ranges, plural

if TYPE_CHECKING:
    from radixkv.cache.tree_view.view import TreeLine, TreeView

__all__ = ["fragment", "page"]

#: A page begins with about so many lines open.
OPEN_LINES = 60
#: Deeper lines are not moved further right.
MOST_INDENT = 24


def page(view: TreeView) -> str:
    """The whole page. All that comes from the cache is escaped; the script only opens, closes and searches."""
    total = view.totals
    used = total.pool_blocks - total.free_blocks
    taken = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(view.taken_unix))
    parts = {
        "TAKEN": f"Taken {taken} · blocks of {plural(view.block_size, 'token')} · policy {escape(view.policy)}",
        "NOTES": "".join(f'<p class="note">{escape(note)}</p>' for note in view.notes),
        "FIGURES": "".join(
            f"<div><dt>{name}</dt><dd>{value}</dd></div>"
            for name, value in (
                ("cached tokens", f"{total.tokens:,}"),
                ("cached blocks", f"{total.blocks:,}"),
                ("pinned blocks", f"{total.pinned_blocks:,}"),
                ("free blocks", f"{total.free_blocks:,} of {total.pool_blocks:,}"),
                ("nodes", f"{total.nodes:,}"),
                ("namespaces", f"{total.namespaces:,}"),
            )
        ),
        "METER": "".join(
            f'<i class="{name}" style="width:{number / total.pool_blocks * 100:.2f}%"></i>'
            for name, number in (
                ("pinned", total.pinned_blocks),
                ("idle", total.blocks - total.pinned_blocks),
                ("busy", max(0, used - total.blocks)),
            )
        ),
        "LINES": "\n".join(_lines(view)),
    }
    out = []
    for piece in _template().split("%%"):
        out.append(parts.get(piece, piece))
    return "".join(out)


@cache
def _template() -> str:
    return resources.files(__package__).joinpath("page.html").read_text(encoding="utf-8")


def fragment(view: TreeView) -> str:
    """For notebooks: the text, escaped."""
    return (
        '<pre style="overflow-x:auto;white-space:pre;line-height:1.35;font-size:12px">'
        f"{escape(view.to_text())}</pre>"
    )


def _lines(view: TreeView) -> list[str]:
    parents = {line.parent for line in view.lines}
    depth = _open_depth(view)
    return [_line(view, line, line.id in parents, line.depth < depth) for line in view.lines]


def _open_depth(view: TreeView) -> int:
    """Lines above this depth begin open: as deep as the page still has about `OPEN_LINES`."""
    at: dict[int, int] = {}
    for line in view.lines:
        at[line.depth] = at.get(line.depth, 0) + 1
    shown = 0
    for depth in sorted(at):
        shown += at[depth]
        if shown > OPEN_LINES:
            return max(1, depth - 1)
    return len(at)


def _line(view: TreeView, line: TreeLine, is_branch: bool, is_open: bool) -> str:
    tokens, blocks, share, pinned, refs, hits, age = cells(view, line)
    kind = line.kind + (" held" if line.kind == "nodes" and line.own.pinned_blocks else "")
    expanded = f' aria-expanded="{str(is_open).lower()}"' if is_branch else ""
    depth = f"<small>{line.depth}</small> " if line.depth > MOST_INDENT else ""
    more = ""
    if line.block_ids is not None:
        more = f' <small class="ids">blocks {escape(block_ranges(line.block_ids))}</small>'
    figures = (
        ("tokens", tokens, "tokens"),
        ("blocks", blocks, "blocks"),
        ("share", share, "of the cached tokens, with all below"),
        ("pinned", pinned, "pinned"),
        ("refs", refs, "references"),
        ("hits", hits, "hits"),
        ("age", age, "since its last use"),
    )
    title = ", ".join(f"{value} {meaning}" for _, value, meaning in figures if value)
    if line.start is not None:
        title = f"after {plural(line.start, 'token')}: {title}"
    drawn = "".join(
        f'<span role="gridcell" class="{name}"{_width(view, line) if name == "share" else ""}>'
        f"{escape(value)}{_unit(name, value)}</span>"
        for name, value, _ in figures
    )
    return (
        f'<div role="row" class="{kind}" aria-level="{line.depth + 1}"{expanded} tabindex="-1" '
        f'style="--d:{min(line.depth, MOST_INDENT)}" title="{escape(title)}">'
        f'<span role="gridcell" class="label"><b aria-hidden="true"></b>{depth}<bdi>{escape(line.label)}</bdi>{more}'
        f"</span>{drawn}</div>"
    )


def _width(view: TreeView, line: TreeLine) -> str:
    share = line.subtree.tokens / view.totals.tokens if view.totals.tokens else 0.0
    return f' style="--w:{share * 100:.2f}%"'


def _unit(name: str, value: str) -> str:
    """Shown where there are no columns, on a narrow screen."""
    if not value or name == "share":
        return ""
    unit = "old" if name == "age" else name
    if value == "1":
        unit = unit.removesuffix("s")
    return f'<u aria-hidden="true"> {unit}</u>'
