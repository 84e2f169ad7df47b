"""Draw the measured chart of the README and the site's first page from the files in `results/`.

    python benchmarks/chart.py    writes docs/assets/measured-light.svg and -dark.svg, and their text into both pages

The drawing is a function of the files alone, so a test draws it again and compares. It is written as SVG by hand:
some lines of text in the reader's own font, the same on every machine.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
ROOT = Path(__file__).parents[1]
ASSETS = ROOT / "docs" / "assets"
PAGES = (ROOT / "README.md", ROOT / "docs" / "index.md")


@dataclass(frozen=True)
class Case:
    """A bar: what it shows, and the row of a results file that it is taken from."""

    label: str
    file: str
    row: str
    baseline: str
    engine: bool = False

    def times_faster(self) -> float:
        """How many times as long the baseline took."""
        (found,) = (
            row for row in rows_of(self.file) if (row["name"], row["baseline"]) == (self.row, self.baseline)
        )
        return 1 / float(found["ratio"])


CASES = (
    Case(
        "First token, 2,048 tokens cached + 64 new",
        "ttft.json",
        "one prefix, generate() attached",
        "plain generate()",
    ),
    Case(
        "Prompts with branching prefixes, whole set",
        "ttft.json",
        "branching prompts, whole set, attached",
        "plain generate()",
    ),
    Case(
        "Cold batch: first token, 8 × (512 shared + 32)",
        "cold_batch.json",
        "8 x (512 + 32), attached",
        "plain generate()",
    ),
    Case("Nothing shared: 512 + 16 tokens", "no_hit.json", "Gemma 3 270M, 512 + 16", "plain generate()"),
    Case(
        "Engine, 8 prompts of 512 shared + 32",
        "engine.json",
        "gemma 8 x (512 + 32), 16 new",
        "padded",
        engine=True,
    ),
    Case(
        "Engine, 64 prompts of 512 shared + 32",
        "engine.json",
        "gemma 64 x (512 + 32), 16 new",
        "padded",
        engine=True,
    ),
    Case(
        "Engine, nothing shared: 8 prompts of 544",
        "engine.json",
        "gemma 8 x (0 + 544), 16 new",
        "padded",
        engine=True,
    ),
)


def rows_of(file: str) -> Iterator[dict[str, Any]]:
    """The rows of a results file, of all its runs."""
    data = json.loads((RESULTS / file).read_text())
    for run in data if isinstance(data, list) else [data]:
        yield from run["rows"]


def number(times: float) -> str:
    """Two digits: `23×`, `5.1×`."""
    return f"{times:.0f}×" if times >= 9.95 else f"{times:.1f}×"


def text() -> str:
    """What the chart shows, for those who do not see it."""
    shown = "; ".join(f"{case.label}: {number(case.times_faster())}" for case in CASES)
    return f"Times faster than transformers alone, Gemma 3 270M on a CPU. {shown}."


WIDTH, LEFT, RIGHT, TOP, ROW, BAR = 460, 12, 12, 8, 46, 16
SCALE = (0.92, 36.0)
TICKS = (1, 2, 5, 10, 20)
COLOURS = {
    "light": dict(text="#1f2328", muted="#59636e", grid="#d1d9e0", plugin="#3f51b5", engine="#00796b"),
    "dark": dict(text="#e6edf3", muted="#9da7b1", grid="#444c56", plugin="#8c9eff", engine="#4db6ac"),
}


def at(times: float) -> float:
    """Where a value lies from left to right, on a logarithmic axis."""
    low, high = (math.log(end) for end in SCALE)
    return LEFT + (WIDTH - LEFT - RIGHT) * (math.log(times) - low) / (high - low)


def draw(scheme: str) -> str:
    """The chart as SVG, for a `light` or a `dark` page."""
    colour = COLOURS[scheme]
    bottom = TOP + ROW * len(CASES)
    height = bottom + 44
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'role="img" font-family="system-ui, -apple-system, Segoe UI, Roboto, Helvetica, Arial, sans-serif" '
        'font-size="15">',
        "<title>Times faster than transformers alone</title>",
        f"<desc>{escape(text())}</desc>",
    ]
    for tick in TICKS:
        x, dash = at(tick), "" if tick == 1 else ' stroke-dasharray="2 3"'
        line = colour["muted"] if tick == 1 else colour["grid"]
        parts.append(f'<path d="M{x:.1f} {TOP}V{bottom}" stroke="{line}"{dash}/>')
        parts.append(
            f'<text x="{x:.1f}" y="{bottom + 17}" text-anchor="middle" font-size="13" fill="{colour["muted"]}">'
            f"{tick}×</text>"
        )
    for index, case in enumerate(CASES):
        y, times = TOP + ROW * index, case.times_faster()
        begin, end = sorted((at(1), at(times)))
        fill = colour["engine" if case.engine else "plugin"]
        parts.append(
            f'<text x="{at(1) + 5:.1f}" y="{y + 17}" fill="{colour["text"]}">{escape(case.label)}</text>'
        )
        parts.append(
            f'<rect x="{begin:.1f}" y="{y + 23}" width="{max(end - begin, 1.5):.1f}" height="{BAR}" rx="2" '
            f'fill="{fill}"/>'
        )
        parts.append(
            f'<text x="{max(end, at(1)) + 6:.1f}" y="{y + 36}" font-weight="600" fill="{colour["text"]}">'
            f"{number(times)}</text>"
        )
    parts.append(
        f'<text x="{at(1):.1f}" y="{bottom + 38}" font-size="13" fill="{colour["muted"]}">'
        "times faster than transformers alone (logarithmic)</text>"
    )
    return "\n".join([*parts, "</svg>", ""])


def with_text(page: str) -> str:
    """The page with the chart's text where the chart is shown, as HTML or as Markdown."""
    page = re.sub(r'(measured-light\.svg" alt=")[^"]*', lambda found: found[1] + text(), page)
    return re.sub(r"!\[[^]]*\](?=\(assets/measured-)", lambda _: f"![{text()}]", page)


def main() -> None:
    for scheme in COLOURS:
        (ASSETS / f"measured-{scheme}.svg").write_text(draw(scheme))
    for page in PAGES:
        page.write_text(with_text(page.read_text()))
    print(text())


if __name__ == "__main__":
    main()
