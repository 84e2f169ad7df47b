"""Makes a view: copies the tree, chooses the lines, writes their labels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from radixkv.cache.tree_view.labels import Labels, digest, namespace_label, plural
from radixkv.cache.tree_view.selection import SORTS, Chain, Sums, select
from radixkv.cache.tree_view.snapshot import Snapshot, take_snapshot
from radixkv.cache.tree_view.view import TreeLine, TreeView
from radixkv.core.errors import InvalidRequestError
from radixkv.core.namespace import Namespace, canonical_namespace
from radixkv.core.radix_tree import RadixTree

__all__ = ["ViewOptions", "make_view", "tree_view"]


@dataclass(frozen=True)
class ViewOptions:
    """What a view shows and how: the keyword arguments of `tree_view`, with the same names and defaults.

    Raises:
        InvalidRequestError: An option makes no sense; the message says which.
    """

    tokenizer: Any = None
    namespace: Namespace = None
    sort: str = "tokens"
    max_nodes: int = 100
    max_depth: int | None = None
    min_blocks: int = 0
    collapse: bool = True
    max_chars: int = 48
    block_ids: bool = False
    token_ids: bool = False

    def __post_init__(self) -> None:
        if self.sort not in SORTS:
            raise InvalidRequestError(f"sort must be one of {', '.join(SORTS)}, got {self.sort!r}")
        _need_int("max_nodes", self.max_nodes, 1)
        _need_int("min_blocks", self.min_blocks, 0)
        _need_int("max_chars", self.max_chars, 8)
        if self.max_depth is not None:
            _need_int("max_depth", self.max_depth, 0)
        canonical_namespace(self.namespace)
        Labels(self.tokenizer, self.max_chars)


def _need_int(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
        raise InvalidRequestError(f"{name} must be an integer of at least {least}, got {value!r}")


def tree_view(
    tree: RadixTree,
    *,
    tokenizer: Any = None,
    namespace: Namespace = None,
    sort: str = "tokens",
    max_nodes: int = 100,
    max_depth: int | None = None,
    min_blocks: int = 0,
    collapse: bool = True,
    max_chars: int = 48,
    block_ids: bool = False,
    token_ids: bool = False,
) -> TreeView:
    """Look at a tree: which prefixes are cached, how large they are, who holds them, who used them when.

    The tree is copied under its lock, in time proportional to its size; the rest works on the copy. Where not all
    of it is shown, the largest subtrees are, and the rest is summed up: totals are always exact.

    Args:
        tree: The tree; `PrefixCache.tree_view` knows the namespaces of its users, too.
        tokenizer: Shows text in place of token ids: something with `decode(ids) -> str`, or such a function.
        namespace: Only this one; None for all. (For only the default namespace, pass `b""`.)
        sort: What is shown first: "tokens", the largest subtrees; "hits", those that most requests matched;
            "recency", those used last.
        max_nodes: Most lines; a namespace takes one, a line that sums up a rest takes none.
        max_depth: Most lines below each other under a namespace.
        min_blocks: Subtrees of fewer blocks go to the rest.
        collapse: Show a run of nodes without branches as one line.
        max_chars: Room for tokens or text on a line.
        block_ids: Show the physical blocks.
        token_ids: Keep all tokens of the lines shown, for `to_dict`.

    Raises:
        InvalidRequestError: An option makes no sense; the message says which.
    """
    options = ViewOptions(
        tokenizer=tokenizer,
        namespace=namespace,
        sort=sort,
        max_nodes=max_nodes,
        max_depth=max_depth,
        min_blocks=min_blocks,
        collapse=collapse,
        max_chars=max_chars,
        block_ids=block_ids,
        token_ids=token_ids,
    )
    return make_view(take_snapshot(tree), options)


def make_view(
    snapshot: Snapshot, options: ViewOptions, users: Mapping[bytes, bytes] | None = None
) -> TreeView:
    """The view of a snapshot.

    Args:
        snapshot: Of the tree.
        options: What to show.
        users: Canonical namespaces of users by namespaces of the tree, where these are not the same.
    """
    wanted = None
    if options.namespace is not None:
        asked = canonical_namespace(options.namespace)
        wanted = {asked} if users is None else {key for key, user in users.items() if user == asked}
    selection = select(
        snapshot,
        namespaces=wanted,
        sort=options.sort,
        max_nodes=options.max_nodes,
        max_depth=options.max_depth,
        min_blocks=options.min_blocks,
        collapse=options.collapse,
    )
    lines = _Lines(snapshot, options, _names(selection.tops, users))
    lines.add_all(selection.tops)
    num_hidden = selection.num_matching - len(selection.tops)
    if num_hidden:
        lines.add_rest(None, 0, selection.hidden, None, f"{plural_more(num_hidden, 'namespace')}, ")
    notes = []
    if options.namespace is not None and not selection.num_matching:
        notes.append(
            f"Nothing is cached in namespace {namespace_label(canonical_namespace(options.namespace))}."
        )
    failed, trouble = lines.labels.num_undecodable, lines.labels.trouble
    if failed:
        notes.append(f"{plural(failed, 'line')} with token ids, as the tokenizer failed: {trouble}")
    return TreeView(
        totals=snapshot.totals,
        matching=selection.matching,
        lines=tuple(lines.done),
        block_size=snapshot.block_size,
        policy=snapshot.policy,
        taken_unix=snapshot.taken_unix,
        notes=tuple(notes),
    )


def plural_more(number: int, word: str) -> str:
    """`812 more nodes`."""
    return f"{number:,} more {word}{'' if number == 1 else 's'}"


def _names(tops: list[Chain], users: Mapping[bytes, bytes] | None) -> dict[bytes, str]:
    """What to call each namespace; two that have one user, such as before and after a change of weights, differ."""
    names: dict[bytes, str] = {}
    for top in tops:
        key = top.namespace
        if users is None:
            names[key] = namespace_label(key)
        else:
            names[key] = namespace_label(users[key]) if key in users else digest(key)
    seen = list(names.values())
    return {
        key: name if seen.count(name) == 1 else f"{name} (key {digest(key)})" for key, name in names.items()
    }


class _Lines:
    """Writes chains out as lines, without recursion: a tree may be as deep as it is large."""

    def __init__(self, snapshot: Snapshot, options: ViewOptions, names: dict[bytes, str]) -> None:
        self.done: list[TreeLine] = []
        self.labels = Labels(options.tokenizer, options.max_chars)
        self._snapshot = snapshot
        self._options = options
        self._names = names

    def add_all(self, tops: list[Chain]) -> None:
        todo: list[tuple[Chain | Sums, int | None, int, str | None, bool]] = []
        todo += [(top, None, 0, None, top is tops[-1]) for top in reversed(tops)]
        while todo:
            chain, parent, depth, name, last = todo.pop()
            if isinstance(chain, Sums):
                self.add_rest(parent, depth, chain, name)
                continue
            name = self._names[chain.namespace]
            line = self._line(chain, parent, depth, name, last)
            self.done.append(line)
            if chain.hidden.nodes:
                todo.append((chain.hidden, line.id, depth + 1, name, True))
            end = None if chain.hidden.nodes or not chain.children else chain.children[-1]
            todo += [(child, line.id, depth + 1, name, child is end) for child in reversed(chain.children)]

    def add_rest(
        self, parent: int | None, depth: int, rest: Sums, name: str | None, before: str = ""
    ) -> None:
        word = plural(rest.nodes, "node") if before else plural_more(rest.nodes, "node")
        label = f"… {before}{word}, {plural(rest.blocks, 'block')}"
        self.done.append(TreeLine(len(self.done), parent, depth, "rest", True, label, name, rest, rest))

    def _line(self, chain: Chain, parent: int | None, depth: int, name: str, last: bool) -> TreeLine:
        place = (len(self.done), parent, depth)
        if not chain.members:
            label = "default namespace" if name == "default" else f"namespace {name}"
            return TreeLine(*place, "namespace", last, label, name, Sums(), chain.subtree)
        nodes, members, options = self._snapshot.nodes, chain.members, self._options
        below = sum((child.subtree for child in chain.children), chain.hidden)
        edges = [nodes.tokens_of(i) for i in members]
        blocks = [nodes.blocks_of(i) for i in members]
        label = self.labels.of(edges)
        if len(members) > 1:
            label += f" ({len(members):,} nodes)"
        return TreeLine(
            *place,
            "nodes",
            last,
            label,
            name,
            own=chain.subtree - below,
            subtree=chain.subtree,
            start=nodes.starts[members[0]],
            references=nodes.references.item(blocks[0].item(0)) - 1,
            hits=max(nodes.num_hits[i] for i in members),
            age_s=max(0.0, nodes.taken_at - max(nodes.used_at[i] for i in members)),
            block_ids=tuple(np.concatenate(blocks).tolist()) if options.block_ids else None,
            token_ids=tuple(np.concatenate(edges).tolist()) if options.token_ids else None,
        )
