"""`benchmarks/gpu.py` runs on the CPU over the stand-in for FlashInfer; what it measures there means nothing."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import signal
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
    "kernels",
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
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "attention"))
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
    assert data["left_out"] == []
    graphs = next(row for row in checks if row["name"] == "engine with graphs")
    assert graphs["replays"] > 10
    assert graphs["padding"] > 10
    assert graphs["pool_tokens"] > 100
    shared = [row["shared_launches"] for row in checks if "shared_launches" in row]
    assert shared == [1, 2, 1, 1, 1]
    for phase in ("engine", "gemma"):
        rounds = [row["rounds"] for row in data["rows"] if row["phase"] == phase and "rounds" in row]
        assert rounds == [2, 2, 1] * 2
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
    assert len(names(data, "decode")) == 5 + 4 + 4
    shares = [row for row in data["rows"] if row["phase"] == "cascade" and "launches" in row]
    assert [row["launches"] for row in shares] == [1]
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


def small_session(gpu: Any, **options: Any) -> Any:
    """A session over the double, in its phase for as long as it likes."""
    from fake_flashinfer import Double
    from gpu_parts.session import Session

    double = Double.relaxed(graphs=True)
    session = Session(torch.device("cpu"), torch.float32, small=True, double=double, **options)
    session.phase, session.deadline = "a phase", 1e9
    return session


def test_what_there_is_no_time_for_is_counted(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from gpu_parts.session import Phase

    def hurried(session: Any) -> None:
        session.note("first", figure=1)
        assert session.out_of_time("second", 1e6)

    monkeypatch.setattr(gpu, "PHASES", [Phase("hurried", hurried, 1)])
    finished: list[tuple[str, list[str]]] = []
    monkeypatch.setattr(
        "gpu_parts.session.Session.save",
        lambda self, ended="", **_: finished.append((ended, self.left_out)),
    )
    handler = signal.getsignal(signal.SIGTERM)
    assert gpu.main(["--double", "--small"]) == 3
    assert torch.is_grad_enabled()
    assert signal.getsignal(signal.SIGTERM) is handler
    assert finished[-1] == ("incomplete: no time for 1 parts", ["hurried: second"])


def test_rare_kernels_are_built_and_judged_only_where_they_are_asked_for(gpu: Any) -> None:
    from gpu_parts import building, correctness

    for asked in (False, True):
        session = small_session(gpu, compile=asked)
        building.kernels(session)
        assert any(":cap" in row["name"] for row in session.rows) == asked
        correctness.attention(session)
        assert any("soft cap" in row["name"] for row in session.rows) == asked
        assert session.wrong == []


def test_time_in_which_anything_runs(gpu: Any) -> None:
    from gpu_parts.timing import busy_us

    assert busy_us([]) == 0
    assert busy_us([(5, 9), (0, 4)]) == 8
    assert busy_us([(0, 10), (2, 3), (8, 12), (12, 13), (20, 21)]) == 14


def test_kernels_are_told_from_copies_and_from_what_the_host_did(gpu: Any) -> None:
    from types import SimpleNamespace as Event

    from gpu_parts.serving import kernel_spans
    from torch.autograd import DeviceType

    def event(name: str, where: Any, **more: Any) -> Any:
        return Event(name=name, device_type=where, time_range=Event(start=1.0, end=3.0), **more)

    found = kernel_spans(
        [
            event("gemm", DeviceType.CUDA),
            event("Memcpy HtoD (Pinned -> Device)", DeviceType.CUDA),
            event("a step", DeviceType.CUDA, is_user_annotation=True),
            event("aten::mm", DeviceType.CPU),
        ]
    )
    assert found == [(1.0, 3.0)]


def test_the_engine_is_not_always_first(gpu: Any) -> None:
    from gpu_parts.serving import turns

    assert turns(["engine", "generate_batch", "padded generate"], 3) == [
        ["engine", "generate_batch", "padded generate"],
        ["generate_batch", "engine"],
        ["engine", "generate_batch"],
    ]


def test_a_size_that_does_not_fit_is_left_out_alone(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from gpu_parts import kernels
    from gpu_parts.session import Skip

    def require_room(session: Any, size: int) -> None:
        if size > 40_000:
            raise Skip("no room")

    monkeypatch.setattr(kernels, "require_room", require_room)
    session = small_session(gpu)
    kernels.decode(session)
    assert session.wrong == []
    done = {row["name"]: "gbs" in row for row in session.rows if "ok" not in row}
    assert done["1 x 32"]
    assert not done["3 x 64"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_wrong_answers_are_told_from_rounding(gpu: Any, dtype: torch.dtype) -> None:
    from gpu_parts.models import tiny_llama
    from gpu_parts.truth import Truth

    from radixkv import Engine, SamplingParams

    model = tiny_llama(small_session(gpu), dtype, head_dim=16)
    truth = Truth(model)
    prompts = [list(range(5, 5 + count)) for count in (9, 20, 31, 4, 17)]
    engine = Engine(model, attention="torch", num_tokens=1024)
    outs = engine.generate(prompts, SamplingParams(max_new_tokens=20, logprobs=1, ignore_eos=True))
    assert truth.answers(prompts, outs)["right"]
    assert truth.pool(engine.cache)["right"]
    # Answers that do not see their newest token, and keys that lie one row off.
    short = [prompt[:-1] for prompt in prompts]
    blind = engine.generate(short, SamplingParams(max_new_tokens=20, logprobs=1, ignore_eos=True))
    assert not truth.answers(prompts, blind)["right"]
    said = outs[2].logprobs[7]
    outs[2].logprobs[7] = dataclasses.replace(said, logprob=said.logprob - 1.0)
    assert not truth.answers(prompts, outs)["right"]
    engine.cache.store.keys[1].copy_(engine.cache.store.keys[1].roll(1, dims=1))
    assert not truth.pool(engine.cache)["right"]


def test_a_graph_that_touches_what_is_not_its_own_is_seen(gpu: Any) -> None:
    from gpu_parts.models import tiny_llama
    from gpu_parts.truth import GraphWatch

    from radixkv import Engine, SamplingParams

    session = small_session(gpu)
    engine = Engine(
        tiny_llama(session, torch.float32), attention=session.backend(), num_tokens=512, max_num_seqs=3
    )
    sampling = SamplingParams(max_new_tokens=6, ignore_eos=True)
    watch = GraphWatch(engine)
    prompts = [[5, 6, 7], [8, 9], [10]]
    engine.generate(prompts, sampling)
    assert watch.problems == []
    assert watch.seen["replays"] > 3
    store = engine.cache.store
    engine._runner.graphs._device.after_replay = lambda graph: store.values[0][-1, -1].fill_(3.0)
    engine.generate(prompts, sampling)
    assert watch.problems == ["a replay wrote to somebody else's slot"]


def test_a_plan_that_is_wrong_in_graphs_only_fails_the_check(
    gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gpu_parts import correctness

    from radixkv.attention.flashinfer_graphs import GraphAttention

    right = GraphAttention.plan
    monkeypatch.setattr(
        GraphAttention, "plan", lambda self, contexts: right(self, (contexts - 1).clip(min=1))
    )
    session = small_session(gpu)
    correctness.engine_graphs(session)
    assert session.wrong == ["a phase: engine with graphs"]


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
