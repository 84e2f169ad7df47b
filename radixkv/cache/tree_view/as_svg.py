"""A view as a drawing: boxes from left to right, complete in itself."""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from radixkv.cache.tree_view.as_dot import figures

if TYPE_CHECKING:
    from radixkv.cache.tree_view.view import TreeLine, TreeView

__all__ = ["to_svg"]

MARGIN, GAP_X, GAP_Y = 20, 44, 12
TITLE, PAD, ROW = 34, 10, 16
EDGE = 15  # below the upper edge of a box
CHAR = 6.7  # width of a monospace character of 11 pixels, in pixels
LEAST_WIDTH = 170

_STYLE = """
.paper{fill:#fff}.box{fill:#fff;stroke:#8a93a6}.space .box{fill:#e8ecf7;stroke:#5b6b95}
.held .box{fill:#fff4dc;stroke:#b8791a}.rest .box{fill:none;stroke-dasharray:4 3}
.bar{fill:#d9dde6}.fill{fill:#4361c2}.held .fill{fill:#c27a12}.edge{fill:none;stroke:#a3abbb}
text{font:11px ui-monospace,Menlo,Consolas,"DejaVu Sans Mono",monospace;fill:#1c2230;white-space:pre}
.small,.rest text{fill:#5a6375}.title{font-weight:600}
@media (prefers-color-scheme:dark){
.paper{fill:#161a22}.box{fill:#1f2530;stroke:#5d677a}.space .box{fill:#26304a;stroke:#7387bd}
.held .box{fill:#3a2e18;stroke:#c99a4a}.bar{fill:#343c4b}.fill{fill:#8aa2f0}.held .fill{fill:#e0a94f}
.edge{stroke:#566073}text{fill:#e6e9f0}.small,.rest text{fill:#a3acbd}}
"""


def to_svg(view: TreeView) -> str:
    """One box for each line, its first child to the right of it, the others below that one."""
    lines = view.lines
    title = "Radix tree: " + view.summary()
    boxes = _boxes(view)
    total_width = max([CHAR * len(title), *(box.left + box.width for box in boxes)]) + MARGIN
    total_height = max([MARGIN + TITLE, *(box.top + box.height + MARGIN for box in boxes)])
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{total_width:.0f}" height="{total_height:.0f}" '
        f'viewBox="0 0 {total_width:.0f} {total_height:.0f}" role="img" aria-labelledby="radixkv-title">',
        f'<title id="radixkv-title">{escape(title)}</title>',
        f"<style>{_STYLE}</style>",
        '<rect class="paper" width="100%" height="100%"/>',
        f'<text class="title" x="{MARGIN}" y="{MARGIN + 4}">{escape(title)}</text>',
    ]
    for line, box in zip(lines, boxes, strict=True):
        if line.parent is not None:
            out.append(_edge(boxes[line.parent], box))
    for line, box in zip(lines, boxes, strict=True):
        out += _box(view, line, box)
    out.append("</svg>")
    return "\n".join(out) + "\n"


@dataclass
class _Box:
    rows: list[str]
    left: float = 0
    top: float = 0
    width: float = 0

    @property
    def height(self) -> int:
        return 2 * PAD + ROW * len(self.rows) + (4 if len(self.rows) > 1 else -4)


def _boxes(view: TreeView) -> list[_Box]:
    """Where each line is drawn. A line comes after its parent, so no recursion is needed: a tree may be very deep."""
    lines = view.lines
    boxes = [_Box(_rows(view, line)) for line in lines]
    widths: dict[int, float] = {}
    for line, box in zip(lines, boxes, strict=True):
        width = 2 * PAD + CHAR * max(map(_columns, box.rows))
        widths[line.depth] = max(width, widths.get(line.depth, LEAST_WIDTH))
    lefts = [float(MARGIN)]
    for depth in range(len(widths)):
        lefts.append(lefts[-1] + widths[depth] + GAP_X)
    # Room for a box and all below it, then the place of each under what stands before it.
    children = [0.0] * len(lines)
    room = [0.0] * len(lines)
    for line in reversed(lines):
        room[line.id] = max(children[line.id], boxes[line.id].height + GAP_Y)
        if line.parent is not None:
            children[line.parent] += room[line.id]
    next_top = [0.0] * len(lines)
    top = float(MARGIN + TITLE - 8)
    for line, box in zip(lines, boxes, strict=True):
        if line.parent is None:
            box.top = top
            top += room[line.id]
        else:
            box.top = next_top[line.parent]
            next_top[line.parent] += room[line.id]
        next_top[line.id] = box.top
        box.left, box.width = lefts[line.depth], widths[line.depth]
    return boxes


def _rows(view: TreeView, line: TreeLine) -> list[str]:
    return [line.label] if line.kind == "rest" else [line.label, *figures(view, line)]


def _columns(text: str) -> int:
    return sum(2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in text)


def _edge(parent: _Box, child: _Box) -> str:
    x1, y1 = parent.left + parent.width, parent.top + EDGE
    x2, y2 = child.left, child.top + EDGE
    middle = (x1 + x2) / 2
    return f'<path class="edge" d="M{x1:.1f} {y1:.1f}C{middle:.1f} {y1:.1f} {middle:.1f} {y2:.1f} {x2:.1f} {y2:.1f}"/>'


def _box(view: TreeView, line: TreeLine, box: _Box) -> list[str]:
    kind = {"namespace": "space", "rest": "rest"}.get(line.kind, "held" if line.own.pinned_blocks else "node")
    out = [
        f'<g class="{kind}" transform="translate({box.left:.1f} {box.top:.1f})">',
        f"<title>{escape(chr(10).join(box.rows))}</title>",
        f'<rect class="box" width="{box.width:.1f}" height="{box.height}" rx="5"/>',
    ]
    for number, text in enumerate(box.rows):
        style = ' class="small"' if number else ""
        out.append(f'<text{style} x="{PAD}" y="{PAD + 9 + ROW * number}">{escape(text)}</text>')
    if line.kind != "rest":
        # How much of the cache lies in and below it.
        share = line.subtree.tokens / view.totals.tokens if view.totals.tokens else 0.0
        room = box.width - 2 * PAD
        place = f'x="{PAD}" y="{box.height - 8}" height="3" rx="1"'
        out.append(f'<rect class="bar" {place} width="{room:.1f}"/>')
        out.append(f'<rect class="fill" {place} width="{room * share:.1f}"/>')
    out.append("</g>")
    return out
