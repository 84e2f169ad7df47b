"""Everything that is timed later, against float64 first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from gpu_parts.models import tiny_llama
from gpu_parts.session import Session
from gpu_parts.swapping import swaps_in_an_engine, swaps_under_load
from radixkv.attention import AttentionSpec

# Rounding of probabilities and results to bfloat16; 1e-3 is what the results alone would take.
TOLERANCE = {torch.bfloat16: 8e-3, torch.float16: 2e-3, torch.float32: 1e-5}
RAGGED = (1, 15, 16, 17, 31, 32, 33, 127, 128, 129, 500, 1023, 2049)
SHORT = (1, 3, 4, 5, 17, 40)


def spec(heads: int, group: int, dim: int, **kwargs: Any) -> AttentionSpec:
    return AttentionSpec(heads * group, heads, dim, dim, dim**-0.5, **kwargs)


def judge(
    session: Session,
    name: str,
    kind: AttentionSpec,
    paths: Any,
    block_size: int = 16,
    dtype: torch.dtype | None = None,
    run: Callable[[Any, Any, Any], Any] | None = None,
    shared: int | None = None,
    **options: Any,
) -> None:
    """One step through the FlashInfer backend, against the formula in float64. Slots that nobody owns are NaN.

    With `shared`, so many launches must be those of shared parts.
    """
    from attention_testkit import dense_attention, make_scene

    def check() -> None:
        kind_dtype = dtype or session.dtype
        scene = make_scene(kind, paths, block_size=block_size, seed=len(session.rows))
        for part in ("query", "keys", "values"):
            setattr(scene, part, getattr(scene, part).to(kind_dtype))
        wanted = dense_attention(scene)
        query, keys, values = (
            getattr(scene, part).to(session.device) for part in ("query", "keys", "values")
        )
        backend = session.backend(**options)
        backend.plan(scene.batch, [kind])
        if run is None:
            found = backend.run(kind, query, keys, values)
        else:
            found = run(backend, scene, (query, keys, values))
        error = float((found.cpu().double() - wanted).norm() / wanted.norm())
        reason = backend.fallback_reason(kind, kind_dtype)
        right = error <= TOLERANCE[kind_dtype] and reason is None
        figures: dict[str, Any] = {}
        if shared is not None:
            figures["shared_launches"] = launches = len(backend.cut_of(kind).shared)
            right &= launches == shared
        session.check(name, right, rel=error, fallback=reason, **figures)

    if not session.out_of_time(name):
        session.attempt(name, check)


def decodes(lens: Any) -> list[Any]:
    return [([], length, 1) for length in lens]


def attention(session: Session) -> None:
    lens = SHORT if session.small else RAGGED
    for dim in (16, 32) if session.small else (64, 128, 256):
        for group in (1, 4, 8):
            judge(session, f"decode D{dim} G{group}", spec(4, group, dim), decodes(lens))
    dim = 16 if session.small else 128
    judge(session, "decode, a group of 7", spec(2, 7, dim), decodes(lens))
    for size in (1, 8, 32, 64):
        judge(session, f"decode, blocks of {size}", spec(4, 4, dim), decodes(lens), block_size=size)
    for width in (1, 16, 101):
        judge(session, f"decode, window {width}", spec(4, 4, dim, window=width), decodes(lens))
    new = (1, 7, 16, 33) if session.small else (1, 7, 16, 33, 128, 257)
    cached = (0, 5, 16, 40) if session.small else (0, 5, 16, 100, 1000, 2048)
    prompts: list[Any] = [([], before + count, count) for before, count in zip(cached, new, strict=True)]
    for group in (1, 4):
        judge(session, f"prompts over a cached part G{group}", spec(4, group, dim), prompts)
    judge(session, "prompts, window 101", spec(4, 4, dim, window=101), prompts)
    mixed = [*decodes(lens[-4:]), *prompts]
    judge(session, "decodes beside prompts", spec(4, 4, dim), mixed)
    judge(session, "decodes beside prompts, window 16", spec(4, 4, dim, window=16), mixed)
    if session.compile:
        judge(session, "decode, float16", spec(4, 4, dim), decodes(lens), dtype=torch.float16)
        judge(session, "decode, soft cap 30", spec(4, 4, dim, softcap=30.0), decodes(lens))


def prefixes(session: Session) -> None:
    """Shared leading blocks, one level and two, forced through the cascade."""
    from radixkv.attention.flashinfer_plan import FlashInferCosts

    dim, blocks = (16, 3) if session.small else (128, 62)
    system, document = ("system", blocks), ("document", blocks // 2)
    own = (1, 16, 17, 100, 33, 5)
    # No launch is ever too dear: also where nothing is saved, as between prompts, whose tiles are full anyway.
    forced = FlashInferCosts(launch_bytes=-(10**9), split_bytes=0)
    one = [([system], blocks * 16 + tail, 1) for tail in own]
    two = [([system, document], (blocks + blocks // 2) * 16 + tail, 1) for tail in own]
    for name, shared, paths in (
        ("shared prefix", 1, one),
        ("two levels", 2, one[:3] + two),
        ("shared prefix, some share nothing", 1, [one[0], ([], 40, 1), one[1], ([], 7, 1), one[2]]),
        ("prompts that share", 1, [([system], blocks * 16 + tail + 5, tail) for tail in own]),
    ):
        judge(session, name, spec(4, 4, dim), paths, shared=shared, costs=forced)
    windowed = spec(4, 4, dim, window=blocks * 16 + 10)
    judge(session, "shared prefix, window", windowed, one, shared=1, costs=forced)


def graphs(session: Session) -> None:
    """A captured `run`, replayed: the kernels read what lies in the pool then."""

    def replay(backend: Any, scene: Any, tensors: Any) -> Any:
        query, keys, values = tensors
        kind = scene.spec
        backend.run(kind, query, keys, values)
        hidden = [tensor.clone() for tensor in tensors]
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        for tensor in tensors:
            tensor.zero_()
        with torch.cuda.graph(graph):
            out = backend.run(kind, query, keys, values)
        for tensor, kept in zip(tensors, hidden, strict=True):
            tensor.copy_(kept)
        graph.replay()
        torch.cuda.synchronize()
        return out

    if not session.on_gpu:
        session.note("graphs", skipped="there are none without a GPU")
        return
    for group in (1, 4):
        judge(session, f"replayed graph G{group}", spec(4, group, 128), decodes(RAGGED), run=replay)


def engine_graphs(session: Session) -> None:
    """Whole forwards as graphs, padded and not: logits and pool as they should be, nobody else's block touched."""
    from gpu_parts.truth import GraphWatch, Truth
    from radixkv import Engine, SamplingParams

    model = tiny_llama(
        session, torch.float32 if session.small else session.dtype, 16 if session.small else 64
    )
    generator = torch.Generator().manual_seed(8)
    rows = 11 if session.small else 33
    prompts = [
        torch.randint(4, 250, (int(length),), generator=generator).tolist()
        for length in torch.randint(1, 60, (rows,), generator=generator)
    ]
    # Sequences end one after the other, so that most batches are smaller than the graph that they are run with.
    samplings = [
        SamplingParams(max_new_tokens=3 + row % (7 if session.small else 17), ignore_eos=True, logprobs=1)
        for row in range(rows)
    ]
    truth, found = Truth(model), []
    for graphs in (False, True):
        engine = Engine(
            model, attention=session.backend(), num_tokens=8192, max_num_seqs=rows, cuda_graphs=graphs
        )
        watch = GraphWatch(engine) if graphs and engine.no_graphs_reason is None else None
        # The second time there is a graph for each size already.
        for count in (rows, rows - 2):
            for tensor in (*engine.cache.store.keys_and_scratch, *engine.cache.store.values_and_scratch):
                if tensor is not None:  # whoever reads what nobody wrote shows
                    tensor.fill_(float("nan"))
            engine.cache.clear()
            outs = engine.generate(prompts[:count], samplings[:count])
        found.append(outs)
    pool = truth.pool(engine.cache)
    answers = truth.answers(prompts[:count], outs)
    seen = {"replays": 0, "padding": 0} if watch is None else dict(watch.seen)
    problems = ["no graph was watched"] if watch is None else watch.problems
    session.check(
        "engine with graphs",
        answers.pop("right")
        and pool.pop("right")
        and not problems
        and engine.no_graphs_reason is None
        and seen["replays"] > rows // 2
        and seen["padding"] > 0,
        same=sum(a.token_ids == b.token_ids for a, b in zip(*found, strict=True)),
        of=count,
        **answers,
        **pool,
        **seen,
        problems=problems,
        graph_steps=engine.num_graph_steps,
        reason=engine.no_graphs_reason,
        errors=[str(out.error) for outs in found for out in outs if out.error is not None],
    )


