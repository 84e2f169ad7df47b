"""What the API pages show: every public name, and each public member of it, says what it is."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

import radixkv

DOCS = Path(__file__).resolve().parent.parent.parent / "docs"
SHOWN = set(re.findall(r"^::: radixkv\.(\w+)$", "\n".join(p.read_text() for p in DOCS.rglob("*.md")), re.M))
CLASSES = [name for name in radixkv.__all__ if name[0].isupper()]


def test_every_public_class_has_an_entry_in_the_api_pages():
    assert set(CLASSES) <= SHOWN


def test_every_reason_to_pass_a_call_through_is_explained():
    from radixkv.hf.calls import WHY

    table = (DOCS / "limits.md").read_text().partition("| reason |")[2].partition("\n\n")[0]
    explained = {word for row in table.splitlines() for word in re.findall(r"`(\w+)`", row[1:].split("|")[0])}
    assert explained == set(WHY)


@pytest.mark.parametrize("name", CLASSES)
def test_public_members_have_docstrings(name):
    cls = getattr(radixkv, name)
    assert cls.__doc__, name
    attributes = cls.__doc__.partition("Attributes:")[2]
    bare = []
    for member, value in vars(cls).items():
        if member.startswith("_") or not (inspect.isroutine(value) or isinstance(value, property)):
            continue
        value = getattr(value, "__func__", value)
        if not value.__doc__ and not re.search(rf"^\s*{member}:", attributes, re.M):
            bare.append(member)
    assert not bare, f"{name} has members without a docstring: {bare}"
