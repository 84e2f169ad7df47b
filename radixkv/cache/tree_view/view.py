"""`TreeView`: what is cached, as text, Graphviz, SVG, HTML or JSON."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from radixkv.cache.tree_view import as_dot, as_html, as_svg, as_text
from radixkv.cache.tree_view.labels import Labels, digest, namespace_label, plural
from radixkv.cache.tree_view.selection import SORTS, Chain, Sums, select
from radixkv.cache.tree_view.snapshot import Snapshot, Totals, take_snapshot
from radixkv.core.errors import InvalidRequestError
from radixkv.core.namespace import Namespace, canonical_namespace
from radixkv.core.radix_tree import RadixTree

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

__all__ = ["TreeLine", "TreeView", "ViewOptions", "make_view", "tree_view"]

#: Raise this when a key of the document is renamed or removed.
SCHEMA_VERSION = 1


@dataclass(frozen=True)
class ViewOptions:
    """What a view shows and how; see `tree_view`.

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


@dataclass(frozen=True)
class TreeLine:
    """One line of a view.

    Attributes:
        id: Position in `TreeView.lines`.
        parent: `id` of the line that it stands below; None at the top.
        depth: 0 at the top.
        kind: "namespace"; "nodes": a node, or a run of nodes without branches; "rest": all that is not shown below
            `parent`.
        last: Nothing follows it below the same parent.
        label: Tokens or text, shortened, in one line that is safe to print.
        namespace: Of the user, readable; None for what is not shown at the top.
        start: Tokens of the prefix before this line; None unless it shows nodes.
        own: What the line itself stands for: its nodes, or all that is not shown; nothing for a namespace.
        subtree: The same together with all below it.
        references: Most holders that one of its blocks has beside the tree; they hold its first block. None unless
            it shows nodes.
        hits: Requests that matched into it. None unless it shows nodes.
        age_s: Seconds since it was used last. None unless it shows nodes.
        block_ids: Physical blocks, if they were asked for and it shows nodes.
        token_ids: All its tokens, if they were asked for and it shows nodes.
    """

    id: int
    parent: int | None
    depth: int
    kind: Literal["namespace", "nodes", "rest"]
    last: bool
    label: str
    namespace: str | None
    own: Sums
    subtree: Sums
    start: int | None = None
    references: int | None = None
    hits: int | None = None
    age_s: float | None = None
    block_ids: tuple[int, ...] | None = None
    token_ids: tuple[int, ...] | None = None

    def to_dict(self) -> dict[str, Any]:
        """For JSON; block and token ids only where they were asked for."""
        out = asdict(self)
        for name in ("block_ids", "token_ids"):
            if out[name] is None:
                del out[name]
            else:
                out[name] = list(out[name])
        return out


