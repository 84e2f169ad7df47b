"""Commands, options and exit codes; the work is done in `radixkv.demo`, `.bench`, `.cli.replay` and `.cli.info`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import typer

from radixkv.cli import (
    EXIT_BROKEN_PIPE,
    EXIT_DIFFERS,
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_TERMINATED,
    EXIT_USAGE,
)
from radixkv.cli.signals import Terminated, terminable
from radixkv.cli.streams import OutputFailed, ReaderGone, checked_stdout, give_up, printable, writable
from radixkv.core.errors import RadixKVError, is_out_of_memory
from radixkv.demo.errors import DemoError

app = typer.Typer(
    name="radixkv",
    help="A prefix-caching radix-tree KV cache for language models.",
    no_args_is_help=False,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

# typer has shipped a click of its own since 0.2x and used the installed one before: take the class from typer.
_UsageProblem: type[Exception] = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")


class Format(str, Enum):
    """How to print the result."""

    table = "table"
    json = "json"


class ReplayFormat(str, Enum):
    """How to print the result of `replay`."""

    table = "table"
    json = "json"
    csv = "csv"


class WorkloadName(str, Enum):
    """The workloads of `bench`."""

    system = "system"
    few_shot = "few_shot"
    chat = "chat"
    tree = "tree"
    none = "none"


class WayName(str, Enum):
    """What the engine is compared with."""

    one_by_one = "one_by_one"
    padded = "padded"
    generate_batch = "generate_batch"


def _names(choices: type[Enum]) -> str:
    *first, last = (choice.value for choice in choices)
    return f"{', '.join(first)} or {last}"


FormatOption = Annotated[Format, typer.Option("--format", help="Tables, or one JSON document on stdout.")]

# What the commands that run a model have in common.
ModelOption = Annotated[
    str | None,
    typer.Option(
        help="Folder or hub id of a causal language model, instead of Gemma 3 270M.", metavar="PATH_OR_ID"
    ),
]
TinyOption = Annotated[bool, typer.Option("--tiny", help="A small random model: nothing to download.")]
ThreadsOption = Annotated[
    int | None, typer.Option(min=1, help="Threads of torch. Default: torch's own.", show_default=False)
]
DeviceOption = Annotated[str, typer.Option(help="cpu, cuda or cuda:1.")]


def run(arguments: list[str]) -> int:
    """Run a command line and return its exit code. A mistake of the user ends in one line on stderr."""
    try:
        with terminable(), checked_stdout():
            code = app(args=arguments, prog_name="radixkv", standalone_mode=False)
        return EXIT_OK if code is None else int(code)
    except (KeyboardInterrupt, typer.Abort, _Interrupted):
        return _fail("interrupted", EXIT_INTERRUPTED)
    except Terminated:
        return _fail("terminated", EXIT_TERMINATED)
    except ReaderGone:
        return EXIT_BROKEN_PIPE
    except _UsageProblem as problem:
        context = getattr(problem, "ctx", None)
        command = context.command_path if context else "radixkv"
        return _fail(f"{problem.format_message().rstrip('.')}. Try '{command} --help'.")  # type: ignore[attr-defined]
    except (DemoError, RadixKVError, OutputFailed) as problem:
        return _fail(str(problem))
    except (MemoryError, RuntimeError) as problem:
        if not is_out_of_memory(problem):
            raise
        smaller = "--quick, --tiny or a smaller model"
        if arguments[:1] == ["replay"]:
            smaller = "--limit to replay less of the trace, or fewer --jobs"
        return _fail(f"out of memory: close other programs, or use {smaller}")


class _Interrupted(Exception):
    """Ctrl-C in a command; typer would end the process without a word."""


def _guarded(work: Callable[[], int]) -> int:
    try:
        return work()
    except KeyboardInterrupt as error:
        raise _Interrupted from error


def _fail(message: str, code: int = EXIT_USAGE) -> int:
    try:
        print(f"radixkv: {printable(' '.join(message.split()))}", file=sys.stderr, flush=True)
    except OSError:
        give_up(sys.stderr)  # nobody can be told
    return code


def _print_json(document: dict[str, Any]) -> None:
    text = json.dumps(document, indent=2, ensure_ascii=False)
    sys.stdout.write((text if writable(text) else json.dumps(document, indent=2)) + "\n")


def _report(report: ModuleType, result: Any, setting: dict[str, Any], output: Format) -> int:
    """Print a result as its command's `report` module puts it; the exit code it deserves."""
    if output is Format.json:
        _print_json(report.to_json(result, setting))
    else:
        from radixkv.demo.report import make_console

        report.print_report(result, setting, make_console())
    return EXIT_OK if result.same_tokens else EXIT_DIFFERS


