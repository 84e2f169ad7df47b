"""What the command line writes to may be closed, full, or unable to write a character; and it may be told to end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import radixkv
from radixkv.cli import main

ROOT = Path(radixkv.__file__).parents[1]
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="POSIX shells")

COMMANDS = {
    "table": "replay good.jsonl",
    "json": "replay good.jsonl --format json",
    "csv": "replay good.jsonl --format csv",
    "version": "--version",
    "help": "replay --help",
    "info": "info --format json",
}
BROKEN = "replay none.jsonl"


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "good.jsonl").write_text('{"token_ids": [1, 2, 3, 4, 5]}\n{"token_ids": [1, 2, 3, 9]}\n')
    return tmp_path


def shell(folder, command, **environment):
    """Exit code, stdout and stderr of a command line of bash; `RUN` is radixkv."""
    command = f'RUN() {{ "{sys.executable}" -W ignore -m radixkv "$@"; }}; {command}'
    done = subprocess.run(
        ["bash", "-c", command], cwd=folder, env=ENVIRONMENT | environment, capture_output=True, timeout=120,
        check=False,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr.decode()


def assert_one_line(err):
    assert err.startswith("radixkv: ")
    assert err.count("\n") == 1, err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_a_full_disk(folder, command):
    code, _, err = shell(folder, f"RUN {command} > /dev/full")
    assert code == 2
    assert_one_line(err)
    assert "the output cannot be written: No space left" in err


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_no_stdout(folder, command):
    code, _, err = shell(folder, f"RUN {command} >&-")
    assert code == 2
    assert_one_line(err)
    assert "standard output is closed" in err


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_no_stderr(folder, command):
    assert shell(folder, f"RUN {command} 2>&-")[0] == 0
    code, out, err = shell(folder, f"RUN {BROKEN} 2>&-")
    assert (code, out, err) == (2, b"", "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_nowhere_to_say_what_is_wrong(folder):
    assert shell(folder, f"RUN {BROKEN} 2> /dev/full")[:2] == (2, b"")
    assert shell(folder, f"RUN {BROKEN} >&- 2>&-")[:2] == (2, b"")
    assert shell(folder, "RUN replay good.jsonl > /dev/full 2>&1")[:2] == (2, b"")


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_a_reader_that_has_left(folder, command):
    code, _, err = shell(folder, f"(sleep 0.2; RUN {command}; echo $? > code) | true; exit $(cat code)")
    assert (code, err) == (141, "")


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
def test_encodings(folder, encoding):
    name = "日本 é.jsonl"
    (folder / "good.jsonl").rename(folder / name)
    for command in (f"replay '{name}'", f"replay '{name}' --format csv", "replay --help"):
        code, out, err = shell(folder, f"RUN {command}", PYTHONIOENCODING=encoding)
        assert (code, err) == (0, "")
        out.decode(encoding.partition(":")[0])
    code, out, err = shell(folder, f"RUN replay '{name}' --format json", PYTHONIOENCODING=encoding)
    assert (code, err) == (0, "")
    assert json.loads(out.decode(encoding.partition(":")[0]))["trace"]["name"] == name
    code, out, err = shell(folder, "RUN replay 無.jsonl", PYTHONIOENCODING=encoding)
    assert (code, out) == (2, b"")
    assert_one_line(err)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such names")
def test_names_that_are_not_utf_8(folder):
    os.rename(folder / "good.jsonl", os.fsencode(folder) + b"/bad\xff.jsonl")
    code, out, err = shell(folder, "RUN replay bad*.jsonl")
    assert (code, err) == (0, "")
    assert b"bad\\udcff.jsonl" in out
    code, out, err = shell(folder, "RUN replay bad*.jsonl --format json --plot plot.svg")
    assert (code, err) == (0, "")
    assert json.loads(out)["trace"]["name"] == "bad\udcff.jsonl"
    assert (folder / "plot.svg").exists()
    code, out, err = shell(folder, "RUN replay $'no\\xff.jsonl'")
    assert (code, out) == (2, b"")
    assert_one_line(err)


def test_names_do_nothing_to_a_terminal(folder):
    (folder / "good.jsonl").rename(folder / "a\nb\x1b[31m.jsonl")
    code, out, err = shell(folder, "RUN replay a*b*.jsonl")
    assert (code, err) == (0, "")
    assert out.startswith(b"a\\nb\\x1b[31m.jsonl: 2 requests")
    code, out, err = shell(folder, "RUN replay $'no\\x1b[31m.jsonl'")
    assert (code, out) == (2, b"")
    assert_one_line(err)
    assert "\x1b" not in err


# -- plots ---------------------------------------------------------------------------------------------------


def never(*args, **kwargs):
    raise AssertionError("the replay ran")


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("/proc/x.png", "cannot be written to"),
        ("/sys/x.svg", "cannot be written to"),
        ("a" * 252 + ".svg", "File name too long"),
        ("a" * 300 + ".svg", "File name too long"),
        ("日" * 85 + ".png", "File name too long"),
        ("good.jsonl/x.svg", "does not exist"),
        ("good.jsonl/x/y.svg", "does not exist"),
        ("a" * 300 + "/x.svg", "File name too long"),
        ("", "must end in"),
    ],
)
def test_where_no_plot_can_be_written(folder, monkeypatch, capsys, path, reason):
    """It is said before the work, and nothing is left."""
    if path.startswith("/") and not Path(path).parent.is_dir():
        pytest.skip("not on this system")
    monkeypatch.chdir(folder)
    monkeypatch.setattr("radixkv.cli.replay.simulate", never)
    assert main(["replay", "good.jsonl", "--plot", path]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert_one_line(err)
    assert reason in err
    assert os.listdir(folder) == ["good.jsonl"]


@pytest.mark.parametrize("name", ["a" * 251 + ".svg", "日" * 83 + ".png", "$\\bad{$.svg"])
def test_the_longest_names(folder, monkeypatch, capsys, name):
    monkeypatch.chdir(folder)
    assert main(["replay", "good.jsonl", "--plot", name]) == 0
    assert capsys.readouterr().err == ""
    assert sorted(os.listdir(folder)) == sorted([name, "good.jsonl"])


@pytest.mark.parametrize(
    "name", ["$\\bad{$", "$x$", "a_b^c", "100%", "\\frac", "日本", "a\nb\x1b", "$\\undefined", "<&>"]
)
@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_names_are_no_formulas(folder, monkeypatch, recwarn, name, suffix):
    """Of the trace, of the folder of a model, and of a model in `demo`."""
    monkeypatch.chdir(folder)
    (folder / name).mkdir()
    config = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 8}
    (folder / name / "config.json").write_text(json.dumps(config))
    trace = f"{name}.jsonl"
    (folder / "good.jsonl").rename(trace)
    arguments = ["replay", trace, "--model-config", f"./{name}", "--plot", f"plot.{suffix}"]
    assert main(arguments) == 0
    assert (folder / f"plot.{suffix}").stat().st_size > 1000
    assert not recwarn.list


# -- signals -------------------------------------------------------------------------------------------------


def start(folder, *arguments):
    requests = [
        {"hash_ids": [*range(n % 7 + 1), 100 + n], "input_length": 512 * (n % 7 + 2)} for n in range(60000)
    ]
    (folder / "trace.jsonl").write_text("".join(json.dumps(request) + "\n" for request in requests))
    process = subprocess.Popen(
        [sys.executable, "-m", "radixkv", "replay", "trace.jsonl", *arguments], cwd=folder, env=ENVIRONMENT,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    time.sleep(4)
    assert process.poll() is None, process.communicate()
    return process


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_sigterm_is_one_line_and_leaves_nothing(folder, jobs):
    process = start(folder, "--plot", "plot.png", "--jobs", jobs)
    process.terminate()  # the process alone, as a supervisor does
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (143, "", "radixkv: terminated\n")
    assert sorted(os.listdir(folder)) == ["good.jsonl", "trace.jsonl"]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_while_the_plot_is_written_leaves_the_old_one(folder, number, code):
    """Half of a file has been written when the signal comes."""
    (folder / "plot.svg").write_text("old")
    script = f"""
import os, signal, sys
from matplotlib.figure import Figure
def savefig(self, name, **options):
    with open(name, "w") as file:
        file.write("<half")
    os.kill(os.getpid(), {int(number)})
    signal.sigtimedwait([], 5)
    print("not reached")
Figure.savefig = savefig
from radixkv.cli import main
sys.exit(main(["replay", "good.jsonl", "--plot", "plot.svg"]))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (code, "", 1)
    assert (folder / "plot.svg").read_text() == "old"
    assert sorted(os.listdir(folder)) == ["good.jsonl", "plot.svg"]


def test_a_handler_of_the_caller_stays(folder, monkeypatch):
    """`main` called by a program that handles SIGTERM itself."""
    monkeypatch.chdir(folder)
    mine = lambda *_: None  # noqa: E731
    before = signal.signal(signal.SIGTERM, mine)
    try:
        assert main(["replay", "good.jsonl", "--format", "csv"]) == 0
        assert signal.getsignal(signal.SIGTERM) is mine
    finally:
        signal.signal(signal.SIGTERM, before)
    assert main(["replay", "good.jsonl", "--format", "csv"]) == 0
    assert signal.getsignal(signal.SIGTERM) is before
