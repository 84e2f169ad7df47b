"""Caches as plain dictionaries and sets of prefixes: what a replay must count, found without tree, pool or policy.

A block is the tuple of all tokens (or ids) up to its end.
"""

from __future__ import annotations

from itertools import combinations


class Ambiguous(Exception):
    """Several cached blocks share as many tokens with a request: which one counts as used is not laid down."""


def paths_of(requests, block_size):
    """The whole blocks of each request."""
    return [
        [tuple(tokens[:end]) for end in range(block_size, len(tokens) + 1, block_size)] for tokens in requests
    ]


def leading(path, cached):
    """How many leading blocks of a path are cached."""
    num = 0
    while num < len(path) and path[num] in cached:
        num += 1
    return num


def leaves(cached):
    """Cached blocks with no cached block behind them."""
    inner = {other[:end] for other in cached for end in range(1, len(other))}
    return [block for block in cached if block not in inner]


def leaf_cache_hits(requests, capacity, rank):
    """Hits of each request, one id a block; the leaf block with the lowest `rank(uses, inserted, used)` goes."""
    cached, hits = {}, []  # block -> [uses, inserted, used]
    for now, path in enumerate(paths_of(requests, 1)):
        num = leading(path, cached)
        hits.append(num)
        for block in path[:num]:
            cached[block][0] += 1
            cached[block][2] = now
        while len(cached) + len(path) - num > capacity:
            others = [block for block in leaves(cached) if block not in path]
            del cached[min(others, key=lambda block: (rank(*cached[block]), -len(block)))]
        for block in path[num:]:
            cached[block] = [1, now, now]
    return hits


def most_hits(requests, capacity, block_size=1, *, leave_one=False, pin=False):
    """The most block hits that any choice of what to keep can have, by trying all of them.

    Args:
        requests: Tokens, or ids with a block size of 1.
        capacity: Blocks.
        block_size: Tokens in a block.
        leave_one: A request cannot hit a block that holds its last token.
        pin: The blocks of the running request take room, and are all kept.
    """
    states = {frozenset(): 0}  # what is cached -> most hits so far
    for tokens, path in zip(requests, paths_of(requests, block_size), strict=True):
        usable = (len(tokens) - leave_one) // block_size
        following = {}
        for state, hits in states.items():
            hits += min(leading(path, state), usable)
            at_hand = state | set(path)
            for kept in closed_subsets(at_hand, capacity, block_size):
                if (not pin or kept.issuperset(path)) and following.get(kept, -1) < hits:
                    following[kept] = hits
        states = following
    return max(states.values())


def closed_subsets(blocks, capacity, block_size):
    """The largest sets of at most so many blocks that hold with a block all before it."""
    blocks = sorted(blocks)
    size = min(capacity, len(blocks))
    for chosen in combinations(blocks, size):
        kept = frozenset(chosen)
        if all(len(block) == block_size or block[:-block_size] in kept for block in kept):
            yield kept


def most_token_hits(requests, capacity, block_size):
    """The most token hits that any choice of blocks to keep can have, hit token by token, by trying all of them.

    A block is kept as it was stored, perhaps partly filled, and the running request takes no room.
    """
    states = {frozenset(): 0}
    for tokens in map(tuple, requests):
        ends = [*range(block_size, len(tokens), block_size), len(tokens)]
        path = {tokens[:end] for end in ends}
        following = {}
        for state, hits in states.items():
            hits += max((common_length(block, tokens[:-1]) for block in state), default=0)
            at_hand = sorted(state | path)
            for chosen in combinations(at_hand, min(capacity, len(at_hand))):
                kept = frozenset(chosen)
                whole = all(
                    len(block) <= block_size or block[: (len(block) - 1) // block_size * block_size] in kept
                    for block in kept
                )
                if whole and following.get(kept, -1) < hits:
                    following[kept] = hits
        states = following
    return max(states.values())


class TokenLRU:
    """`PrefixCache` with LRU, token by token: a last block may be partly filled, and a hit may end inside a block."""

    def __init__(self, block_size, capacity):
        self.block_size = block_size
        self.capacity = capacity
        self.used = {}  # block -> time
        self.now = 0
        self.evicted = 0

    def serve(self, tokens):
        """Look a request up and store it; the tokens hit."""
        tokens, size = tuple(tokens), self.block_size
        hits = self._match(tokens)
        self.now += 1
        known = 0
        while (known + 1) * size <= len(tokens) and tokens[: (known + 1) * size] in self.used:
            known += 1
            self.used[tokens[: known * size]] = self.now
        if known * size == len(tokens):
            return hits
        own = [tokens[: min(end + size, len(tokens))] for end in range(known * size, len(tokens), size)]
        held = {tokens[: i * size] for i in range(1, known + 1)}
        while len(self.used) + len(own) > self.capacity:
            others = [block for block in leaves(self.used) if block not in held]
            del self.used[min(others, key=lambda block: (self.used[block], -len(block)))]
            self.evicted += 1
        self.now += 1
        for block in held:
            self.used[block] = self.now
        for block in own:
            start = (len(block) - 1) // size * size
            here = [b for b in self.used if start < len(b) <= start + size]
            fuller = [b for b in here if b[: len(block)] == block]
            if len(fuller) > 1:
                raise Ambiguous
            for old in here:
                if block[: len(old)] == old and len(old) < len(block):
                    del self.used[old]  # a tail that this block begins with
            self.used[fuller[0] if fuller else block] = self.now
        return hits

    def _match(self, tokens):
        self.now += 1
        size, limit = self.block_size, len(tokens) - 1
        common = {block: common_length(block, tokens[:limit]) for block in self.used}
        hits = max(common.values(), default=0)
        for end in range(size, hits + 1, size):
            self.used[tokens[:end]] = self.now
        if hits % size:
            start = hits - hits % size
            nearest = [b for b, n in common.items() if n == hits and start < len(b) <= start + size]
            if len(nearest) > 1:
                raise Ambiguous
            self.used[nearest[0]] = self.now
        return hits


def common_length(a, b):
    """Length of the common prefix."""
    num = 0
    while num < min(len(a), len(b)) and a[num] == b[num]:
        num += 1
    return num
