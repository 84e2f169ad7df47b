from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from radixkv.demo.report import format_seconds, print_report, summarise, to_json


def printed(result, setting) -> str:
    console = Console(file=io.StringIO(), width=100)
    print_report(result, setting, console)
    return console.file.getvalue()


def test_summary(result):
    summary = summarise(result.requests)
    assert summary["prompt_tokens"] == 200
    assert summary["hit_tokens"] == 90
    assert summary["prefill_skipped"] == 0.45
    assert summary["ttft_speedup_total"] == summary["ttft_speedup_median"] == 2.0
    assert summary["different_outputs"] == 0


def test_tables_fit_100_columns_and_cut_nothing(result, setting):
    text = printed(result, setting)
    assert max(len(line) for line in text.splitlines()) <= 100
    assert "…" not in text
    for part in (
        "some model",
        "message 1",
        "turn 1",
        "90.0%",
        "400 ms",
        "200 ms",
        "2.00×",
        "4 cached, 0 evicted",
    ):
        assert part in text
    assert "All 2 outputs are the same; 45.0% of the prefill skipped" in text


def test_a_difference_is_named(changed_result, setting):
    text = printed(changed_result, setting)
    assert "1 outputs differ: Chat that grows / turn 1 (new token 1)" in text
    assert "NO" in text


def test_bypasses_are_named(result, setting):
    result.cache["bypasses"] = {"use_cache_false": 2}
    assert "Not served: use_cache_false 2." in " ".join(printed(result, setting).split())


def test_json_document(changed_result, setting):
    document = json.loads(json.dumps(to_json(changed_result, setting)))
    assert document["schema"] == 1
    assert set(document) == {"schema", "setting", "workloads", "summary", "seconds", "cache"}
    assert document["summary"]["same_tokens"] is False
    assert document["summary"]["different_outputs"] == 1
    (request,) = document["workloads"][1]["requests"]
    assert request == {
        "label": "turn 1",
        "prompt_tokens": 100,
        "hit_tokens": 90,
        "prefill_skipped": 0.9,
        "ttft_speedup": 2.0,
        "same_tokens": False,
        "first_difference": 1,
        "without": {"ttft_s": 0.4, "total_s": 1.0, "new_tokens": [1, 2, 3]},
        "with": {"ttft_s": 0.2, "total_s": 0.8, "new_tokens": [1, 99, 3]},
        "answer": "text",
    }


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (12.34, "12.3 s"),
        (9.996, "10.0 s"),
        (3.9671, "3.97 s"),
        (0.99951, "1.00 s"),
        (0.2261, "226 ms"),
        (0.09951, "100 ms"),
        (0.0284, "28.4 ms"),
        (0.00841, "8.41 ms"),
        (0.000123, "0.12 ms"),
    ],
)
def test_three_digits_and_a_unit(seconds, text):
    assert format_seconds(seconds) == text
