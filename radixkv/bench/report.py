"""What was measured, as one JSON document or as tables of at most 100 columns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from radixkv.bench.runner import BenchResult, Difference, WayResult, WorkloadResult
from radixkv.bench.ways import EngineWay
from radixkv.demo.report import format_seconds, heading
from radixkv.store.sizing import format_bytes

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

#: Raise this when a key of the document is renamed or removed.
SCHEMA_VERSION = 1

_ENGINE = EngineWay.name
_MAX_DIFFERENCES = 10


def ratio(way: WayResult, engine: WayResult | None, clock: str) -> float | None:
    """Time of a way over that of the engine, by `"wall"` or `"cpu"`; above 1 the engine is faster."""
    if engine is None or way.reason is not None:
        return None
    theirs, ours = getattr(way, clock), getattr(engine, clock)
    return float(theirs / ours) if ours else None


def to_json(result: BenchResult, setting: dict[str, Any]) -> dict[str, Any]:
    """The document of `radixkv bench --format json`. Times are seconds, ratios are a way's time over the engine's."""
    return {
        "schema": SCHEMA_VERSION,
        "setting": setting,
        "workloads": [_workload_json(workload) for workload in result.workloads],
        "summary": {"same_tokens": result.same_tokens, "totals": totals(result)},
    }


def _workload_json(result: WorkloadResult) -> dict[str, Any]:
    engine = result.way(_ENGINE)
    return {
        "name": result.workload.name,
        "title": result.workload.title,
        "rounds": result.workload.num_rounds,
        "requests": result.workload.num_requests,
        "prompt_tokens": result.prompt_tokens,
        "reference": result.reference,
        "same_tokens": result.same_tokens,
        "ways": {way.name: _way_json(way, engine) for way in result.ways},
        "differences": [vars(difference) for difference in result.differences],
        "problems": result.problems,
    }


def _way_json(way: WayResult, engine: WayResult | None) -> dict[str, Any]:
    if way.reason is not None:
        return {"measured": False, "reason": way.reason}
    return {
        "measured": True,
        "wall_s": way.wall,
        "cpu_s": way.cpu,
        "wall_s_each": way.wall_s,
        "cpu_s_each": way.cpu_s,
        "wall_ratio": ratio(way, engine, "wall"),
        "cpu_ratio": ratio(way, engine, "cpu"),
        "new_tokens": way.new_tokens,
        "new_tokens_per_s": way.new_tokens_per_s,
        "hit_tokens": way.hit_tokens,
        "peak_kv_bytes": way.peak_kv_bytes,
    }


def totals(result: BenchResult) -> dict[str, dict[str, float]]:
    """For each way beside the engine: its time over the engine's, summed over the workloads where both ran."""
    found: dict[str, dict[str, float]] = {}
    names = dict.fromkeys(way.name for workload in result.workloads for way in workload.ways)
    for name in names:
        pairs = [(workload.way(name), workload.way(_ENGINE)) for workload in result.workloads]
        both = [(way, engine) for way, engine in pairs if way is not None and engine is not None]
        ours = sum(engine.cpu for _, engine in both), sum(engine.wall for _, engine in both)
        if name == _ENGINE or not all(ours):
            continue
        found[name] = {
            "cpu_ratio": sum(way.cpu for way, _ in both) / ours[0],
            "wall_ratio": sum(way.wall for way, _ in both) / ours[1],
        }
    return found


def print_report(result: BenchResult, setting: dict[str, Any], console: Console) -> None:
    """One table for each workload, then the verdict."""
    from rich.markup import escape

    limits = f"{setting['max_new_tokens']} new tokens at most, batches of {setting['batch_size']}"
    repeat = setting["repeat"]
    console.print(heading(setting), highlight=False)
    console.print(
        f"{limits}; {'medians of ' + str(repeat) + ' runs' if repeat > 1 else 'one run'}, each from a cold cache",
        highlight=False,
    )
    if setting.get("fallback_reason"):
        reason = escape(setting["fallback_reason"])
        console.print(f"The engine forwards sequences one by one: {reason}", highlight=False, soft_wrap=True)
    for workload in result.workloads:
        console.print()
        console.print(table(workload))
        for line in notes(workload):
            console.print(line, highlight=False, soft_wrap=True)
    console.print()
    console.print(verdict(result), highlight=False, soft_wrap=True)


