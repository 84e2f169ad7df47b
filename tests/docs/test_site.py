"""The built site is whole: every link leads somewhere, and nothing is fetched from a network."""

from __future__ import annotations

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

ROOT = Path(__file__).resolve().parents[2]
# What a browser fetches by itself when it opens a page; a link waits for a click.
FETCHING = {"script": "src", "img": "src", "iframe": "src", "source": "src", "video": "src", "audio": "src"}
FETCHED_RELATIONS = {
    "stylesheet",
    "icon",
    "preload",
    "prefetch",
    "preconnect",
    "dns-prefetch",
    "modulepreload",
}
STYLE_FETCHES = re.compile(r"(?:url\(|@import)\s*[\"']?(?:https?:)?//")


class Page(HTMLParser):
    """What a page names: `links` wait for a click, `fetched` is asked for at once, `anchors` can be linked to."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self.links: list[str] = []
        self.fetched: list[str] = []
        self.anchors: set[str] = {""}
        self.doubled: set[str] = set()
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        if anchor := given.get("id"):
            (self.doubled if anchor in self.anchors else self.anchors).add(anchor)
        if tag == "a":
            self.anchors.add(given.get("name", ""))
            if "href" in given:
                self.links.append(given["href"])
        elif tag == "link" and set(given.get("rel", "").split()) & FETCHED_RELATIONS:
            self.fetched.append(given["href"])
        elif given.get(FETCHING.get(tag, "")):
            self.fetched.append(given[FETCHING[tag]])
        self.fetched += [part.split()[0] for part in given.get("srcset", "").split(",") if part.strip()]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    found = {path: Page(path) for path in site.rglob("*.html")}
    assert len(found) > 40
    return found


def lost(page: Page, address: str, site: Path, pages: dict[Path, Page]) -> bool:
    """Whether an address on this page leads nowhere in the site."""
    url = urlsplit(address)
    target = (page.path.parent / unquote(url.path)).resolve() if url.path else page.path
    if page.path.name == "404.html":  # written for a server's root
        target = site / unquote(url.path).lstrip("/")
    if target.is_dir():
        target /= "index.html"
    if not target.is_file() or not target.is_relative_to(site):
        return True
    # What stands behind the mark on an interactive page is its state.
    state = "=" in url.fragment
    return target in pages and not state and unquote(url.fragment) not in pages[target].anchors


@pytest.mark.slow
def test_every_link_leads_somewhere(site: Path, pages: dict[Path, Page]) -> None:
    gone = [
        f"{page.path.relative_to(site)}: {address}"
        for page in pages.values()
        for address in page.links + page.fetched
        if not urlsplit(address).scheme and lost(page, address, site, pages)
    ]
    assert not gone


@pytest.mark.slow
def test_nothing_is_fetched_from_a_network(site: Path, pages: dict[Path, Page]) -> None:
    far = [
        f"{page.path.relative_to(site)}: {address}"
        for page in pages.values()
        for address in page.fetched
        if urlsplit(address).netloc
    ]
    assert not far
    styles = [css.name for css in site.rglob("*.css") if STYLE_FETCHES.search(css.read_text())]
    assert not styles


@pytest.mark.slow
def test_no_page_has_an_anchor_twice(site: Path, pages: dict[Path, Page]) -> None:
    doubled = {str(path.relative_to(site)): page.doubled for path, page in pages.items() if page.doubled}
    assert not doubled


@pytest.mark.slow
def test_what_builds_the_site_is_not_part_of_it(site: Path) -> None:
    assert not [path for path in site.rglob("*") if path.suffix in (".py", ".pyc", ".md")]


@pytest.mark.parametrize("page", ["README.md", "CHANGELOG.md"])
def test_links_of_the_front_pages_lead_to_files(page: str) -> None:
    text = (ROOT / page).read_text()
    addresses = re.findall(r"\]\(([^)\s]+)\)|(?:src|srcset|href)=\"([^\"]+)\"", text)
    local = [one or two for one, two in addresses if not urlsplit(one or two).scheme]
    for address in local:
        path, _, anchor = address.partition("#")
        target = ROOT / path if path else ROOT / page
        assert target.exists(), address
        if anchor and target.suffix == ".md":
            assert anchor in slugs(target.read_text()), address


def slugs(text: str) -> set[str]:
    """The anchors of a page's headings."""
    from markdown.extensions.toc import slugify

    heads = re.findall(r"^#+ (.*?)(?: \{ *#([\w-]+) *\})?$", text, re.M)
    return {own or slugify(re.sub(r"[`*]|\]\([^)]*\)|\[", "", head), "-") for head, own in heads}
