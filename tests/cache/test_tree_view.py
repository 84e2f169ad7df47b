"""tree_view: what it shows is what the tree holds, whatever is left out of sight."""

from __future__ import annotations

import sys
import threading
import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixkv import BlockPool, RadixTree, TreeView, errors, tree_view
from radixkv.cache.tree_view import Sums, ViewOptions, make_view, take_snapshot
from radixkv.core.tree_copy import copy_tree

SPACES = [b"", "tenant", ("lora", "x")]


def store(tree: RadixTree, tokens: Any, namespace: Any = b"") -> None:
    """Cache a prompt, as a request does."""
    array = np.asarray(tokens, np.int64)
    match = tree.match(array, namespace, partial=False)
    held = match.take()
    own = tree.allocate(-(-len(array) // tree.block_size) - len(held))
    tree.pool.release(tree.insert(array, np.concatenate((held, own)), namespace).blocks)


def total(tree: RadixTree) -> Sums:
    return Sums(tree.num_nodes, tree.num_cached_blocks, tree.num_cached_tokens, tree.num_pinned_blocks)


def added(parts: Any) -> Sums:
    return sum(parts, Sums())


@st.composite
def trees(draw: Any) -> RadixTree:
    """Prompts of few different tokens, so that they share much; some held, some evicted again."""
    tree = RadixTree(BlockPool(400), draw(st.sampled_from([1, 2, 3, 4])))
    prompts = draw(
        st.lists(
            st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=24), st.sampled_from(SPACES)),
            max_size=12,
        )
    )
    for tokens, namespace in prompts:
        store(tree, tokens, namespace)
    held = [tree.match(tokens, namespace) for tokens, namespace in draw(st.permutations(prompts))[:3]]
    for match in held[: draw(st.integers(0, 3))]:
        match.release()
    tree.evict(draw(st.integers(0, 10)))
    return tree


OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "sort": st.sampled_from(["tokens", "hits", "recency"]),
        "max_nodes": st.integers(1, 12),
        "max_depth": st.none() | st.integers(0, 3),
        "min_blocks": st.integers(0, 5),
        "collapse": st.booleans(),
        "namespace": st.none() | st.sampled_from(SPACES),
    },
)


@given(tree=trees(), options=OPTIONS)
def test_all_lines_add_up_to_the_counters_of_the_tree(tree: RadixTree, options: dict) -> None:
    view = tree_view(tree, **options)
    assert (view.totals.nodes, view.totals.blocks, view.totals.tokens, view.totals.pinned_blocks) == (
        tree.num_nodes,
        tree.num_cached_blocks,
        tree.num_cached_tokens,
        tree.num_pinned_blocks,
    )
    assert (view.totals.pool_blocks, view.totals.free_blocks) == (400, tree.pool.num_free)
    assert added(line.own for line in view.lines) == view.matching
    if options.get("namespace") is None:
        assert view.matching == total(tree)
    assert sum(line.kind != "rest" for line in view.lines) <= options.get("max_nodes", 100)
    for line in view.lines:
        below = [other for other in view.lines if other.parent == line.id]
        assert line.own + added(other.subtree for other in below) == line.subtree
        assert [other.last for other in below] == [False] * (len(below) - 1) + [True] * bool(below)
        if line.parent is not None:
            assert view.lines[line.parent].depth == line.depth - 1
            assert line.parent < line.id
        if line.kind != "rest":
            assert line.subtree.blocks >= options.get("min_blocks", 0)
            assert line.depth <= (options.get("max_depth") or 1000) or options.get("max_depth") is None


@given(tree=trees(), collapse=st.booleans())
def test_a_whole_view_names_each_cached_block_once_and_the_tokens_that_lead_to_it(
    tree: RadixTree, collapse: bool
) -> None:
    view = tree_view(tree, max_nodes=10_000, collapse=collapse, block_ids=True, token_ids=True)
    shown = [line for line in view.lines if line.kind == "nodes"]
    assert not any(line.kind == "rest" for line in view.lines)
    assert sorted(b for line in shown for b in line.block_ids) == sorted(
        b for node in tree.nodes() for b in node.blocks.tolist()
    )
    canonical = {'"tenant"': "tenant", '("lora", "x")': ("lora", "x"), "default": b""}
    for line in shown:
        path: tuple[int, ...] = ()
        up: Any = line
        while up.kind == "nodes":
            path = up.token_ids + path
            up = view.lines[up.parent]
        assert line.start == len(path) - len(line.token_ids)
        assert tree.match_length(path, canonical[line.namespace]) == len(path)
        users = [tree.pool.refcount(block) - 1 for block in line.block_ids]
        assert line.references == max(users)
        assert line.own.pinned_blocks == sum(number > 0 for number in users)
    if not collapse:
        assert len(shown) == tree.num_nodes
    branches = {line.parent for line in shown}
    for line in shown:
        only = sum(other.parent == line.id for other in shown) == 1
        assert not (collapse and line.id in branches and only), "a chain was not collapsed"


