"""`benchmarks/gpu.py` runs on the CPU over the stand-in for FlashInfer; what it measures there means nothing."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
ALL = [
    "environment",
    "correctness",
    "bandwidth",
    "decode",
    "prefill",
    "cascade",
    "swap",
    "engine",
    "plugin",
    "gemma",
]


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), *arguments],
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment},
    )


def names(data: dict[str, Any], phase: str) -> list[str]:
    return [row["name"] for row in data["rows"] if row["phase"] == phase]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The script as a module; nothing of it is left behind."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    yield importlib.import_module("gpu")
    for name in [name for name in sys.modules if name.partition(".")[0] in ("gpu", "gpu_parts", "common")]:
        del sys.modules[name]


@pytest.mark.slow
def test_all_phases_end_to_end(tmp_path: Path) -> None:
    done = run("--double", "--small", OUT=str(tmp_path))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    data = json.loads((tmp_path / "gpu.json").read_text())
    assert {name: phase["status"] for name, phase in data["phases"].items()} == dict.fromkeys(ALL, "done")
    assert data["wrong"] == []
    assert not [row for row in data["rows"] if "error" in row and isinstance(row["error"], str)]
    assert data["ended"] == "complete"
    assert data["double"]
    assert data["commit"]
    checks = [row for row in data["rows"] if "ok" in row]
    assert len(checks) > 40
    assert all(row["ok"] for row in checks)
    for phase in ("engine", "gemma"):
        against = [row for row in data["rows"] if row["phase"] == phase and "times_as_fast" in row]
        assert len(against) == 4
        assert {row["same"] for row in against} == {"4/4"}
    assert "no figure means anything" in done.stdout
    assert "REACHED" not in done.stdout.upper(), "the double's figures are held against no target"


def test_the_kernel_phases(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "out.json"
    phases = ["environment", "bandwidth", "decode", "prefill", "cascade", "swap"]
    done = run("--double", "--small", "--output", str(target), *phases)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    data = json.loads(target.read_text())
    assert list(data["phases"]) == phases
    assert all(row["gbs"] > 0 for row in data["rows"] if row["phase"] == "decode" and "gbs" in row)
    assert len(names(data, "decode")) == 5 + 4
    assert [name for name in names(data, "swap") if name.startswith("swap")] == [
        "swap out, in order",
        "swap out, scattered",
        "swap in, in order",
        "swap in, scattered",
    ]


TROUBLE = """
import sys, time
sys.path[:0] = [{benchmarks!r}, {root!r}]
import gpu
from gpu_parts import kernels
from gpu_parts.session import Phase

def broken(session):
    session.note("before", figure=1)
    session.attempt("a part", lambda: 1 / 0)
    session.note("between", figure=2)
    raise ValueError("the phase is broken")

def stuck(session):
    session.note("before it hangs", figure=3)
    time.sleep(1000)

gpu.PHASES[:] = [
    Phase("broken", broken, 1),
    Phase("bandwidth", kernels.bandwidth, 1),
    Phase("stuck", stuck, 1),
    Phase("never", broken, 1),
]
raise SystemExit(gpu.main(sys.argv[1:]))
"""


def run_trouble(tmp_path: Path, *arguments: str) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    script = tmp_path / "trouble.py"
    script.write_text(TROUBLE.format(benchmarks=str(ROOT / "benchmarks"), root=str(ROOT)))
    target = tmp_path / "out.json"
    done = subprocess.run(
        [sys.executable, str(script), "--double", "--small", "--output", str(target), *arguments],
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done, json.loads(target.read_text())


def test_a_phase_that_fails_says_why_and_the_others_go_on(tmp_path: Path) -> None:
    done, data = run_trouble(tmp_path, "broken", "bandwidth")
    assert done.returncode == 1
    assert data["phases"]["broken"]["status"] == "failed"
    assert "the phase is broken" in data["phases"]["broken"]["error"]
    assert data["phases"]["bandwidth"]["status"] == "done"
    assert names(data, "broken") == ["before", "a part", "between"]
    assert "ZeroDivisionError" in next(row for row in data["rows"] if row["name"] == "a part")["error"]
    assert data["wrong"] == ["broken: a part"]


def test_what_hangs_is_cut_off_before_the_limit_and_the_results_are_written(tmp_path: Path) -> None:
    began = time.monotonic()
    done, data = run_trouble(tmp_path, "--limit", "10")
    assert time.monotonic() - began < 60
    assert done.returncode == 4
    assert data["seconds"] < 10
    assert data["phases"]["bandwidth"]["status"] == "done"
    assert data["phases"]["stuck"]["status"] == "cut off"
    assert "never" not in data["phases"]
    assert names(data, "stuck") == ["before it hangs"]
    assert "cut off" in done.stdout


def test_with_the_device_lost_the_rest_runs_in_a_new_process(
    gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gpu_parts.session import DeviceLost, Phase, Session, run_phases

    session = Session(torch.device("cpu"), torch.float32, small=True, output=tmp_path / "gpu.json")
    session.shared |= {"copy_gbs": 3.5, "llama": object()}

    def lost(session: Session) -> None:
        session.note("a result", figure=1.5)
        raise DeviceLost

    phases = [Phase("decode", lost, 1), Phase("prefill", lost, 1), Phase("swap", lost, 1)]
    left = run_phases(session, phases)
    assert left == ["prefill", "swap"]
    calls: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda program, words: calls.append(words))
    gpu.hand_over(session, left, ["decode", "prefill", "swap", "--small", "--double", "--limit", "99"])
    words = calls[0][2:]
    assert words[:-2] == ["prefill", "swap", "--small", "--double", "--limit", "99"]
    made = gpu.parser()
    again = gpu.make_session(made, made.parse_args(words))
    assert again.rows == session.rows
    assert again.started == session.started
    assert again.phases["decode"]["status"] == "failed"
    assert again.shared == {"copy_gbs": 3.5}
    Path(words[-1]).unlink()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nonsense", "--double", "--small"], "no phase is called nonsense"),
        (["--double"], "add --small"),
        (["--double", "--small", "--limit", "1"], "at least 10"),
        (["--size", "3"], "unrecognized arguments"),
    ],
)
def test_wrong_usage_ends_with_code_2(
    arguments: list[str], says: str, gpu: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        gpu.main(arguments)
    assert ended.value.code == 2
    assert says in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_how_to_try_it(gpu: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        gpu.main([])
    assert ended.value.code == 2
    assert "--double --small" in capsys.readouterr().err
