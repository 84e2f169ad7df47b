"""Runs each prompt twice, without and with the cache, and compares.

Both runs of a prompt follow each other in one process, and which goes first alternates, so that a machine that
grows slower or faster hits both alike. Plain runs see no hook of the cache at all.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import TYPE_CHECKING, Any

from radixkv.demo.workloads import Prompt, Workload

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

#: Called before each request with the workload and the label of the prompt, and with None at the end of a workload.
OnRequest = Callable[[Workload, "str | None"], None]


@dataclass(frozen=True)
class Run:
    """One call of `generate`.

    Attributes:
        tokens: The new tokens.
        ttft_s: Seconds from the call to the first new token.
        total_s: Seconds of the whole call; with the cache until what it computed is stored.
    """

    tokens: list[int]
    ttft_s: float
    total_s: float


@dataclass(frozen=True)
class RequestResult:
    """One prompt, without and with the cache."""

    label: str
    prompt_tokens: int
    hit_tokens: int
    without: Run
    with_cache: Run
    answer: str

    @property
    def skipped(self) -> float:
        """Share of the prompt whose prefill was skipped, 0 to 1."""
        return self.hit_tokens / self.prompt_tokens

    @property
    def speedup(self) -> float:
        """Time to first token without the cache over that with it."""
        return self.without.ttft_s / self.with_cache.ttft_s

    @property
    def first_difference(self) -> int | None:
        """Index of the first new token that differs, None when the outputs are the same."""
        ours, theirs = self.with_cache.tokens, self.without.tokens
        if ours == theirs:
            return None
        shorter = min(len(ours), len(theirs))
        return next((i for i in range(shorter) if ours[i] != theirs[i]), shorter)

    @property
    def same_tokens(self) -> bool:
        """The same new tokens, all of them."""
        return self.first_difference is None


@dataclass(frozen=True)
class WorkloadResult:
    """The requests of one workload, in the order in which they ran."""

    name: str
    title: str
    requests: list[RequestResult]


@dataclass(frozen=True)
class DemoResult:
    """All that was measured.

    Attributes:
        workloads: Each prompt, without and with the cache.
        seconds_with: Where the time of all runs with the cache went, by part.
        seconds_without: The same for plain runs.
        cache: Sizes and counters of the cache at the end.
    """

    workloads: list[WorkloadResult]
    seconds_with: dict[str, float] = field(default_factory=dict)
    seconds_without: dict[str, float] = field(default_factory=dict)
    cache: dict[str, Any] = field(default_factory=dict)

    @property
    def requests(self) -> list[RequestResult]:
        """The requests of all workloads."""
        return [request for workload in self.workloads for request in workload.requests]

    @property
    def same_tokens(self) -> bool:
        """No request's output differs."""
        return all(request.same_tokens for request in self.requests)


