"""How long a view of a large tree takes, and how long it keeps requests waiting.

    python benchmarks/tree_view.py [--nodes 100000] [--rounds 5]

The tree is made of system prompts, documents below them and questions below those. The totals are checked against
the tree's own counters. CPU time of this thread, the best of some rounds: other processes do not count.
"""

from __future__ import annotations

import argparse
import platform
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
from common import commit

from radixkv.cache.tree_view import ViewOptions, make_view, take_snapshot, tree_view
from radixkv.core import BlockPool, RadixTree

BLOCK = 16


def store(tree: RadixTree, tokens: np.ndarray) -> None:
    match = tree.match(tokens, partial=False)
    own = tree.allocate(-(-len(tokens) // BLOCK) - len(match.blocks))
    tree.pool.release(tree.insert(tokens, np.concatenate((match.take(), own))).blocks)


def filled(num_nodes: int) -> RadixTree:
    """One node in a thousand is a system prompt, one in a hundred a document, the rest are questions."""
    tree = RadixTree(BlockPool(num_nodes * 8), BLOCK)
    rng = np.random.default_rng(0)
    while tree.num_nodes < num_nodes:
        system = rng.integers(0, 128_000, 16 * BLOCK)
        for _ in range(10):
            document = np.concatenate((system, rng.integers(0, 128_000, 64 * BLOCK)))
            for _ in range(min(99, num_nodes - tree.num_nodes)):
                store(tree, np.concatenate((document, rng.integers(0, 128_000, int(rng.integers(17, 96))))))
    return tree


def best(work: Callable[[], Any], rounds: int) -> tuple[float, Any]:
    times = []
    for _ in range(rounds):
        begin = time.thread_time()
        result = work()
        times.append(time.thread_time() - begin)
    return min(times), result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    tree = filled(args.nodes)
    print(
        f"commit {commit()}, Python {platform.python_version()}, numpy {np.__version__}, {tree}, "
        f"{tree.num_cached_tokens:,} tokens"
    )

    rows: list[tuple[str, float, str]] = []
    seconds, snapshot = best(lambda: take_snapshot(tree), args.rounds)
    rows.append(("copy of the tree, under its lock", seconds, ""))
    for name, options in (
        ("100 lines", ViewOptions()),
        ("1,000 lines, with text", ViewOptions(max_nodes=1000, tokenizer=lambda ids: str(ids))),
        ("all lines", ViewOptions(max_nodes=2 * args.nodes)),
    ):
        seconds, view = best(lambda options=options: make_view(snapshot, options), args.rounds)
        own = [sum(getattr(line.own, part) for line in view.lines) for part in ("nodes", "blocks", "tokens")]
        assert own == [tree.num_nodes, tree.num_cached_blocks, tree.num_cached_tokens]
        rows.append((f"view of the copy: {name}", seconds, f"{len(view.lines):,} lines"))
        for kind, write in (("text", view.to_text), ("html", view.to_html), ("svg", view.to_svg)):
            seconds, text = best(write, 2)
            rows.append((f"  as {kind}", seconds, f"{len(text) / 2**20:.2f} MiB"))
    del view, text
    tracemalloc.start()
    tree_view(tree)
    rows.append(("most memory meanwhile", 0.0, f"{tracemalloc.get_traced_memory()[1] / 2**20:.0f} MiB"))
    for name, seconds, note in rows:
        print(f"{name:<42} {f'{seconds * 1000:10,.0f} ms' if seconds else '':>13}  {note}")


if __name__ == "__main__":
    main()