@app.callback(invoke_without_command=True)
def _top(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        import radixkv

        print(f"radixkv {radixkv.__version__}")
        raise typer.Exit(EXIT_OK)
    if context.invoked_subcommand is None:
        raise DemoError("which command? Try 'radixkv demo --tiny', or 'radixkv --help' for all of them")


@app.command()
def info(output: FormatOption = Format.table) -> int:
    """Show versions, devices, free memory and the size a cache would have by default."""

    def work() -> int:
        from radixkv.cli import info as collect

        found = collect.collect()
        if output is Format.json:
            _print_json(found)
        else:
            collect.print_tables(found)
        return EXIT_OK

    return _guarded(work)


@app.command()
def demo(
    model: ModelOption = None,
    tiny: TinyOption = False,
    output: FormatOption = Format.table,
    plot: Annotated[
        Path | None,
        typer.Option(help="Write bars of time to first token into this .png or .svg file.", metavar="FILE"),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 24,
    threads: ThreadsOption = None,
    device: DeviceOption = "cpu",
    quick: Annotated[bool, typer.Option("--quick", help="Fewer requests of each kind.")] = False,
) -> int:
    """Four workloads on a real model, each request without and with the cache: what is skipped, what it saves.

    Ends with exit code 1 if the cache changed any output.
    """

    def work() -> int:
        from radixkv.demo import main, report

        options = main.Options(
            model=model,
            tiny=tiny,
            plot=plot,
            max_new_tokens=max_new_tokens,
            threads=threads,
            device=device,
            quick=quick,
        )
        result, setting = main.run_demo(options)
        return _report(report, result, setting, output)

    return _guarded(work)


@app.command()
def bench(
    model: ModelOption = None,
    tiny: TinyOption = False,
    workload: Annotated[
        list[WorkloadName] | None,
        typer.Option(
            help=f"Only this one of {_names(WorkloadName)}; may be given again. Default: all.",
            metavar="NAME",
            show_default=False,
        ),
    ] = None,
    skip: Annotated[
        list[WayName] | None,
        typer.Option(
            help=f"Leave out a way, for example a slow one: {_names(WayName)}; may be given again.",
            metavar="NAME",
            show_default=False,
        ),
    ] = None,
    requests: Annotated[int, typer.Option(min=1, help="Prompts of a round.")] = 8,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 16,
    batch_size: Annotated[
        int | None,
        typer.Option(min=1, help="Rows of a padded batch. Default: all of a round.", show_default=False),
    ] = None,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Sequences the engine runs at a time.")] = 64,
    max_batched_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens of one forward of the engine and of generate_batch.")
    ] = 2048,
    memory: Annotated[
        str | None,
        typer.Option(
            help="KV memory of the engine, such as 1GiB. Default: a share of what is free.",
            show_default=False,
        ),
    ] = None,
    repeat: Annotated[
        int, typer.Option(min=1, help="Run each workload this many times and show medians.")
    ] = 1,
    threads: ThreadsOption = None,
    device: DeviceOption = "cpu",
    output: FormatOption = Format.table,
    quick: Annotated[
        bool, typer.Option("--quick", help="Fewer rounds of the workloads chat and tree.")
    ] = False,
) -> int:
    """The same prompts through generate, padded batches, generate_batch and the engine: time, memory, tokens.

    Ends with exit code 1 if any of them gives other tokens.
    """

    def work() -> int:
        from radixkv.bench import main, report

        options = main.Options(
            model=model,
            tiny=tiny,
            workloads=tuple(name.value for name in workload or ()),
            skip=tuple(name.value for name in skip or ()),
            requests=requests,
            max_new_tokens=max_new_tokens,
            batch_size=batch_size,
            max_num_seqs=max_num_seqs,
            max_batched_tokens=max_batched_tokens,
            memory=memory,
            repeat=repeat,
            threads=threads,
            device=device,
            quick=quick,
        )
        result, setting = main.run_bench(options)
        return _report(report, result, setting, output)

    return _guarded(work)


@app.command()
def replay(
    trace: Annotated[
        str, typer.Argument(help="Requests, one a line: .jsonl, .jsonl.gz, or - for stdin.", metavar="TRACE")
    ],
    capacity: Annotated[
        list[str] | None,
        typer.Option(
            help="Size of the cache: blocks (1000), tokens (512000tok), memory (40GiB, with --model-config) or "
            "unlimited; may be given again. Default: round numbers up to what the trace would fill.",
            show_default=False,
        ),
    ] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            help="Eviction policy, optimal or optimal-pin; may be given again. Default: lru, hit-density, optimal.",
            show_default=False,
        ),
    ] = None,
    block_size: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Tokens in a block: of the trace, if it names blocks (default 512), else of the cache (default 16).",
            show_default=False,
        ),
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            help="For prompts and messages: folder or hub id of a model, or a tokenizer.json.",
            metavar="PATH_OR_ID",
        ),
    ] = None,
    model_config: Annotated[
        str | None,
        typer.Option(
            help="The model whose KV is cached: a config.json, its folder or a hub id. Shows sizes in memory.",
            metavar="PATH_OR_ID",
        ),
    ] = None,
    output: Annotated[
        ReplayFormat, typer.Option("--format", help="A table, one JSON document, or CSV on stdout.")
    ] = ReplayFormat.table,
    plot: Annotated[
        Path | None,
        typer.Option(help="Draw hit rate over capacity into this .png or .svg file.", metavar="FILE"),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Read at most this many requests.", show_default=False)
    ] = None,
    skip_bad: Annotated[
        bool,
        typer.Option("--skip-bad", help="Count and leave out requests that make no sense, or do not fit."),
    ] = False,
    jobs: Annotated[int, typer.Option(min=1, help="Processes that replay at the same time.")] = 1,
) -> int:
    """What a prefix cache would have done for recorded traffic: hit rates over cache size, against the optimum.

    A line of the trace is a request: token_ids, a prompt, messages, or
    hash_ids and input_length as in the public Mooncake traces. The replay
    runs the cache's own tree and pool, one request at a time; what is
    generated is ignored.
    """

    def work() -> int:
        from radixkv.cli import replay as replaying
        from radixkv.cli import replay_report

        options = replaying.Options(
            trace=trace,
            capacities=tuple(capacity or ()),
            policies=tuple(policy or ()),
            block_size=block_size,
            tokenizer=tokenizer,
            model_config=model_config,
            plot=plot,
            limit=limit,
            skip_bad=skip_bad,
            jobs=jobs,
        )
        result = replaying.run_replay(options)
        if output is ReplayFormat.json:
            _print_json(result.to_dict())
        elif output is ReplayFormat.csv:
            sys.stdout.write(replay_report.to_csv(result))
        else:
            from radixkv.demo.report import make_console

            replay_report.print_report(result, make_console())
        return EXIT_OK

    return _guarded(work)
