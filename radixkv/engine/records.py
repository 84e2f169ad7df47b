"""What an engine remembers of a request beside the scheduler's books."""

from __future__ import annotations

import time
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from radixkv.core.namespace import Namespace
from radixkv.engine.completion import Completion
from radixkv.engine.detokenize import TextStream, decode

if TYPE_CHECKING:
    from radixkv.engine.sampler import SequenceSampler, TokenLogprobs
    from radixkv.engine.sampling_params import SamplingParams
    from radixkv.sched import Request, Sequence

__all__ = ["Record", "Stream"]


@dataclass(eq=False)
class Stream:
    """One sequence on its way to a completion.

    Attributes:
        record: The request.
        sequence: The scheduler's side of it.
        sampler: State of its sampling.
        text: Gives out text piece by piece; None if nobody reads it before the end.
        first_token: `time.perf_counter()` of the first new token, or None.
        completion: Once it is finished.
        error: Why it ended, if that was an error.
    """

    record: Record
    sequence: Sequence
    sampler: SequenceSampler
    text: TextStream | None
    first_token: float | None = None
    logprobs: list[TokenLogprobs] | None = None
    completion: Completion | None = None
    error: Exception | None = None
    given: int = 0  # characters of text given out
    num_tokens: int = 0  # tokens taken

    def take(self, token: int, logprobs: TokenLogprobs | None) -> str | None:
        """Note a new token; returns the text that is certain now, None if nobody wants it."""
        self.num_tokens += 1
        if self.first_token is None:
            self.first_token = time.perf_counter()
        if logprobs is not None:
            if self.logprobs is None:
                self.logprobs = []
            self.logprobs.append(logprobs)
        if self.text is None:
            return None
        piece = self.text.add(token)
        self.given += len(piece)
        return piece

    def finish(self, tokenizer: Any) -> Completion:
        """Make the completion of a finished sequence."""
        record, sequence = self.record, self.sequence
        # A token that was sampled in vain, where that failed, is none.
        tokens = sequence.output_tokens[: self.num_tokens].tolist()
        text = None
        if tokenizer is not None:
            try:
                text = self.sampler.cut(decode(tokenizer, tokens))
            except Exception as error:
                self.error = self.error or error
        reason = sequence.finish_reason or "abort"
        self.completion = Completion(
            rid=record.rid,
            index=sequence.index,
            token_ids=tokens,
            text=text,
            finish_reason="error" if self.error is not None and reason != "capacity" else reason,
            num_prompt_tokens=sequence.num_prompt_tokens,
            num_cached_tokens=record.request.num_cached_tokens,
            ttft_s=None if self.first_token is None else self.first_token - record.began,
            latency_s=time.perf_counter() - record.began,
            prompt_index=record.prompt_index,
            logprobs=self.logprobs,
            error=self.error,
        )
        return self.completion


@dataclass(eq=False)
class Record:
    """One request.

    Attributes:
        rid: Its name.
        request: The scheduler's side of it.
        sampling: As given.
        namespace: As given by the user.
        owner: Who reads its outputs: `None` for `step()`, else a token of a `generate` or `stream` call.
        began: `time.perf_counter()` when it was added.
        prompt_index: Place among the prompts of a `generate` call; None elsewhere.
        streams: Its sequences.
        counted: Whether its prompt is in the statistics of the cache.
        claim: Keeps the cache in mind of whose the keys of its blocks are.
    """

    rid: Hashable
    request: Request
    sampling: SamplingParams
    namespace: Namespace
    owner: object | None
    began: float
    prompt_index: int | None = None
    streams: list[Stream] = field(default_factory=list)
    counted: bool = False
    claim: object = None

    @property
    def finished(self) -> bool:
        """Whether all its sequences are."""
        return all(stream.completion is not None for stream in self.streams)
