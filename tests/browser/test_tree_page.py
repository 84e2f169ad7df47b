"""The page "The radix tree" in a browser: what it draws at each step is what Python says, and it can be used."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from docs.tooling.scenes import tree as scene
from docs.tooling.scenes._tree_examples import EXAMPLES
from docs.tooling.scenes._tree_run import Run, Step
from tests.browser.test_every_page import WIDE_CONTENT

PAGE = "interactive/tree.html"

# Everything that the page shows at one step, read from what is drawn.
READ = """() => {
  const root = document.querySelector("#rk-tree");
  const texts = (selector, under = root) => [...under.querySelectorAll(selector)].map((e) => e.textContent);
  return {
    prompt: texts(".rkt-token"),
    hit: texts("mark.rkt-token"),
    treeHit: texts(".rkt-word--hit"),
    treeWords: texts(".rkt-word").length,
    blocks: [...root.querySelectorAll(".rkt-block")].map((e) => Number(e.dataset.block)),
    pinned: [...root.querySelectorAll(".rkt-block--pinned")].map((e) => Number(e.dataset.block)),
    added: [...root.querySelectorAll(".rkt-block--added")].map((e) => Number(e.dataset.block)),
    gone: [...root.querySelectorAll(".rkt-block--gone")].map((e) => Number(e.dataset.block)),
    nodes: root.querySelectorAll(".rkt-node").length,
    items: root.querySelectorAll(".rkt-aslist li").length,
    split: texts(".rkt-split"),
    free: [...root.querySelectorAll(".rkt-cell--free")].map((e) => Number(e.dataset.block)),
    own: [...root.querySelectorAll(".rkt-cell--own")].map((e) => Number(e.dataset.block)),
    pool: root.querySelectorAll(".rkt-cell").length,
    counters: Object.fromEntries([...root.querySelectorAll("[data-counter]")]
      .map((e) => [e.dataset.counter, Number(e.textContent)])),
    event: root.querySelector("[data-tree=event]").textContent,
    where: root.querySelector(".rk-where").textContent,
  };
}"""
# The same at every step, by the button that a reader presses.
READ_ALL = f"""(num) => {{
  const read = {READ};
  const step = document.querySelector(".rk-button--step");
  const out = [read()];
  for (let i = 1; i < num; i++) {{ step.click(); out.push(read()); }}
  return out;
}}"""


def steps_of(example: str, pool: int, policy: str = "lru") -> list[Step]:
    return Run(EXAMPLES[example], scene.words(), pool, policy).steps


def state(example: str, pool: int, step: int, policy: str = "lru") -> str:
    return f"{PAGE}#example={example}&pool={pool}&policy={policy}&step={step}"


def move(page: Page, address: str) -> None:
    """To another moment, as a link on the page does it."""
    page.evaluate("(hash) => { location.hash = hash; }", address.partition("#")[2])
    at_step(page, int(address.rpartition("=")[2]))


def find(steps: list[Step], wanted: Callable[[Step], Any]) -> int:
    return next(i for i, step in enumerate(steps) if wanted(step))


def opened(page: Page, address: str) -> Page:
    page.goto(address)
    expect(page.locator("#rk-tree")).to_have_attribute("data-step", re.compile(r"\d+"))
    return page


def at_step(page: Page, step: int) -> None:
    expect(page.locator("#rk-tree")).to_have_attribute("data-step", str(step))


@pytest.mark.parametrize(
    ("example", "pool", "policy"),
    [(name, pool, "lru") for name in EXAMPLES for pool in (scene.POOLS[0], scene.POOLS[-1])]
    + [("few-shot", 13, "lfu"), ("branching", 11, "fifo")],
)
def test_every_step_shows_what_python_says(page: Page, example: str, pool: int, policy: str) -> None:
    steps = steps_of(example, pool, policy)
    opened(page, state(example, pool, 0, policy))
    prompts = EXAMPLES[example].prompts
    before = steps[0].state
    for number, (seen, step) in enumerate(zip(page.evaluate(READ_ALL, len(steps)), steps, strict=True)):
        where = f"step {number}: {seen}"
        assert seen["where"] == f"{number} / {len(steps) - 1}"
        assert seen["event"] == step.text, where
        assert seen["counters"] == {name: getattr(step.state.counters, name) for name in seen["counters"]}
        assert len(seen["counters"]) == 9
        words = [] if step.request < 0 else prompts[step.request].words + prompts[step.request].answer_words
        assert seen["prompt"] == words[: step.typed], where
        assert seen["hit"] == words[: step.hit], where
        # An eviction is drawn on the tree that it is taken from.
        evicts = step.gone and step.act in ("allocate", "answer")
        shown = before if evicts else step.state
        cached = [block for node in shown.nodes for block in node.blocks]
        assert sorted(seen["blocks"]) == sorted(cached), where
        assert seen["nodes"] == seen["items"] == len(shown.nodes)
        assert sorted(seen["pinned"]) == sorted(block for block in cached if shown.refs[block] > 1)
        assert seen["treeWords"] == shown.counters.cached_tokens
        assert sorted(seen["added"]) == sorted(step.added)
        assert sorted(seen["gone"]) == sorted(step.gone if evicts else ()), where
        if step.act in ("type", "match", "allocate") and set(step.path) <= set(cached):
            assert sorted(seen["treeHit"]) == sorted(words[: step.hit]), where
        assert len(seen["split"]) == (1 if step.split else 0), where
        refs = step.state.refs
        assert seen["pool"] == pool
        assert seen["free"] == [block for block in range(pool) if refs[block] == 0]
        now = {block for node in step.state.nodes for block in node.blocks}
        assert seen["own"] == [block for block in range(pool) if refs[block] and block not in now]
        before = step.state


def test_a_split_is_shown(page: Page, shots: Path) -> None:
    steps = steps_of("few-shot", 12)
    number = find(steps, lambda step: step.split)
    opened(page, state("few-shot", 12, number - 1))
    root = page.locator("#rk-tree")
    expect(root.locator(".rkt-node")).to_have_count(1)
    page.keyboard.press("ArrowRight")
    at_step(page, number)
    expect(root.locator(".rkt-node")).to_have_count(3)
    expect(root.locator(".rkt-split")).to_have_text("split")
    expect(root.locator("[data-tree=event]")).to_contain_text("Edge of 4 blocks split after 3")
    page.screenshot(path=shots / "tree-split.png")


def test_an_eviction_is_shown(page: Page, shots: Path) -> None:
    steps = steps_of("few-shot", 10)
    number = find(steps, lambda step: step.gone and step.act == "allocate")
    opened(page, state("few-shot", 10, number))
    root = page.locator("#rk-tree")
    expect(root.locator(".rkt-block--gone")).to_have_count(len(steps[number].gone))
    expect(root.locator("[data-tree=event]")).to_contain_text(f"evicted {len(steps[number].gone)} blocks")
    page.screenshot(path=shots / "tree-evicted.png")
    page.keyboard.press("ArrowRight")
    expect(root.locator(".rkt-block--gone")).to_have_count(0)
    left = len(steps[number + 1].state.nodes)
    expect(root.locator(".rkt-node")).to_have_count(left)


def test_the_keyboard_is_enough(page: Page) -> None:
    opened(page, PAGE)
    at_step(page, 0)
    for key, step in [("ArrowRight", 1), ("ArrowRight", 2), ("ArrowLeft", 1)]:
        page.keyboard.press(key)
        at_step(page, step)
    page.get_by_role("button", name="Step", exact=True).focus()
    last = len(steps_of("few-shot", 12)) - 1
    page.keyboard.press("End")
    at_step(page, last)
    page.keyboard.press("Home")
    at_step(page, 0)
    page.get_by_role("button", name="Next prompt").focus()
    page.keyboard.press("Enter")
    expect(page.locator("#rk-tree")).to_have_attribute("data-act", "match")
    # Out of the buttons, space plays and pauses.
    page.locator(".rkt-tree").focus()
    page.keyboard.press("Space")
    expect(page.get_by_role("button", name="Pause")).to_be_visible()
    page.keyboard.press("Space")
    expect(page.get_by_role("button", name="Play", exact=True)).to_be_visible()
    # Options are ordinary form controls.
    page.get_by_role("radio", name="Few-shot").focus()
    page.keyboard.press("ArrowRight")
    expect(page.get_by_role("radio", name="Chat")).to_be_checked()
    at_step(page, 0)


def test_playing_goes_to_the_end(still: Callable[[str], Page]) -> None:
    last = len(steps_of("chat", 19)) - 1
    page = still(state("chat", 19, last - 6))
    page.get_by_role("button", name="Play", exact=True).click()
    page.clock.run_for(1100)
    at_step(page, last - 2)
    page.clock.run_for(1000)
    at_step(page, last)
    expect(page.get_by_role("button", name="Play", exact=True)).to_be_visible()


def test_next_prompt_goes_from_send_to_send(page: Page) -> None:
    steps = steps_of("branching", 19)
    opened(page, state("branching", 19, 0))
    for number in (i for i, step in enumerate(steps) if step.act == "match"):
        page.get_by_role("button", name="Next prompt").click()
        at_step(page, number)
    page.get_by_role("button", name="Next prompt").click()
    at_step(page, len(steps) - 1)


def test_the_address_names_the_moment(page: Page) -> None:
    opened(page, state("chat", 11, 30, "fifo"))
    at_step(page, 30)
    expect(page.get_by_role("radio", name="Chat")).to_be_checked()
    expect(page.get_by_role("radio", name="FIFO")).to_be_checked()
    expect(page.get_by_label("Pool", exact=True)).to_have_value("11")
    page.keyboard.press("ArrowRight")
    expect(page).to_have_url(re.compile(r"#example=chat&pool=11&policy=fifo&step=31$"))
    # What makes no sense is mended.
    page.goto("about:blank")
    opened(page, state("nothing", 999, 99999, "best"))
    at_step(page, len(steps_of("few-shot", scene.POOLS[-1])) - 1)
    expect(page.get_by_role("radio", name="LRU")).to_be_checked()
    # The links of the introduction.
    page.get_by_role("link", name="A chat goes on").click()
    expect(page.locator("#rk-tree")).to_have_attribute("data-act", "match")
    expect(page.get_by_role("radio", name="Chat")).to_be_checked()


def test_an_event_in_the_list_is_a_way_there(page: Page) -> None:
    steps = steps_of("few-shot", 12)
    number = find(steps, lambda step: step.split)
    opened(page, PAGE)
    page.locator(f".rk-events [data-step='{number}']").click()
    at_step(page, number)
    expect(page.locator(".rk-events [aria-current]")).to_have_text(f"{number}{steps[number].text}")
    # The list follows, without moving the page.
    page.keyboard.press("End")
    expect(page.locator(".rk-events [aria-current]")).to_be_in_viewport()
    assert page.evaluate("scrollY") == 0


def test_the_pool_and_the_tree_point_at_each_other(page: Page) -> None:
    opened(page, state("few-shot", 12, 41))
    page.locator(".rkt-cell[data-block='3']").hover()
    expect(page.locator(".rkt-block[data-block='3']")).to_have_class(re.compile("rkt-pointed"))
    page.locator(".rkt-block[data-block='4'] .rkt-badge").hover()
    expect(page.locator(".rkt-cell[data-block='4']")).to_have_class(re.compile("rkt-pointed"))
    expect(page.locator(".rkt-cell[data-block='3']")).not_to_have_class(re.compile("rkt-pointed"))


def test_it_can_be_read_aloud(page: Page) -> None:
    opened(page, state("few-shot", 12, 41))
    expect(page.get_by_role("img", name="The tree: 3 nodes")).to_be_visible()
    page.get_by_text("The tree as a list").click()
    nested = page.locator(".rkt-aslist > div > ul > li > ul > li")
    expect(nested).to_have_count(2)
    expect(nested.last).to_contain_text("“bad warm bread =”; block 4; pinned: 4; 1 word matched")
    cell = page.get_by_role("list").locator("[data-block='3'] .rk-hidden")
    expect(cell).to_have_text("Block 3: cached, evictable, 4 of 4 rows filled")
    page.keyboard.press("ArrowRight")
    step = steps_of("few-shot", 12)[42]
    expect(page.get_by_role("status")).to_have_text(f"Step 42 of 144. {step.text}")


def test_all_of_it_is_seen_at_a_desk(page: Page) -> None:
    opened(page, PAGE)
    for example in EXAMPLES:
        move(page, state(example, 12, 1))
        for part in (".rk-controls", ".rkt-prompt", ".rkt-tree", ".rkt-legend", ".rk-events"):
            expect(page.locator(part)).to_be_in_viewport(ratio=1 if part != ".rkt-tree" else 0.9)


def test_nothing_moves_for_those_who_want_that(new_page: Callable[..., Page]) -> None:
    page = new_page(reduced_motion="reduce")
    opened(page, state("few-shot", 12, 40))
    assert page.locator(".rkt-block").first.evaluate("(e) => getComputedStyle(e).transitionDuration") == "0s"


def test_no_sideways_scrolling(page: Page) -> None:
    opened(page, state("chat", 19, 90))
    for width in (320, 360, 640, 768, 1000, 1280):
        page.set_viewport_size({"width": width, "height": 844})
        page.wait_for_function(f"{WIDE_CONTENT} == 0")  # the theme's search folds up
        # Nothing lies on what comes below it.
        events, below = page.locator(".rk-events").bounding_box(), page.locator(".rkt-aslist").bounding_box()
        assert events["y"] + events["height"] <= below["y"] + 1, width


def test_a_tree_that_scrolls_is_scrolled_by_the_keyboard(page: Page) -> None:
    opened(page, state("few-shot", 19, 144))
    page.add_style_tag(content=".rkt-svg {min-width: 3000px}")  # none of the examples is so wide
    page.locator(".rkt-tree").focus()
    page.keyboard.press("ArrowRight")
    page.wait_for_function("document.querySelector('.rkt-tree').scrollLeft > 0")
    at_step(page, 144)
    page.get_by_role("button", name="Back", exact=True).focus()
    page.keyboard.press("ArrowLeft")
    at_step(page, 143)


@pytest.mark.parametrize("size", ["desktop", "phone"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_looks_right(new_page: Callable[..., Page], shots: Path, size: str, scheme: str) -> None:
    page = opened(new_page(size, scheme), PAGE)
    for example in EXAMPLES:
        last = len(steps_of(example, 13)) - 1
        for pool, step in ((19, last), (13, last - 1)):
            move(page, state(example, pool, step))
            assert page.evaluate(WIDE_CONTENT) == 0
            # No word of the tree is drawn outside its box.
            outside = page.evaluate(
                """() => [...document.querySelectorAll(".rkt-block")].filter((block) => {
                  const row = block.querySelector(".rkt-row").getBoundingClientRect();
                  return [...block.querySelectorAll(".rkt-word")].some((word) => {
                    const box = word.getBoundingClientRect();
                    return box.left < row.left - 1 || box.right > row.right + 1;
                  });
                }).length"""
            )
            assert outside == 0
        page.screenshot(path=shots / f"tree-{example}-{size}-{scheme}.png", full_page=size == "phone")


def test_it_works_from_a_folder(page: Page, site: Path) -> None:
    opened(page, f"{site.as_uri()}/{state('branching', 12, 60)}")
    at_step(page, 60)
    page.keyboard.press("ArrowRight")
    at_step(page, 61)
