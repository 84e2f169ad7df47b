"""`Engine`: many requests at once over one model, sharing what they have in common."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections import deque
from collections.abc import Callable, Hashable
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from radixkv.attention import AttentionBackend
from radixkv.cache.locking import InterruptsHeld
from radixkv.cache.prefix_cache import PrefixCache
from radixkv.core.errors import InvalidRequestError, OutOfBlocksError
from radixkv.core.eviction import Retention
from radixkv.core.namespace import Namespace, canonical_namespace
from radixkv.engine.completion import Completion, TokenOutput, refused, warn_of_errors
from radixkv.engine.desk import Desk
from radixkv.engine.drivers import Door, claim
from radixkv.engine.executing import Executor
from radixkv.engine.inputs import as_prompts, longest_sequence, one_sampling, prompt_ids, sampling_for
from radixkv.engine.output_stream import OutputStream
from radixkv.engine.progress import Progress
from radixkv.engine.records import Record, Stream
from radixkv.engine.runner import GraphLimits, ModelRunner
from radixkv.engine.sampler import Sampler
from radixkv.engine.sampling_params import SamplingParams
from radixkv.engine.stats import EngineStats
from radixkv.hf.support import unwrap_model
from radixkv.sched import Request as SchedRequest
from radixkv.sched import Scheduler, SchedulerConfig, Sequence, Step
from radixkv.store.host_tier import HostTier

__all__ = ["Engine"]


class Engine:
    """Continuous batching over one transformers model: every step mixes what all requests need next.

    Prompts that share a prefix compute it once and share its blocks; what was computed stays cached for later
    requests, as far as there is room. The model object is used as it is and left as it was found.

    An engine is driven by one thread: a call from a second one while a call is under way is refused.

    Args:
        model: A causal LM of transformers (or a PEFT wrapper around one), in evaluation mode.
        tokenizer: Its tokenizer, for prompts and answers as text; None for token ids only.
        cache: A `PrefixCache.for_model(model)` to work in; None makes one, of the size that follows.
        attention: `"auto"`, the name of a backend, or a backend.
        max_num_seqs: Sequences that are computed at the same time, at most.
        max_batched_tokens: Tokens in one forward, at most. Longer prompts are computed in chunks.
        max_seq_len: Longest sequence, prompt and answer, in tokens. None: the longest the model is made for.
        block_size: Tokens in a block, of the cache made here, as are
        num_blocks: its size in blocks, or
        num_tokens: in tokens, or
        memory: in bytes, as text (`"2GiB"`), or as a share of the device's free memory. With none of the three, a fifth
            of free host memory or half of free GPU memory.
        policy: Its eviction policy.
        preemption: How a running sequence gives its blocks back when there is no room: `"recompute"` them later,
            `"swap"` them to host memory, or `"auto"`: what is estimated to cost less.
        host_memory: Room for swapped blocks: bytes, text, or a share of free host memory; 0 for none.
        order: Of waiting requests: `"fcfs"` (first come, first served) or `"prefix"` (longest cached prefix first).
        max_overtakes: With `"prefix"`: by how many later requests one may be passed, at most.
        watermark: Share of the pool that is kept free when a request is admitted beside others.
        swap_cost: For `preemption="auto"`: time to move the KV of a token to host memory, as a multiple of the time to
            compute it. None takes a value measured on CPUs, or one estimated for GPUs, which nobody has measured yet.
        cuda_graphs: Whether decode steps may run as CUDA graphs, where FlashInfer computes the attention of all layers.
            The environment variable `RADIXKV_NO_GRAPHS=1` says no for all engines.

    Raises:
        InvalidRequestError: An option makes no sense, or the cache belongs to another model.
        UnsupportedModelError: The model cannot be served from a KV cache; the message says why.

    Sources: iteration-level scheduling is Orca's (Yu et al., OSDI 2022), blocks, copy-on-write and preemption are
    vLLM's (Kwon et al., 2023, arXiv:2309.06180), prefixes in a radix tree SGLang's (Zheng et al., 2024,
    arXiv:2312.07104), prefill in chunks beside decodes Sarathi's (Agrawal et al., 2023, arXiv:2308.16369).
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        cache: PrefixCache | None = None,
        attention: str | AttentionBackend = "auto",
        *,
        max_num_seqs: int = 64,
        max_batched_tokens: int = 2048,
        max_seq_len: int | None = None,
        block_size: int | None = None,
        num_blocks: int | None = None,
        num_tokens: int | None = None,
        memory: str | int | float | None = None,
        policy: str | None = None,
        preemption: str = "auto",
        host_memory: str | int | float = 0,
        order: str = "fcfs",
        max_overtakes: int = 256,
        watermark: float = 0.01,
        swap_cost: float | None = None,
        cuda_graphs: bool = True,
    ) -> None:
        sizes = {
            "block_size": block_size,
            "num_blocks": num_blocks,
            "num_tokens": num_tokens,
            "memory": memory,
            "policy": policy,
        }
        given: dict[str, Any] = {name: value for name, value in sizes.items() if value is not None}
        self._model = unwrap_model(model)
        config = SchedulerConfig(  # before any memory is taken
            max_num_seqs=max_num_seqs,
            max_batched_tokens=max_batched_tokens,
            max_seq_len=longest_sequence(self._model, max_seq_len),
            preemption=preemption,
            order=order,
            max_overtakes=max_overtakes,
            watermark=watermark,
            swap_cost=_swap_cost(self._model) if swap_cost is None else swap_cost,
        )
        if preemption == "swap" and not host_memory:
            raise InvalidRequestError(
                'preemption="swap" needs room: give host_memory, such as host_memory="1GiB"'
            )
        if preemption == "recompute" and host_memory:
            raise InvalidRequestError(
                'host_memory is for preemption="swap" or "auto": leave it out, or choose one of these'
            )
        if tokenizer is not None and not (
            callable(tokenizer) and callable(getattr(tokenizer, "decode", None))
        ):
            raise InvalidRequestError(
                f"tokenizer must be one of transformers' tokenizers, or act like one, got {type(tokenizer).__name__}"
            )
        if cache is None:
            cache = PrefixCache.for_model(model, **given)
        elif not isinstance(cache, PrefixCache):
            raise InvalidRequestError(
                f"cache must be a PrefixCache, got {type(cache).__name__}: sizes are given by name, as num_blocks=..."
            )
        elif given:
            raise InvalidRequestError(
                f"{', '.join(given)}: the cache that was given has its own; leave these out or leave cache out"
            )
        self._cache = cache
        self._plug = cache.plug
        self._plug.require_servable(model)
        self._given_model = model
        self._tokenizer = tokenizer
        self._longest: int = config.max_seq_len or 0
        limited = self._longest < longest_sequence(self._model, None)
        self._or_raise_the_limit = ", or raise max_seq_len" if limited else ""
        self._wanted_attention = attention
        self._graph_limits: GraphLimits | None = None
        if cuda_graphs and os.environ.get("RADIXKV_NO_GRAPHS", "") in ("", "0"):
            self._graph_limits = GraphLimits(max_num_seqs, self._longest)
        self._tier = HostTier(cache.store, host_memory) if host_memory else None
        self._scheduler = Scheduler(cache.tree, config, None if self._tier is None else self._tier.pool)
        self._sampler = Sampler(self._model, tokenizer)
        self._read_model()
        self._desk = Desk(tokenizer, self._scheduler, cache.recorder)
        self._circumstances: Any = None
        self._door = Door()
        self._orphans: deque[object] = deque()
        self._names = itertools.count()
        self._num_steps = 0
        self._peak_used_blocks = 0

    def __repr__(self) -> str:
        s = self._scheduler
        return (
            f"Engine({type(self._model).__name__}, {s.num_running} running, {s.num_waiting} waiting, "
            f"{s.num_swapped} swapped, {self._cache!r})"
        )

    # -- what it is made of ---------------------------------------------------------------------------------

    @property
    def cache(self) -> PrefixCache:
        """The prefix cache it works in."""
        return self._cache

    @property
    def scheduler(self) -> Scheduler:
        """Its scheduler, to look at; change it through the engine."""
        return self._scheduler

    @property
    def fallback_reason(self) -> str | None:
        """Why sequences are forwarded one by one instead of as one flat batch; None if they are not."""
        return self._runner.fallback_reason

    @property
    def no_graphs_reason(self) -> str | None:
        """Why decode steps are run without CUDA graphs, or batches of new sizes are; None if nothing speaks against."""
        graphs = self._runner.graphs
        if graphs is None:
            return self._runner.no_graphs_reason
        return self._runner.watched_reason or graphs.reason

    @property
    def backend_name(self) -> str:
        """What computes its attention: `"flashinfer"`, `"torch"`, or the name of the backend that was given."""
        return self._runner.backend.name

    @property
    def graph_sizes(self) -> list[int]:
        """Batch sizes that there is a CUDA graph for, ascending."""
        graphs = self._runner.graphs
        return [] if graphs is None else graphs.sizes

    @property
    def num_graph_steps(self) -> int:
        """Decode steps that were run as CUDA graphs, since the model was last looked at."""
        graphs = self._runner.graphs
        return 0 if graphs is None else graphs.num_replays

    @property
    def has_unfinished(self) -> bool:
        """Whether `step()` has anything left to give: unfinished requests, or outputs that nobody has read yet."""
        return self.is_at_work or bool(self._desk.ready)

    @property
    def is_at_work(self) -> bool:
        """Whether any request is not finished; unlike `has_unfinished`, outputs that wait to be read do not count."""
        self._sweep()
        return bool(self._desk.streams)

    @property
    def stats(self) -> EngineStats:
        """A snapshot of its counters."""
        self._sweep()
        return self.lifetime_stats

    @property
    def lifetime_stats(self) -> EngineStats:
        """The same for monitoring: any thread may ask for it, also in the middle of a step."""
        s, pool = self._scheduler.stats, self._cache.pool
        block_bytes = 0 if self._tier is None else self._tier.block_bytes
        return EngineStats(
            running=self._scheduler.num_running,
            waiting=self._scheduler.num_waiting,
            swapped=self._scheduler.num_swapped,
            finished=self._desk.num_finished,
            steps=self._num_steps,
            prompt_tokens=s.prompt_tokens,
            hit_tokens=s.hit_tokens,
            generated_tokens=self._desk.num_generated,
            preemptions=s.preemptions,
            preemptions_recompute=s.preemptions_recompute,
            preemptions_swap=s.preemptions_swap,
            swapped_out_blocks=s.swapped_out_blocks,
            swapped_in_blocks=s.swapped_in_blocks,
            swapped_out_bytes=s.swapped_out_blocks * block_bytes,
            swapped_in_bytes=s.swapped_in_blocks * block_bytes,
            recomputed_tokens=s.recomputed_tokens,
            resumed_tokens=s.resumed_tokens,
            cow_copies=s.cow_copies,
            block_utilisation=s.block_utilisation,
            used_blocks=pool.num_held - pool.num_idle,
            peak_used_blocks=self._peak_used_blocks,
            finished_by_reason=dict(self._desk.finished_by_reason),
            ttft=self._desk.ttft.snapshot(),
            latency=self._desk.latency.snapshot(),
        )

    def check(self) -> None:
        """Verify the books of scheduler, cache and host tier.

        Raises:
            CacheCorruptionError: An invariant is broken; the message gives the values.
        """
        with self._door.enter(), self._cache.lock:
            self._scheduler.check()
            self._cache.check()
            if self._tier is not None:
                self._tier.pool.check()

    # -- many prompts at once -------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Any,
        sampling: Any = None,
        *,
        namespace: Namespace = None,
        retention: Retention | None = None,
        progress: bool = False,
    ) -> list[Completion]:
        """Complete all prompts.

        Args:
            prompts: A list of texts, of token id rows or of chats (lists of messages), a `[rows, tokens]` tensor, what
                a tokenizer returns (left or right padding is taken off), or a single one of these.
            sampling: `SamplingParams` for all, or a list with one for each prompt; None is greedy.
            namespace: What must be equal, beside the tokens, for KV to be shared.
            retention: How long to keep what they leave in the cache, if its policy takes requests' word for it
                (`policy="priority"`).
            progress: Show a progress bar; nothing is shown where stderr is no terminal.

        Returns:
            `n` completions for each prompt, in the order of the prompts. A prompt that cannot be served, or whose
            computation fails, gets completions with `finish_reason="error"` and the error in `error`, with one warning
            for all of them, and the others go on.

        Raises:
            InvalidRequestError: The call as a whole makes no sense (not prompts, wrong number of sampling
                parameters, another thread or engine is at work). Nothing was started.
        """
        items = as_prompts(prompts)
        params = sampling_for(items, sampling)
        canonical_namespace(namespace)
        self._cache.tree.require_retention(retention)
        self._require_rows(max((wanted.n for wanted in params), default=1))
        owner = object()
        results: list[list[Stream] | Completion] = []
        with self._door.enter():
            self._wake()
            with _Call(owner, self._abort_owned, self._orphans.append):
                for which, (item, wanted) in enumerate(zip(items, params, strict=True)):
                    began = time.perf_counter()
                    num_tokens = 0
                    try:
                        tokens = prompt_ids(item, self._tokenizer, self._plug.vocab_size)
                        num_tokens = len(tokens)
                        record = self._add(tokens, wanted, namespace, None, owner, which, retention)
                    except Exception as error:  # of ours, or of the tokenizer
                        results += [refused(error, which, i, num_tokens, began) for i in range(wanted.n)]
                    else:
                        results.append(record.streams)
                self._run(owner, sum(p.n for p in params), progress)
        done: list[Completion] = []
        for entry in results:
            if isinstance(entry, Completion):
                done.append(entry)
            else:
                done += [stream.completion for stream in entry if stream.completion is not None]
        warn_of_errors(done)
        return done

    def _run(self, owner: object, total: int, progress: bool) -> None:
        mine = [stream for record in self._desk.owned(owner) for stream in record.streams]
        with Progress(total, progress) as bar:
            finished = total - len(mine)
            want_stats = bar.update(finished, 0)
            while mine:
                before = self._desk.num_generated
                self._advance()
                left = [stream for stream in mine if stream.completion is None]
                finished += len(mine) - len(left)
                mine = left
                new = self._desk.num_generated - before
                want_stats = bar.update(finished, new, self.stats if want_stats else None)

    # -- one step at a time ---------------------------------------------------------------------------------

    def add_request(
        self,
        prompt: Any,
        sampling: SamplingParams | None = None,
        *,
        namespace: Namespace = None,
        rid: Hashable | None = None,
        retention: Retention | None = None,
    ) -> Hashable:
        """Queue a prompt; `step()` will bring its tokens.

        Args:
            prompt: Text, token ids, or a chat.
            sampling: How to complete it; None is greedy.
            namespace: What must be equal, beside the tokens, for KV to be shared.
            rid: A name of your own; it must not be in use. None makes one.
            retention: As in `generate`.

        Returns:
            The name of the request.

        Raises:
            InvalidRequestError: The prompt cannot be served; the message says why. Nothing was changed.
        """
        wanted = one_sampling(sampling)
        with self._door.enter():
            self._wake()
            tokens = prompt_ids(prompt, self._tokenizer, self._plug.vocab_size)
            return self._add(tokens, wanted, namespace, rid, None, retention=retention).rid

    def step(self) -> list[TokenOutput]:
        """One forward: what every running sequence needs next.

        Returns:
            One entry for each new token of the requests that were added with `add_request`, and one for each that
            ended without a token: also those that came while a `generate` or a `stream` drove the engine. Empty if
            there is nothing to do.

        Raises:
            InvalidRequestError: The model changed into one that cannot be served; or another thread is at work.
        """
        with self._door.enter():
            if self._desk.streams:
                self._advance()
            ready, self._desk.ready = self._desk.ready, []
            return ready

    def abort(self, rid: Hashable) -> bool:
        """End a request at any moment; all its blocks are given back at once.

        Its sequences end with `finish_reason="abort"`, which the next `step()` reports.

        Args:
            rid: Its name, as `add_request` returned it.

        Returns:
            Whether it was there; False if it is unknown or finished already.

        Raises:
            InvalidRequestError: Another thread is at work.
        """
        with self._door.enter(reentrant=True):
            record = self._desk.records.get(rid)
            if record is None:
                return False
            with InterruptsHeld():
                with self._cache.lock:
                    self._scheduler.abort(rid)
                self._desk.settle(record)
            self._rest()
            return True

    def fork(self, rid: Hashable, index: int = 0) -> int:
        """Split a running sequence in two: the new one starts with the tokens that the old one has now.

        They share all blocks, the partly filled last one included; who writes into it first copies it. With
        sampling, the two draw different random numbers.

        Args:
            rid: The request.
            index: Which of its sequences.

        Returns:
            The index of the new one.

        Raises:
            InvalidRequestError: It does not run, or `max_num_seqs` sequences run already.
        """
        with self._door.enter():
            record = self._desk.records.get(rid)
            streams = [] if record is None else record.streams
            parent = next((s for s in streams if s.sequence.index == index and s.completion is None), None)
            if parent is None:
                raise InvalidRequestError(
                    f"request {rid!r} has no unfinished sequence {index}: nothing to fork"
                )
            sampler = self._sampler.fork(parent.sampler)
            with InterruptsHeld():
                with self._cache.lock:
                    sequence = self._scheduler.fork(parent.sequence)
                self._desk.add_fork(parent, sequence, sampler)
            return int(sequence.index)

    def stream(
        self,
        prompt: Any,
        sampling: SamplingParams | None = None,
        *,
        namespace: Namespace = None,
        retention: Retention | None = None,
    ) -> OutputStream:
        """Complete one prompt token by token, while other requests go on.

        Args:
            prompt: Text, token ids, or a chat.
            sampling: How to complete it; None is greedy.
            namespace: What must be equal, beside the tokens, for KV to be shared.
            retention: As in `generate`.

        Returns:
            An iterator over `TokenOutput`. Closing it, or dropping it, aborts the request.

        Raises:
            InvalidRequestError: As `add_request`.
        """
        wanted = one_sampling(sampling)
        stream = OutputStream(self._advance_for, self._leave, self._orphans.append)
        try:
            with self._door.enter():
                self._wake()
                tokens = prompt_ids(prompt, self._tokenizer, self._plug.vocab_size)
                self._add(tokens, wanted, namespace, None, stream.inbox, retention=retention)
        except BaseException:
            stream.close()
            raise
        return stream

    def _advance_for(self, owner: object) -> bool:
        with self._door.enter():
            unfinished = bool(self._desk.owned(owner))
            if unfinished:
                self._advance()
            return unfinished

    def _leave(self, owner: object) -> None:
        with self._door.enter():
            self._abort_owned(owner)

    def record_graphs(self) -> list[int]:
        """Record the CUDA graphs of all batch sizes now, the largest first.

        Otherwise each is recorded when its size first occurs, and holds up that step. Their first steps are still run
        a second time without, to hold them against each other.

        Returns:
            `graph_sizes`. Empty where steps are run without graphs; `no_graphs_reason` then says why.

        Raises:
            InvalidRequestError: Another thread or engine is at work.
        """
        with self._door.enter():
            self._wake()
            self._tell_runner()
            self._runner.record_graphs()
            self._rest()
        return self.graph_sizes

    def close(self) -> None:
        """Abort everything, and drop CUDA graphs; what is cached stays in the cache. The engine can be used again."""
        with self._door.enter():
            for rid in list(self._desk.records):
                self.abort(rid)
            self._desk.ready.clear()
            if self._runner.graphs is not None:
                self._runner.graphs.forget()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- requests in and out --------------------------------------------------------------------------------

    def _wake(self) -> None:
        """Before requests are added: the model must be servable, and no other engine at work on it."""
        self._sweep()
        claim(self._model, self)
        if not self._desk.streams:
            self._plug.require_servable(self._given_model)
            self._circumstances = self._plug.circumstances()
            if self._plug.attention() != self._attention:
                self._read_model()

    def _read_model(self) -> None:
        """Find out how to run the model: how it computes attention is asked once, and again if that is changed."""
        self._attention = self._plug.attention()
        self._runner = ModelRunner(
            self._given_model, self._cache.store, self._wanted_attention, self._graph_limits
        )
        self._executor = Executor(self._cache.store, self._tier, self._runner, self._sampler)

    def _rest(self) -> None:
        if not self._desk.streams:
            self._plug.rest()

    def _sweep(self) -> None:
        """Abort what belonged to streams that were dropped; a finalizer may not do that itself."""
        if self._orphans and not self._door.in_step:
            with (
                contextlib.suppress(InvalidRequestError),
                self._door.enter(),
            ):  # else the one who is in will do it
                while self._orphans:
                    self._abort_owned(self._orphans.popleft())

    def _add(
        self,
        tokens: npt.NDArray[np.int64],
        sampling: SamplingParams,
        namespace: Namespace,
        rid: Hashable | None,
        owner: object | None,
        prompt_index: int | None = None,
        retention: Retention | None = None,
    ) -> Record:
        began = time.perf_counter()
        canonical_namespace(namespace)
        if len(tokens) >= self._longest:
            raise InvalidRequestError(
                f"the prompt has {len(tokens)} tokens, and a sequence may have {self._longest}, one new token at least "
                f"among them: shorten it{self._or_raise_the_limit}"
            )
        if rid is None:
            rid = next(name for name in self._names if name not in self._desk.records)
        elif not isinstance(rid, Hashable):
            raise InvalidRequestError(
                f"rid must be hashable, such as an int or a str, got {type(rid).__name__}"
            )
        elif rid in self._desk.records:
            raise InvalidRequestError(f"a request named {rid!r} is not finished yet: choose another rid")
        self._require_rows(sampling.n)
        samplers = [self._sampler.start(sampling, tokens, i) for i in range(sampling.n)]
        key = self._plug.key_under(self._circumstances, namespace, len(tokens))
        room = self._longest - len(tokens)
        with InterruptsHeld(), self._cache.lock:
            request = self._scheduler.add(
                tokens,
                max_new_tokens=room
                if sampling.max_new_tokens is None
                else min(sampling.max_new_tokens, room),
                namespace=key,
                n=sampling.n,
                rid=rid,
                retention=retention,
            )
            record = Record(rid, request, sampling, namespace, owner, began, prompt_index)
            record.claim = self._cache.register_key(namespace, key)
            for sequence, sampler in zip(request.sequences, samplers, strict=True):
                record.streams.append(self._desk.new_stream(record, sequence, sampler))
            self._desk.add(record)
        return record

    def _require_rows(self, n: int) -> None:
        """Before anything is made for each of `n` completions, which may be millions."""
        most = self._scheduler.config.max_num_seqs
        if n > most:
            raise InvalidRequestError(f"n={n} is more than max_num_seqs={most}")

    def _abort_owned(self, owner: object) -> None:
        for record in self._desk.owned(owner):
            self.abort(record.rid)

    # -- a step ---------------------------------------------------------------------------------------------

    def _advance(self) -> None:
        """One step of the scheduler, carried out."""
        self._sweep()
        # A Ctrl-C waits for the end of the step, so that its books are whole; a second one ends the forward.
        held = InterruptsHeld()
        with held:
            step = self._next_step()
            if step is None:
                if self._desk.streams:
                    raise RuntimeError(
                        f"nothing can be scheduled, and {self!r} is not done: please report this"
                    )
                return
            self._door.in_step = True
            try:
                self._carry_out(step, held)
            finally:
                self._door.in_step = False
        self._rest()

    def _next_step(self) -> Step | None:
        """What the scheduler wants done, for the model as it is now."""
        while True:
            self._notice_changes()
            with self._cache.lock:
                step = self._scheduler.schedule()
                pool = self._cache.pool
                self._peak_used_blocks = max(self._peak_used_blocks, pool.num_held - pool.num_idle)
            # Asked so late that a GPU has compared the weights meanwhile.
            if not self._plug.overtaken():
                return step
            if step is not None:
                self._take_back(step)

    def _notice_changes(self) -> None:
        """If weights or adapters changed, nothing computed before may be mixed with what comes."""
        self._plug.require_servable(self._given_model)
        now = self._plug.circumstances(ahead=True)
        if now == self._circumstances:
            return

        def key_of(request: SchedRequest) -> bytes:
            record = self._desk.records[request.rid]
            key = self._plug.key_under(now, record.namespace, len(request.tokens))
            record.claim = self._cache.register_key(record.namespace, key)
            return key

        if self._plug.attention() != self._attention:
            self._read_model()
        with self._cache.lock:
            self._scheduler.restart(key_of)
        self._circumstances = now

    def _carry_out(self, step: Step, held: InterruptsHeld) -> None:
        began = time.perf_counter()
        streams = self._desk.streams
        self._tell_runner()
        try:
            drawn = self._executor.run(step, streams, held.insisting())
        except BaseException:
            self._take_back(step)
            raise
        seconds = time.perf_counter() - began
        with self._cache.lock:
            broken = self._drop_failed(step, drawn.failed)
            before = self._paused_tokens()
            done = self._scheduler.complete(step, drawn.tokens, drawn.finished)
            resumed, recomputed = (
                now - then for now, then in zip(self._paused_tokens(), before, strict=True)
            )
        if resumed or recomputed:
            self._cache.recorder.add(resumed_tokens=resumed, recomputed_tokens=recomputed)
        self._num_steps += step.num_tokens > 0
        self._count_prefill(step, seconds)
        self._desk.hand_out(step, drawn, set(done.ignored))
        self._end_without_room(step)
        for sequence in broken:
            if sequence in streams:
                self._desk.end(streams[sequence])

    def _tell_runner(self) -> None:
        (_, _, patches), _ = self._circumstances
        self._runner.under(self._circumstances, patched=patches != 0)

    def _take_back(self, step: Step) -> None:
        """The step is not carried out. What ended when it was made has ended."""
        with self._cache.lock:
            self._scheduler.fail(step)
        self._end_without_room(step)

    def _end_without_room(self, step: Step) -> None:
        streams, pool = self._desk.streams, self._cache.pool
        for sequence in step.finished:
            if sequence in streams:
                needed = -(-sequence.num_tokens // self._cache.block_size)
                streams[sequence].error = OutOfBlocksError(needed, pool.num_free, pool.num_idle)
                self._desk.end(streams[sequence])

    def _paused_tokens(self) -> tuple[int, int]:
        """Tokens that paused sequences have found again, and computed again."""
        return self._scheduler.num_resumed_tokens, self._scheduler.num_recomputed_tokens

    def _drop_failed(self, step: Step, failed: dict[int, Exception]) -> list[Sequence]:
        """End the sequences whose forward raised; what they wrote is not published."""
        broken = []
        for entry, error in failed.items():
            for sequence in step.sequences_of(entry):
                if sequence in self._desk.streams:
                    self._desk.streams[sequence].error = error
                    self._scheduler.drop(sequence, "error")
                    broken.append(sequence)
        return broken

    def _count_prefill(self, step: Step, seconds: float) -> None:
        """What a prompt token costs, from steps that computed little else: a decoded one costs far more.

        Elsewhere than on a CPU the time of a step is not known without waiting for the device.
        """
        computed = step.num_tokens - step.num_decodes
        if self._cache.layout.device.type == "cpu" and computed > 8 * step.num_decodes:
            self._cache.recorder.record_prefill(computed, seconds)


class _Call:
    """Aborts what a `generate` call has added, however it ends."""

    def __init__(
        self, owner: object, abort: Callable[[object], None], abandon: Callable[[object], None]
    ) -> None:
        self._owner, self._abort, self._abandon = owner, abort, abandon
        self._ended = False

    def __enter__(self) -> None:
        """Nothing to do."""

    def __exit__(self, *_: object) -> None:
        with InterruptsHeld():
            self._abort(self._owner)
            self._ended = True

    def __del__(self) -> None:
        if not self._ended:  # Ctrl-C ended `__exit__` before its first line
            self._abandon(self._owner)


def _swap_cost(model: torch.nn.Module) -> float:
    """See `SchedulerConfig.swap_cost`; measured on CPUs, where moving KV is a copy within memory."""
    return 0.02 if next(model.parameters()).device.type == "cpu" else SchedulerConfig.swap_cost
