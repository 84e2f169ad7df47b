"""SIGTERM as an exception: a command that is told to end clears away what it has half-written."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["Terminated", "terminable"]


class Terminated(BaseException):
    """SIGTERM arrived. Like KeyboardInterrupt, nothing that handles errors may swallow it."""


@contextmanager
def terminable() -> Iterator[None]:
    """SIGTERM raises `Terminated` in here; nothing changes where somebody else handles or ignores it."""
    usual = threading.current_thread() is threading.main_thread()
    if not usual or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, _raise)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _raise(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a second one ends at once
    raise Terminated
