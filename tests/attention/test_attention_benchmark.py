"""The benchmark runs to its end in tiny mode, and with it its comparison of outputs; its times there mean nothing."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.filterwarnings("ignore")
def test_tiny_mode(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    spec = importlib.util.spec_from_file_location("benchmark_attention", BENCHMARKS / "attention.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "benchmark_attention", module)  # dataclasses look their module up
    target = tmp_path / "out.json"
    try:
        spec.loader.exec_module(module)
        module.main(["--tiny", "--rounds", "1", "--json", str(target)])
    finally:
        sys.modules.pop("common", None)
    rows = json.loads(target.read_text())["rows"]
    assert len(rows) == 28
    assert all(row["ratio"] > 0 for row in rows)
