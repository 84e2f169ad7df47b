"""`radixkv replay` from its options to its result: read, replay, plot."""

from __future__ import annotations

import os
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from radixkv.replay import ReplayResult, simulate


@dataclass(frozen=True)
class Options:
    """The options of the command; None is the default that depends on something."""

    trace: str
    capacities: tuple[str, ...] = ()
    policies: tuple[str, ...] = ()
    block_size: int | None = None
    tokenizer: str | None = None
    model_config: str | None = None
    plot: Path | None = None
    limit: int | None = None
    skip_bad: bool = False
    jobs: int = 1


def run_replay(options: Options) -> ReplayResult:
    """Replay a trace, with progress on stderr: bars on a terminal, elsewhere a line now and then.

    Raises:
        RadixKVError: The trace or an option makes no sense.
        DemoError: The plot cannot be drawn or written.
    """
    if options.plot is not None:
        from radixkv.demo.plot import check_plot_path

        check_plot_path(options.plot)
    # Without a network the hub logs each attempt; the error at the end says it all.
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    shown: AbstractContextManager[_Bars | _Lines] = _Bars() if sys.stderr.isatty() else nullcontext(_Lines())
    with shown as progress:
        result = simulate(
            options.trace,
            capacity=options.capacities or None,
            policy=options.policies or None,
            block_size=options.block_size,
            tokenizer=options.tokenizer,
            model_config=options.model_config,
            limit=options.limit,
            skip_bad=options.skip_bad,
            jobs=options.jobs,
            progress=progress.update,
        )
    if options.plot is not None:
        from radixkv.cli.replay_plot import draw
        from radixkv.demo.plot import save_figure

        save_figure(draw(result), options.plot)
    return result


#: By what is counted: what it is divided by to be shown, and the unit then.
_UNITS = {"Reading": (2**20, "MiB"), "Replaying": (1, "requests")}


class _Bars:
    """One bar for each thing that is done, with its rate and the time left."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

        self._bar = Progress(
            TextColumn("{task.description:<10}"),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.fields[rate]}"),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        self._tasks: dict[str, Any] = {}

    def __enter__(self) -> _Bars:
        self._bar.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.__exit__(kind, error, trace)

    def update(self, what: str, done: int, total: int | None) -> None:
        """So much of it is done."""
        if what not in self._tasks:
            self._tasks[what] = self._bar.add_task(what, total=total, rate="")
        task = self._tasks[what]
        size, unit = _UNITS[what]
        speed = self._bar.tasks[self._bar.task_ids.index(task)].speed
        rate = "" if not speed else f"{speed / size:,.0f} {unit}/s"
        self._bar.update(task, completed=done, total=total, rate=rate)


#: Seconds between two lines of progress. What takes less says nothing.
_LINE_EVERY = 10.0


class _Lines:
    """A line on stderr now and then, for logs."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def update(self, what: str, done: int, total: int | None) -> None:
        """So much of it is done."""
        now = time.monotonic()
        if now - self._last < _LINE_EVERY:
            return
        self._last = now
        size, unit = _UNITS[what]
        of = f" of {total / size:,.0f} {unit} ({done / total:.0%})" if total else f" {unit}"
        print(f"radixkv: {what.lower()}, {done / size:,.0f}{of}", file=sys.stderr, flush=True)
