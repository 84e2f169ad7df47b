"""Every page of the built site opens without an error and fetches nothing from elsewhere, also from a folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

# Pixels by which a page is wider than its window.
WIDE_CONTENT = "document.documentElement.scrollWidth - document.documentElement.clientWidth"


def pages_of(site: Path) -> list[Path]:
    return sorted(page for page in site.rglob("*.html") if page.name != "404.html")


def test_every_page_opens_from_a_folder_without_an_error(page: Page, site: Path) -> None:
    pages = pages_of(site)
    assert len(pages) > 40
    for path in pages:
        page.goto(path.as_uri())
        assert page.title(), path


def test_every_page_opens_on_a_phone_and_is_not_wider(new_page: Callable[..., Page], site: Path) -> None:
    page = new_page("phone")
    wide = {}
    for path in pages_of(site):
        page.goto(path.relative_to(site).as_posix())
        assert page.title(), path
        if not path.is_relative_to(site / "assets") and (over := page.evaluate(WIDE_CONTENT)):
            wide[path.name] = over
    assert not wide


@pytest.mark.parametrize("way", ["served", "folder"])
def test_the_search_finds_a_class(page: Page, site: Path, origin: str, way: str) -> None:
    start = origin if way == "served" else site.as_uri()
    page.goto(f"{start}/index.html")
    page.keyboard.press("/")
    page.get_by_role("textbox", name="Search").type("RadixTree", delay=20)
    found = page.locator(".md-search-result__item").first
    expect(found).to_be_visible(timeout=15_000)
    expect(found).to_contain_text("RadixTree")


@pytest.mark.parametrize(("scheme", "wanted"), [("light", "default"), ("dark", "slate")])
def test_the_site_follows_the_scheme_of_the_system(
    new_page: Callable[..., Page], scheme: str, wanted: str
) -> None:
    page = new_page(scheme=scheme)
    page.goto("index.html")
    expect(page.locator("body")).to_have_attribute("data-md-color-scheme", wanted)
