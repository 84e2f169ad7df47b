from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from radixkv.bench.report import print_report, ratio, to_json, totals, verdict
from radixkv.bench.runner import BenchResult, Runner, WayResult, first_difference
from radixkv.bench.ways import NotMeasured, Outcome, Setting
from radixkv.bench.workloads import Prompt, Workload

SETTING = {
    "model": {"name": "m", "architecture": "X", "parameters": 10**6, "dtype": "float32", "device": "cpu"},
    "threads": 1,
    "max_new_tokens": 3,
    "batch_size": 2,
    "repeat": 1,
}


class StubWay:
    """Answers each prompt by its length, or as it is told."""

    def __init__(self, name, *, change=None, broken=None, problems=(), log=None):
        self.name, self.title = name, f"way {name}"
        self.change, self.broken, self.problems = change or {}, broken, problems
        self.log = log if log is not None else []

    def reset(self):
        self.log.append((self.name, "reset"))

    def run(self, prompts):
        self.log.append((self.name, [len(prompt) for prompt in prompts]))
        if self.broken:
            raise NotMeasured(self.broken)
        tokens = [self.change.get(len(prompt), [65, 66, 67]) for prompt in prompts]
        hits = None if self.name == "padded" else 2
        return Outcome(tokens, peak_kv_bytes=100 * len(prompts), hit_tokens=hits, problems=self.problems)


def stream():
    (answer, _) = yield [Prompt("one", "abc"), Prompt("two", "abcdef")]
    yield [Prompt("three", f"abc {answer}")]


WORKLOAD = Workload("chat", "Chat", 2, 3, stream)


@pytest.fixture
def run(tiny):
    def run(*ways, repeat=1, workloads=(WORKLOAD,)):
        setting = Setting(tiny[0], 3, (), 0, 10)
        return Runner(setting, tiny[1], ways, repeat).run(workloads)

    return run


def printed(result, setting=SETTING) -> str:
    console = Console(file=io.StringIO(), width=100)
    print_report(result, setting, console)
    return console.file.getvalue()


def test_rounds_are_answered_by_all_and_the_next_one_holds_the_answers(run):
    log = []
    result = run(StubWay("one_by_one", log=log), StubWay("engine", log=log))
    # A token for the start and one a byte; the second round holds "ABC".
    assert log == [
        ("one_by_one", "reset"),
        ("engine", "reset"),
        ("one_by_one", [4, 7]),
        ("engine", [4, 7]),
        ("engine", [8]),
        ("one_by_one", [8]),
    ]
    (workload,) = result.workloads
    assert workload.prompt_tokens == 19
    assert workload.reference == "one_by_one"
    engine = workload.way("engine")
    assert (engine.new_tokens, engine.hit_tokens, engine.peak_kv_bytes) == (9, 4, 200)
    assert len(engine.wall_s) == len(engine.cpu_s) == 1
    assert result.same_tokens


def test_repetitions_start_cold_and_their_median_counts(run):
    log = []
    result = run(StubWay("one_by_one"), StubWay("engine", log=log), repeat=3)
    assert [entry for _, entry in log].count("reset") == 3
    engine = result.workloads[0].way("engine")
    assert len(engine.wall_s) == 3
    assert engine.wall == sorted(engine.wall_s)[1]
    assert engine.new_tokens == 9  # of one repetition


def test_a_difference_is_named_once_with_its_gap(run):
    result = run(StubWay("one_by_one"), StubWay("engine", change={7: [65, 99, 67]}), repeat=2)
    (difference,) = result.workloads[0].differences
    assert (difference.request, difference.way) == ("two", "way engine")
    assert (difference.position, difference.expected, difference.found) == (1, 66, 99)
    assert difference.gap is not None
    assert not result.same_tokens
    text = printed(result)
    assert "two, new token 1: way engine gives token 99, not token 66" in text
    assert "NO" in text
    assert "1 answers differ" in text


def test_an_answer_that_ends_early_is_a_difference(run):
    result = run(StubWay("one_by_one"), StubWay("engine", change={7: [65]}))
    (difference,) = result.workloads[0].differences
    assert (difference.position, difference.expected, difference.found, difference.gap) == (1, 66, None, None)
    assert "gives the end, not token 66" in printed(result)


