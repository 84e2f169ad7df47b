"""Puts the test kit of the plug-in on the path and keeps torch to one thread."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing here may look for a model on the network
sys.path.insert(0, str(Path(__file__).parent))

import hf_testkit
import pytest
import torch


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of tests over several models, the one with windows is enough for the second of `both_ways`: it has all kinds."""
    dropped = []
    for item in items:
        given = getattr(getattr(item, "callspec", None), "params", {})
        if given.get("decode") == "paged" and given.get("arch", "gemma3") != "gemma3":
            several = [other for other in items if _same_but_for_arch(other, item)]
            if several:
                dropped.append(item)
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        gone = set(map(id, dropped))
        items[:] = [item for item in items if id(item) not in gone]


def _same_but_for_arch(other: pytest.Item, item: pytest.Item) -> bool:
    mine, theirs = (getattr(getattr(each, "callspec", None), "params", {}) for each in (item, other))
    alike = getattr(other, "function", None) is getattr(item, "function", None)
    return alike and theirs == {**mine, "arch": "gemma3"}


@pytest.fixture(autouse=True)
def decode(request: pytest.FixtureRequest) -> Iterator[None]:
    """What `make_cache` takes for `decode`; tests marked `both_ways` run with each."""
    before = hf_testkit.DECODE
    hf_testkit.DECODE = getattr(request, "param", before)
    yield
    hf_testkit.DECODE = before


@pytest.fixture(autouse=True)
def _steady() -> None:
    """One thread and a fixed seed: two threads spin on a shared machine and the tests gain nothing from them."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
