"""Letting sequences in: those that wait for the first time, and those that were paused."""

from __future__ import annotations

import numpy as np

from radixkv.core.block_states import BlockIds
from radixkv.core.match import Tail
from radixkv.sched.books import Books
from radixkv.sched.pending import PendingPrefixes
from radixkv.sched.plan import Entered, Plan, next_chunk
from radixkv.sched.request import FINISHED, RUNNING, SWAPPED, WAITING, Sequence
from radixkv.sched.waiting import PrefixQueue, WaitingQueue

_NO_BLOCKS = np.empty(0, np.int32)

# How many sequences one step may park with those that compute their prefix. The rest is looked at in later steps,
# so that a long queue does not hold up a step.
_MOST_PARKED = 128


class Admission:
    """Who may start or go on, and with which blocks.

    Room for an admission is what is free or evictable once its own match is held: a hit pins blocks, it is not
    spare room. An admission needs the blocks of all its known tokens that are not cached, and leaves the watermark
    free while others run.

    A sequence that was preempted needs more room than that, so that it is not soon preempted again. The first time
    it waits for what all that run, and itself, would take to generate half as much again as they have. The second
    time it waits for all they can ever take, and as long as it runs then, whoever comes behind it must leave that
    much to it and to those before it. So nobody is preempted more than twice. (To reserve the most that all can take
    the first time already would be simpler, but where requests may generate much more than they do, few then run at
    once: 2.6 times the steps in a simulation of 400 chat-like requests, against 1.05 times this way, and half of the
    preemptions of an admission that reserves nothing.)
    """

    def __init__(self, books: Books) -> None:
        self._books = books
        config = books.config
        self.pending = PendingPrefixes(books.block_size)
        self.queue = (
            WaitingQueue(config.max_overtakes)
            if config.order == "fcfs"
            else PrefixQueue(config.max_overtakes, books.block_size, self._estimate)
        )
        self._watermark = int(config.watermark * books.num_blocks)
        # When somebody was refused last, and how much room there must be before it is worth another attempt.
        self._refused: tuple[int, int] = (-1, -1)
        self._enough = 0

    def admit(self, plan: Plan, budget: int) -> int:
        """Let in who fits, until the budget of tokens or something else ends; the budget that is left."""
        books, parked = self._books, 0
        if not books.rows.num_free or (
            self._refused == (books.epoch, self.queue.version)
            and books.room < self._enough
            and books.anybody_runs
        ):
            return budget
        while budget > 0 and parked < _MOST_PARKED:
            seq = self.queue.next()
            if seq is None or books.rows.num_free < 1 + len(seq._followers):
                break
            chunk = self._try(seq, plan, budget)
            if chunk is None:
                break
            parked += seq._blocker is not None
            budget -= chunk
        return budget

    def take_back(self, entered: Entered) -> None:
        """The step in which a sequence entered failed: it waits as before."""
        seq, is_first = entered
        books, request = self._books, seq.request
        if request._first is seq and not request._counted:
            request._first = None
            request.num_cached_tokens = 0
        if seq.state == FINISHED:  # aborted meanwhile
            return
        self.leave_pending(seq)
        books.stop(seq)
        books.pool.release(books.rows.table(seq.row))
        books.give_row_back(seq)
        for follower in seq._followers:
            follower._started = not is_first
            books.give_row_back(follower)
            books.set_state(follower, WAITING)
        books.set_state(seq, WAITING if seq._host is None else SWAPPED)
        if is_first:
            seq._started = False
        self.queue.taken_back(seq)

    def leave_pending(self, seq: Sequence) -> None:
        """A sequence will compute no more of its known tokens: nobody need wait for it."""
        self.pending.discard(seq)
        if seq._waiters:
            self.queue.wake(seq)

    # -- inner -----------------------------------------------------------------------------------------------

    def _try(self, seq: Sequence, plan: Plan, budget: int) -> int | None:
        """Let one in; how many tokens it computes in this step. 0: it is parked, or ended. None: it must wait."""
        books = self._books
        tokens = seq._tokens
        held, tail, start = _NO_BLOCKS, None, 0
        if books.config.share_prefixes:
            request = seq.request
            match = books.tree.match(
                tokens,
                request.namespace,
                max_tokens=len(tokens) - 1,
                again=request._asked,
                retention=request.retention,
            )
            request._asked = True
            if request._first is None:
                request.note = match.note
            tail, start = match.tail, match.num_tokens
            plan.held = held = match.take_all()
            if seq._host is None:
                blocker = self.pending.find(seq, tokens, start)
                if blocker is not None:
                    self._let_go(plan)
                    self.queue.park(seq, *blocker)
                    return 0
        num_cached = len(held) - (tail is not None)
        host = self._host_blocks(seq, num_cached)
        if len(host):
            if tail is not None:
                held, tail = self._without_tail(plan, tail)
            start = min(seq._host_computed, (num_cached + len(host)) * books.block_size)

        num_blocks = -(-len(tokens) // books.block_size)
        num_own = num_blocks - num_cached
        needed = num_own + self._reserve(seq, num_blocks)
        if needed > books.room and tail is not None:
            # The block that the tail would be copied from is not free as long as it is held.
            held, tail = self._without_tail(plan, tail)
            start = num_cached * books.block_size
        room = books.room
        if needed > room:
            self._let_go(plan)
            if books.anybody_runs:
                self._refused = books.epoch, self.queue.version
                self._enough = books.room + needed - room
                return None
            self._give_up(seq, plan)
            return 0

        own = books.tree.allocate(num_own)
        plan.held = None
        self._enter(seq, plan, np.concatenate((held[:num_cached], own)), start)
        if tail is not None:
            plan.tails.append((tail.block, own.item(0)))
        if len(host):
            plan.swap_in.append((host, own[: len(host)]))
        chunk = next_chunk(seq, start, budget)
        plan.chunks.append(chunk)
        if books.config.share_prefixes:
            self.pending.add(seq, tokens, num_cached)
        return chunk.num_tokens

    def _enter(self, seq: Sequence, plan: Plan, table: BlockIds, start: int) -> None:
        books, request = self._books, seq.request
        self.queue.admitted(seq)
        plan.entered.append(Entered(seq, not seq._started))
        (plan.resumed if seq._started else plan.admitted).append(seq)
        seq._started = True
        if request._first is None:
            request._first = seq
            request.num_cached_tokens = start
        row = books.take_row(seq)
        books.rows.set_table(row, table)
        books.rows.computed[row] = start
        books.set_state(seq, RUNNING)
        books.start_prefilling(seq)
        for follower in seq._followers:
            follower._started = True
            books.take_row(follower)
            books.set_state(follower, RUNNING)
        books.epoch += 1

    def _give_up(self, seq: Sequence, plan: Plan) -> None:
        """Nobody runs, and yet there is no room: others hold the blocks, who may never give them back."""
        self.queue.discard(seq)
        for ended in (seq, *seq._followers):
            ended._leader = None
            self._books.set_state(ended, FINISHED)
            ended.finish_reason = "capacity"
            plan.finished.append(ended)
        seq._followers = []
        self._books.release_host(seq)

    def _let_go(self, plan: Plan) -> None:
        """Release the match of a sequence that does not enter."""
        held, plan.held = plan.held, None
        if held is not None:
            self._books.pool.release(held)

    def _without_tail(self, plan: Plan, tail: Tail) -> tuple[BlockIds, None]:
        """Release the last block of the match, which is a tail."""
        assert plan.held is not None
        plan.held = plan.held[:-1]
        self._books.pool.release(tail.block)
        return plan.held, None

    def _host_blocks(self, seq: Sequence, num_cached: int) -> BlockIds:
        """Host blocks that go on where the cached ones end."""
        if seq._host is None:
            return _NO_BLOCKS
        rest = seq._host[num_cached:]
        gaps = (rest < 0).nonzero()[0]
        return rest[: gaps[0]] if len(gaps) else rest

    def _reserve(self, seq: Sequence, num_blocks: int) -> int:
        """Blocks that must be left when this sequence has its `num_blocks`."""
        books = self._books
        if not books.anybody_runs:
            return 0
        reserve = self._watermark
        times = seq.num_preemptions
        most = books.max_blocks(books.limit(seq))
        own = most - num_blocks + len(seq._followers) * (most - len(seq._tokens) // books.block_size)
        if times > 1:
            reserve = max(reserve, own + sum(self._growth(other) for other in books.running()))
        elif times:
            own = min(own, self._expected(seq))
            running = books.running()
            reserve = max(reserve, own + sum(min(self._growth(s), self._expected(s)) for s in running))
        if books.num_strict and times < 2:
            last = max(other.key for other in books.running() if other.num_preemptions > 1)
            before = sum(self._growth(other) for other in books.running() if other.key <= last)
            reserve = max(reserve, before + (own if seq.key < last else 0))
        return reserve

    def _growth(self, seq: Sequence) -> int:
        """Blocks that a running sequence, and those that will fork from it, can still take."""
        rows, row = self._books.rows, seq.row
        growth = rows.max_blocks.item(row) - rows.num_blocks.item(row) + bool(rows.shared[row])
        if seq._followers:
            whole = rows.known.item(row) // self._books.block_size
            growth += sum(rows.max_blocks.item(follower.row) - whole for follower in seq._followers)
        return growth

    def _expected(self, seq: Sequence) -> int:
        """Blocks for half as many tokens as a sequence, and those that will fork from it, have generated."""
        blocks = -(-max(1, seq.num_output_tokens // 2) // self._books.block_size)
        return blocks * (1 + len(seq._followers))

    def _estimate(self, seq: Sequence) -> int:
        """Tokens of a sequence that are cached or being computed."""
        if not self._books.config.share_prefixes:
            return 0
        tokens = seq._tokens
        found = self._books.tree.match_length(tokens, seq.request.namespace, max_tokens=len(tokens) - 1)
        blocker = self.pending.find(seq, tokens, found) if len(self.pending) else None
        return found if blocker is None else max(found, blocker[1])
