"""The built site in a headless Chromium, the one of the machine (Debian: apt install chromium).

`page` fails its test if the page logs an error or asks anything of another origin. Screenshots go to the folder
that `RADIXKV_SCREENSHOTS` names, `site-shots/` if it names none.
"""

from __future__ import annotations

import functools
import http.server
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from filelock import FileLock
from playwright.sync_api import Browser, ConsoleMessage, Page, Request, sync_playwright

ROOT = Path(__file__).resolve().parents[2]
FLAGS = [
    "--no-sandbox",  # Chromium refuses to run as root with one, as in most containers
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
SIZES = {"desktop": {"width": 1280, "height": 900}, "phone": {"width": 390, "height": 844}}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(item.path).is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.browser)


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built strictly; once, though several workers ask for it. `RADIXKV_SITE` names one that is built."""
    if built := os.environ.get("RADIXKV_SITE"):
        return Path(built).resolve()
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        # That of this run; without workers the parent is that of all runs, with their old sites.
        shared = shared.parent
    folder = shared / "site"
    with FileLock(shared / "site.lock"):
        if not (folder / "done").exists():
            subprocess.run(
                [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder],
                cwd=ROOT,
                check=True,
            )
            (folder / "done").touch()
    return folder


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="session")
def origin(site: Path) -> Iterator[str]:
    """Where the site is served: `http://127.0.0.1:<port>`."""
    handler = functools.partial(_Quiet, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """The machine's Chromium."""
    path = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    if path is None:
        pytest.fail("no Chromium: install it (Debian: apt install chromium) or name one in CHROMIUM")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def new_page(browser: Browser, origin: str, site: Path) -> Iterator[Callable[..., Page]]:
    """`new_page(size="desktop", scheme="light", **options)`; at the end, none may have erred or left home."""
    contexts, errors, left = [], [], []

    def said(message: ConsoleMessage) -> None:
        if message.type == "error":
            errors.append(message.text)

    def asked(request: Request) -> None:
        url = urlsplit(request.url)
        at_home = request.url.startswith(f"{origin}/") or url.scheme in ("data", "blob", "about")
        if not at_home and not (url.scheme == "file" and Path(url.path).is_relative_to(site)):
            left.append(request.url)

    def make(size: str = "desktop", scheme: str = "light", **options: object) -> Page:
        options = {"viewport": SIZES[size], "color_scheme": scheme, "base_url": f"{origin}/", **options}
        context = browser.new_context(**options)
        contexts.append(context)
        context.on("request", asked)
        page = context.new_page()
        page.on("console", said)
        page.on("pageerror", lambda error: errors.append(str(error)))
        return page

    yield make
    for context in contexts:
        context.close()
    assert not errors
    assert not left


@pytest.fixture
def page(new_page: Callable[..., Page]) -> Page:
    """A page at a desk, in the light scheme."""
    return new_page()


@pytest.fixture
def still(page: Page) -> Callable[[str], Page]:
    """`still(address)`: the page there, for which time passes only by `page.clock.run_for(milliseconds)`."""

    def opened(address: str) -> Page:
        page.clock.install(time=0)
        page.goto(address)
        page.clock.pause_at(3_600_000)
        return page

    return opened


@pytest.fixture(scope="session")
def shots() -> Path:
    """Where screenshots go."""
    folder = Path(os.environ.get("RADIXKV_SCREENSHOTS", ROOT / "site-shots")).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    return folder