def test_a_way_that_cannot_run_says_why_once_and_the_rest_goes_on(run):
    log = []
    broken = StubWay("generate_batch", broken="no [such] kernel", log=log)
    result = run(StubWay("one_by_one"), broken, StubWay("engine"), workloads=(WORKLOAD, WORKLOAD))
    assert [entry for _, entry in log if entry != "reset"] == [[4, 7]]
    for workload in result.workloads:
        assert workload.way("generate_batch") is None
        assert [way.reason for way in workload.ways] == [None, "no [such] kernel", None]
    assert result.same_tokens
    assert "Not measured: way generate_batch: no [such] kernel" in printed(result)
    assert to_json(result, SETTING)["workloads"][0]["ways"]["generate_batch"] == {
        "measured": False,
        "reason": "no [such] kernel",
    }


def test_a_failed_request_is_no_success(run):
    result = run(StubWay("one_by_one"), StubWay("engine", problems=("request 1 ended with 'capacity'",)))
    assert not result.same_tokens
    assert "way engine: request 1 ended with 'capacity'" in printed(result)


def test_nothing_can_run(run):
    with pytest.raises(NotMeasured, match="a: one; b: two"):
        run(StubWay("a", broken="one"), StubWay("b", broken="two"))


def test_one_way_alone_is_no_comparison(run):
    assert "Nothing to compare" in verdict(run(StubWay("engine")))


def test_ratios_are_over_the_engine(run):
    result = run(StubWay("one_by_one"), StubWay("padded"), StubWay("engine"))
    for way, wall, cpu in zip(result.workloads[0].ways, (3.0, 1.0, 2.0), (4.0, 1.0, 2.0), strict=True):
        way.wall_s, way.cpu_s = [wall], [cpu]
    engine = result.workloads[0].way("engine")
    assert [ratio(way, engine, "wall") for way in result.workloads[0].ways] == [1.5, 0.5, 1.0]
    assert totals(result) == {
        "one_by_one": {"cpu_ratio": 2.0, "wall_ratio": 1.5},
        "padded": {"cpu_ratio": 0.5, "wall_ratio": 0.5},
    }
    text = printed(result)
    for part in ("Chat: 3 prompts, 19 tokens in 2 rounds", "3.00 s", "1.50×", "0.50×", "200 B", "9.0"):
        assert part in text
    assert "All ways give the same tokens. CPU time in total, engine = 1: way one_by_one 2.00×; way" in text
    assert max(map(len, text.splitlines()[:-1])) <= 100
    assert "…" not in text
    assert ratio(WayResult("a", "a", reason="no"), engine, "wall") is None


def test_an_engine_that_falls_back_says_why(run):
    text = printed(run(StubWay("a"), StubWay("engine")), SETTING | {"fallback_reason": "it has [odd] masks"})
    assert "The engine forwards sequences one by one: it has [odd] masks" in text


def test_json_document(run):
    result = run(StubWay("one_by_one"), StubWay("padded"), StubWay("engine", change={4: [1]}))
    document = json.loads(json.dumps(to_json(result, SETTING)))
    assert document["schema"] == 1
    assert set(document) == {"schema", "setting", "workloads", "summary"}
    assert document["summary"]["same_tokens"] is False
    (workload,) = document["workloads"]
    assert list(workload["ways"]) == ["one_by_one", "padded", "engine"]
    assert workload["ways"]["engine"]["hit_tokens"] == 4
    assert workload["ways"]["padded"]["hit_tokens"] is None
    assert workload["ways"]["engine"].keys() >= {"wall_s", "cpu_s", "peak_kv_bytes", "new_tokens_per_s"}
    assert workload["differences"] == [
        {"request": "one", "way": "way engine", "position": 0, "expected": 65, "found": 1}
        | {"gap": workload["differences"][0]["gap"]}
    ]


def test_progress_is_reported(tiny):
    seen = []
    runner = Runner(Setting(tiny[0], 3, (), 0, 10), tiny[1], [StubWay("a"), StubWay("engine")])
    runner.run([WORKLOAD], lambda workload, way: seen.append(way))
    assert seen == ["way a", "way engine", "way engine", "way a", None]


def test_warming_up_leaves_nothing(tiny):
    log = []
    runner = Runner(Setting(tiny[0], 3, (), 0, 10), tiny[1], [StubWay("a", log=log)])
    runner.warm_up()
    assert log[-1] == ("a", "reset")
    assert isinstance(runner.run([WORKLOAD]), BenchResult)


@pytest.mark.parametrize(
    ("expected", "found", "index"), [([1, 2], [1, 3], 1), ([1, 2], [1], 1), ([1], [1, 2], 1), ([], [1], 0)]
)
def test_first_difference(expected, found, index):
    assert first_difference(expected, found) == index
