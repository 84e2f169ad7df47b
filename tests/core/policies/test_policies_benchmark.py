"""The benchmark of policies runs to its end where there is no gap to close, and keeps its figures first."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("policies")


def test_a_trace_that_every_cache_holds(script, tmp_path, monkeypatch, capsys):
    trace, figures = tmp_path / "trace.jsonl", tmp_path / "figures.json"
    rows = [
        {"timestamp": i, "input_length": 1024, "output_length": 1, "hash_ids": [0, 1 + i % 20]}
        for i in range(40)
    ]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = [str(trace), "--policies", "fifo", "--rounds", "1", "--seeds", "0", "--json", str(figures)]
    monkeypatch.setattr("sys.argv", ["policies.py", *arguments])
    assert script.main() == 0
    assert "| fifo | - | - | - | - | - | - | - | - | - |" in capsys.readouterr().out
    shares = [row["share_of_gap"] for row in json.loads(figures.read_text())["conversation"]]
    assert shares == [None] * len(shares) != []


def test_figures_are_kept_if_the_tables_fail(script, tmp_path, monkeypatch):
    figures = tmp_path / "figures.json"
    for name in ("cpu", "conversation", "made_up"):
        monkeypatch.setattr(script, name, lambda *_: [])
    monkeypatch.setattr("sys.argv", ["policies.py", "trace.jsonl", "--json", str(figures)])
    with pytest.raises(KeyError):
        script.main()
    assert json.loads(figures.read_text())["cpu"] == []
