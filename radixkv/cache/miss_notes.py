"""Why a prompt missed: a bounded memory of what was cached before."""

from __future__ import annotations

import sys
import threading
from collections import OrderedDict
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import numpy.typing as npt

from radixkv.cache.key_table import Keys, KeyTable, Places
from radixkv.cache.prefix_keys import MASK, PrefixKeys
from radixkv.core.block_states import BlockIds
from radixkv.core.hashing import namespace_seed
from radixkv.core.listener import TreeListener
from radixkv.core.namespace import namespace_text
from radixkv.core.tokens import TokenArray
from radixkv.observe.requests import OTHER_CIRCUMSTANCES, MissNote

__all__ = ["MissNotes", "readable"]

_MAX_BYTES = 64 << 20
_BLOCKS_PER_BLOCK = 32
_MAX_NAMES = 256
_MAX_EARLY = 16
_MAX_SEEN = 1 << 23
_LAST_TIME = 2**32 - 1
_HIGH_HALF = int(sys.byteorder == "little")
_ONE = np.uint32(1)


class _Name:
    """A namespace of the tree.

    Attributes:
        user: Canonical namespace of the user that it belongs to.
        cleared: What was cached up to this time was cleared.
        closed: Nothing will be cached in it again.
        doubtful: What was cached up to this time may have been cleared.
        place: In the list; early ones have the first places, and are never dropped from it.
        seed: Added to the keys of what was cached in it; `kept_seed` of what was not kept, `bypass_seed` of
            what was passed through.
    """

    __slots__ = ("bypass_seed", "cleared", "closed", "doubtful", "kept_seed", "place", "seed", "user")

    def __init__(self, key: bytes, user: bytes, doubtful: int, place: int) -> None:
        self.seed = namespace_seed(key)
        self.kept_seed = namespace_seed(b"not kept;" + key)
        self.doubtful = doubtful
        self.cleared = 0
        self.closed = False
        self.place = place
        self.belongs_to(user)

    def belongs_to(self, user: bytes) -> None:
        self.user = user
        self.bypass_seed = _bypass_seed(user)


