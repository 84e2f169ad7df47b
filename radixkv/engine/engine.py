"""`Engine`: many requests at once over one model, sharing what they have in common."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Hashable
from types import TracebackType
from typing import Any

from radixkv.attention import AttentionBackend
from radixkv.cache.locking import InterruptsHeld
from radixkv.cache.prefix_cache import PrefixCache
from radixkv.core.errors import InvalidRequestError, RadixKVError
from radixkv.core.namespace import Namespace, canonical_namespace
from radixkv.engine.completion import Completion, TokenOutput, refused, warn_of_errors
from radixkv.engine.detokenize import TextStream
from radixkv.engine.drivers import Door, claim
from radixkv.engine.executing import Drawn, Executor
from radixkv.engine.inputs import as_prompts, longest_sequence, one_sampling, prompt_ids, sampling_for
from radixkv.engine.output_stream import OutputStream
from radixkv.engine.progress import Progress
from radixkv.engine.records import Record, Stream
from radixkv.engine.runner import ModelRunner
from radixkv.engine.sampler import Sampler
from radixkv.engine.sampling_params import SamplingParams
from radixkv.engine.stats import EngineStats
from radixkv.hf.support import unwrap_model
from radixkv.observe.stats import RequestStats
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
        memory: in bytes, as text (`"2GiB"`), or as a share of the device's free memory.
        policy: Its eviction policy.
        preemption: How a running sequence gives its blocks back when there is no room: `"recompute"` them later,
            `"swap"` them to host memory, or `"auto"`: what is estimated to cost less.
        host_memory: Room for swapped blocks: bytes, text, or a share of free host memory; 0 for none.
        order: Of waiting requests: `"fcfs"` (first come, first served) or `"prefix"` (longest cached prefix first).
        max_overtakes: With `"prefix"`: by how many later requests one may be passed, at most.
        watermark: Share of the pool that is kept free when a request is admitted beside others.

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
        max_overtakes: int = 64,
        watermark: float = 0.01,
    ) -> None:
        sizes = {
            "block_size": block_size,
            "num_blocks": num_blocks,
            "num_tokens": num_tokens,
            "memory": memory,
            "policy": policy,
        }
        given: dict[str, Any] = {name: value for name, value in sizes.items() if value is not None}
        if cache is None:
            cache = PrefixCache.for_model(model, **given)
        elif given:
            raise InvalidRequestError(
                f"{', '.join(given)}: the cache that was given has its own; leave these out or leave cache out"
            )
        self._cache = cache
        self._plug = cache.plug
        self._plug.require_servable(model)
        self._given_model = model
        self._model = unwrap_model(model)
        self._tokenizer = tokenizer
        self._longest = longest_sequence(self._model, self._plug, max_seq_len)
        self._tier: HostTier | None = None
        if preemption == "swap" and not host_memory:
            raise InvalidRequestError(
                'preemption="swap" needs room: give host_memory, such as host_memory="1GiB"'
            )
        if host_memory:
            self._tier = HostTier(cache.store, host_memory)
        config = SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_batched_tokens=max_batched_tokens,
            max_seq_len=self._longest,
            preemption=preemption,
            order=order,
            max_overtakes=max_overtakes,
            watermark=watermark,
        )
        self._scheduler = Scheduler(cache.tree, config, None if self._tier is None else self._tier.pool)
        self._runner = ModelRunner(model, cache.store, attention)
        self._sampler = Sampler(self._model, tokenizer)
        self._executor = Executor(cache.store, self._tier, self._runner, self._sampler)
        self._circumstances: Any = None
        self._door = Door()
        self._records: dict[Hashable, Record] = {}
        self._streams: dict[Any, Stream] = {}
        self._ready: list[TokenOutput] = []
        self._orphans: deque[object] = deque()
        self._names = itertools.count()
        self._num_finished = self._num_generated = self._num_steps = 0

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
    def has_unfinished(self) -> bool:
        """Whether any request is not finished."""
        return bool(self._streams)

    @property
    def stats(self) -> EngineStats:
        """A snapshot of its counters."""
        s, tier = self._scheduler.stats, self._tier
        return EngineStats(
            running=self._scheduler.num_running,
            waiting=self._scheduler.num_waiting,
            swapped=self._scheduler.num_swapped,
            finished=self._num_finished,
            steps=self._num_steps,
            prompt_tokens=s.prompt_tokens,
            hit_tokens=s.hit_tokens,
            generated_tokens=self._num_generated,
            preemptions=s.preemptions,
            preemptions_recompute=s.preemptions_recompute,
            preemptions_swap=s.preemptions_swap,
            swapped_out_blocks=s.swapped_out_blocks,
            swapped_in_blocks=s.swapped_in_blocks,
            swapped_out_bytes=0 if tier is None else tier.num_bytes_out,
            swapped_in_bytes=0 if tier is None else tier.num_bytes_in,
            recomputed_tokens=s.recomputed_tokens,
            cow_copies=s.cow_copies,
            block_utilisation=s.block_utilisation,
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
        self, prompts: Any, sampling: Any = None, *, namespace: Namespace = None, progress: bool = False
    ) -> list[Completion]:
        """Complete all prompts.

        Args:
            prompts: A list of texts, of token id rows or of chats (lists of messages), a `[rows, tokens]` tensor, what
                a tokenizer returns (left or right padding is taken off), or a single one of these.
            sampling: `SamplingParams` for all, or a list with one for each prompt; None is greedy.
            namespace: What must be equal, beside the tokens, for KV to be shared.
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
        owner = object()
        results: list[list[Stream] | Completion] = []
        with self._door.enter():
            self._wake()
            try:
                for item, wanted in zip(items, params, strict=True):
                    began = time.perf_counter()
                    try:
                        record = self._add(item, wanted, namespace, None, owner)
                    except RadixKVError as error:
                        results += [refused(error, i, began) for i in range(wanted.n)]
                    else:
                        results.append(list(record.streams))
                self._run(owner, sum(p.n for p in params), progress)
            finally:
                self._abort_owned(owner)
        done: list[Completion] = []
        for entry in results:
            if isinstance(entry, Completion):
                done.append(entry)
            else:
                done += [stream.completion for stream in entry if stream.completion is not None]
        warn_of_errors(done)
        return done

    def _run(self, owner: object, total: int, progress: bool) -> None:
        mine = [s for record in self._records.values() if record.owner is owner for s in record.streams]
        with Progress(total, progress) as bar:
            finished = total - len(mine)
            want_stats = bar.update(finished, 0)
            while mine:
                before = self._num_generated
                self._advance()
                left = [stream for stream in mine if stream.completion is None]
                finished += len(mine) - len(left)
                mine = left
                new = self._num_generated - before
                want_stats = bar.update(finished, new, self.stats if want_stats else None)

    # -- one step at a time ---------------------------------------------------------------------------------

    def add_request(
        self,
        prompt: Any,
        sampling: SamplingParams | None = None,
        *,
        namespace: Namespace = None,
        rid: Hashable | None = None,
    ) -> Hashable:
        """Queue a prompt; `step()` will bring its tokens.

        Args:
            prompt: Text, token ids, or a chat.
            sampling: How to complete it; None is greedy.
            namespace: What must be equal, beside the tokens, for KV to be shared.
            rid: A name of your own; it must not be in use. None makes one.

        Returns:
            The name of the request.

        Raises:
            InvalidRequestError: The prompt cannot be served; the message says why. Nothing was changed.
        """
        wanted = one_sampling(sampling)
        with self._door.enter():
            self._wake()
            return self._add(prompt, wanted, namespace, rid, None).rid

    def step(self) -> list[TokenOutput]:
        """One forward: what every running sequence needs next.

        Returns:
            One entry for each new token of the requests that were added with `add_request`, and one for each that
            ended without a token. Empty if there is nothing to do.

        Raises:
            InvalidRequestError: The model changed into one that cannot be served; or another thread is at work.
        """
        with self._door.enter():
            if self._streams:
                self._advance()
            ready, self._ready = self._ready, []
            return ready

    def abort(self, rid: Hashable) -> bool:
        """End a request at any moment; all its blocks are given back at once.

        Its sequences end with `finish_reason="abort"`, which the next `step()` reports.

        Returns:
            Whether it was there; False if it is unknown or finished already.
        """
        with self._door.enter(reentrant=True):
            record = self._records.get(rid)
            if record is None:
                return False
            with self._cache.lock:
                self._scheduler.abort(rid)
            self._settle(record)
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
            record = self._records.get(rid)
            parent = (
                None
                if record is None
                else next((s for s in record.streams if s.sequence.index == index), None)
            )
            if record is None or parent is None or parent.completion is not None:
                raise InvalidRequestError(
                    f"request {rid!r} has no unfinished sequence {index}: nothing to fork"
                )
            with self._cache.lock:
                sequence = self._scheduler.fork(parent.sequence)
            stream = Stream(record, sequence, self._sampler.fork(parent.sampler), None, parent.first_token)
            stream.num_tokens = parent.num_tokens
            if parent.logprobs is not None:
                stream.logprobs = list(parent.logprobs)
            if self._tokenizer is not None and record.owner is None:
                stream.text = TextStream(self._tokenizer, stream.sampler.stop)
                for token in sequence.output_tokens.tolist():
                    stream.given += len(stream.text.add(token))
            record.streams.append(stream)
            self._streams[sequence] = stream
            return int(sequence.index)

    def stream(
        self, prompt: Any, sampling: SamplingParams | None = None, *, namespace: Namespace = None
    ) -> OutputStream:
        """Complete one prompt token by token, while other requests go on.

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
                self._add(prompt, wanted, namespace, None, stream.inbox, live=True)
        except BaseException:
            stream.close()
            raise
        return stream

    def _advance_for(self, owner: object) -> bool:
        with self._door.enter():
            unfinished = any(record.owner is owner for record in self._records.values())
            if unfinished:
                self._advance()
            return unfinished

    def _leave(self, owner: object) -> None:
        with self._door.enter():
            self._abort_owned(owner)

    def close(self) -> None:
        """Abort everything; what is cached stays in the cache. The engine can be used again."""
        with self._door.enter():
            for rid in list(self._records):
                self.abort(rid)
            self._ready.clear()
            self._plug.rest()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- requests in and out --------------------------------------------------------------------------------

    def _wake(self) -> None:
        """Before requests are added: the model must be servable, and no other engine at work on it."""
        claim(self._model, self)
        if not self._streams:
            self._plug.require_servable(self._given_model)
            self._circumstances = self._plug.circumstances()

    def _add(
        self,
        prompt: Any,
        sampling: SamplingParams,
        namespace: Namespace,
        rid: Hashable | None,
        owner: object | None,
        live: bool = False,
    ) -> Record:
        began = time.perf_counter()
        canonical_namespace(namespace)
        tokens = prompt_ids(prompt, self._tokenizer, self._plug.vocab_size)
        if len(tokens) >= self._longest:
            raise InvalidRequestError(
                f"the prompt has {len(tokens)} tokens, and a sequence may have {self._longest}, one new token at least "
                "among them: shorten it, or raise max_seq_len if the model allows it"
            )
        if rid is None:
            rid = next(name for name in self._names if name not in self._records)
        elif rid in self._records:
            raise InvalidRequestError(f"a request named {rid!r} is not finished yet: choose another rid")
        samplers = [self._sampler.start(sampling, tokens, i) for i in range(sampling.n)]
        key = self._plug.key_under(self._circumstances, namespace, len(tokens))
        with InterruptsHeld(), self._cache.lock:
            request = self._scheduler.add(
                tokens,
                max_new_tokens=min(sampling.max_new_tokens, self._longest - len(tokens)),
                namespace=key,
                n=sampling.n,
                rid=rid,
            )
            self._cache.register_key(namespace, key)
            record = Record(rid, request, sampling, namespace, owner, began)
            for sequence, sampler in zip(request.sequences, samplers, strict=True):
                text = None
                if self._tokenizer is not None and (live or owner is None):
                    text = TextStream(self._tokenizer, sampler.stop)
                stream = Stream(record, sequence, sampler, text)
                record.streams.append(stream)
                self._streams[sequence] = stream
            self._records[rid] = record
        return record

    def _settle(self, record: Record) -> None:
        """Make completions of what the scheduler has ended."""
        for stream in record.streams:
            if stream.completion is None and stream.sequence.finish_reason is not None:
                self._end(stream, None, None)

    def _end(self, stream: Stream, token: int | None, text: str | None) -> None:
        completion = stream.finish(self._tokenizer)
        del self._streams[stream.sequence]
        self._num_finished += 1
        record = stream.record
        if stream.text is not None and completion.text is not None:  # what was held back is certain now
            text = (
                (text or "") + completion.text[stream.given :]
                if stream.given < len(completion.text)
                else text
            )
        self._give(record, TokenOutput(record.rid, completion.index, token, text, completion))
        if record.finished:
            del self._records[record.rid]
        if not self._streams:
            self._plug.rest()

    def _give(self, record: Record, output: TokenOutput) -> None:
        if record.owner is None:
            self._ready.append(output)
        elif isinstance(record.owner, deque):
            record.owner.append(output)

    def _abort_owned(self, owner: object) -> None:
        for record in [r for r in self._records.values() if r.owner is owner]:
            self.abort(record.rid)

    # -- a step ---------------------------------------------------------------------------------------------

    def _advance(self) -> None:
        """One step of the scheduler, carried out."""
        while self._orphans:
            self._abort_owned(self._orphans.popleft())
        # A Ctrl-C waits for the end of the step, so that its books are whole; a second one does not wait.
        with InterruptsHeld(insist=True):
            self._notice_changes()
            with self._cache.lock:
                step = self._scheduler.schedule()
            if step is None:
                if self._streams:
                    raise RuntimeError(
                        f"nothing can be scheduled, and {self!r} is not done: please report this"
                    )
                return
            self._door.in_step = True
            try:
                self._carry_out(step)
            finally:
                self._door.in_step = False

    def _notice_changes(self) -> None:
        """If weights or adapters changed, nothing computed before may be mixed with what comes."""
        self._plug.require_servable(self._given_model)
        now = self._plug.circumstances()
        if now == self._circumstances:
            return
        self._circumstances = now

        def key_of(request: SchedRequest) -> bytes:
            record = self._records[request.rid]
            key = self._plug.key_under(now, record.namespace, len(request.tokens))
            self._cache.register_key(record.namespace, key)
            return key

        with self._cache.lock:
            self._scheduler.restart(key_of)

    def _carry_out(self, step: Step) -> None:
        began = time.perf_counter()
        try:
            drawn = self._executor.run(step, self._streams)
        except BaseException:
            with self._cache.lock:
                self._scheduler.fail(step)
            raise
        seconds = time.perf_counter() - began
        with self._cache.lock:
            broken = self._drop_failed(step, drawn.failed)
            done = self._scheduler.complete(step, drawn.tokens, drawn.finished)
        self._num_steps += step.num_tokens > 0
        self._count_prefill(step, seconds)
        self._hand_out(step, drawn, set(done.ignored))
        for sequence in (*step.finished, *broken):
            if sequence in self._streams:
                self._end(self._streams[sequence], None, None)

    def _hand_out(self, step: Step, drawn: Drawn, ignored: set[int]) -> None:
        """Give new tokens to whoever reads them."""
        for i, sequence in enumerate(step.sampling_seqs):
            stream = self._streams.get(sequence)
            if stream is None or i in ignored:
                continue
            if not stream.record.counted:
                self._count_request(stream.record)
            if i in drawn.errors:
                stream.error = drawn.errors[i]
                self._end(stream, None, None)
                continue
            self._num_generated += 1
            token = int(drawn.tokens[i])
            text = stream.take(token, drawn.logprobs[i])
            if sequence.finish_reason is not None:
                self._end(stream, token, text)
            else:
                self._give(stream.record, TokenOutput(stream.record.rid, sequence.index, token, text))

    def _drop_failed(self, step: Step, failed: dict[int, Exception]) -> list[Sequence]:
        """End the sequences whose forward raised; what they wrote is not published."""
        broken = []
        for entry, error in failed.items():
            for sequence in step.sequences_of(entry):
                if sequence in self._streams:
                    self._streams[sequence].error = error
                    self._scheduler.drop(sequence, "error")
                    broken.append(sequence)
        return broken

    def _count_request(self, record: Record) -> None:
        record.counted = True
        prompt, hit = len(record.request.tokens), record.request.num_cached_tokens
        self._cache.recorder.record_requests([RequestStats(prompt, hit, prompt - hit)])

    def _count_prefill(self, step: Step, seconds: float) -> None:
        """What a prompt token costs, from steps that computed little else."""
        computed = step.num_tokens - step.num_decodes
        if self._cache.layout.device.type == "cpu" and computed > 8 * step.num_decodes:
            self._cache.recorder.record_prefill(computed, seconds)
