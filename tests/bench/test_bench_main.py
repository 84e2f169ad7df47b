from __future__ import annotations

import pytest

from radixkv.bench import main as bench_main
from radixkv.bench.main import Options, find_end_ids, make_ways, run_bench
from radixkv.demo.errors import DemoError


@pytest.fixture
def made(monkeypatch, fake_engine):
    """Engines of the command are fakes; returns those that were made."""
    engines = []

    def make(*args, **options):
        engines.append(fake_engine(*args, **options))
        return engines[-1]

    monkeypatch.setattr("radixkv.engine.engine.Engine", make)
    return engines


def test_ways_in_order_and_engine_options(tiny, made):
    options = Options(tiny=True, max_num_seqs=3, max_batched_tokens=99, memory="1GiB", requests=5)
    setting, ways = make_ways(options, *tiny)
    assert [way.name for way in ways] == ["one_by_one", "padded", "generate_batch", "engine"]
    (engine,) = made
    assert engine.options == {"max_num_seqs": 3, "max_batched_tokens": 99, "memory": "1GiB"}
    assert (setting.bytes_per_token, setting.end_ids, setting.max_new_tokens) == (1024, (), 16)
    _, ways = make_ways(Options(skip=("padded", "generate_batch")), *tiny)
    assert [way.name for way in ways] == ["one_by_one", "engine"]


def test_the_whole_command_is_silent_without_a_terminal(made, capsys):
    options = Options(
        tiny=True,
        workloads=("none", "tree"),
        skip=("generate_batch",),
        requests=2,
        max_new_tokens=3,
        repeat=2,
    )
    result, setting = run_bench(options)
    assert capsys.readouterr() == ("", "")
    assert [workload.workload.name for workload in result.workloads] == ["tree", "none"]
    assert result.same_tokens
    assert setting["batch_size"] == 2
    assert setting["repeat"] == 2
    assert setting["fallback_reason"] is None
    (engine,) = made
    assert engine.cleared == 1 + 2 * 2  # after warming up, and before each repetition of each workload


def test_nothing_measured_is_an_error_of_one_line(made, monkeypatch):
    def fail(self, prompts):
        raise bench_main.NotMeasured("no room")

    for way in (bench_main.OneByOne, bench_main.EngineWay):
        monkeypatch.setattr(way, "run", fail)
    options = Options(tiny=True, skip=("padded", "generate_batch"), workloads=("none",))
    with pytest.raises(DemoError, match="nothing could be measured: one_by_one: no room; engine: no room"):
        run_bench(options)


def test_end_ids_are_the_models_and_those_of_turns(tiny, monkeypatch):
    model, tokenizer = tiny
    assert find_end_ids(model, tokenizer) == ()
    monkeypatch.setattr(model.generation_config, "eos_token_id", [7, 3])
    assert find_end_ids(model, tokenizer) == (3, 7)
    monkeypatch.setattr(model.generation_config, "eos_token_id", 9)
    monkeypatch.setattr(tokenizer, "get_vocab", lambda: {"<end_of_turn>": 4})
    assert find_end_ids(model, tokenizer) == (4, 9)
