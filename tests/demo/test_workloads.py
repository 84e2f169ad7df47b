from __future__ import annotations

from itertools import pairwise

import pytest

from radixkv.demo import texts
from radixkv.demo.workloads import Prompt, Workload, make_workloads, plain_chat


def prompts_of(workload: Workload, answer: str = "An answer.") -> list[Prompt]:
    stream = workload.start()
    found = [next(stream)]
    try:
        while True:
            found.append(stream.send(f"{answer} ({len(found)})"))
    except StopIteration:
        return found


def by_name(quick: bool = False) -> dict[str, Workload]:
    return {w.name: w for w in make_workloads(plain_chat, formatted=False, quick=quick)}


def common_start(a: str, b: str) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@pytest.mark.parametrize("quick", [False, True])
def test_each_workload_says_how_many_prompts_it_has(quick):
    for workload in by_name(quick).values():
        prompts = prompts_of(workload)
        assert len(prompts) == workload.num_requests >= 2
        assert len({prompt.label for prompt in prompts}) == len(prompts)
        assert len({prompt.text for prompt in prompts}) == len(prompts)


def test_few_shot_prompts_share_all_examples_and_ask_for_a_label():
    first, *others = prompts_of(by_name()["few_shot"])
    shared = first.text.index("Message: " + texts.TRIAGE_QUERIES[0])
    assert shared > 3000
    for prompt in [first, *others]:
        assert common_start(first.text, prompt.text) >= shared
        assert prompt.text.endswith("\nLabel:")


def test_labels_of_the_examples_are_those_of_the_instruction():
    labels = {label for _, label in texts.TRIAGE_EXAMPLES}
    assert len(labels) == 6
    assert all(f"{label} (" in texts.TRIAGE_INSTRUCTION for label in labels)


def test_each_turn_of_the_chat_contains_the_one_before_and_its_answer():
    prompts = prompts_of(by_name()["chat"])
    for number, (before, after) in enumerate(pairwise(prompts), 1):
        assert after.text.startswith(f"{before.text} An answer. ({number})")
        assert after.text.endswith("Assistant:")


def test_branches_share_the_start_and_branch_twice():
    prompts = {prompt.label: prompt.text for prompt in prompts_of(by_name()["branching"])}
    assert all(text.startswith(prompts["start"]) for text in prompts.values())
    for branch in ("branch 1", "branch 2"):
        leaves = [text for label, text in prompts.items() if label in (f"{branch}a", f"{branch}b")]
        assert len(leaves) == 2
        assert all(text.startswith(prompts[branch]) for text in leaves)
    assert common_start(prompts["branch 1"], prompts["branch 2"]) < len(prompts["start"]) + 5


def test_unrelated_prompts_share_nothing():
    prompts = [prompt.text for workload in by_name().values() for prompt in prompts_of(workload)[:1]]
    prompts += [prompt.text for prompt in prompts_of(by_name()["unrelated"])]
    for prompt in set(prompts):
        assert max(common_start(prompt, other) for other in set(prompts) - {prompt}) < 4
