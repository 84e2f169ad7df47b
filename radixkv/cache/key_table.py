"""A table of bounded size that remembers 64-bit keys, and knows where it has forgotten some."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["KeyTable", "Keys", "Places"]

Keys = npt.NDArray[np.uint64]
Places = npt.NDArray[np.int64]

_WAYS = 4


class KeyTable:
    """Remembers keys with the time of their last mention; a new key takes the place of the oldest of its set.

    Set-associative, as processor caches are: a key may lie in one of four places. The high bits of a key choose
    them, so they must be as good as random. Every method is a constant number of numpy calls, and no loop over keys
    (a rare collision within one call takes another round).

    Args:
        num_places: Keys it can hold, a power of two, at least 4. 12 bytes each, and 4 for each of `width`.
        width: `uint32` marks kept with each key.

    Attributes:
        marks: `uint32[num_places, width]`.
        times: `uint32[num_places]`, 0 where nothing is.
    """

    def __init__(self, num_places: int, width: int = 0) -> None:
        num_sets = num_places // _WAYS
        self._shift = np.uint64(64 - (num_sets.bit_length() - 1))
        self._one_set = num_sets == 1  # a shift by 64 is undefined
        # Pages of zeros that nobody has written to take no memory.
        self._keys = np.zeros(num_places, np.uint64)
        self.times = np.zeros(num_places, np.uint32)
        self.marks = np.zeros((num_places, width), np.uint32)
        self._forgetful = np.zeros(num_sets, np.bool_)

    @property
    def num_bytes(self) -> int:
        """Memory that it can come to take."""
        return self._keys.nbytes + self.times.nbytes + self.marks.nbytes + self._forgetful.nbytes

    def find(self, keys: Keys) -> Places:
        """`int64[n]`, where each key lies, -1 for those that are not there."""
        places = self._first_places(keys)[:, None] + np.arange(_WAYS)
        same = (self._keys[places] == keys[:, None]) & (self.times[places] > 0)
        return np.where(same.any(axis=1), places[:, 0] + same.argmax(axis=1), -1)

    def may_have_forgotten(self, keys: Keys) -> npt.NDArray[np.bool_]:
        """`bool[n]`, whether a key that is not found may have been there once."""
        return self._forgetful[self._first_places(keys) // _WAYS]

    def put(self, keys: Keys, time: int) -> tuple[Places, npt.NDArray[np.uint32]]:
        """Mention keys, which must differ from each other.

        Returns:
            `int64[n]`, where each lies now (-1 for those that others of the same call have pushed out again), and
            `uint32[n]`, when they were mentioned before; 0 for those that were not there, whose marks are 0.
        """
        places = self.find(keys)
        known = places >= 0
        before = np.where(known, self.times[places], 0).astype(np.uint32)
        self.times[places[known]] = time
        todo = np.flatnonzero(~known)
        while len(todo):
            new = keys[todo]
            first = self._first_places(new)
            oldest = self.times[first[:, None] + np.arange(_WAYS)].argmin(axis=1)
            at = first + oldest
            self._forgetful[first[self.times[at] > 0] // _WAYS] = True
            self._keys[at] = new
            won = self._keys[at] == new  # of two that chose the same place, the last one has it
            self.times[at] = time
            self.marks[at] = 0
            places[todo] = at
            todo = todo[~won]
        places[self._keys[places] != keys] = -1
        return places, before

    def forget(self, keys: Keys) -> None:
        """Some of what was kept with these keys is lost."""
        self._forgetful[self._first_places(keys) // _WAYS] = True

    def forget_all(self) -> None:
        """As new, but for knowing that something was forgotten, anywhere."""
        self.times[:] = 0
        self._forgetful[:] = True

    def _first_places(self, keys: Keys) -> Places:
        if self._one_set:
            return np.zeros(len(keys), np.int64)
        return (keys >> self._shift).astype(np.int64) * _WAYS
