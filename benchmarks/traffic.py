"""Made-up traffic of several kinds, to see where an eviction policy loses: lists of block ids, by seed.

An id stands for a block and all blocks before it, as in the public Mooncake traces.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable

import numpy as np

Ids = list[int]


class _Ids:
    def __init__(self) -> None:
        self._next = itertools.count()

    def new(self, num: float) -> Ids:
        return [next(self._next) for _ in range(max(int(num), 0))]


def few_shot(num: int, seed: int) -> list[Ids]:
    """300 long prompts, of popularity 1/rank, each followed by a short question."""
    rng, ids = np.random.default_rng(seed), _Ids()
    heads = [ids.new(rng.integers(5, 60)) for _ in range(300)]
    weights = 1 / np.arange(1, 301)
    return [heads[h] + ids.new(rng.integers(1, 9)) for h in rng.choice(300, num, p=weights / weights.sum())]


def chat(num: int, seed: int, think: float = 120.0, turns: float = 3.0, rate: float = 2.0) -> list[Ids]:
    """Conversations that grow, with think times, behind one of three system prompts."""
    rng, ids = np.random.default_rng(seed), _Ids()
    systems = [ids.new(rng.integers(1, 5)) for _ in range(3)]
    events, now = [], 0.0
    for _ in range(num):
        now += rng.exponential(1 / rate)
        said, at = systems[rng.integers(3)] + ids.new(rng.geometric(1 / 8)), now
        for _ in range(rng.geometric(1 / turns)):
            events.append((at, said + ids.new(1)))
            said = said + ids.new(rng.geometric(1 / 3))
            at += rng.lognormal(np.log(think), 1.0)
    return [request for _, request in sorted(events, key=lambda event: event[0])[:num]]


def chat_slow(num: int, seed: int) -> list[Ids]:
    """The same with ten minutes between two turns."""
    return chat(num, seed, think=600.0, turns=2.0)


def agents(num: int, seed: int) -> list[Ids]:
    """Loops of 20 steps with seconds between them, which sometimes branch; six sets of tools."""
    rng, ids = np.random.default_rng(seed), _Ids()
    tools = [ids.new(rng.integers(5, 30)) for _ in range(6)]
    events, now = [], 0.0
    for _ in range(num):
        now += rng.exponential(1 / 0.15)
        seen, at = tools[rng.integers(6)] + ids.new(rng.geometric(0.2)), now
        for _ in range(rng.geometric(1 / 20)):
            events.append((at, seen + ids.new(1)))
            if rng.random() < 0.1:
                branch = seen
                for _ in range(rng.integers(1, 5)):
                    branch = branch + ids.new(rng.geometric(0.4))
                    events.append((at + rng.exponential(4.0), branch))
            seen = seen + ids.new(rng.geometric(0.4))
            at += rng.exponential(4.0) * (10 if rng.random() < 0.05 else 1)
    return [request for _, request in sorted(events, key=lambda event: event[0])[:num]]


def recency(num: int, seed: int, share_new: float = 0.25, scale: float = 60.0) -> list[Ids]:
    """An LRU stack model: what was used lately is used again, and nothing else says anything."""
    rng, ids = np.random.default_rng(seed), _Ids()
    stack, out = [], []
    for _ in range(num):
        depth = int(scale * rng.pareto(1.2))
        if rng.random() < share_new or depth >= len(stack):
            item = ids.new(rng.integers(3, 30))
        else:
            item = stack.pop(-1 - depth)
        stack.append(item)
        out.append(item)
    return out


def documents(num: int, seed: int) -> list[Ids]:
    """A document is asked about a few times in a row, then never again."""
    rng, ids = np.random.default_rng(seed), _Ids()
    events, now = [], 0.0
    for _ in range(num):
        now += rng.exponential(5.0)
        document, at = ids.new(rng.integers(10, 60)), now
        for _ in range(rng.geometric(1 / 6)):
            events.append((at, document + ids.new(rng.integers(1, 3))))
            at += rng.exponential(15.0)
    return [request for _, request in sorted(events, key=lambda event: event[0])[:num]]


def scans(num: int, seed: int) -> list[Ids]:
    """Conversations, and now and then a batch of long prompts that never return."""
    rng, ids, out = np.random.default_rng(seed), itertools.count(10**9), []
    for number, request in enumerate(chat(num, seed, think=60.0, turns=4.0)):
        out.append(request)
        if number % 1500 > 1200 and number % 2 == 0:
            out.append([next(ids) for _ in range(rng.integers(30, 80))])
    return out[:num]


def loop(num: int, seed: int) -> list[Ids]:
    """300 prompts in nearly the same order again and again: the worst case of LRU."""
    rng, ids = np.random.default_rng(seed), _Ids()
    heads = [ids.new(rng.integers(10, 30)) for _ in range(300)]
    return [heads[(number + int(rng.normal(0, 40))) % 300] + ids.new(1) for number in range(num)]


def flip(num: int, seed: int) -> list[Ids]:
    """What a second use says about a third is turned round every 1,500 requests."""
    rng, ids, out, serial = np.random.default_rng(seed), _Ids(), [], itertools.count()
    due: list[tuple[float, int, Ids, int]] = []
    for number in range(num):
        if due and due[0][0] <= number:
            _, _, item, uses = heapq.heappop(due)
        else:
            item, uses = ids.new(rng.integers(5, 30)), 0
        out.append(item)
        uses += 1
        chance = (0.3 if uses == 1 else 0.9) if number // 1500 % 2 == 0 else (0.8 if uses == 1 else 0.0)
        if rng.random() < chance:
            heapq.heappush(due, (number + rng.exponential(150.0) + 1, next(serial), item, uses))
    return out


def uniform(num: int, seed: int) -> list[Ids]:
    """400 prompts, all equally popular: nothing to learn, and differences between policies are luck."""
    rng, ids = np.random.default_rng(seed), _Ids()
    heads = [ids.new(rng.integers(5, 40)) for _ in range(400)]
    return [heads[h] + ids.new(1) for h in rng.integers(0, 400, num)]


def drift(num: int, seed: int) -> list[Ids]:
    """Popular prompts that slowly give way to others."""
    rng, ids = np.random.default_rng(seed), _Ids()
    heads = [ids.new(rng.integers(5, 40)) for _ in range(3000)]
    return [
        heads[(int(number * 0.25) + min(int(rng.pareto(0.8) * 3), 699)) % 3000] + ids.new(rng.integers(1, 4))
        for number in range(num)
    ]


KINDS: dict[str, Callable[[int, int], list[Ids]]] = {
    made.__name__: made
    for made in (few_shot, chat, chat_slow, agents, recency, documents, scans, loop, flip, uniform, drift)
}
