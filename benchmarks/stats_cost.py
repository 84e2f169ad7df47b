"""What it costs to be able to say why a prompt missed, in CPU time: the tree with `MissNotes`, against the tree alone.

    python stats_cost.py --rounds 30

Two trees get the same prompts in turn; full hits are measured on one tree, watched and not. `request` is all that the
books do for a prompt that is new: look it up, evict, allocate, and make it known. Records of requests and counters
are measured by themselves.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from radixkv.cache.miss_notes import MissNotes
from radixkv.core.block_pool import BlockPool
from radixkv.core.radix_tree import RadixTree
from radixkv.observe import MissNote, PrefillCost, RequestStats, StatsRecorder

BLOCK = 16
CASES = ("miss at the end", "miss at once", "store", "request")


class Tree:
    """A tree, perhaps with notes, and the CPU time of what was done with it."""

    def __init__(self, num_tokens: int, notes: bool) -> None:
        num_blocks = 4 * (num_tokens // BLOCK + 1)
        self.tree = RadixTree(BlockPool(num_blocks), block_size=BLOCK)
        self.notes = MissNotes(num_blocks, BLOCK) if notes else None
        if self.notes is not None:
            self.tree.add_listener(self.notes)
        self.times: dict[str, list[float]] = {case: [] for case in CASES}

    def timed(self, case: str, call: Callable[[], Any]) -> Any:
        begin = time.thread_time_ns()
        result = call()
        self.times[case].append((time.thread_time_ns() - begin) / 1000)
        return result

    def look_up(self, case: str, tokens: np.ndarray) -> tuple[int, Any]:
        match = self.timed(case, lambda: self.tree.match(tokens, max_tokens=len(tokens) - 1))
        found = match.num_tokens, match.note
        match.release()
        return found

    def request(self, tokens: np.ndarray) -> None:
        num_hit, note = self.look_up("miss at once", tokens)
        assert num_hit == 0
        assert self.says_new(note, 0), note
        blocks = self.tree.allocate(-(-len(tokens) // BLOCK))
        result = self.timed("store", lambda: self.tree.insert(tokens, blocks))
        assert result.num_new_tokens == len(tokens)
        self.tree.pool.release(result.blocks)

    def says_new(self, note: Any, at: int) -> bool:
        """Whether the note is right; a table that fills up may have forgotten something."""
        return (
            note is None
            if self.notes is None
            else note in (MissNote(at, "never_seen"), MissNote(at, "unknown"))
        )

    def hits(self, tokens: np.ndarray) -> None:
        at = (len(tokens) - 100) // BLOCK * BLOCK + BLOCK // 2  # in the middle of a block
        other = tokens.copy()
        other[at:] = -1 - tokens[at:] + 1_000_000
        num_hit, note = self.look_up("miss at the end", other)
        assert num_hit == at
        assert self.says_new(note, at), note


def prompts(num_tokens: int, rounds: int) -> None:
    rng = np.random.default_rng(0)
    plain, noting = Tree(num_tokens, notes=False), Tree(num_tokens, notes=True)
    for i in range(rounds + 3):
        tokens = rng.integers(0, 128_000, num_tokens)
        for each in (plain, noting) if i % 2 else (noting, plain):
            each.timed("request", lambda each=each, tokens=tokens: each.request(tokens))
            each.hits(tokens)
    print(
        f"\n{num_tokens:,} tokens{'':<13} {'alone us':>9} {'with us':>9} {'more us':>9} {'more per token':>15}"
    )
    for case in CASES:
        alone, with_notes = (statistics.median(tree.times[case][3:]) for tree in (plain, noting))
        more = with_notes - alone
        print(
            f"  {case:<22} {alone:>9.0f} {with_notes:>9.0f} {more:>9.0f} {1000 * more / num_tokens:>12.1f} ns"
        )
    assert noting.notes is not None
    print(
        f"  tables: {noting.notes.num_bytes / 2**20:.1f} MiB at most, for {noting.tree.pool.num_blocks:,} blocks"
    )


def full_hits(num_tokens: int, rounds: int) -> None:
    """One tree, that is watched in every other round: two trees would compete for the processor's caches."""
    tokens = np.random.default_rng(0).integers(0, 128_000, num_tokens)
    noting = Tree(num_tokens, notes=True)
    tree, notes = noting.tree, noting.notes
    times: dict[bool, list[float]] = {True: [], False: []}
    assert notes is not None
    tree.pool.release(tree.insert(tokens, tree.allocate(-(-num_tokens // BLOCK))).blocks)
    for i in range(4 * rounds):
        watched = i % 4 in (1, 2)
        tree.remove_listener(notes)
        if watched:
            tree.add_listener(notes)
        tree.match(tokens, max_tokens=num_tokens - 1).release()
        begin = time.thread_time_ns()
        match = tree.match(tokens, max_tokens=num_tokens - 1)
        times[watched].append((time.thread_time_ns() - begin) / 1000)
        assert (match.num_tokens, match.note) == (num_tokens - 1, None)
        match.release()
    alone, with_notes = statistics.median(times[False]), statistics.median(times[True])
    print(f"  {'full hit':<22} {alone:>9.1f} {with_notes:>9.1f} {with_notes - alone:>9.1f}")


def records(rounds: int) -> None:
    recorder = StatsRecorder()
    recorder.cost = PrefillCost(10**9, ((None, 8192),))
    note = MissNote(512, "evicted")
    times = []
    for _ in range(rounds):
        begin = time.thread_time_ns()
        for _ in range(100):
            recorder.record_requests([RequestStats.of(900, 512, note)])
        times.append((time.thread_time_ns() - begin) / 100_000)
    assert recorder.snapshot(0).misses == {"evicted": 100 * rounds}
    print(f"\none record, with all counters  {statistics.median(times):.1f} us")
    times = []
    for _ in range(rounds):
        begin = time.thread_time_ns()
        for _ in range(100):
            recorder.snapshot(0)
        times.append((time.thread_time_ns() - begin) / 100_000)
    print(f"one snapshot                   {statistics.median(times):.1f} us")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1000, 13_000, 131_072])
    args = parser.parse_args()
    for num_tokens in args.tokens:
        prompts(num_tokens, args.rounds)
        full_hits(num_tokens, args.rounds)
    records(args.rounds)


if __name__ == "__main__":
    main()
