"""What the pages say of the repository is so: its layers, its paths, its make targets."""

from __future__ import annotations

import re

import pytest

from .test_examples import PAGES, ROOT

NAMED = re.compile(r"`((?:radixkv|tests|benchmarks|docs|\.ci)/[\w./-]*)`")
MAKE = re.compile(r"\bmake((?: [a-z][a-z-]*)+)")


def name_of(page):
    return page.relative_to(ROOT).with_suffix("").as_posix()


def contract():
    """Layers of the import-linter contract, from the top; those of one row may not import each other."""
    text = (ROOT / "pyproject.toml").read_text()
    rows = re.findall(r'^    "(.*)",$', text.partition("\nlayers = [\n")[2].partition("\n]")[0], re.M)
    return [set(re.findall(r"\w+", row)) for row in rows]


def test_the_table_of_layers_is_the_contract():
    table = (ROOT / "docs/architecture.md").read_text().partition("| layer | ")[2].partition("\n\n")[0]
    rows = [row.split("|") for row in table.splitlines()[2:]]
    assert [set(re.findall(r"`(\w+)`", cells[1])) for cells in rows] == contract()
    light = {re.findall(r"`(\w+)`", cells[1])[0] for cells in rows if "*no torch*" in cells[2]}
    assert light == {"core", "sched", "replay"}, "tests/test_layers.py tests these"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_paths_that_a_page_names_exist(page):
    missing = {path for path in NAMED.findall(page.read_text()) if not (ROOT / path).exists()}
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_make_targets_that_a_page_names_exist(page):
    phony = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.M)
    text = page.read_text()
    code = "\n".join([*re.findall(r"`(make [^`]*)`", text), *re.findall(r"^ *\$ (.*make .*)$", text, re.M)])
    named = {target for found in MAKE.findall(code) for target in found.split()}
    assert named <= set(phony[1].split())
