"""How sequences end, fork and start over, whatever they are doing."""

from __future__ import annotations

from collections.abc import Hashable

from radixkv.sched.admission import Admission
from radixkv.sched.books import Books
from radixkv.sched.plan import Plan
from radixkv.sched.request import FINISHED, RUNNING, SWAPPED, WAITING, Request, Sequence
from radixkv.sched.step import Step
from radixkv.sched.waiting import insert_by_key


class Lifecycle:
    """What happens to a sequence beside its steps.

    Attributes:
        requests: Unfinished requests by name.
    """

    def __init__(self, books: Books, admission: Admission) -> None:
        self._books = books
        self._admission = admission
        self.requests: dict[Hashable, Request] = {}

    def start(self, request: Request) -> None:
        """A new request waits: its first sequence, of which the others will fork."""
        first, *others = request.sequences
        _lead(first, others)
        self._books.num[WAITING] += len(request.sequences)
        self._admission.queue.add(first)
        self.requests[request.rid] = request

    def end(self, seq: Sequence, reason: str, publish: bool, step: Step | None) -> None:
        """End a sequence; what it holds is given back now, or with the step that is out if it is in that.

        Args:
            seq: Whatever state it is in, except finished.
            reason: Why.
            publish: Keep what it has computed cached.
            step: The step that is out.
        """
        books, admission, queue = self._books, self._admission, self._admission.queue
        if step is not None:
            step.plan.disturbed = True
        if seq._leader is not None:  # it has no blocks yet
            seq._leader._followers.remove(seq)
            seq._leader = None
            if seq.row >= 0:
                books.give_row_back(seq)
        elif seq.state == RUNNING:
            in_step = step is not None and step.has_row(seq.row)
            if seq._followers and not in_step:
                self._promote(seq)
            else:
                if seq._prefilling:
                    admission.leave_pending(seq)
                books.stop(seq)
                if in_step:
                    self._end_with_step(seq, step)
                else:
                    if publish:
                        books.publish(seq, with_tail=True)
                    books.release(seq)
        else:
            if seq._blocker is not None:
                queue.unpark(seq)
            else:
                queue.discard(seq)
            if seq.row >= 0:  # it is being copied out
                self._end_with_step(seq, step)
            else:
                books.release_host(seq)
            self._let_followers_wait(seq)
        books.set_state(seq, FINISHED)
        seq.finish_reason = reason
        self.forget(seq.request)

    def release_aborted(self, plan: Plan) -> None:
        """The step is over: those that ended while it was out give back their rows and blocks."""
        for seq, tokens in plan.aborted:
            if seq.row >= 0:
                self._books.release(seq)
            self._books.release_host(seq)
            seq._tokens = tokens

    def forget(self, request: Request) -> None:
        """If all of a request is finished, its name may be used again."""
        if all(seq.state == FINISHED for seq in request.sequences):
            self.requests.pop(request.rid, None)

    def fork(self, seq: Sequence, child: Sequence) -> None:
        """`child`, which is new, goes on from where `seq` is."""
        books = self._books
        books.num[WAITING] += 1
        if seq.state != RUNNING:
            self._admission.queue.add(child)
            return
        child._started = True
        books.take_row(child)
        books.set_state(child, RUNNING)
        leader = seq if seq._prefilling else seq._leader
        if leader is not None:
            child._leader = leader
            insert_by_key(leader._followers, child)
        else:
            books.share_blocks(seq, child)
            books.start_decoding(child)
        books.epoch += 1

    def restart(self) -> list[Sequence]:
        """Take everything back from everybody, publish nothing, and empty the queue; who was in it, or is now."""
        books, queue = self._books, self._admission.queue
        for seq in books.running():
            self._admission.leave_pending(seq)
            seq._high_water = max(seq._high_water, seq.num_computed)
            books.stop(seq)
            books.release(seq)
            books.set_state(seq, WAITING)
            for follower in seq._followers:
                books.give_row_back(follower)
                books.set_state(follower, WAITING)
            queue.add(seq)
        waiting = queue.ready()  # nobody is parked: there is nobody left to wait for
        for seq in waiting:
            queue.discard(seq)
            if seq.state == SWAPPED:
                books.release_host(seq)
                books.set_state(seq, WAITING)
        return waiting

    # -- inner -----------------------------------------------------------------------------------------------

    def _end_with_step(self, seq: Sequence, step: Step | None) -> None:
        """The step reads and writes what `seq` holds: it keeps that until the step is over."""
        assert step is not None
        step.plan.aborted.append((seq, seq.all_tokens()))
        for follower in seq._followers:
            self._books.give_row_back(follower)
            self._books.set_state(follower, WAITING)
        self._let_followers_wait(seq)

    def _let_followers_wait(self, seq: Sequence) -> None:
        """Of those that were to fork from `seq`, the first waits in its place."""
        if seq._followers:
            first, *others = seq._followers
            seq._followers = []
            _lead(first, others)
            self._admission.queue.add(first)

    def _promote(self, seq: Sequence) -> None:
        """Of those that were to fork from `seq`, the first takes its place, its row and its blocks."""
        books, rows, pending = self._books, self._books.rows, self._admission.pending
        first, *others = seq._followers
        seq._followers = []
        books.stop(seq)
        first.row, seq.row = seq.row, first.row
        rows.seqs[first.row], rows.seqs[seq.row] = first, seq
        first._high_water = seq._high_water
        pending.replace(seq, first)
        first._waiters, seq._waiters = seq._waiters, []
        for _, waiter in first._waiters:
            waiter._blocker = first
        _lead(first, others)
        books.start_prefilling(first)
        books.give_row_back(seq)


def _lead(first: Sequence, others: list[Sequence]) -> None:
    """The others will fork from the first."""
    first._leader = None
    first._followers = others
    for other in others:
        other._leader = first
