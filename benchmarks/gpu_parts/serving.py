"""The engine end to end, against transformers' `generate_batch` and padded `generate`."""

from __future__ import annotations

import functools
import inspect
import itertools
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from gpu_parts.models import gemma, llama, prompt
from gpu_parts.session import Session
from gpu_parts.timing import busy_us, quartiles, wall_time

Tokens = list[list[int]]


@dataclass
class Answer:
    """What a way made of a workload.

    Attributes:
        tokens: New tokens of each prompt.
        seconds: From the first prompt handed over to the last token.
        ttft: Seconds to the first token of each prompt; empty where it is not known.
        figures: More of it.
    """

    tokens: Tokens
    seconds: float
    ttft: list[float] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Workload:
    """Prompts, and how many tokens to add to each."""

    name: str
    prompts: Tokens
    new: int
    best_hits: int


def workloads(session: Session, model: Any, rows: int) -> list[Workload]:
    """One whose prompts share most of what they say, and one whose prompts share nothing; lengths differ."""
    shared, own, alone, new = (24, 5, 20, 4) if session.small else (2048, 32, 768, 64)
    head = prompt(session, model, shared, 1)
    common = [head + prompt(session, model, own + row * own // rows, 100 + row) for row in range(rows)]
    single = [prompt(session, model, alone + row * alone // rows // 2, 1000 + row) for row in range(rows)]
    return [
        Workload(f"{rows} prompts share {shared}", common, new, (rows - 1) * shared),
        Workload(f"{rows} prompts share nothing", single, new, 0),
    ]


Way = Callable[[Workload], Answer]


# -- ways ---------------------------------------------------------------------------------------------------------


def run_engine(session: Session, engine: Any, workload: Workload) -> Answer:
    from radixkv import SamplingParams

    engine.cache.clear()
    sampling = SamplingParams(max_new_tokens=workload.new)
    seconds, outs = wall_time(session, lambda: engine.generate(workload.prompts, sampling))
    return Answer(
        [out.token_ids for out in outs],
        seconds,
        [out.ttft_s for out in outs if out.ttft_s is not None],
        {"hit_tokens": sum(out.num_cached_tokens for out in outs), "best_hit_tokens": workload.best_hits},
    )


def run_padded(session: Session, model: Any, workload: Workload) -> Answer:
    from transformers import LogitsProcessor, LogitsProcessorList

    longest = max(map(len, workload.prompts))
    ids = torch.zeros(len(workload.prompts), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, tokens in enumerate(workload.prompts):
        ids[row, longest - len(tokens) :] = torch.tensor(tokens)
        mask[row, longest - len(tokens) :] = 1
    first: list[float] = []

    class Stamp(LogitsProcessor):
        def __call__(self, input_ids: Any, scores: Any) -> Any:
            if not first:
                session.synchronize()
                first.append(time.perf_counter())
            return scores

    def call() -> Any:
        with torch.inference_mode():
            return model.generate(
                ids.to(session.device),
                attention_mask=mask.to(session.device),
                max_new_tokens=workload.new,
                do_sample=False,
                num_beams=1,
                logits_processor=LogitsProcessorList([Stamp()]),
            )

    session.synchronize()
    began = time.perf_counter()
    seconds, out = wall_time(session, call)
    return Answer(out[:, longest:].tolist(), seconds, [first[0] - began] * len(ids))


class _Stamped:
    """A model whose `generate_batch` notes when each token was made."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.outputs: dict[str, Any] = {}
        original = model.generate_batch
        stamps = "record_timestamps" in inspect.signature(original).parameters

        @functools.wraps(original)
        def generate_batch(*args: Any, **kwargs: Any) -> Any:
            self.outputs = original(*args, **({"record_timestamps": True} if stamps else {}), **kwargs)
            return self.outputs

        self.generate_batch = generate_batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def run_generate_batch(session: Session, model: Any, workload: Workload, max_batched_tokens: int) -> Answer:
    """Its time begins with the first request: making its cache and capturing its graphs comes before."""
    from radixkv.bench.continuous import continuous_batch

    stamped = _Stamped(model)
    whole, (tokens, _) = wall_time(
        session,
        lambda: continuous_batch(
            stamped,
            workload.prompts,
            max_new_tokens=workload.new,
            max_batched_tokens=max_batched_tokens,
        ),
    )
    outputs = list(stamped.outputs.values())
    if not all(hasattr(out, "lifespan") and getattr(out, "timestamps", None) for out in outputs):
        return Answer(tokens, whole, figures={"time": "with preparation: this version has no timestamps"})
    began = min(out.created_time for out in outputs)
    ended = max(out.lifespan[1] for out in outputs)
    ttft = [out.timestamps[0] - began for out in outputs]
    return Answer(tokens, ended - began, ttft, {"with_preparation_s": whole})


# -- comparing ----------------------------------------------------------------------------------------------------


# A token that the plain forward likes so much less than its best one, in standard deviations of the logits, is no near
# tie: one drawn at random lies about four behind.
NEAR = 0.25


def agreement(session: Session, model: Any, prompts: Tokens, wanted: Tokens, found: Tokens) -> dict[str, Any]:
    """How many answers are the same; where they part, how far each token is behind the plain forward's best one.

    In half precision near ties fall either way.

    Args:
        session: The run.
        model: Decides.
        prompts: Token ids.
        wanted: Answers of another way.
        found: Answers of the engine.

    Returns:
        Figures for a row of results; `right` says whether all of the engine's tokens that were looked at are near ties.
    """
    behind: list[float] = []
    others: list[float] = []
    same, spread = 0, 1.0
    for tokens, right, other in zip(prompts, wanted, found, strict=True):
        if right == other:
            same += 1
            continue
        at = next((i for i, pair in enumerate(zip(right, other, strict=False)) if len(set(pair)) > 1), None)
        if at is None or len(behind) >= 4:
            continue
        with torch.inference_mode():
            row = torch.tensor([tokens + right[:at]], device=session.device)
            logits = model(row, use_cache=False, logits_to_keep=1).logits[0, -1].float()
        spread = float(logits.std())
        behind.append(float(logits.max() - logits[other[at]]) / spread)
        others.append(float(logits.max() - logits[right[at]]) / spread)
    figures: dict[str, Any] = {"same": f"{same}/{len(prompts)}"}
    if behind:
        figures |= {"behind": max(behind), "other_behind": max(others), "logit_spread": spread}
    lengths = [len(one) for one in wanted] == [len(one) for one in found]
    return figures | {"right": lengths and max(behind, default=0.0) <= NEAR}


def compare(session: Session, title: str, model: Any, rows: int, rounds: int = 3) -> None:
    """All ways on both workloads. The engine and `generate_batch` take turns, first one first, then the other."""
    from radixkv import Engine

    most_tokens = 64 if session.small else 8192
    loads = workloads(session, model, rows)
    room = max(sum(len(p) + load.new + 32 for p in load.prompts) for load in loads)
    attention = session.attempt(f"{title}: FlashInfer", session.backend)
    engine = Engine(
        model,
        attention="auto" if attention is None else attention,
        max_num_seqs=rows,
        max_batched_tokens=most_tokens,
        num_tokens=room,
    )
    session.attempt(f"{title}: graphs", lambda: record_graphs(session, title, engine, rows))
    session.note(
        title,
        backend=engine.backend_name,
        one_by_one=engine.fallback_reason,
        no_graphs=engine.no_graphs_reason,
    )
    warm = Workload("warm-up", [p[: 8 + i % 5] for i, p in enumerate(loads[1].prompts)], 4, 0)
    ways: dict[str, Way] = {
        "engine": lambda load: run_engine(session, engine, load),
        "generate_batch": lambda load: run_generate_batch(session, model, load, most_tokens),
        "padded generate": lambda load: run_padded(session, model, load),
    }
    for name, way in list(ways.items()):
        if name == "generate_batch" and session.on_gpu:
            continue  # it warms up by itself, before its time begins
        if session.attempt(f"{title}, {name}: warm-up", lambda way=way: way(warm)) is None:
            del ways[name]
    overheads(session, title, engine, loads[1])
    if engine.num_graph_steps:
        plain = Engine(
            model,
            attention="auto" if session.double is None else session.backend(),
            cache=engine.cache,
            max_num_seqs=rows,
            max_batched_tokens=most_tokens,
            cuda_graphs=False,
        )
        overheads(session, f"{title} without graphs", plain, loads[1])
    answers = take_turns(session, title, ways, loads, rounds)
    engine.close()
    for load in loads:
        _compared(session, title, model, load, answers[load.name])


def turns(names: list[str], rounds: int) -> list[list[str]]:
    """Which way is run when: all in the first round, last of all those that need no further one."""
    again = [name for name in names if name in ("engine", "generate_batch")]
    rest = [name for name in names if name not in again]
    return [(again if turn % 2 == 0 else again[::-1]) + (rest if turn == 0 else []) for turn in range(rounds)]


def take_turns(
    session: Session, title: str, ways: dict[str, Way], loads: list[Workload], rounds: int
) -> dict[str, dict[str, list[Answer]]]:
    """Answers by workload and way. A round of all workloads comes before the next one, in case time runs out."""
    answers: dict[str, dict[str, list[Answer]]] = {load.name: {} for load in loads}
    takes: dict[tuple[str, str], float] = {}  # seconds, preparation included
    for turn, names in enumerate(turns(list(ways), rounds)):
        for load in loads:
            for name in names:
                label = f"{title}: {load.name}, {name}, round {turn + 1}"
                if turn and name not in answers[load.name]:
                    continue  # it failed, or there was no time
                if session.out_of_time(label, takes.get((load.name, name), 3)):
                    continue
                seconds, answer = wall_time(
                    session, lambda n=name, d=load, at=label: session.attempt(at, lambda: ways[n](d))
                )
                session.tidy()
                takes[load.name, name] = seconds
                if answer is not None:
                    answers[load.name].setdefault(name, []).append(answer)
    return answers


def _compared(
    session: Session, title: str, model: Any, load: Workload, answers: dict[str, list[Answer]]
) -> None:
    num_prompt = sum(map(len, load.prompts))
    for name, found in answers.items():
        num_new = sum(map(len, found[0].tokens))
        seconds, low, high = quartiles([one.seconds for one in found])
        session.note(
            f"{title}: {load.name}, {name}",
            rounds=len(found),
            s=seconds,
            low_s=low,
            high_s=high,
            new_per_s=num_new / seconds,
            all_per_s=(num_new + num_prompt) / seconds,
            ttft_median=_median(statistics.median(one.ttft) for one in found if one.ttft),
            ttft_worst=_median(max(one.ttft) for one in found if one.ttft),
            **found[-1].figures,
        )
    if "engine" not in answers:
        return
    ours = answers["engine"]
    for name, others in answers.items():
        if name == "engine":
            continue
        label = f"{title}: {load.name}, tokens of {name}"
        figures = session.attempt(
            label,
            lambda: agreement(session, model, load.prompts, others[0].tokens, ours[0].tokens),  # noqa: B023
        )
        if figures is not None:
            session.check(label, figures.pop("right"), **figures)
        ratio, low, high = quartiles([b.seconds / a.seconds for a, b in zip(ours, others, strict=False)])
        session.note(
            f"{title}: {load.name}, engine against {name}",
            times_as_fast=ratio,
            low=low,
            high=high,
            **(figures or {}),
        )


def _median(values: Iterable[float]) -> float | None:
    known = list(values)
    return statistics.median(known) if known else None


def record_graphs(session: Session, title: str, engine: Any, rows: int) -> None:
    """Let the engine record its graphs of all sizes before anything is timed."""
    from radixkv import SamplingParams
    from radixkv.engine.graphs import graph_sizes

    def record() -> None:
        for size in reversed(graph_sizes(rows)):  # smaller ones fit into the memory of the largest
            prompts = [[5 + row, 7] for row in range(size)]
            engine.generate(prompts, SamplingParams(max_new_tokens=3, ignore_eos=True))

    seconds, _ = wall_time(session, record)
    session.note(
        f"{title}: record graphs", s=seconds, sizes=engine.graph_sizes, reason=engine.no_graphs_reason
    )


# -- what a step takes beside its kernels ---------------------------------------------------------------------------


def overheads(session: Session, title: str, engine: Any, load: Workload) -> None:
    """Time of a decode step of all rows, and of the kernels in it."""
    name = f"{title}: decode step of {len(load.prompts)} rows"
    if not session.out_of_time(name, 3):
        asked: list[Any] = []
        figures = session.attempt(name, lambda: _step_times(session, engine, load, asked))
        for request in asked:  # closing the engine would take its graphs with it
            engine.abort(request)
        while engine.has_unfinished:
            engine.step()
        engine.cache.clear()
        if figures is not None:
            session.note(name, **figures)


def _step_times(session: Session, engine: Any, load: Workload, asked: list[Any]) -> dict[str, Any]:
    from radixkv import SamplingParams

    plain, profiled = (3, 2) if session.small else (32, 8)
    sampling = SamplingParams(max_new_tokens=4 * (plain + 2 * profiled) + 16)
    for tokens in load.prompts:
        asked.append(engine.add_request(tokens[: load.new * 16], sampling))
    for _ in range(10_000):
        if len(engine.step()) == len(load.prompts):
            break
    else:
        raise RuntimeError("the prompts never decoded all at once")
    engine.step()
    seconds, _ = wall_time(session, lambda: [engine.step() for _ in range(plain)])
    figures: dict[str, Any] = {
        "step_ms": seconds / plain * 1e3,
        "rows": len(load.prompts),
        "graph_steps": engine.num_graph_steps,
    }
    if not session.on_gpu:
        return figures | {"kernel_ms": None}  # what is overhead cannot be told apart on a CPU
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(profiled):
            engine.step()
        session.synchronize()
    spans = kernel_spans(found.events())
    kernels = busy_us(spans) / profiled / 1e3
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(profiled + 1)]
    marks[0].record()
    for mark in marks[1:]:
        engine.step()
        mark.record()
    session.synchronize()
    gaps = [before.elapsed_time(after) for before, after in itertools.pairwise(marks)]
    figures |= {
        "kernel_ms": kernels,
        "kernel_sum_ms": sum(stop - start for start, stop in spans) / profiled / 1e3,
        "device_step_ms": statistics.median(gaps),
        "launches": len(spans) / profiled,
        "overhead": (figures["step_ms"] - kernels) / figures["step_ms"],
    }
    return figures


def kernel_spans(events: Iterable[Any]) -> list[tuple[float, float]]:
    """When kernels began and ended, in us, by the profiler's events.

    Copies are none: they run on other streams, too, and what waits for one is overhead.
    """
    spans = []
    for event in events:
        if str(event.device_type).rpartition(".")[2] != "CUDA" or getattr(event, "is_user_annotation", False):
            continue
        if not event.name.startswith(("Memcpy", "Memset")):
            spans.append((event.time_range.start, event.time_range.end))
    return spans


# -- phases -------------------------------------------------------------------------------------------------------


def engine_llama(session: Session) -> None:
    """A random model in the shape of Llama 3 8B."""
    seconds, model = wall_time(session, lambda: llama(session))
    session.note("make the model", s=seconds)
    session.shared["llama"] = model
    compare(session, "llama", model, *((4, 2) if session.small else (64,)))


def engine_gemma(session: Session) -> None:
    """Gemma 3 270M: windows, heads of 256, a large vocabulary."""
    model, which = gemma(session)
    session.note("make the model", weights=which)
    compare(session, f"gemma ({which})", model, *((4, 2) if session.small else (64,)))
