"""What the page "The radix tree" plays: `RadixTree` and `BlockPool`, driven over prompts and recorded.

`make()` is a script that puts the recording where the page finds it. Whatever comes again is stored once and named by
its number: words, texts, nodes, runs of block ids, states, whole runs.
"""

from __future__ import annotations

import json
from collections.abc import Hashable
from dataclasses import astuple, fields

from docs.tooling.scenes._tree_examples import ALL, BLOCK_SIZE, EXAMPLES
from docs.tooling.scenes._tree_run import Counters, Node, Run, State, Step

URI = "assets/interactive/tree-recording.js"
NAME = "window.radixkvTree"

POOLS = range(10, 20)  # from one that turns over again and again to one that nothing is evicted from
POLICIES = {"lru": "LRU", "fifo": "FIFO", "lfu": "LFU"}
ACTS = ("start", *ALL)


class _Table(dict[Hashable, int]):
    """Numbers things in the order in which they come."""

    def __missing__(self, key: Hashable) -> int:
        self[key] = len(self)
        return self[key]


def words() -> list[str]:
    """The vocabulary; a token is the number of a word."""
    table = _Table()
    for example in EXAMPLES.values():
        for prompt in example.prompts:
            for word in prompt.words + prompt.answer_words:
                table[word]
    return [str(word) for word in table]


def record() -> dict[tuple[str, int, str], list[Step]]:
    """All runs, by example, blocks of the pool, and policy."""
    vocabulary = words()
    return {
        (name, num_blocks, policy): Run(example, vocabulary, num_blocks, policy).steps
        for name, example in EXAMPLES.items()
        for num_blocks in POOLS
        for policy in POLICIES
    }


class _Packer:
    def __init__(self) -> None:
        self.texts, self.nodes, self.paths, self.states, self.steps, self.runs = (_Table() for _ in range(6))
        self._none = self.paths[()]

    def run(self, steps: list[Step]) -> int:
        packed, seen = [], -1
        for step in steps:
            state = self._state(step.state)
            # Typing changes nothing: such a step is the same in many runs, and says nothing of the state.
            packed.append(self.steps[self._step(step, () if state == seen else (state,))])
            seen = state
        return self.runs[tuple(packed)]

    def _step(self, step: Step, state: tuple[int, ...]) -> tuple[Hashable, ...]:
        packed = (
            ACTS.index(step.act),
            step.request,
            step.typed,
            step.hit,
            self.paths[step.path],
            self.texts[step.text],
            *state,
        )
        marks = tuple(self.paths[blocks] for blocks in (step.added, step.gone, step.split))
        return packed if marks == (self._none,) * 3 else (*packed, *marks)

    def _state(self, state: State) -> int:
        running = tuple((r.request, self.paths[r.table], r.computed, r.tail or ()) for r in state.running)
        nodes = tuple(self._node(node) for node in state.nodes)
        # A digit each: a block has few holders.
        assert max(state.refs) < 10
        refs = "".join(str(count) for count in state.refs)
        return self.states[nodes, refs, running, astuple(state.counters)]

    def _node(self, node: Node) -> int:
        *plain, blocks, used, hits = (getattr(node, f.name) for f in fields(node))
        return self.nodes[(*plain, self.paths[blocks], used, hits)]


def pack(recorded: dict[tuple[str, int, str], list[Step]]) -> dict[str, object]:
    """The recording as it is shipped."""
    numbers = {word: number for number, word in enumerate(words())}
    packer = _Packer()
    runs = {f"{name} {pool} {policy}": packer.run(steps) for (name, pool, policy), steps in recorded.items()}
    examples = {
        name: {
            "label": example.label,
            "prompts": [
                [[numbers[w] for w in prompt.words], [numbers[w] for w in prompt.answer_words]]
                for prompt in example.prompts
            ],
        }
        for name, example in EXAMPLES.items()
    }
    return {
        "blockSize": BLOCK_SIZE,
        "pools": [POOLS[0], POOLS[-1]],
        "policies": POLICIES,
        "acts": ACTS,
        "counters": [f.name for f in fields(Counters)],
        "words": list(numbers),
        "examples": examples,
        "which": runs,
        **{
            name: list(getattr(packer, name))
            for name in ("texts", "paths", "nodes", "states", "steps", "runs")
        },
    }


def make() -> str:
    """The script."""
    packed = json.dumps(pack(record()), ensure_ascii=False, separators=(",", ":"))
    return f"// Recorded from radixkv by docs/tooling/scenes/tree.py while the site was built.\n{NAME} = {packed};\n"
