"""Plays the six requests on the library, and notes what can be seen after each step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from docs.tooling.scenes import _blocks_words as words
from docs.tooling.scenes._blocks_story import BLOCK_SIZE, HOST_BLOCKS, REQUESTS, SLAB, tokens_of
from docs.tooling.scenes._blocks_words import Event
from radixkv import BlockPool, RadixTree, Scheduler, SchedulerConfig
from radixkv.core.block_states import BlockIds
from radixkv.core.listener import TreeListener
from radixkv.core.tokens import TokenArray
from radixkv.sched import Request, Sequence, Step

LETTERS = {"waiting": "W", "running": "R", "swapped": "S", "finished": "F"}
TO_COME = "-"
_MOST_STEPS = 500


class Setting(NamedTuple):
    """What a reader may choose."""

    pool: int
    mode: str
    share: bool
    keep: bool


class Cached(NamedTuple):
    """A block that the tree holds: who wrote it, as which of its logical blocks, and how many rows of it are cached."""

    block: int
    writer: int
    logical: int
    rows: int


@dataclass
class Seen:
    """One request after a step. Host blocks are by logical block, -1 where there is none."""

    state: str = TO_COME
    known: int = 0
    computed: int = 0
    table: list[int] = field(default_factory=list)
    host: list[int] = field(default_factory=list)


class Counters(NamedTuple):
    """The numbers beside the grid. `docs/interactive/blocks.md` says what they count."""

    used: int
    cached: int
    slack: int
    contiguous: int
    shared: int
    to_recompute: int
    recomputed: int


@dataclass
class State:
    """What can be seen after a step."""

    requests: list[Seen]
    cached: list[Cached]
    counters: Counters
    events: list[Event]


@dataclass
class Recording:
    """All states of one setting, from before the first step, and what became of it."""

    states: list[State]
    num_preempted: int
    all_done: bool


class _Watcher(TreeListener):
    """Knows what is cached, from what the tree tells."""

    def __init__(self) -> None:
        self.rows: dict[int, int] = {}
        self.removed: list[int] = []

    def on_stored(
        self, namespace: bytes, tokens: TokenArray, first: int, blocks: BlockIds, parent: int
    ) -> None:
        for number, block in enumerate(blocks.tolist(), first):
            self.rows[block] = min(BLOCK_SIZE, len(tokens) - number * BLOCK_SIZE)

    def on_removed(self, blocks: BlockIds) -> None:
        for block in blocks.tolist():
            del self.rows[block]
            self.removed.append(block)


class _Player:
    """One run."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.pool = BlockPool(setting.pool)
        self.tree = RadixTree(self.pool, block_size=BLOCK_SIZE)
        self.watcher = _Watcher()
        self.tree.add_listener(self.watcher)
        self.host = BlockPool(HOST_BLOCKS) if setting.mode == "swap" else None
        self.scheduler = Scheduler(
            self.tree,
            SchedulerConfig(
                max_num_seqs=len(REQUESTS),
                max_batched_tokens=SLAB * len(REQUESTS),  # every prompt is read in one step
                preemption=setting.mode,
                watermark=0.0,
                share_prefixes=setting.share,
                keep_cached=setting.keep,
            ),
            host_pool=self.host,
        )
        self.keeps = setting.share and setting.keep
        self.requests: dict[int, Request] = {}
        self.writers: dict[int, tuple[int, int]] = {}  # block -> request and logical block
        self.peak = [0] * len(REQUESTS)  # the most tokens that ever had KV
        self.was: list[Seen] = [Seen() for _ in REQUESTS]
        self.num_preempted = 0

    def play(self) -> Recording:
        states = [self.state([])]
        while len(self.requests) < len(REQUESTS) or self.scheduler.has_unfinished:
            if len(states) > _MOST_STEPS:
                raise RuntimeError(f"{self.setting} does not end")
            states.append(self.state(self.step(len(states))))
        done = all(request.sequences[0].finish_reason == "length" for request in self.requests.values())
        return Recording(states, self.num_preempted, done)

    def step(self, number: int) -> list[Event]:
        """Carry out one step; what happened in it."""
        arrived = []
        for rid, asked in enumerate(REQUESTS):
            if asked.arrives == number:
                self.requests[rid] = self.scheduler.add(
                    tokens_of(asked.prompt), max_new_tokens=len(asked.answer), rid=rid
                )
                arrived.append(rid)
        idle = {block for block in self.watcher.rows if self.pool.refcount(block) == 1}
        self.watcher.removed.clear()
        step = self.scheduler.schedule()
        if step is None:
            self.scheduler.check(exclusive=True)
            return [words.waits(rid) for rid in arrived]
        for seq in step.preempted:
            idle.update(self.was[seq.request.rid].table)
        evicted = sorted(idle.intersection(self.watcher.removed)) if self.keeps else []
        self.note_writers(step)
        sampled = [
            tokens_of(REQUESTS[seq.request.rid].answer)[seq.num_output_tokens] for seq in step.sampling_seqs
        ]
        before = self.look()
        events = self.events_before(step, before, arrived, evicted)
        done = self.scheduler.complete(step, sampled)
        self.scheduler.check(exclusive=True)
        self.num_preempted += len(step.preempted)
        now = self.look()
        return events + [self.end_of(seq.request.rid, seq.num_tokens, before, now) for seq in done.finished]

    def end_of(self, rid: int, num_tokens: int, before: list[Seen], now: list[Seen]) -> Event:
        """A request has ended."""
        table = before[rid].table
        held = {block for seen in now for block in seen.table}
        num_others = sum(block in held for block in table)
        num_cached = sum(block in self.watcher.rows and block not in held for block in table)
        return words.ends(rid, num_tokens, num_cached, num_others, len(table) - num_others - num_cached)

    def events_before(
        self, step: Step, now: list[Seen], arrived: list[int], evicted: list[int]
    ) -> list[Event]:
        """What `schedule` did."""
        events: list[Event] = []
        for seq in step.preempted:
            rid, was = seq.request.rid, self.was[seq.request.rid]
            held = {block for i, other in enumerate(self.was) if i != rid for block in other.table}
            num_shared = sum(block in held for block in was.table)
            num_own = len(was.table) - num_shared
            if seq.state == "swapped":
                num_own = sum(block >= 0 for block in self.host_blocks(rid))
                events.append(words.swapped_out(rid, num_own, len(was.table) - num_own))
            else:
                events.append(words.preempted(rid, num_own, num_shared, self.keeps))
        if evicted:
            events.append(words.evicted(evicted))
        grown = {
            rid: seen.table[len(was.table) :]
            for rid, (was, seen) in enumerate(zip(self.was, now, strict=True))
            if was.state == seen.state == "R" and len(seen.table) > len(was.table)
        }
        if grown:
            events.append(words.grown(grown))
        started = [seq.request.rid for seq in step.admitted]
        events += [words.waits(rid) for rid in arrived if rid not in started]
        return events + [self.entry_of(step, seq, now) for seq in [*step.admitted, *step.resumed]]

    def entry_of(self, step: Step, seq: Sequence, now: list[Seen]) -> Event:
        """A request was let in."""
        rid, was = seq.request.rid, self.was[seq.request.rid]
        table = now[rid].table
        num_computed = step.query_lens.item(step.rows.tolist().index(seq.row))
        num_found = seq.num_tokens - num_computed
        num_again = max(0, self.peak[rid] - num_found)
        if was.state == "S":
            num_back = sum(block in table for block in step.swap_in.dst.tolist())
            return words.swapped_in(rid, num_back, -(-num_found // BLOCK_SIZE) - num_back, num_again)
        if seq in step.resumed:
            return words.resumes(rid, num_found, num_again)
        num_whole, num_tail = divmod(num_found, BLOCK_SIZE)
        others = {block for i, other in enumerate(now) if i != rid for block in other.table}
        held = not others.isdisjoint(table)
        return words.starts(rid, table, num_whole, num_tail, num_computed, held)

    def note_writers(self, step: Step) -> None:
        """Who writes which block in this step."""
        slots = step.slot_mapping
        for entry, row in enumerate(step.rows.tolist()):
            rid = self.scheduler.sequence(row).request.rid
            part = slice(step.query_starts[entry], step.query_starts[entry + 1])
            written = slots[part] // BLOCK_SIZE
            for block, at in zip(
                written.tolist(), (step.positions[part] // BLOCK_SIZE).tolist(), strict=True
            ):
                self.writers[block] = (rid, at)
        swapped_in = step.swap_in.dst.tolist()
        for seq in step.resumed:
            for at, block in enumerate(self.table(seq.request.rid)):
                if block in swapped_in:
                    self.writers[block] = (seq.request.rid, at)

    # -- what can be seen ------------------------------------------------------------------------------------

    def table(self, rid: int) -> list[int]:
        return self.requests[rid].sequences[0].block_table.tolist()

    def host_blocks(self, rid: int) -> list[int]:
        return self.requests[rid].sequences[0].host_blocks.tolist()

    def look(self) -> list[Seen]:
        """All requests as they are now."""
        seen = [Seen() for _ in REQUESTS]
        for rid, request in self.requests.items():
            (seq,) = request.sequences
            table = self.table(rid) if seq.state == "running" else []
            computed = 0 if seq.state == "finished" else seq.num_computed
            seen[rid] = Seen(LETTERS[seq.state], seq.num_tokens, computed, table, self.host_blocks(rid))
        return seen

    def state(self, events: list[Event]) -> State:
        """After a step."""
        self.was = seen = self.look()
        for rid, request in enumerate(seen):
            if request.state == "R":
                self.peak[rid] = max(self.peak[rid], request.computed)
        cached = [
            Cached(block, *self.writers[block], rows) for block, rows in sorted(self.watcher.rows.items())
        ]
        return State(seen, cached, self.counters(seen), events)

    def counters(self, seen: list[Seen]) -> Counters:
        """The library's own numbers where it has them."""
        stats, pool = self.scheduler.stats, self.pool
        running = [request for request in seen if request.state == "R"]
        in_tables = sum(request.computed for request in running)
        return Counters(
            used=pool.num_held - pool.num_idle,
            cached=pool.num_idle,
            slack=stats.held_slots - stats.filled_slots,
            contiguous=sum(SLAB - request.computed for request in running),
            shared=in_tables - stats.filled_slots,
            to_recompute=sum(self.lost(rid) for rid, request in enumerate(seen) if request.state in "WS"),
            recomputed=stats.recomputed_tokens,
        )

    def lost(self, rid: int) -> int:
        """Tokens of a paused request that had KV, which is neither cached nor in the host tier now."""
        (seq,) = self.requests[rid].sequences
        if not self.peak[rid]:
            return 0
        found = 0
        if self.setting.share:
            found = self.tree.match_length(seq.all_tokens(), max_tokens=seq.num_tokens - 1)
        host = np.array(self.host_blocks(rid)[found // BLOCK_SIZE :])
        if len(host):
            gaps = np.flatnonzero(host < 0)
            blocks = found // BLOCK_SIZE + (gaps[0] if len(gaps) else len(host))
            found = max(found, min(seq.num_computed, int(blocks) * BLOCK_SIZE))
        return self.peak[rid] - min(found, self.peak[rid])


def record(setting: Setting) -> Recording:
    """Play one setting on the library."""
    return _Player(setting).play()
