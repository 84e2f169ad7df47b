"""The check of a scheduler's invariants."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from radixkv.core.block_states import CACHED
from radixkv.core.errors import CacheCorruptionError
from radixkv.sched.request import FINISHED, RUNNING, SWAPPED, WAITING, Sequence

if TYPE_CHECKING:
    from radixkv.sched.scheduler import Scheduler


def check_scheduler(scheduler: Scheduler, exclusive: bool) -> None:
    """Raise `CacheCorruptionError`, with values, at the first invariant of `Scheduler` that is broken."""
    books, rows, admission = scheduler._books, scheduler._rows, scheduler._admission
    plan = None if scheduler._step is None else scheduler._step.plan
    aborted = [seq for seq, _ in plan.aborted] if plan is not None else []
    seqs = [seq for request in scheduler._lifecycle.requests.values() for seq in request.sequences]
    everybody = {*seqs, *aborted}

    # Rows.
    for row, seq in enumerate(rows.seqs):
        if seq is not None and (seq.row != row or seq not in everybody):
            raise CacheCorruptionError(f"row {row} belongs to {seq}, which has row {seq.row}")
    with_row = [seq for seq in rows.seqs if seq is not None]
    free = sorted(rows._free)
    if free != [row for row, seq in enumerate(rows.seqs) if seq is None]:
        raise CacheCorruptionError(f"free rows {free}, but {len(with_row)} of {len(rows.seqs)} are taken")
    if rows.num_shared != int(rows.shared.sum()):
        raise CacheCorruptionError(
            f"{rows.num_shared} rows are said to share their last block, of {rows.shared}"
        )

    # States, and the lists that go with them.
    count = dict.fromkeys((WAITING, RUNNING, SWAPPED), 0)
    for seq in seqs:
        if seq.state != FINISHED:
            count[seq.state] += 1
    have = {state: books.num[state] for state in count}
    if have != count:
        raise CacheCorruptionError(f"sequences by state are {have}, recount {count}")
    ready = admission.queue.ready()
    parked = [waiter for seq in books.prefilling for _, waiter in seq._waiters]
    listed = [*books.decoding, *books.prefilling, *ready, *parked]
    if len(set(listed)) != len(listed):
        raise CacheCorruptionError("a sequence is in two lists")
    leaders = {seq for seq in seqs if seq.state != FINISHED and seq._leader is None}
    if set(listed) != leaders:
        raise CacheCorruptionError(
            f"not in the lists: {leaders - set(listed)}, or too many: {set(listed) - leaders}"
        )
    for some, states in (
        (books.decoding, {RUNNING}),
        (books.prefilling, {RUNNING}),
        (ready, {WAITING, SWAPPED}),
        (parked, {WAITING}),
    ):
        if not {seq.state for seq in some} <= states:
            raise CacheCorruptionError(f"{some} should be {states}")
    for some in (books.decoding, books.prefilling):
        if [seq.key for seq in some] != sorted(seq.key for seq in some):
            raise CacheCorruptionError(f"{some} are not in order of arrival")
    for seq in seqs:
        _check_sequence(scheduler, seq)
    strict = sum(seq.num_preemptions > 1 for seq in seqs if seq.state == RUNNING)
    if strict != books.num_strict:
        raise CacheCorruptionError(f"{books.num_strict} were preempted twice, recount {strict}")

    # References: tables, what a step reads, and the tree.
    pool = books.pool
    refs = np.zeros(pool.num_blocks, np.int64)
    for seq in with_row:
        np.add.at(refs, rows.table(seq.row), 1)
    if plan is not None:
        np.add.at(refs, [copied.old for copied in plan.copied] + [block for block, _ in plan.tails], 1)
    _check_writers(scheduler, refs)
    refs += pool._state & CACHED
    wrong = refs != pool.refcounts if exclusive else refs > pool.refcounts
    if wrong.any():
        block = int(wrong.argmax())
        raise CacheCorruptionError(
            f"block {block} has {pool.refcount(block)} references, tables and tree {int(refs[block])}"
        )
    _check_host(scheduler, everybody, exclusive)


def _check_sequence(scheduler: Scheduler, seq: Sequence) -> None:
    books, rows = scheduler._books, scheduler._rows
    if seq._leader is not None and seq not in seq._leader._followers:
        raise CacheCorruptionError(f"{seq} is to fork from one that does not know it")
    if any(follower._leader is not seq for follower in seq._followers):
        raise CacheCorruptionError(f"a follower of {seq} does not know it")
    if seq._blocker is not None and seq not in [waiter for _, waiter in seq._blocker._waiters]:
        raise CacheCorruptionError(f"{seq} waits for one that does not know it")
    if seq._waiters and not seq._prefilling:
        raise CacheCorruptionError(f"{seq} computes nothing, but {seq._waiters} wait for it")
    if seq.state != RUNNING:
        if seq.row >= 0 and scheduler._step is None:
            raise CacheCorruptionError(f"{seq} has row {seq.row}")
        return
    row, size = seq.row, books.block_size
    computed, known = rows.computed.item(row), rows.known.item(row)
    num_blocks = rows.num_blocks.item(row)
    if seq._leader is not None:
        if num_blocks or computed:
            raise CacheCorruptionError(f"{seq} has blocks, but has not forked yet")
        return
    if seq.num_tokens != len(seq.all_tokens()) or seq.all_tokens()[-1] != rows.last[row]:
        raise CacheCorruptionError(f"{seq}: last token {rows.last[row]}, of {seq.all_tokens()}")
    table = rows.table(row)
    if len(np.unique(table)) != len(table):
        raise CacheCorruptionError(f"{seq} has a block twice: {table.tolist()}")
    if seq._prefilling:
        if computed >= known or num_blocks != -(-known // size):
            raise CacheCorruptionError(f"{seq} prefills in {num_blocks} blocks")
        return
    steps = 0 if scheduler._step is None else scheduler._step.has_row(row)
    if computed != known - 1 or num_blocks != -(-(computed + steps) // size):
        raise CacheCorruptionError(f"{seq} decodes in {num_blocks} blocks")


def _check_writers(scheduler: Scheduler, held: npt.NDArray[np.int64]) -> None:
    """Whoever will write into a block is the only sequence that holds it, or knows that it may not."""
    books, rows, pool = scheduler._books, scheduler._rows, scheduler._books.pool
    for seq in books.decoding:
        block = rows.table(seq.row)[-1]
        num_rows = rows.computed.item(seq.row) % books.block_size
        if (
            not num_rows
            or rows.shared[seq.row]
            or (scheduler._step is not None and scheduler._step.has_row(seq.row))
        ):
            continue
        # What the tree says of a block, beside its writer's own rows, must stay as it is.
        cached_rows = books.block_size - pool._gaps[block] if pool._state[block] & CACHED else 0
        if held[block] > 1 or cached_rows > num_rows:
            raise CacheCorruptionError(f"{seq} would write into block {block}, which others hold")


def _check_host(scheduler: Scheduler, seqs: set[Sequence], exclusive: bool) -> None:
    host = scheduler._books.host
    refs = np.zeros(host.num_blocks if host is not None else 0, np.int64)
    for seq in seqs:
        if seq.state == SWAPPED and seq._host is None:
            raise CacheCorruptionError(f"{seq} has nothing in the host tier")
        if seq._host is not None:
            if seq.state == WAITING or (seq.state == RUNNING and scheduler._step is None):
                raise CacheCorruptionError(f"{seq} has host blocks still")
            np.add.at(refs, seq._host[seq._host >= 0], 1)
    if host is None:
        return
    host.check()
    wrong = refs != host.refcounts if exclusive else refs > host.refcounts
    if wrong.any():
        block = int(wrong.argmax())
        raise CacheCorruptionError(
            f"host block {block} has {host.refcount(block)} references, recount {int(refs[block])}"
        )
