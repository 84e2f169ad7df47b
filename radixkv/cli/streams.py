"""What the command line writes to: streams that may be closed, full, or unable to write every character."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from typing import IO, Any

__all__ = ["OutputFailed", "ReaderGone", "checked_stdout", "give_up", "has_stderr", "printable", "writable"]


#: What our own tables and sentences have beyond ASCII.
_PLAIN = str.maketrans({"–": "-", "×": "x", "…": "...", "█": "#"})


class ReaderGone(Exception):
    """Whoever read our output has left (`| head`)."""


class OutputFailed(Exception):
    """The output cannot be written; the message says why."""


class _Checked:
    """Stdout whose errors are ours: what lies between makes exit codes of its own of an OSError.

    What the encoding has no character for is written in ASCII, or as an escape sequence.
    """

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with _explained():
            try:
                return self._stream.write(text)
            except UnicodeEncodeError as error:
                plain = text.translate(_PLAIN).encode(error.encoding, "backslashreplace")
                return self._stream.write(plain.decode(error.encoding))

    def flush(self) -> None:
        with _explained():
            self._stream.flush()


@contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError as error:
        raise ReaderGone from error
    except OSError as error:
        raise OutputFailed(f"the output cannot be written: {error.strerror or error}") from error


@contextmanager
def checked_stdout() -> Iterator[None]:
    """What is written to stdout in here raises `ReaderGone` or `OutputFailed`, at the end at the latest.

    Raises:
        ReaderGone: Whoever read has left.
        OutputFailed: It cannot be written, or there is no stdout.
    """
    stdout = sys.stdout
    if stdout is None:
        raise OutputFailed("standard output is closed: redirect it to /dev/null if it is not wanted")
    try:
        with redirect_stdout(_Checked(stdout)):  # type: ignore[type-var]
            yield
            sys.stdout.flush()
    except (ReaderGone, OutputFailed):
        give_up(stdout)
        raise


def give_up(stream: IO[str]) -> None:
    """Let what was not written go to nowhere; the interpreter would fail once more when it flushes at exit."""
    with suppress(OSError, ValueError, AttributeError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def has_stderr() -> None:
    """Make sure that there is a stderr: without one, what is printed there goes to stdout."""
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115


def writable(text: str) -> bool:
    """Whether stdout has all these characters."""
    try:
        text.encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except UnicodeEncodeError:
        return False
    return True


def printable(text: str) -> str:
    """Text on one line that does nothing to a terminal: what does not print as itself is escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
