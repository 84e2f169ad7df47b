"""`radixkv bench` from its options to its result: load, measure."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from radixkv.bench import ways as ways_module
from radixkv.bench import workloads as workloads_module
from radixkv.bench.runner import BenchResult, Runner
from radixkv.bench.ways import EngineWay, GenerateBatch, NotMeasured, OneByOne, Padded, Setting, Way
from radixkv.bench.workloads import make_workloads
from radixkv.core.errors import install_hint
from radixkv.demo import main as demo
from radixkv.demo.bars import WorkloadBars
from radixkv.demo.errors import DemoError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class Options:
    """The options of the command; None is the default that depends on something."""

    model: str | None = None
    tiny: bool = False
    workloads: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()
    requests: int = 8
    max_new_tokens: int = 16
    batch_size: int | None = None
    max_num_seqs: int = 64
    max_batched_tokens: int = 2048
    memory: str | None = None
    repeat: int = 1
    threads: int | None = None
    device: str = "cpu"
    quick: bool = False


def run_bench(options: Options) -> tuple[BenchResult, dict[str, Any]]:
    """Run the comparison. Returns the result and the setting it was measured in.

    Progress goes to stderr while that is a terminal.

    Raises:
        DemoError: An option cannot be followed, or nothing can be measured.
        RadixKVError: The engine cannot be made for this model or on this machine, or a prompt does not fit.
    """
    check(options)
    try:
        import transformers  # noqa: F401
    except ImportError as error:
        raise DemoError(f"bench needs transformers: {install_hint('demo')}") from error
    import torch
    from transformers.utils import logging

    if options.threads is not None:
        torch.set_num_threads(options.threads)
    logging.disable_progress_bar()  # ours says the same
    logging.set_verbosity_error()
    model, tokenizer = demo.load(
        demo.Options(model=options.model, tiny=options.tiny, device=options.device, quick=options.quick)
    )
    setting = demo.describe_setting(demo.Options(max_new_tokens=options.max_new_tokens), model)
    for name in ("requests", "quick", "repeat", "max_num_seqs", "max_batched_tokens", "memory"):
        setting[name] = getattr(options, name)
    setting["batch_size"] = options.batch_size or options.requests
    common, ways = make_ways(options, model, tokenizer)
    engine = next(way.engine for way in ways if isinstance(way, EngineWay))
    setting["fallback_reason"] = engine.fallback_reason
    return _measure(options, Runner(common, tokenizer, ways, options.repeat), len(ways), tokenizer), setting


def check(options: Options) -> None:
    """Raise `DemoError` if the options contradict each other or name what does not exist."""
    if options.model is not None and options.tiny:
        raise DemoError("--model and --tiny exclude each other: give one of them")
    _known("--workload", options.workloads, workloads_module.NAMES)
    others = [name for name in ways_module.NAMES if name != EngineWay.name]
    _known("--skip", options.skip, others)
    if set(others) <= set(options.skip):
        raise DemoError("--skip leaves nothing to compare with: keep at least one of the ways")


def _known(option: str, given: Sequence[str], known: Sequence[str]) -> None:
    for name in given:
        if name not in known:
            raise DemoError(f"{option} {name}: there is no such one, choose from {', '.join(known)}")


def make_ways(
    options: Options, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> tuple[Setting, list[Way]]:
    """What all ways have in common, and the ways that are not skipped."""
    from radixkv.engine.engine import Engine

    engine = Engine(
        model,
        tokenizer,
        max_num_seqs=options.max_num_seqs,
        max_batched_tokens=options.max_batched_tokens,
        memory=options.memory,
    )
    end_ids = find_end_ids(model, tokenizer)
    pad_id = tokenizer.pad_token_id
    setting = Setting(
        model=model,
        max_new_tokens=options.max_new_tokens,
        end_ids=end_ids,
        pad_id=pad_id if pad_id is not None else end_ids[0] if end_ids else 0,
        bytes_per_token=engine.cache.layout.bytes_per_token,
    )
    made: list[Way] = [
        OneByOne(setting),
        Padded(setting, options.batch_size or options.requests),
        GenerateBatch(setting, options.max_batched_tokens),
        EngineWay(setting, engine),
    ]
    return setting, [way for way in made if way.name not in options.skip]


def find_end_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """The model's own end tokens and those that end a turn of a chat."""
    configured = model.generation_config.eos_token_id
    own = [] if configured is None else configured if isinstance(configured, list) else [configured]
    return tuple(sorted({*own, *demo.turn_end_ids(tokenizer)}))


def _measure(
    options: Options, runner: Runner, num_ways: int, tokenizer: PreTrainedTokenizerBase
) -> BenchResult:
    chat_format, formatted = demo.make_chat_format(tokenizer)
    workloads = make_workloads(
        chat_format,
        formatted=formatted,
        names=options.workloads or workloads_module.NAMES,
        num_requests=options.requests,
        short=options.tiny,
        quick=options.quick,
    )
    totals = {w.name: (w.title, w.num_rounds * num_ways * options.repeat) for w in workloads}
    with WorkloadBars(totals, runner.warm_up, enabled=sys.stderr.isatty()) as bars:
        try:
            return runner.run(workloads, lambda workload, way: bars.step(workload.name, way))
        except NotMeasured as error:
            raise DemoError(f"nothing could be measured: {error}") from error
