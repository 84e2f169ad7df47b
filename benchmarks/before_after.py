"""The bookkeeping of two checkouts against each other, in turn: what a change made faster or slower.

    git worktree add ../before 9dbd429
    python benchmarks/before_after.py ../before . --trace TRACE.jsonl [--rounds 5]

Each round runs every case once with each checkout, in a process of its own; the figures are medians over the rounds of
CPU microseconds of the thread. Only names that both have are used. Hits are compared with what is known of the trace.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

LONG = 131_072
BLOCK = 16


def timed(call: Callable[..., Any], setup: Callable[[], tuple[Any, ...]], rounds: int) -> float:
    times = []
    for _ in range(rounds + 3):
        args = setup()
        start = time.thread_time_ns()
        call(*args)
        times.append((time.thread_time_ns() - start) / 1e3)
    return statistics.median(times[3:])


def store(tree: Any, tokens: np.ndarray) -> None:
    match = tree.match(tokens, partial=False)
    own = tree.allocate(-(-len(tokens) // BLOCK) - len(match.blocks))
    tree.pool.release(tree.insert(tokens, np.concatenate((match.take(), own))).blocks)


def small_cases() -> dict[str, float]:
    """Single calls on trees made for them."""
    from radixkv.core import BlockPool, RadixTree, as_tokens

    rng = np.random.default_rng(0)
    prompt = rng.integers(0, 128_000, LONG)
    out: dict[str, float] = {}

    def time_match(name: str, tree: Any, tokens: np.ndarray) -> None:
        held: list[Any] = []

        def let_go() -> tuple[()]:
            if held:
                held.pop().release()
            return ()

        out[name] = timed(lambda: held.append(tree.match(tokens)), let_go, 100)
        let_go()

    tree = RadixTree(BlockPool(LONG // BLOCK), BLOCK)
    store(tree, prompt)
    time_match("match 131,072 tokens on one edge", tree, prompt)
    time_match("match 2,048 tokens", tree, prompt[:2048])
    other = prompt.copy()
    other[LONG - 4000] += 1
    time_match("match 131,072 tokens that part from the edge near its end", tree, other)

    tree = RadixTree(BlockPool(LONG // BLOCK + 256), BLOCK)
    for end in range(512, LONG + 1, 512):
        store(tree, prompt[:end])
        store(tree, np.append(prompt[:end], np.full(BLOCK, 200_000)))
    time_match("match 131,072 tokens on 256 edges, branches after each", tree, prompt)
    tree = RadixTree(BlockPool(LONG // BLOCK + 256), BLOCK)
    for end in range(512, LONG + 1, 512):
        store(tree, prompt[:end])
        if end < LONG:
            store(tree, np.append(prompt[:end], np.full(BLOCK, 200_000)))
    time_match("the same, and the last edge ends with the prompt", tree, prompt)

    pool = BlockPool(128 * 210)
    tree = RadixTree(pool, BLOCK)
    out["insert 2,048 tokens, nothing cached, and release"] = timed(
        lambda tokens, blocks: pool.release(tree.insert(tokens, blocks).blocks),
        lambda: (rng.integers(0, 128_000, 2048), tree.allocate(128)),
        200,
    )
    tree = RadixTree(BlockPool(64_000), BLOCK)
    for tokens in rng.integers(0, 128_000, (64_000, BLOCK)):
        store(tree, tokens)
    out["evict one block of 64,000 leaves"] = timed(lambda: tree.evict(1), tuple, 500)
    for size in (16, 2048, LONG):
        tokens = prompt[:size].tolist()
        out[f"read a list of {size:,} tokens"] = timed(as_tokens, lambda tokens=tokens: (tokens,), 50)
    return out


def trace_cases(path: str) -> dict[str, float]:
    """Whole requests of the trace."""
    import trace_requests as trace

    from radixkv.core import RadixTree

    requests = trace.read_trace(path, 2000)
    distinct = trace.count_distinct_tokens(requests)
    prompts = list(trace.stream(requests))
    RadixTree.check = lambda tree: None  # of the replay's end, which is not timed but takes long
    out = {}
    for share in (0.4, None):
        name = f"request of the trace, pool of {'40%' if share else 'all'}"
        result = trace.replay(prompts, BLOCK, int(distinct * (share or 1.1)) // BLOCK)
        assert result.hit_tokens == trace.KNOWN_HITS[2000, BLOCK, share]
        out[f"{name}, median"] = statistics.median(result.total_us)
        out[f"{name}, mean"] = statistics.mean(result.total_us)
    return out


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkouts", nargs="*", help="two folders that hold a radixkv package")
    parser.add_argument("--trace", default=os.environ.get("RADIXKV_TRACE"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        print(json.dumps(small_cases() | (trace_cases(args.trace) if args.trace else {})))
        return 0
    if len(args.checkouts) != 2:
        parser.error("give two checkouts: the one before and the one after")
    found: dict[str, list[dict[str, float]]] = {folder: [] for folder in args.checkouts}
    for number in range(args.rounds):
        for folder in args.checkouts if number % 2 == 0 else args.checkouts[::-1]:
            env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(folder).resolve())}
            command = [sys.executable, __file__, "--worker", *(["--trace", args.trace] if args.trace else [])]
            done = subprocess.run(command, env=env, capture_output=True, text=True)
            if done.returncode:
                raise SystemExit(f"{folder}: {done.stderr}")
            found[folder].append(json.loads(done.stdout))
    before, after = (found[folder] for folder in args.checkouts)
    print("| CPU microseconds, median of rounds | before | after | after / before, by round |")
    print("| --- | ---: | ---: | --- |")
    for name in before[0]:
        a, b = ([row[name] for row in rows] for rows in (before, after))
        ratios = sorted(y / x for x, y in zip(a, b, strict=True))
        print(
            f"| {name} | {statistics.median(a):,.1f} | {statistics.median(b):,.1f} "
            f"| {statistics.median(ratios):.2f} [{ratios[0]:.2f}, {ratios[-1]:.2f}] |"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
