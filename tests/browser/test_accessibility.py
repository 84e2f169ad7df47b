"""No page has a fault that axe calls serious or critical, in either scheme."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from axe_playwright_python.base import AXE_SCRIPT
from playwright.sync_api import Page

from tests.browser.test_every_page import pages_of

# A rule and the element that may break it: faults of the theme, each with its reason.
THEME = {
    ("aria-dialog-name", ".md-search"): "its search has no name; the text field in it has one",
}
# The interactive pages are looked at in more moments than the first.
MOMENTS = {
    "interactive/blocks.html": ["step=5", "mode=swap&step=26", "pool=12&step=30"],
    "interactive/tree.html": ["step=41", "pool=10&step=96", "example=chat&pool=19&step=90"],
}
# With the menus.
WHOLE = {"index.html", "api/scheduler.html", "interactive/blocks.html"}

# Colours are what takes long: axe looks at one text of each look, which is colour, size, weight and what is behind it.
CHECK = """async ([moments, whole]) => {
  const backdrops = new Map();
  const backdropOf = (element) => {
    if (!element) return "";
    if (!backdrops.has(element)) {
      const {backgroundColor, backgroundImage, opacity} = getComputedStyle(element);
      const own = [backgroundColor, backgroundImage, opacity].join(" ");
      const below = backdropOf(element.parentElement);
      backdrops.set(element, own === "rgba(0, 0, 0, 0) none 1" ? below : `${own}; ${below}`);
    }
    return backdrops.get(element);
  };
  const looks = () => {
    backdrops.clear();
    const found = new Map();
    const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (texts.nextNode()) {
      const element = texts.currentNode.parentElement;
      if (!texts.currentNode.data.trim() || !element.checkVisibility()) continue;
      const {color, fontSize, fontWeight, textDecorationLine} = getComputedStyle(element);
      const around = element.tagName === "A" ? getComputedStyle(element.parentElement).color : "";
      const look = [color, fontSize, fontWeight, textDecorationLine, around, backdropOf(element)].join("; ");
      if (!found.has(look)) found.set(look, element);
    }
    return [...found.values()];
  };
  const faults = [];
  const run = async (context, options, at) => {
    const {violations} = await axe.run(context, {resultTypes: ["violations"], ...options});
    for (const {id, impact, nodes} of violations.filter(({impact}) => ["serious", "critical"].includes(impact))) {
      for (const {target, failureSummary} of nodes) faults.push([id, target.join(" "), at, failureSummary]);
    }
  };
  const colours = ["color-contrast", "link-in-text-block"];
  const frame = () => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));

  document.head.insertAdjacentHTML("beforeend", "<style>* {transition: none !important}</style>");
  // What is on a page axe goes through, seen or not: the menus that are on all pages are left on some, and in the API
  // reference one folded source stands for all.
  if (!whole) for (const menu of document.querySelectorAll(".md-tabs, .md-sidebar, .md-footer")) menu.remove();
  for (const source of [...document.querySelectorAll("details.mkdocstrings-source")].slice(1)) source.remove();
  for (const folded of document.querySelectorAll("details")) folded.open = true;
  for (const moment of moments) {
    location.hash = moment;
    await frame();
    await run(document, {rules: Object.fromEntries(colours.map((rule) => [rule, {enabled: false}]))}, moment);
    for (const scheme of ["default", "slate"]) {
      document.body.setAttribute("data-md-color-scheme", scheme);
      await run({include: looks()}, {runOnly: colours}, `${moment} ${scheme}`);
    }
  }
  return faults;
}"""


def test_no_page_has_a_serious_fault(new_page: Callable[..., Page], site: Path) -> None:
    page = new_page(reduced_motion="reduce")
    faults, excused = [], set()
    for path in pages_of(site):
        name = path.relative_to(site).as_posix()
        page.goto(name)
        page.evaluate(AXE_SCRIPT)
        asked = [["", *MOMENTS.get(name, [])], name in WHOLE]
        for rule, target, where, why in page.evaluate(CHECK, asked):
            if (rule, target) in THEME:
                excused.add((rule, target))
            else:
                faults.append(f"{name} {where}: {rule} at {target}: {why}")
    assert not faults, "\n".join(faults)
    assert excused == set(THEME)  # what the theme has mended needs no excuse
