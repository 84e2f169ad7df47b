"""Blocks for sequences that decode, and whom to take them from."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from radixkv.sched.admission import Admission
from radixkv.sched.books import Books
from radixkv.sched.plan import Copied, Leaving, Plan
from radixkv.sched.request import FINISHED, RUNNING, SWAPPED, WAITING, Sequence


class Growth:
    """Gives every sequence that decodes a place for its next token.

    Most have one: their last block is partly filled, and nobody else holds it. The others need a block, which is
    allocated for all of them at once if there is room. If not, they are served in order of arrival, and the
    sequence that arrived last, of those that have made a token since they were let in, is preempted (Kwon et al.,
    vLLM, 2023, section 4.5, arXiv:2309.06180). By recompute its blocks are free at once. By swap they are free when
    the step is complete, so that whoever needs them sits this step out.
    """

    def __init__(self, books: Books, admission: Admission) -> None:
        self._books = books
        self._admission = admission

    def plan(self, plan: Plan, budget: int) -> int:
        """Choose who decodes in this step, and give them their blocks; how many they are."""
        books = self._books
        if not books.decoding:
            return 0
        plan.decodes = decodes = books.decodes()
        num = min(len(decodes.seqs), budget)
        border = decodes.at_border()
        shared = books.rows.shared[decodes.rows].nonzero()[0] if books.rows.num_shared else border[:0]
        if num < len(decodes.seqs):
            plan.keep = np.arange(num)
            border, shared = border[border < num], shared[shared < num]
        if len(shared) or len(border) > books.room:
            self._serve_one_by_one(plan, np.union1d(border, shared), num)
            return len(decodes.seqs) if plan.keep is None else len(plan.keep)
        if len(border):
            blocks = books.tree.allocate(len(border))
            plan.grown.append((decodes.grow(border, blocks), blocks))
        return num

    def _serve_one_by_one(self, plan: Plan, needy: npt.NDArray[np.intp], num: int) -> None:
        books, decodes = self._books, plan.decodes
        assert decodes is not None
        rows, size = books.rows, books.block_size
        sits_out = []
        for i in needy.tolist():
            seq = decodes.seqs[i]
            if seq.state != RUNNING or seq.row < 0:
                continue  # preempted for the sake of one before it
            row = seq.row
            index = rows.num_blocks.item(row) - 1
            num_rows = decodes.positions.item(i) % size
            if num_rows:
                old = rows.tables.item(row, index)
                if not books.is_shared(old, num_rows, plan.let_go):
                    rows.set_shared(row, False)
                    plan.unshared.append(row)
                    continue
            if not self._make_room(seq, plan, old if num_rows else -1, num_rows):
                sits_out.append(i)
                continue
            if num_rows and not books.is_shared(old, num_rows, plan.let_go):
                rows.set_shared(row, False)  # whoever shared it was preempted
                plan.unshared.append(row)
                continue
            block = books.tree.allocate(1)
            if num_rows:
                rows.tables[row, index] = block.item(0)
                decodes.put_copy(i, index, block.item(0))
                plan.copied.append(Copied(row, index, old, block.item(0)))
                plan.let_go[old] = plan.let_go.get(old, 0) + 1
                plan.unshared.append(row)
                rows.set_shared(row, False)
            else:
                plan.grown.append((decodes.grow(np.array([i]), block), block))
        if plan.short:
            out = set(sits_out)
            plan.keep = np.array(
                [i for i, seq in enumerate(decodes.seqs[:num]) if seq.state == RUNNING and i not in out],
                np.intp,
            )

    def _make_room(self, seq: Sequence, plan: Plan, shared: int, num_rows: int) -> bool:
        """Make room for one block, or for none if that is found not to be needed after all.

        Args:
            seq: Who needs it.
            plan: Of the step.
            shared: The block that it would be a copy of, as long as others hold that; -1 if it is a new one.
            num_rows: How many rows of that are filled.

        Returns:
            False if that cannot be done in this step: `seq` runs on without it, or no more.
        """
        books = self._books
        while books.room < 1 and (shared < 0 or books.is_shared(shared, num_rows, plan.let_go)):
            plan.short = True
            if plan.num_leaving_blocks > plan.num_pledged:
                plan.num_pledged += 1
                return False
            victim = books.decoding[-1]
            if victim is seq and books.prefilling:
                return False  # those will have made a token soon, and can be preempted then
            if victim is seq and len(books.decoding) == 1:
                self._end_for_lack_of_room(seq, plan)
                return False
            self._preempt(victim, plan)
            if victim is seq:
                return False
        return True

    def _end_for_lack_of_room(self, seq: Sequence, plan: Plan) -> None:
        books = self._books
        books.publish(seq, with_tail=True)
        books.stop(seq)
        books.release(seq)
        books.set_state(seq, FINISHED)
        seq.finish_reason = "capacity"
        plan.finished.append(seq)

    def _preempt(self, seq: Sequence, plan: Plan) -> None:
        books = self._books
        rows, row = books.rows, seq.row
        # Served in order of arrival, nobody who got something in this step is preempted in it.
        assert not any(row in who for who, _ in plan.grown)
        assert row not in [copied.row for copied in plan.copied]
        books.stop(seq)
        table = rows.table(row).copy()
        own = np.flatnonzero(books.holders(table, plan.let_go) == 1)
        swap = self._should_swap(seq, len(own))
        books.set_state(seq, SWAPPED if swap else WAITING)
        seq._high_water = max(seq._high_water, rows.computed.item(row))
        seq.num_preemptions += 1
        plan.preempted.append(seq)
        if swap:
            assert books.host is not None
            dst = books.host.allocate(len(own))
            seq._host = np.full(len(table), -1, np.int32)
            seq._host[own] = dst
            seq._host_computed = rows.computed.item(row)
            plan.leaving.append(Leaving(seq, table[own], dst))
        else:
            books.publish(seq, with_tail=True)
            books.release(seq)
            books.counters.preemptions_recompute += 1
        self._admission.queue.add(seq)

    def _should_swap(self, seq: Sequence, num_own: int) -> bool:
        books, config = self._books, self._books.config
        if config.preemption == "recompute" or books.host is None or not 0 < num_own <= books.host.num_free:
            return False
        if config.preemption == "swap":
            return True
        num_shared = books.rows.num_blocks.item(seq.row) - num_own
        num_tokens = books.rows.computed.item(seq.row) - num_shared * books.block_size
        return 2 * config.swap_cost * num_own * books.block_size < num_tokens

    # -- how a preemption by swap ends -----------------------------------------------------------------------

    def has_left(self, leaving: Leaving) -> None:
        """The blocks of a sequence are copied: it needs its own no longer."""
        self._books.release(leaving.seq)
        self._books.counters.preemptions_swap += 1
        self._books.counters.swapped_out_blocks += len(leaving.src)

    def take_back(self, leaving: Leaving) -> None:
        """The blocks of a sequence were not copied: it runs on as if nothing had happened."""
        seq, books = leaving.seq, self._books
        self._admission.queue.discard(seq)
        books.release_host(seq)
        seq.num_preemptions -= 1
        books.set_state(seq, RUNNING)
        books.start_decoding(seq)
