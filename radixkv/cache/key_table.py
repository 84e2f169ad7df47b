"""A table of bounded size that remembers 64-bit keys, and knows where it has forgotten some."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["KeyTable", "Keys", "Places"]

Keys = npt.NDArray[np.uint64]
Places = npt.NDArray[np.int64]

_WAYS = 4
_FEW = 12  # keys that are placed one by one sooner than together
_TWO = np.int64(2)  # a set begins at its number shifted by this


class KeyTable:
    """Remembers keys with the time of their last mention; a new key takes the place of the oldest of its set.

    Set-associative, as processor caches are: a key may lie in one of four places. The high bits of a key choose
    them, so they must be as good as random. Every method is a constant number of numpy calls, and no loop over keys.

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
        self._keys = np.zeros(num_places, np.uint64)  # 0 where nothing is
        self._keys_of_set = self._keys.reshape(-1, _WAYS)
        self.times = np.zeros(num_places, np.uint32)
        self._times_of_set = self.times.reshape(-1, _WAYS)
        self.marks = np.zeros((num_places, width), np.uint32)
        self._forgetful = np.zeros(num_sets, np.bool_)

    @property
    def num_bytes(self) -> int:
        """Memory that it can come to take."""
        return self._keys.nbytes + self.times.nbytes + self.marks.nbytes + self._forgetful.nbytes

    def find(self, keys: Keys) -> Places:
        """`int64[n]`, where each key lies, -1 for those that are not there."""
        return self._find(keys, self._sets(keys))

    def may_have_forgotten(self, keys: Keys) -> npt.NDArray[np.bool_]:
        """`bool[n]`, whether a key that is not found may have been there once."""
        return self._forgetful[self._sets(keys)]

    def put(self, keys: Keys, time: int) -> tuple[Places, npt.NDArray[np.uint32]]:
        """Mention keys, which must differ from each other.

        If there are more in one set than it has places, most of those that stay are the first ones.

        Returns:
            `int64[n]`, where each lies now (-1 for those that others of the same call have pushed out again), and
            `uint32[n]`, when they were mentioned before; 0 for those that were not there, whose marks are still
            those of another key.
        """
        sets = self._sets(keys)
        places = self._find(keys, sets)
        before = np.zeros(len(keys), np.uint32)
        known = (places >= 0).nonzero()[0]
        if not len(known):
            self._add(keys, sets, places, time)
            return places, before
        found = places[known]
        before[known] = self.times[found]
        self.times[found] = time
        if len(known) < len(keys):
            todo = (places < 0).nonzero()[0]
            mine = places[todo]
            self._add(keys[todo], sets[todo], mine, time)
            places[todo] = mine
            places[self._keys[places] != keys] = -1
        return places, before

    def _add(self, keys: Keys, sets: Places, places: Places, time: int) -> None:
        """Give new keys places, which are written to `places`."""
        at = self._times_of_set[sets].argmin(axis=1)
        at += sets << _TWO
        places[:] = at
        self._replace(sets, at, keys, time)
        # Of those that chose the same place, the last one has it.
        crowded = (self._keys[at] != keys).nonzero()[0]
        if not len(crowded):
            return
        if len(crowded) <= _FEW:
            for i in crowded.tolist():
                begin = _WAYS * sets.item(i)
                times = self.times[begin : begin + _WAYS].tolist()
                place = begin + times.index(min(times))
                self._forgetful[begin // _WAYS] |= self.times.item(place) > 0
                self._keys[place] = keys[i]
                self.times[place] = time
                places[i] = place
        else:
            places[crowded] = self._crowd(keys[crowded], sets[crowded], time)
        places[self._keys[places] != keys] = -1

    def _crowd(self, keys: Keys, sets: Places, time: int) -> Places:
        """Give several keys for each set their places in one go."""
        order = np.argsort(sets, kind="stable")
        keys, sets = keys[order], sets[order]
        begins = np.flatnonzero(np.concatenate(([True], sets[1:] != sets[:-1])))
        rank = np.arange(len(sets)) - np.repeat(begins, np.diff(np.append(begins, len(sets))))
        self._forgetful[sets[rank >= _WAYS]] = True
        fits = np.flatnonzero(rank < _WAYS)
        of = sets[fits]
        by_age = self._times_of_set[of].argsort(axis=1, kind="stable")
        at = (of << _TWO) + by_age[np.arange(len(of)), rank[fits]]
        self._replace(of, at, keys[fits], time)
        places = np.full(len(keys), -1, np.int64)
        places[order[fits]] = at
        return places

    def _replace(self, sets: Places, at: Places, keys: Keys, time: int) -> None:
        old = self.times[at].nonzero()[0]
        if len(old):
            self._forgetful[sets[old]] = True
        self._keys[at] = keys
        self.times[at] = time

    def forget(self, keys: Keys) -> None:
        """Some of what was kept with these keys is lost."""
        self._forgetful[self._sets(keys)] = True

    def forget_all(self) -> None:
        """As new, but for knowing that something was forgotten, anywhere."""
        self._keys[:] = 0
        self.times[:] = 0
        self._forgetful[:] = True

    def _find(self, keys: Keys, sets: Places) -> Places:
        same = (self._keys_of_set[sets] == keys[:, None]).ravel().nonzero()[0]  # once for each key, at most
        places = np.full(len(keys), -1, np.int64)
        if len(same):
            which = same >> _TWO
            places[which] = (sets[which] << _TWO) + (same & (_WAYS - 1))
        return places

    def _sets(self, keys: Keys) -> Places:
        if self._one_set:
            return np.zeros(len(keys), np.int64)
        return (keys >> self._shift).view(np.int64)
