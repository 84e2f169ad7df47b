"""The page "Blocks, block tables and preemption" in a browser."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Locator, Page, expect

from docs.tooling.scenes._blocks_recorder import Recording, Setting, State, record
from docs.tooling.scenes._blocks_story import REQUESTS
from tests.browser.test_every_page import WIDE_CONTENT

URL = "interactive/blocks.html"
# All that a step shows, in one question.
SHOWN = """() => {
  const all = (selector, say) => [...document.querySelectorAll(selector)].map(say);
  return {
    counters: Object.fromEntries(all('[data-counter]', (e) => [e.dataset.counter, e.textContent])),
    notes: all('.rkb-counter small', (e) => e.textContent),
    pool: all('[data-blocks=pool] .rkb-block', (e) => [
      e.querySelector('.rkb-mark')?.textContent ?? '', parseFloat(e.querySelector('.rkb-fill').style.width) / 25]),
    tables: all('.rkb-row', (row) => [...row.querySelectorAll('.rkb-entry--full')].map((e) => Number(e.dataset.id))),
    lists: Object.fromEntries(all('[data-list]', (list) => [list.dataset.list,
      [...list.querySelectorAll('li')].map((e) => Number(e.dataset.request))])),
    latest: document.querySelector('[data-blocks=latest]').textContent,
    where: document.querySelector('.rk-where').textContent,
  };
}"""
# The same at every step, from the first on and then back, by the buttons that a reader presses.
SHOWN_AT_ALL = f"""(num) => {{
  const shown = {SHOWN};
  const press = (name) => document.querySelector(`.rk-button--${{name}}`).click();
  const out = [shown()];
  for (let i = 1; i < num; i++) {{ press("step"); out.push(shown()); }}
  for (let i = 1; i < num; i++) {{ press("back"); out.push(shown()); }}
  return out;
}}"""
LISTS = {"R": "Running", "W": "Waiting", "S": "Swapped", "F": "Finished", "-": "To come"}


def at(page: Page, step: int) -> None:
    expect(page.locator(".rk-where")).to_have_text(re.compile(rf"^{step} / \d+$"))


def fragment(page: Page) -> dict[str, str]:
    _, _, state = page.url.partition("#")
    return dict(part.split("=") for part in state.split("&"))


def block(page: Page, number: int, kind: str = "pool") -> Locator:
    return page.locator(f"[data-blocks={kind}] .rkb-block").nth(number)


def count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def expected(state: State, pool: int) -> dict[str, Any]:
    """What the page must say of a state."""
    c = state.counters
    running = [request for request in state.requests if request.state == "R"]
    slabs = f"{len(running)} × 64 = {len(running) * 64} slots; the pool has {pool * 4}"
    holders: dict[int, list[int]] = {}
    filled = {cached.block: cached.rows for cached in state.cached}
    for rid, request in enumerate(state.requests):
        for logical, number in enumerate(request.table):
            holders.setdefault(number, []).append(rid)
            filled[number] = min(4, request.computed - 4 * logical)
    idle = {cached.block for cached in state.cached} - holders.keys()
    marks = {number: "S" if len(who) > 1 else str(who[0]) for number, who in holders.items()}
    marks |= dict.fromkeys(idle, "◇")
    return {
        "counters": {
            "used": f"{c.used} / {pool}",
            "slack": count(c.slack, "slot"),
            "contiguous": count(c.contiguous, "slot"),
            "shared": str(c.shared),
            "to_recompute": str(c.to_recompute),
        },
        "notes": [
            f"{c.cached} cached, {pool - c.used - c.cached} free",
            slabs if running else "slabs of 64 slots",
            f"{c.recomputed} computed again so far",
        ],
        "pool": [[marks.get(number, ""), filled.get(number, 0)] for number in range(pool)],
        "tables": [
            request.table or [number for number in request.host if number >= 0] for request in state.requests
        ],
        "lists": {
            name: [rid for rid, request in enumerate(state.requests) if request.state == letter]
            for letter, name in LISTS.items()
        },
    }


def latest(recording: Recording, step: int) -> str:
    while step and not recording.states[step].events:
        step -= 1
    return f"Step {step}. {' '.join(event.text for event in recording.states[step].events)}" if step else ""


def test_numbers_before_the_first_step(page: Page) -> None:
    page.goto(URL)
    at(page, 0)
    counters = page.locator(".rkb-counters")
    for text in ("Blocks used", "Paged slack", "Contiguous waste", "Shared tokens stored once"):
        expect(counters.get_by_text(text, exact=True)).to_be_visible()
    expect(counters.get_by_text("Preempted, to recompute (tokens)", exact=True)).to_be_visible()
    shown = page.evaluate(SHOWN)
    assert shown["counters"] == {
        "used": "0 / 28",
        "slack": "0 slots",
        "contiguous": "0 slots",
        "shared": "0",
        "to_recompute": "0",
    }
    assert shown["pool"] == [["", 0]] * 28
    assert shown["lists"] == {
        "Running": [],
        "Waiting": [],
        "Swapped": [],
        "Finished": [],
        "To come": [0, 1, 2, 3, 4, 5],
    }
    expect(page.get_by_label("Pool size")).to_have_value("28")
    expect(page.get_by_role("radio", name="Recompute")).to_be_checked()
    expect(page.get_by_label("Share prefixes")).to_be_checked()
    expect(page.get_by_label("Keep cached")).to_be_checked()
    expect(page.get_by_text("28 blocks, 112 tokens")).to_be_visible()


SETTINGS = [Setting(pool, mode, True, True) for pool in (12, 20, 28) for mode in ("recompute", "swap")]
SETTINGS += [Setting(24, "recompute", True, False), Setting(24, "recompute", False, False)]


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: "-".join(map(str, setting)))
def test_every_step_shows_what_python_says(page: Page, setting: Setting) -> None:
    pool, mode, share, keep = setting
    recording = record(setting)
    num = len(recording.states)
    page.goto(f"{URL}#pool={pool}&mode={mode}&share={int(share)}&keep={int(keep)}")
    shown = page.evaluate(SHOWN_AT_ALL, num)
    # And back again: a state does not depend on how it was reached.
    steps = [*range(num), *reversed(range(num - 1))]
    for step, seen in zip(steps, shown, strict=True):
        said = seen.pop("latest")
        assert seen.pop("where") == f"{step} / {num - 1}"
        assert seen == expected(recording.states[step], pool), step
        assert not latest(recording, step) or said == latest(recording, step)
    assert shown[num - 1]["lists"]["Finished"] == list(range(6))


def test_request_2_shows_shared_blocks_when_it_joins(page: Page) -> None:
    page.goto(f"{URL}#step=4")
    expect(page.locator(".rkb-block--shared")).to_have_count(0)
    page.get_by_role("button", name="Step").click()
    at(page, 5)
    expect(page.locator(".rkb-block--shared")).to_have_count(3)
    for number in range(3):
        expect(block(page, number).locator(".rkb-mark")).to_have_text("S")
        expect(block(page, number)).to_have_attribute(
            "aria-label", f"Block {number}: shared by requests 0 and 2, 4 of 4 slots filled"
        )
    expect(page.locator("[data-blocks=latest]")).to_contain_text("it shares blocks 0 to 2, copies 2 tokens")
    expect(page.locator("[data-counter=shared]")).to_have_text("12")
    page.get_by_label("Share prefixes").uncheck()
    expect(page.locator(".rkb-block--shared")).to_have_count(0)
    at(page, 5)


def test_a_smaller_pool_forces_a_preemption_and_all_six_still_finish(page: Page) -> None:
    page.goto(URL)
    pool = page.get_by_label("Pool size")
    pool.fill("34")
    expect(page.locator(".rk-event--preempt")).to_have_count(0)
    smallest = int(pool.get_attribute("min"))
    for mode in ("Recompute", "Swap"):
        page.get_by_role("radio", name=mode).check()
        for size in (28, 20, smallest):
            pool.fill(str(size))
            expect(page.locator(".rk-event--preempt").first).to_be_attached()
            page.get_by_label("Position").press("End")
            assert page.evaluate(SHOWN)["lists"]["Finished"] == list(range(6))
            expect(page.locator("[data-counter=used]")).to_have_text(f"0 / {size}")


def test_swap_shows_the_host_tier(page: Page) -> None:
    page.goto(f"{URL}#step=25")
    expect(page.locator("[data-blocks=host-section]")).to_be_hidden()
    expect(page.locator('[data-list="Waiting"]')).to_contain_text("preempted")
    page.get_by_role("radio", name="Swap").check()
    expect(page.locator("[data-blocks=host-section]")).to_be_visible()
    expect(page.locator("[data-blocks=host] .rkb-block--held")).to_have_count(8)
    expect(block(page, 0, "host")).to_have_attribute(
        "aria-label", "Host block 0: held by request 5, 4 of 4 slots filled"
    )
    expect(page.locator('[data-list="Swapped"] li')).to_have_count(1)
    expect(page.locator("[data-blocks=latest]")).to_contain_text("copied to the host tier")
    expect(page.get_by_role("gridcell", name="Request 5, logical block 2: host block 2")).to_have_text("h2")


def test_changing_an_option_keeps_the_step_if_there_is_one(page: Page) -> None:
    page.goto(f"{URL}#pool=12&step=60")
    at(page, 60)
    page.get_by_role("radio", name="Swap").check()
    at(page, 60)
    page.get_by_label("Pool size").fill("34")
    expect(page.locator(".rk-where")).to_have_text("38 / 38")


def test_keys(still: Callable[[str], Page]) -> None:
    page = still(URL)
    for key, step in [("ArrowRight", 1), ("ArrowRight", 2), ("ArrowLeft", 1)]:
        page.keyboard.press(key)
        at(page, step)
    play = page.locator(".rk-button--play")
    page.keyboard.press(" ")
    expect(play).to_have_text("Pause")
    page.clock.run_for(1100)
    at(page, 3)
    page.keyboard.press(" ")
    expect(play).to_have_text("Play")
    # Those that scroll the page elsewhere work inside.
    page.get_by_role("button", name="Step").focus()
    page.keyboard.press("End")
    at(page, 46)
    expect(page.get_by_role("button", name="Step")).to_be_disabled()
    expect(page.get_by_role("button", name="Step")).to_be_focused()
    page.keyboard.press("Home")
    at(page, 0)
    page.keyboard.press(" ")  # it presses the button
    at(page, 1)
    # A control that uses these keys has them for itself.
    page.get_by_label("Pool size").focus()
    page.keyboard.press("ArrowLeft")
    expect(page.get_by_label("Pool size")).to_have_value("27")
    at(page, 1)
    page.get_by_label("Keep cached").focus()
    page.keyboard.press(" ")
    expect(page.get_by_label("Keep cached")).not_to_be_checked()
    expect(play).to_have_text("Play")
    page.keyboard.press("ArrowRight")
    at(page, 2)
    page.keyboard.press("Control+ArrowRight")
    at(page, 2)
    # Keys that are held: steps go by, playing is asked for once.
    for _ in range(3):
        page.keyboard.down("ArrowRight")
    page.keyboard.up("ArrowRight")
    at(page, 5)
    page.evaluate("document.activeElement.blur()")
    for _ in range(4):
        page.keyboard.down(" ")
    page.keyboard.up(" ")
    expect(play).to_have_text("Pause")


def test_buttons_and_playing(still: Callable[[str], Page]) -> None:
    page = still(f"{URL}#step=3")
    page.get_by_role("button", name="Play").click()
    page.clock.run_for(1100)
    at(page, 5)
    page.get_by_label("Speed").select_option("8")
    page.clock.run_for(1050)
    at(page, 13)
    page.get_by_role("button", name="Pause").click()
    page.clock.run_for(1000)
    at(page, 13)
    page.get_by_role("button", name="Play").click()
    page.clock.run_for(10_000)
    at(page, 46)
    expect(page.get_by_role("button", name="Play")).to_be_visible()  # the end is reached
    page.get_by_role("button", name="Back", exact=True).click()
    at(page, 45)
    page.get_by_role("button", name="Reset").click()
    at(page, 0)


def test_what_a_screen_reader_says(still: Callable[[str], Page]) -> None:
    page = still(f"{URL}#step=4")
    said = page.get_by_role("status")
    page.clock.run_for(1000)
    expect(said).to_have_text("")
    page.keyboard.press("ArrowRight")
    page.clock.run_for(1000)
    expect(said).to_have_text(
        "Step 5 of 46. Request 2 starts with a prefix that is cached: it shares blocks 0 to 2, "
        "copies 2 tokens into block 8, and computes 1 prompt token."
    )
    # The last of several steps in a row.
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    expect(said).to_have_text(re.compile("^Step 5 of 46. "))
    page.clock.run_for(1000)
    expect(said).to_have_text(re.compile("^Step 7 of 46. "))
    page.evaluate("location.hash = 'step=9'")
    at(page, 9)
    page.clock.run_for(1000)
    expect(said).to_have_text("Step 9 of 46. No event.")
    # Nothing while playing, and where it was stopped.
    page.get_by_role("button", name="Play").click()
    page.clock.run_for(1600)
    at(page, 12)
    expect(said).to_have_text("Step 9 of 46. No event.")
    page.get_by_role("button", name="Pause").click()
    page.clock.run_for(1000)
    expect(said).to_have_text(re.compile("^Step 12 of 46. The last block"))


def test_the_address_names_the_state(page: Page) -> None:
    page.goto(f"{URL}#pool=20&mode=swap&share=1&keep=0&step=17")
    at(page, 17)
    expect(page.get_by_label("Pool size")).to_have_value("20")
    expect(page.get_by_role("radio", name="Swap")).to_be_checked()
    expect(page.get_by_label("Keep cached")).not_to_be_checked()
    before = page.evaluate("history.length")
    page.keyboard.press("ArrowRight")
    page.get_by_role("radio", name="Recompute").check()
    page.wait_for_function("location.hash.includes('step=18') && location.hash.includes('mode=recompute')")
    assert fragment(page) == {"pool": "20", "mode": "recompute", "share": "1", "keep": "0", "step": "18"}
    assert page.evaluate("history.length") == before
    shown = page.evaluate(SHOWN)
    page.reload()
    assert page.evaluate(SHOWN) == shown
    # A link on the page sets all of it.
    page.get_by_role("link", name="Swap instead of recompute").click()
    at(page, 25)
    expect(page.get_by_label("Pool size")).to_have_value("28")
    expect(page.get_by_role("radio", name="Swap")).to_be_checked()
    expect(page.get_by_label("Keep cached")).to_be_checked()
    page.go_back()
    at(page, 18)
    expect(page.get_by_label("Pool size")).to_have_value("20")
    page.go_forward()
    at(page, 25)


def test_the_browser_goes_back_to_a_moment(page: Page) -> None:
    page.goto(URL)
    page.get_by_role("link", name="Request 5 takes over").click()
    at(page, 19)
    page.keyboard.press("ArrowRight")
    page.wait_for_function("location.hash.includes('step=20')")
    page.get_by_role("link", name="Nothing shared").click()
    at(page, 5)
    page.go_back()
    at(page, 20)  # as it was left, though it was this page that wrote that address
    page.go_back()
    at(page, 0)
    assert "#" not in page.url
    # A link that is followed before the address is written.
    page.evaluate(
        """async () => {
          document.querySelector('.rk-button--step').click();
          await new Promise((done) => setTimeout(done, 100));
          location.hash = 'mode=swap&step=25';
          for (const end = performance.now() + 60; performance.now() < end;);
        }"""
    )
    at(page, 25)
    expect(page.get_by_role("radio", name="Swap")).to_be_checked()
    # A heading of the page is no state.
    page.evaluate("location.hash = 'what-a-step-is'")
    page.keyboard.press("ArrowRight")
    at(page, 26)


BAD_ADDRESSES = {
    "pool=1&step=5": ("12", 5),
    "pool=999&step=9999": ("34", 38),
    "pool=9999&mode=x&step=-1": ("34", 0),
    "pool=x&mode=magic&share=7&keep=&step=y": ("28", 0),
    "pool=&step=-4": ("28", 0),
    "step=7.4": ("28", 7),
    "step=3&step=4": ("28", 3),
    "pool=12.5&step=1e400": ("13", 0),
    "pool=%E0%A4%A&step=☃": ("28", 0),
    "mode=constructor&pool=__proto__&step=2": ("28", 2),
    f"step={'9' * 5000}": ("28", 0),
    "nonsense=1": ("28", 0),
    "what-is-counted": ("28", 0),
}


def test_an_address_that_makes_no_sense_is_mended(page: Page) -> None:
    for given, (pool, step) in BAD_ADDRESSES.items():
        page.goto("about:blank")
        page.goto(f"{URL}#{given}")
        at(page, step)
        expect(page.get_by_label("Pool size")).to_have_value(pool)
        expect(page.get_by_role("radio", name="Recompute")).to_be_checked()


def test_nothing_is_remembered(page: Page) -> None:
    page.goto(URL)
    page.keyboard.press("ArrowRight")
    page.get_by_role("radio", name="Swap").check()
    kept = (
        "[...Object.keys(localStorage), ...Object.keys(sessionStorage)].filter((key) => !key.includes('__'))"
    )
    assert page.evaluate(kept) == []
    assert page.evaluate("document.cookie") == ""
    assert page.context.cookies() == []


def test_events_lead_to_their_step(page: Page) -> None:
    page.goto(URL)
    top = page.evaluate("scrollY")
    page.locator(".rk-event--preempt button").click()
    at(page, 25)
    current = page.locator(".rk-event button[aria-current=step]")
    expect(current).to_have_count(1)
    expect(current).to_contain_text("Request 5 arrived last")
    expect(page.locator("[data-blocks=latest]")).to_contain_text("Step 25. No block is free.")
    assert page.evaluate("scrollY") == top


def test_pointing_links_tables_and_blocks(page: Page) -> None:
    page.goto(f"{URL}#step=8")
    linked, arrows = page.locator(".rkb-linked"), page.locator(".rkb-arrow")
    inspector = page.locator("[data-blocks=inspector]")
    expect(linked).to_have_count(0)
    block(page, 1).hover()
    expect(linked).to_have_count(3)  # the block, and an entry of each request that shares it
    expect(arrows).to_have_count(2)
    expect(inspector).to_contain_text(
        "Block 1 shared by requests 0 and 2, logical block 1, in the radix tree."
    )
    assert page.locator(".rkb-word").all_inner_texts() == list(REQUESTS[0].prompt[4:8])
    page.get_by_role("gridcell", name="Request 3, logical block 1: physical block 13").hover()
    expect(linked).to_have_count(2)
    expect(block(page, 13)).to_have_class(re.compile("rkb-linked"))
    assert page.locator(".rkb-word").all_inner_texts() == ["winter", ".", "empty", "empty"]
    page.mouse.move(5, 5)
    expect(linked).to_have_count(0)
    # A click pins: it stays while steps go by.
    block(page, 13).click()
    page.mouse.move(5, 5)
    page.keyboard.press("ArrowRight")
    at(page, 9)
    expect(linked).to_have_count(2)
    assert page.locator(".rkb-word").all_inner_texts() == ["winter", ".", "Snow", "empty"]
    block(page, 13).click()
    page.mouse.move(5, 5)
    expect(linked).to_have_count(0)


def test_what_is_pointed_at_may_go(page: Page) -> None:
    page.goto(f"{URL}#step=20")
    linked, inspector = page.locator(".rkb-linked"), page.locator("[data-blocks=inspector]")
    block(page, 27).click()
    page.mouse.move(5, 5)
    expect(inspector).to_contain_text("Block 27")
    page.get_by_label("Pool size").fill("20")
    expect(page.locator("[data-blocks=pool] .rkb-block")).to_have_count(20)
    expect(inspector).to_contain_text("Point at a block")
    # What is still there stays pinned, and keeps its place in the order of the tab key.
    block(page, 5).click()
    page.mouse.move(5, 5)
    page.get_by_label("Pool size").fill("30")
    expect(inspector).to_contain_text("Block 5")
    expect(linked.first).to_have_attribute("data-id", "5")
    expect(page.locator("[data-blocks=pool] [tabindex='0']")).to_have_count(1)
    page.goto(f"{URL}#mode=swap&step=26")
    block(page, 0, "host").click()
    page.mouse.move(5, 5)
    expect(inspector).to_contain_text("Host block 0")
    page.get_by_role("radio", name="Recompute").check()
    expect(inspector).to_contain_text("Point at a block")


def test_anything_may_happen_while_it_plays(page: Page) -> None:
    page.goto(URL)
    page.get_by_label("Speed").select_option("8")
    page.locator(".rk-button--play").click()
    for pool in (12, 34, 20):
        page.get_by_label("Pool size").fill(str(pool))
        page.get_by_label("Share prefixes").click()
        page.get_by_role("radio", name="Swap" if pool == 34 else "Recompute").check()
        page.evaluate(
            "(scheme) => document.body.setAttribute('data-md-color-scheme', scheme)",
            "slate" if pool == 12 else "default",
        )
        page.set_viewport_size({"width": 390 if pool == 34 else 1280, "height": 900})
    expect(page.get_by_role("button", name="Pause")).to_be_visible()
    page.get_by_label("Position").fill("20")
    expect(page.get_by_role("button", name="Play")).to_be_visible()
    recording = record(Setting(20, "recompute", False, True))
    shown = page.evaluate(SHOWN)
    del shown["latest"], shown["where"]
    assert shown == expected(recording.states[20], 20)
    # Each event leads to its step, and back again by the key.
    events = page.evaluate(
        """() => [...document.querySelectorAll('.rk-event button')].map((button) => {
          button.click();
          return [button.dataset.step, document.querySelector('.rk-where').textContent.split(' ')[0],
                  button.getAttribute('aria-current')];
        })"""
    )
    assert len(events) > 20
    assert all(wanted == found and current == "step" for wanted, found, current in events)


def test_the_keyboard_links_tables_and_blocks(page: Page) -> None:
    page.goto(f"{URL}#step=8")
    linked = page.locator(".rkb-linked")
    page.get_by_label("Keep cached").focus()
    page.keyboard.press("Tab")
    expect(block(page, 0)).to_be_focused()
    expect(linked).to_have_count(3)
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    expect(block(page, 8)).to_be_focused()
    at(page, 8)
    expect(linked).to_have_count(2)
    page.keyboard.press("Tab")
    entry = page.get_by_role("gridcell", name="Request 0, logical block 0: physical block 0, shared")
    expect(entry).to_be_focused()
    expect(linked).to_have_count(3)
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowRight")
    expect(page.get_by_role("gridcell", name="Request 1, logical block 1: physical block 5")).to_be_focused()
    expect(block(page, 5)).to_have_class(re.compile("rkb-linked"))
    page.keyboard.press("Tab")
    expect(linked).to_have_count(0)
    # One stop for all events: the latest.
    current = page.locator(".rk-event button[aria-current=step]")
    expect(current.last).to_be_focused()
    for key in ("ArrowUp", "ArrowUp", "ArrowUp", "ArrowDown", "Enter"):
        page.keyboard.press(key)
    at(page, 7)
    expect(current).to_be_focused()
    page.keyboard.press("Tab")
    assert not page.evaluate("document.querySelector('#rk-blocks').contains(document.activeElement)")


def test_a_touch_pins(new_page: Callable[..., Page]) -> None:
    page = new_page("phone", has_touch=True)
    page.goto(f"{URL}#step=8")
    block(page, 2).tap()
    expect(page.locator(".rkb-linked")).to_have_count(3)
    expect(page.locator("[data-blocks=inspector]")).to_contain_text("Block 2 shared by requests 0 and 2")
    page.locator("#rkb-counters-title").tap()
    page.locator("#rkb-tables-title").tap()
    expect(page.locator(".rkb-linked")).to_have_count(0)


def test_roles_and_names(page: Page) -> None:
    page.goto(f"{URL}#mode=swap&step=25")
    grid = page.get_by_role("grid", name="Physical blocks")
    expect(grid.get_by_role("row")).to_have_count(4)
    expect(grid.get_by_role("gridcell")).to_have_count(28)
    expect(page.get_by_role("grid", name="Host tier").get_by_role("gridcell")).to_have_count(14)
    expect(
        grid.get_by_role("gridcell", name="Block 4: cached, held by nobody, written by request 1")
    ).to_be_visible()
    expect(grid.get_by_role("gridcell", name=re.compile(r"^Block \d+: free$"))).to_have_count(1)
    table = page.get_by_role("grid", name="Block tables")
    expect(table.get_by_role("row")).to_have_count(7)
    expect(table.get_by_role("rowheader").nth(5)).to_have_text("Request 5Swapped33 of 47 tokens")
    expect(page.get_by_role("list", name="Running").get_by_role("listitem").first).to_have_text("Request 2")
    expect(page.get_by_role("slider", name="Position")).to_have_attribute("aria-valuetext", "step 25 of 46")
    expect(page.get_by_role("slider", name="Pool size")).to_have_attribute(
        "aria-valuetext", "28 blocks, 112 tokens"
    )
    expect(page.get_by_role("group", name="Preemption").get_by_role("radio")).to_have_count(2)
    for name in ("Reset", "Back", "Play", "Step"):
        expect(page.get_by_role("button", name=name, exact=True)).to_be_visible()
    expect(page.locator("[data-blocks=arrows]")).to_have_attribute("aria-hidden", "true")


def test_colour_is_not_the_only_mark(page: Page) -> None:
    page.goto(f"{URL}#step=14")
    patterns = page.evaluate(
        "[...document.querySelectorAll('.rkb-row .rkb-tag')].map((e) => getComputedStyle(e).backgroundImage"
        ".replace(/(rgba?|color)\\\\([^)]*\\\\)/g, ''))"
    )
    assert len(set(patterns)) == 6
    assert page.locator(".rkb-row .rkb-tag").all_inner_texts() == list("012345")


def test_all_of_it_fits_one_screen(page: Page) -> None:
    page.goto(f"{URL}#step=25")
    box = page.locator("#rk-blocks").bounding_box()
    assert box["y"] + box["height"] <= 900
    assert page.evaluate(WIDE_CONTENT) == 0


def test_colours_of_the_reader_hide_nothing(new_page: Callable[..., Page], shots: Path) -> None:
    page = new_page(forced_colors="active")
    page.goto(f"{URL}#step=8")
    block(page, 1).hover()
    chosen, other = (
        page.get_by_role("radio", name=name).evaluate(
            "(e) => getComputedStyle(e.nextSibling).backgroundColor"
        )
        for name in ("Recompute", "Swap")
    )
    assert chosen != other
    assert page.locator(".rkb-linked").first.evaluate("(e) => getComputedStyle(e).outlineStyle") == "solid"
    fills = (
        "[...document.querySelectorAll('.rkb-row .rkb-tag')].map((e) => getComputedStyle(e).backgroundImage)"
    )
    assert len(set(page.evaluate(fills))) == 6
    page.screenshot(path=shots / "blocks-forced-colors.png")


def test_it_can_be_printed(new_page: Callable[..., Page], shots: Path) -> None:
    page = new_page(scheme="dark", viewport={"width": 718, "height": 1046})
    page.goto(f"{URL}#step=18")
    page.emulate_media(media="print")
    for part in (".rkb-grid", ".rkb-tables", ".rkb-counters", ".rk-where", ".rk-options", ".rk-events"):
        box = page.locator(part).first.bounding_box()
        assert 0 <= box["x"] <= box["x"] + box["width"] <= 718, part
    expect(page.get_by_role("button", name="Play")).to_be_hidden()
    expect(page.locator(".rk-event--ahead").first).to_be_hidden()
    assert page.evaluate("(e => e.scrollHeight - e.clientHeight)(document.querySelector('.rk-events'))") == 0
    page.screenshot(path=shots / "blocks-print.png", full_page=True)


def test_no_motion_if_that_is_wanted(new_page: Callable[..., Page]) -> None:
    page = new_page(reduced_motion="reduce")
    page.goto(f"{URL}#step=3")
    assert page.evaluate("getComputedStyle(document.querySelector('.rkb-meter i')).transitionDuration") in (
        "0s",
        "",
    )


def test_no_sideways_scrolling(page: Page) -> None:
    page.goto(URL)
    for state in ("step=0", "pool=12&mode=swap&step=30", "pool=34&step=30", "mode=swap&step=25"):
        page.evaluate("(hash) => { location.hash = hash; }", state)
        at(page, int(state.rpartition("=")[2]))
        for width in (320, 360, 390, 610, 640, 901, 1200, 1280):
            page.set_viewport_size({"width": width, "height": 844})
            block(page, 0).hover()
            assert page.evaluate(WIDE_CONTENT) == 0, (state, width)
            # Nor is anything cut off inside.
            assert page.evaluate(
                "[...document.querySelectorAll('.rkb-main > *, .rkb-tables, .rkb-grid')]"
                ".every((e) => e.scrollWidth <= e.clientWidth + 1)"
            ), (state, width)


def test_the_buttons_stay_in_sight_on_a_phone(new_page: Callable[..., Page]) -> None:
    page = new_page("phone")
    page.goto(f"{URL}#step=24")
    page.locator(".rkb-lists").scroll_into_view_if_needed()
    page.get_by_role("button", name="Step").click()
    at(page, 25)
    expect(page.locator(".rkb-lists")).to_be_in_viewport()
    expect(page.get_by_role("button", name="Step")).to_be_in_viewport()


def test_it_works_from_a_folder(page: Page, site: Path) -> None:
    page.goto(f"{site.as_uri()}/{URL}#pool=20&step=5")
    at(page, 5)
    page.keyboard.press("ArrowRight")
    page.wait_for_function("location.hash.includes('step=6')")
    expect(page.locator("[data-counter=used]")).to_have_text("9 / 20")


@pytest.mark.parametrize(("name", "size", "scheme"), [
    ("blocks-light", "desktop", "light"),
    ("blocks-dark", "desktop", "dark"),
    ("blocks-phone", "phone", "light"),
    ("blocks-phone-dark", "phone", "dark"),
])  # fmt: skip
def test_pictures(new_page: Callable[..., Page], shots: Path, name: str, size: str, scheme: str) -> None:
    page = new_page(size, scheme)
    page.goto(f"{URL}#step=8")
    block(page, 1).hover()
    expect(page.locator(".rkb-linked")).to_have_count(3)
    page.screenshot(path=shots / f"{name}-shared.png")
    page.goto(f"{URL}#mode=swap&step=26")
    at(page, 26)
    page.screenshot(path=shots / f"{name}.png", full_page=size == "phone")
    assert (shots / f"{name}.png").stat().st_size > 20_000
    # Both schemes are really drawn.
    paper = page.evaluate("getComputedStyle(document.querySelector('.rkb-block--held')).backgroundColor")
    lightness = sum(int(part) for part in re.findall(r"\d+", paper)[:3])
    assert (lightness > 600) == (scheme == "light")