def table(result: WorkloadResult) -> Table:
    """One line for each way."""
    from rich import box
    from rich.table import Table

    workload, engine = result.workload, result.way(_ENGINE)
    size = f"{workload.num_requests} prompts, {result.prompt_tokens:,} tokens"
    rounds = f" in {workload.num_rounds} rounds" if workload.num_rounds > 1 else ""
    made = Table(
        title=f"{workload.title}: {size}{rounds}",
        title_justify="left",
        title_style="bold",
        box=box.ROUNDED,
        header_style="bold",
    )
    made.add_column("Way", no_wrap=True)
    for name in ("Time", "CPU\ntime", "Time ÷\nengine", "CPU ÷\nengine", "New\ntok/s", "Hit\ntokens"):
        made.add_column(name, justify="right")
    made.add_column("Peak KV", justify="right", no_wrap=True)
    made.add_column("Same\ntokens", justify="center")
    for way in result.ways:
        style = "bold" if way.name == _ENGINE else None
        if way.reason is not None:
            made.add_row(way.title, *["–"] * 8, style=style)
            continue
        made.add_row(
            way.title,
            format_seconds(way.wall),
            format_seconds(way.cpu),
            _ratio(ratio(way, engine, "wall")),
            _ratio(ratio(way, engine, "cpu")),
            f"{way.new_tokens_per_s:,.1f}",
            "?" if way.hit_tokens is None else f"{way.hit_tokens:,}",
            format_bytes(way.peak_kv_bytes),
            _same(way, result),
            style=style,
        )
    return made


def _same(way: WayResult, result: WorkloadResult) -> str:
    if way.problems or any(difference.way == way.title for difference in result.differences):
        return "[bold red]NO[/bold red]"
    return "–" if way.name == result.reference else "[green]yes[/green]"


def notes(result: WorkloadResult) -> list[str]:
    """What a table has no room for: what was not measured and why, what differs."""
    from rich.markup import escape

    lines = [f"Not measured: {way.title}: {escape(way.reason)}" for way in result.ways if way.reason]
    lines += [f"[red]{escape(problem)}[/red]" for problem in result.problems]
    lines += [f"[red]{describe(difference)}[/red]" for difference in result.differences[:_MAX_DIFFERENCES]]
    if len(result.differences) > _MAX_DIFFERENCES:
        lines.append(f"[red]and {len(result.differences) - _MAX_DIFFERENCES} more[/red]")
    return lines


def describe(difference: Difference) -> str:
    """One difference in a line."""
    expected, found = (
        "the end" if token is None else f"token {token}" for token in (difference.expected, difference.found)
    )
    line = f"{difference.request}, new token {difference.position}: {difference.way} gives {found}, not {expected}"
    if difference.gap is not None:
        line += f" (their logits are {difference.gap:.2g} apart)"
    return line


def verdict(result: BenchResult) -> str:
    """The outputs, and the engine against each way."""
    found = totals(result)
    titles = {way.name: way.title for workload in result.workloads for way in workload.ways}
    speed = "; ".join(f"{titles[name]} {_ratio(ratios['cpu_ratio'])}" for name, ratios in found.items())
    if not result.same_tokens:
        differing = sum(len(workload.differences) + len(workload.problems) for workload in result.workloads)
        return f"[bold red]{differing} answers differ[/bold red] or are missing: see above."
    compared = sum(way.reason is None for workload in result.workloads for way in workload.ways)
    if compared == len(result.workloads):
        return "[bold yellow]Nothing to compare:[/bold yellow] only one way could be measured."
    total = f" CPU time in total, engine = 1: {speed}." if speed else ""
    return f"[bold green]All ways give the same tokens.[/bold green]{total}"


def _ratio(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.2f}×" if value < 9.995 else f"{value:.1f}×"
