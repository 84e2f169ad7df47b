"""What publishing KV events costs, in CPU time a request: the tree with a stream, against the tree alone.

    python kv_events_cost.py --requests 3000

Each of three caches gets the same requests: a system prompt that all share, then tokens that are new, in a pool that is
always full, so that a request also evicts. "caller" is CPU time of the thread that serves the request; "all" is that of
the whole process, the thread of the publisher included. The reader is another process, on loopback. Requests come
in bursts with pauses, as they do where a model computes between them; `--pause-ms 0` leaves the pauses out.
"""

from __future__ import annotations

import argparse
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
            KVEventStream(self.tree, "tcp://127.0.0.1:*", replay_endpoint="tcp://127.0.0.1:*") if events else None
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
    if args.output is not None:
        header = {
            "python": platform.python_version(),
            "args": {k: v for k, v in vars(args).items() if k != "output"},
        }
        args.output.write_text(json.dumps({"header": header, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
