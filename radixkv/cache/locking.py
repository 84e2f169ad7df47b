"""The lock around pool and tree, and keeping Ctrl-C out of what must not stop half-way."""

from __future__ import annotations

import _thread
import signal
import threading
from types import FrameType
from typing import Any

try:
    # The public functions turn every handler into an enum and back: microseconds, in which Ctrl-C gets through.
    import _signal as _raw  # type: ignore[import-not-found]
except ImportError:  # not CPython
    _raw = signal

__all__ = ["BooksLock", "InterruptsHeld", "books_are_open"]

_SIGINT = int(signal.SIGINT)


class InterruptsHeld:
    """Holds SIGINT back for the length of a `with` block in the main thread, and delivers it afterwards.

    Args:
        later: Deliver it a moment after the block instead of at its end: a finalizer must not raise, because
            Python would print and swallow the `KeyboardInterrupt`.
    """

    def __init__(self, later: bool = False) -> None:
        self._later = later
        self._insist = False
        self._previous: Any = None
        self._came: tuple[int, FrameType | None] | None = None

    def __enter__(self) -> InterruptsHeld:
        if threading.get_ident() == threading.main_thread().ident:
            previous = _raw.getsignal(_SIGINT)
            if callable(previous):
                self._previous = previous
                _raw.signal(_SIGINT, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        previous, self._previous = self._previous, None
        if previous is None:
            return
        _raw.signal(_SIGINT, previous)
        came, self._came = self._came, None
        if came is None:
            return
        if self._later:
            threading.Timer(0.01, _thread.interrupt_main).start()
        else:
            previous(*came)

    def insisting(self) -> _Insisting:
        """A part of the block, one that may take seconds and can be left half-way: a second interrupt goes through."""
        return _Insisting(self)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        again, self._came = self._came is not None, (signum, frame)
        if again and self._insist:
            self._came = None
            self._previous(signum, frame)


class _Insisting:
    def __init__(self, held: InterruptsHeld) -> None:
        self._held = held

    def __enter__(self) -> None:
        self._held._insist = True

    def __exit__(self, *_: object) -> None:
        self._held._insist = False


class _Held(threading.local):
    count = 0


_held = _Held()


def books_are_open() -> bool:
    """Whether this thread is inside some `BooksLock`: a garbage collection there must not take another one."""
    return _held.count > 0


class BooksLock:
    """A reentrant lock that keeps Ctrl-C out of what it guards.

    An update of the tree takes several steps. A `KeyboardInterrupt` between two of them would leave books that
    do not balance, so SIGINT is held back while the lock is, and delivered right after.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._depth = 0
        self._interrupts: InterruptsHeld | None = None

    def __enter__(self) -> None:
        interrupts = None
        if _held.count == 0:
            # Before the lock is taken, so that no interrupt can come between.
            interrupts = InterruptsHeld()
            interrupts.__enter__()
        _held.count += 1
        self._lock.acquire()
        self._depth += 1
        if self._depth == 1:
            self._interrupts = interrupts

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        interrupts = None
        if self._depth == 0:
            interrupts, self._interrupts = self._interrupts, None
        self._lock.release()
        _held.count -= 1
        if interrupts is not None:
            interrupts.__exit__()