@dataclass(frozen=True, repr=False)
class TreeView:
    """What a tree held at one moment, in lines; made by `PrefixCache.tree_view` and `radixkv.tree_view`.

    `print(view)` prints it, a notebook shows it, `rich` colours it, `save` writes it to a file. It holds parts of
    the prompts in clear: treat it like them.

    Attributes:
        totals: Exact counts of the whole tree, whatever is shown.
        matching: Counts of the namespaces that were asked for.
        lines: Parents before children. The `own` of all lines add up to `matching`, those of namespaces left out.
        block_size: Tokens in a block.
        policy: Eviction policy.
        taken_unix: When it was taken, in seconds since 1970.
        notes: What a reader should know, such as that the tokenizer failed.
    """

    totals: Totals
    matching: Sums
    lines: tuple[TreeLine, ...]
    block_size: int
    policy: str
    taken_unix: float
    notes: tuple[str, ...]

    def __repr__(self) -> str:
        return f"TreeView({self.summary()})"

    def __str__(self) -> str:
        return self.to_text()

    def __rich__(self) -> RenderableType:
        return as_text.to_rich(self)

    def _repr_html_(self) -> str:
        return as_html.fragment(self)

    def summary(self) -> str:
        """The totals in one line."""
        total = self.totals
        held = f", {total.pinned_blocks:,} of them pinned" if total.pinned_blocks else ""
        return (
            f"{plural(total.nodes, 'node')}, {plural(total.tokens, 'token')} in "
            f"{plural(total.blocks, 'block')} of {self.block_size}{held}; "
            f"{total.free_blocks:,} of {plural(total.pool_blocks, 'block')} free"
        )

    def print(self, console: Console | None = None) -> None:
        """Print to the terminal, in colour and cut to its width if `rich` is installed.

        Args:
            console: Where to; None for standard output.
        """
        if console is None:
            try:
                from rich.console import Console
            except ImportError:
                self._print_plain()
                return
            if not sys.stdout.isatty():  # a file or a pipe has no width and no colours
                self._print_plain()
                return
            console = Console()
        console.print(self)

    def _print_plain(self) -> None:
        text = self.to_text()
        try:
            text.encode(sys.stdout.encoding or "utf-8")
        except UnicodeEncodeError:
            text = self.to_text(ascii_only=True)
        print(text)

    def to_text(self, *, ascii_only: bool = False) -> str:
        """One line for each node, figures first.

        Args:
            ascii_only: For terminals that know nothing else; other characters are escaped.
        """
        return as_text.to_text(self, ascii_only)

    def to_dot(self) -> str:
        """Source for Graphviz: `dot -Tpng`."""
        return as_dot.to_dot(self)

    def to_svg(self) -> str:
        """A drawing, complete in itself, in the colours of the reader's system."""
        return as_svg.to_svg(self)

    def to_html(self) -> str:
        """A page, complete in itself: branches open and close by mouse and keys, with a search; no network."""
        return as_html.page(self)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON. Lines are a flat list, `parent` links them."""
        return {
            "schema": SCHEMA_VERSION,
            "taken_unix": self.taken_unix,
            "block_size": self.block_size,
            "policy": self.policy,
            "totals": asdict(self.totals),
            "matching": asdict(self.matching),
            "notes": list(self.notes),
            "lines": [line.to_dict() for line in self.lines],
        }

    def to_json(self) -> str:
        """`to_dict` as JSON, in ASCII."""
        return json.dumps(self.to_dict(), indent=1)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write a file in the format its suffix names. A file of that name is replaced as a whole or not at all.

        Args:
            path: Ends in `.txt`, `.dot`, `.svg`, `.html` or `.json`.

        Raises:
            InvalidRequestError: Another suffix.
            OSError: It cannot be written there.
        """
        target = Path(path)
        writers = {
            ".txt": lambda: self.to_text() + "\n",
            ".dot": self.to_dot,
            ".svg": self.to_svg,
            ".html": self.to_html,
            ".json": lambda: self.to_json() + "\n",
        }
        writer = writers.get(target.suffix.lower())
        if writer is None:
            raise InvalidRequestError(f"{target}: the name must end in {', '.join(writers)}")
        _write(target, writer())
        return target


def _write(path: Path, text: str) -> None:
    """To another name first, so that nobody ever sees half of it."""
    handle, name = tempfile.mkstemp(prefix=f".{path.stem}-", suffix=path.suffix, dir=path.absolute().parent)
    try:
        with open(handle, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(name, 0o666 & ~umask)  # mkstemp makes it private
        os.replace(name, path)
    finally:
        Path(name).unlink(missing_ok=True)


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
        nodes = [self._snapshot.nodes[i] for i in chain.members]
        below = sum((child.subtree for child in chain.children), chain.hidden)
        label = self.labels.of([node.tokens for node in nodes])
        if len(nodes) > 1:
            label += f" ({len(nodes):,} nodes)"
        used_at = max(node.used_at for node in nodes)
        options = self._options
        return TreeLine(
            *place,
            "nodes",
            last,
            label,
            name,
            own=chain.subtree - below,
            subtree=chain.subtree,
            start=nodes[0].start,
            references=int(nodes[0].references[0]) - 1,
            hits=max(node.num_hits for node in nodes),
            age_s=max(0.0, self._snapshot.taken_at - used_at),
            block_ids=tuple(i for n in nodes for i in n.blocks.tolist()) if options.block_ids else None,
            token_ids=tuple(i for n in nodes for i in n.tokens.tolist()) if options.token_ids else None,
        )
