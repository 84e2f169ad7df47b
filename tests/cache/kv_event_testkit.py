"""A strict reader of KV events, which knows nothing of radixkv: it decodes with msgpack and rebuilds the tree."""

from __future__ import annotations

from collections import Counter

import msgpack
import numpy as np

from radixkv.core import OutOfBlocksError

STORED = (
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
)
FIELDS = {"BlockStored": STORED, "BlockRemoved": ("block_hashes", "medium"), "AllBlocksCleared": ()}


def decode(payload):
    """`(ts, events as dicts, rank)` from either encoding of events."""
    ts, raw, rank = msgpack.unpackb(payload, use_list=True, strict_map_key=False)
    events = []
    for event in raw:
        if isinstance(event, list):
            kind, *values = event
            event = {"type": kind, **dict(zip(FIELDS[kind], values, strict=False))}
        events.append(event)
    return ts, events, rank


class Mirror:
    """What a router would believe is cached. Complains about everything that is out of order."""

    def __init__(self, block_size, lora_names=True):
        self.size = block_size
        self.blocks = {}  # hash -> (parent hash, tokens, label)
        self.children = Counter()
        self.num_events = 0

    def apply(self, events):
        for event in events:
            self.num_events += 1
            getattr(self, event["type"])(event)

    def BlockStored(self, event):
        hashes, parent, tokens = event["block_hashes"], event["parent_block_hash"], event["token_ids"]
        assert hashes, "nothing stored"
        assert event["block_size"] == self.size
        assert len(tokens) == len(hashes) * self.size, "only whole blocks"
        assert event["lora_id"] is None
        assert event["medium"] == "GPU"
        keys = event.get("extra_keys") or [None] * len(hashes)
        assert len(keys) == len(hashes)
        for i, (block, extra) in enumerate(zip(hashes, keys, strict=True)):
            assert block not in self.blocks, "announced twice"
            assert parent is None or parent in self.blocks, "a child before its parent"
            lora = event.get("lora_name")
            expected = [] if lora is None else [lora]
            if parent is None:
                salt = (extra or [None])[-1] if len(extra or []) > len(expected) else None
                label = (lora, salt)
            else:
                label = self.blocks[parent][2]
                assert label[0] == lora
            if parent is None and label[1] is not None:
                expected.append(label[1])
            assert list(extra or []) == expected
            if "cache_salt" in event:
                assert event["cache_salt"] == label[1]
            self.blocks[block] = (parent, tuple(tokens[i * self.size : (i + 1) * self.size]), label)
            self.children[parent] += 1
            parent = block

    def BlockRemoved(self, event):
        assert event["block_hashes"], "nothing removed"
        assert event["medium"] == "GPU"
        for block in event["block_hashes"]:
            assert block in self.blocks, "removed what was not announced, or twice"
            assert not self.children[block], "a parent removed before its child"
            self.children[self.blocks.pop(block)[0]] -= 1

    def AllBlocksCleared(self, event):
        self.blocks.clear()
        self.children.clear()

    def paths(self):
        """`{(label, tokens from the root on): hash}` of every block."""
        found = {}
        for block, (parent, tokens, label) in self.blocks.items():
            path = tokens
            while parent is not None:
                parent, before, _ = self.blocks[parent]
                path = before + path
            assert (label, path) not in found
            found[label, path] = block
        return found


def cached_paths(tree, labels):
    """The same, with block ids, of a tree: all whole blocks. `labels` maps canonical namespaces."""
    found, upto = {}, []
    for node in tree.nodes():
        path = (upto[node.parent] if node.parent >= 0 else ()) + tuple(node.tokens.tolist())
        upto.append(path)
        for i, block in enumerate(node.blocks.tolist()):
            end = node.start + (i + 1) * tree.block_size
            if end <= len(path):
                found[labels[node.namespace], path[:end]] = block
    return found


def store(tree, tokens, namespace=b"", keep=False):
    """A whole request: match, allocate, insert, release. Returns the table (held if `keep`), or None without room."""
    tokens = list(tokens)
    match = tree.match(tokens, namespace, partial=False)
    try:
        own = tree.allocate(-(-len(tokens) // tree.block_size) - len(match.blocks))
    except OutOfBlocksError:
        match.release()
        return None
    blocks = tree.insert(tokens, np.concatenate((match.take(), own)), namespace).blocks
    if not keep:
        tree.pool.release(blocks)
    return blocks
