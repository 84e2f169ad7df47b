"""Hit rate over capacity, one line a policy, under the ceiling of the optimum."""

from __future__ import annotations

from typing import TYPE_CHECKING

from radixkv.cli.replay_report import common_unit
from radixkv.demo.plot import as_label
from radixkv.replay import OPTIMA, ReplayResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import XAxis
    from matplotlib.figure import Figure

# Distinguishable in print and for the colour-blind (Okabe and Ito, 2008), and by their marks.
_COLOURS = ("#1f6f8b", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7a5c00", "#666666")
_MARKS = "osD^vP*X"
_GREY = "#8a919c"


def draw(result: ReplayResult) -> Figure:
    """Hit rate against capacity; the part above what any policy can reach is shaded."""
    from matplotlib.figure import Figure  # not pyplot: no window system, no global state

    figure = Figure(figsize=(8.0, 4.8), layout="constrained")
    panel = figure.subplots()
    capacities = sorted({row.capacity_blocks for row in result.results})
    names = list(dict.fromkeys(row.policy for row in result.results))
    most = result.trace["unlimited"]["hit_rate"]
    panel.axhline(100 * most, color=_GREY, linewidth=1, linestyle=":", label="nothing ever evicted")
    plain = [name for name in names if name not in OPTIMA]
    for name in names:
        rates = {row.capacity_blocks: 100 * row.hit_rate for row in result.results if row.policy == name}
        points = [(capacity, rates[capacity]) for capacity in capacities]
        if name in OPTIMA:
            panel.plot(*zip(*points, strict=True), color=_GREY, linestyle="--", marker=".", label=name)
        else:
            number = plain.index(name)
            colour, mark = _COLOURS[number % len(_COLOURS)], _MARKS[number % len(_MARKS)]
            panel.plot(*zip(*points, strict=True), color=colour, marker=mark, markersize=5, label=name)
    top = 100 * max([most, *(row.hit_rate for row in result.results)]) * 1.08 or 1.0
    ceiling = [(r.capacity_blocks, 100 * r.hit_rate) for r in result.results if r.policy == "optimal"]
    if ceiling:
        blocks, rates_there = [c for c, _ in ceiling], [r for _, r in ceiling]
        panel.fill_between(blocks, rates_there, top, color=_GREY, alpha=0.12, linewidth=0)
    _dress(panel, result, top)
    return figure


def _dress(panel: Axes, result: ReplayResult, top: float) -> None:
    """Axes, title and legend."""
    trace = result.trace
    panel.set_xscale("log")
    panel.set_ylim(0, top)
    panel.set_xlabel(f"capacity (blocks of {trace['block_size']} tokens)")
    panel.set_ylabel("hit rate = prefill skipped (%)")
    low, high = panel.get_xlim()
    _number(panel.xaxis, high / low)
    if result.kv_size is not None:
        unit, unit_bytes = common_unit(row.capacity_bytes for row in result.results)
        size = result.kv_size.bytes_per_token * trace["block_size"] / unit_bytes
        above = panel.secondary_xaxis("top", functions=(lambda x: x * size, lambda x: x / size))
        above.set_xlabel(
            f"{unit} of KV ({as_label(result.kv_size.name)}, {result.kv_size.dtype})", parse_math=False
        )
        _number(above.xaxis, high / low)
    name = as_label(trace["name"].replace("\\", "/").rsplit("/", 1)[-1])
    title = f"{name}: {trace['requests']:,} requests, {trace['prompt_tokens']:,} tokens"
    panel.set_title(title, loc="left", fontsize=11, parse_math=False)
    panel.grid(linewidth=0.5, alpha=0.5)
    panel.set_axisbelow(True)
    panel.spines["right"].set_visible(False)
    for text in panel.legend(frameon=False, loc="lower right").get_texts():
        text.set_parse_math(False)


def _number(axis: XAxis, span: float) -> None:
    """Plain numbers along a logarithmic axis whose ends are a factor of `span` apart, and enough of them."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if span < 1000 else (1,)))
    axis.set_major_formatter(lambda value, _: f"{value:,.0f}" if value >= 1 else f"{value:g}")
    axis.set_minor_formatter(NullFormatter())