@given(tree=trees())
def test_the_copy_is_what_nodes_gives(tree: RadixTree) -> None:
    copy = copy_tree(tree)
    found = sorted(
        (copy.namespaces[i], copy.starts[i], copy.tokens_of(i).tolist(), copy.blocks_of(i).tolist())
        for i in range(len(copy))
    )
    wanted = list(tree.nodes())
    assert found == sorted((n.namespace, n.start, n.tokens.tolist(), n.blocks.tolist()) for n in wanted)
    by_block = {n.blocks.item(0): n for n in wanted}
    for i, parent in enumerate(copy.parents):
        node = by_block[copy.blocks_of(i).item(0)]
        above = wanted[node.parent].blocks.tolist() if node.parent >= 0 else None
        assert (copy.blocks_of(parent).tolist() if parent >= 0 else None) == above
        assert parent < i
        assert copy.num_children[i] == node.num_children
        assert (copy.num_hits[i], copy.used_at[i]) == (node.num_hits, node.used_at)
        assert copy.references[copy.blocks_of(i)].tolist() == node.references.tolist()


@given(tree=trees(), options=OPTIONS)
@settings(max_examples=15)
def test_the_same_tree_gives_the_same_view(tree: RadixTree, options: dict) -> None:
    snapshot = take_snapshot(tree)
    first, second = (make_view(snapshot, ViewOptions(**options)) for _ in range(2))
    assert first == second
    assert str(first) == str(second)


def test_the_order_in_which_prompts_came_does_not_show() -> None:
    system, texts = list(range(8)), []
    for order in ([3, 1, 2, 0], [0, 1, 2, 3]):
        tree = RadixTree(BlockPool(100), 4)
        for question in order:
            store(tree, [*system, 100 + question, 1, 2, 3])
            store(tree, [*system, 100 + question, 1, 2, 3], ("salt", str(question)))
        texts.append([line.label for line in tree_view(tree).lines])
    assert texts[0] == texts[1]
    assert texts[0][:6] == [
        "default namespace",
        "[0, 1, 2, 3, 4, 5, 6, 7]",
        "[100, 1, 2, 3]",
        "[101, 1, 2, 3]",
        "[102, 1, 2, 3]",
        "[103, 1, 2, 3]",
    ]


def made() -> RadixTree:
    """Two questions below one system prompt, and something else that is larger."""
    tree = RadixTree(BlockPool(64), 4)
    store(tree, [*range(8), 10, 11])
    store(tree, [*range(8), 20, 21, 22, 23])
    store(tree, [*range(50, 73)])
    return tree


def labels(view: TreeView) -> list[str]:
    return [line.label for line in view.lines if line.kind == "nodes"]


def test_largest_first_most_asked_first_last_used_first() -> None:
    tree = made()
    assert labels(tree_view(tree))[0].startswith("[50, 51")
    for _ in range(3):
        tree.match([*range(8), 10, 11]).release()
    assert labels(tree_view(tree, sort="hits"))[:2] == ["[0, 1, 2, 3, 4, 5, 6, 7]", "[10, 11]"]
    tree.match([*range(8), 20, 21, 22, 23]).release()
    assert labels(tree_view(tree, sort="recency"))[:2] == ["[0, 1, 2, 3, 4, 5, 6, 7]", "[20, 21, 22, 23]"]


def test_what_is_not_shown_is_summed_up() -> None:
    tree = made()
    view = tree_view(tree, max_nodes=3)
    assert [line.label for line in view.lines if line.kind == "rest"] == ["… 2 more nodes, 2 blocks"]
    view = tree_view(tree, max_depth=0)
    assert [line.label for line in view.lines] == ["default namespace", "… 4 more nodes, 10 blocks"]
    view = tree_view(tree, min_blocks=2)
    assert [line.kind for line in view.lines] == ["namespace", "nodes", "nodes", "rest"]
    for number in range(5):
        store(tree, [1, 2, 3, 4], f"tenant {number}")
    view = tree_view(tree, max_nodes=2)
    assert view.lines[-1].label == "… 5 more namespaces, 5 nodes, 5 blocks"
    assert (view.totals.namespaces, view.lines[-1].depth, view.lines[-1].parent) == (6, 0, None)


