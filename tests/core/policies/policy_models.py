"""What each policy should do, written plainly: blocks are prefixes of requests, victims are found by looking at all."""

from __future__ import annotations

import math
from collections import Counter


class PolicyModel:
    """A cache of `capacity` blocks; a block is the tuple of all tokens up to its end. One request at a time.

    `key` gives what the leaf block with the lowest goes by; of equal blocks of one path the deeper one goes.
    """

    def __init__(self, capacity, block_size):
        self.capacity, self.block_size = capacity, block_size
        self.cached, self.now, self.own = set(), 0, set()
        self.uses, self.hits, self.last, self.inserted = Counter(), Counter(), {}, {}

    def blocks(self, tokens):
        return [tokens[:end] for end in range(self.block_size, len(tokens) + 1, self.block_size)]

    def leaves(self):
        inner = {block[: -self.block_size] for block in self.cached}
        return [b for b in self.cached if b not in inner and b not in self.own]

    def request(self, tokens, is_cached):
        """Returns the number of blocks hit. `is_cached` is asked which of two equal leaves has gone."""
        self.now += 1
        blocks = self.blocks(tokens)
        self.own = set(blocks)
        num_hit = 0
        while num_hit < len(blocks) and blocks[num_hit] in self.cached:
            num_hit += 1
        for block in blocks[:num_hit]:
            self.uses[block] += 1
            self.hits[block] += 1
            self.last[block] = self.now
        self.after_hits(blocks[:num_hit])
        while len(self.cached) + len(blocks) - num_hit > self.capacity:
            lowest = min(self.key(block) for block in self.leaves())
            victims = [b for b in self.leaves() if self.key(b) == lowest and not is_cached(b)]
            assert victims, f"one of {[b for b in self.leaves() if self.key(b) == lowest]} should have gone"
            self.before_eviction(victims[0])
            self.cached.remove(victims[0])
        for block in blocks[num_hit:]:
            self.cached.add(block)
            self.uses[block], self.hits[block] = 1, 0
            self.last[block] = self.inserted[block] = self.now
            self.after_insert(block)
        return num_hit

    def after_hits(self, blocks):
        pass

    def after_insert(self, block):
        pass

    def before_eviction(self, block):
        pass


class LRU(PolicyModel):
    def key(self, block):
        return self.last[block]


class FIFO(PolicyModel):
    def key(self, block):
        return self.inserted[block]


class LFU(PolicyModel):
    def key(self, block):
        return self.uses[block], self.last[block]


class AgedLFU(PolicyModel):
    """K = uses + L at the time of the use; L is the highest K evicted."""

    def __init__(self, *args):
        super().__init__(*args)
        self.keys, self.age = {}, 0

    def worth(self, block):
        return self.uses[block]

    def after_hits(self, blocks):
        for block in blocks:
            self.keys[block] = self.age + self.worth(block)

    def after_insert(self, block):
        self.keys[block] = self.age + self.worth(block)

    def before_eviction(self, block):
        self.age = max(self.age, self.keys[block])

    def key(self, block):
        return self.keys[block], self.last[block]


class CostAware(AgedLFU):
    """The same with uses times cost: a block of 16,384 tokens later costs half as much again as one at 0."""

    def worth(self, block):
        middle = len(block) - self.block_size / 2
        return self.uses[block] * (1 + middle / 32_768)


class SLRU(PolicyModel):
    def __init__(self, *args, min_hits=2, share=0.8):
        super().__init__(*args)
        self.protected, self.time = set(), {}
        self.min_hits, self.most = min_hits, int(share * self.capacity)

    def after_hits(self, blocks):
        for block in blocks:
            self.time[block] = self.now
            if self.hits[block] >= self.min_hits:
                self.protected.add(block)
        while len(self.protected) > self.most:
            back = min(self.protected, key=lambda b: (self.last[b], -len(b)))
            self.protected.remove(back)
            self.hits[back] = self.min_hits - 1
            self.time[back] = self.now

    def after_insert(self, block):
        self.time[block] = self.now

    def before_eviction(self, block):
        self.protected.discard(block)

    def key(self, block):
        return block in self.protected, self.time[block]


class Priority(PolicyModel):
    """`retention` is (priority, ttl) or None for the coming request, `clock` the time."""

    def __init__(self, *args):
        super().__init__(*args)
        self.given, self.own_only = {}, set()
        self.retention, self.clock = None, 0.0

    def effective(self, block):
        priority, end = self.given.get(block, (0, math.inf))
        return priority if end > self.clock else 0

    def give(self, block):
        if self.retention is None:
            return
        priority, ttl = self.retention
        end = math.inf if ttl is None else self.clock + ttl
        before = self.effective(block)
        if priority > before or block in self.own_only:
            self.given[block] = priority, end
        elif priority == before:
            old = self.given.get(block, (0, math.inf))[1]
            self.given[block] = priority, end if old <= self.clock else max(old, end)

    def after_hits(self, blocks):
        self.own_only.difference_update(blocks)
        for block in blocks:
            self.give(block)

    def after_insert(self, block):
        self.given.pop(block, None)
        self.own_only.add(block)
        self.give(block)
        self.own_only.discard(block)  # one request asks once

    def key(self, block):
        return self.effective(block), self.last[block]


MODELS = {
    "lru": LRU,
    "fifo": FIFO,
    "lfu": LFU,
    "lfu-aged": AgedLFU,
    "cost-aware": CostAware,
    "slru": SLRU,
    "priority": Priority,
}
