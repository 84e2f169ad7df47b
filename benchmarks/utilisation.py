"""How much of the KV memory that running requests hold is filled: blocks, and contiguous reservations beside them.

No model: the scheduler runs over requests whose lengths are drawn like those of public chat data, and random tokens
take the place of answers. Each step counts the slots of the blocks that running sequences hold and those of them that
hold a token, and what the same sequences would have reserved as contiguous rooms, in three ways that the vLLM paper
compares with: the longest sequence allowed, the output rounded up to a power of two, and exactly what will be needed
(which nobody knows beforehand). The figure is filled / held, both summed over all steps.

Lengths: log-normal, clipped to what the model allows. The means are those of the vLLM paper (Kwon et al., 2023,
arXiv:2309.06180, figure 11): ShareGPT 161 tokens of prompt and 338 of output, Alpaca 19 and 58. The paper gives no
spread; sigma 1.0 is ours (most texts are short, some very long) and can be changed. Its own figures, with OPT-13B on
ShareGPT, are 20.4 %, 26.8 % and 38.2 % for the three contiguous ways, memory lost between rooms included, which is not
counted here, and 96.3 % for vLLM.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from common import commit, cpu_name

from radixkv import BlockPool, RadixTree, Scheduler, SchedulerConfig

Lengths = npt.NDArray[np.int64]

#: Mean tokens of prompt and output.
DATA = {"sharegpt": (161, 338), "alpaca": (19, 58)}
PAPER = {"max": 0.204, "pow2": 0.268, "oracle": 0.382, "blocks": 0.963}
TARGET = 0.963


def lognormal(rng: np.random.Generator, mean: float, sigma: float, count: int, longest: int) -> Lengths:
    """Whole numbers from 1 to `longest` whose mean is `mean` before clipping."""
    drawn = rng.lognormal(np.log(mean) - sigma**2 / 2, sigma, count)
    return np.clip(np.rint(drawn), 1, longest).astype(np.int64)


def next_power_of_two(values: Lengths) -> Lengths:
    return 1 << np.ceil(np.log2(values)).astype(np.int64)


class Simulation:
    """All requests at once, more than memory holds, until the last one ends.

    Args:
        prompts: Tokens of each prompt.
        outputs: Tokens of each answer; the scheduler is not told.
        args: Of the command line.
        block_size: Slots of a block.
    """

    def __init__(self, prompts: Lengths, outputs: Lengths, args: argparse.Namespace, block_size: int) -> None:
        self.prompts, self.outputs, self.longest = prompts, outputs, args.max_len
        pool = BlockPool(args.slots // block_size)
        tree = RadixTree(pool, block_size=block_size)
        config = SchedulerConfig(
            max_num_seqs=args.max_num_seqs,
            max_batched_tokens=args.max_batched_tokens,
            max_seq_len=args.max_len,
            preemption="recompute",
        )
        self.scheduler, self.block_size = Scheduler(tree, config), block_size
        self.rng = np.random.default_rng(args.seed)
        for i, length in enumerate(prompts):
            tokens = self.rng.integers(0, 2**31, length)
            self.scheduler.add(tokens, max_new_tokens=int(args.max_len - length), rid=i)
        #: Summed over the steps.
        self.held = self.filled = self.running = self.steps = 0
        self.reserved = dict.fromkeys(("max", "pow2", "oracle"), 0)

    def run(self) -> None:
        scheduler, longest = self.scheduler, self.longest
        reserved = {
            "max": np.full_like(self.prompts, longest),
            "pow2": np.minimum(self.prompts + next_power_of_two(self.outputs), longest),
            "oracle": self.prompts + self.outputs,
        }
        made = np.zeros_like(self.outputs)
        running: dict[int, Any] = {}
        while scheduler.has_unfinished:
            step = scheduler.schedule()
            if step is None:
                raise SystemExit("the scheduler has requests and does nothing")
            for seq in step.preempted:
                del running[seq.request.rid]
            running.update((seq.request.rid, seq) for seq in (*step.admitted, *step.resumed))
            who = np.array([seq.request.rid for seq in step.sampling_seqs], dtype=np.int64)
            made[who] += 1
            ends = np.flatnonzero(made[who] >= self.outputs[who])
            tokens = self.rng.integers(0, 2**31, len(who))
            for seq in scheduler.complete(step, tokens, {int(i): "stop" for i in ends}).finished:
                del running[seq.request.rid]
            self.count(running, reserved)
        if not (made == self.outputs).all():
            raise SystemExit("some request did not get all its tokens")
        scheduler.check()

    def count(self, running: dict[int, Any], reserved: dict[str, Lengths]) -> None:
        """Who runs after a step, and what it holds."""
        stats, size = self.scheduler.stats, self.block_size
        computed = np.array([seq.num_computed for seq in running.values()], dtype=np.int64)
        known = np.array([seq.num_tokens for seq in running.values()], dtype=np.int64)
        # The scheduler's own figures, judged by what each sequence needs: blocks for what is computed at least, for
        # all that is known at most. Nothing is shared here.
        least, most = (int((-(-lengths // size)).sum()) * size for lengths in (computed, known))
        if not (stats.filled_slots == computed.sum() and least <= stats.held_slots <= most):
            raise SystemExit(f"{stats} does not fit {computed.sum()} tokens in {least} to {most} slots")
        self.steps += 1
        self.running += len(running)
        self.held += stats.held_slots
        self.filled += stats.filled_slots
        rids = np.fromiter(running, dtype=np.int64)
        for way, room in reserved.items():
            self.reserved[way] += int(room[rids].sum())


def measure(name: str, args: argparse.Namespace, block_size: int) -> dict[str, Any]:
    rng = np.random.default_rng(args.seed)
    mean_prompt, mean_output = DATA[name]
    prompts = lognormal(rng, mean_prompt, args.sigma, args.requests, args.max_len // 2)
    outputs = np.minimum(
        lognormal(rng, mean_output, args.sigma, args.requests, args.max_len), args.max_len - prompts
    )
    simulation = Simulation(prompts, outputs, args, block_size)
    began = time.process_time()
    simulation.run()
    seconds = time.process_time() - began
    return {
        "data": name,
        "block_size": block_size,
        "mean_prompt": float(prompts.mean()),
        "mean_output": float(outputs.mean()),
        "steps": simulation.steps,
        "mean_running": simulation.running / simulation.steps,
        "preemptions": simulation.scheduler.stats.preemptions,
        "utilisation": simulation.filled / simulation.held,
        "contiguous": {way: simulation.filled / room for way, room in simulation.reserved.items()},
        "cpu_s": seconds,
    }


def main(argv: Sequence[str] | None = None) -> None:
    made = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    made.add_argument(
        "--data", choices=[*DATA], action="append", help="only these lengths; may be given again"
    )
    made.add_argument("--requests", type=int, default=1000)
    made.add_argument("--slots", type=int, default=16384, help="token slots of the pool")
    made.add_argument(
        "--block-size", type=int, action="append", help="may be given again (default: 16, 32, 64)"
    )
    made.add_argument("--max-len", type=int, default=2048, help="longest sequence, as OPT's")
    made.add_argument("--sigma", type=float, default=1.0, help="spread of the logarithm of lengths")
    made.add_argument("--max-num-seqs", type=int, default=256)
    made.add_argument("--max-batched-tokens", type=int, default=2048)
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--json", metavar="FILE", help="also write everything to this file")
    made.add_argument("--tiny", action="store_true", help="few requests: tries the script only")
    args = made.parse_args(argv)
    if not 0 <= args.sigma < 10 or min(args.requests, args.slots, args.max_len) < 1:
        made.error("--sigma must lie in 0..10, --requests, --slots and --max-len must be at least 1")
    if args.requests < 1 or args.slots < args.max_len:
        made.error("--requests must be at least 1, and --slots hold the longest sequence")
    if args.tiny:
        args.requests, args.max_len, args.slots = 20, 256, 1024

    header = {
        "benchmark": "utilisation",
        "commit": commit(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "cpu": cpu_name(),
        "seed": args.seed,
        "requests": args.requests,
        "slots": args.slots,
        "lengths": f"log-normal, sigma {args.sigma}, clipped to {args.max_len}; means of the vLLM paper, figure 11",
    }
    for key, value in header.items():
        print(f"{key:<13} {value}")
    print(
        f"\n{'data':<10} {'block':>5} {'prompt':>7} {'output':>7} {'running':>8} {'preempted':>9}"
        f" {'blocks':>7} {'max':>7} {'pow2':>7} {'oracle':>7}"
    )
    rows = []
    for name in args.data or DATA:
        for block_size in args.block_size or (16, 32, 64):
            row = measure(name, args, block_size)
            rows.append(row)
            shares = (row["utilisation"], *row["contiguous"].values())
            print(
                f"{name:<10} {block_size:>5} {row['mean_prompt']:>7.1f} {row['mean_output']:>7.1f}"
                f" {row['mean_running']:>8.1f} {row['preemptions']:>9}"
                + "".join(f" {share:>7.1%}" for share in shares),
                flush=True,
            )
    print(f"\ntarget: ShareGPT's lengths in blocks of 16, at least {TARGET:.1%}")
    print("the vLLM paper: " + ", ".join(f"{way} {share:.1%}" for way, share in PAPER.items()))
    if args.json:
        document = {**header, "paper": PAPER, "target": TARGET, "rows": rows}
        Path(args.json).write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
