"""How a step ends: carried out, or taken back."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from radixkv.sched.admission import Admission
from radixkv.sched.books import Books
from radixkv.sched.decodes import append_some
from radixkv.sched.lifecycle import Lifecycle
from radixkv.sched.plan import Chunk, Plan
from radixkv.sched.preemption import Growth
from radixkv.sched.request import FINISHED, RUNNING, Sequence
from radixkv.sched.step import Completed, Step


class Completion:
    """Books what a step has done, or undoes what was booked for it."""

    def __init__(self, books: Books, admission: Admission, growth: Growth, lifecycle: Lifecycle) -> None:
        self._books = books
        self._admission = admission
        self._growth = growth
        self._lifecycle = lifecycle

    def complete(self, step: Step, tokens: npt.NDArray[np.int64], reasons: dict[int, str]) -> Completed:
        """See `Scheduler.complete`."""
        plan = step.plan
        ignored = []
        if plan.disturbed:
            ignored = [i for i, seq in enumerate(plan.sampling_seqs) if seq.state != RUNNING]
        self._carried_out(plan)
        self._books.counters.computed_tokens += step.num_tokens
        num = step.num_decodes
        ended: list[tuple[Sequence, str]] = []
        forked: list[Sequence] = []
        if num:
            self._complete_decodes(plan, tokens[:num], reasons, ended)
        for chunk in plan.chunks:
            self._complete_chunk(chunk, plan.sampling_seqs, tokens, num, reasons, ended, forked)
            num += chunk.num_samples
        for seq, reason in ended:
            self._lifecycle.end(seq, reason, publish=True, step=None)
        self._lifecycle.release_aborted(plan)
        return Completed([seq for seq, _ in ended], forked, ignored)

    def undo(self, plan: Plan) -> None:
        """Put back what a step that is not carried out has changed."""
        books, rows, pool = self._books, self._books.rows, self._books.pool
        for row, place, old, new in plan.copied:
            rows.tables[row, place] = old
            pool.release(new)
        for at, blocks in plan.grown:
            rows.num_blocks[at] -= 1
            pool.release(blocks)
        for row in plan.unshared:
            rows.set_shared(row, True)
        if plan.held is not None:
            pool.release(plan.held)
        if plan.tails:
            pool.release([block for block, _ in plan.tails])
        for entered in reversed(plan.entered):
            self._admission.take_back(entered)
        for leaving in reversed(plan.leaving):
            if leaving.seq.state != FINISHED:
                self._growth.take_back(leaving)
        self._lifecycle.release_aborted(plan)
        books.decodes_changed()
        books.epoch += 1

    # -- inner -----------------------------------------------------------------------------------------------

    def _carried_out(self, plan: Plan) -> None:
        """What the step read need not be kept for it any longer."""
        books, counters = self._books, self._books.counters
        read = [copied.old for copied in plan.copied] + [block for block, _ in plan.tails]
        if read:
            books.pool.release(read)
            counters.cow_copies += len(read)
        for leaving in plan.leaving:
            self._growth.has_left(leaving)
        for host, _ in plan.swap_in:
            counters.swapped_in_blocks += len(host)
        for seq, is_first in plan.entered:
            books.release_host(seq)
            if not is_first and seq.state == RUNNING:
                counters.resumed_tokens += books.rows.computed.item(seq.row)
            if seq.request._first is seq and not seq.request._counted:
                seq.request._counted = True
                counters.admissions += 1
                counters.prompt_tokens += len(seq.request.tokens)
                counters.hit_tokens += seq.request.num_cached_tokens
        counters.steps += 1

    def _complete_decodes(
        self,
        plan: Plan,
        tokens: npt.NDArray[np.int64],
        reasons: dict[int, str],
        ended: list[tuple[Sequence, str]],
    ) -> None:
        books, decodes, rows = self._books, plan.decodes, self._books.rows
        assert decodes is not None
        at, seqs, may_be_full = decodes.rows, decodes.seqs, True
        if plan.keep is None:
            decodes.append(tokens)
            may_be_full = decodes.steps_left <= 0
        else:
            at = at[plan.keep]
            append_some(rows, at, tokens)
            seqs = plan.sampling_seqs
            books.decodes_changed()
        who = (rows.known[at] >= rows.limit[at]).nonzero()[0].tolist() if may_be_full else []
        if reasons:
            num = len(tokens)
            who = sorted({*who, *(i for i in reasons if i < num)})
        for i in who:
            if seqs[i].state == RUNNING:
                ended.append((seqs[i], reasons.get(i, "length")))

    def _complete_chunk(
        self,
        chunk: Chunk,
        sampling_seqs: list[Sequence],
        tokens: npt.NDArray[np.int64],
        first: int,
        reasons: dict[int, str],
        ended: list[tuple[Sequence, str]],
        forked: list[Sequence],
    ) -> None:
        """One chunk is computed; `tokens[first]` is the first of those that were sampled behind it."""
        books, rows, admission = self._books, self._books.rows, self._admission
        seq, start, num_tokens, num_samples = chunk
        if seq.state == FINISHED:  # aborted meanwhile
            return
        end = start + num_tokens
        books.counters.recomputed_tokens += max(0, min(end, seq._high_water) - start)
        rows.computed[seq.row] = end
        if not num_samples:
            books.publish(seq, with_tail=False)
            if seq._waiters:
                admission.queue.wake(seq, end)
            return
        books.publish_prompt(seq)
        admission.leave_pending(seq)
        books.stop(seq)
        forked += seq._followers
        for follower in seq._followers:
            follower._leader = None
            books.share_blocks(seq, follower)
        seq._followers = []
        for i in range(first, first + num_samples):
            each = sampling_seqs[i]
            if each.state == RUNNING:
                books.start_decoding(each)
                rows.append(each.row, tokens.item(i))
                if i in reasons or rows.known.item(each.row) >= rows.limit.item(each.row):
                    ended.append((each, reasons.get(i, "length")))
