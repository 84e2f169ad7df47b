"""`TreeView`: what is cached, as text, Graphviz, SVG, HTML or JSON."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from radixkv.cache.tree_view import as_dot, as_html, as_svg, as_text
from radixkv.cache.tree_view.labels import plural
from radixkv.cache.tree_view.selection import Sums
from radixkv.cache.tree_view.snapshot import Totals
from radixkv.core.errors import InvalidRequestError
from radixkv.core.whole_files import replacing

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

__all__ = ["TreeLine", "TreeView"]

#: Raise this when a key of the document is renamed or removed.
SCHEMA_VERSION = 1


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
        text = writer()
        with replacing(target) as part:
            part.write_bytes(text.encode())
        return target