class TokenClock:
    """A streamer that notes when each new token exists. `generate` hands it the prompt first."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self._seen_prompt = False

    def put(self, value: Any) -> None:
        """The prompt, then each new token."""
        if self._seen_prompt:
            self.times.append(time.perf_counter())
        self._seen_prompt = True

    def end(self) -> None:
        """The last token was put."""


class Runner:
    """Measures prompts on one model and one cache.

    Args:
        model: Any decoder that the cache supports.
        tokenizer: Its tokenizer.
        cache: A `radixkv.PrefixCache` made for the model.
        max_new_tokens: Limit of each answer; a prompt may ask for fewer.
        end_ids: Tokens that end an answer, beside the model's own.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        cache: Any,
        max_new_tokens: int,
        end_ids: Iterable[int] = (),
    ) -> None:
        self.model, self.tokenizer, self.cache = model, tokenizer, cache
        self.max_new_tokens = max_new_tokens
        configured = model.generation_config.eos_token_id
        own = [] if configured is None else configured if isinstance(configured, list) else [configured]
        self.end_ids = sorted({*own, *end_ids})
        self._num_requests = 0
        self._rest = _Seconds()

    def warm_up(self) -> None:
        """The first calls of a process are slow for reasons of their own: buffers, lazy imports."""
        ids = self.encode(Prompt("warm-up", "Good morning."))
        for _ in range(2):
            self.generate(ids, 2)
        with self.cache.attached(self.model, namespace="warm-up"):
            self.generate(ids, 2)
        self.cache.clear()
        self.cache.reset_stats()

    def run(
        self, workloads: Sequence[Workload], on_request: OnRequest = lambda workload, label: None
    ) -> DemoResult:
        """Run all workloads, one after the other, on the one cache."""
        results = []
        for workload in workloads:
            results.append(self._run_workload(workload, on_request))
            on_request(workload, None)
        stats = self.cache.stats
        return DemoResult(
            results,
            seconds_with=self._rest.split(stats),
            seconds_without={"prefill": self._rest.plain_ttft, "decode": self._rest.plain_decode},
            cache=describe_cache(self.cache, stats),
        )

    def _run_workload(self, workload: Workload, on_request: OnRequest) -> WorkloadResult:
        results = []
        stream = workload.start()
        prompt = next(stream)
        while True:
            on_request(workload, prompt.label)
            results.append(self.compare(prompt))
            try:
                prompt = stream.send(results[-1].answer)
            except StopIteration:
                return WorkloadResult(workload.name, workload.title, results)

    def compare(self, prompt: Prompt) -> RequestResult:
        """Run a prompt without and with the cache."""
        ids = self.encode(prompt)
        new_tokens = min(self.max_new_tokens, prompt.max_new_tokens or self.max_new_tokens)
        runs = self._run_both(ids, new_tokens, namespace=None)
        hit_tokens = self.cache.last_requests[-1].hit_tokens if self.cache.last_requests else 0
        self._rest.add(*runs)
        times = [[run.ttft_s] for run in runs]
        for number in range(1, prompt.rounds):
            # A namespace of its own: nothing of the earlier rounds may be found.
            before = self.cache.stats
            for seconds, run in zip(times, self._run_both(ids, 1, namespace=f"round {number}"), strict=True):
                seconds.append(run.ttft_s)
            self._rest.leave_out(before, self.cache.stats)
            self.cache.clear(namespace=f"round {number}")
        without, with_cache = (
            Run(run.tokens, median(seconds), run.total_s) for run, seconds in zip(runs, times, strict=True)
        )
        answer = self.tokenizer.decode(without.tokens, skip_special_tokens=True)
        return RequestResult(prompt.label, ids.shape[1], hit_tokens, without, with_cache, answer)

    def _run_both(self, ids: Any, new_tokens: int, namespace: str | None) -> tuple[Run, Run]:
        """Without the cache and with it, in turns the one or the other first."""
        self._num_requests += 1
        gc.collect()  # not in the middle of one of the two
        if self._num_requests % 2:
            without = self.generate(ids, new_tokens)
            return without, self._generate_attached(ids, new_tokens, namespace)
        with_cache = self._generate_attached(ids, new_tokens, namespace)
        return self.generate(ids, new_tokens), with_cache

    def _generate_attached(self, ids: Any, new_tokens: int, namespace: str | None) -> Run:
        gc.collect()
        start = time.perf_counter()
        with self.cache.attached(self.model, namespace=namespace):
            run = self.generate(ids, new_tokens)
        # New keys and values are stored when the block ends, at the latest: that is part of the price.
        return replace(run, total_s=time.perf_counter() - start)

    def generate(self, ids: Any, new_tokens: int) -> Run:
        """One greedy call of the model's own `generate`, timed."""
        import torch

        clock = TokenClock()
        start = time.perf_counter()
        with torch.inference_mode():
            out = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=new_tokens,
                do_sample=False,
                num_beams=1,
                eos_token_id=self.end_ids or None,
                pad_token_id=self.tokenizer.pad_token_id if self.end_ids else None,
                streamer=clock,
            )
        total = time.perf_counter() - start
        return Run(out[0, ids.shape[1] :].tolist(), clock.times[0] - start, total)

    def encode(self, prompt: Prompt) -> Any:
        """Token ids, `[1, num_tokens]`, on the model's device."""
        encoded = self.tokenizer(prompt.text, add_special_tokens=not prompt.formatted, return_tensors="pt")
        return encoded["input_ids"].to(self.model.device)


class _Seconds:
    """Where the time went. What the cache does not time itself is the rest of each call."""

    parts = ("lookup", "gather", "prefill", "commit")

    def __init__(self) -> None:
        self.plain_ttft = self.plain_decode = self.with_ttft = self.with_decode = 0.0
        self._left_out = dict.fromkeys(self.parts, 0.0)

    def add(self, without: Run, with_cache: Run) -> None:
        self.plain_ttft += without.ttft_s
        self.plain_decode += without.total_s - without.ttft_s
        self.with_ttft += with_cache.ttft_s
        self.with_decode += with_cache.total_s - with_cache.ttft_s

    def leave_out(self, before: Any, after: Any) -> None:
        """The extra rounds of a prompt count for its median, not here."""
        for part in self.parts:
            self._left_out[part] += self._of(after, part) - self._of(before, part)

    def split(self, stats: Any) -> dict[str, float]:
        """Seconds by part; their sum is the time of all first-round calls with the cache."""
        seconds = {part: max(0.0, self._of(stats, part) - self._left_out[part]) for part in self.parts}
        # Before the first token: lookup, gather, the prefill of what is missing, then the last prompt token, which
        # is the model's own forward and counts as prefill too. After it: decoding, and the commit.
        seconds["prefill"] = max(0.0, self.with_ttft - seconds["lookup"] - seconds["gather"])
        seconds["decode"] = max(0.0, self.with_decode - seconds["commit"])
        return seconds

    @staticmethod
    def _of(stats: Any, part: str) -> float:
        return float(getattr(stats, f"{part}_seconds", 0.0))


def describe_cache(cache: Any, stats: Any) -> dict[str, Any]:
    """Sizes and counters of a cache, as plain values."""
    return {
        "block_size": cache.block_size,
        "pool_blocks": cache.num_blocks,
        "free_blocks": cache.num_free_blocks,
        "cached_blocks": cache.num_cached_blocks,
        "cached_tokens": cache.num_cached_tokens,
        "evicted_blocks": stats.evicted_blocks,
        "cow_copies": stats.cow_copies,
        "memory_bytes": cache.memory_bytes,
        "bypasses": dict(stats.bypasses),
    }
