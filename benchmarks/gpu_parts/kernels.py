"""Bandwidths and the attention kernels by themselves."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import torch
import torch.nn.functional as functional
from torch import Tensor

from gpu_parts.session import Session, Skip
from gpu_parts.timing import Timing, host_time, kernel_time, waits_for_device
from radixkv.attention import AttentionBatch, AttentionSpec

BLOCK = 16
GROUP, KV_HEADS, DIM = 4, 8, 128  # Llama 3 8B


def spec_for(session: Session, group: int = GROUP, window: int | None = None) -> AttentionSpec:
    heads, dim = (2, 16) if session.small else (KV_HEADS, DIM)
    return AttentionSpec(heads * group, heads, dim, dim, dim**-0.5, window)


def random(session: Session, *shape: int) -> Tensor:
    return torch.empty(*shape, dtype=session.dtype, device=session.device).normal_()


def token_bytes(session: Session, spec: AttentionSpec) -> int:
    """Of K and V of one token in one layer."""
    return spec.num_kv_heads * (spec.key_dim + spec.value_dim) * session.dtype.itemsize


# -- bandwidth ----------------------------------------------------------------------------------------------------


def bandwidth(session: Session) -> None:
    """What this device copies and reads, the measure for all that follows."""
    size = 1 << 16 if session.small else 4 << 30
    source = random(session, size // session.dtype.itemsize)
    target = torch.empty_like(source)
    time = kernel_time(session, lambda: target.copy_(source))
    session.shared["copy_gbs"] = copy = 2 * size / time.median / 1e6
    session.note("device copy (read + write)", gbs=copy, ms=time.median, graph=time.graph)
    words, total = source.view(torch.int64), torch.zeros((), dtype=torch.int64, device=session.device)
    time = kernel_time(session, lambda: torch.sum(words, dim=0, out=total))
    session.note("device read (sum)", gbs=size / time.median / 1e6, ms=time.median)


# -- decode -------------------------------------------------------------------------------------------------------


def decode_batch(tables: np.ndarray, context: int) -> AttentionBatch:
    count = len(tables)
    return AttentionBatch(
        np.arange(count + 1, dtype=np.int32), np.full(count, context, np.int32), tables, BLOCK, count
    )


class DecodeCase:
    """So many sequences of so many tokens, one query each, in blocks of a pool in random order.

    Args:
        session: The run.
        pool: Keys and values.
        order: int32 block ids, a permutation of those of the pool.
        batch: Sequences.
        context: Tokens of each, a multiple of the block size.
        spec: Kind of layer.
    """

    def __init__(
        self,
        session: Session,
        pool: tuple[Tensor, Tensor],
        order: np.ndarray,
        batch: int,
        context: int,
        spec: AttentionSpec,
    ) -> None:
        self.session, self.pool, self.spec = session, pool, spec
        width = context // BLOCK
        self.tables = order[: batch * width].reshape(batch, width)
        self.batch = decode_batch(self.tables, context)
        self.query = random(session, batch, spec.num_heads, spec.key_dim)
        self.backend = session.backend()
        seen = context if spec.window is None else min(context, spec.window)
        self.bytes = batch * (
            seen * token_bytes(session, spec)
            + spec.num_heads * (spec.key_dim + spec.value_dim) * session.dtype.itemsize
            + 4 * width
        )

    def plan(self) -> None:
        self.backend.plan(self.batch, [self.spec])

    def run(self) -> Tensor:
        return self.backend.run(self.spec, self.query, *self.pool)

    def exact(self, row: int) -> Tensor:
        """Attention of one row in float64."""
        ids = torch.from_numpy(self.tables[row].astype(np.int64)).to(self.session.device)
        keys, values = (tensor[ids].flatten(0, 1).double() for tensor in self.pool)
        group = self.spec.group
        query = self.query[row].double().unflatten(0, (-1, group))
        weights = torch.einsum("hgd,khd->hgk", query, keys).mul(self.spec.scale).softmax(-1)
        return torch.einsum("hgk,khd->hgd", weights, values).flatten(0, 1)


def relative_error(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm().clamp(min=1e-30))


def decode(session: Session) -> None:
    """Decode attention as a share of the copy bandwidth, against torch over contiguous keys and values."""
    copy = session.shared.get("copy_gbs")
    spec = spec_for(session)
    sizes = [(b, c) for c in (1024, 8192, 32768) for b in (1, 16, 64, 256)]
    if session.small:
        sizes = [(1, 32), (3, 64)]
    for batch, context in sizes:
        name = f"{batch} x {context}"
        if session.out_of_time(name, 2):
            continue
        figures = session.attempt(name, lambda b=batch, c=context: _decode(session, spec, b, c))
        session.tidy()
        if figures is not None:
            session.note(name, **figures, of_copy=figures["gbs"] / copy if copy else None)
    batch, context = (3, 64) if session.small else (64, 8192)
    for label, other in (
        ("one head a group", spec_for(session, group=1)),
        ("eight heads a group", spec_for(session, group=8)),
        ("a window of 1,024", spec_for(session, window=24 if session.small else 1024)),
    ):
        name = f"{batch} x {context}, {label}"
        if session.out_of_time(name, 1):
            continue
        figures = session.attempt(name, lambda s=other: _paged(session, s, batch, context))
        session.tidy()
        if figures is not None:
            session.note(name, **figures, of_copy=figures["gbs"] / copy if copy else None)


def require_room(session: Session, size: int) -> None:
    """Raises: Skip: so many bytes are not free on the device."""
    if not session.on_gpu:
        return
    free, _ = torch.cuda.mem_get_info(session.device)
    free += torch.cuda.memory_reserved(session.device) - torch.cuda.memory_allocated(session.device)
    free -= 2 << 30  # for workspaces, queries, and what flushes the cache
    if size > free:
        raise Skip(f"no room: it takes {size / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB are free")


def make_pool(session: Session, num_blocks: int, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    shape = num_blocks, BLOCK, spec.num_kv_heads
    return random(session, *shape, spec.key_dim), random(session, *shape, spec.value_dim)


def _paged(session: Session, spec: AttentionSpec, batch: int, context: int) -> dict[str, Any]:
    num_blocks = batch * context // BLOCK
    require_room(session, batch * context * token_bytes(session, spec))
    pool = make_pool(session, num_blocks, spec)
    order = np.random.default_rng(0).permutation(num_blocks).astype(np.int32)
    case = DecodeCase(session, pool, order, batch, context, spec)
    case.plan()
    case.run()  # plans the kernels, and compiles them if they are not there
    plan_ms = host_time(session, case.plan)
    if spec.window is None:
        waits = waits_for_device(session, case.plan)
        session.check(f"plan {batch} x {context} G{spec.group} waits for nothing", not waits, waits=waits)
    time = kernel_time(session, case.run)
    figures = _figures(time, case.bytes) | {"plan_ms": plan_ms}
    if spec.window is None:
        out = case.run()
        rows = sorted({0, batch // 2, batch - 1})
        figures["error"] = max(relative_error(out[row], case.exact(row)) for row in rows)
        session.check(
            f"decode {batch} x {context} G{spec.group}", figures["error"] < 8e-3, rel=figures["error"]
        )
    return figures


def _figures(time: Timing, size: int) -> dict[str, Any]:
    return {
        "us": time.us,
        "low_us": time.low * 1e3,
        "high_us": time.high * 1e3,
        "gbs": size / time.median / 1e6,
    }


def _decode(
    session: Session,
    spec: AttentionSpec,
    batch: int,
    context: int,
) -> dict[str, Any]:
    figures = _paged(
        session, spec, batch, context
    )  # whose pool is given back before there are keys for torch
    session.tidy()
    require_room(session, batch * context * token_bytes(session, spec))
    keys, values = (random(session, batch, spec.num_kv_heads, context, spec.key_dim) for _ in "kv")
    query = random(session, batch, spec.num_kv_heads, spec.group, spec.key_dim)
    whole = query.view(batch, spec.num_heads, 1, spec.key_dim)
    ways = {
        "folded": lambda: functional.scaled_dot_product_attention(query, keys, values),
        "enable_gqa": lambda: functional.scaled_dot_product_attention(whole, keys, values, enable_gqa=True),
    }
    found = {}
    for name, call in ways.items():
        try:
            found[name] = kernel_time(session, call, 0.04).us
        except Exception as error:
            figures[f"sdpa_{name}_error"] = str(error)[:100]
            session.tidy()
    if found:
        best = min(found, key=lambda name: found[name])
        figures |= {"sdpa_us": found[best], "sdpa_way": best, "of_sdpa": figures["us"] / found[best]}
    return figures


# -- prefill ------------------------------------------------------------------------------------------------------


def prefill(session: Session) -> None:
    """The rest of prompts whose beginning is cached: what it costs, and what the whole prompts cost."""
    spec = spec_for(session)
    cases = [(1, 4096, 4096), (1, 2048, 32768), (16, 128, 8192), (64, 16, 8192)]
    if session.small:
        cases = [(1, 32, 32), (2, 8, 64)]
    most = max(batch * context for batch, _, context in cases)
    pool = make_pool(session, most // BLOCK, spec)
    order = np.random.default_rng(1).permutation(most // BLOCK).astype(np.int32)
    for batch, new, context in cases:
        name = f"{batch} x {new} new of {context}"
        if session.out_of_time(name, 2):
            continue
        figures = session.attempt(
            name, lambda b=batch, n=new, c=context: _prefill(session, pool, order, spec, b, n, c)
        )
        if figures is not None:
            session.note(name, **figures)


def _prefill(
    session: Session, pool: Any, order: np.ndarray, spec: AttentionSpec, batch: int, new: int, context: int
) -> dict[str, Any]:
    tables = order[: batch * (context // BLOCK)].reshape(batch, -1)

    def time(queries: int) -> Timing:
        backend = session.backend()
        query = random(session, batch * queries, spec.num_heads, spec.key_dim)
        starts = np.arange(batch + 1, dtype=np.int32) * queries
        step = AttentionBatch(starts, np.full(batch, context, np.int32), tables, BLOCK, 0)
        backend.plan(step, [spec])
        return kernel_time(session, lambda: backend.run(spec, query, *pool))

    hit = time(new)
    pairs = batch * sum(range(context - new + 1, context + 1))
    figures = {"us": hit.us, "tflops": 4 * pairs * spec.num_heads * spec.key_dim / hit.median / 1e9}
    if new < context and batch * context <= 1 << 17:
        cold = time(context)
        figures |= {"whole_us": cold.us, "whole_over_hit": cold.us / hit.us}
    figures |= _sdpa_prefill(session, spec, batch, new, context)
    return figures


def _sdpa_prefill(
    session: Session, spec: AttentionSpec, batch: int, new: int, context: int
) -> dict[str, Any]:
    from torch.nn.attention.bias import causal_lower_right

    keys, values = (random(session, batch, spec.num_kv_heads, context, spec.key_dim) for _ in "kv")
    query = random(session, batch, spec.num_heads, new, spec.key_dim)
    how: dict[str, Any] = (
        {"is_causal": True} if new == context else {"attn_mask": causal_lower_right(new, context)}
    )
    try:
        time = kernel_time(
            session,
            lambda: functional.scaled_dot_product_attention(query, keys, values, enable_gqa=True, **how),
            0.04,
        )
    except Exception as error:
        return {"sdpa_error": str(error)[:100]}
    return {"sdpa_us": time.us}


# -- cascade ------------------------------------------------------------------------------------------------------


def cascade(session: Session) -> None:
    """A shared prefix attended once for all, against flat decoding over shared blocks; and what the rule chooses."""
    from radixkv.attention.flashinfer_plan import FlashInferCosts

    spec = spec_for(session)
    own = 16 if session.small else 256
    cases = list(itertools.product((1024, 8192, 32768), (16, 64, 256)))
    if session.small:
        cases = [(64, 3)]
    most = max(shared + batch * own for shared, batch in cases) // BLOCK
    pool = make_pool(session, most, spec)
    order = np.random.default_rng(2).permutation(most).astype(np.int32)
    costs = {
        "flat": FlashInferCosts(cascade=False),
        "cascade": FlashInferCosts(launch_bytes=-(10**9)),
        "rule": FlashInferCosts(),
    }
    for shared, batch in cases:
        name = f"{batch} share {shared}, {own} own"
        if session.out_of_time(name, 1):
            continue
        leading, rest = shared // BLOCK, own // BLOCK
        tables = np.concatenate(
            (
                np.broadcast_to(order[:leading], (batch, leading)),
                order[leading : leading + batch * rest].reshape(batch, rest),
            ),
            axis=1,
        )

        def measure(
            tables: np.ndarray = tables, batch: int = batch, context: int = shared + own
        ) -> dict[str, Any]:
            query = random(session, batch, spec.num_heads, spec.key_dim)
            figures: dict[str, Any] = {}
            outs = {}
            for way, cost in costs.items():
                backend = session.backend(costs=cost)
                backend.plan(decode_batch(tables, context), [spec])
                outs[way] = backend.run(spec, query, *pool).clone()
                launches = len(backend.cut_of(spec).shared)
                if way == "cascade":
                    session.check(f"cascade {batch} x {context} shares", launches > 0, launches=launches)
                if way == "rule":
                    figures["rule_chooses"] = "cascade" if launches else "flat"
                    continue
                figures[f"{way}_us"] = kernel_time(session, lambda b=backend: b.run(spec, query, *pool)).us
                figures[f"{way}_plan_ms"] = host_time(
                    session, lambda b=backend: b.plan(decode_batch(tables, context), [spec])
                )
            figures["flat_over_cascade"] = figures["flat_us"] / figures["cascade_us"]
            error = relative_error(outs["cascade"], outs["flat"])
            session.check(f"cascade {len(tables)} x {context}", error < 8e-3, rel=error)
            return figures

        figures = session.attempt(name, measure)
        if figures is not None:
            session.note(name, **figures)
