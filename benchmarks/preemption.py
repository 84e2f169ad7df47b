"""Bringing a preempted sequence back: compute its tokens again, or copy its blocks to the host and back.

First each alone, for sequences of 32 to 4,096 tokens: a prefill by the engine on a cold cache, less that of a single
token (which any step pays), against copying the sequence's blocks out and in, scattered as blocks are after a while.
From these follow the length from which swapping costs less, and `SchedulerConfig.swap_cost`: the time to move one
token's KV one way, as a multiple of the time to compute one token.

Then whole runs in a pool that is too small: the same requests with either way, against a pool with room for all. All
must give the same tokens. What is preempted for recomputing stays cached until somebody takes its blocks, so that
only those are computed again; and most of the time that a small pool costs is spent on running fewer at a time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from common import Report, gemma, ids, in_turn, llama, parser, quartiles, start

import radixkv
from radixkv.store import HostTier

BLOCK = 16


class Alone:
    """Both ways for a sequence of `length` tokens."""

    def __init__(self, model: Any, length: int, args: Any) -> None:
        self.model, self.length, self.args = model, length, args
        self.num_blocks = -(-length // BLOCK)
        self.engine = radixkv.Engine(
            model,
            num_blocks=2 * self.num_blocks + 4,
            block_size=BLOCK,
            max_batched_tokens=args.max_batched_tokens,
        )
        self.store = self.engine.cache.store
        size = self.store.layout.bytes_per_token * BLOCK
        self.tier = HostTier(self.store, size * (self.num_blocks + 1))
        for tensor in (*self.store.keys, *self.store.values):
            if tensor is not None:
                tensor.normal_()

    def prefill(self, length: int, index: int) -> float:
        """CPU ms."""
        prompt = ids(self.model, length, 7 * index + self.args.seed)
        self.engine.cache.clear()
        began = time.process_time()
        (completion,) = self.engine.generate(prompt, radixkv.SamplingParams(max_new_tokens=1))
        spent = time.process_time() - began
        if len(completion.token_ids) != 1 or completion.num_cached_tokens:
            raise SystemExit(f"not a prefill: {completion}")
        return spent * 1e3

    def swap(self, index: int) -> float:
        """CPU ms, out and in."""
        order = np.random.default_rng(index).permutation(2 * self.num_blocks).astype(np.int32)
        old, new = order[: self.num_blocks], order[self.num_blocks :]
        host = np.random.default_rng(index + 1).permutation(self.num_blocks).astype(np.int32)
        began = time.process_time()
        self.tier.swap_out(old, host)
        self.tier.swap_in(host, new)
        spent = time.process_time() - began
        for tensor in (*self.store.keys, *self.store.values):
            if tensor is not None and not torch.equal(tensor[old.tolist()], tensor[new.tolist()]):
                raise SystemExit("a swapped block is not what it was")
        return spent * 1e3

    def measure(self) -> list[tuple[float, float]]:
        """(recompute, swap) of each round."""
        times = []
        for index in range(self.args.rounds + 1):
            recompute = self.prefill(self.length, index) - self.prefill(1, index)
            times.append((max(recompute, 1e-6), self.swap(index)))
        return times[1:]


def alone(report: Report, name: str, model: Any, args: Any) -> None:
    lengths = [32, 64, 128, 256, 512, 1024, 2048, 4096] if not args.tiny else [32, 64]
    lengths = [length for length in lengths if length <= args.longest]
    found = []
    for length in lengths:
        times = Alone(model, length, args).measure()
        row = report.add(f"{name}: {length} tokens out and in", "recompute", times, "", "CPU ms")
        found.append((length, row.baseline_ms, row.ours_ms))
    costs = [(swap / (2 * math.ceil(n / BLOCK) * BLOCK)) / (recompute / n) for n, recompute, swap in found]
    low, middle, high = quartiles(costs)
    cheaper = [n for n, recompute, swap in found if swap < recompute]
    crossover = min(cheaper) if cheaper else None
    report.header.setdefault("derived", {})[name] = {
        "swap_cost": middle,
        "swap_cost_quartiles": [low, high],
        "swap_cheaper_from_tokens": crossover,
        "ms_per_token": {n: recompute / n for n, recompute, _ in found},
        "ms_per_block_one_way": {n: swap / (2 * math.ceil(n / BLOCK)) for n, _, swap in found},
    }
    print(
        f"    {name}: swap_cost {middle:.4f} [{low:.4f}, {high:.4f}]; swapping costs less from "
        f"{crossover if crossover else 'more than ' + str(lengths[-1])} tokens on\n"
    )


def whole(report: Report, name: str, model: Any, args: Any, shape: tuple[int, int, int]) -> None:
    rows, prompt, new = shape if not args.tiny else (4, 24, 24)
    each = -(-(prompt + new) // BLOCK)
    # Prompts of all fit, what they make does not.
    small = rows * -(-prompt // BLOCK) + max(rows // 2, 2)
    small = max(small, each + 2)
    block_bytes = Alone(model, BLOCK, args).store.layout.bytes_per_token * BLOCK
    common = {
        "block_size": BLOCK,
        "max_num_seqs": rows,
        "max_batched_tokens": args.max_batched_tokens,
        "watermark": 0.0,
    }
    host = rows * each * block_bytes
    engines = {
        "room": radixkv.Engine(model, num_blocks=rows * each + 1, **common),
        "recompute": radixkv.Engine(model, num_blocks=small, preemption="recompute", **common),
        "swap": radixkv.Engine(model, num_blocks=small, preemption="swap", host_memory=host, **common),
    }
    cpu: dict[str, list[float]] = {}

    def runner(way: str, prompts: list[Any], keep: bool) -> Callable[[], list[list[int]]]:
        def call() -> list[list[int]]:
            began = time.process_time()
            completions = engines[way].generate(prompts, radixkv.SamplingParams(max_new_tokens=new))
            if keep:
                cpu.setdefault(way, []).append((time.process_time() - began) * 1e3)
            return [list(completion.token_ids) for completion in completions]

        return call

    def prepare(index: int) -> dict[str, Callable[[], Any]]:
        prompts = [ids(model, prompt, 100 * index + row + args.seed)[0] for row in range(rows)]
        for engine in engines.values():
            engine.cache.clear()
        return {way: runner(way, prompts, index > 0) for way in engines}

    def check(results: dict[str, list[list[int]]]) -> None:
        for way, found in results.items():
            if found != results["room"]:
                raise SystemExit(f"{way} changes tokens: {found}, not {results['room']}")

    in_turn(args.rounds, prepare, check)
    for ours, baseline in (("recompute", "room"), ("swap", "room"), ("swap", "recompute")):
        stats = engines[ours].stats
        runs = args.rounds + 1
        each_run = {
            "steps": stats.steps,
            "preemptions": stats.preemptions,
            "tokens recomputed": stats.recomputed_tokens,
            "blocks out": stats.swapped_out_blocks,
            "blocks in": stats.swapped_in_blocks,
        }
        notes = "CPU ms; a run: " + ", ".join(
            f"{count / runs:.1f} {what}" for what, count in each_run.items()
        )
        label = f"{name}: {rows} x ({prompt} + {new}), {ours}"
        against = (
            f"{baseline}, {small} blocks"
            if baseline != "room"
            else f"room: {rows * each + 1} for {small} blocks"
        )
        report.add(label, against, list(zip(cpu[baseline], cpu[ours], strict=True)), "", notes)


def main(argv: Sequence[str] | None = None) -> None:
    made = parser((__doc__ or "").split("\n")[0], rounds=3)
    made.add_argument("--only", choices=["gemma", "llama"], help="one of the models")
    made.add_argument("--part", choices=["alone", "whole"], help="one of the two parts")
    made.add_argument("--longest", type=int, default=4096, help="longest sequence of the first part")
    made.add_argument("--max-batched-tokens", type=int, default=2048)
    args = start(made, argv)
    if args.longest < 32 or args.max_batched_tokens < 1:
        made.error("--longest must be at least 32, --max-batched-tokens at least 1")
    report = Report("preemption", args, {"block_size": BLOCK})
    makers = {
        "gemma": ("Gemma 3 270M", gemma, (4, 256, 40)),
        "llama": ("Llama 4 layers", llama, (6, 256, 96)),
    }
    for kind, (name, make, shape) in makers.items():
        if args.only not in (None, kind):
            continue
        model = make(args)
        model.generation_config.eos_token_id = None
        if args.part != "whole":
            alone(report, name, model, args)
        if args.part != "alone":
            whole(report, name, model, args, shape)
    report.finish()


if __name__ == "__main__":
    main()
