"""Calls at a later time, in one thread for the whole process."""

from __future__ import annotations

import heapq
import itertools
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable

__all__ = ["Alarm", "Alarms", "alarms"]

_LOG = logging.getLogger(__name__)


class Alarm:
    """One call that is to come; `cancel` it if it no longer has to."""

    __slots__ = ("_alarms", "callback", "number", "time")

    def __init__(self, owner: Alarms, when: float, number: int, callback: Callable[[], None]) -> None:
        self._alarms = owner
        self.time = when
        self.number = number
        self.callback: Callable[[], None] | None = callback

    def __lt__(self, other: Alarm) -> bool:
        return (self.time, self.number) < (other.time, other.number)

    def cancel(self) -> None:
        """It does not ring, and what it refers to is let go. Nothing happens if it rang, or rings at this moment."""
        self._alarms._cancel(self)


class Alarms:
    """Runs callbacks when their time has come, in a daemon thread that is there only while any are waiting."""

    _changed: threading.Condition
    _waiting: list[Alarm]
    _num_cancelled: int
    _thread: threading.Thread | None

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._forget()
        _all_alarms.add(self)

    def after(self, seconds: float, callback: Callable[[], None]) -> Alarm:
        """Call something in `seconds`; it must be quick. What it raises is logged.

        What it refers to lives until then, or until the alarm is cancelled: let it refer weakly to what is large.

        Raises:
            RuntimeError: There is no thread yet, and none can be started. Nothing is set.
        """
        with self._changed:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="radixkv-alarms", daemon=True)
                thread.start()  # waits for the lock
                self._thread = thread
            alarm = Alarm(self, time.monotonic() + seconds, next(self._numbers), callback)
            heapq.heappush(self._waiting, alarm)
            self._changed.notify()
            return alarm

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._waiting:
                    self._thread = None
                    return
                left = self._waiting[0].time - time.monotonic()
                if left > 0 and self._waiting[0].callback is not None:
                    self._changed.wait(min(left, threading.TIMEOUT_MAX))
                    continue
                alarm = heapq.heappop(self._waiting)
                callback, alarm.callback = alarm.callback, None
                if callback is None:
                    self._num_cancelled -= 1
                    continue
            try:
                callback()
            except BaseException:  # all others would go unheard with it
                _LOG.exception("radixkv: an alarm failed")
            del alarm, callback  # or it would keep alive what it refers to, until the next one

    def _cancel(self, alarm: Alarm) -> None:
        with self._changed:
            if alarm.callback is None:
                return
            alarm.callback = None
            self._num_cancelled += 1
            # One that is cancelled costs its share of a sweep through the heap, which never is mostly dead.
            if 2 * self._num_cancelled > len(self._waiting):
                waiting, self._waiting, self._num_cancelled = self._waiting, [], 0
                # What a garbage collection sets in this moment is kept, too.
                self._waiting += [alarm for alarm in waiting if alarm.callback is not None]
                heapq.heapify(self._waiting)
                self._changed.notify()

    def _forget(self) -> None:
        """A forked child has neither the thread nor the caches of its parent to look after."""
        # Reentrant: the garbage collector may drop something that sets an alarm in the middle of any line.
        self._changed = threading.Condition(threading.RLock())
        self._waiting = []
        self._num_cancelled = 0
        self._thread = None


_all_alarms: weakref.WeakSet[Alarms] = weakref.WeakSet()


def _forget_all() -> None:
    for each in list(_all_alarms):
        each._forget()


if hasattr(os, "register_at_fork"):  # there is no fork on Windows
    os.register_at_fork(after_in_child=_forget_all)

alarms = Alarms()
