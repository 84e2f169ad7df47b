"""What happened, in words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple


class Event(NamedTuple):
    """Something that happened: its kind, to which requests, and in words."""

    kind: str
    requests: tuple[int, ...]
    text: str


def waits(rid: int) -> Event:
    """It arrived, and there is no room for it."""
    return Event("wait", (rid,), f"Request {rid} arrives and waits: there is no room for it yet.")


def starts(
    rid: int, table: Sequence[int], num_whole: int, num_tail: int, num_computed: int, held: bool
) -> Event:
    """It was admitted: `num_whole` of its blocks were cached, and `num_tail` tokens of the next are copied."""
    if not num_whole and not num_tail:
        tokens = _count(num_computed, "prompt token")
        return Event("start", (rid,), f"Request {rid} starts: {tokens} to compute, in {_blocks(table)}.")
    text = f"Request {rid} starts with a prefix that is cached: "
    parts = []
    if num_whole:
        parts.append(f"it {'shares' if held else 'takes'} {_blocks(table[:num_whole])}")
    if num_tail:
        parts.append(f"copies {_count(num_tail, 'token')} into block {table[num_whole]}")
    computed = _count(num_computed, "prompt token")
    return Event("share", (rid,), f"{text}{', '.join(parts)}, and computes {computed}.")


def grown(taken: Mapping[int, Sequence[int]]) -> Event:
    """Requests have filled all their blocks, and each has got another one."""
    blocks = _blocks([block for ids in taken.values() for block in ids])
    if len(taken) == 1:
        (rid,) = taken
        return Event("grow", (rid,), f"The last block of request {rid} is full: it takes {blocks}.")
    text = f"The last blocks of requests {_listed(taken)} are full: they take {blocks}."
    return Event("grow", tuple(taken), text)


def preempted(rid: int, num_own: int, num_shared: int, keep: bool) -> Event:
    """Its blocks were taken back, by recompute."""
    then = ("stays" if num_own == 1 else "stay") + " cached" if keep else f"{_are(num_own)} dropped"
    return Event("preempt", (rid,), f"{_victim(rid)} preempted, and {_own(num_own, then, num_shared)}.")


def swapped_out(rid: int, num_own: int, num_shared: int) -> Event:
    """Its blocks were taken back, by swap."""
    then = f"{_are(num_own)} copied to the host tier"
    return Event("preempt", (rid,), f"{_victim(rid)} swapped out, and {_own(num_own, then, num_shared)}.")


def resumes(rid: int, num_found: int, num_again: int) -> Event:
    """It goes on after a preemption by recompute."""
    text = f"Request {rid} goes on: {_count(num_found, 'token')} {_are(num_found)} still cached, "
    return Event("resume", (rid,), f"{text}{num_again} {_are(num_again)} computed again.")


def swapped_in(rid: int, num_blocks: int, num_found: int, num_again: int) -> Event:
    """It goes on after a preemption by swap."""
    text = f"Request {rid} is swapped in: {_count(num_blocks, 'block')} copied back"
    if num_found:
        text += f", {num_found} still in the pool"
    if num_again:
        text += f", {_count(num_again, 'token')} computed again"
    return Event("resume", (rid,), f"{text}.")


def evicted(ids: Sequence[int]) -> Event:
    """Cached blocks that nobody held were needed."""
    text = f"{_blocks(ids)} {_are(len(ids))} evicted, to be used anew."
    return Event("evict", (), text[0].upper() + text[1:])


def ends(rid: int, num_tokens: int, num_cached: int, num_others: int, num_free: int) -> Event:
    """It has all its tokens; what becomes of its blocks."""
    fates = [(num_cached, "cached"), (num_others, "held by others"), (num_free, "free")]
    parts = [f"{n} {_are(n)} {what}" for n, what in fates if n]
    text = f"Request {rid} ends with {_count(num_tokens, 'token')}. Of its blocks, {_listed(parts)} now."
    return Event("end", (rid,), text)


def _victim(rid: int) -> str:
    return f"No block is free. Request {rid} arrived last of those that run: it is"


def _own(num_own: int, then: str, num_shared: int) -> str:
    shared = f" ({num_shared} that it shares {_are(num_shared)} not touched)" if num_shared else ""
    return f"{_count(num_own, 'block')} of its own {then}{shared}"


def _are(n: int) -> str:
    return "is" if n == 1 else "are"


def _count(n: int, what: str) -> str:
    return f"{n} {what}" if n == 1 else f"{n} {what}s"


def _listed(items: Iterable[object]) -> str:
    *most, last = map(str, items)
    return f"{', '.join(most)} and {last}" if most else last


def _blocks(ids: Sequence[int]) -> str:
    """`block 3`, `blocks 3 to 6`, or `blocks 3, 7 and 9`."""
    if len(ids) == 1:
        return f"block {ids[0]}"
    if len(ids) > 2 and list(ids) == list(range(ids[0], ids[0] + len(ids))):
        return f"blocks {ids[0]} to {ids[-1]}"
    return f"blocks {_listed(ids)}"
