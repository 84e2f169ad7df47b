"""Who asked for what, and handing out what the steps bring."""

from __future__ import annotations

import traceback
from collections import Counter, deque
from collections.abc import Hashable
from dataclasses import replace
from typing import Any

from radixkv.engine.completion import Completion, TokenOutput
from radixkv.engine.detokenize import TextStream
from radixkv.engine.executing import Drawn
from radixkv.engine.records import Record, Stream
from radixkv.engine.sampler import SequenceSampler
from radixkv.observe.histogram import SECONDS, Histogram
from radixkv.observe.stats import RequestStats, StatsRecorder
from radixkv.sched import Scheduler, Sequence, Step

__all__ = ["Desk"]


class Desk:
    """The requests of an engine that are not finished, and the outputs that nobody has read yet.

    Nothing here may raise once a step is complete: what a tokenizer does wrong ends its own sequence only.

    Args:
        tokenizer: For text, or None.
        scheduler: Told to end a sequence whose text cannot be made.
        recorder: Counts a prompt when its first token has come.

    Attributes:
        records: By name.
        streams: Sequences that are not finished.
        ready: Outputs for `Engine.step`.
        num_finished: Completions so far.
        num_generated: Tokens so far.
        finished_by_reason: Completions so far.
        ttft: Seconds to the first token of each request.
        latency: Seconds to the end of each completion.
    """

    def __init__(self, tokenizer: Any, scheduler: Scheduler, recorder: StatsRecorder) -> None:
        self._tokenizer = tokenizer
        self._scheduler = scheduler
        self._recorder = recorder
        self.records: dict[Hashable, Record] = {}
        self.streams: dict[Sequence, Stream] = {}
        self.ready: list[TokenOutput] = []
        self.num_finished = self.num_generated = 0
        self.finished_by_reason: Counter[str] = Counter()
        self.ttft, self.latency = Histogram(SECONDS), Histogram(SECONDS)

    def add(self, record: Record) -> None:
        """A new request, with its streams."""
        for stream in record.streams:
            self.streams[stream.sequence] = stream
        self.records[record.rid] = record

    def new_stream(self, record: Record, sequence: Sequence, sampler: SequenceSampler) -> Stream:
        """A stream of a new request; its text is made piece by piece if somebody reads it that way."""
        text = None
        if self._tokenizer is not None and (record.owner is None or isinstance(record.owner, deque)):
            text = TextStream(self._tokenizer, sampler.stop, sampler.params.min_new_tokens or 0)
        return Stream(record, sequence, sampler, text)

    def add_fork(self, parent: Stream, sequence: Sequence, sampler: SequenceSampler) -> None:
        """A stream that goes on from where `parent` is."""
        stream = self.new_stream(parent.record, sequence, sampler)
        stream.first_token, stream.num_tokens = parent.first_token, parent.num_tokens
        stream.logprobs = None if parent.logprobs is None else list(parent.logprobs)
        if stream.text is not None:
            try:  # its reader has what the parent gave out so far
                stream.given = sum(len(stream.text.add(token)) for token in sequence.output_tokens.tolist())
            except Exception:  # of the tokenizer; its text will be made at the end, or that fails too
                stream.text = None
        parent.record.streams.append(stream)
        self.streams[sequence] = stream

    def owned(self, owner: object) -> list[Record]:
        """The unfinished requests whose outputs go to `owner`."""
        return [record for record in self.records.values() if record.owner is owner]

    def hand_out(self, step: Step, drawn: Drawn, ignored: set[int]) -> None:
        """Give the tokens of a complete step to whoever reads them."""
        for i, sequence in enumerate(step.sampling_seqs):
            stream = self.streams.get(sequence)
            if stream is None or i in ignored:
                continue
            record = stream.record
            is_first = not record.counted
            if is_first:
                record.counted = True
                prompt, hit = len(record.request.tokens), record.request.num_cached_tokens
                made = RequestStats.of(prompt, hit, record.request.note, rid=record.rid)
                self._recorder.record_requests([made])
            if i in drawn.errors:
                stream.error = drawn.errors[i]
                self.end(stream)
                continue
            self.num_generated += 1
            token = int(drawn.tokens[i])
            try:
                text = stream.take(token, drawn.logprobs[i])
            except Exception as error:
                text, stream.text, stream.error = None, None, error
                if sequence.finish_reason is None:
                    self._scheduler.finish(sequence, "error")
            if is_first and stream.first_token is not None:
                self.ttft.add(stream.first_token - record.began)
            if sequence.finish_reason is not None:
                self.end(stream, token, text)
            else:
                self._give(record, TokenOutput(record.rid, sequence.index, token, text))

    def settle(self, record: Record) -> None:
        """Make completions of the sequences that the scheduler has ended."""
        for stream in record.streams:
            if stream.completion is None and stream.sequence.finish_reason is not None:
                self.end(stream)

    def end(self, stream: Stream, token: int | None = None, text: str | None = None) -> None:
        """Make the completion of a finished sequence; `token` and `text` are what the last step brought of it."""
        self.streams.pop(stream.sequence, None)
        record = stream.record
        completion = stream.finish(self._tokenizer)
        _let_go_of_frames(completion)
        self.num_finished += 1
        self.finished_by_reason[completion.finish_reason] += 1
        if completion.finish_reason not in ("abort", "error"):
            self.latency.add(completion.latency_s)
        if stream.text is not None and completion.text is not None:
            rest = completion.text[stream.given :]  # what was held back is certain now
            text = (text or "") + rest if rest else text
        self._give(record, TokenOutput(record.rid, completion.index, token, text, completion))
        if record.finished:
            self.records.pop(record.rid, None)

    def _give(self, record: Record, output: TokenOutput) -> None:
        if output.text is None and self._tokenizer is not None:
            output = replace(output, text="")  # so that whoever adds pieces up need not look
        if record.owner is None:
            self.ready.append(output)
        elif isinstance(record.owner, deque):
            record.owner.append(output)


def _let_go_of_frames(completion: Completion) -> None:
    """An error that is kept must not keep the activations alive that were local where it was raised."""
    error: BaseException | None = completion.error
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
