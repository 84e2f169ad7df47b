"""FlashInfer's kernels, built or loaded before anything is judged or timed."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from gpu_parts.session import Session
from gpu_parts.timing import wall_time
from radixkv.attention import AttentionBatch, AttentionSpec
from radixkv.attention.flashinfer_plan import FlashInferCosts


def wanted(session: Session) -> list[tuple[AttentionSpec, torch.dtype]]:
    """The kinds of layers of all later phases; those whose kernels are rarely there only where they are asked for."""
    made = []

    def add(dim: int, group: int, dtype: torch.dtype, **options: Any) -> None:
        made.append((AttentionSpec(2 * group, 2, dim, dim, dim**-0.5, **options), dtype))

    window = 24
    for dim in (16, 32) if session.small else (64, 128, 256):
        for group in (4, 1):  # tensor cores and CUDA cores
            add(dim, group, session.dtype)
    dim = 16 if session.small else 128
    add(dim, 4, session.dtype, window=window)
    add(16 if session.small else 256, 4, session.dtype, window=window)  # Gemma's
    if session.compile:
        half = session.dtype if session.small else torch.float16
        add(dim, 4, half)
        add(dim, 4, session.dtype, softcap=30.0)
    return made


def kernels(session: Session) -> None:
    """Run each kernel once. One that is not there is compiled, 30 s or more, which no other phase then pays for."""
    seen: set[Any] = set()
    for spec, dtype in wanted(session):
        names = {str(module) for module in session.backend().kernel_modules([spec], dtype)}
        fresh = sorted(names - seen)
        if names and not fresh:
            continue
        name = f"kernels {' '.join(fresh) or spec}"
        if session.out_of_time(name):
            continue
        run = lambda spec=spec, dtype=dtype: _run(session, spec, dtype)  # noqa: E731
        found = session.attempt(name, lambda run=run: wall_time(session, run))
        if found is not None:
            seen |= names
            seconds, reason = found
            session.check(name, reason is None, s=seconds, reason=reason)
    rows = [row for row in session.rows if row["phase"] == session.phase and "s" in row]
    slow = [row["name"] for row in rows if row["s"] > 10]
    session.note("kernels are there", modules=len(seen), seconds=sum(row["s"] for row in rows), compiled=slow)


def _run(session: Session, spec: AttentionSpec, dtype: torch.dtype) -> str | None:
    """Decodes that share a prefix, and prompts: all modules of a kind. Returns why FlashInfer does not compute it."""
    backend = session.backend(costs=FlashInferCosts(launch_bytes=-(10**9), split_bytes=0))
    tables = np.array([[0, 1, 2], [0, 1, 3]], np.int32)
    pool = [torch.zeros(4, 16, spec.num_kv_heads, spec.key_dim, dtype=dtype, device=session.device)] * 2
    for new, decodes in ((1, 2), (5, 0)):
        starts, contexts = np.arange(3, dtype=np.int32) * new, np.full(2, 40, np.int32)
        backend.plan(AttentionBatch(starts, contexts, tables, 16, decodes), [spec])
        query = torch.zeros(2 * new, spec.num_heads, spec.key_dim, dtype=dtype, device=session.device)
        backend.run(spec, query, *pool)
    return backend.fallback_reason(spec, dtype)
