"""A request is one request to the tree, however often it is looked up."""

import numpy as np
import pytest

from radixkv import BlockPool, RadixTree, Scheduler, SchedulerConfig
from radixkv.core import InvalidRequestError, Retention, TreeListener


class Listener(TreeListener):
    def __init__(self):
        self.asked = []

    def on_matched(self, namespace, tokens, num_hit, limit, again):
        self.asked.append((int(tokens[0]), again))
        return (int(tokens[0]), num_hit)


def test_waiting_and_paused_requests_are_counted_once():
    tree = RadixTree(BlockPool(8), block_size=4)
    listener = Listener()
    tree.add_listener(listener)
    scheduler = Scheduler(tree, SchedulerConfig(preemption="recompute", watermark=0.0))
    requests = [
        scheduler.add([i] * 9, max_new_tokens=16 if i < 2 else 8, namespace=b"tenant") for i in range(4)
    ]
    while scheduler.has_unfinished:
        planned = scheduler.schedule()
        assert planned is not None
        scheduler.complete(planned, np.full(len(planned.sampling), 50))
    assert scheduler.stats.preemptions > 0
    assert len(listener.asked) > 4
    for i in range(4):
        answers = [again for first, again in listener.asked if first == i]
        assert answers == [False] + [True] * (len(answers) - 1)
    assert [request.note for request in requests] == [(i, 0) for i in range(4)]


def test_the_note_is_that_of_the_admission():
    tree = RadixTree(BlockPool(32), block_size=4)
    listener = Listener()
    tree.add_listener(listener)
    scheduler = Scheduler(tree, SchedulerConfig())
    prompt = list(range(100, 117))
    first = scheduler.add(prompt, max_new_tokens=2)
    second = scheduler.add([*prompt, 7], max_new_tokens=2)  # waits for the prefix of the first
    while scheduler.has_unfinished:
        planned = scheduler.schedule()
        scheduler.complete(planned, np.full(len(planned.sampling), 50))
    assert first.note == (100, 0)
    assert second.num_cached_tokens == 17
    assert second.note == (100, 17)
    assert listener.asked == [(100, False), (100, False), (100, True)]


def test_retentions_reach_the_blocks_of_their_request():
    tree = RadixTree(BlockPool(8), block_size=4, policy="priority")
    scheduler = Scheduler(tree, SchedulerConfig(watermark=0.0))

    def run(token, retention=None):
        scheduler.add([token] * 8, max_new_tokens=1, retention=retention)
        while scheduler.has_unfinished:
            planned = scheduler.schedule()
            scheduler.complete(planned, np.full(len(planned.sampling), 50))

    run(1, Retention(5))
    for token in range(2, 9):
        run(token)
    assert tree.match_length([1] * 8) == 8
    assert tree.match_length([2] * 8) == 0
    run(1, Retention(5, ttl=1e9))
    assert tree.match_length([1] * 8) == 8


@pytest.mark.parametrize(("policy", "retention"), [("lru", Retention(1)), ("priority", 5)])
def test_a_retention_that_nobody_would_heed_is_refused(policy, retention):
    scheduler = Scheduler(RadixTree(BlockPool(8), block_size=4, policy=policy))
    with pytest.raises(InvalidRequestError, match="retention"):
        scheduler.add([1, 2], max_new_tokens=1, retention=retention)
    assert not scheduler.has_unfinished
