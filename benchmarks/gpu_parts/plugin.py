"""The plug-in: time to first token of `generate()` with and without a hit, and what a further token takes."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from gpu_parts.models import llama, prompt
from gpu_parts.session import Session
from gpu_parts.timing import wall_time


def plugin(session: Session) -> None:
    """One prefix and other new tokens each time, through an attached model, a plain one, and the floor."""
    import radixkv

    model = session.shared.get("llama")
    if model is None:
        model = session.shared["llama"] = llama(session)
    cached, new, rounds = (48, 6, 1) if session.small else (8192, 64, 3)
    cache = radixkv.PrefixCache.for_model(model, num_tokens=(2 * rounds + 3) * (cached + 2 * new))

    def generate(tokens: list[int], count: int = 1) -> Any:
        ids = torch.tensor([tokens], device=session.device)
        with torch.inference_mode():
            return model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, num_beams=1
            )

    prefix = prompt(session, model, cached, 1)
    tail = iter(prompt(session, model, new, 100 + i) for i in range(100))
    floor = _floor(session, model, prefix)
    times: dict[str, list[float]] = {}

    def measure(name: str, call: Callable[[], Any], keep: bool) -> Any:
        if session.out_of_time(f"time to first token, {name}", 1):
            return None
        seconds, out = wall_time(session, call)
        if keep:  # the first round warms up
            times.setdefault(name, []).append(seconds * 1e3)
        return out

    for turn in range(rounds + 1):
        measure("plain", partial(generate, prefix + next(tail)), turn > 0)
        measure("floor", partial(floor, next(tail)), turn > 0)
    hits, asked, answered = 0, prefix + next(tail), None
    with cache.attached(model):
        generate(prefix)
        for turn in range(rounds + 1):
            tokens = prefix + next(tail) if turn else asked
            out = measure("hit", partial(generate, tokens), turn > 0)
            if out is not None:
                hits = cache.last_requests[0].hit_tokens
            answered = answered if turn else out
            other = prompt(session, model, cached, 200 + turn) + next(tail)
            measure("miss", partial(generate, other), turn > 0)
    if answered is not None:
        session.note("first token on a hit", same_as_plain=generate(asked).tolist() == answered.tolist())
    found = {name: statistics.median(column) for name, column in times.items()}
    if "hit" in found:
        session.check("hit tokens", hits == cached, hit_tokens=hits)
    session.note(f"time to first token, {cached} cached + {new}", **{f"{k}_ms": v for k, v in found.items()})
    if "plain" in found:
        session.shared["prefill_us_per_token"] = found["plain"] * 1e3 / (cached + new)
    count = 4 if session.small else 32
    for name in ("plain", "attached"):
        label = f"further tokens at {cached}, {name}"
        if session.out_of_time(label, 2):
            continue
        tokens = prefix + next(tail)
        with cache.attached(model) if name == "attached" else contextlib.nullcontext():
            generate(tokens)
            first, _ = wall_time(session, partial(generate, tokens))
            whole, _ = wall_time(session, partial(generate, tokens, count + 1))
        session.note(label, ms_per_token=(whole - first) / count * 1e3)
    _swap_cost(session)


def _floor(session: Session, model: Any, prefix: list[int]) -> Callable[[list[int]], Any]:
    """The model's own forward over the new tokens, on a cache that is ready."""
    from common import cache_keyword, cache_of
    from transformers import DynamicCache

    keyword = cache_keyword(model)
    with torch.inference_mode():
        ids = torch.tensor([prefix], device=session.device)
        cache = DynamicCache(config=model.config)
        ready = cache_of(model(ids, use_cache=True, logits_to_keep=1, **{keyword: cache}))

    def forward(tokens: list[int]) -> Any:
        with torch.inference_mode():
            new = torch.tensor([tokens], device=session.device)
            out = model(new, use_cache=True, logits_to_keep=1, **{keyword: ready})
            token = out.logits[:, -1].argmax(-1)
            ready.crop(-len(tokens))
        return token

    return forward


def _swap_cost(session: Session) -> None:
    """`SchedulerConfig.swap_cost` of this machine, from the two measured parts of it."""
    move, compute = session.shared.get("swap_us_per_token"), session.shared.get("prefill_us_per_token")
    if move and compute:
        session.note("swap_cost", value=move / compute, move_us=move, compute_us=compute, default=0.125)