def writes(session: Session) -> None:
    """What the engine writes to the pool lies where it belongs, bit for bit, and nowhere else."""
    from radixkv import KVLayout, KVStore
    from radixkv.hf.paged import PoolWriter

    heads, dim = 4, 16 if session.small else 128
    layout = KVLayout.uniform(2, heads, dim, dtype=session.dtype, device=session.device)
    store = KVStore(layout, 40, 16)
    rng = np.random.default_rng(3)
    for count in (1, 5, 64, 300):
        for name, slots in (
            ("in a row", np.arange(17, 17 + count, dtype=np.int64)),
            ("scattered", rng.permutation(640)[:count].astype(np.int64)),
        ):
            for tensor in (*store.keys, *store.values):
                assert tensor is not None
                tensor.fill_(7)
            writer = PoolWriter(store)
            writer.aim(slots, torch.from_numpy(slots).to(session.device))
            keys, values = (
                torch.randn(1, heads, count, dim, device=session.device).to(session.dtype) for _ in "kv"
            )
            writer.write(1, keys, values)
            right = True
            for pool, rows in ((store.keys, keys), (store.values, values)):
                wanted = torch.full((640, heads, dim), 7.0, dtype=session.dtype)
                wanted[torch.from_numpy(slots)] = rows[0].transpose(0, 1).cpu()
                right &= torch.equal(pool[1].flatten(0, 1).cpu(), wanted)
                right &= bool((pool[0] == 7).all())
            session.check(f"pool writes: {count} {name}", right)


