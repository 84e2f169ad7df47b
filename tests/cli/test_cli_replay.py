from __future__ import annotations

import csv
import gzip
import io
import json
import os
import pty
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

import radixkv
from radixkv.cli import main
from radixkv.cli import replay as replaying
from radixkv.cli.replay_report import common_unit
from radixkv.replay import reading, simulate

ROOT = Path(radixkv.__file__).parents[1]
RUN = [sys.executable, "-m", "radixkv", "replay"]
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}
GOOD = {"timestamp": 5, "input_length": 700, "output_length": 3, "hash_ids": [0, 1]}
CONFIG = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 8, "dtype": "float16"}


def assert_one_line(capsys, *parts: str) -> None:
    """One line on stderr that says these things, nothing on stdout."""
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1, err
    assert err.startswith("radixkv: ")
    for part in parts:
        assert part in err, err


def requests(num=60):
    rng = random.Random(0)
    return [
        {"hash_ids": [*range(n := rng.randrange(1, 9)), 100 + i], "input_length": 512 * n + 5}
        for i in range(num)
    ]


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(request) + "\n" for request in requests()))
    return path


# -- what comes out ------------------------------------------------------------------------------------------


def test_json_is_what_python_says(trace, capsys):
    assert (
        main(["replay", str(trace), "--capacity", "20", "--capacity", "unlimited", "--format", "json"]) == 0
    )
    out, err = capsys.readouterr()
    assert err == ""
    document = json.loads(out)
    assert document == simulate(trace, capacity=[20, "unlimited"]).to_dict()
    assert set(document) == {"trace", "results"}
    wanted = {
        "policy", "capacity_blocks", "requests", "prompt_tokens", "hit_tokens", "hit_rate", "evicted_blocks",
        "share_of_optimum",
    }  # fmt: skip
    assert wanted <= set(document["results"][0])


