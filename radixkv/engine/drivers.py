"""One thread drives an engine, and one engine at a time is at work on a model."""

from __future__ import annotations

import threading
import weakref
from typing import Any, Protocol

import torch

from radixkv.core.errors import InvalidRequestError

__all__ = ["Door", "claim"]


class Driver(Protocol):
    """What is asked of an engine here."""

    @property
    def is_at_work(self) -> bool:
        """Whether any of its requests is not finished."""


# Which engine drives a model. Weak on both sides: an engine holds its model.
_drivers: weakref.WeakKeyDictionary[torch.nn.Module, weakref.ref[Any]] = weakref.WeakKeyDictionary()
_drivers_lock = threading.Lock()


def claim(model: torch.nn.Module, engine: Driver) -> None:
    """Note that `engine` is at work on `model`.

    Raises:
        InvalidRequestError: Another engine is, and has unfinished requests.
    """
    with _drivers_lock:
        reference = _drivers.get(model)
        other = None if reference is None else reference()
        if other is not None and other is not engine and other.is_at_work:
            raise InvalidRequestError(
                "another engine is at work on this model: let it finish, or close() it, first"
            )
        _drivers[model] = weakref.ref(engine)


class Door:
    """Lets one thread in at a time; a second one gets an error instead of a result that is not its own."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self.in_step = False

    def enter(self, reentrant: bool = False) -> _Pass:
        """A `with` block in which this thread alone may use the engine.

        Args:
            reentrant: Also allowed from within a step, as `abort` is to a callback of sampling.
        """
        return _Pass(self, reentrant)


class _Pass:
    def __init__(self, door: Door, reentrant: bool) -> None:
        self._door = door
        self._reentrant = reentrant

    def __enter__(self) -> None:
        if not self._door._lock.acquire(blocking=False):
            raise InvalidRequestError(
                "this engine is at work in another thread: drive it from one thread, or guard it with a lock"
            )
        if self._door.in_step and not self._reentrant:
            self._door._lock.release()
            raise InvalidRequestError(
                "an engine cannot be called from within its own step, except for abort()"
            )

    def __exit__(self, *_: object) -> None:
        self._door._lock.release()
