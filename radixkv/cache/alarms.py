"""Calls at a later time, in one thread for the whole process."""

from __future__ import annotations

import heapq
import itertools
import os
import threading
import time
from collections.abc import Callable

__all__ = ["Alarms", "alarms"]


class Alarms:
    """Runs callbacks when their time has come, in a daemon thread that is there only while any are waiting."""

    def __init__(self) -> None:
        # Reentrant: the garbage collector may drop something that sets an alarm in the middle of any line.
        self._changed = threading.Condition(threading.RLock())
        self._numbers = itertools.count()
        self._waiting: list[tuple[float, int, Callable[[], None]]] = []
        self._thread: threading.Thread | None = None
        os.register_at_fork(after_in_child=self._forget)

    def after(self, seconds: float, callback: Callable[[], None]) -> None:
        """Call something in `seconds`; it must be quick and must not raise.

        What it refers to lives until then: let it refer weakly to what is large.
        """
        with self._changed:
            heapq.heappush(self._waiting, (time.monotonic() + seconds, next(self._numbers), callback))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="radixkv-alarms", daemon=True)
                self._thread.start()
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._waiting:
                    self._thread = None
                    return
                left = self._waiting[0][0] - time.monotonic()
                if left > 0:
                    self._changed.wait(min(left, threading.TIMEOUT_MAX))
                    continue
                _, _, callback = heapq.heappop(self._waiting)
            callback()
            del callback  # or it would keep alive what it refers to, until the next one

    def _forget(self) -> None:
        """A forked child has neither the thread nor the caches of its parent to look after."""
        self._changed = threading.Condition(threading.RLock())
        self._waiting = []
        self._thread = None


alarms = Alarms()
