"""What publishing KV events costs, in CPU time a request: the tree with a stream, against the tree alone.

    python kv_events_cost.py --requests 3000

Each of three caches gets the same requests: a system prompt that all share, then tokens that are new, in a pool that is
always full, so that a request also evicts. "caller" is CPU time of the thread that serves the request; "all" is that of
the whole process, the thread of the publisher included. The reader is another process, on loopback. Requests come
in bursts with pauses, as they do where a model computes between them; `--pause-ms 0` leaves the pauses out.

Then, what one more block of a long context costs; and how long a request waits, at worst, when a stream starts on a
cache of many nodes, which is copied then.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from radixkv.cache.event_stream import KVEventStream
from radixkv.core.block_pool import BlockPool
from radixkv.core.radix_tree import RadixTree
from radixkv.core.tree_copy import copy_tree

READER = """
import sys, zmq
sub = zmq.Context().socket(zmq.SUB)
sub.setsockopt(zmq.SUBSCRIBE, b"")
sub.connect(sys.argv[1])
print("there", flush=True)
while True:
    sub.recv_multipart()
"""


class Side:
    """One cache and what its requests cost."""

    def __init__(self, name: str, args: argparse.Namespace, events: bool, reader: bool) -> None:
        self.name = name
        self.tree = RadixTree(BlockPool(args.blocks), block_size=args.block_size)
        self.stream = (
            KVEventStream(self.tree, "tcp://127.0.0.1:*", replay_endpoint="tcp://127.0.0.1:*")
            if events
            else None
        )
        self.reader: subprocess.Popen[str] | None = None
        if reader and self.stream is not None:
            command = [sys.executable, "-c", READER, self.stream.endpoint]
            self.reader = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            assert self.reader.stdout is not None
            self.reader.stdout.readline()
        self.caller: list[float] = []
        self.all: list[float] = []

    def request(self, tokens: np.ndarray) -> None:
        tree = self.tree
        match = tree.match(tokens, max_tokens=len(tokens) - 1, partial=False)
        held = match.take()
        own = tree.allocate(-(-len(tokens) // tree.block_size) - len(held))
        result = tree.insert(tokens, np.concatenate((held, own)))
        tree.pool.release(result.blocks)

    def burst(self, requests: list[np.ndarray], pause: float, count: bool) -> None:
        begin, begin_all = time.thread_time(), time.process_time()
        for tokens in requests:
            self.request(tokens)
        mine = time.thread_time() - begin
        time.sleep(pause)
        if self.stream is not None:
            assert self.stream.flush(60)
        if count:
            self.caller.append(mine / len(requests) * 1e6)
            self.all.append((time.process_time() - begin_all) / len(requests) * 1e6)

    def close(self) -> None:
        if self.stream is not None:
            assert self.stream.num_dropped_batches == 0
            self.stream.close()
        if self.reader is not None:
            self.reader.kill()
            self.reader.wait()


def grow(context: int, num_blocks: int, events: bool, block_size: int = 16) -> dict[str, Any]:
    """A sequence of `context` tokens, all cached, that grows by a block at a time, as in decoding."""
    tree = RadixTree(BlockPool(context // block_size + num_blocks + 8), block_size=block_size)
    tokens = np.random.default_rng(0).integers(0, 100_000, context + num_blocks * block_size).astype(np.int64)
    blocks = tree.allocate(-(-context // block_size))
    tree.insert(tokens[:context], blocks)
    stream = KVEventStream(tree, "tcp://127.0.0.1:*") if events else None
    if stream is not None:
        assert stream.flush(60)
    costs = []
    begin_all = time.process_time()
    for i in range(1, num_blocks + 1):
        blocks = np.concatenate((blocks, tree.allocate(1)))
        begin = time.thread_time()
        tree.insert(tokens[: context + i * block_size], blocks)
        costs.append((time.thread_time() - begin) * 1e6)
    if stream is not None:
        assert stream.flush(60)
        assert stream.num_dropped_batches == 0
        stream.close()
    everything = (time.process_time() - begin_all) / num_blocks * 1e6
    return {"context": context, "events": events, "caller_us": statistics.median(costs), "all_us": everything}


def start(num_nodes: int, block_size: int = 16) -> dict[str, Any]:
    """The longest that a lookup takes while a stream starts on a cache of many small nodes."""
    tree = RadixTree(BlockPool(2 * num_nodes), block_size=block_size)
    rng = np.random.default_rng(0)
    stems = rng.integers(0, 100_000, (num_nodes // 300 + 1, block_size))
    for i in range(num_nodes - len(stems)):
        tokens = np.concatenate((stems[i % len(stems)], rng.integers(0, 100_000, block_size))).astype(
            np.int64
        )
        match = tree.match(tokens, partial=False)
        held = match.take()
        own = tree.allocate(2 - len(held))
        tree.pool.release(tree.insert(tokens, np.concatenate((held, own))).blocks)
    asked = np.concatenate((stems[0], stems[1])).astype(np.int64)

    def longest(seconds: float) -> float:
        worst, end = 0.0, time.perf_counter() + seconds
        while time.perf_counter() < end:
            begin = time.perf_counter()
            tree.match(asked).release()
            worst = max(worst, time.perf_counter() - begin)
        return worst * 1e3

    gc.collect()
    quiet = longest(1)
    with KVEventStream(tree, "tcp://127.0.0.1:*") as stream:
        starting = longest(3)
        assert stream.flush(60)
    begin = time.process_time()
    copy_tree(tree)
    cpu = (time.process_time() - begin) * 1e3
    return {"nodes": tree.num_nodes, "quiet_ms": quiet, "starting_ms": starting, "copy_cpu_ms": cpu}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--burst", type=int, default=20, help="requests between two pauses")
    parser.add_argument("--pause-ms", type=float, default=5.0)
    parser.add_argument("--shared", type=int, default=500, help="tokens that all requests share")
    parser.add_argument("--new", type=int, default=500, help="tokens of each request that are new")
    parser.add_argument("--blocks", type=int, default=5000)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--context", type=int, default=131_072, help="tokens of the context that grows")
    parser.add_argument("--nodes", type=int, default=100_000, help="of the cache on which a stream starts")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()

    rng = np.random.default_rng(0)
    system = rng.integers(0, 100_000, args.shared)
    sides = [
        Side("no events", args, events=False, reader=False),
        Side("events, nobody reads", args, events=True, reader=False),
        Side("events, one reader", args, events=True, reader=True),
    ]
    num_bursts = args.requests // args.burst
    for i in range(-num_bursts // 4, num_bursts):  # first until the pool is full
        requests = [
            np.concatenate((system, rng.integers(0, 100_000, args.new))).astype(np.int64)
            for _ in range(args.burst)
        ]
        for side in sides[i % 3 :] + sides[: i % 3]:
            side.burst(requests, args.pause_ms / 1000, count=i >= 0)
    rows: list[dict[str, Any]] = []
    print(f"{'':<22}{'caller, us a request':>22}{'all threads':>14}")
    for side in sides:
        caller, both = statistics.median(side.caller), statistics.median(side.all)
        rows.append({"name": side.name, "caller_us": round(caller, 1), "all_us": round(both, 1)})
        print(f"{side.name:<22}{caller:>22.1f}{both:>14.1f}")
        side.close()
    print(f"\n{'one more block, context of':<36}{'caller, us':>14}{'all threads':>14}")
    for context in (1024, args.context):
        for events in (False, True):
            row = grow(context, 300, events)
            rows.append(row)
            name = f"{context:,}, {'events' if events else 'no events'}"
            print(f"{name:<36}{row['caller_us']:>14.1f}{row['all_us']:>14.1f}")
    row = start(args.nodes)
    rows.append(row)
    print(
        f"\na stream starts on {row['nodes']:,} nodes: longest lookup {row['starting_ms']:.0f} ms "
        f"(before: {row['quiet_ms']:.0f} ms); copying them took {row['copy_cpu_ms']:.0f} ms of CPU"
    )
    if args.output is not None:
        header = {
            "python": platform.python_version(),
            "args": {k: v for k, v in vars(args).items() if k != "output"},
        }
        args.output.write_text(json.dumps({"header": header, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
