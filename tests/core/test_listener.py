"""What listeners hear, replayed into a model of what is cached, against what the tree says."""

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from radixkv.core import BlockPool, RadixTree, TreeListener, canonical_namespace

SIZE, BLOCKS = 4, 24


class Mirror(TreeListener):
    """Rebuilds the cached paths from what it hears."""

    def __init__(self):
        self.paths = {}  # block id -> (namespace, tokens up to its end)
        self.asked = []

    def on_matched(self, namespace, tokens, num_hit, limit, again):
        self.asked.append((namespace, tuple(tokens.tolist()), num_hit, limit, again))
        return f"note {len(self.asked)}"

    def on_stored(self, namespace, tokens, first, blocks, parent):
        before = self.paths[parent] if first else None
        assert before == ((namespace, tuple(tokens[: first * SIZE].tolist())) if first else None)
        assert (parent == -1) == (first == 0)
        assert len(tokens) > (first + len(blocks) - 1) * SIZE
        assert len(tokens) <= (first + len(blocks)) * SIZE
        for i, block in enumerate(blocks.tolist(), first):
            path = tuple(tokens[: (i + 1) * SIZE].tolist())
            if i:
                assert (namespace, path[: i * SIZE]) in self.paths.values(), "a parent comes first"
            known = self.paths.get(block)
            assert known is None or (known[0] == namespace and path[: len(known[1])] == known[1])
            self.paths[block] = (namespace, path)

    def on_removed(self, blocks):
        for block in reversed(blocks.tolist()):
            namespace, path = self.paths.pop(block)
            below = [p for n, p in self.paths.values() if n == namespace and len(p) > len(path)]
            assert not any(p[: len(path)] == path for p in below) or len(path) % SIZE

    def on_cleared(self):
        self.paths.clear()


def cached_paths(tree):
    out, ends = {}, []
    for node in tree.nodes():
        before = ends[node.parent] if node.parent >= 0 else ()
        assert len(before) == node.start
        whole = before + tuple(node.tokens.tolist())
        ends.append(whole)
        for i, block in enumerate(node.blocks.tolist()):
            out[block] = (node.namespace, whole[: node.start + (i + 1) * SIZE])
        assert node.references.tolist() == [tree.pool.refcount(b) for b in node.blocks.tolist()]
    return out


TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=22)
NAMESPACES = st.sampled_from([b"", b"x"])


class ListenerMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.pool = BlockPool(BLOCKS)
        self.tree = RadixTree(self.pool, SIZE)
        self.mirror = Mirror()
        self.tree.add_listener(TreeListener())
        self.tree.add_listener(self.mirror)
        self.held = []

    @rule(tokens=TOKENS, namespace=NAMESPACES, again=st.booleans(), keep=st.booleans())
    def request(self, tokens, namespace, again, keep):
        hit = self.tree.match_length(tokens, namespace)
        match = self.tree.match(tokens, namespace, again=again)
        assert self.mirror.asked[-1] == (
            canonical_namespace(namespace),
            tuple(tokens),
            hit,
            len(tokens),
            again,
        )
        assert match.note == f"note {len(self.mirror.asked)}"
        num = -(-len(tokens) // SIZE) - len(match.blocks)
        if num > self.pool.num_free + self.tree.num_evictable_blocks:
            match.release()
            return
        own = self.tree.allocate(num)
        table = self.tree.insert(tokens, np.concatenate((match.take(), own)), namespace).blocks
        if keep:
            self.held.append(table)
        else:
            self.pool.release(table)

    @rule(num=st.integers(0, 6))
    def evict(self, num):
        before = self.tree.num_evicted_tokens_total, self.tree.num_cached_tokens
        self.tree.evict(num)
        after = self.tree.num_evicted_tokens_total, self.tree.num_cached_tokens
        assert sum(before) == sum(after)

    @rule()
    def let_go(self):
        while self.held:
            self.pool.release(self.held.pop())

    @rule(namespace=st.sampled_from([None, b"", b"x"]))
    def clear(self, namespace):
        self.let_go()
        self.tree.clear(namespace)

    @rule()
    def drop(self):
        self.tree.drop_evictable(lambda namespace: namespace == canonical_namespace(b"x"))

    @invariant()
    def the_mirror_is_right(self):
        self.tree.check()
        assert self.mirror.paths == cached_paths(self.tree)


TestListener = ListenerMachine.TestCase


def test_who_left_hears_nothing():
    tree = RadixTree(BlockPool(4), SIZE)
    mirror = Mirror()
    tree.add_listener(mirror)
    tree.remove_listener(mirror)
    tree.remove_listener(mirror)
    tree.insert([1, 2, 3], tree.pool.allocate(1))
    assert tree.match([1, 2]).note is None
    assert not mirror.paths
    assert not mirror.asked


def test_hits_and_uses_are_counted_where_they_matched():
    tree = RadixTree(BlockPool(8), SIZE)
    moments = iter(range(100))
    tree._clock = lambda: float(next(moments))
    tree.pool.release(tree.insert(range(8), tree.pool.allocate(2)).blocks)
    for _ in range(3):
        tree.match(range(6)).release()
    tree.match(range(6), again=True).release()
    (node,) = tree.nodes()
    assert (node.num_hits, node.used_at) == (3, 4.0)
    tree.match_length(range(8))
    assert [n.num_hits for n in tree.nodes()] == [3]
