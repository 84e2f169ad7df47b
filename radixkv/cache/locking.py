"""The lock around pool and tree."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

__all__ = ["BooksLock"]


class BooksLock:
    """A reentrant lock that knows its owner and keeps Ctrl-C out of what it guards.

    An update of the tree takes several steps. A `KeyboardInterrupt` between two of them would leave books that
    do not balance, so in the main thread SIGINT is held back while the lock is, and delivered right after.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._owner: int | None = None
        self._depth = 0
        self._previous: Any = None
        self._interrupt: tuple[int, FrameType | None] | None = None

    def __enter__(self) -> None:
        self._lock.acquire()
        self._depth += 1
        if self._depth == 1:
            self._owner = threading.get_ident()
            if self._owner == threading.main_thread().ident:
                previous = signal.getsignal(signal.SIGINT)
                if callable(previous):
                    self._previous = previous
                    signal.signal(signal.SIGINT, self._note)

    def __exit__(self, *_: object) -> None:
        previous = interrupt = None
        if self._depth == 1:
            previous, self._previous = self._previous, None
            if previous is not None:
                signal.signal(signal.SIGINT, previous)
            interrupt, self._interrupt = self._interrupt, None
            self._owner = None
        self._depth -= 1
        self._lock.release()
        if previous is not None and interrupt is not None:
            previous(*interrupt)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self._interrupt = (signum, frame)

    @property
    def owned(self) -> bool:
        """Whether the calling thread holds the lock."""
        return self._owner == threading.get_ident()
