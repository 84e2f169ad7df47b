"""Runs each workload through every way, in turn, and compares the tokens.

All ways answer a round of prompts before the next round starts, and which goes first rotates, so that a machine that
grows slower or faster hits all alike. Each repetition starts cold: what the engine finds in its cache it has computed
itself, in this workload and this repetition.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING

from radixkv.bench.ways import Ids, NotMeasured, Outcome, Setting, Way
from radixkv.bench.workloads import Prompt, Workload

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: Called before a way answers a round, with the workload and the way's title, and with None after a workload.
OnStep = Callable[[Workload, "str | None"], None]


@dataclass
class WayResult:
    """What one way did in one workload, all rounds together.

    Attributes:
        name: The way.
        title: For people.
        wall_s: Seconds, one entry for each repetition.
        cpu_s: CPU seconds of the whole process, all threads, one entry for each repetition.
        new_tokens: New tokens of one repetition.
        hit_tokens: Prompt tokens of one repetition whose prefill was skipped; None if the way does not say.
        peak_kv_bytes: Most memory that keys and values took or were reserved for at a time.
        reason: Why it was not measured; None if it was.
        problems: What went wrong with single requests.
    """

    name: str
    title: str
    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    new_tokens: int = 0
    hit_tokens: int | None = 0
    peak_kv_bytes: int = 0
    reason: str | None = None
    problems: list[str] = field(default_factory=list)

    @property
    def wall(self) -> float:
        """Median of the repetitions, in seconds."""
        return median(self.wall_s)

    @property
    def cpu(self) -> float:
        """Median of the repetitions, in CPU seconds."""
        return median(self.cpu_s)

    @property
    def new_tokens_per_s(self) -> float:
        """By the clock on the wall."""
        return self.new_tokens / self.wall


@dataclass(frozen=True)
class Difference:
    """An answer that is not the one of the reference.

    Attributes:
        request: Label of the prompt.
        way: Title of the way that differs.
        position: Index of the first new token that differs.
        expected: The reference's token there; None if its answer ends before.
        found: The other's token.
        gap: By how much the model's logit for `expected` exceeds that for `found` when the text up to there is run
            alone: near zero is a tie that rounding decides. None if one of the two answers ends there.
    """

    request: str
    way: str
    position: int
    expected: int | None
    found: int | None
    gap: float | None


@dataclass
class WorkloadResult:
    """One workload, answered by all ways.

    Attributes:
        workload: Which one.
        prompt_tokens: Tokens of all prompts of one repetition.
        ways: In the order in which they were given.
        reference: Name of the way whose answers count as right, the first that was measured.
        differences: All answers that are not the reference's.
    """

    workload: Workload
    prompt_tokens: int
    ways: list[WayResult]
    reference: str
    differences: list[Difference]

    def way(self, name: str) -> WayResult | None:
        """The way of that name, if it was measured."""
        return next((way for way in self.ways if way.name == name and way.reason is None), None)

    @property
    def problems(self) -> list[str]:
        """What went wrong with single requests, and where."""
        return [f"{way.title}: {problem}" for way in self.ways for problem in way.problems]

    @property
    def same_tokens(self) -> bool:
        """All ways that were measured gave all answers, and the same ones."""
        return not self.differences and not self.problems


@dataclass(frozen=True)
class BenchResult:
    """All workloads."""

    workloads: list[WorkloadResult]

    @property
    def same_tokens(self) -> bool:
        """No answer differs in any of them."""
        return all(workload.same_tokens for workload in self.workloads)


class Runner:
    """Measures workloads.

    Args:
        setting: What all ways have in common.
        tokenizer: Of the model.
        ways: At least one; the answers of the first count as right.
        repeat: How often each workload runs.
    """

    def __init__(
        self, setting: Setting, tokenizer: PreTrainedTokenizerBase, ways: Sequence[Way], repeat: int = 1
    ) -> None:
        self._setting, self._tokenizer = setting, tokenizer
        self._ways, self._repeat = list(ways), repeat
        self._broken: dict[str, str] = {}
        self._turn = 0

    def warm_up(self) -> None:
        """The first calls of a process are slow for reasons of their own: buffers, lazy imports."""
        texts = ("Good morning.", "Good evening to all of you.")
        prompts = [self._encode(Prompt("warm-up", text)) for text in texts]
        for way in self._ways:
            self._answer(way, prompts)
            way.reset()

    def run(self, workloads: Sequence[Workload], on_step: OnStep = lambda workload, way: None) -> BenchResult:
        """Run all workloads, one after the other."""
        results = []
        for workload in workloads:
            results.append(self._run_workload(workload, on_step))
            on_step(workload, None)
        return BenchResult(results)

    def _run_workload(self, workload: Workload, on_step: OnStep) -> WorkloadResult:
        results = {way.name: WayResult(way.name, way.title) for way in self._ways}
        differences: list[Difference] = []
        prompt_tokens, reference = 0, self._ways[0].name
        for repetition in range(self._repeat):
            for way in self._ways:
                way.reset()
                results[way.name].wall_s.append(0.0)
                results[way.name].cpu_s.append(0.0)
            rounds = workload.start()
            prompts = next(rounds)
            while True:
                ids = [self._encode(prompt) for prompt in prompts]
                outcomes = self._answer_in_turn(workload, ids, results, on_step)
                reference = next(iter(outcomes))
                right = outcomes[reference].tokens
                if repetition == 0:
                    prompt_tokens += sum(map(len, ids))
                    for name, outcome in outcomes.items():
                        _count(results[name], outcome)
                differences += self._compare(prompts, ids, outcomes)
                try:
                    prompts = rounds.send(
                        [self._tokenizer.decode(row, skip_special_tokens=True) for row in right]
                    )
                except StopIteration:
                    break
        for name, result in results.items():
            result.reason = self._broken.get(name)
        unique = list(dict.fromkeys(differences))  # each repetition finds them again
        return WorkloadResult(workload, prompt_tokens, list(results.values()), reference, unique)

    def _answer_in_turn(
        self, workload: Workload, ids: list[Ids], results: dict[str, WayResult], on_step: OnStep
    ) -> dict[str, Outcome]:
        """What each way that works answers, in the order of the ways."""
        outcomes = {}
        shift = self._turn % len(self._ways)
        self._turn += 1
        gc.collect()
        for way in self._ways[shift:] + self._ways[:shift]:
            on_step(workload, way.title)
            outcome, wall, cpu = self._answer(way, ids)
            if outcome is not None:
                outcomes[way.name] = outcome
                results[way.name].wall_s[-1] += wall
                results[way.name].cpu_s[-1] += cpu
        if not outcomes:
            raise NotMeasured("; ".join(f"{name}: {reason}" for name, reason in self._broken.items()))
        return {way.name: outcomes[way.name] for way in self._ways if way.name in outcomes}

    def _answer(self, way: Way, ids: list[Ids]) -> tuple[Outcome | None, float, float]:
        """The answers and the seconds they took; None from a way that does not work here, now or before."""
        if way.name in self._broken:
            return None, 0.0, 0.0
        gc.disable()  # not in the middle of one of them
        try:
            self._synchronize()
            wall, cpu = time.perf_counter(), time.process_time()
            outcome = way.run(ids)
            self._synchronize()
            return outcome, time.perf_counter() - wall, time.process_time() - cpu
        except NotMeasured as error:
            self._broken[way.name] = str(error)
            return None, 0.0, 0.0
        finally:
            gc.enable()

    def _synchronize(self) -> None:
        device = self._setting.model.device
        if device.type == "cuda":
            import torch

            torch.cuda.synchronize(device)

    def _compare(
        self, prompts: list[Prompt], ids: list[Ids], outcomes: dict[str, Outcome]
    ) -> list[Difference]:
        titles = {way.name: way.title for way in self._ways}
        (_, right), *others = outcomes.items()
        found = []
        for name, outcome in others:
            for prompt, prompt_ids, expected, tokens in zip(
                prompts, ids, right.tokens, outcome.tokens, strict=True
            ):
                if expected == tokens:
                    continue
                at = first_difference(expected, tokens)
                there, here = (row[at] if at < len(row) else None for row in (expected, tokens))
                gap = None
                if there is not None and here is not None:
                    gap = self._gap(prompt_ids + expected[:at], there, here)
                found.append(Difference(prompt.label, titles[name], at, there, here, gap))
        return found

    def _gap(self, ids: Ids, expected: int, found: int) -> float:
        import torch

        model = self._setting.model
        with torch.inference_mode():
            logits = model(torch.tensor([ids], device=model.device), use_cache=False).logits[0, -1].float()
        return float(logits[expected] - logits[found])

    def _encode(self, prompt: Prompt) -> Ids:
        encoded = self._tokenizer(prompt.text, add_special_tokens=not prompt.formatted)
        return list(encoded["input_ids"])


def _count(result: WayResult, outcome: Outcome) -> None:
    result.new_tokens += sum(map(len, outcome.tokens))
    result.peak_kv_bytes = max(result.peak_kv_bytes, outcome.peak_kv_bytes)
    result.problems += outcome.problems
    if outcome.hit_tokens is None or result.hit_tokens is None:
        result.hit_tokens = None
    else:
        result.hit_tokens += outcome.hit_tokens


def first_difference(expected: Ids, found: Ids) -> int:
    """Index of the first token that differs; the shorter length if one begins with the other."""
    shorter = min(len(expected), len(found))
    return next((i for i in range(shorter) if expected[i] != found[i]), shorter)
