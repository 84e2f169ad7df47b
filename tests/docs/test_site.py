"""The built site is whole and reads without a network."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
# What a browser fetches by itself when it opens a page; a link waits for a click.
FETCHED = re.compile(
    r"<(?:script|img|iframe|link(?![^>]*rel=\"?canonical))[^>]*(?:src|href)=\"?(https?:[^\" >]+)"
)


@pytest.mark.slow
def test_site_builds_strictly_and_fetches_nothing(tmp_path):
    site = tmp_path / "site"
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", site],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    pages = list(site.rglob("*.html"))
    assert len(pages) > 10
    fetched = {page.name: found for page in pages if (found := FETCHED.findall(page.read_text()))}
    styles = [css.name for css in site.rglob("*.css") if re.search(r"url\(\s*[\"']?https?:", css.read_text())]
    assert not fetched
    assert not styles
