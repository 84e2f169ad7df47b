"""The command line. `main` is the entry point; it needs the extra `demo`."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence

from radixkv.cli.streams import has_stderr
from radixkv.core.errors import install_hint

__all__ = ["main"]

#: Everything was as it should be; an output differed; the user has to change something.
EXIT_OK, EXIT_DIFFERS, EXIT_USAGE = 0, 1, 2
#: Ctrl-C; `| head` left; SIGTERM: what a shell says of a process that ended by these signals.
EXIT_INTERRUPTED, EXIT_BROKEN_PIPE, EXIT_TERMINATED = 130, 141, 143


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `radixkv` with these arguments (default: those of the process) and return its exit code."""
    has_stderr()
    if any(importlib.util.find_spec(name) is None for name in ("typer", "rich")):
        print(f"radixkv: the command line needs typer and rich: {install_hint('demo')}", file=sys.stderr)
        return EXIT_USAGE
    from radixkv.cli.app import run

    return run(sys.argv[1:] if arguments is None else list(arguments))
