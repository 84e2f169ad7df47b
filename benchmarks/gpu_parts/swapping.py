"""The host tier: bandwidth, what it costs beside computation, and that nothing is lost under load."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from gpu_parts.models import tiny_llama
from gpu_parts.session import Session
from gpu_parts.timing import wall_time


def swap(session: Session) -> None:
    """Bytes a second in each direction, and how much a busy main stream suffers."""
    from radixkv import KVLayout, KVStore
    from radixkv.store import HostTier

    layers, heads, dim, count = (2, 2, 16, 8) if session.small else (32, 8, 128, 512)
    layout = KVLayout.uniform(layers, heads, dim, dtype=session.dtype, device=session.device)
    store = KVStore(layout, count, 16)
    block_bytes = layout.bytes_per_token * 16
    seconds, tier = wall_time(session, lambda: HostTier(store, count * block_bytes))
    session.note(
        "make a pinned tier", gib=count * block_bytes / 2**30, s=seconds, pageable=tier.pageable_reason
    )
    rng = np.random.default_rng(5)
    moves = {
        "out": (lambda a, b: tier.swap_out(a, b)),
        "in": (lambda a, b: tier.swap_in(a, b)),
    }
    found = {}
    for way, move in moves.items():
        for order in ("in order", "scattered"):
            host = np.arange(count, dtype=np.int32)
            device = rng.permutation(count).astype(np.int32)
            if order == "scattered":
                host = rng.permutation(count).astype(np.int32)
            times = []
            for _ in range(3):
                seconds, _ = wall_time(session, lambda m=move, a=device, b=host: (m(a, b), tier.fence()))
                times.append(seconds)
            seconds = sorted(times)[1]
            found[way, order] = count * block_bytes / seconds / 1e9
            session.note(f"swap {way}, {order}", gbs=found[way, order], ms=seconds * 1e3)
    slower = min(found["out", "in order"], found["in", "in order"])
    session.shared["swap_us_per_token"] = layout.bytes_per_token / slower / 1e3
    if session.on_gpu:
        _beside_computation(session, tier, count)


def _beside_computation(session: Session, tier: Any, count: int) -> None:
    """Matrix products on the main stream, alone and while the tier copies."""
    size = 4096
    left, right = (torch.randn(size, size, device=session.device).to(session.dtype) for _ in "ab")
    blocks = np.arange(count, dtype=np.int32)

    def work(swapping: bool) -> None:
        if swapping:
            tier.swap_out(blocks, blocks)
        for _ in range(200):
            torch.mm(left, right)
        tier.fence()

    work(True)
    alone, _ = wall_time(session, lambda: work(False))
    beside, _ = wall_time(session, lambda: work(True))
    copy, _ = wall_time(session, lambda: (tier.swap_out(blocks, blocks), tier.fence()))
    session.note(
        "swap out beside matrix products",
        alone_ms=alone * 1e3,
        copy_ms=copy * 1e3,
        both_ms=beside * 1e3,
        hidden=(alone + copy - beside) / copy,
    )


def swaps_under_load(session: Session) -> None:
    """Blocks go out and come back while the main stream writes to the pool: each holds what it should, bit for bit."""
    from radixkv import KVLayout, KVStore
    from radixkv.store import HostTier

    layers, heads, dim, count = (2, 2, 16, 12) if session.small else (8, 8, 128, 192)
    layout = KVLayout.uniform(layers, heads, dim, dtype=session.dtype, device=session.device)
    store = KVStore(layout, count, 16)
    tensors = [tensor for tensor in (*store.keys, *store.values) if tensor is not None]
    tier = HostTier(store, layout.bytes_per_token * 16 * (count // 2))
    rng = np.random.default_rng(6)
    # Every row of a block holds the same small number; what each block should hold is kept on the host.
    holds, kept = np.zeros(count, np.int64), np.zeros(count // 2, np.int64)
    for tensor in tensors:
        tensor.zero_()
    tier.swap_out(np.arange(count // 2, dtype=np.int32), np.arange(count // 2, dtype=np.int32))
    rounds = 10 if session.small else 60
    for turn in range(1, rounds + 1):
        moved = rng.permutation(count)[: count // 3].astype(np.int32)
        host = rng.permutation(count // 2)[: count // 3].astype(np.int32)
        for tensor in tensors[:2] if session.on_gpu else ():
            tensor.view(-1)[:1024].sort()  # keep the main stream busy
        if turn % 3:
            tier.swap_out(moved, host)
            kept[host] = holds[moved]
            tier.fence()
            index = torch.from_numpy(moved.astype(np.int64)).to(session.device)
            for tensor in tensors:
                tensor[index] = turn % 100
            holds[moved] = turn % 100
        else:
            tier.swap_in(host, moved)
            holds[moved] = kept[host]
    session.synchronize()
    wanted = torch.from_numpy(holds).to(session.device, session.dtype)[:, None, None, None]
    right = all(bool((tensor == wanted).all()) for tensor in tensors)
    session.check("swaps under load, bit for bit", right, rounds=rounds, pageable=tier.pageable_reason)


def swaps_in_an_engine(session: Session) -> None:
    """An engine that must swap gives the tokens of one that need not; in half precision, tokens as likely."""
    if session.double is not None:
        _swaps_in_an_engine(session, torch.float32, session.backend)
    else:
        _swaps_in_an_engine(session, torch.float32, lambda: "torch")
        _swaps_in_an_engine(session, session.dtype, session.backend, strict=False)


def _swaps_in_an_engine(
    session: Session, dtype: torch.dtype, attention: Callable[[], Any], strict: bool = True
) -> None:
    from gpu_parts.truth import Truth
    from radixkv import Engine, SamplingParams

    model = tiny_llama(session, dtype, head_dim=16 if strict else 64)
    truth = Truth(model)
    generator = torch.Generator().manual_seed(7)
    prompts = [torch.randint(4, 250, (n,), generator=generator).tolist() for n in (20, 31, 12, 25, 18, 40)]
    sampling = SamplingParams(max_new_tokens=24, logprobs=1)
    roomy = Engine(model, attention=attention(), num_tokens=4096)
    wanted = [out.token_ids for out in roomy.generate(prompts, sampling)]
    narrow = Engine(
        model, attention=attention(), block_size=4, num_blocks=36, preemption="swap", host_memory="8MiB"
    )
    for turn in range(2):
        outs = narrow.generate(prompts, sampling)
        same = sum(out.token_ids == right for out, right in zip(outs, wanted, strict=True))
        answers = truth.answers(prompts, outs)
        swapped = narrow.stats.swapped_in_blocks
        session.check(
            f"engine that swaps, in {str(dtype).removeprefix('torch.')}, {turn}",
            answers.pop("right") and swapped > 0 and (same == len(prompts) or not strict),
            same=same,
            of=len(prompts),
            swapped_blocks=swapped,
            **answers,
        )
        narrow.cache.clear()
