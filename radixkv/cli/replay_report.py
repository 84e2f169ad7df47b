"""What a replay found, as a table, a JSON document or CSV."""

from __future__ import annotations

import csv
import io
from dataclasses import asdict, fields
from itertools import groupby
from typing import TYPE_CHECKING

from radixkv.cli.streams import printable
from radixkv.replay import OPTIMA, PolicyResult, ReplayResult

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.console import Console
    from rich.table import Table


def to_csv(result: ReplayResult) -> str:
    """One line for each capacity and policy, under the names that the JSON document has."""
    text = io.StringIO()
    writer = csv.DictWriter(text, [field.name for field in fields(PolicyResult)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(row) for row in result.results)
    return text.getvalue()


def print_report(result: ReplayResult, console: Console) -> None:
    """The trace in a few lines, then the table."""
    for line in heading(result):
        console.print(line, highlight=False, soft_wrap=True)
    console.print()
    console.print(table(result))


def heading(result: ReplayResult) -> list[str]:
    """What was replayed, and the most that a cache can do for it."""
    from rich.markup import escape

    trace, unlimited = result.trace, result.trace["unlimited"]
    skipped = f", {trace['skipped']:,} skipped" if trace["skipped"] else ""
    size = "" if result.kv_size is None else f" ({_bytes(unlimited['blocks'] * _block_bytes(result))})"
    lines = [
        f"[bold]{escape(printable(trace['name']))}[/bold]: {trace['requests']:,} requests{skipped}, "
        f"{trace['prompt_tokens']:,} prompt tokens, blocks of {trace['block_size']}",
        f"A cache that never evicts would hold {unlimited['blocks']:,} blocks{size} at the end and skip "
        f"{_percent(unlimited['hit_rate'])} of the prefill. The longest request has "
        f"{trace['longest_request_blocks']:,} blocks.",
    ]
    if result.kv_size is not None:
        lines.append(escape(printable(str(result.kv_size))))
    return lines


def table(result: ReplayResult) -> Table:
    """One line for each policy, under its capacity."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.ROUNDED, header_style="bold")
    for name in ("Capacity\nblocks", "Capacity\ntokens"):
        table.add_column(name, justify="right")
    unit, unit_bytes = common_unit(row.capacity_bytes for row in result.results)
    if result.kv_size is not None:
        table.add_column(f"Capacity\n{unit}", justify="right")
    table.add_column("Policy", no_wrap=True)
    for name in ("Hit\ntokens", "Hit rate =\nprefill skipped", "Share of\noptimum", "Evicted\nblocks"):
        table.add_column(name, justify="right")
    for blocks, rows in groupby(result.results, key=lambda row: row.capacity_blocks):
        table.add_section()
        for number, row in enumerate(rows):
            capacity = [f"{blocks:,}", f"{row.capacity_tokens:,}"]
            if row.capacity_bytes is not None:
                capacity.append(_digits(row.capacity_bytes / unit_bytes))
            table.add_row(
                *(capacity if number == 0 else [""] * len(capacity)),
                row.policy,
                f"{row.hit_tokens:,}",
                _percent(row.hit_rate),
                "–" if row.share_of_optimum is None else _percent(row.share_of_optimum),
                "–" if row.evicted_blocks is None else f"{row.evicted_blocks:,}",
                style="dim" if row.policy in OPTIMA else None,
            )
    return table


def _block_bytes(result: ReplayResult) -> int:
    assert result.kv_size is not None
    return result.kv_size.bytes_per_token * int(result.trace["block_size"])


def _percent(share: float) -> str:
    return f"{share * 100:.1f}%"


_UNITS = (("KiB", 2**10), ("MiB", 2**20), ("GiB", 2**30), ("TiB", 2**40))


def common_unit(sizes: Iterable[int | None]) -> tuple[str, int]:
    """The unit, and its bytes, in which all of these sizes can be compared: that of the smallest."""
    known = [size for size in sizes if size is not None]
    return _unit(min(known, default=0))


def _unit(size: int) -> tuple[str, int]:
    """The largest of which there is about one or more."""
    return next(((name, of) for name, of in reversed(_UNITS) if size >= 0.975 * of), _UNITS[0])


def _bytes(size: int) -> str:
    """Three digits and a unit: `2.00 GiB`, `31.3 GiB`, `512 MiB`."""
    unit, unit_bytes = _unit(size)
    return f"{_digits(size / unit_bytes)} {unit}"


def _digits(value: float) -> str:
    """Three digits, or all in front of the point."""
    return f"{value:,.{0 if value >= 99.5 else 1 if value >= 9.95 else 2}f}"
