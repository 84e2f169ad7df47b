from __future__ import annotations

from itertools import combinations, pairwise

import pytest

from radixkv.bench import texts
from radixkv.bench.workloads import NAMES, Prompt, Workload, make_workloads
from radixkv.demo.workloads import plain_chat


def rounds_of(workload: Workload) -> list[list[Prompt]]:
    """All rounds, each prompt answered by its own label."""
    stream = workload.start()
    found = [next(stream)]
    try:
        while True:
            found.append(stream.send([f" Answer to {prompt.label}." for prompt in found[-1]]))
    except StopIteration:
        return found


def by_name(**options) -> dict[str, Workload]:
    return {w.name: w for w in make_workloads(plain_chat, formatted=False, **options)}


def common_start(a: str, b: str) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@pytest.mark.parametrize("num_requests", [1, 2, 3, 8, 27, 100])
@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("short", [False, True])
def test_each_workload_says_how_many_rounds_and_prompts_it_has(num_requests, quick, short):
    for workload in by_name(num_requests=num_requests, quick=quick, short=short).values():
        rounds = rounds_of(workload)
        prompts = [prompt for one in rounds for prompt in one]
        assert (len(rounds), len(prompts)) == (workload.num_rounds, workload.num_requests)
        assert max(map(len, rounds)) == len(rounds[-1]) == num_requests
        assert len({prompt.label for prompt in prompts}) == len(prompts)
        assert len({prompt.text for prompt in prompts}) == len(prompts)


def test_names_select_and_keep_their_order():
    assert list(by_name()) == list(NAMES)
    assert list(by_name(names=("none", "chat"))) == ["chat", "none"]


def test_the_same_prompts_every_time():
    assert [rounds_of(w) for w in by_name().values()] == [rounds_of(w) for w in by_name().values()]


@pytest.mark.parametrize(("name", "share"), [("system", 0.7), ("few_shot", 0.9)])
def test_prompts_share_most_of_their_text(name, share):
    (prompts,) = rounds_of(by_name()[name])
    shared = common_start(prompts[0].text, prompts[1].text)
    assert all(common_start(a.text, b.text) >= shared - 10 for a, b in combinations(prompts, 2))
    assert shared > share * max(len(prompt.text) for prompt in prompts)


def test_each_turn_of_a_chat_contains_the_one_before_and_its_answer():
    rounds = rounds_of(by_name(num_requests=3)["chat"])
    for before, after in pairwise(rounds):
        for one, next_one in zip(before, after, strict=True):
            assert next_one.text.startswith(f"{one.text} Answer to {one.label}.")


def test_each_thought_contains_a_thought_of_the_level_above_and_its_answer():
    rounds = rounds_of(by_name(num_requests=8)["tree"])
    assert len(rounds) == 3
    for above, below in pairwise(rounds):
        starts = [f"{prompt.text} Answer to {prompt.label}." for prompt in above]
        children = [sum(prompt.text.startswith(start) for prompt in below) for start in starts]
        assert sum(children) == len(below)
        assert min(children) >= 1
    assert max(children) > 1


@pytest.mark.parametrize("num_requests", [8, 60])
def test_unrelated_prompts_start_differently_and_have_different_lengths(num_requests):
    (prompts,) = rounds_of(by_name(num_requests=num_requests)["none"])
    longest = max(len(prompt.text) for prompt in prompts)
    assert min(len(prompt.text) for prompt in prompts) < longest / 2
    for a, b in combinations(prompts[:25], 2):
        assert common_start(a.text, b.text) < 3
    for a, b in combinations(prompts, 2):
        assert common_start(a.text, b.text) < 20


def test_no_text_comes_twice():
    for make in (texts.question, texts.message, texts.first_words):
        assert len({make(i) for i in range(2000)}) == 2000
