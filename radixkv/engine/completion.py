"""What an engine gives back."""

from __future__ import annotations

import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from radixkv.core.warn import warn_user

if TYPE_CHECKING:
    from radixkv.engine.sampler import TokenLogprobs

__all__ = ["FINISH_REASONS", "Completion", "TokenOutput", "refused", "warn_of_errors"]

FINISH_REASONS = ("stop", "length", "capacity", "abort", "error")


@dataclass(frozen=True)
class Completion:
    """One finished (or refused) completion of a prompt.

    Attributes:
        rid: The request it belongs to.
        index: Which of the `n` completions of that prompt.
        token_ids: The new tokens; an end-of-sequence or stop token is the last of them.
        text: Their text, special tokens left out and cut before a stop string; None without a tokenizer, or
            if the tokenizer could not make it.
        finish_reason: `stop` (end of sequence, stop token or string, or a stopping criterion), `length`
            (`max_new_tokens`, or the longest sequence the engine takes), `capacity` (the pool has no room for one
            more token of this sequence though no other one runs: it is too small, or pins and other users of the
            cache hold its blocks), `abort`, or `error`.
        num_prompt_tokens: Tokens of the prompt.
        num_cached_tokens: Of these, tokens whose prefill was skipped because their KV was cached when the
            request was first admitted. What a preempted request finds of itself does not count.
        ttft_s: Seconds from adding the request to its first new token; None if there was none.
        latency_s: Seconds from adding the request to its end.
        prompt_index: Which of the prompts of a `generate` call; None for requests added one by one.
        logprobs: One entry a new token, if they were asked for.
        error: What went wrong, with reason `error`, or what was missing, with reason `capacity`; else None. The
            frames of its traceback are cleared, so that it keeps no tensors alive.
    """

    rid: Hashable
    index: int
    token_ids: list[int]
    text: str | None
    finish_reason: str
    num_prompt_tokens: int
    num_cached_tokens: int
    ttft_s: float | None
    latency_s: float
    prompt_index: int | None = None
    logprobs: list[TokenLogprobs] | None = None
    error: Exception | None = None


@dataclass(frozen=True)
class TokenOutput:
    """What one step brought for one sequence.

    Attributes:
        rid: The request.
        index: Which of its `n` sequences.
        token_id: The new token, or None if the sequence ended without one (`abort`, `capacity`, `error`).
        text: What the tokens so far add to the text that was given out before; it lags behind while a character is
            incomplete or a stop string may be under way; perhaps empty. None without a tokenizer.
        completion: The whole, with the last token; else None.
    """

    rid: Hashable
    index: int
    token_id: int | None
    text: str | None
    completion: Completion | None = None

    @property
    def finished(self) -> bool:
        """Whether this is the last output of its sequence."""
        return self.completion is not None


def refused(
    error: Exception, prompt_index: int, index: int, num_prompt_tokens: int, began: float
) -> Completion:
    """The completion of a prompt that was not taken on; `began` is its `time.perf_counter()`."""
    spent = time.perf_counter() - began
    return Completion(
        None, index, [], None, "error", num_prompt_tokens, 0, None, spent, prompt_index, None, error
    )


def warn_of_errors(done: Sequence[Completion]) -> None:
    """Say once, pointing at the user's line, that some completions failed."""
    failed = [i for i, completion in enumerate(done) if completion.error is not None]
    if failed:
        first = done[failed[0]].error
        warn_user(
            f"{len(failed)} of {len(done)} completions failed (see their .error); the first, number {failed[0]}: "
            f"{type(first).__name__}: {first}",
        )
