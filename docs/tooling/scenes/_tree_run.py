"""Drives the pool and the tree over one example, and notes what there is to see after each step."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from docs.tooling.scenes import _tree_words as say
from docs.tooling.scenes._tree_examples import BLOCK_SIZE, Example
from radixkv import BlockPool, Match, RadixTree
from radixkv.core import TreeListener


@dataclass(frozen=True)
class Node:
    """A node as it is drawn. Parents stand before their children, and siblings in the order of their first request.

    Attributes:
        parent: Number of its parent in the list, -1 if that is the root.
        request: The first request with these tokens on its path.
        start: Tokens before the edge.
        end: Tokens before the end of the edge.
        blocks: Ids of its blocks.
        used: The request that used it last.
        hits: Requests that matched into it.
    """

    parent: int
    request: int
    start: int
    end: int
    blocks: tuple[int, ...]
    used: int
    hits: int


@dataclass(frozen=True)
class Running:
    """A request that holds blocks: its table, how many of its tokens have KV, and the tail that it has yet to copy."""

    request: int
    table: tuple[int, ...]
    computed: int
    tail: tuple[int, int] | None


@dataclass(frozen=True)
class Counters:
    """What the pool and the tree say of themselves, and sums over the requests so far."""

    nodes: int
    cached_tokens: int
    cached_blocks: int
    evictable: int
    pinned: int
    free: int
    hit_tokens: int
    computed_tokens: int
    evicted: int


@dataclass(frozen=True)
class State:
    """All that there is to see of pool and tree.

    Attributes:
        nodes: The tree.
        refs: References of each block of the pool.
        running: The requests that hold blocks.
        counters: The counters.
    """

    nodes: tuple[Node, ...]
    refs: tuple[int, ...]
    running: tuple[Running, ...]
    counters: Counters


@dataclass(frozen=True)
class Step:
    """One step.

    Attributes:
        act: What was done: one of `_tree_examples.ALL`, or "start".
        request: To which request; -1 at the start.
        typed: How many words of its prompt and answer are there.
        hit: How many leading words are cached: of what is typed so far, or as the request found when it was sent.
        path: The blocks that these are in.
        text: The event in words.
        state: What there is to see behind it.
        added: Blocks that are new in the tree.
        gone: Blocks that left the tree.
        split: Last block above a cut, and first one below it, if an edge was split.
    """

    act: str
    request: int
    typed: int
    hit: int
    path: tuple[int, ...]
    text: str
    state: State
    added: tuple[int, ...] = ()
    gone: tuple[int, ...] = ()
    split: tuple[int, ...] = ()


@dataclass
class _Request:
    prompt: list[str]
    answer: list[str]
    said: int = 0
    hit: int = 0
    computed: int = 0
    match: Match | None = None
    path: tuple[int, ...] = ()
    table: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))

    @property
    def words(self) -> list[str]:
        return self.prompt + self.answer[: self.said]


class _Ears(TreeListener):
    """Hears which blocks leave the tree, cut by cut."""

    def __init__(self) -> None:
        self.removed: list[tuple[int, ...]] = []

    def on_removed(self, blocks: Any) -> None:
        self.removed.append(tuple(blocks.tolist()))


class Run:
    """One example, with a pool of so many blocks and an eviction policy.

    Attributes:
        steps: What was seen, step by step.
    """

    def __init__(self, example: Example, words: Sequence[str], num_blocks: int, policy: str) -> None:
        self._ids = {word: number for number, word in enumerate(words)}
        self._words = words
        self._pool = BlockPool(num_blocks)
        self._tree = RadixTree(self._pool, BLOCK_SIZE, policy)
        # Ticks at each look: a real clock may tell two requests the same time.
        self._tree._clock = itertools.count().__next__
        self._ears = _Ears()
        self._tree.add_listener(self._ears)
        self._requests = [_Request(prompt.words, prompt.answer_words) for prompt in example.prompts]
        self._pasted = [prompt.pasted for prompt in example.prompts]
        self._used: dict[float, int] = {}  # when a node was used -> by which request
        self._hit = self._computed = 0
        self._state = self._look(-1)
        self.steps = [Step("start", -1, 0, 0, (), say.start(num_blocks, BLOCK_SIZE), self._state)]
        for act, number in example.acts():
            getattr(self, f"_{act}")(number)
        self._tree.check()

    # -- what is done ----------------------------------------------------------------------------------------

    def _type(self, number: int) -> None:
        prompt = self._requests[number].prompt
        for typed in range(max(1, self._pasted[number]), len(prompt) + 1):
            tokens = self._tokens(prompt[:typed])
            hit, path = find(self._state.nodes, self._sequences(), prompt[:typed])
            if hit != self._tree.match_length(tokens):
                raise AssertionError(f"{prompt[:typed]}: the tree finds other than {hit} tokens")
            pasted = typed if typed == self._pasted[number] else 0
            text = say.typed(prompt[typed - 1], pasted, hit, typed, *divmod(hit, BLOCK_SIZE))
            self.steps.append(Step("type", number, typed, hit, path, text, self._state))

    def _match(self, number: int) -> None:
        request = self._requests[number]
        tokens = self._tokens(request.prompt)
        # The last token is computed in any case: the model's answer to it is the next token.
        match = self._tree.match(tokens, max_tokens=len(tokens) - 1)
        whole = tuple(match.blocks.tolist())
        tail = match.tail
        request.match, request.hit, request.computed = match, match.num_tokens, match.num_tokens
        request.path = whole if tail is None else (*whole, tail.block)
        request.table = match.blocks
        self._hit += match.num_tokens
        num = len(tokens)
        limited = self._tree.match_length(tokens) > match.num_tokens
        text = say.matched(number, match.num_tokens, num, len(whole), tail, limited)
        self._note("match", number, text)

    def _allocate(self, number: int) -> None:
        request = self._requests[number]
        need = -(-len(request.prompt) // BLOCK_SIZE) - len(request.table)
        self._take(request, need, "allocate", number)

    def _take(self, request: _Request, need: int, act: str, number: int, lead: str = "") -> None:
        before, free = self._state, self._pool.num_free
        own = self._tree.allocate(need)
        request.table = np.concatenate((request.table, own))
        cuts: list[say.Cut] = []
        gone: set[int] = set()
        for blocks in self._ears.removed:
            cuts.append(self._cut(before, blocks, gone))
            gone |= set(blocks)
        left = [node for node in before.nodes if not gone.issuperset(node.blocks)]
        merged = self._tree.num_nodes < len(left)
        text = lead + say.allocated(number, free, own.tolist(), cuts, merged, self._tree.policy)
        self._note(act, number, text, gone=tuple(block for blocks in self._ears.removed for block in blocks))

    def _compute(self, number: int) -> None:
        request = self._requests[number]
        match = request.match
        assert match is not None
        num = len(request.prompt) - match.num_tokens
        self._computed += num
        request.computed = len(request.prompt)
        copied = None if match.tail is None else (match.tail, int(request.table[len(match.blocks)]))
        match.take()  # the tail was copied, and the blocks are the request's
        request.match = None
        self._note("compute", number, say.computed(number, num, copied))

    def _insert(self, number: int) -> None:
        self._store(number, "insert")

    def _answer(self, number: int) -> None:
        request = self._requests[number]
        request.said = len(request.answer)
        # What was said last has no KV yet: the next step of the model would compute it.
        request.computed = len(request.words) - 1
        lead = say.answered(number, request.answer)
        need = -(-request.computed // BLOCK_SIZE) - len(request.table)
        if need:
            self._take(request, need, "answer", number, lead)
        else:
            self._note("answer", number, f"{lead}They fit into its last block.")

    def _keep(self, number: int) -> None:
        self._store(number, "keep")

    def _store(self, number: int, act: str) -> None:
        request = self._requests[number]
        before = self._state
        result = self._tree.insert(self._tokens(request.words[: request.computed]), request.table)
        duplicates = tuple(
            (old, new)
            for old, new in zip(request.table.tolist(), result.blocks.tolist(), strict=True)
            if old != new
        )
        request.table = result.blocks
        request.path = request.path and tuple(result.blocks.tolist()[: len(request.path)])
        gone = tuple(block for blocks in self._ears.removed for block in blocks)
        after = self._look(number)
        known = {block for node in before.nodes for block in node.blocks}
        added = tuple(b for node in after.nodes for b in node.blocks if b not in known)
        split = _split(before, after)
        text = say.stored(number, act, before, after, result, duplicates, added, gone, split)
        self._note(act, number, text, added=added, gone=gone, split=split[1] if split else ())

    def _release(self, number: int) -> None:
        request = self._requests[number]
        self._pool.release(request.table)
        request.table = request.table[:0]
        held = sum(count > 1 for count in self._state.refs)
        self._note("release", number, lambda: say.released(number, held - self._tree.num_pinned_blocks))

    # -- what is seen ----------------------------------------------------------------------------------------

    def _tokens(self, words: Sequence[str]) -> list[int]:
        return [self._ids[word] for word in words]

    def _sequences(self) -> list[list[str]]:
        return [request.prompt + request.answer for request in self._requests]

    def _note(self, act: str, number: int, text: Any, **more: Any) -> None:
        self._tree.check()
        self._ears.removed.clear()
        self._state = self._look(number)
        request = self._requests[number]
        typed = len(request.words)
        said = text() if callable(text) else text
        self.steps.append(Step(act, number, typed, request.hit, request.path, said, self._state, **more))

    def _cut(self, before: State, blocks: tuple[int, ...], gone: set[int]) -> say.Cut:
        """Words of the evicted blocks of a leaf, how many these are, and how many were left of it until then."""
        # More than one node if the upper was left with one child while this eviction went on: the two became one.
        hit = [
            node
            for node in before.nodes
            if not gone.issuperset(node.blocks) and set(blocks) & set(node.blocks)
        ]
        first, last = hit[0], hit[-1]
        at = first.start + first.blocks.index(blocks[0]) * BLOCK_SIZE
        end = min(last.end, at + len(blocks) * BLOCK_SIZE)
        had = sum(len(set(node.blocks) - gone) for node in hit)
        return self._sequences()[last.request][at:end], len(blocks), had

    def _look(self, number: int) -> State:
        tree, pool = self._tree, self._pool
        counters = Counters(
            nodes=tree.num_nodes,
            cached_tokens=tree.num_cached_tokens,
            cached_blocks=tree.num_cached_blocks,
            evictable=tree.num_evictable_blocks,
            pinned=tree.num_pinned_blocks,
            free=pool.num_free,
            hit_tokens=self._hit,
            computed_tokens=self._computed,
            evicted=tree.num_evicted_blocks_total,
        )
        running = tuple(
            Running(
                n,
                tuple(request.table.tolist()),
                request.computed,
                None if request.match is None or request.match.tail is None else tuple(request.match.tail),
            )
            for n, request in enumerate(self._requests)
            if len(request.table) or request.match is not None
        )
        return State(self._nodes(number), tuple(pool.refcounts.tolist()), running, counters)

    def _nodes(self, number: int) -> tuple[Node, ...]:
        infos = list(self._tree.nodes())
        paths: list[list[str]] = []
        for info in infos:
            above = paths[info.parent] if info.parent >= 0 else []
            paths.append([*above, *(self._words[token] for token in info.tokens)])
            self._used.setdefault(info.used_at, number)
        sequences = self._sequences()

        def first(path: list[str]) -> int:
            return next(n for n, seq in enumerate(sequences) if seq[: len(path)] == path)

        order: list[tuple[int, int]] = []  # its number in the tree's own list, and that of its parent in ours

        def walk(parent: int, at: int) -> None:
            for i in sorted(
                (i for i, info in enumerate(infos) if info.parent == parent), key=lambda i: first(paths[i])
            ):
                order.append((i, at))
                walk(i, len(order) - 1)

        walk(-1, -1)
        return tuple(
            Node(
                parent=at,
                request=first(paths[i]),
                start=infos[i].start,
                end=len(paths[i]),
                blocks=tuple(infos[i].blocks.tolist()),
                used=self._used[infos[i].used_at],
                hits=infos[i].num_hits,
            )
            for i, at in order
        )


def find(
    nodes: Sequence[Node], sequences: Sequence[Sequence[str]], words: Sequence[str]
) -> tuple[int, tuple[int, ...]]:
    """What a match of these words finds in a tree that was noted: how many of them, and the blocks.

    The tree itself says how many, `match_length`, without changing anything; this says where.
    """
    path: list[int] = []
    at, parent = 0, -1
    while True:
        best, common, key = None, 0, None
        for i, node in enumerate(nodes):
            if node.parent != parent:
                continue
            edge = sequences[node.request][node.start : node.end]
            same = _common(edge, words[at:])
            if same > common or (same and same == common and edge[same:] < key):
                best, common, key = i, same, edge[same:]
        if best is None:
            return at, tuple(path)
        node = nodes[best]
        path += node.blocks[: -(-common // BLOCK_SIZE)]
        at += common
        if at < node.end or at == len(words):
            return at, tuple(path)
        parent = best


def _common(a: Sequence[str], b: Sequence[str]) -> int:
    size = min(len(a), len(b))
    return next((i for i in range(size) if a[i] != b[i]), size)


def _split(before: State, after: State) -> tuple[int, tuple[int, int]] | None:
    """If a node was split: how many blocks it had, and the blocks on both sides of the cut."""
    old = {node.blocks[0]: node for node in before.nodes}
    for node in after.nodes:
        was = old.get(node.blocks[0])
        if was is not None and node.end < was.end and len(node.blocks) < len(was.blocks):
            return len(was.blocks), (node.blocks[-1], was.blocks[len(node.blocks)])
    return None
