"""Which leading blocks several sequences share, so that their keys and values are read once for all of them.

The block tables of a step form a tree: sequences that name the same leading blocks share a path from its root.
Every node of that tree can be attended once by the queries of all sequences below it, and the partial results are
merged by log-sum-exp. Whether that pays depends on the backend, which passes its own rule.

numpy only: the rule is the same for every backend.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["Cascade", "Segment", "SharedBlocks", "cascade", "shared_blocks"]


@dataclass(frozen=True)
class SharedBlocks:
    """A node of the tree of block tables: blocks `start .. stop` of all its entries are the same.

    Attributes:
        entries: int64 `[n]`, n >= 2, ascending: the entries that share these blocks (and all before them).
        start: First logical block of the node.
        stop: One past its last.
        parent: Index of the node above in the list, -1 for a root. Parents come before their children.
    """

    entries: npt.NDArray[np.int64]
    start: int
    stop: int
    parent: int


@dataclass(frozen=True)
class Segment:
    """Positions of the context that are attended once for several entries.

    Attributes:
        entries: int64 `[n]`, ascending.
        start: First position.
        stop: One past the last position; a block border, and at most the first query position of each entry.
        lows: int64 `[n]`: the first position of the segment that any query of the entry sees, at least `start`.
            Above `start` only in windowed layers, where the rest must be masked.
    """

    entries: npt.NDArray[np.int64]
    start: int
    stop: int
    lows: npt.NDArray[np.int64]


@dataclass(frozen=True)
class Cascade:
    """A step's contexts, cut so that each position an entry sees lies in one segment or in its own part.

    Attributes:
        segments: Shared parts, those of a path in the order of its positions.
        own_starts: int64 `[S]`: entry `i` attends the positions `own_starts[i] .. context_lens[i]` alone.
    """

    segments: list[Segment]
    own_starts: npt.NDArray[np.int64]


def shared_blocks(block_tables: npt.NDArray[np.int32], limits: npt.NDArray[np.int64]) -> list[SharedBlocks]:
    """The tree of leading blocks that at least two entries share.

    Entries are sorted by their tables, after which those that share a prefix are neighbours; the lengths of the
    prefixes that neighbours share give the tree (the interval tree of an LCP array). The cost is one sort and one
    comparison of the tables of entries that share their first block, and Python only for entries that share.

    Args:
        block_tables: int32 `[S, W]`; what lies beyond `limits` is never looked at.
        limits: int64 `[S]`: leading blocks of each entry that may be shared.

    Returns:
        Nodes, parents first.
    """
    candidates = np.flatnonzero(limits > 0)
    if len(candidates) < 2:
        return []
    firsts = block_tables[candidates, 0]
    _, inverse, counts = np.unique(firsts, return_inverse=True, return_counts=True)
    if len(counts) == len(candidates):
        return []
    candidates = candidates[counts[inverse] > 1]
    bounds = limits[candidates]
    width = int(bounds.max())
    keys = block_tables[candidates, :width]  # a copy
    beyond = np.arange(width) >= bounds[:, None]
    if beyond.any():
        # Distinct and negative, so that nothing is shared beyond anybody's limit.
        keys[beyond] = np.broadcast_to(-1 - np.arange(len(keys), dtype=np.int32)[:, None], keys.shape)[beyond]
    # Any order will do in which equal prefixes are neighbours; that of the bytes is one.
    order = np.argsort(np.ascontiguousarray(keys).view(np.dtype((np.void, 4 * width)))[:, 0], kind="stable")
    keys, entries = keys[order], candidates[order].astype(np.int64)
    differ = keys[1:] != keys[:-1]
    common = np.where(differ.any(1), differ.argmax(1), width).tolist()
    return _tree(entries, common)


def _tree(entries: npt.NDArray[np.int64], common: list[int]) -> list[SharedBlocks]:
    """Nodes from sorted entries and the number of leading blocks that each shares with the next one."""
    # (first entry, depth) of the nodes that are open, shallow to deep.
    stack: list[tuple[int, int]] = []
    found: list[tuple[int, int, int]] = []  # first entry, one past the last, depth
    for index, depth in enumerate([*common, 0]):
        first = index
        while stack and stack[-1][1] > depth:
            first, closed = stack.pop()
            found.append((first, index + 1, closed))
        if depth > 0 and (not stack or stack[-1][1] < depth):
            stack.append((first, depth))
    found.sort(key=lambda node: (node[0], node[2]))
    nodes: list[SharedBlocks] = []
    path: list[tuple[int, int]] = []  # (index of the node, one past its last entry)
    for first, end, depth in found:
        while path and path[-1][1] <= first:
            path.pop()
        parent = path[-1][0] if path else -1
        start = nodes[parent].stop if path else 0
        path.append((len(nodes), end))
        nodes.append(SharedBlocks(np.sort(entries[first:end]), start, depth, parent))
    return nodes


def cascade(
    nodes: list[SharedBlocks],
    lows: npt.NDArray[np.int64],
    block_size: int,
    pays: Callable[[npt.NDArray[np.int64], int], bool],
) -> Cascade:
    """Choose which nodes are attended once for all their entries.

    A node that does not pay is left to the nodes below it, whose segments then start further left, or to the
    entries themselves.

    Args:
        nodes: From `shared_blocks`.
        lows: int64 `[S]`: the first position that any query of each entry sees (0 without a window).
        block_size: Tokens per block.
        pays: Given some entries and a number of tokens, whether to attend those tokens once for all of them.
    """
    segments: list[Segment] = []
    own_starts = lows.copy()
    # Where the part begins that no segment above this node has covered.
    covered: list[int] = []
    for node in nodes:
        start, stop = covered[node.parent] if node.parent >= 0 else 0, node.stop * block_size
        entries = node.entries
        seen = lows[entries]
        if (seen > start).any():  # windows
            entries = entries[seen < stop]
            seen = lows[entries]
            first = max(start, int(seen.min())) if len(entries) else stop
        else:
            first = start
        if len(entries) < 2 or not pays(entries, stop - first):
            covered.append(start)
            continue
        covered.append(stop)
        segments.append(Segment(entries, first, stop, np.maximum(seen, first)))
        own_starts[entries] = stop
    return Cascade(segments, own_starts)