def test_csv(trace, capsys):
    assert main(["replay", str(trace), "--capacity", "20", "--policy", "lru", "--format", "csv"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    (result,) = simulate(trace, capacity=20, policy="lru").results
    assert len(rows) == 1
    assert int(rows[0]["hit_tokens"]) == result.hit_tokens
    assert float(rows[0]["share_of_optimum"]) == result.share_of_optimum
    assert rows[0]["capacity_bytes"] == ""


def test_table(trace, tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    model = ["--model-config", str(tmp_path)]
    policies = ["--policy", "lru", "--policy", "optimal"]
    assert main(["replay", str(trace), "--capacity", "1MiB", *policies, *model]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert max(map(len, out.splitlines()[3:])) <= 100
    lru, optimal = simulate(trace, capacity=32, policy=["lru", "optimal"]).results
    for part in (
        "60 requests",
        "64 bytes a token",
        "MiB",
        "1.00",
        f"{lru.hit_tokens:,}",
        f"{lru.hit_rate:.1%}",
    ):
        assert part in out
    assert f"{lru.share_of_optimum:.1%}" in out
    assert f"{optimal.hit_tokens:,}" in out
    assert "100.0%" in out


def test_sizes_in_memory_have_one_unit(trace, tmp_path, capsys):
    """So that a column can be compared at a glance, and the plot says the same."""
    from radixkv.cli.replay_plot import draw

    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "hidden_size": 8 * 2**11}))
    capacities = ["--capacity", "20", "--capacity", "40", "--capacity", "4000"]
    assert main(["replay", str(trace), *capacities, "--model-config", str(tmp_path), "--policy", "lru"]) == 0
    lines = capsys.readouterr().out.splitlines()
    table = [line.replace("┃", "│").split("│") for line in lines if line[:1] in ("│", "┃")]
    assert [cells[3].strip() for cells in table[:2]] == ["Capacity", "GiB"]
    sizes = [cells[3].strip() for cells in table[2:]]
    result = simulate(trace, capacity=[20, 40, 4000], model_config=tmp_path / "config.json", policy="lru")
    assert sizes == [
        f"{r.capacity_bytes / 2**30:,.{d}f}" for r, d in zip(result.results, (2, 2, 0), strict=True)
    ]
    (panel,) = draw(result).get_axes()
    assert panel.child_axes[0].get_xlabel().startswith("GiB of KV")


@pytest.mark.parametrize(
    ("sizes", "unit"),
    [
        ([2**20, 5 * 2**40], ("MiB", 2**20)),
        ([1000 * 2**20, None], ("GiB", 2**30)),
        ([996 * 2**20], ("MiB", 2**20)),
        ([31 * 2**30, 11_424 * 2**30], ("GiB", 2**30)),
        ([3 * 2**40], ("TiB", 2**40)),
        ([5], ("KiB", 2**10)),
        ([], ("KiB", 2**10)),
    ],
)
def test_the_unit_is_that_of_the_smallest(sizes, unit):
    assert common_unit(sizes) == unit


def use_clock(monkeypatch, moments):
    """For the lines alone: whoever else reads the time, in a thread even, gets the real one."""
    monkeypatch.setattr(replaying, "time", SimpleNamespace(monotonic=iter(moments).__next__))


def test_a_log_gets_a_line_now_and_then(trace, capsys, monkeypatch):
    use_clock(monkeypatch, range(0, 10**6, 4))
    monkeypatch.setattr(reading, "_LOOK_EVERY", 10)
    assert main(["replay", str(trace), "--policy", "lru", "--capacity", "20", "--format", "json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["trace"]["requests"] == 60
    first, *others = err.splitlines()
    assert re.fullmatch(r"radixkv: reading, 0 of 0 MiB \(\d+%\)", first)
    assert re.fullmatch(r"radixkv: replaying, (\d+) of \1 requests \(100%\)", others[-1])


def test_progress_of_what_has_no_known_length(capsys, monkeypatch):
    use_clock(monkeypatch, [0, 5, 11, 12, 30])
    lines = replaying._Lines()
    for done in (1, 2, 3, 4):
        lines.update("Reading", done * 2**30, None)
    assert capsys.readouterr().err.splitlines() == [
        "radixkv: reading, 2,048 MiB",
        "radixkv: reading, 4,096 MiB",
    ]


def test_tokens_by_a_table(tmp_path, capsys):
    path = tmp_path / "t.jsonl"
    path.write_text('{"token_ids": [1, 2, 3]}\n?\n' * 3)
    assert main(["replay", str(path), "--skip-bad", "--block-size", "2"]) == 0
    assert "3 requests, 3 skipped" in capsys.readouterr().out


@pytest.mark.parametrize(("name", "magic"), [("a.png", b"\x89PNG"), ("a.svg", b"<?xml")])
def test_plot(trace, tmp_path, capsys, name, magic):
    folder = tmp_path / "plots"
    folder.mkdir()
    (folder / name).write_text("old")
    assert main(["replay", str(trace), "--plot", str(folder / name)]) == 0
    assert (folder / name).read_bytes().startswith(magic)
    assert [path.name for path in folder.iterdir()] == [name]


def test_what_the_plot_shows(trace):
    from radixkv.cli.replay_plot import draw

    policies = ["lru", "fifo", "optimal"]
    result = simulate(trace, capacity=[10, 20, 50], policy=policies, model_config=CONFIG)
    (panel,) = draw(result).get_axes()
    lines = {line.get_label(): line for line in panel.get_lines()}
    assert set(lines) == {*policies, "nothing ever evicted"}
    for policy in policies:
        rows = [row for row in result.results if row.policy == policy]
        assert lines[policy].get_xdata().tolist() == [10, 20, 50]
        assert lines[policy].get_ydata().tolist() == [100 * row.hit_rate for row in rows]
    assert panel.get_xscale() == "log"
    assert panel.child_axes[0].get_xlabel().startswith("KiB of KV")
    top = panel.get_ylim()[1]
    assert top > 100 * max(row.hit_rate for row in result.results)


def test_plots_of_next_to_nothing():
    from radixkv.cli.replay_plot import draw

    draw(simulate([{"token_ids": [1]}], policy="lru"))
    draw(simulate([{"token_ids": [1]}], policy="optimal-pin"))


def test_a_failed_plot_leaves_the_old_file_and_prints_nothing(trace, tmp_path, capsys, monkeypatch):
    from matplotlib.figure import Figure

    def fail(self, *args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Figure, "savefig", fail)
    path = tmp_path / "plot.png"
    path.write_text("old")
    assert main(["replay", str(trace), "--plot", str(path)]) == 2
    assert_one_line(capsys, "No space left")
    assert path.read_text() == "old"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["plot.png", "trace.jsonl"]


# -- what is wrong -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lines", "parts"),
    [
        ("", ["t.jsonl is empty"]),
        ("nonsense\n", ["t.jsonl, line 1", "not JSON"]),
        ([GOOD, {**GOOD, "input_length": -1}], ["line 2", "input_length must be at least 1, got -1"]),
        ([GOOD, {**GOOD, "output_length": -1}], ["line 2", "output_length", "-1"]),
        (
            [GOOD, {**GOOD, "hash_ids": [0, 1, 2]}],
            ["line 2", "3 hash_ids", "2 blocks of 512", "--block-size"],
        ),
        ([GOOD, {**GOOD, "timestamp": 4}], ["line 2", "timestamp 4 goes back", "line 1 has 5"]),
        ([GOOD, {"token_ids": [1]}], ["line 2", "no hash_ids"]),
        ([{"a": 1}], ["line 1", "hash_ids, token_ids, prompt, messages"]),
        ([{"prompt": "x"}], ["--tokenizer"]),
    ],
)
def test_bad_traces_are_one_line_and_exit_code_2(tmp_path, capsys, lines, parts):
    path = tmp_path / "t.jsonl"
    path.write_text(lines if isinstance(lines, str) else "\n".join(map(json.dumps, lines)))
    assert main(["replay", str(path), "--plot", str(tmp_path / "plot.png")]) == 2
    assert_one_line(capsys, *parts)
    assert [p.name for p in tmp_path.iterdir()] == ["t.jsonl"]


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ([], ["TRACE", "radixkv replay --help"]),
        (["none.jsonl"], ["none.jsonl: there is no such file"]),
        (["."], ["is a folder"]),
        (["{t}", "--policy", "lur"], ["unknown policy 'lur'", "lru", "optimal-pin"]),
        (["{t}", "--capacity", "3"], ["line 5", "need 9 blocks", "capacity of 3", "at least 9"]),
        (["{t}", "--capacity", "0"], ["capacity 0", "not even one block"]),
        (["{t}", "--capacity", "511tok"], ["511tok", "not even one block of 512"]),
        (["{t}", "--capacity", "lots"], ["'lots'", "40GiB"]),
        (["{t}", "--capacity", "1GiB"], ["--model-config"]),
        (["{t}", "--model-config", "./none"], ["./none", "there is no"]),
        (["{t}", "--block-size", "0"], ["--block-size", "radixkv replay --help"]),
        (["{t}", "--block-size", "16"], ["line 1", "--block-size"]),
        (["{t}", "--limit", "0"], ["--limit"]),
        (["{t}", "--jobs", "0"], ["--jobs"]),
        (["{t}", "--format", "xml"], ["xml", "table", "json", "csv"]),
        (["{t}", "--plot", "a.pdf"], ["a.pdf", ".png", ".svg"]),
        (["{t}", "--plot", "no/such/a.png"], ["does not exist"]),
        (["{t}", "extra"], ["extra"]),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(trace, capsys, arguments, parts):
    assert main(["replay", *(argument.format(t=trace) for argument in arguments)]) == 2
    assert_one_line(capsys, *parts)


def test_a_binary_file(tmp_path, capsys):
    path = tmp_path / "t.jsonl"
    path.write_bytes(bytes(range(256)))
    assert main(["replay", str(path)]) == 2
    assert_one_line(capsys, "not text, but binary")
    path.write_bytes(gzip.compress(json.dumps(GOOD).encode() * 1000)[:-20])
    assert main(["replay", str(path)]) == 2
    assert_one_line(capsys, "too early")


def test_a_plot_needs_matplotlib(trace, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["replay", str(trace), "--plot", "a.png"]) == 2
    assert_one_line(capsys, 'install the extra "demo"', 'pip install ".[demo]"')


def test_skipping_goes_on(trace, capsys):
    with trace.open("a") as file:
        file.write("nonsense\n" + json.dumps({"hash_ids": list(range(70)), "input_length": 70 * 512}) + "\n")
    arguments = ["replay", str(trace), "--capacity", "40", "--policy", "lru", "--format", "json"]
    assert main(arguments) == 2
    assert_one_line(capsys, "line 61", "not JSON")
    assert main([*arguments, "--skip-bad"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["trace"]["skipped"] == 2
    assert document["results"][0]["requests"] == 60


# -- the process ---------------------------------------------------------------------------------------------


def test_options_arrive(capsys, monkeypatch):
    seen = []

    def run_replay(options):
        seen.append(options)
        return simulate([{"token_ids": [1]}])

    monkeypatch.setattr(replaying, "run_replay", run_replay)
    arguments = (
        "replay - --capacity 5 --capacity 1GiB --policy lru --policy optimal --block-size 32 --tokenizer a/b"
        " --model-config c/d --plot x.png --limit 7 --skip-bad --jobs 3"
    )
    assert main(arguments.split()) == 0
    assert main(["replay", "t"]) == 0
    assert seen == [
        replaying.Options(
            "-", ("5", "1GiB"), ("lru", "optimal"), 32, "a/b", "c/d", Path("x.png"), 7, True, 3
        ),
        replaying.Options("t"),
    ]


def test_help(capsys):
    assert main(["replay", "--help"]) == 0
    assert "TRACE" in capsys.readouterr().out


def test_from_a_pipe_without_torch(trace):
    code = (
        "import sys; from radixkv.cli import main\n"
        "code = main(['replay', '-', '--format', 'json', '--jobs', '2'])\n"
        "sys.exit(3 if 'torch' in sys.modules else code)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=trace.read_bytes(), capture_output=True, timeout=120, cwd=ROOT, env=ENVIRONMENT, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, b"")
    assert json.loads(done.stdout)["trace"]["name"] == "stdin"


def test_a_reader_that_leaves(trace):
    command = f"{sys.executable} -m radixkv replay {trace} --format json | head -1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, timeout=120, cwd=ROOT, env=ENVIRONMENT,
        check=False,
    )  # fmt: skip
    assert done.returncode in (0, 141)
    assert done.stderr == ""


def run_on_a_terminal(command: list[str]) -> tuple[int, str, str]:
    """Exit code, stdout, and what a terminal on stderr shows."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=theirs, stdin=subprocess.DEVNULL, cwd=ROOT,
        env=ENVIRONMENT | {"TERM": "xterm", "COLUMNS": "100"},
    )  # fmt: skip
    os.close(theirs)
    shown = b""
    while True:
        try:
            piece = os.read(ours, 65536)
        except OSError:  # the other end was closed
            break
        if not piece:
            break
        shown += piece
    os.close(ours)
    out = process.stdout.read() if process.stdout else b""
    return process.wait(60), out.decode(), shown.decode()


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_a_bar_with_rate_and_time_left_on_a_terminal(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(request) + "\n" for request in requests(3000)))
    code, out, shown = run_on_a_terminal([*RUN, str(path), "--policy", "lru", "--format", "json"])
    assert code == 0
    assert json.loads(out)["trace"]["requests"] == 3000
    for part in ("Reading", "Replaying", "requests/s", "left", "0:00:0"):
        assert part in shown


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
@pytest.mark.parametrize("jobs", ["1", "2"])
def test_ctrl_c_is_one_line(tmp_path, jobs):
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(request) + "\n" for request in requests(40000)))
    process = subprocess.Popen(
        [*RUN, str(path), "--jobs", jobs], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT,
        env=ENVIRONMENT, start_new_session=True,
    )  # fmt: skip
    time.sleep(4)
    assert process.poll() is None, process.communicate()
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to all processes of the command
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (130, "", "radixkv: interrupted\n")


# -- texts ---------------------------------------------------------------------------------------------------


def test_chats_with_a_tokenizer_folder_and_lines_of_all_kinds_of_faults(tmp_path, capsys):
    """A real tokenizer with a chat template; what is skipped is counted, and the rest is as if it were not there."""
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    words = {word: number for number, word in enumerate(["?", *"abcdefg", "user", "assistant", ":"])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="?"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=made)
    fast.chat_template = "{% for m in messages %}{{ m.role }} : {{ m.content }} {% endfor %}assistant :"
    fast.save_pretrained(tmp_path / "model")
    made.save(str(tmp_path / "alone.json"))

    def chat(*contents):
        turns = [
            {"role": role, "content": text}
            for role, text in zip(["user", "assistant"] * 9, contents, strict=False)
        ]
        return json.dumps({"messages": turns, "timestamp": len(contents)})

    good = [chat("a b c d"), chat("a b c d", "e f", "g"), chat("a b c d", "e f", "g a", "b", "c")]
    bad = [
        "nonsense", "[]", '{"token_ids": [1]}', '{"messages": []}', '{"messages": [{"role": 5}]}', "\\xff",
        '{"messages": [{"role": "user", "content": [{"type": "image"}]}]}', chat("a"),
        '{"messages": ' + "[" * 100000, json.dumps({"messages": [{"role": "user", "content": "a " * 5000}]}),
    ]  # fmt: skip
    for name, lines in (("good", good), ("mixed", [good[0], *bad[:5], good[1], *bad[5:], good[2]])):
        (tmp_path / name).write_bytes("\n".join(lines).encode().replace(b"\\xff", b"\xff"))
    options = [
        "--tokenizer",
        str(tmp_path / "model"),
        "--block-size",
        "4",
        "--capacity",
        "10",
        "--format",
        "json",
    ]
    assert main(["replay", str(tmp_path / "good"), *options]) == 0
    wanted = json.loads(capsys.readouterr().out)
    tokens = [
        list(fast.encode(fast.apply_chat_template(json.loads(c)["messages"], tokenize=False))) for c in good
    ]
    assert wanted["trace"]["prompt_tokens"] == sum(map(len, tokens))
    assert (
        wanted["results"]
        == simulate([{"token_ids": t} for t in tokens], capacity=10, block_size=4).to_dict()["results"]
    )
    assert main(["replay", str(tmp_path / "mixed"), *options]) == 2
    assert_one_line(capsys, "line 2", "not JSON")
    assert main(["replay", str(tmp_path / "mixed"), *options, "--skip-bad"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["results"] == wanted["results"]
    assert found["trace"]["skipped"] == len(bad)
    options[1] = str(tmp_path / "alone.json")
    assert main(["replay", str(tmp_path / "good"), *options]) == 2
    assert_one_line(capsys, "no chat template")
