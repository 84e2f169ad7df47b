"""Progress of a command over its workloads: one bar each, on stderr."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import TracebackType


class WorkloadBars:
    """A warm-up, then one bar a workload; a context manager.

    Args:
        totals: Title and number of steps of each workload, by name, in order.
        warm_up: Called first, under a bar of its own.
        enabled: False shows nothing.
    """

    def __init__(
        self, totals: Mapping[str, tuple[str, int]], warm_up: Callable[[], None], enabled: bool = True
    ) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self._totals = totals
        self._warm_up = warm_up
        columns = (
            TextColumn("{task.description:<24}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("[dim]{task.fields[note]}"),
        )
        self._bar = Progress(*columns, console=Console(stderr=True), disable=not enabled)

    def __enter__(self) -> WorkloadBars:
        self._bar.__enter__()
        try:
            task = self._bar.add_task("Warming up", total=1, note="")
            self._warm_up()
            self._bar.update(task, completed=1, visible=False)
            self._tasks = {
                name: self._bar.add_task(title, total=total, note="", start=False)
                for name, (title, total) in self._totals.items()
            }
            self._done = dict.fromkeys(self._tasks, 0)
        except BaseException:
            self._bar.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.__exit__(kind, error, trace)

    def step(self, name: str, note: str | None) -> None:
        """The next step of a workload begins; with None it is done.

        Args:
            name: Of the workload.
            note: What is being run.
        """
        task = self._tasks[name]
        if self._done[name] == 0:
            self._bar.start_task(task)
        self._bar.update(task, completed=self._done[name], note=note or "")
        self._done[name] += 1
        if note is None:
            self._bar.stop_task(task)
