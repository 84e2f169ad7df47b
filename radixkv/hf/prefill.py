"""Planning the missing part of a batch's prefill, so that no distinct prefix is computed twice.

Rows are right-aligned (left padding), so a token at position `i` of a row with `pad` padding columns stands
in column `pad + i`. First, prefixes that several rows share and nobody has cached are computed once, on one
row, and copied. Then rows that are behind the others are brought up to them, step by step ("staircase"), so
that the forward that `generate()` makes itself has only the rest of all rows to do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["Climb", "Row", "Shared", "plan_shared", "plan_staircase"]


@dataclass
class Row:
    """A prompt of the batch.

    Attributes:
        tokens: int64 `[num_tokens]`, padding left out.
        pad: Columns of padding before it.
        limit: Positions that may be filled ahead (the rest must go through the caller's forward).
        have: Leading positions whose KV is present.
        computed: Positions computed for this row ahead of the caller's forward.
    """

    tokens: np.ndarray
    pad: int
    limit: int
    have: int = 0
    computed: int = 0

    @property
    def column(self) -> int:
        """First column that is not present yet."""
        return self.pad + self.have


@dataclass(frozen=True)
class Shared:
    """Compute positions `start..stop` on row `leader`, then copy `copy_from..stop` to `followers`."""

    leader: int
    followers: tuple[int, ...]
    copy_from: int
    start: int
    stop: int


@dataclass(frozen=True)
class Climb:
    """Compute columns `start..stop` of `rows` in one forward."""

    rows: tuple[int, ...]
    start: int
    stop: int


def common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    """Number of leading tokens that are equal."""
    n = min(len(a), len(b))
    differ = a[:n] != b[:n]
    first = int(differ.argmax()) if n else 0
    return first if n and differ[first] else n


def plan_shared(rows: Sequence[Row], min_saved: int) -> list[Shared]:
    """Prefixes that several rows lack, each once, parents before children. Updates `have` and `computed`.

    Args:
        rows: The batch; `have` says what is cached.
        min_saved: Token computations that a forward of its own must save to be worth it.
    """
    plan: list[Shared] = []
    # Sorted, rows with a common prefix stand side by side; each group is split where it diverges.
    order = sorted(range(len(rows)), key=lambda i: rows[i].tokens.astype(">i8").tobytes())
    groups = [order]
    while groups:
        group = groups.pop()
        if len(group) < 2:
            continue
        first, last = rows[group[0]].tokens, rows[group[-1]].tokens
        shared = common_prefix(first, last)  # of the whole group, since it is sorted
        stop = min(shared, *(rows[i].limit for i in group))
        start = min(rows[i].have for i in group)
        if (stop - start) * (len(group) - 1) >= min_saved and stop > start:
            leader = max(group, key=lambda i: rows[i].have)
            followers = tuple(i for i in group if i != leader and rows[i].have < stop)
            copy_from = start
            start = min(rows[leader].have, stop)
            plan.append(Shared(leader, followers, copy_from, start, stop))
            rows[leader].computed += stop - start
            for i in group:
                rows[i].have = max(rows[i].have, stop)
        if stop < shared:  # a short row ends here; the others go on together
            groups.append([i for i in group if rows[i].limit > stop])
            continue
        branches: list[list[int]] = []
        previous: int | None = None
        for i in group:
            if len(rows[i].tokens) <= shared:
                continue
            token = int(rows[i].tokens[shared])
            if token != previous:
                branches.append([])
                previous = token
            branches[-1].append(i)
        groups.extend(branches)
    return plan


def plan_staircase(rows: Sequence[Row], min_saved: int) -> tuple[list[Climb], int]:
    """Forwards that bring the rows behind up to the first ones, and the column all rows then reach.

    Updates `have` and `computed`. A step is taken only if it saves `min_saved` token computations against
    leaving those columns to the forward of the whole batch.
    """
    plan: list[Climb] = []
    level = min(row.column for row in rows)
    while True:
        targets = sorted({row.column for row in rows if row.column > level})
        if not targets:
            return plan, level
        for target in targets:
            # Rows between the two levels go along from the lower one: a few columns twice beat one more forward.
            group = tuple(i for i, row in enumerate(rows) if row.column < target)
            if (target - level) * (len(rows) - len(group)) >= min_saved:
                break
        else:
            return plan, level
        plan.append(Climb(group, level, target))
        for i in group:
            rows[i].computed += target - max(level, rows[i].pad)
            rows[i].have = target - rows[i].pad
        level = target
