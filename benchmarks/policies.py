"""Eviction policies on a public trace, on made-up traffic, and in CPU time.

    python benchmarks/policies.py conversation_trace.jsonl [--json results/policies.json] [--jobs 2]

The trace is `conversation_trace.jsonl` of kvcache-ai/Mooncake (FAST25-release/traces, Apache-2.0); its path may also
be given in the environment variable RADIXKV_TRACE. Hits come from `radixkv.replay.simulate`, so from the product's
own tree. Three tables:

1. the trace at nine capacities: hit rates, and the share of the gap from LRU to the best that a policy could hit
   which admits every request (`optimal-pin`);
2. made-up traffic of several kinds (`traffic.py`): hit tokens gained over LRU, worst of all seeds and mean;
3. CPU time of a whole request (match, evict, allocate, insert, release), each at its best of several rounds: hash
   ids, a block each, and tokens in blocks of 16. One thread; times of the thread, so that others do not count.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from trace_requests import count_distinct_tokens, read_trace, stream
from traffic import KINDS

import radixkv
from radixkv.core import BlockPool, RadixTree, policy_names
from radixkv.replay import simulate

CAPACITIES = (250, 500, 1000, 2000, 5000, 10_000, 30_000, 50_000, 100_000)
SHARES = (0.006, 0.025, 0.1, 0.4)  # of the distinct blocks of made-up traffic
OPTIMAL, OPTIMAL_PIN = "optimal", "optimal-pin"


def conversation(path: str, policies: list[str], jobs: int) -> list[dict[str, Any]]:
    """Rows of table 1."""
    found = simulate(path, capacity=CAPACITIES, policy=[*policies, OPTIMAL_PIN, OPTIMAL], jobs=jobs)
    hits = {(r.policy, r.capacity_blocks): r.hit_blocks for r in found.results}
    rows = []
    for result in found.results:
        capacity = result.capacity_blocks
        lru, best = hits["lru", capacity], hits[OPTIMAL_PIN, capacity]
        rows.append(
            {
                "policy": result.policy,
                "capacity_blocks": capacity,
                "hit_blocks": result.hit_blocks,
                "hit_tokens": result.hit_tokens,
                "hit_rate": round(result.hit_rate, 6),
                "share_of_gap": round((result.hit_blocks - lru) / (best - lru), 4) if best > lru else None,
            }
        )
    return rows


def made_up(policies: list[str], num: int, seeds: range, jobs: int) -> list[dict[str, Any]]:
    """Rows of table 2: one for each kind, seed, capacity and policy."""
    rows = []
    for kind, make in KINDS.items():
        for seed in seeds:
            requests = make(num, seed)
            longest = max(map(len, requests))
            distinct = len({block for request in requests for block in request})
            capacities = sorted({max(longest + 1, int(distinct * share)) for share in SHARES})
            lines = [{"hash_ids": ids, "input_length": 512 * len(ids)} for ids in requests]
            found = simulate(lines, capacity=capacities, policy=policies, block_size=512, jobs=jobs)
            hits = {(r.policy, r.capacity_blocks): r.hit_tokens for r in found.results}
            for (policy, capacity), hit in hits.items():
                lru = hits["lru", capacity]
                gain = round(hit / lru - 1, 5) if lru else None
                rows.append(
                    {"kind": kind, "seed": seed, "policy": policy, "capacity_blocks": capacity}
                    | {"hit_tokens": hit, "gain_over_lru": gain}
                )
            print(f"  {kind}, seed {seed}", file=sys.stderr)
    return rows


def time_requests(
    prompts: list[Any], block_size: int, num_blocks: int, policies: list[str], rounds: int
) -> list[dict[str, Any]]:
    """Rows of table 3 for one block size and pool."""
    clock = time.thread_time_ns
    best: dict[str, list[float]] = {}
    hits = {}
    for _ in range(rounds):
        for policy in policies:  # in turn: drift hits all
            pool = BlockPool(num_blocks)
            tree = RadixTree(pool, block_size, policy)
            times, hits[policy] = [], 0
            for tokens in prompts:
                whole = tokens[: len(tokens) // block_size * block_size]
                start = clock()
                match = tree.match(tokens, partial=False)
                hits[policy] += match.num_tokens
                own = tree.allocate(len(whole) // block_size - len(match.blocks))
                pool.release(tree.insert(whole, np.concatenate((match.take(), own))).blocks)
                times.append((clock() - start) / 1e3)
            best[policy] = list(map(min, times, best.get(policy, times)))
    return [
        {"policy": policy, "block_size": block_size, "num_blocks": num_blocks, "hit_tokens": hits[policy]}
        | {"median_us": round(statistics.median(times), 1), "mean_us": round(statistics.mean(times), 1)}
        for policy, times in best.items()
    ]


def cpu(path: str, policies: list[str], rounds: int) -> list[dict[str, Any]]:
    requests = read_trace(path, 4000)
    ids = [np.array(request.hash_ids, np.int64) for request in requests]
    rows = time_requests(ids, 1, 5000, policies, rounds)
    requests = requests[:1500]
    prompts = list(stream(requests))
    distinct = count_distinct_tokens(requests)
    return rows + time_requests(prompts, 16, int(distinct * 0.4) // 16, policies, rounds)


def to_json(report: dict[str, Any]) -> str:
    """One row a line."""
    parts = []
    for name, value in report.items():
        text = json.dumps(value)
        if isinstance(value, list):
            text = "[\n  " + ",\n  ".join(map(json.dumps, value)) + "\n ]"
        parts.append(f" {json.dumps(name)}: {text}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def rounded(value: float | None, form: str) -> str:
    """A figure, or "-" where there is none, as between LRU and the best if both are equal."""
    return "-" if value is None else format(value, form)


def show(title: str, head: list[str], rows: list[list[str]]) -> None:
    """A Markdown table."""
    print(f"\n{title}\n\n| {' | '.join(head)} |\n|{'---|' * len(head)}")
    for row in rows:
        print(f"| {' | '.join(row)} |")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", nargs="?", default=os.environ.get("RADIXKV_TRACE"))
    parser.add_argument("--policies", nargs="*", default=[n for n in policy_names() if n != "priority"])
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3, help="of timing")
    parser.add_argument("--seeds", type=int, default=2, help="of made-up traffic")
    parser.add_argument("--requests", type=int, default=4000, help="of made-up traffic")
    parser.add_argument("--json", type=Path, help="where to write all figures")
    args = parser.parse_args()
    if not args.trace:
        parser.error("give the path of the trace, or set RADIXKV_TRACE")
    policies = ["lru", *(name for name in args.policies if name != "lru")]

    report: dict[str, Any] = {
        "radixkv": radixkv.__version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs",
        "cpu": cpu(args.trace, policies, args.rounds),
        "conversation": conversation(args.trace, policies, args.jobs),
        "made_up": made_up(policies, args.requests, range(1, args.seeds + 1), args.jobs),
    }

    if args.json:
        args.json.write_text(to_json(report))
    print_tables(report, policies, args.seeds)
    return 0


def print_tables(report: dict[str, Any], policies: list[str], seeds: int) -> None:
    table = {(r["policy"], r["capacity_blocks"]): r for r in report["conversation"]}
    names = [*policies, OPTIMAL_PIN, OPTIMAL]
    heads = ["policy", *(f"{c:,}" for c in CAPACITIES)]
    show(
        "Hit rate",
        heads,
        [[name, *(f"{table[name, c]['hit_rate']:.4f}" for c in CAPACITIES)] for name in names],
    )
    show(
        "Share of the gap from LRU to optimal-pin",
        heads,
        [
            [name, *(rounded(table[name, c]["share_of_gap"], ".2f") for c in CAPACITIES)]
            for name in policies[1:]
        ],
    )
    gains: dict[tuple[str, str], list[float]] = {}
    for row in report["made_up"]:
        if row["gain_over_lru"] is not None:
            gains.setdefault((row["policy"], row["kind"]), []).append(row["gain_over_lru"])
    show(
        f"Hit tokens gained over LRU, worst and mean of {seeds} seeds at {len(SHARES)} capacities",
        ["traffic", *policies[1:]],
        [
            [
                kind,
                *(
                    f"{min(g):+.1%}, {statistics.mean(g):+.1%}" if g else "-"
                    for g in (gains.get((p, kind)) for p in policies[1:])
                ),
            ]
            for kind in KINDS
        ],
    )
    show(
        "CPU time of a request, microseconds",
        ["policy", "block size", "median", "mean", "hit tokens"],
        [
            [
                r["policy"],
                str(r["block_size"]),
                str(r["median_us"]),
                str(r["mean_us"]),
                f"{r['hit_tokens']:,}",
            ]
            for r in report["cpu"]
        ],
    )


if __name__ == "__main__":
    sys.exit(main())