def test_references_hits_and_age(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = made()
    with tree.match([*range(8), 10, 11]), tree.match(range(6)):
        lines = {line.label: line for line in tree_view(tree).lines}
    top, leaf = lines["[0, 1, 2, 3, 4, 5, 6, 7]"], lines["[10, 11]"]
    assert (top.references, top.own.pinned_blocks, top.hits) == (2, 2, 3)
    # The second prompt hit the edge before it was split there, and both parts keep that.
    assert (leaf.references, leaf.own.pinned_blocks, leaf.hits) == (1, 1, 2)
    assert 0 <= leaf.age_s < 60
    import time

    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 7200)
    assert [line.age_s > 7000 for line in tree_view(tree).lines if line.kind == "nodes"] == [True] * 4
    assert " 2 h  " in str(tree_view(tree))


def test_an_empty_tree() -> None:
    tree = RadixTree(BlockPool(4), 16)
    view = tree_view(tree)
    assert str(view) == "Radix tree: 0 nodes, 0 tokens in 0 blocks of 16; 4 of 4 blocks free"
    assert view.lines == ()
    for text in (view.to_dot(), view.to_svg(), view.to_html(), view.to_json(), view._repr_html_()):
        assert text
    view = tree_view(tree, namespace="nobody")
    assert view.notes == ('Nothing is cached in namespace "nobody".',)
    assert 'Nothing is cached in namespace "nobody".' in str(view)


def test_a_chain_of_6000_nodes_by_default_and_shown_whole() -> None:
    """FC-24."""
    tree = RadixTree(BlockPool(12_000), 1)
    trunk = np.arange(6000)
    store(tree, trunk)
    for end in range(5999, 0, -1):  # from the deep end: to walk down a long chain for each would take minutes
        store(tree, np.append(trunk[:end], 10_000))
    assert tree.num_nodes == 11_999
    assert sys.getrecursionlimit() <= 1000
    view = tree_view(tree)
    assert added(line.own for line in view.lines) == total(tree)
    view = tree_view(tree, max_nodes=20_000)
    assert max(line.depth for line in view.lines) == 6000
    assert added(line.own for line in view.lines) == total(tree)
    assert max(map(len, str(view).splitlines())) < 300
    for text in (view.to_dot(), view.to_svg(), view.to_html(), view.to_json()):
        assert text


def test_a_chain_without_branches_is_one_line() -> None:
    tree = RadixTree(BlockPool(6000), 1)
    store(tree, range(5000))
    for end in range(1000, 5000, 1000):
        store(tree, [*range(end), 10_000])
    tree.match(range(5000)).release()
    # Evict the branches: what is left of the trunk is one line, of however many nodes.
    with tree.match(range(5000)):
        tree.evict(1000)
        view = tree_view(tree)
        assert tree.num_nodes > 1
        assert [line.kind for line in view.lines] == ["namespace", "nodes"]
        assert (
            view.lines[1].label
            == f"[0, 1, 2, 3, 4, 5, 6, 7, 8, 9 … 4997, 4998, 4999] ({tree.num_nodes} nodes)"
        )
        assert view.lines[1].own == total(tree)
        apart = tree_view(tree, collapse=False)
        assert sum(line.kind == "nodes" for line in apart.lines) == tree.num_nodes


@pytest.fixture(scope="module")
def large() -> RadixTree:
    """100,000 nodes in 50 namespaces."""
    tree = RadixTree(BlockPool(120_000), 2)
    for number in range(100_000):
        space, doc = number % 50, number // 50 % 40
        tokens = np.array([space, doc, number, number])
        match = tree.match(tokens, str(space), partial=False)
        held = match.take()
        table = np.concatenate((held, tree.allocate(2 - len(held))))
        tree.pool.release(tree.insert(tokens, table, str(space)).blocks)
    assert tree.num_nodes >= 100_000
    return tree


def test_100_000_nodes_in_bounded_memory(large: RadixTree) -> None:
    tracemalloc.start()
    view = tree_view(large)
    text = str(view)
    page = view.to_html()
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 100 * 2**20
    assert added(line.own for line in view.lines) == total(large)
    assert len(text.splitlines()) <= 203
    assert len(page) < 400_000
    whole = tree_view(large, max_nodes=200_000)
    assert sum(line.kind == "rest" for line in whole.lines) == 0
    assert added(line.own for line in whole.lines) == total(large)


