"""Who waits, and who is next."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Callable
from operator import attrgetter

from sortedcontainers import SortedList

from radixkv.core.tokens import TokenArray
from radixkv.sched.pending import num_common
from radixkv.sched.request import Key, Sequence

by_key = attrgetter("key")


def insert_by_key(seqs: list[Sequence], seq: Sequence) -> None:
    """Insert into a list in order of arrival."""
    if seqs and seqs[-1].key > seq.key:
        insort(seqs, seq, key=by_key)
    else:
        seqs.append(seq)


def remove_by_key(seqs: list[Sequence], seq: Sequence) -> None:
    """Remove from a list in order of arrival."""
    at = bisect_left(seqs, seq.key, key=by_key)
    assert seqs[at] is seq
    del seqs[at]


def _never_ran(seq: Sequence) -> bool:
    return seq.state == "waiting" and not seq._started and seq._leader is None and seq.row < 0


class WaitingQueue:
    """Sequences that wait for a row and blocks, in order of arrival.

    A sequence that waits for a prefix which another one computes is *parked* with that one, out of the queue, so
    that a step costs nothing for it.

    Ageing: let x pass w if x arrived later and is admitted first. Of all that wait, the oldest has been passed most
    often. Once that is `max_overtakes` times, nobody is next but this one.

    Args:
        max_overtakes: See above.

    Attributes:
        version: Changes with whoever is in the queue.
    """

    def __init__(self, max_overtakes: int) -> None:
        self.version = 0
        self._max_overtakes = max_overtakes
        self._ready: list[Sequence] = []
        self._new: list[
            tuple[Key, Sequence]
        ] = []  # a heap of those never admitted, some of them gone meanwhile
        self._most_new = 64
        self._later: list[Key] = []  # admitted ones that arrived after the oldest that waits

    def __len__(self) -> int:
        """How many could be next; those parked are not counted."""
        return len(self._ready)

    def ready(self) -> list[Sequence]:
        """Those that are not parked, in order of arrival."""
        return list(self._ready)

    def add(self, seq: Sequence, hint: int = 0) -> None:
        """`seq` waits; `hint` of its tokens may be cached."""
        insert_by_key(self._ready, seq)
        self.version += 1
        self._note_new(seq)

    def discard(self, seq: Sequence) -> None:
        """`seq` is not in the queue any more."""
        remove_by_key(self._ready, seq)
        self.version += 1

    def park(self, seq: Sequence, blocker: Sequence, num_tokens: int) -> None:
        """Take `seq` out of the queue until `blocker` has computed so many tokens."""
        self.discard(seq)
        seq._blocker = blocker
        blocker._waiters.append((num_tokens, seq))

    def unpark(self, seq: Sequence) -> None:
        """`seq`, which is parked, does not wait any more at all."""
        blocker = seq._blocker
        assert blocker is not None
        blocker._waiters = [entry for entry in blocker._waiters if entry[1] is not seq]
        seq._blocker = None

    def wake(self, blocker: Sequence, num_computed: int | None = None) -> None:
        """`blocker` has computed so many tokens, or will compute none (None): put those back that waited for it."""
        still = []
        for num_tokens, seq in blocker._waiters:
            if num_computed is not None and num_tokens > num_computed:
                still.append((num_tokens, seq))
            else:
                seq._blocker = None
                self.add(seq, num_tokens)
        blocker._waiters = still

    def next(self) -> Sequence | None:
        """Who is to be admitted next; None if nobody may be."""
        first = self._first()
        if first is None or first._started:
            return first
        oldest = self._oldest()
        if oldest is None or oldest is first or self._overtakes(oldest) < self._max_overtakes:
            return first
        return None if oldest._blocker is not None else oldest

    def admitted(self, seq: Sequence) -> None:
        """`seq`, which `next` named, has got a row; for the first time if it is not `_started`."""
        self.discard(seq)
        if not seq._started:
            oldest = self._oldest()
            if oldest is not None and oldest.key < seq.key:
                insort(self._later, seq.key)

    def taken_back(self, seq: Sequence) -> None:
        """The admission of `seq` is undone: it waits as before."""
        if not seq._started:
            at = bisect_left(self._later, seq.key)
            if at < len(self._later) and self._later[at] == seq.key:
                del self._later[at]
        self.add(seq)

    def _first(self) -> Sequence | None:
        return self._ready[0] if self._ready else None

    def _note_new(self, seq: Sequence) -> None:
        if not seq._started:
            heapq.heappush(self._new, (seq.key, seq))
            if len(self._new) > self._most_new:  # those that went from behind the oldest are still there
                self._new = [entry for entry in self._new if _never_ran(entry[1])]
                heapq.heapify(self._new)
                self._most_new = 2 * len(self._new) + 64

    def _oldest(self) -> Sequence | None:
        """The oldest one that was never admitted."""
        heap = self._new
        while heap:
            seq = heap[0][1]
            if _never_ran(seq):
                return seq
            heapq.heappop(heap)
        return None

    def _overtakes(self, oldest: Sequence) -> int:
        del self._later[: bisect_left(self._later, oldest.key)]
        return len(self._later)


class PrefixQueue(WaitingQueue):
    """Longest cached prefix first.

    For requests that are all there from the start, this is a depth-first walk of the tree of their prompts, which
    computes every shared prefix once if it need not be evicted meanwhile (Zheng et al., SGLang, 2024, section 3,
    arXiv:2312.07104). Nobody's prefix is looked up in every step: each has an estimate, made when it came, raised
    when one is admitted that it shares more with (its neighbours in the order of their tokens), and checked when it
    comes out on top; a wrong one is mended and the next one taken.

    Sequences that were paused go before all that never ran, in order of arrival.

    Args:
        max_overtakes: See `WaitingQueue`.
        block_size: Tokens in a block.
        estimate: How many tokens of a sequence are cached, or being computed.
    """

    # How many neighbours on each side are told of an admission. Those behind hear of it from these.
    _REACH = 64
    # How many wrong estimates one call mends.
    _TRIES = 16

    def __init__(self, max_overtakes: int, block_size: int, estimate: Callable[[Sequence], int]) -> None:
        super().__init__(max_overtakes)
        self._block_size = block_size
        self._estimate = estimate
        # `_ready` holds those that were paused.
        self._hints: dict[Sequence, int] = {}
        self._best: SortedList[tuple[int, Key, Sequence]] = SortedList()
        self._by_tokens: SortedList[tuple[bytes, bytes, Key, Sequence]] = SortedList()
        self._places: dict[Sequence, tuple[bytes, bytes, Key, Sequence]] = {}

    def __len__(self) -> int:
        return len(self._ready) + len(self._hints)

    def ready(self) -> list[Sequence]:
        """Those that are not parked, in order of arrival."""
        return sorted([*self._ready, *self._hints], key=by_key)

    def add(self, seq: Sequence, hint: int = 0) -> None:
        """`seq` waits, with an estimate of its own if there is no `hint`."""
        if seq._started:
            super().add(seq)
            return
        self._note_new(seq)
        self.version += 1
        hint = hint or self._estimate(seq)
        self._hints[seq] = hint
        self._best.add((-hint, seq.key, seq))
        place = (seq.request._canonical, _sort_key(seq._tokens), seq.key, seq)
        self._places[seq] = place
        self._by_tokens.add(place)

    def discard(self, seq: Sequence) -> None:
        """`seq` is not in the queue any more."""
        if seq._started:
            super().discard(seq)
            return
        self.version += 1
        self._best.remove((-self._hints.pop(seq), seq.key, seq))
        self._by_tokens.remove(self._places.pop(seq))

    def admitted(self, seq: Sequence) -> None:
        """`seq` has got a row: those that share tokens with it may find more cached now."""
        place = self._places.get(seq)
        super().admitted(seq)
        if place is not None:
            self._tell_neighbours(place)

    def _first(self) -> Sequence | None:
        if self._ready:
            return self._ready[0]
        for _ in range(self._TRIES):
            if not self._best:
                return None
            seq: Sequence = self._best[0][2]
            hint = self._hints[seq]
            found = self._estimate(seq) if hint else 0
            if found >= hint:
                return seq
            self._refile(seq, found)
        first: Sequence = self._best[0][2]
        return first

    def _refile(self, seq: Sequence, hint: int) -> None:
        self._best.remove((-self._hints[seq], seq.key, seq))
        self._hints[seq] = hint
        self._best.add((-hint, seq.key, seq))

    def _tell_neighbours(self, place: tuple[bytes, bytes, Key, Sequence]) -> None:
        tokens = place[3]._tokens
        at = self._by_tokens.bisect_left(place)
        for side in (range(at, at + self._REACH), range(at - 1, at - 1 - self._REACH, -1)):
            for i in side:
                if not 0 <= i < len(self._by_tokens):
                    break
                namespace, _, _, other = self._by_tokens[i]
                if namespace != place[0]:
                    break
                shared = num_common(tokens, other._tokens) // self._block_size * self._block_size
                if shared <= self._hints[other]:
                    break  # it knows, and so do those behind it
                self._refile(other, shared)


def _sort_key(tokens: TokenArray) -> bytes:
    """Bytes that sort like the tokens. Ids beyond 32 bits sort alike, which costs a worse order, no more."""
    return tokens.clip(max=2**32 - 1).astype(">u4").tobytes()