def engine_agrees(session: Session) -> None:
    """Greedy tokens of the engine, hits included, against plain forwards.

    All of them in float32, with torch's kernels on a GPU. In half precision near ties may fall the other way: there the
    share is noted, and what must be right is how likely each token is.
    """
    _engine_agrees(session, torch.float32, session.backend() if session.double is not None else "torch")
    if session.double is None:
        _engine_agrees(session, session.dtype, session.backend(), strict=False)


def _engine_agrees(session: Session, dtype: torch.dtype, attention: Any, strict: bool = True) -> None:
    from gpu_parts.truth import Truth
    from radixkv import Engine, SamplingParams

    model = tiny_llama(session, dtype, head_dim=16 if strict else 64)
    generator = torch.Generator().manual_seed(4)
    head = torch.randint(4, 250, (40,), generator=generator).tolist()
    prompts = [head + torch.randint(4, 250, (n,), generator=generator).tolist() for n in (3, 9, 1, 17)]
    engine = Engine(model, attention=attention, num_tokens=2048)
    truth = Truth(model)
    for turn in ("cold", "warm"):
        outs = engine.generate(prompts, SamplingParams(max_new_tokens=12, logprobs=1))
        same = 0
        for prompt, out in zip(prompts, outs, strict=True):
            ids = torch.tensor([prompt], device=session.device)
            alone = model.generate(ids, max_new_tokens=12, do_sample=False)
            same += alone[0, len(prompt) :].tolist() == out.token_ids
        hits = sum(out.num_cached_tokens for out in outs)
        answers = truth.answers(prompts, outs)
        right = answers.pop("right") and (same == len(prompts) or not strict) and (turn == "cold" or hits > 0)
        name = f"engine in {str(dtype).removeprefix('torch.')}, {turn}"
        session.check(name, right, same=same, of=len(prompts), hit_tokens=hits, **answers)


def correctness(session: Session) -> None:
    """All of it; what is wrong is named, and the rest goes on."""
    parts = (
        attention,
        prefixes,
        graphs,
        engine_graphs,
        writes,
        engine_agrees,
        swaps_under_load,
        swaps_in_an_engine,
    )
    for part in parts:
        name = part.__name__.replace("_", " ")
        if not session.out_of_time(name):
            session.attempt(name, lambda part=part: part(session))
    checks = [row for row in session.rows if row["phase"] == "correctness" and "ok" in row]
    worst = max((row["rel"] for row in checks if row.get("rel") is not None), default=0.0)
    session.note("checks", passed=sum(row["ok"] for row in checks), of=len(checks), worst_rel=worst)
