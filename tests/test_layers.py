"""The layers of the architecture: who may import whom, and who must start without torch."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
HEAVY = ("torch", "transformers", "flashinfer", "typer", "rich", "matplotlib", "gguf")


def loaded_after(statement: str) -> set[str]:
    """Which of the heavy packages a fresh interpreter has loaded after one statement."""
    code = f"import json, sys\n{statement}\nprint(json.dumps([m for m in {HEAVY!r} if m in sys.modules]))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_imports_go_downwards_only():
    # In a process of its own: the linter imports nothing of ours, but it changes sys.path.
    done = subprocess.run(
        [Path(sys.executable).with_name("lint-imports"), "--no-cache"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("layer", ["core", "sched", "replay"])
def test_layers_that_start_in_milliseconds_load_nothing_heavy(layer):
    if importlib.util.find_spec(f"radixkv.{layer}") is None:
        pytest.skip(f"radixkv.{layer} is not written yet")
    assert loaded_after(f"import radixkv.{layer}") == set()


def test_importing_the_package_loads_nothing_heavy():
    assert loaded_after("import radixkv") == set()


@pytest.mark.parametrize("name", ["BlockPool", "RadixTree", "BlockTable"])
def test_the_parts_need_no_torch(name):
    assert loaded_after(f"import radixkv; radixkv.{name}") == set()


def test_the_cache_needs_neither_transformers_nor_the_gpu_kernels():
    assert loaded_after("import radixkv; radixkv.PrefixCache") <= {"torch"}


def test_only_the_plug_in_and_what_lies_above_it_name_transformers():
    above = {"hf", "engine", "demo", "bench", "cli"}
    offenders = []
    for path in (ROOT / "radixkv").rglob("*.py"):
        if path.relative_to(ROOT / "radixkv").parts[0] in above:
            continue
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if line.lstrip().startswith(("import transformers", "from transformers")):
                offenders.append(f"{path.relative_to(ROOT)}:{number}")
    assert not offenders
