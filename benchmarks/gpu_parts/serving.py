"""The engine end to end, against transformers' `generate_batch` and padded `generate`."""

from __future__ import annotations

import functools
import inspect
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from gpu_parts.models import gemma, llama, prompt
from gpu_parts.session import Session
from gpu_parts.timing import wall_time

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


def agreement(session: Session, model: Any, prompts: Tokens, wanted: Tokens, found: Tokens) -> dict[str, Any]:
    """How many answers are the same; where they part, by how much the model prefers one token over the other.

    In bfloat16 near ties fall either way: a gap that is small beside the spread of the logits is one.
    """
    same, gaps, spread = 0, [], 0.0
    for tokens, right, other in zip(prompts, wanted, found, strict=True):
        if right == other:
            same += 1
            continue
        at = next((i for i, pair in enumerate(zip(right, other, strict=False)) if len(set(pair)) > 1), None)
        if at is None or len(gaps) >= 4:
            continue
        with torch.inference_mode():
            row = torch.tensor([tokens + right[:at]], device=session.device)
            logits = model(row, use_cache=False, logits_to_keep=1).logits[0, -1].float()
        gaps.append(float(abs(logits[right[at]] - logits[other[at]])))
        spread = float(logits.std())
    figures: dict[str, Any] = {"same": f"{same}/{len(prompts)}"}
    if gaps:
        figures |= {"largest_gap": max(gaps), "logit_spread": spread}
    return figures


def compare(session: Session, title: str, model: Any, rows: int, padded_rounds: int = 1) -> None:
    """All ways on both workloads, the engine first and last."""
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
        backend=engine._runner.backend.name,
        one_by_one=engine.fallback_reason,
        no_graphs=engine.no_graphs_reason,
    )
    warm = Workload("warm-up", [p[: 8 + i % 5] for i, p in enumerate(loads[1].prompts)], 4, 0)
    ways: dict[str, Callable[[Workload], Answer]] = {
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
    for load in loads:
        answers: dict[str, Answer] = {}
        for name, way in ways.items():
            label = f"{title}: {load.name}, {name}"
            if session.out_of_time(label, 3):
                continue
            answer = session.attempt(label, lambda way=way, load=load: way(load))
            session.tidy()
            if answer is None:
                continue
            answers[name] = answer
            num_new, num_prompt = sum(map(len, answer.tokens)), sum(map(len, load.prompts))
            session.note(
                label,
                s=answer.seconds,
                new_per_s=num_new / answer.seconds,
                all_per_s=(num_new + num_prompt) / answer.seconds,
                ttft_median=statistics.median(answer.ttft) if answer.ttft else None,
                ttft_worst=max(answer.ttft, default=None),
                **answer.figures,
            )
        if "engine" not in answers:
            continue
        ours = answers["engine"]
        for name, other in answers.items():
            if name == "engine":
                continue
            figures = session.attempt(
                f"{title}: {load.name}, tokens of {name}",
                lambda other=other, load=load, ours=ours: agreement(
                    session, model, load.prompts, other.tokens, ours.tokens
                ),
            )
            session.note(
                f"{title}: {load.name}, engine against {name}",
                times_as_fast=other.seconds / ours.seconds,
                **(figures or {}),
            )


def record_graphs(session: Session, title: str, engine: Any, rows: int) -> None:
    """Let the engine record its graphs of all sizes before anything is timed."""
    from radixkv import SamplingParams
    from radixkv.engine.graphs import graph_sizes

    def record() -> None:
        for size in graph_sizes(rows):
            prompts = [[5 + row, 7] for row in range(size)]
            engine.generate(prompts, SamplingParams(max_new_tokens=3, ignore_eos=True))

    seconds, _ = wall_time(session, record)
    graphs = engine._runner.graphs
    sizes = None if graphs is None else graphs.sizes
    session.note(f"{title}: record graphs", s=seconds, sizes=sizes, reason=engine.no_graphs_reason)


# -- what a step takes beside its kernels ---------------------------------------------------------------------------


def overheads(session: Session, title: str, engine: Any, load: Workload) -> None:
    """Time of a decode step of all rows, and of the kernels in it."""
    name = f"{title}: decode step of {len(load.prompts)} rows"
    if not session.out_of_time(name, 3):
        figures = session.attempt(name, lambda: _step_times(session, engine, load))
        engine.close()
        engine.cache.clear()
        if figures is not None:
            session.note(name, **figures)


def _step_times(session: Session, engine: Any, load: Workload) -> dict[str, Any]:
    from radixkv import SamplingParams

    plain, profiled = (3, 2) if session.small else (32, 8)
    sampling = SamplingParams(max_new_tokens=4 * (plain + profiled) + 16)
    for tokens in load.prompts:
        engine.add_request(tokens[: load.new * 16], sampling)
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
    events = [event for event in found.key_averages() if event.self_device_time_total > 0]
    kernels = sum(event.self_device_time_total for event in events) / profiled / 1e3
    launches = sum(event.count for event in events) / profiled
    figures |= {
        "kernel_ms": kernels,
        "launches": launches,
        "overhead": (figures["step_ms"] - kernels) / figures["step_ms"],
    }
    return figures


# -- phases -------------------------------------------------------------------------------------------------------


def engine_llama(session: Session) -> None:
    """A random model in the shape of Llama 3 8B."""
    seconds, model = wall_time(session, lambda: llama(session))
    session.note("make the model", s=seconds)
    session.shared["llama"] = model
    compare(session, "llama", model, 4 if session.small else 64)


def engine_gemma(session: Session) -> None:
    """Gemma 3 270M: windows, heads of 256, a large vocabulary."""
    model, which = gemma(session)
    session.note("make the model", weights=which)
    compare(session, f"gemma ({which})", model, 4 if session.small else 64)
