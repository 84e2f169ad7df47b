"""What mkdocs does beside its plugins while it builds the site (`hooks:` in mkdocs.yml).

- Formulas become MathML, which browsers draw by themselves: no script and no font to fetch.
- What the interactive pages play is recorded from the library: see `scenes/`.
- A line `<!-- output: radixkv demo --help -->` becomes what that command prints.
"""

from __future__ import annotations

import html
import importlib
import os
import pkgutil
import re
import shlex
import subprocess
import sys
from pathlib import Path

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

_ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(_ROOT))  # `docs.tooling` and the library of this checkout

# What pymdownx.arithmatex leaves behind with `generic: true`.
_FORMULA = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.S)
_OUTPUT = re.compile(r"^<!-- output: radixkv(?P<args> .*)? -->$", re.M)
# As wide as the text beside both menus.
_COLUMNS = "84"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Record the scenes."""
    scenes = importlib.import_module("docs.tooling.scenes")
    for found in pkgutil.iter_modules(scenes.__path__):
        if not found.name.startswith("_"):
            scene = importlib.import_module(f"{scenes.__name__}.{found.name}")
            files.append(File.generated(config, scene.URI, content=scene.make()))
    return files


def on_page_markdown(markdown: str, **_: object) -> str:
    """Put the output of commands into the page."""
    return _OUTPUT.sub(lambda found: _output_of(shlex.split(found["args"] or "")), markdown)


def on_page_content(html: str, **_: object) -> str:
    """Draw the formulas."""
    return _FORMULA.sub(lambda found: _drawn(found[1], found[3]), html)


def _output_of(args: list[str]) -> str:
    env = {**os.environ, "COLUMNS": _COLUMNS, "TERMINAL_WIDTH": _COLUMNS, "NO_COLOR": "1", "TERM": "dumb"}
    done = subprocess.run(
        [sys.executable, "-m", "radixkv", *args],
        cwd=_ROOT,  # of this checkout, as the scenes are
        capture_output=True,
        text=True,
        env=env,
        check=False,
    )
    if done.returncode:
        raise PluginError(f"radixkv {shlex.join(args)} ended with {done.returncode}:\n{done.stderr}")
    said = "\n".join(line.rstrip() for line in done.stdout.splitlines()).strip("\n")
    return f"```{{.text .output}}\n$ {shlex.join(['radixkv', *args])}\n{said}\n```"


def _drawn(tag: str, formula: str) -> str:
    source = html.unescape(formula).strip()
    drawn = convert(source, display="block" if tag == "div" else "inline")
    # The source stands in the element too: copied text and search find it.
    note = f'<annotation encoding="application/x-tex">{html.escape(source)}</annotation>'
    inner = drawn.partition(">")[2].rpartition("</math>")[0]
    head = drawn[: drawn.index(">") + 1]
    return f'<{tag} class="formula">{head}<semantics>{inner}{note}</semantics></math></{tag}>'
