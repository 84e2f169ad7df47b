"""A view as source for Graphviz."""

from __future__ import annotations

from typing import TYPE_CHECKING

from radixkv.cache.tree_view.labels import age, block_ranges, percent, plural

if TYPE_CHECKING:
    from radixkv.cache.tree_view.view import TreeLine, TreeView

__all__ = ["figures", "to_dot"]

_STYLES = {
    "namespace": ', style="rounded,filled,bold", fillcolor="#e3e8f5"',
    "nodes": "",
    "rest": ', style="rounded,dashed", fontcolor="#666666"',
}


def to_dot(view: TreeView) -> str:
    """A `digraph` with one box for each line."""
    out = [
        "digraph radix_tree {",
        f"  graph [rankdir=LR, label={_quoted('Radix tree: ' + view.summary())}, labelloc=t];",
        '  node [shape=box, style="rounded,filled", fillcolor="#ffffff", fontname="monospace", fontsize=10];',
        "  edge [arrowhead=none];",
    ]
    for line in view.lines:
        style = _STYLES[line.kind]
        if line.kind == "nodes" and line.own.pinned_blocks:
            style = ', fillcolor="#fdebc8"'
        rows = [line.label] if line.kind == "rest" else [line.label, *figures(view, line)]
        label = "\\n".join(map(_escaped, rows))
        out.append(f'  n{line.id} [label="{label}"{style}];')
        if line.parent is not None:
            out.append(f"  n{line.parent} -> n{line.id};")
    out.append("}")
    return "\n".join(out) + "\n"


def figures(view: TreeView, line: TreeLine) -> list[str]:
    """What is known of a line, in one or two rows, for drawings."""
    sums = line.subtree if line.kind == "namespace" else line.own
    rows = [
        f"{plural(sums.tokens, 'token')} · {plural(sums.blocks, 'block')} · "
        f"{percent(line.subtree.tokens, view.totals.tokens)}"
    ]
    if line.kind == "nodes":
        use = f"{plural(line.hits or 0, 'hit')} · {age(line.age_s or 0.0)} ago"
        if line.references:
            use += f" · {plural(line.references, 'ref')}, {sums.pinned_blocks:,} pinned"
        rows.append(use)
        if line.block_ids is not None:
            rows.append(f"blocks {block_ranges(line.block_ids)}")
    else:
        rows.append(plural(sums.nodes, "node"))
    return rows


def _quoted(text: str) -> str:
    return f'"{_escaped(text)}"'


def _escaped(text: str) -> str:
    # Graphviz also reads character references such as `&amp;` in a label.
    return text.replace("&", "&amp;").replace("\\", "\\\\").replace('"', '\\"')
