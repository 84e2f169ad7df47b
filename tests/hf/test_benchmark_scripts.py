"""The benchmark scripts run to their end in tiny mode; what they measure there means nothing."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest
from hf_testkit import needs_cache

pytestmark = [needs_cache, pytest.mark.filterwarnings("ignore")]

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def run(script: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    name = f"benchmark_{script}"
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{script}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)  # dataclasses look their module up
    spec.loader.exec_module(module)
    try:
        module.main(arguments)
    finally:
        sys.modules.pop("common", None)


@pytest.mark.parametrize(("script", "rows"), [("ttft", 7), ("decode", 3), ("cold_batch", 3), ("no_hit", 6)])
def test_tiny_mode(
    script: str,
    rows: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    target = tmp_path / "out.json"
    run(script, ["--tiny", "--rounds", "1", "--json", str(target)], monkeypatch)
    data = json.loads(target.read_text())
    check_rows(data, rows)
    assert "ours/base" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("script", "arguments", "rows"),
    [("engine", ["--skip", "generate_batch"], 14), ("preemption", [], 10)],
)
def test_tiny_mode_of_the_engines(
    script: str, arguments: list[str], rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "out.json"
    run(script, ["--tiny", "--rounds", "1", "--json", str(target), *arguments], monkeypatch)
    data = json.loads(target.read_text())
    check_rows(data, rows)
    if script == "preemption":
        assert all(found["swap_cost"] > 0 for found in data["derived"].values())
        paused = [row["notes"] for row in data["rows"] if "room" in row["baseline"]]
        assert not any(" 0.0 preemptions" in notes for notes in paused)


def test_tiny_mode_of_utilisation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "out.json"
    run("utilisation", ["--tiny", "--json", str(target)], monkeypatch)
    rows = json.loads(target.read_text())["rows"]
    assert [(row["data"], row["block_size"]) for row in rows] == [
        (data, size) for data in ("sharegpt", "alpaca") for size in (16, 32, 64)
    ]
    for row in rows:
        ways = row["contiguous"]
        assert 0 < ways["max"] < ways["pow2"] < ways["oracle"] < row["utilisation"] <= 1
    assert rows[0]["utilisation"] > rows[2]["utilisation"]


def check_rows(data: dict, rows: int) -> None:
    assert len(data["rows"]) == rows
    for row in data["rows"]:
        assert row["ratio"] > 0
        assert row["low"] <= row["ratio"] <= row["high"]
    for key in ("commit", "torch", "transformers", "cpu", "threads", "dtype", "seed", "shapes"):
        assert key in data


@pytest.mark.parametrize(
    "script",
    [
        "ttft",
        "decode",
        "cold_batch",
        "no_hit",
        "engine",
        "preemption",
    ],
)
def test_wrong_arguments_end_with_code_2(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit) as caught:
        run(script, ["--rounds", "0"], monkeypatch)
    assert caught.value.code == 2
