"""Makes recordings small. `docs/assets/interactive/blocks.js` reads what is written here, and so does a test.

A number below 64 is one character, its place in `DIGITS`. A run is a list of steps; a step is a string of parts, what
it changes in the state before it. Parts are separated by commas:

- `<request>` and then a state, known tokens, tokens with KV, the block table, and, if it has host blocks, `.` and those
  by logical block, `~` where there is none: the request is now so. Requests, like all numbers here, are digits.
- `<request>+<block>`: it has one more known token, one more with KV, and one more block.
- `<request>=`: it runs, and nothing of it has changed.
- A running request of which nothing is said has one more known token and one more with KV.
- `!` and four digits for each block whose place in the tree has changed: block, who wrote it, as which of its logical
  blocks, and how many rows of it are cached. 0 rows: it is not cached any more, and the two before say nothing.
- `#` and, for each counter that has changed, its place and three digits: its value in base 64.
- `>` and the number of an event in `events`, in decimal.

Before the first step nobody has come, and nothing is cached. Steps that are equal are written once, and a run is a list
of their numbers, which goes on from where another run ends to be the same: `[run, how many steps, own steps...]`.
"""

from __future__ import annotations

from collections.abc import Sequence

from docs.tooling.scenes._blocks_recorder import Cached, Recording, Seen, State
from docs.tooling.scenes._blocks_words import Event

DIGITS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ-_"


def digits(numbers: Sequence[int]) -> str:
    """One character for each."""
    return "".join("~" if number < 0 else DIGITS[number] for number in numbers)


class Encoder:
    """Steps, events and runs, each written once."""

    def __init__(self) -> None:
        self.steps: dict[str, int] = {}
        self.events: dict[Event, int] = {}
        self.runs: list[list[int]] = []
        self._whole: list[tuple[int, ...]] = []

    def add(self, recording: Recording) -> int:
        """The number of the run that this is."""
        pairs = zip(recording.states, recording.states[1:], strict=False)
        whole = tuple(self.steps.setdefault(self._step(*pair), len(self.steps)) for pair in pairs)
        if whole in self._whole:
            return self._whole.index(whole)
        common = [_num_common(whole, other) for other in self._whole]
        best = max(range(len(common)), key=common.__getitem__, default=-1)
        num = common[best] if best >= 0 else 0
        self.runs.append([max(best, 0), num, *whole[num:]])
        self._whole.append(whole)
        return len(self._whole) - 1

    def _step(self, was: State, now: State) -> str:
        parts = [
            part
            for rid, (before, after) in enumerate(zip(was.requests, now.requests, strict=True))
            if (part := _request(rid, before, after)) is not None
        ]
        if changed := _tree(was.cached, now.cached):
            parts.append("!" + "".join(map(digits, changed)))
        if counters := "".join(
            DIGITS[place] + digits([after // 4096, after // 64 % 64, after % 64])
            for place, (before, after) in enumerate(zip(was.counters, now.counters, strict=True))
            if before != after
        ):
            parts.append(f"#{counters}")
        parts += [f">{self.events.setdefault(event, len(self.events))}" for event in now.events]
        return ",".join(parts)


def _request(rid: int, was: Seen, now: Seen) -> str | None:
    if was.state == now.state == "R" and not was.host and not now.host:
        advanced = now.known == was.known + 1 and now.computed == was.computed + 1
        if advanced and now.table == was.table:
            return None
        if advanced and len(now.table) == len(was.table) + 1 and now.table[:-1] == was.table:
            return f"{rid}+{DIGITS[now.table[-1]]}"
        if now == was:
            return f"{rid}="
    elif now == was:
        return None
    host = "." + digits(now.host) if now.host else ""
    return f"{rid}{now.state}{digits([now.known, now.computed])}{digits(now.table)}{host}"


def _tree(was: list[Cached], now: list[Cached]) -> list[Cached]:
    changed = set(now) - set(was)
    gone = {cached.block for cached in was} - {cached.block for cached in now}
    return sorted(changed | {Cached(block, 0, 0, 0) for block in gone})


def _num_common(one: Sequence[int], other: Sequence[int]) -> int:
    num = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        num += 1
    return num
