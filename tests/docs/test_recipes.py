"""What the docs show of the parts can be done again: an insert may find its blocks cached already."""

from __future__ import annotations

import ast

import pytest

from .test_examples import PAGES, ROOT, blocks


def inserting():
    """Pages that insert into a tree."""
    return [page for page in PAGES if any(".insert(" in code for _, code, _ in blocks(page))]


def names_in(node):
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}


def method(call):
    return call.func.attr if isinstance(call.func, ast.Attribute) else ""


@pytest.mark.parametrize("page", inserting(), ids=lambda p: p.stem)
def test_what_was_given_to_insert_is_not_released(page):
    """The references are on `insert(...).blocks` then: to release what was given fails where the tree had it."""
    given = {}  # name -> line of the insert
    for line, code, _ in blocks(page):
        calls = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call)]
        for call in sorted(calls, key=lambda call: call.lineno):
            if method(call) == "insert" and len(call.args) > 1:
                given |= dict.fromkeys(names_in(call.args[1]), line + call.lineno)
            elif method(call) == "release" and call.args and isinstance(call.args[0], ast.Name):
                name = call.args[0].id
                assert name not in given, f"{page.name}:{line + call.lineno} releases {name}"


@pytest.mark.parametrize(
    ("page", "again"),
    [
        ("docs/guides/tree-view.md", "for _ in '12': store('Translate into French: good morning. ' * 3)"),
        ("docs/api/block-table.md", "for _ in '12': serve(list(range(10)))"),
        ("docs/guides/policies.md", "for _ in '12': store([1, 1, 1, 1])"),
    ],
)
def test_a_recipe_can_be_used_twice(page, again):
    """Storing what is stored already."""
    kind = again.partition("(")[0].rpartition(" ")[2]
    names = {"__name__": "__main__"}
    for _, code, _ in blocks(ROOT / page):
        try:
            exec(code, names)
        except NameError:  # needs a model, as other blocks of the page do not
            continue
        if f"def {kind}(" in code:
            break
    exec(again, names)
    tree = names["tree"]
    tree.check()
    if "lease" in names:
        names["lease"].release()
    assert tree.pool.num_held == tree.num_cached_blocks == tree.num_evictable_blocks
