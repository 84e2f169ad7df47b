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


@pytest.mark.parametrize(("script", "rows"), [("ttft", 7), ("decode", 3), ("cold_batch", 3), ("no_hit", 6)])
def test_tiny_mode(
    script: str,
    rows: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    spec = importlib.util.spec_from_file_location(f"benchmark_{script}", BENCHMARKS / f"{script}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    target = tmp_path / "out.json"
    try:
        module.main(["--tiny", "--rounds", "1", "--json", str(target)])
    finally:
        sys.modules.pop("common", None)
    data = json.loads(target.read_text())
    assert len(data["rows"]) == rows
    for row in data["rows"]:
        assert row["ratio"] > 0
        assert row["low"] <= row["ratio"] <= row["high"]
    for key in ("commit", "torch", "transformers", "cpu", "threads", "dtype", "seed", "shapes"):
        assert key in data
    assert "ours/base" in capsys.readouterr().out


@pytest.mark.parametrize("script", ["ttft", "decode", "cold_batch", "no_hit"])
def test_wrong_arguments_end_with_code_2(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    spec = importlib.util.spec_from_file_location(f"benchmark_{script}", BENCHMARKS / f"{script}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    try:
        with pytest.raises(SystemExit) as caught:
            module.main(["--rounds", "0"])
    finally:
        sys.modules.pop("common", None)
    assert caught.value.code == 2
