"""The engine on a cold cache, against the floor, a padded batch and generate_batch: prompts that share much or nothing.

The floor is what cannot be avoided: one forward over the shared tokens, one over the own tokens of all rows, then a
batched decode forward for each further token, with transformers' own cache and attention (the repetition of the cache
between the first two is not timed). A padded `generate` computes the shared tokens once a row, `generate_batch`
too where the model has sliding layers.

Ratios are of CPU time of the process, because other work on the machine does not count there; wall time is beside it.
Every round checks that all give the same tokens.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from common import (
    Report,
    cache_keyword,
    cache_of,
    gemma,
    ids,
    llama,
    parser,
    plain_twin,
    rotated,
    start,
    undisturbed,
)
from transformers import DynamicCache

import radixkv
from radixkv.bench.continuous import continuous_batch
from radixkv.bench.runner import first_difference

Tokens = list[list[int]]


@dataclass(frozen=True)
class Case:
    """Prompts of `shared` common and `own` further tokens, `new` tokens each.

    Attributes:
        rounds: Most rounds: some cases take minutes each.
        warm: The round that comes first and does not count is like the others; if not, it is a small one.
        targets: Ratio wanted against each baseline, for the reader.
    """

    name: str
    model: str
    rows: int
    shared: int
    own: int
    new: int = 16
    rounds: int = 99
    warm: bool = True
    targets: tuple[tuple[str, str], ...] = ()


CASES = (
    Case(
        "gemma-8x512",
        "gemma",
        8,
        512,
        32,
        targets=(("floor", "<= 1.15"), ("padded", "<= 0.5"), ("generate_batch", "<= 0.22")),
    ),
    Case("gemma-64x512", "gemma", 64, 512, 32, rounds=2, warm=False, targets=(("padded", "below 8x512's"),)),
    Case("gemma-8x2048", "gemma", 8, 2048, 32, rounds=3, warm=False, targets=(("padded", "below 8x512's"),)),
    Case("gemma-8x0", "gemma", 8, 0, 544, targets=(("padded", "<= 1.0"),)),
    Case("llama-8x512", "llama", 8, 512, 32),
    Case("llama-64x512", "llama", 64, 512, 32, rounds=3, warm=False),
    Case("llama-8x2048", "llama", 8, 2048, 32, rounds=3, warm=False),
    Case("llama-8x0", "llama", 8, 0, 544, targets=(("padded", "<= 1.0"),)),
)


class Floor:
    """The forwards that nobody can do without; `outside` is (wall, CPU) seconds between them, to be taken off."""

    def __init__(self, model: Any, prompts: Tokens, shared: int, new: int) -> None:
        self.model, self.prompts, self.shared, self.new = model, torch.tensor(prompts), shared, new
        self.keyword, self.outside = cache_keyword(model), (0.0, 0.0)

    def forward(self, tokens: torch.Tensor, past: Any) -> tuple[torch.Tensor, Any]:
        out = self.model(tokens, use_cache=True, logits_to_keep=1, **{self.keyword: past})
        return out.logits[:, -1:].argmax(-1), cache_of(out)

    def __call__(self) -> Tokens:
        with torch.inference_mode():
            past = DynamicCache(config=self.model.config)
            if self.shared:
                _, past = self.forward(self.prompts[:1, : self.shared], past)
                wall, cpu = time.perf_counter(), time.process_time()
                past.batch_repeat_interleave(len(self.prompts))
                self.outside = time.perf_counter() - wall, time.process_time() - cpu
            current, past = self.forward(self.prompts[:, self.shared :], past)
            found = [current]
            for _ in range(self.new - 1):
                current, past = self.forward(current, past)
                found.append(current)
            return torch.cat(found, 1).tolist()


def padded(model: Any, prompts: Tokens, new: int) -> Tokens:
    batch = torch.tensor(prompts)  # all of one length: nothing is padding here
    with torch.inference_mode():
        out = model.generate(
            batch, attention_mask=torch.ones_like(batch), max_new_tokens=new, do_sample=False, num_beams=1
        )
    return out[:, batch.shape[1] :].tolist()


class Bench:
    """One case on one model.

    Args:
        case: What to run.
        model: The engine's; its plain twin is everybody else's.
        args: Of the command line.
    """

    def __init__(self, case: Case, model: Any, args: Any) -> None:
        self.case, self.args = case, args
        self.plain = plain_twin(model)
        tokens = case.shared + case.rows * (case.own + case.new)
        self.engine = radixkv.Engine(
            model,
            max_num_seqs=max(case.rows, 2),
            max_batched_tokens=args.max_batched_tokens,
            num_tokens=tokens + 64 * (case.rows + 1),
        )
        self.broken: dict[str, str] = {}
        self.hit_tokens = 0

    def prompts(self, case: Case, index: int) -> Tokens:
        seed = 1000 * index + self.args.seed
        prefix = ids(self.plain, case.shared, seed)[0].tolist() if case.shared else []
        return [prefix + ids(self.plain, case.own, seed + 1 + row)[0].tolist() for row in range(case.rows)]

    def run_engine(self, prompts: Tokens) -> Tokens:
        sampling = radixkv.SamplingParams(max_new_tokens=self.case.new)
        completions = self.engine.generate(prompts, sampling)
        self.hit_tokens = sum(completion.num_cached_tokens for completion in completions)
        return [list(completion.token_ids) for completion in completions]

    def run_generate_batch(self, prompts: Tokens) -> Tokens | None:
        try:
            return continuous_batch(
                self.plain,
                prompts,
                max_new_tokens=self.case.new,
                max_batched_tokens=self.args.max_batched_tokens,
            )[0]
        except Exception as error:
            self.broken["generate_batch"] = str(error)
            return None

    def candidates(self, case: Case, prompts: Tokens) -> dict[str, Callable[[], Tokens | None]]:
        made: dict[str, Callable[[], Tokens | None]] = {
            "engine": lambda: self.run_engine(prompts),
            "floor": Floor(self.plain, prompts, case.shared, self.case.new),
            "padded": lambda: padded(self.plain, prompts, self.case.new),
            "generate_batch": lambda: self.run_generate_batch(prompts),
        }
        return {
            name: call
            for name, call in made.items()
            if name not in self.args.skip
            and name not in self.broken
            and (name != "floor" or self.case.shared)  # with nothing shared it is the padded batch again
        }

    def measure(self) -> dict[str, list[tuple[float, float]]]:
        """(wall, CPU) seconds of each candidate, round by round; which goes first rotates."""
        times: dict[str, list[tuple[float, float]]] = {}
        for index in range(min(self.args.rounds, self.case.rounds) + 1):
            case = self.case if index or self.case.warm else shrink(self.case)
            prompts = self.prompts(case, index)
            self.engine.cache.clear()
            candidates = self.candidates(case, prompts)
            results = {}
            with undisturbed():
                for name in rotated(list(candidates), index):
                    wall, cpu = time.perf_counter(), time.process_time()
                    found = candidates[name]()
                    spent = time.perf_counter() - wall, time.process_time() - cpu
                    if found is None:
                        times.pop(name, None)
                        continue
                    results[name] = found
                    if name == "floor":
                        outside = candidates[name].outside  # type: ignore[attr-defined]
                        spent = spent[0] - outside[0], spent[1] - outside[1]
                    if index:
                        times.setdefault(name, []).append(spent)
            compare(self.case, results)
        return times

    def report(self, report: Report) -> None:
        case, times = self.case, self.measure()
        cold = f"{case.rows} x ({case.shared} + {case.own}), {case.new} new"
        for name in ("floor", "padded", "generate_batch"):
            target = dict(case.targets).get(name, "")
            if name not in times:
                if name in self.broken:
                    print(f"{case.name:<44} {name:<34} not measured: {self.broken[name]}")
                continue
            cpu = [
                (base[1] * 1e3, ours[1] * 1e3)
                for base, ours in zip(times[name], times["engine"], strict=True)
            ]
            wall = statistics.median(
                ours[0] / base[0] for base, ours in zip(times[name], times["engine"], strict=True)
            )
            notes = f"CPU ms; ratio of wall time {wall:.3f}"
            if name == "floor":
                hits = f"{self.hit_tokens} of {case.rows * (case.shared + case.own)} prompt tokens hit"
                notes += f"; {hits}; best possible {(case.rows - 1) * case.shared}"
            report.add(f"{case.model} {cold}", name, cpu, target, notes)


def compare(case: Case, results: dict[str, Tokens]) -> None:
    """All the same, or the end: a time of something else is no time."""
    right = results["engine"]
    for name, found in results.items():
        for row, (expected, tokens) in enumerate(zip(found, right, strict=True)):
            if expected != tokens:
                at = first_difference(expected, tokens)
                raise SystemExit(
                    f"{case.name}: outputs differ in row {row} at new token {at}: "
                    f"{name} gives {expected}, the engine {tokens}"
                )


def shrink(case: Case) -> Case:
    """The same in small, to try the script."""
    rows = 3 if case.rows <= 8 else 5
    shared = 0 if not case.shared else 24 if case.shared <= 512 else 40
    own = 6 if case.shared else 30
    return Case(case.name, case.model, rows, shared, own, 4, case.rounds, case.warm, case.targets)


def main(argv: Sequence[str] | None = None) -> None:
    made = parser((__doc__ or "").split("\n")[0], rounds=5)
    names = [case.name for case in CASES]
    made.add_argument("--case", action="append", choices=names, help="only this case; may be given again")
    made.add_argument(
        "--skip",
        action="append",
        default=[],
        choices=["floor", "padded", "generate_batch"],
        help="leave a baseline out; may be given again",
    )
    made.add_argument(
        "--max-batched-tokens", type=int, default=2048, help="of the engine and of generate_batch"
    )
    args = start(made, argv)
    chosen = [case for case in CASES if not args.case or case.name in args.case]
    if args.tiny:
        chosen = [shrink(case) for case in chosen]
    shapes = {case.name: f"{case.rows} x ({case.shared} + {case.own}) + {case.new}" for case in chosen}
    report = Report("engine", args, shapes)
    makers = {"gemma": gemma, "llama": llama}
    for kind in dict.fromkeys(case.model for case in chosen):
        model = makers[kind](args)
        model.generation_config.eos_token_id = None  # all rows make all tokens
        model.generation_config.pad_token_id = 0
        for case in chosen:
            if case.model == kind:
                Bench(case, model, args).report(report)
                gc.collect()
    report.finish()


if __name__ == "__main__":
    main()
