"""The same requests through radixkv and through the block managers and radix caches of others.

    python benchmarks/side_by_side.py TRACE.jsonl [--sglang DIR] [--vllm DIR] [--rounds 3] [--json FILE]
    python benchmarks/side_by_side.py --chats [...]

The work is that of `trace_requests.py`: the first 2,000 requests of the Mooncake conversation trace, expanded to
tokens, one at a time; blocks of 16 tokens; a pool that holds everything, and one of 40% of the distinct tokens. With
`--chats` it is traffic made up here, of short prompts and so of many leaves: see `chats`. What is called of each
contender stands in `contenders.py`. Each runs in a process of its own, one after the other, in
turn for each round; before the clock runs, the prompts are made and `gc.freeze()` takes them out of the garbage
collector's sight, which stays on. A figure is the CPU time of the process for a request, all of its threads counted.

transformers must be installed. SGLang and vLLM ask for other versions of torch and for CUDA, so they go into folders
of their own, without their dependencies; what their caches import beside it is small and pure bookkeeping:

    pip install --no-deps --target DIR sglang triton torchvision orjson pybase64 starlette msgspec pyzmq ...
    pip install --no-deps --target DIR vllm msgspec pyzmq cbor2 ...

(one more package whenever an import names one; no GPU is needed). What is not installed is left out, and said so.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from contenders import CONTENDERS, Contender
from trace_requests import (
    KNOWN_HITS,
    TRACE_BLOCK,
    Request,
    count_distinct_tokens,
    read_trace,
    stream,
)

INPUTS = ("arrays", "lists", "native")


def lists(requests: list[Request], arrays: list[np.ndarray]) -> list[list[int]]:
    """The prompts as lists; a token of a block that was seen before is the same int object, to save memory."""
    known: dict[int, list[int]] = {}
    out = []
    for request, tokens in zip(requests, arrays, strict=True):
        prompt: list[int] = []
        for i, h in enumerate(request.hash_ids):
            start = i * TRACE_BLOCK
            size = min(TRACE_BLOCK, len(tokens) - start)
            if len(known.get(h, ())) < size:
                known[h] = tokens[start : start + size].tolist()
            prompt += known[h][:size]
        out.append(prompt)
    return out


def chats(num_requests: int) -> tuple[list[np.ndarray], int]:
    """Short prompts, and how many distinct tokens they have.

    Each request has one of 64 system prompts of 512 tokens. Three of four begin a chat with 64 to 511 tokens more; the
    fourth continues one of the last 2,000 requests by 64 to 255 tokens.
    """
    rng = np.random.default_rng(0)
    systems = rng.integers(0, 128_000, (64, 512))
    prompts: list[np.ndarray] = []
    distinct = systems.size
    for number in range(num_requests):
        if number and rng.random() < 0.25:
            start, own = prompts[max(0, number - int(rng.integers(1, 2000)))], rng.integers(64, 256)
        else:
            start, own = systems[rng.integers(64)], rng.integers(64, 512)
        distinct += int(own)
        prompts.append(np.concatenate((start, rng.integers(0, 128_000, own))))
    return prompts, distinct


def work(contender: type[Contender], requests: list[Request], args: argparse.Namespace) -> dict[str, Any]:
    """All cases of one contender, in this process."""
    if args.chats:
        arrays, distinct = chats(args.requests)
    else:
        arrays, distinct = list(stream(requests)), count_distinct_tokens(requests)
    prompts: dict[str, list[Any]] = {"arrays": arrays}
    if "lists" in args.inputs or contender.native is list:
        prompts["lists"] = [a.tolist() for a in arrays] if args.chats else lists(requests, arrays)
    same = {np.ndarray: "arrays", list: "lists"}.get(contender.native)
    if same is None and "native" in args.inputs:
        prompts["native"] = [contender.native("q", tokens.tobytes()) for tokens in arrays]
    cases = []
    for share in args.pools:
        for kind in args.inputs:
            if kind == "native" and same in args.inputs:
                cases.append(
                    {**next(c for c in cases if (c["pool"], c["input"]) == (share, same)), "input": kind}
                )
                continue
            cache = contender(int(distinct * (share or 1.1)) // args.block_size, args.block_size)
            gc.collect()
            gc.freeze()
            times, hit = [], 0
            clock = time.process_time_ns
            for tokens in prompts[kind if kind != "native" else same or kind]:
                start = clock()
                hit += cache.run(tokens)
                times.append((clock() - start) / 1e3)
            cases.append(
                {
                    "pool": share,
                    "input": kind,
                    "hit_tokens": hit,
                    "mean_us": statistics.mean(times),
                    "median_us": statistics.median(times),
                }
            )
            del cache
            gc.unfreeze()
    return {"version": contender.version(), "cases": cases}


def ask(name: str, args: argparse.Namespace) -> dict[str, Any] | str:
    """Run a contender in a process of its own; what it measured, or the last line of its error."""
    overlay = {"sglang": args.sglang, "vllm": args.vllm}.get(CONTENDERS[name].package)
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0", "CUDA_VISIBLE_DEVICES": ""}
    if overlay:
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [overlay, env.get("PYTHONPATH")]))
    command = [sys.executable, "-W", "ignore", __file__, *(["--chats"] if args.chats else [args.trace])]
    command += ["--worker", name]
    command += ["--requests", str(args.requests), "--block-size", str(args.block_size)]
    command += ["--inputs", *args.inputs, "--pools", *map(str, args.pools)]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    if done.returncode:
        return (done.stderr.strip().splitlines() or ["no word"])[-1]
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def summary(rounds: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Medians over the rounds, for each case."""
    cases = []
    for same in zip(*(r["cases"] for r in rounds), strict=True):
        case = dict(same[0])
        for key in ("mean_us", "median_us"):
            values = [c[key] for c in same]
            case[key] = round(statistics.median(values), 1)
            case[f"{key}_rounds"] = [round(v, 1) for v in values]
        if len({c["hit_tokens"] for c in same}) > 1:
            raise SystemExit(f"hits differ from round to round: {same}")
        cases.append(case)
    return cases


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", nargs="?", default=os.environ.get("RADIXKV_TRACE"))
    parser.add_argument("--chats", action="store_true", help="many short prompts in place of a trace")
    parser.add_argument("--sglang", help="folder that sglang is installed in")
    parser.add_argument("--vllm", help="folder that vllm is installed in")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument(
        "--pools", type=float, nargs="+", default=[0, 0.4], help="shares of the distinct tokens; 0: all"
    )
    parser.add_argument("--inputs", nargs="+", default=list(INPUTS), choices=INPUTS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", default=list(CONTENDERS), choices=list(CONTENDERS))
    parser.add_argument("--json", help="file for the results")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not args.trace and not args.chats:
        parser.error("give the path of the trace, or set RADIXKV_TRACE, or take --chats")
    requests = [] if args.chats else read_trace(args.trace, args.requests)
    if args.worker:
        print(json.dumps(work(CONTENDERS[args.worker], requests, args)))
        return 0

    answers: dict[str, list[dict[str, Any]]] = {name: [] for name in args.only}
    for number in range(args.rounds):
        for name in args.only if number % 2 == 0 else args.only[::-1]:
            if number and not answers[name]:
                continue
            answer = ask(name, args)
            if isinstance(answer, str):
                print(f"{name}: left out: {answer}", flush=True)
            else:
                answers[name].append(answer)
                print(f"round {number}: {name} {answer['version']}", flush=True)
    return report({name: found for name, found in answers.items() if found}, requests, args)


def report(
    answers: dict[str, list[dict[str, Any]]], requests: list[Request], args: argparse.Namespace
) -> int:
    cases = {name: summary(rounds) for name, rounds in answers.items()}
    ours = RADIXKV if RADIXKV in cases else next(iter(cases))
    wrong = False
    for share in args.pools:
        known = None if args.chats else KNOWN_HITS.get((args.requests, args.block_size, share or None))
        right = next(c["hit_tokens"] for c in cases[ours] if c["pool"] == share) if known is None else known
        print(f"\npool: {f'{share:.0%} of the distinct tokens' if share else 'everything fits'}")
        print("CPU microseconds a request, mean (median); x: mean over that of radixkv with the same input")
        print("| cache | " + " | ".join(args.inputs) + " | hit tokens |")
        print("| --- |" + " --- |" * (len(args.inputs) + 1))
        base = {c["input"]: c["mean_us"] for c in cases[ours] if c["pool"] == share}
        for name, rows in cases.items():
            row = {c["input"]: c for c in rows if c["pool"] == share}
            cells = [
                f"{c['mean_us']:,.0f} ({c['median_us']:,.0f}) {c['mean_us'] / base[kind]:.1f}x"
                for kind, c in row.items()
            ]
            hit = next(iter(row.values()))["hit_tokens"]
            exact = CONTENDERS[name].evicts_by_block or not share
            wrong |= exact and hit != right
            mark = "" if hit == right else " WRONG" if exact else f" ({hit / right - 1:+.1%})"
            print(f"| {name} {answers[name][0]['version']} | {' | '.join(cells)} | {hit:,}{mark} |")
    if args.json:
        data = {
            "python": platform.python_version(),
            "numpy": np.__version__,
            "machine": f"{platform.machine()}, {os.cpu_count()} CPUs",
            "work": "chats" if args.chats else Path(args.trace).name,
            "requests": args.requests,
            "commit": commit(),
            "block_size": args.block_size,
            "rounds": args.rounds,
            "contenders": {
                name: {
                    "version": answers[name][0]["version"],
                    "calls": CONTENDERS[name].calls,
                    "cases": rows,
                }
                for name, rows in cases.items()
            },
        }
        Path(args.json).write_text(json.dumps(data, indent=1) + "\n")
    return int(wrong)


def commit() -> str:
    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    return subprocess.run(git, capture_output=True, text=True).stdout.strip()


RADIXKV = "radixkv"

if __name__ == "__main__":
    sys.exit(main())
