"""Bars of time to first token, without and with the cache."""

from __future__ import annotations

import tempfile
import warnings
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from radixkv.core.errors import install_hint
from radixkv.core.whole_files import replacing
from radixkv.demo.errors import DemoError
from radixkv.demo.report import summarise

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from radixkv.demo.runner import DemoResult, WorkloadResult

SUFFIXES = (".png", ".svg")
# Distinguishable in print and for the colour-blind.
_COLOURS = {"without": "#b0b7c3", "with": "#1f6f8b"}


def check_plot_path(path: Path) -> None:
    """Raise `DemoError` if a plot cannot be written there: better before the work than after it."""
    if path.suffix.lower() not in SUFFIXES:
        raise DemoError(f"--plot {path}: the file must end in {' or '.join(SUFFIXES)}")
    folder = path.absolute().parent
    try:
        if path.is_dir():
            raise DemoError(f"--plot {path}: this is a folder, give a file")
        if not folder.is_dir():
            raise DemoError(f"--plot {path}: the folder {folder} does not exist, make it first")
        with suppress(FileNotFoundError):
            path.lstat()  # fails if the name is too long for this file system
    except (OSError, ValueError) as error:
        raise DemoError(f"--plot {path}: {getattr(error, 'strerror', None) or error}") from error
    try:
        tempfile.NamedTemporaryFile(prefix=".plot-", dir=folder).close()
    except OSError as error:
        raise DemoError(
            f"--plot {path}: the folder {folder} cannot be written to: {error.strerror or error}"
        ) from error
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise DemoError(f"--plot needs matplotlib: {install_hint('demo')}") from error


def write_plot(result: DemoResult, path: Path, model_name: str) -> None:
    """Draw and write, by the suffix of the file. A file of that name is replaced as a whole or not at all."""
    save_figure(draw(result, model_name), path)


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure, by the suffix of the file. A file of that name is replaced as a whole or not at all."""
    try:
        with replacing(path) as part, warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Glyph")  # names may have characters that no font here has
            figure.savefig(part, format=path.suffix[1:].lower(), dpi=150)
    except OSError as error:
        raise DemoError(f"--plot {path}: {error.strerror or error}") from error


def as_label(name: str) -> str:
    """A name from outside, such as that of a file, on one line and in characters that can be drawn.

    Draw it with `parse_math=False`: a dollar sign begins a formula otherwise.
    """
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in name)


def draw(result: DemoResult, model_name: str) -> Figure:
    """One panel for each workload, on one scale."""
    from matplotlib.figure import Figure  # not pyplot: no window system, no global state

    workloads = result.workloads
    widths = [len(workload.requests) + 1.0 for workload in workloads]
    figure = Figure(figsize=(max(8.0, 0.42 * sum(widths) + 2), 4.8), layout="constrained")
    panels = figure.subplots(1, len(workloads), sharey=True, width_ratios=widths, squeeze=False)[0]
    for panel, workload in zip(panels, workloads, strict=True):
        _draw_workload(panel, workload)
    panels[0].set_ylabel("time to first token (s)")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper right", ncols=2, frameon=False)
    title = f"Time to first token: {as_label(model_name)}"
    figure.suptitle(title, x=0.01, ha="left", fontsize=12, parse_math=False)
    return figure


def _draw_workload(panel: Axes, workload: WorkloadResult) -> None:
    positions = range(len(workload.requests))
    without = [request.without.ttft_s for request in workload.requests]
    with_cache = [request.with_cache.ttft_s for request in workload.requests]
    bar = 0.4
    panel.bar(
        [x - bar / 2 for x in positions], without, bar, color=_COLOURS["without"], label="without cache"
    )
    panel.bar([x + bar / 2 for x in positions], with_cache, bar, color=_COLOURS["with"], label="with cache")
    labels = [request.label for request in workload.requests]
    panel.set_xticks(list(positions), labels, rotation=45, ha="right", rotation_mode="anchor", fontsize=8)
    speedup = summarise(workload.requests)["ttft_speedup_total"]
    panel.set_title(f"{workload.title}\n{speedup:.2f}× in total", fontsize=9)
    panel.set_xlim(-0.7, len(workload.requests) - 0.3)
    panel.grid(axis="y", linewidth=0.5, alpha=0.5)
    panel.set_axisbelow(True)
    panel.spines[["top", "right"]].set_visible(False)
