"""What the page "The radix tree" plays is what the library does: done again here, by other code, and compared."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from docs.tooling.scenes import tree as scene
from docs.tooling.scenes._tree_examples import EXAMPLES
from radixkv import BlockPool, Match, RadixTree

PAGE = Path(__file__).parents[2] / "docs" / "interactive" / "tree.md"
SIZE = 4
COUNTERS = {
    "nodes": "num_nodes",
    "cached_tokens": "num_cached_tokens",
    "cached_blocks": "num_cached_blocks",
    "evictable": "num_evictable_blocks",
    "pinned": "num_pinned_blocks",
    "evicted": "num_evicted_blocks_total",
}
Key = tuple[str, int, str]
Step = dict[str, Any]
RUNS: list[Key] = [
    (name, pool, policy) for name in EXAMPLES for pool in scene.POOLS for policy in scene.POLICIES
]


@pytest.fixture(scope="module")
def script() -> str:
    return scene.make()


@pytest.fixture(scope="module")
def shipped(script: str) -> dict[Key, list[Step]]:
    """The script as the page reads it, unpacked."""
    packed = json.loads(script.partition(f"{scene.NAME} = ")[2].rstrip().removesuffix(";"))
    paths, words = packed["paths"], packed["words"]

    def sequence(example: str, request: int) -> list[str]:
        prompt, answer = packed["examples"][example]["prompts"][request]
        return [words[i] for i in prompt + answer]

    def state_of(example: str, number: int) -> Step:
        nodes, refs, running, counters = packed["states"][number]
        tree = []
        for i in nodes:
            parent, request, start, end, blocks, used, hits = packed["nodes"][i]
            path = tuple(sequence(example, request)[:end])
            tree.append(
                dict(parent=parent, path=path, start=start, blocks=paths[blocks], used=used, hits=hits)
            )
        return {
            "tree": tree,
            "refs": [int(digit) for digit in refs],
            "running": {request: (paths[table], done, tail) for request, table, done, tail in running},
            "counters": dict(zip(packed["counters"], counters, strict=True)),
        }

    def unpack(example: str, run: int) -> list[Step]:
        steps, state = [], None
        for number in packed["runs"][run]:
            act, request, typed, hit, path, text, *more = packed["steps"][number]
            marks = [paths[i] for i in more[-3:]] if len(more) >= 3 else [[], [], []]
            if len(more) in (1, 4):
                state = state_of(example, more[0])
            steps.append(
                dict(
                    act=packed["acts"][act],
                    request=request,
                    typed=typed,
                    hit=hit,
                    path=paths[path],
                    text=packed["texts"][text],
                    words=sequence(example, request) if request >= 0 else [],
                    state=state,
                    **dict(zip(("added", "gone", "split"), marks, strict=True)),
                )
            )
        return steps

    out = {}
    for key, run in packed["which"].items():
        name, pool, policy = key.rsplit(" ", 2)
        out[name, int(pool), policy] = unpack(name, run)
    return out


def paths_of(step: Step) -> list[tuple[str, ...]]:
    return [node["path"] for node in step["state"]["tree"]]


def common(a: Any, b: Any) -> int:
    size = min(len(a), len(b))
    return next((i for i in range(size) if a[i] != b[i]), size)


def longest(stored: Any, words: Any) -> int:
    return max((common(path, words) for path in stored), default=0)


def test_every_run_is_shipped_in_little_space(script: str, shipped: dict[Key, list[Step]]) -> None:
    assert list(shipped) == RUNS
    assert len(script.encode()) < 400_000


# -- the library, asked again ----------------------------------------------------------------------------------------


class Again:
    """The acts of an example on a fresh tree, and what it looks like after each."""

    def __init__(self, key: Key) -> None:
        name, num_blocks, policy = key
        self.example = EXAMPLES[name]
        self.pool = BlockPool(num_blocks)
        self.tree = RadixTree(self.pool, SIZE, policy)
        self.ids = {word: number for number, word in enumerate(scene.words())}
        self.matches: dict[int, Match] = {}
        self.tables: dict[int, list[int]] = {}
        self.hit = self.computed = 0

    def tokens(self, words: list[str]) -> list[int]:
        return [self.ids[word] for word in words]

    def seen(self) -> Step:
        tree, infos, paths = [], list(self.tree.nodes()), []
        words = list(self.ids)
        for info in infos:
            above = paths[info.parent] if info.parent >= 0 else ()
            paths.append((*above, *(words[token] for token in info.tokens)))
            tree.append((paths[-1], info.start, info.blocks.tolist(), info.num_hits))
        counters = {name: getattr(self.tree, of) for name, of in COUNTERS.items()}
        counters |= {"free": self.pool.num_free, "hit_tokens": self.hit, "computed_tokens": self.computed}
        return {"tree": sorted(tree), "refs": self.pool.refcounts.tolist(), "counters": counters}

    def steps(self) -> list[tuple[str, int, int | None, Step]]:
        """Act, request, hit tokens that the tree reports at this step if it does, and what it looks like."""
        out: list[tuple[str, int, int | None, Step]] = [("start", -1, 0, self.seen())]
        for act, n in self.example.acts():
            prompt = self.example.prompts[n]
            words, answer = prompt.words, prompt.answer_words
            hit = None
            if act == "type":
                for typed in range(prompt.pasted or 1, len(words) + 1):
                    found = self.tree.match_length(self.tokens(words[:typed]))
                    out.append((act, n, found, self.seen()))
                continue
            if act == "match":
                self.matches[n] = self.tree.match(self.tokens(words), max_tokens=len(words) - 1)
                hit = self.matches[n].num_tokens
                self.hit += hit
            elif act == "allocate":
                held = self.matches[n].blocks.tolist()
                need = math.ceil(len(words) / SIZE) - len(held)
                self.tables[n] = held + self.tree.allocate(need).tolist()
            elif act == "compute":
                self.computed += len(words) - self.matches[n].num_tokens
                self.matches.pop(n).take()
            elif act == "answer":
                need = math.ceil((len(words) + len(answer) - 1) / SIZE) - len(self.tables[n])
                self.tables[n] += self.tree.allocate(need).tolist()
            elif act in ("insert", "keep"):
                stored = words if act == "insert" else words + answer[:-1]
                self.tables[n] = self.tree.insert(self.tokens(stored), self.tables[n]).blocks.tolist()
            else:
                assert act == "release"
                self.pool.release(self.tables.pop(n))
            self.tree.check()
            out.append((act, n, hit, self.seen()))
        return out


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_library_does_again_what_is_shipped(shipped: dict[Key, list[Step]], name: str) -> None:
    for key in RUNS:
        if key[0] != name:
            continue
        again = Again(key).steps()
        assert len(again) == len(shipped[key])
        for number, ((act, request, hit, seen), step) in enumerate(zip(again, shipped[key], strict=True)):
            where = f"{key} step {number}"
            assert (step["act"], step["request"]) == (act, request), where
            if hit is not None:
                assert step["hit"] == hit, where
            state = step["state"]
            tree = sorted(
                (node["path"], node["start"], node["blocks"], node["hits"]) for node in state["tree"]
            )
            assert {**state, "tree": tree} == {**seen, "running": state["running"]}, where


# -- what is found, by brute force -----------------------------------------------------------------------------------


@pytest.mark.parametrize("key", RUNS, ids=lambda key: "-".join(map(str, key)))
def test_what_is_found_is_the_longest_prefix_of_what_is_stored(
    shipped: dict[Key, list[Step]], key: Key
) -> None:
    before = None
    for step in shipped[key]:
        words = step["words"][: step["typed"]]
        if step["act"] == "type":
            assert step["hit"] == longest(paths_of(step), words)
        elif step["act"] == "match":
            assert step["hit"] == min(longest(paths_of(before), words), len(words) - 1)
        if step["act"] in ("type", "match"):
            # The blocks named hold these words, one after the other.
            held = {}
            for node in step["state"]["tree"]:
                for i, block in enumerate(node["blocks"]):
                    at = node["start"] + i * SIZE
                    held[block] = node["path"][: at + SIZE]
            assert len(step["path"]) == math.ceil(step["hit"] / SIZE)
            for i, block in enumerate(step["path"]):
                rows = min(step["hit"], (i + 1) * SIZE)
                assert list(held[block][:rows]) == words[:rows]
        before = step


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.parametrize("policy", scene.POLICIES)
def test_where_nothing_is_evicted_all_that_was_sent_is_found(
    shipped: dict[Key, list[Step]], name: str, policy: str
) -> None:
    sent: list[list[str]] = []
    for step in shipped[name, scene.POOLS[-1], policy]:
        assert step["state"]["counters"]["evicted"] == 0
        words = step["words"][: step["typed"]]
        if step["act"] == "type":
            assert step["hit"] == longest(sent, words)
        elif step["act"] == "match":
            assert step["hit"] == min(longest(sent, words), len(words) - 1)
        elif step["act"] == "insert":
            sent.append(words)
        elif step["act"] == "keep":
            sent.append(words[:-1])
        assert longest(paths_of(step), max(sent, key=len, default=[])) == max(map(len, sent), default=0)


# -- the states ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", RUNS, ids=lambda key: "-".join(map(str, key)))
def test_every_state_adds_up(shipped: dict[Key, list[Step]], key: Key) -> None:
    before = None
    for step in shipped[key]:
        state = step["state"]
        counters, refs, tree = state["counters"], state["refs"], state["tree"]
        cached = [block for node in tree for block in node["blocks"]]
        assert len(set(cached)) == len(cached) == counters["cached_blocks"]
        assert counters["evictable"] == sum(refs[block] == 1 for block in cached)
        assert counters["pinned"] + counters["evictable"] == counters["cached_blocks"]
        assert counters["free"] == refs.count(0)
        held = [0] * key[1]
        for table, _, tail in state["running"].values():
            for block in table + tail[:1]:
                held[block] += 1
        assert refs == [held[block] + (block in cached) for block in range(key[1])]
        for node in tree:
            above = tree[node["parent"]] if node["parent"] >= 0 else None
            assert node["start"] == (len(above["path"]) if above else 0)
            assert node["start"] % SIZE == 0
            assert len(node["blocks"]) == math.ceil((len(node["path"]) - node["start"]) / SIZE)
            if above:
                assert node["path"][: node["start"]] == above["path"]
        assert counters["cached_tokens"] == sum(len(node["path"]) - node["start"] for node in tree)
        if before:
            known = {block for node in before["state"]["tree"] for block in node["blocks"]}
            assert set(step["gone"]) == known - set(cached)
            assert set(step["added"]) == set(cached) - known
            evicted = counters["evicted"] - before["state"]["counters"]["evicted"]
            if step["act"] in ("insert", "keep"):
                assert evicted == 0
            else:
                assert evicted == len(step["gone"])
        before = step
    assert max(before["state"]["refs"]) == 1  # all was released
    sent = sum(len(prompt.words) for prompt in EXAMPLES[key[0]].prompts)
    end = before["state"]["counters"]
    assert end["hit_tokens"] + end["computed_tokens"] == sent


@pytest.mark.parametrize("key", RUNS, ids=lambda key: "-".join(map(str, key)))
def test_a_node_names_the_request_that_used_it_last(shipped: dict[Key, list[Step]], key: Key) -> None:
    for step in shipped[key]:
        tree = step["state"]["tree"]
        if step["act"] == "match":
            assert all(
                node["used"] == step["request"]
                for node in tree
                if not set(step["path"]).isdisjoint(node["blocks"])
            )
        elif step["act"] in ("insert", "keep"):
            table, num, _ = step["state"]["running"][step["request"]]
            assert num
            assert [node["used"] for node in tree if table[-1] in node["blocks"]] == [step["request"]]


def test_the_examples_show_what_there_is_to_see(shipped: dict[Key, list[Step]]) -> None:
    for name in EXAMPLES:
        for policy in scene.POLICIES:
            assert shipped[name, scene.POOLS[0], policy][-1]["state"]["counters"]["evicted"] >= 5
            assert any(step["split"] for step in shipped[name, scene.POOLS[-1], policy])
    said = "\n".join(step["text"] for steps in shipped.values() for step in steps)
    for words in (
        "Edge of 4 blocks split after 3",
        "copy-on-write",
        "freed as a duplicate",
        "took the place of its tail",
        "filled further",
        "The last token is always computed",
        "A node was left with one child",
        "the next one",
    ):
        assert words in said
    hits = {
        policy: shipped["few-shot", 13, policy][-1]["state"]["counters"]["hit_tokens"]
        for policy in scene.POLICIES
    }
    assert len(set(hits.values())) == len(hits)


def test_the_words_give_the_numbers(shipped: dict[Key, list[Step]]) -> None:
    for key, steps in shipped.items():
        before = steps[0]
        for step in steps:
            text, num = step["text"], len(step["words"][: step["typed"]])
            if step["act"] == "type" and step["hit"] < num:
                found = re.search(r"the first (\d+) of (\d+) token", text)
                assert (found and tuple(map(int, found.groups()))) == (
                    (step["hit"], num) if step["hit"] else None
                ), text
            if found := re.search(r"The first (\d+) of (\d+) tokens were cached: (\d+) to compute", text):
                assert tuple(map(int, found.groups())) == (step["hit"], num, num - step["hit"])
            if found := re.search(r"evicted (\d+) block", text):
                assert int(found[1]) == len(step["gone"])
            if found := re.search(r"Edge of (\d+) blocks split after (\d+)", text):
                above, below = step["split"]
                was = next(n for n in before["state"]["tree"] if above in n["blocks"])
                assert len(was["blocks"]) == int(found[1])
                assert was["blocks"].index(below) == int(found[2])
            else:
                assert not step["split"], (key, text)
            before = step


# -- what the page says of them --------------------------------------------------------------------------------------


def test_the_page_links_to_the_moments_that_it_names(shipped: dict[Key, list[Step]]) -> None:
    links = re.findall(
        r"#example=([\w-]+)&amp;pool=(\d+)&amp;policy=(\w+)&amp;step=(\d+)\">([^<]*)<", PAGE.read_text()
    )
    steps = {text: shipped[name, int(pool), policy][int(step)] for name, pool, policy, step, text in links}
    assert steps["An edge is split"]["split"]
    assert steps["Three leaves are evicted"]["act"] == "allocate"
    assert len(steps["Three leaves are evicted"]["gone"]) == 3
    chat = steps["A chat goes on where it was left"]
    assert chat["act"] == "match"
    assert chat["hit"] >= 16
    assert "duplicate" in steps["A block that two requests have computed"]["text"]
    assert len(links) == 4


def test_the_page_gives_the_hits_of_the_policies(shipped: dict[Key, list[Step]]) -> None:
    text = " ".join(PAGE.read_text().split())
    given = re.search(
        r"\*Few-shot\* with (\d+) blocks: (\d+) with LRU, (\d+) with FIFO, (\d+) with LFU", text
    )
    assert given is not None
    pool, *hits = map(int, given.groups())
    assert hits == [
        shipped["few-shot", pool, policy][-1]["state"]["counters"]["hit_tokens"] for policy in scene.POLICIES
    ]
