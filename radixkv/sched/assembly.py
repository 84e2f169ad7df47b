"""Making the arrays of a step."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from radixkv.core.block_states import BlockIds
from radixkv.sched.books import Books
from radixkv.sched.plan import Plan
from radixkv.sched.step import NO_MOVES, BlockMoves, Step


def assemble(books: Books, plan: Plan, number: int) -> Step:
    """The step that a plan describes."""
    if plan.decodes is None:
        step = _no_entries(number)
    elif plan.keep is None:
        step = _all_decodes(books, plan, number)
    else:
        step = _some_decodes(books, plan, number)
    if plan.chunks:
        _append_chunks(books, plan, step)
    step.plan = plan
    if plan.leaving:
        step.swap_out = _moves([(leaving.src, leaving.dst) for leaving in plan.leaving])
    if plan.swap_in:
        step.swap_in = _moves(plan.swap_in)
    if plan.copied or plan.tails:
        pairs = [(copied.old, copied.new) for copied in plan.copied] + plan.tails
        step.copies = BlockMoves(*np.array(pairs, np.int32).T.copy())
    return step


def _moves(pairs: list[tuple[BlockIds, BlockIds]]) -> BlockMoves:
    if not pairs:
        return NO_MOVES
    return BlockMoves(*(np.concatenate(side) for side in zip(*pairs, strict=True)))


def _no_entries(number: int) -> Step:
    none, none64 = np.empty(0, np.int32), np.empty(0, np.int64)
    tables = np.empty((0, 0), np.int32)
    return Step(number, none, 0, none, np.zeros(1, np.int32), none, none64, none64, none64, tables, none)


def _all_decodes(books: Books, plan: Plan, number: int) -> Step:
    decodes = plan.decodes
    assert decodes is not None
    plan.sampling_seqs = decodes.seqs
    num = len(decodes.seqs)
    return Step(
        number=number,
        rows=decodes.rows32,
        num_decodes=num,
        query_lens=decodes.ones,
        query_starts=decodes.starts,
        context_lens=(decodes.positions + 1).astype(np.int32),
        token_ids=books.rows.last[decodes.rows],
        positions=decodes.positions,
        slot_mapping=decodes.slots,
        block_tables=decodes.tables,
        sampling=decodes.starts[:num],
    )


def _some_decodes(books: Books, plan: Plan, number: int) -> Step:
    decodes, keep = plan.decodes, plan.keep
    assert decodes is not None
    assert keep is not None
    plan.sampling_seqs = [decodes.seqs[i] for i in keep.tolist()]
    positions, num = decodes.positions[keep], len(keep)
    return Step(
        number=number,
        rows=decodes.rows32[keep],
        num_decodes=num,
        query_lens=decodes.ones[:num],
        query_starts=decodes.starts[: num + 1],
        context_lens=(positions + 1).astype(np.int32),
        token_ids=books.rows.last[decodes.rows[keep]],
        positions=positions,
        slot_mapping=decodes.slots[keep],
        block_tables=decodes.tables[keep],
        sampling=decodes.starts[:num],
    )


def _append_chunks(books: Books, plan: Plan, step: Step) -> None:
    """Put the chunks of prompts behind the entries that decode."""
    rows, size = books.rows, books.block_size
    num = step.num_decodes
    seqs = list(plan.sampling_seqs)
    lens, tokens, positions, slots = [], [step.token_ids], [step.positions], [step.slot_mapping]
    sampled: list[int] = []
    for entry, (seq, start, num_tokens, num_samples) in enumerate(plan.chunks, num):
        stop = start + num_tokens
        lens.append(num_tokens)
        tokens.append(seq._tokens[start:stop])
        at = np.arange(start, stop, dtype=np.int64)
        positions.append(at)
        block = rows.tables[seq.row].take(at // size).astype(np.int64)
        slots.append(block * size + at % size)
        if num_samples:
            sampled += [entry] * num_samples
            seqs += [seq, *seq._followers]
    chunk_rows = np.array([chunk.seq.row for chunk in plan.chunks], np.int32)
    chunk_lens = np.array(lens, np.int32)
    ends = np.array([chunk.start + chunk.num_tokens for chunk in plan.chunks], np.int32)
    starts = np.empty(num + len(lens) + 1, np.int32)
    starts[: num + 1] = step.query_starts
    np.cumsum(chunk_lens, out=starts[num + 1 :])
    starts[num + 1 :] += num
    step.rows = np.concatenate((step.rows, chunk_rows))
    step.query_lens = np.concatenate((step.query_lens, chunk_lens))
    step.query_starts = starts
    step.context_lens = np.concatenate((step.context_lens, ends))
    step.token_ids = np.concatenate(tokens)
    step.positions = np.concatenate(positions)
    step.slot_mapping = np.concatenate(slots)
    step.block_tables = _tables(books, step)
    step.sampling = np.concatenate((step.sampling, np.array(sampled, np.int32)))
    plan.sampling_seqs = seqs


def _tables(books: Books, step: Step) -> BlockIds:
    rows = books.rows
    at: npt.NDArray[np.intp] = step.rows.astype(np.intp)
    return rows.tables[at, : int(rows.num_blocks[at].max())]
