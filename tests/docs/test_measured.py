"""The chart and the tables of the docs show what the results files hold."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
BENCHMARKS_PAGE = (ROOT / "docs" / "benchmarks.md").read_text()
IN_FULL = ("ttft", "decode", "cold_batch", "no_hit", "engine")


@pytest.fixture(scope="module")
def chart():
    spec = importlib.util.spec_from_file_location("benchmarks_chart", ROOT / "benchmarks" / "chart.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_chart_is_drawn_from_the_results(chart, scheme):
    committed = (ROOT / "docs" / "assets" / f"measured-{scheme}.svg").read_text()
    assert committed == chart.draw(scheme), "run python benchmarks/chart.py"
    for case in chart.CASES:
        assert f">{chart.number(case.times_faster())}</text>" in committed


def test_both_pages_say_in_words_what_it_shows(chart):
    for page, shown in zip(chart.PAGES, (1, 2), strict=True):
        assert page.read_text().count(chart.text()) == shown, "run python benchmarks/chart.py"


def test_a_longer_bar_is_a_faster_one(chart):
    ends = sorted((case.times_faster(), chart.at(case.times_faster())) for case in chart.CASES)
    assert [end for _, end in ends] == sorted(end for _, end in ends)
    assert chart.at(1) < chart.at(10) < chart.WIDTH
    assert [chart.number(times) for times in (0.998, 5.14, 9.96, 23.4)] == ["1.0×", "5.1×", "10×", "23×"]


def _rows():
    for name in IN_FULL:
        data = json.loads((RESULTS / f"{name}.json").read_text())
        for run in data if isinstance(data, list) else [data]:
            for row in run["rows"]:
                yield pytest.param(row, id=f"{name}: {row['name']}, {row['baseline']}")


@pytest.mark.parametrize("row", _rows())
def test_every_measured_ratio_is_on_the_page(row):
    assert f"{row['ratio']:.3f}" in BENCHMARKS_PAGE


def test_every_script_has_its_place_on_the_page():
    scripts = [path.name for path in sorted(RESULTS.parent.glob("*.py"))]
    assert [name for name in scripts if name not in BENCHMARKS_PAGE] == []


def test_every_results_file_is_that_of_a_script_or_named():
    scripts = {path.stem for path in RESULTS.parent.glob("*.py")}
    names = [path.name for path in sorted(RESULTS.iterdir()) if path.name != "README.md"]
    others = [name for name in names if name.split(".")[0] not in scripts]
    assert [name for name in others if f"results/{name}" not in BENCHMARKS_PAGE] == []
