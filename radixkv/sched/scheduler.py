"""From requests to steps."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from radixkv.core.block_pool import BlockPool, checks_requested
from radixkv.core.errors import InvalidRequestError
from radixkv.core.eviction import Retention
from radixkv.core.namespace import Namespace, canonical_namespace
from radixkv.core.radix_tree import RadixTree
from radixkv.core.tokens import as_tokens
from radixkv.sched.admission import Admission
from radixkv.sched.assembly import assemble
from radixkv.sched.books import Books
from radixkv.sched.completion import Completion
from radixkv.sched.config import SchedulerConfig
from radixkv.sched.lifecycle import Lifecycle
from radixkv.sched.plan import Plan, next_chunk
from radixkv.sched.preemption import Growth
from radixkv.sched.request import FINISHED, RUNNING, SWAPPED, WAITING, Request, Sequence
from radixkv.sched.scheduler_check import check_scheduler
from radixkv.sched.stats import SchedulerStats
from radixkv.sched.step import Completed, Step

__all__ = ["Scheduler"]


class Scheduler:
    """Turns requests into steps: which tokens of which sequences a model computes next, and in which blocks.

    It does not know the model. In a loop: `schedule` says what to do; the caller moves blocks, computes the tokens,
    and samples; `complete` takes the sampled tokens, and publishes the KV that was written. If something went wrong
    in between, `fail` puts everything back. One step is out at a time.

    Running sequences decode first, then prompts go on, then others are admitted, all in order of arrival. A prompt
    gets all its blocks when it is admitted, and is computed in chunks within the budget of tokens.

    It is for one thread at a time. Others may use the tree meanwhile; the pool's lock is held during each call.

    Args:
        tree: Where prefixes are looked up and published; its pool has the blocks.
        config: Limits and policies.
        host_pool: Blocks of the host tier, for preemption by swap; None if there is none.

    Raises:
        InvalidRequestError: `preemption="swap"` without a host tier.

    Sources: continuous batching by iteration: Yu et al., Orca, 2022. Preemption: Kwon et al., vLLM, 2023
    (arXiv:2309.06180). Chunked prefill: Agrawal et al., Sarathi-Serve, 2024 (arXiv:2403.02310).
    """

    def __init__(
        self,
        tree: RadixTree,
        config: SchedulerConfig | None = None,
        host_pool: BlockPool | None = None,
    ) -> None:
        if not isinstance(tree, RadixTree):
            raise InvalidRequestError(f"a scheduler works on a RadixTree, got {type(tree).__name__}")
        config = config or SchedulerConfig()
        if config.preemption == "swap" and host_pool is None:
            raise InvalidRequestError(
                'preemption="swap" needs a host tier: pass host_pool, or use "recompute"'
            )
        self._tree = tree
        self._pool = tree.pool
        self._config = config
        self._books = books = Books(tree, config, host_pool)
        self._rows = books.rows
        self._admission = Admission(books)
        self._growth = Growth(books, self._admission)
        self._lifecycle = Lifecycle(books, self._admission)
        self._completion = Completion(books, self._admission, self._growth, self._lifecycle)
        self._requests = self._lifecycle.requests
        self._num_arrived = 0
        self._num_steps = 0
        self._step: Step | None = None  # the one that is out
        self._checks = checks_requested()

    def __repr__(self) -> str:
        return (
            f"Scheduler(running={self.num_running}, waiting={self.num_waiting}, swapped={self.num_swapped})"
        )

    # -- numbers ---------------------------------------------------------------------------------------------

    @property
    def tree(self) -> RadixTree:
        """Where prefixes are looked up and published."""
        return self._tree

    @property
    def config(self) -> SchedulerConfig:
        """Limits and policies."""
        return self._config

    @property
    def has_unfinished(self) -> bool:
        """Whether some request is not finished."""
        return bool(self._requests)

    @property
    def num_running(self) -> int:
        """Sequences that have a row."""
        return self._books.num[RUNNING]

    @property
    def num_waiting(self) -> int:
        """Sequences that wait to start, or to be computed again."""
        return self._books.num[WAITING]

    @property
    def num_swapped(self) -> int:
        """Sequences that wait in the host tier."""
        return self._books.num[SWAPPED]

    @property
    def stats(self) -> SchedulerStats:
        """A snapshot of the counters. O(blocks that running sequences hold)."""
        with self._pool.lock:
            return self._books.counters.snapshot(*self._books.used_slots())

    @property
    def num_resumed_tokens(self) -> int:
        """`stats.resumed_tokens`, O(1)."""
        return self._books.counters.resumed_tokens

    @property
    def num_recomputed_tokens(self) -> int:
        """`stats.recomputed_tokens`, O(1)."""
        return self._books.counters.recomputed_tokens

    def sequence(self, row: int) -> Sequence:
        """The sequence that has this `row`.

        Raises:
            InvalidRequestError: No sequence has it.
        """
        seq = self._rows.seqs[row] if 0 <= row < len(self._rows.seqs) else None
        if seq is None:
            raise InvalidRequestError(f"no sequence has row {row}")
        return seq

    def request(self, rid: Hashable) -> Request:
        """The unfinished request of the name `rid`.

        Raises:
            InvalidRequestError: There is none.
        """
        if rid not in self._requests:
            raise InvalidRequestError(f"there is no unfinished request {rid!r}")
        return self._requests[rid]

    # -- requests --------------------------------------------------------------------------------------------

    def add(
        self,
        tokens: Any,
        *,
        max_new_tokens: int,
        namespace: Namespace = b"",
        n: int = 1,
        rid: Hashable | None = None,
        retention: Retention | None = None,
    ) -> Request:
        """Queue a prompt. At any moment, also while a step is out.

        Args:
            tokens: The prompt, at least one token.
            max_new_tokens: Tokens to generate; a sequence that has them ends with "length".
            namespace: What must be equal beside the tokens for KV to be shared.
            n: Completions. They share the prompt's blocks; the prompt is computed once.
            rid: What to call it; its arrival rank if None.
            retention: How long to keep its blocks once cached, where the tree's policy takes requests' word for it
                (`policy="priority"`).

        Raises:
            InvalidRequestError: Something of it makes no sense, or it can never fit. Nothing is changed.
        """
        prompt = as_tokens(tokens).copy()
        self._tree.require_retention(retention)
        n = _require_count("n", n)
        max_new_tokens = _require_count("max_new_tokens", max_new_tokens)
        config, size = self._config, self._tree.block_size
        if not len(prompt):
            raise InvalidRequestError("the prompt is empty: give at least one token, such as a begin token")
        if n > config.max_num_seqs:
            raise InvalidRequestError(
                f"n={n} sequences never run at once: max_num_seqs is {config.max_num_seqs}"
            )
        if config.max_seq_len is not None and len(prompt) >= config.max_seq_len:
            raise InvalidRequestError(
                f"a prompt of {len(prompt)} tokens leaves no room for output: max_seq_len is {config.max_seq_len}"
            )
        needed, have = -(-len(prompt) // size), self._pool.num_blocks
        if needed > have:
            raise InvalidRequestError(
                f"a prompt of {len(prompt)} tokens needs {needed} blocks of {size}, the pool has {have}: "
                f"raise num_blocks or shorten the prompt"
            )
        if rid is None:
            rid = next(rank for rank in itertools.count(self._num_arrived) if rank not in self._requests)
        elif not isinstance(rid, Hashable):
            raise InvalidRequestError(
                f"rid must be hashable, such as an int or a str, got {type(rid).__name__}"
            )
        if rid in self._requests:
            raise InvalidRequestError(f"there is an unfinished request {rid!r} already")
        request = Request(rid, prompt, namespace, max_new_tokens, n, self._num_arrived, retention)
        with self._pool.lock:
            request.sequences = [Sequence(self, request, i, prompt) for i in range(n)]
            self._lifecycle.start(request)
            self._num_arrived += 1
        return request

    def abort(self, rid: Hashable) -> bool:
        """End a request, whatever it is doing; all its blocks are given back at once.

        While a step is out that it takes part in, they are given back when that step is complete or failed.

        Args:
            rid: Its name.

        Returns:
            Whether there was an unfinished request of that name.
        """
        request = self._requests.get(rid)
        if request is None:
            return False
        with self._pool.lock:
            # Those that would fork from another one first.
            for seq in sorted(request.sequences, key=lambda seq: seq._leader is None):
                if seq.state != FINISHED:
                    self._lifecycle.end(seq, "abort", publish=False, step=self._step)
            self._settle()
        return True

    def drop(self, seq: Sequence, reason: str) -> None:
        """End one sequence at any moment, also while a step is out; what that step computes of it is not cached.

        For a sequence whose computation failed. Of those that wait to fork from it (`Step.sequences_of`), if they
        are not dropped before, one takes its place.

        Args:
            seq: The sequence.
            reason: What its `finish_reason` will be.

        Raises:
            InvalidRequestError: It is finished already.
        """
        if seq.state == FINISHED:
            raise InvalidRequestError(f"{seq} is finished already")
        with self._pool.lock:
            self._lifecycle.end(seq, reason, publish=False, step=self._step)
            self._settle()

    def finish(self, seq: Sequence, reason: str) -> None:
        """End a sequence between two steps; what it has computed stays cached.

        Args:
            seq: The sequence.
            reason: What its `finish_reason` will be.

        Raises:
            InvalidRequestError: It is finished already, or a step is out.
        """
        self._require_no_step("finish")
        if seq.state == FINISHED:
            raise InvalidRequestError(f"{seq} is finished already")
        with self._pool.lock:
            self._lifecycle.end(seq, reason, publish=True, step=None)
            self._settle()

    def fork(self, seq: Sequence) -> Sequence:
        """A new sequence of the same request, with the same tokens; whatever the two have in common is shared.

        If it runs, so does its fork. They share all blocks, a partly filled last one too, which the first of them
        that writes to it copies. If it has not computed its known tokens yet, the fork waits for that. The fork of
        one that waits, or is swapped out, waits by itself, and finds what is cached by then.

        Args:
            seq: The sequence to fork.

        Raises:
            InvalidRequestError: No row is free, it is finished, or a step is out.
        """
        self._require_no_step("fork")
        if seq.state == FINISHED:
            raise InvalidRequestError(f"{seq} is finished: it cannot be forked")
        if seq.state == RUNNING and not self._rows.num_free:
            raise InvalidRequestError(
                f"no row is free for a fork: {self.num_running} sequences run, max_num_seqs is "
                f"{self._config.max_num_seqs}"
            )
        with self._pool.lock:
            request = seq.request
            child = Sequence(self, request, len(request.sequences), seq.all_tokens())
            request.sequences.append(child)
            self._lifecycle.fork(seq, child)
            self._settle()
        return child

    def restart(self, key_of: Callable[[Request], Namespace] | None = None) -> None:
        """The weights have changed: nothing that was computed so far may be used.

        Every sequence that runs or is swapped out gives its blocks back, without publishing anything, and waits to
        be computed again, with the tokens that it has. What the tree holds already is not touched: give requests a
        new namespace, or clear the tree.

        Args:
            key_of: The namespace of each unfinished request from now on; None to leave them as they are.

        Raises:
            InvalidRequestError: A step is out, or `key_of` gives what is no namespace. Nothing is changed.
        """
        self._require_no_step("restart")
        names = {} if key_of is None else {rid: key_of(request) for rid, request in self._requests.items()}
        for name in names.values():
            canonical_namespace(name)  # raises before anything is taken apart
        with self._pool.lock:
            waiting = self._lifecycle.restart()
            for rid, name in names.items():
                self._requests[rid].set_namespace(name)
            for seq in waiting:
                self._admission.queue.add(seq)
            self._settle()

    # -- steps -----------------------------------------------------------------------------------------------

    def schedule(self) -> Step | None:
        """What to do next; None if there is nothing to do.

        The caller carries out the step's moves, in the order in which `Step` names them, then its forward, and
        calls `complete`, or `fail`. Never raises for lack of blocks.

        Raises:
            InvalidRequestError: The step before is neither complete nor failed.
        """
        self._require_no_step("schedule")
        plan = Plan()
        with self._pool.lock:
            try:
                budget = self._config.max_batched_tokens
                budget -= self._growth.plan(plan, budget)
                for seq in self._books.prefilling:
                    if budget <= 0:
                        break
                    plan.chunks.append(next_chunk(seq, seq.num_computed, budget))
                    budget -= plan.chunks[-1].num_tokens
                if not plan.short:
                    self._admission.admit(plan, budget)
                if plan.is_empty:
                    assert not self._books.anybody_runs, "sequences run, but none can go on"
                    return None
                step = assemble(self._books, plan, self._num_steps)
            except BaseException:
                self._completion.undo(plan)
                raise
            finally:
                for seq in plan.finished:
                    self._lifecycle.forget(seq.request)
            self._num_steps += 1
            self._step = step
            self._settle()
        return step

    def complete(
        self, step: Step, tokens: npt.NDArray[np.int64] | Any, finished: Mapping[int, str] | None = None
    ) -> Completed:
        """The step was carried out. Publishes the KV that it wrote.

        Args:
            step: What `schedule` returned.
            tokens: `int64[N]`, one sampled token for each entry of `step.sampling`.
            finished: Why sequences end with this token, by index into `step.sampling`. Those that have all the
                tokens they may have end with "length" by themselves.

        Raises:
            InvalidRequestError: It is not the step that is out, or the tokens make no sense. Nothing is changed.
        """
        self._require_step(step)
        sampled = as_tokens(tokens)
        if len(sampled) != len(step.sampling):
            raise InvalidRequestError(f"the step samples {len(step.sampling)} tokens, got {len(sampled)}")
        reasons = dict(finished or {})
        if reasons and not all(0 <= at < len(sampled) for at in reasons):
            raise InvalidRequestError(f"finished names {sorted(reasons)}, of {len(sampled)} sampled tokens")
        with self._pool.lock:
            self._step = None
            done = self._completion.complete(step, sampled, reasons)
            self._settle()
        return done

    def fail(self, step: Step) -> None:
        """The step was not carried out, or not to its end: everything is as before it, and nothing is published.

        Two things stand, because they need no step: sequences that were preempted by recompute, and those that
        ended with "capacity".

        Args:
            step: What `schedule` returned.

        Raises:
            InvalidRequestError: It is not the step that is out.
        """
        self._require_step(step)
        with self._pool.lock:
            self._step = None
            self._completion.undo(step.plan)
            self._settle()

    # -- for tests -------------------------------------------------------------------------------------------

    def check(self, exclusive: bool = False) -> None:
        """Raise `CacheCorruptionError`, with values, at the first invariant broken. For tests.

        Args:
            exclusive: Nobody else holds blocks of the pool, so that every reference must be accounted for.
        """
        with self._pool.lock:
            check_scheduler(self, exclusive)

    # -- inner -----------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        """The end of every change."""
        self._books.drop_uncached()
        if self._checks:
            self.check()

    def _require_no_step(self, what: str) -> None:
        if self._step is not None:
            raise InvalidRequestError(f"{what}: {self._step} is out: complete or fail it first")

    def _require_step(self, step: Step) -> None:
        if step is not self._step or step is None:
            out = "no step is out" if self._step is None else f"{self._step} is out"
            raise InvalidRequestError(f"{step!r} is not the step to end: {out}")


def _require_count(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
        raise InvalidRequestError(f"{name} must be an integer of at least 1, got {value!r}")
    return int(value)
