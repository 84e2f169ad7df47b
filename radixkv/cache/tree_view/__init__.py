"""What is cached, as text, Graphviz, SVG, HTML and JSON. Needs numpy, never torch."""

from radixkv.cache.tree_view.making import ViewOptions, make_view, tree_view
from radixkv.cache.tree_view.selection import Sums
from radixkv.cache.tree_view.snapshot import Snapshot, Totals, take_snapshot
from radixkv.cache.tree_view.view import TreeLine, TreeView

__all__ = [
    "Snapshot",
    "Sums",
    "Totals",
    "TreeLine",
    "TreeView",
    "ViewOptions",
    "make_view",
    "take_snapshot",
    "tree_view",
]
