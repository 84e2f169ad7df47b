"""A progress bar for `Engine.generate`, on terminals only."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from radixkv.engine.stats import EngineStats

__all__ = ["Progress"]

_REFRESH_SECONDS = 0.1


class Progress:
    """Shows finished prompts, tokens a second, who runs and waits, and the hit rate; a context manager.

    Silent when stderr is no terminal, so that logs stay clean.

    Args:
        total: Completions to come.
        enabled: False shows nothing.
    """

    def __init__(self, total: int, enabled: bool) -> None:
        self._total = total
        self._enabled = enabled and sys.stderr.isatty()
        self._bar: object | None = None

    def __enter__(self) -> Progress:
        if self._enabled:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar

            self._bar = bar = Bar(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[detail]}"),
                TimeRemainingColumn(),
                console=Console(stderr=True),
                transient=True,
            )
            self._task = bar.add_task("Generating", total=self._total, detail="")
            self._began = self._shown = time.perf_counter()
            self._tokens = 0
            bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()  # type: ignore[attr-defined]

    def update(self, finished: int, new_tokens: int, stats: EngineStats | None = None) -> bool:
        """Count, and draw if it is time to.

        Args:
            finished: Completions done so far.
            new_tokens: Tokens made since the last call.
            stats: Of the engine, if the last call returned True.

        Returns:
            Whether the next call should bring `stats`.
        """
        if self._bar is None:
            return False
        self._tokens += new_tokens
        now = time.perf_counter()
        if stats is not None:
            rate = self._tokens / max(now - self._began, 1e-9)
            detail = (
                f"{rate:,.0f} tokens/s, {stats.running} running, {stats.waiting + stats.swapped} waiting, "
                f"{stats.hit_rate:.0%} hits"
            )
            self._bar.update(self._task, completed=finished, detail=detail)  # type: ignore[attr-defined]
            self._shown = now
        return now - self._shown >= _REFRESH_SECONDS
