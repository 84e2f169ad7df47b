"""Why a prompt missed: a bounded memory of what was cached before."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

from radixkv.cache.key_table import Keys, KeyTable, Places
from radixkv.core.block_states import BlockIds
from radixkv.core.hashing import namespace_seed
from radixkv.core.listener import TreeListener
from radixkv.core.namespace import namespace_text
from radixkv.core.tokens import TokenArray
from radixkv.observe.requests import MissNote

__all__ = ["MissNotes", "readable"]

_MAX_BYTES = 64 << 20
_BLOCKS_PER_BLOCK = 32
_MAX_NAMES = 256
_LAST_TIME = 2**32 - 1
_MASK = 2**64 - 1
_STEP = np.uint64(0x9E3779B97F4A7C15)  # added for each token, so that a token 0 counts
_HIGH = np.uint64(32)
_ONE = np.uint32(1)


class _Name:
    """A namespace of the tree.

    Attributes:
        user: Canonical namespace of the user that it belongs to.
        cleared: What was cached up to this time was cleared.
        closed: Nothing will be cached in it again.
        doubtful: What was cached up to this time may have been cleared.
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

    A prefix is remembered by a 64-bit key of its tokens (a multilinear form with random factors, Carter and Wegman,
    1979, plus a seed for its namespace), never by the tokens. One table has a row for each block: the key of the
    prefix that ends with the block's first token, and 32 bits for each longer one within the block. Another has
    the keys of single tokens in blocks whose first token stands in the first table with another continuation.
    So the answer is right to the token.

    What it says is true, up to collisions of keys (`2**-31` for each lookup, at worst): "never_seen" is said only if
    nothing has been forgotten that could be it, else "unknown".

    Costs: a full hit none; a lookup one product over the tokens up to the position that is missing, and a search in
    the tables; newly cached blocks one row each, when they are stored. Memory: 32 rows or more for each block of the
    pool, of `12 + 4 * block_size` bytes, but no more than 64 MiB; and no more than 13 MiB for the second table.

    Args:
        num_blocks: Blocks of the pool.
        block_size: Tokens in a block.
        num_rows: Blocks to remember, a power of two of at least 4; None: as below.
    """

    def __init__(self, num_blocks: int, block_size: int, num_rows: int | None = None) -> None:
        self._size = block_size
        if num_rows is None:
            most = max(4, _MAX_BYTES // (12 + 4 * block_size))
            wanted = max(1024, num_blocks * _BLOCKS_PER_BLOCK)
            num_rows = min(1 << (wanted - 1).bit_length(), 1 << (most.bit_length() - 1))
        self.num_rows = num_rows
        self._rows = KeyTable(num_rows, block_size)
        self._singles = KeyTable(max(4, min(num_rows * 4, 1 << 20)))
        self._factors = np.empty(0, np.uint64)
        self._random = np.random.default_rng()
        self._time = 0
        self._names: OrderedDict[bytes, _Name] = OrderedDict()
        self._keys: list[bytes] = []  # by place
        self._seeds = np.empty(_MAX_NAMES, np.uint64)  # by place
        self._lost_names = False
        self._cleared = 0  # the latest time up to which something was cleared

    @property
    def num_bytes(self) -> int:
        """Memory that the tables can come to take."""
        return self._rows.num_bytes + self._singles.num_bytes

    # -- told by the tree ------------------------------------------------------------------------------------

    def on_matched(
        self, namespace: bytes, tokens: TokenArray, num_hit: int, limit: int, again: bool
    ) -> MissNote | None:
        """The note of a request that is not cached whole; None for one that is."""
        if num_hit >= limit:
            return None
        name = self._name(namespace)
        start = num_hit // self._size * self._size
        key = first = self._key(tokens, start + 1)
        if num_hit > start:
            key = self._key(tokens, num_hit + 1, start + 1, first)
        reason, other = self._why(name, first, key, num_hit - start)
        if other is None:
            return MissNote(num_hit, reason)
        seen_in = readable(other.user)
        if other.user == name.user:
            seen_in += ", under other weights, adapters or settings of the model"
        return MissNote(num_hit, reason, seen_in)

    def on_stored(
        self, namespace: bytes, tokens: TokenArray, first: int, blocks: BlockIds, parent: int
    ) -> None:
        """Remember these blocks."""
        name = self._name(namespace)
        self._remember(name.seed, tokens, first, max(name.cleared, name.doubtful))

    def on_cleared(self) -> None:
        """What is remembered was cleared."""
        self.cleared(None)

    # -- told by the cache, under the lock of the tree --------------------------------------------------------

    def learn(self, namespace: bytes, user: bytes) -> None:
        """A namespace of the tree belongs to a user's namespace (canonical)."""
        name = self._name(namespace, user)
        if name.user != user:
            name.belongs_to(user)

    def not_kept(self, namespace: bytes, tokens: TokenArray, first: int) -> None:
        """These tokens were computed, and from block `first` on there was no room."""
        self._remember(self._name(namespace).kept_seed, tokens, first)

    def bypassed(self, user: bytes, tokens: TokenArray) -> None:
        """A prompt of a user's namespace (canonical) was passed through."""
        self._remember(_bypass_seed(user), tokens, 0)

    def cleared(self, namespaces: set[bytes] | None, forever: bool = False) -> None:
        """Everything in these namespaces of the tree, or in all (None), was dropped on purpose.

        Args:
            namespaces: Canonical namespaces of the tree.
            forever: Nothing will be cached in them again: others take their place.
        """
        self._cleared = self._tick()
        for key, name in self._names.items():
            if namespaces is None or key in namespaces:
                name.cleared = self._cleared
                name.closed |= forever

    # -- inner -----------------------------------------------------------------------------------------------

    def _why(self, name: _Name, first: int, key: int, row: int) -> tuple[str, _Name | None]:
        """The reason for a position, row `row` of a block, from the keys of the block's first token and its own."""
        own = [name.seed, name.kept_seed, name.bypass_seed]
        seeds = np.concatenate((np.array(own, np.uint64), self._seeds[: len(self._keys)]))
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
            other = self._names[self._keys[int(times[3:].argmax())]]
            if other.user == name.user and other.closed:
                return "cleared", None
            return "other_namespace", other
        return ("never_seen" if certain and not self._lost_names else "unknown"), None

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

    def _remember(self, seed: int, tokens: TokenArray, first: int, since: int = 0) -> None:
        """Remember blocks `first` on of a path; what is known from before the time `since` is obsolete."""
        size = self._size
        start = first * size
        num = len(tokens) - start
        if num <= 0:
            return
        keys = self._all_keys(tokens, start, seed)
        firsts = keys[::size]
        flat = np.zeros(len(firsts) * size, np.uint32)
        flat[:num] = _marks(keys)
        marks = flat.reshape(-1, size)
        time = self._tick()
        places, before = self._rows.put(firsts, time)
        there = np.flatnonzero(places >= 0)
        if not before.any():
            self._rows.marks[places[there]] = marks[there]
            return
        old = self._rows.marks[places]
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

    def _all_keys(self, tokens: TokenArray, start: int, seed: int) -> Keys:
        """`uint64[len(tokens) - start]`, the key of each prefix that is longer than `start`."""
        self._grow_factors(len(tokens))
        keys = tokens[start:].view(np.uint64) * self._factors[start : len(tokens)]
        keys += _STEP
        keys[:1] += np.uint64((self._key(tokens, start) + seed) & _MASK)
        return np.cumsum(keys, out=keys)

    def _key(self, tokens: TokenArray, stop: int, start: int = 0, key: int = 0) -> int:
        """Key of the first `stop` tokens, without a seed; `key` is that of the first `start`."""
        self._grow_factors(stop)
        more = int(np.dot(tokens[start:stop].view(np.uint64), self._factors[start:stop]))
        return (key + more + (stop - start) * int(_STEP)) & _MASK

    def _grow_factors(self, num: int) -> None:
        if num > len(self._factors):
            more = max(1024, num, 2 * len(self._factors)) - len(self._factors)
            fresh = self._random.integers(0, 2**64, more, dtype=np.uint64)
            self._factors = np.concatenate((self._factors, fresh | np.uint64(1)))

    def _tick(self) -> int:
        if self._time == _LAST_TIME:
            self._rows.forget_all()
            self._singles.forget_all()
            self._time = self._cleared = 0
            for name in self._names.values():
                name.cleared = name.doubtful = 0
        self._time += 1
        return self._time

    def _name(self, key: bytes, user: bytes | None = None) -> _Name:
        name = self._names.get(key)
        if name is not None:
            self._names.move_to_end(key)
            return name
        place = len(self._keys)
        if place == _MAX_NAMES:
            _, oldest = self._names.popitem(last=False)
            place = oldest.place
            self._lost_names = True
        else:
            self._keys.append(key)
        # If it is one that was dropped from the list, nobody knows any longer whether it was cleared.
        doubtful = self._cleared if self._lost_names else 0
        name = _Name(key, key if user is None else user, doubtful, place)
        self._keys[place] = key
        self._seeds[place] = name.seed
        self._names[key] = name
        return name


def _bypass_seed(user: bytes) -> int:
    return namespace_seed(b"bypassed;" + user)


def _marks(keys: Keys) -> np.ndarray:
    """32 bits of each key, never 0. The high ones: a multilinear form is best there."""
    return (keys >> _HIGH).astype(np.uint32) | _ONE


def readable(canonical: bytes) -> str:
    """A canonical namespace as Python would print what the user gave; as bytes if it is none of a user's."""
    return namespace_text(canonical) or repr(canonical)
