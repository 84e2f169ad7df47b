"""Hit tokens of the two orders of waiting requests, against the best order there is.

    python benchmarks/order.py

No model runs: the scheduler alone decides what is cached when. All requests of a workload are there from the start,
in random order, or come over time, and the pool holds a fraction of their distinct prefixes. The best order is
depth-first in the tree of all prompts, which needs to know all requests in advance (Zheng et al., SGLang, 2024,
theorem 3.1). "ideal" is what a pool without limit would hit: every distinct token computed once.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np
from common import commit, cpu_name

from radixkv.core import BlockPool, RadixTree
from radixkv.sched import Scheduler, SchedulerConfig

BLOCK = 16
VOCAB = 128_000


def few_shot(rng, num_templates=48, each=16):
    """Questions behind one of many templates."""
    templates = rng.integers(0, VOCAB, (num_templates, 400))
    return [
        np.concatenate((t, rng.integers(0, VOCAB, rng.integers(20, 60))))
        for t in templates
        for _ in range(each)
    ]


def thoughts(rng, num_problems=24, branches=4):
    """Trees of thought, three levels deep."""
    out = []
    for _ in range(num_problems):
        level = [rng.integers(0, VOCAB, 256)]
        for _ in range(3):
            level = [np.concatenate((p, rng.integers(0, VOCAB, 64))) for p in level for _ in range(branches)]
        out += level
    return out


def chats(rng, num_chats=160, turns=5):
    """The turns of chats behind one of four system prompts; each repeats all before it."""
    systems = rng.integers(0, VOCAB, (4, 300))
    out = []
    for _ in range(num_chats):
        prompt = systems[rng.integers(4)]
        for _ in range(turns):
            prompt = np.concatenate((prompt, rng.integers(0, VOCAB, rng.integers(40, 160))))
            out.append(prompt)
    return out


def nothing_shared(rng, num=400):
    return list(rng.integers(0, VOCAB, (num, 300)))


WORKLOADS = {
    "few-shot": few_shot,
    "tree of thought": thoughts,
    "chats": chats,
    "nothing shared": nothing_shared,
}


def ideal_hits(prompts):
    """Tokens that a pool without limit would hit; the last token of a prompt is always computed."""
    tree = RadixTree(BlockPool(sum(-(-len(p) // BLOCK) for p in prompts)), BLOCK)
    hits = 0
    for prompt in prompts:
        match = tree.match(prompt, max_tokens=len(prompt) - 1)
        hits += match.num_tokens
        num_whole = len(match.blocks)
        blocks = np.concatenate((match.take(), tree.allocate(-(-len(prompt) // BLOCK) - num_whole)))
        tree.pool.release(tree.insert(prompt, blocks).blocks)
    return hits


def run(prompts, order, num_blocks, per_step, new=32, max_overtakes=64, seqs=16):
    """Serve the prompts as they come, `per_step` in each step (None: all at once)."""
    tree = RadixTree(BlockPool(num_blocks), BLOCK)
    config = SchedulerConfig(
        order=order,
        max_num_seqs=seqs,
        max_batched_tokens=1024,
        preemption="recompute",
        max_overtakes=max_overtakes,
    )
    scheduler = Scheduler(tree, config)
    came, first, waits, requests = 0, {}, [], []
    start = time.perf_counter()
    step_number = 0
    while came < len(prompts) or scheduler.has_unfinished:
        until = len(prompts) if per_step is None else min(len(prompts), int((step_number + 1) * per_step))
        for prompt in prompts[came:until]:
            requests.append(scheduler.add(prompt, max_new_tokens=new))
            first[requests[-1].rid] = step_number
        came = until
        step = scheduler.schedule()
        step_number += 1
        if step is None:
            continue
        waits += [step_number - first[seq.request.rid] for seq in step.admitted]
        scheduler.complete(step, np.arange(len(step.sampling)))
    seconds = time.perf_counter() - start
    stats = scheduler.stats
    scheduler.check(exclusive=True)
    assert stats.prompt_tokens == sum(map(len, prompts))
    assert all(seq.finish_reason == "length" for request in requests for seq in request.sequences)
    return stats, np.array(waits), step_number, seconds


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--share", type=float, default=0.15, help="pool: share of the blocks of all distinct prefixes"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", help="write the figures there too")
    args = parser.parse_args()
    rows = []
    header = {"commit": commit(), "cpu": cpu_name(), "seed": args.seed, "share": args.share}
    print(", ".join(f"{key} {value}" for key, value in header.items()) + "\n")
    print(
        f"{'workload':<16} {'arrival':<9} {'order':<22} {'hit rate':>8} {'of best':>8} {'of ideal':>8} "
        f"{'steps':>6} {'wait':>6} {'longest':>8} {'us/step':>8}"
    )
    for name, make in WORKLOADS.items():
        prompts = make(np.random.default_rng(args.seed))
        ideal, total = ideal_hits(prompts), sum(map(len, prompts))
        num_blocks = max(
            int(args.share * (total - ideal) / BLOCK), 16 * (max(map(len, prompts)) + 48) // BLOCK
        )
        mixed = [prompts[i] for i in np.random.default_rng(args.seed + 1).permutation(len(prompts))]
        best_order = sorted(prompts, key=lambda prompt: prompt.astype(">i8").tobytes())
        best = run(best_order, "fcfs", num_blocks, None)[0].hit_tokens
        for arrival, per_step in (("at once", None), ("over time", 0.6)):
            cases = [
                ("fcfs", mixed, "fcfs", 64),
                ("prefix, passed 64", mixed, "prefix", 64),
                ("prefix, passed 256", mixed, "prefix", 256),
                ("prefix, no limit", mixed, "prefix", 10**9),
            ]
            if per_step is None:
                cases.append(("best (offline)", best_order, "fcfs", 64))
            for label, given, order, overtakes in cases:
                stats, waits, steps, seconds = run(
                    given, order, num_blocks, per_step, max_overtakes=overtakes
                )
                row = {
                    "workload": name,
                    "arrival": arrival,
                    "order": label,
                    "requests": len(prompts),
                    "pool_blocks": num_blocks,
                    "hit_rate": stats.hit_rate,
                    "of_best": stats.hit_tokens / best if best else 1.0,
                    "of_ideal": stats.hit_tokens / ideal if ideal else 1.0,
                    "steps": steps,
                    "mean_wait_steps": float(waits.mean()),
                    "longest_wait_steps": int(waits.max()),
                    "us_per_step": seconds / steps * 1e6,
                    "preemptions": stats.preemptions,
                }
                rows.append(row)
                print(
                    f"{name:<16} {arrival:<9} {label:<22} {row['hit_rate']:8.3f} {row['of_best']:8.3f} "
                    f"{row['of_ideal']:8.3f} {steps:6d} {row['mean_wait_steps']:6.0f} "
                    f"{row['longest_wait_steps']:8d} {row['us_per_step']:8.0f}",
                    flush=True,
                )
    if args.json:
        Path(args.json).write_text(json.dumps({**header, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
