"""What was measured, as one JSON document or as tables of at most 100 columns."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

from radixkv.demo.runner import DemoResult, RequestResult, Run, WorkloadResult

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

#: Raise this when a key of the document is renamed or removed.
SCHEMA_VERSION = 1
TABLE_WIDTH = 100


def summarise(requests: Sequence[RequestResult]) -> dict[str, Any]:
    """Sums and ratios over some requests."""
    prompt_tokens = sum(request.prompt_tokens for request in requests)
    hit_tokens = sum(request.hit_tokens for request in requests)
    without = sum(request.without.ttft_s for request in requests)
    with_cache = sum(request.with_cache.ttft_s for request in requests)
    return {
        "requests": len(requests),
        "prompt_tokens": prompt_tokens,
        "hit_tokens": hit_tokens,
        "prefill_skipped": hit_tokens / prompt_tokens,
        "ttft_without_s": without,
        "ttft_with_s": with_cache,
        "ttft_speedup_total": without / with_cache,
        "ttft_speedup_median": median(request.speedup for request in requests),
        "different_outputs": sum(not request.same_tokens for request in requests),
    }


def to_json(result: DemoResult, setting: dict[str, Any]) -> dict[str, Any]:
    """The document of `radixkv demo --format json`. Times are seconds, shares are 0 to 1."""
    return {
        "schema": SCHEMA_VERSION,
        "setting": setting,
        "workloads": [_workload_json(workload) for workload in result.workloads],
        "summary": summarise(result.requests) | {"same_tokens": result.same_tokens},
        "seconds": {"without": result.seconds_without, "with": result.seconds_with},
        "cache": result.cache,
    }


def _workload_json(workload: WorkloadResult) -> dict[str, Any]:
    requests = [_request_json(request) for request in workload.requests]
    summary = summarise(workload.requests)
    return {"name": workload.name, "title": workload.title, "requests": requests, "summary": summary}


def _request_json(request: RequestResult) -> dict[str, Any]:
    def run(run: Run) -> dict[str, Any]:
        return {"ttft_s": run.ttft_s, "total_s": run.total_s, "new_tokens": run.tokens}

    return {
        "label": request.label,
        "prompt_tokens": request.prompt_tokens,
        "hit_tokens": request.hit_tokens,
        "prefill_skipped": request.skipped,
        "ttft_speedup": request.speedup,
        "same_tokens": request.same_tokens,
        "first_difference": request.first_difference,
        "without": run(request.without),
        "with": run(request.with_cache),
        "answer": request.answer,
    }


def print_report(result: DemoResult, setting: dict[str, Any], console: Console) -> None:
    """All tables, in the order: each request, summary, where the time went, the cache, the verdict."""
    console.print(heading(setting), highlight=False)
    for part in (request_table(result), summary_table(result), time_table(result)):
        console.print()
        console.print(part)
    console.print()
    for line in (cache_line(result), verdict(result)):
        console.print(line, highlight=False)


def heading(setting: dict[str, Any]) -> str:
    """Model and machine in one line."""
    model, threads = setting["model"], setting["threads"]
    size = f"{model['parameters'] / 1e6:,.1f}M parameters, {model['dtype']}, {model['device']}"
    return f"[bold]{model['name']}[/bold]: {size}, {threads} thread{'s' if threads > 1 else ''}, greedy"


def request_table(result: DemoResult) -> Table:
    """One line for each request, under its workload."""
    table = _table("Each request, without and with the cache (TTFT: time to first token)")
    table.add_column("Request", no_wrap=True)
    for name in ("Prompt\ntokens", "Hit\ntokens", "Prefill\nskipped"):
        table.add_column(name, justify="right")
    table.add_column("TTFT\nwithout", justify="right")
    table.add_column("TTFT\nwith", justify="right")
    table.add_column("Speed-up", justify="right")
    table.add_column("Same\ntokens", justify="center")
    for workload in result.workloads:
        table.add_section()
        table.add_row(f"[bold]{workload.title}[/bold]")
        for request in workload.requests:
            table.add_row(
                f"  {request.label}",
                f"{request.prompt_tokens:,}",
                f"{request.hit_tokens:,}",
                _percent(request.skipped),
                format_seconds(request.without.ttft_s),
                format_seconds(request.with_cache.ttft_s),
                _ratio(request.speedup),
                _yes_no(request.same_tokens),
            )
    return table


def summary_table(result: DemoResult) -> Table:
    """One line for each workload and one for all."""
    table = _table("Summary: tokens and TTFT summed over the requests of each workload")
    table.add_column("Workload", no_wrap=True)
    for name in ("Prompt\ntokens", "Prefill\nskipped", "TTFT\nwithout", "TTFT\nwith", "Speed-up\ntotal"):
        table.add_column(name, justify="right")
    table.add_column("Speed-up\nmedian", justify="right")
    table.add_column("Same\ntokens", justify="center")
    rows = [(workload.title, workload.requests) for workload in result.workloads]
    for title, requests in [*rows, ("All", result.requests)]:
        if title == "All":
            table.add_section()
        summary = summarise(requests)
        table.add_row(
            title,
            f"{summary['prompt_tokens']:,}",
            _percent(summary["prefill_skipped"]),
            format_seconds(summary["ttft_without_s"]),
            format_seconds(summary["ttft_with_s"]),
            _ratio(summary["ttft_speedup_total"]),
            _ratio(summary["ttft_speedup_median"]),
            _yes_no(summary["different_outputs"] == 0),
            style="bold" if title == "All" else None,
        )
    return table


TIME_PARTS = {
    "lookup": "looking up the prompt in the tree",
    "gather": "copying cached keys and values to the model",
    "prefill": "forwards over prompt tokens",
    "commit": "storing new keys and values",
    "decode": "forwards over new tokens, sampling, the rest",
}


def time_table(result: DemoResult) -> Table:
    """Where the time went."""
    table = _table("Where the time went")
    table.add_column("Part")
    table.add_column("", style="dim")
    for name in ("Without", "With", "Share of with"):
        table.add_column(name, justify="right")
    without, with_cache = result.seconds_without, result.seconds_with
    total = sum(with_cache.values()) or 1.0
    for part, meaning in TIME_PARTS.items():
        plain = format_seconds(without[part]) if part in without else "–"
        ours = with_cache.get(part, 0.0)
        table.add_row(part, meaning, plain, format_seconds(ours), _percent(ours / total))
    table.add_section()
    plain = format_seconds(sum(without.values()))
    table.add_row("all", "", plain, format_seconds(total), _percent(1.0), style="bold")
    return table


def cache_line(result: DemoResult) -> str:
    """The cache at the end."""
    cache = result.cache
    size = f"{cache['memory_bytes'] / 2**20:,.0f} MiB"
    pool = f"{cache['pool_blocks']:,} blocks of {cache['block_size']} tokens ({size})"
    used = f"{cache['cached_blocks']:,} cached, {cache['evicted_blocks']:,} evicted"
    line = f"Cache: {pool}; {used}; {cache['cow_copies']:,} hits ended inside a block."
    if cache["bypasses"]:
        reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(cache["bypasses"].items()))
        line += f" Not served: {reasons}."
    return line


def verdict(result: DemoResult) -> str:
    """One sentence: the outputs, what was skipped and what it brought."""
    summary = summarise(result.requests)
    if not result.same_tokens:
        which = ", ".join(
            f"{workload.title} / {request.label} (new token {request.first_difference})"
            for workload in result.workloads
            for request in workload.requests
            if not request.same_tokens
        )
        return f"[bold red]{summary['different_outputs']} outputs differ:[/bold red] {which}"
    skipped = f"{_percent(summary['prefill_skipped'])} of the prefill skipped"
    faster = f"first tokens {_ratio(summary['ttft_speedup_total'])} sooner in total"
    return f"[bold green]All {summary['requests']} outputs are the same[/bold green]; {skipped}, {faster}."


def format_seconds(seconds: float) -> str:
    """Three digits and a unit: `3.97 s`, `226 ms`, `8.41 ms`, `0.12 ms`."""
    if seconds >= 9.995:
        return f"{seconds:.1f} s"
    if seconds >= 0.9995:
        return f"{seconds:.2f} s"
    milliseconds = seconds * 1000
    digits = 0 if milliseconds >= 99.5 else 1 if milliseconds >= 9.95 else 2
    return f"{milliseconds:.{digits}f} ms"


def _percent(share: float) -> str:
    return f"{share * 100:.1f}%"


def _ratio(ratio: float) -> str:
    return f"{ratio:.2f}×" if ratio < 9.995 else f"{ratio:.1f}×"


def _yes_no(value: bool) -> str:
    return "[green]yes[/green]" if value else "[bold red]NO[/bold red]"


def _table(title: str) -> Table:
    from rich import box
    from rich.table import Table

    return Table(title=title, title_justify="left", title_style="bold", box=box.ROUNDED, header_style="bold")


def make_console() -> Console:
    """Stdout. Into a file or pipe, where there is no width to ask for, the tables get the room they want."""
    import sys

    from rich.console import Console

    return Console(file=sys.stdout, width=None if sys.stdout.isatty() else TABLE_WIDTH)