class MissNotes(TreeListener):
    """Remembers which prefixes were cached, and says of a lookup why it found no more.

    A prefix is remembered by a 64-bit key of its tokens (`PrefixKeys`, plus a seed for its namespace), never by the
    tokens. One table has a row for each block: the key of the prefix that ends with the block's first token, and 32
    bits for each longer one within the block. Another has the keys of single tokens in blocks whose first token stands
    in the first table with another continuation. So the answer is right to the token.

    Whether another namespace had a prefix is asked of all that are known: the first 16, and the 240 others that were in
    use last. What those others store also sets a mark for its key without the seed. Where there is no such mark, no
    namespace but the 16 can have had the prefix, whether or not it is still known, and the others need not be asked.

    What it says is true, up to collisions of keys (`2**-31` for each lookup, at worst): "never_seen" is said only if
    nothing has been forgotten that could be it, else "unknown".

    Costs: a full hit none; a lookup one product over the tokens up to the position that is missing, and a search in
    the tables; newly cached blocks one row each, when they are stored, however long the path before them is. Memory:
    32 rows or more for each block of the pool, of `12 + 4 * block_size` bytes, but no more than 64 MiB; no more than 13
    MiB for the second table, 8 MiB for marks and 1 MiB for factors; and 8 bytes for each block of the pool.

    Args:
        num_blocks: Blocks of the pool.
        block_size: Tokens in a block.
        num_rows: Blocks to remember, a power of two of at least 4; None: as below.
        lock: The pool's, under which the tree calls its listeners; the other methods take it.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        num_rows: int | None = None,
        lock: AbstractContextManager[Any] | None = None,
    ) -> None:
        self._size = block_size
        self._lock = threading.RLock() if lock is None else lock
        if num_rows is None:
            most = max(4, _MAX_BYTES // (12 + 4 * block_size))
            wanted = max(1024, num_blocks * _BLOCKS_PER_BLOCK)
            num_rows = min(1 << (wanted - 1).bit_length(), 1 << (most.bit_length() - 1))
        self.num_rows = num_rows
        self._rows = KeyTable(num_rows, block_size)
        self._singles = KeyTable(max(4, min(num_rows * 4, 1 << 20)))
        self._prefixes = PrefixKeys()
        self._ends = np.zeros(
            num_blocks, np.uint64
        )  # key of the path up to the end of each whole block, 0: not known
        self._time = 0
        self._early: dict[bytes, _Name] = {}
        self._late: OrderedDict[bytes, _Name] = OrderedDict()
        self._places: list[_Name] = []
        self._seeds = np.empty(_MAX_NAMES, np.uint64)  # by place
        self._lost_names = False
        num_marks = min(1 << (num_rows * block_size - 1).bit_length(), _MAX_SEEN)
        self._seen = np.zeros(num_marks, np.bool_)  # what late namespaces stored
        self._seen_shift = np.uint64(64 - (num_marks.bit_length() - 1))
        self._cleared = 0  # the latest time up to which something was cleared

    @property
    def num_bytes(self) -> int:
        """Memory that it can come to take."""
        tables = self._rows.num_bytes + self._singles.num_bytes
        return tables + self._prefixes.num_bytes + self._ends.nbytes + self._seen.nbytes

    # -- told by the tree ------------------------------------------------------------------------------------

    def on_matched(
        self, namespace: bytes, tokens: TokenArray, num_hit: int, limit: int, again: bool
    ) -> MissNote | None:
        """The note of a request that is not cached whole; None for one that is."""
        if num_hit >= limit:
            return None
        name = self._name(namespace)
        start = num_hit // self._size * self._size
        key = first = self._prefixes.key(tokens, start + 1)
        if num_hit > start:
            key = self._prefixes.key(tokens, num_hit + 1, start + 1, first)
        reason, other = self._why(name, first, key, num_hit - start)
        if other is None:
            return MissNote(num_hit, reason)
        seen_in = readable(other.user)
        if other.user == name.user:
            seen_in += OTHER_CIRCUMSTANCES
        return MissNote(num_hit, reason, seen_in)

    def on_stored(
        self, namespace: bytes, tokens: TokenArray, first: int, blocks: BlockIds, parent: int
    ) -> None:
        """Remember these blocks."""
        size, name = self._size, self._name(namespace)
        start = first * size
        key = int(self._ends[parent]) if parent >= 0 else 0
        if start and not key:  # stored before this listened
            key = self._prefixes.key(tokens, start)
        keys = self._prefixes.following(tokens, start, (key + name.seed) & MASK)
        ends = keys[size - 1 :: size] - np.uint64(name.seed)
        self._ends[blocks[: len(ends)]] = ends
        if name.place >= _MAX_EARLY:
            self._seen[((keys - np.uint64(name.seed)) >> self._seen_shift).view(np.int64)] = True
        self._remember(keys, max(name.cleared, name.doubtful))

    def on_cleared(self) -> None:
        """What is remembered was cleared."""
        self.cleared(None)

    # -- told by the cache -----------------------------------------------------------------------------------

    def learn(self, namespace: bytes, user: bytes) -> None:
        """A namespace of the tree belongs to a user's namespace (canonical)."""
        with self._lock:
            name = self._name(namespace, user)
            if name.user != user:
                name.belongs_to(user)

    def not_kept(self, namespace: bytes, tokens: TokenArray, first: int) -> None:
        """These tokens were computed, and from block `first` on there was no room."""
        with self._lock:
            self._pass_by(self._name(namespace).kept_seed, tokens, first * self._size)

    def bypassed(self, user: bytes, tokens: TokenArray) -> None:
        """A prompt of a user's namespace (canonical) was passed through."""
        with self._lock:
            self._pass_by(_bypass_seed(user), tokens, 0)

    def cleared(self, namespaces: set[bytes] | None, forever: bool = False) -> None:
        """Everything in these namespaces of the tree, or in all (None), was dropped on purpose.

        Args:
            namespaces: Canonical namespaces of the tree.
            forever: Nothing will be cached in them again: others take their place.
        """
        with self._lock:
            self._cleared = self._tick()
            for known in (self._early, self._late):
                for key, name in known.items():
                    if namespaces is None or key in namespaces:
                        name.cleared = self._cleared
                        name.closed |= forever

    # -- inner -----------------------------------------------------------------------------------------------

    def _why(self, name: _Name, first: int, key: int, row: int) -> tuple[str, _Name | None]:
        """The reason for a position, row `row` of a block, from the keys of the block's first token and its own."""
        own = [name.seed, name.kept_seed, name.bypass_seed]
        late = bool(self._seen[key >> int(self._seen_shift)])
        others = self._seeds[: len(self._places) if late else min(len(self._places), _MAX_EARLY)]
        seeds = np.concatenate((np.array(own, np.uint64), others))
        if name.place < len(others):
            seeds[len(own) + name.place] = name.seed  # itself, once more
        times, certain = self._times(first, key, row, seeds)
        own_time, kept, bypassed = times[:3].tolist()
        if own_time:
            if own_time <= name.cleared:
                return "cleared", None
            return ("unknown" if own_time <= name.doubtful else "evicted"), None
        if kept:
            return "not_kept", None
        if bypassed:
            return "bypassed", None
        if times.any():
            other = self._places[int(times[3:].argmax())]
            if other.user == name.user and other.closed:
                return "cleared", None
            return "other_namespace", other
        return ("never_seen" if certain and not (late and self._lost_names) else "unknown"), None

    def _times(self, first: int, key: int, row: int, seeds: Keys) -> tuple[Places, bool]:
        """When the prefix of `key` was last mentioned under each seed, 0 for never; whether a 0 is certain."""
        rows, singles = self._rows, self._singles
        first_keys, keys = seeds + np.uint64(first), seeds + np.uint64(key)
        places = rows.find(first_keys)
        found = places >= 0
        if row:
            found &= rows.marks[places, row] == _marks(keys)
        times = np.where(found, rows.times[places], 0).astype(np.int64)
        forgotten = rows.may_have_forgotten(first_keys)
        if row and not found.all():
            places = singles.find(keys)
            times = np.where(~found & (places >= 0), singles.times[places], times)
            forgotten |= singles.may_have_forgotten(keys)
        return times, not forgotten[times == 0].any()

    def _pass_by(self, seed: int, tokens: TokenArray, start: int) -> None:
        if start < len(tokens):
            key = self._prefixes.key(tokens, start) + seed
            self._remember(self._prefixes.following(tokens, start, key & MASK))

    def _remember(self, keys: Keys, since: int = 0) -> None:
        """Remember the prefixes with these keys, of which the first ends with the first token of a block.

        Args:
            keys: `uint64[...]`, at least one.
            since: What is known from before this time is obsolete.
        """
        size, num = self._size, len(keys)
        firsts = keys[::size]
        flat = _marks(keys)
        if num % size:
            flat = np.concatenate((flat, np.zeros(-num % size, np.uint32)))
        marks = flat.reshape(-1, size)
        time = self._tick()
        places, before = self._rows.put(firsts, time)
        if not before.any():
            if (places < 0).any():
                there = np.flatnonzero(places >= 0)
                places, marks = places[there], marks[there]
            self._rows.marks[places] = marks
            return
        old = self._rows.marks[places]
        old[before == 0] = 0
        stale = (before > 0) & (before <= since)
        if stale.any():
            lost = stale & ((old != 0) & (old != marks)).any(axis=1)
            self._rows.forget(firsts[lost])
            old[stale] = 0
        both = (old != 0) & (marks != 0)
        both[:, 0] = False  # the first token's key was compared whole
        differ = (both & (old != marks)).any(axis=1) & (before > 0)
        rows = np.flatnonzero((places >= 0) & ~differ)
        self._rows.marks[places[rows]] = np.where(marks[rows] != 0, marks[rows], old[rows])
        if differ.any():
            # Another continuation is in the row already: each of these tokens is remembered by itself.
            wanted = differ[:, None] & (marks != 0) & (marks != old)
            single = keys[np.flatnonzero(wanted.ravel()[:num])]
            if len(single):
                self._singles.put(single, time)

    def _tick(self) -> int:
        if self._time == _LAST_TIME:
            self._rows.forget_all()
            self._singles.forget_all()
            self._time = self._cleared = 0
            for name in self._places:
                name.cleared = name.doubtful = 0
        self._time += 1
        return self._time

    def _name(self, key: bytes, user: bytes | None = None) -> _Name:
        name = self._early.get(key)
        if name is not None:
            return name
        name = self._late.get(key)
        if name is not None:
            self._late.move_to_end(key)
            return name
        place = len(self._places)
        if place == _MAX_NAMES:
            _, oldest = self._late.popitem(last=False)
            place = oldest.place
            self._lost_names = True
        # If it is one that was dropped from the list, nobody knows any longer whether it was cleared.
        doubtful = self._cleared if self._lost_names else 0
        name = _Name(key, key if user is None else user, doubtful, place)
        self._places[place : place + 1] = [name]
        self._seeds[place] = name.seed
        known = self._early if place < _MAX_EARLY else self._late
        known[key] = name
        return name


def _bypass_seed(user: bytes) -> int:
    return namespace_seed(b"bypassed;" + user)


def _marks(keys: Keys) -> npt.NDArray[np.uint32]:
    """32 bits of each key, never 0. The high ones: a multilinear form is best there."""
    return keys.view(np.uint32)[_HIGH_HALF::2] | _ONE


def readable(canonical: bytes) -> str:
    """A canonical namespace as Python would print what the user gave; as bytes if it is none of a user's."""
    return namespace_text(canonical) or repr(canonical)
