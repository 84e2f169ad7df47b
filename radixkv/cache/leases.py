"""Prefixes that stay cached for somebody, until they are released or their time is over."""

from __future__ import annotations

import weakref
from functools import partial
from typing import TYPE_CHECKING

from radixkv.cache.alarms import Alarm, alarms

if TYPE_CHECKING:
    from radixkv.cache.prefix_cache import PrefixCache
    from radixkv.core.match import Match

__all__ = ["Lease"]


class Lease:
    """A prefix that stays cached until `release()`, or until its time is over; also a context manager.

    Made by `PrefixCache.pin`.

    Attributes:
        num_tokens: Tokens pinned: the longest cached prefix of what was asked for.
        expired: Whether its time to live is over.
    """

    def __init__(self, cache: PrefixCache, match: Match) -> None:
        self._cache = cache
        self._match = match
        self._alarm: Alarm | None = None
        self.num_tokens = match.num_tokens
        self.expired = False

    def __repr__(self) -> str:
        state = ", expired" if self.expired else ", released" if self._match.released else ""
        return f"Lease({self.num_tokens} tokens{state})"

    def release(self) -> None:
        """Let the prefix be evicted again. Nothing happens if the lease has expired.

        Raises:
            InvalidRequestError: It was released before.
        """
        with self._cache.lock:
            if not self.expired:
                self._end()

    def end_after(self, seconds: float) -> None:
        """Let it end by itself after so many `seconds`, whether or not somebody still has it."""
        timed = self._cache.timed_leases
        timed.add(self)  # which keeps it, where nobody else does
        try:
            self._alarm = alarms.after(seconds, partial(_expire, weakref.ref(self._cache), weakref.ref(self)))
        except BaseException:
            timed.discard(self)
            raise

    def _end(self) -> None:
        self._match.release()
        self._cache.timed_leases.discard(self)
        if self._alarm is not None:
            self._alarm.cancel()

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: object) -> None:
        with self._cache.lock:
            if not self._match.released:
                self.release()


def _expire(cache: weakref.ref[PrefixCache], lease: weakref.ref[Lease]) -> None:
    """The time of a lease is over. It may have been released before, and the cache may be gone."""
    owner, ending = cache(), lease()
    if owner is None or ending is None:
        return
    with owner.lock:
        if ending._match.released:
            owner.timed_leases.discard(ending)
        else:
            ending._end()
            ending.expired = True