def test_views_are_consistent_while_others_change_the_tree() -> None:
    tree = RadixTree(BlockPool(300), 2)
    stop = threading.Event()
    failed: list[BaseException] = []

    def change(seed: int) -> None:
        rng = np.random.default_rng(seed)
        try:
            while not stop.is_set():
                tokens = rng.integers(0, 3, int(rng.integers(1, 30)))
                space = SPACES[int(rng.integers(3))]
                match = tree.match(tokens, space, partial=False)
                held = match.take()
                missing = -(-len(tokens) // 2) - len(held)
                try:
                    own = tree.allocate(missing)
                except errors.OutOfBlocksError:
                    tree.pool.release(held)
                    continue
                tree.pool.release(tree.insert(tokens, np.concatenate((held, own)), space).blocks)
                tree.evict(int(rng.integers(0, 40)))
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=change, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(150):
            view = tree_view(tree, max_nodes=30)
            all_of = view.totals
            assert view.matching == Sums(all_of.nodes, all_of.blocks, all_of.tokens, all_of.pinned_blocks)
            assert added(line.own for line in view.lines) == view.matching
            assert str(view)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not failed
    tree.check()


def test_namespaces_are_shown_as_they_were_written() -> None:
    tree = RadixTree(BlockPool(64), 4)
    spaces = {
        "acme": '"acme"',
        b"acme\xff": "b'acme\\xff'",
        ("lora", "x"): '("lora", "x")',
        ("one",): '("one",)',
        (): "()",
        ("a", ("b", None, b"c"), "d"): '("a", ("b", None, b\'c\'), "d")',
        'quote" \n \ud800 \u202e': r'"quote\" \n \ud800 \u202e"',
        "default": '"default"',
        None: "default",
    }
    for space in spaces:
        store(tree, [1, 2, 3], space)
    assert {line.namespace for line in tree_view(tree).lines} == set(spaces.values())
    view = tree_view(tree, namespace=("lora", "x"))
    assert [line.label for line in view.lines] == ['namespace ("lora", "x")', "[1, 2, 3]"]
    assert view.matching == Sums(1, 1, 3, 0)
    assert tree_view(tree, namespace=b"").lines[0].label == "default namespace"
    assert view.totals.nodes == len(spaces)


def test_a_cache_knows_whose_namespaces_they_are(tiny_llama: Any) -> None:
    import torch

    import radixkv

    cache = radixkv.PrefixCache.for_model(tiny_llama, block_size=4, num_blocks=64)
    ids = torch.arange(1, 12)[None]
    for space in (None, "acme", ("lora", "x")):
        with cache.attached(tiny_llama, space):
            tiny_llama.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=2, do_sample=False)
    view = cache.tree_view()
    tops = [line.label for line in view.lines if line.kind == "namespace"]
    assert sorted(tops) == ["default namespace", 'namespace "acme"', 'namespace ("lora", "x")']
    assert view.totals.blocks == cache.num_cached_blocks
    only = cache.tree_view(namespace="acme", sort="hits", max_nodes=5)
    assert only.lines[0].label == 'namespace "acme"'
    assert len(only.lines) == 2
    assert cache.tree_view(namespace=b"").lines[0].label == "default namespace"
    assert cache.tree_view(namespace="nobody").lines == ()
    assert cache.tree_view(tokenizer=lambda ids: "x" * len(ids)).lines[1].label.startswith('"xxxx')
    # After a change of weights the same user has entries under two keys of the tree.
    cache.invalidate()
    with cache.attached(tiny_llama, "acme"):
        tiny_llama.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=2, do_sample=False)
    assert cache.tree_view(namespace="acme").matching.blocks > 0
    with cache.pin(ids[0], "acme"):
        assert cache.tree_view().totals.pinned_blocks == 3
    # What nobody named shows as a digest.
    store(cache.tree, [1, 2, 3], "behind its back")
    assert any(len(line.label) == len("namespace ") + 16 for line in cache.tree_view().lines)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sort": "size"}, "sort must be one of tokens, hits, recency, got 'size'"),
        ({"max_nodes": 0}, "max_nodes must be an integer of at least 1, got 0"),
        ({"max_nodes": True}, "max_nodes must be"),
        ({"max_depth": -1}, "max_depth must be an integer of at least 0, got -1"),
        ({"min_blocks": 1.5}, "min_blocks must be"),
        ({"max_chars": 3}, "max_chars must be an integer of at least 8"),
        ({"tokenizer": 5}, "tokenizer must have a method decode"),
        ({"tokenizer": lambda ids: b"bytes"}, "decode must give a str, it gave bytes"),
        ({"namespace": 5}, "a namespace is made of"),
    ],
)
def test_bad_options(options: dict, message: str) -> None:
    with pytest.raises(errors.InvalidRequestError, match=message):
        tree_view(made(), **options)


def test_needs_no_torch() -> None:
    import subprocess

    code = "import sys, radixkv; radixkv.tree_view; print([m for m in ('torch', 'rich') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
