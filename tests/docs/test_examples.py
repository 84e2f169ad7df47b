"""Every Python block in the docs and the README runs, and prints what it says it prints.

The blocks of one page share their names, in order. A comment that starts with `#>` is a line that the
code before it prints; `...` in it stands for anything. A block fenced as `{.python .no-run}` is skipped. What a block
loads from the hub by the Auto classes is the demo's tiny model and its tokenizer. A page that includes the snippet
`given.md` has the names that its block makes, as a reader who pastes both.
"""

from __future__ import annotations

import contextlib
import doctest
import io
import re
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
GIVEN = ROOT / "docs/tooling/snippets/given.md"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^(?P<indent> *)```(?P<info>\{?\.?python\b.*)\n(?P<code>(?:.*\n)*?)(?P=indent)```$", re.M)
MOST_SKIPPED = 3


def blocks(page: Path):
    """Yield (number of the first line, code, whether to run it)."""
    text = page.read_text()
    for found in FENCE.finditer(text):
        line = text.count("\n", 0, found.start("code"))
        yield line, textwrap.dedent(found["code"]), "no-run" not in found["info"]


def run(page: Path, line: int, code: str, names: dict) -> None:
    said = [row.split("#>", 1)[1][1:] for row in code.splitlines() if row.lstrip().startswith("#>")]
    printed = io.StringIO()
    # Blank lines in front make a traceback name the page's own lines.
    with contextlib.redirect_stdout(printed):
        exec(compile("\n" * line + code, str(page), "exec"), names)
    want, got = (
        "\n".join([*said, ""]),
        "\n".join([*(r.rstrip() for r in printed.getvalue().splitlines()), ""]),
    )
    if said and not doctest.OutputChecker().check_output(want, got, doctest.ELLIPSIS):
        raise AssertionError(f"{page.relative_to(ROOT)}:{line + 1} printed\n{got}")


@pytest.mark.parametrize(
    "page",
    [p for p in PAGES if any(r for *_, r in blocks(p))],
    ids=lambda p: p.relative_to(ROOT).with_suffix("").as_posix(),
)
def test_page_runs(page, tmp_path, monkeypatch):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from radixkv.core import eviction
    from radixkv.demo.tiny import make_byte_tokenizer, make_tiny_model

    eviction.policy_names()  # loads them all; what a page registers is gone after it
    monkeypatch.setattr(eviction, "_POLICIES", dict(eviction._POLICIES))
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: make_tiny_model())
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *_, **__: make_byte_tokenizer())
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "__main__"}
    if f'--8<-- "{GIVEN.relative_to(ROOT).as_posix()}"' in page.read_text():
        for line, code, _ in blocks(GIVEN):
            run(GIVEN, line, code, names)
    for line, code, wanted in blocks(page):
        if wanted:
            run(page, line, code, names)


def test_few_blocks_are_skipped():
    skipped = [f"{page.name}:{line}" for page in PAGES for line, _, wanted in blocks(page) if not wanted]
    assert len(skipped) <= MOST_SKIPPED, skipped


def test_a_wrong_print_is_noticed():
    with pytest.raises(AssertionError, match=r"README\.md:4 printed\n3"):
        run(ROOT / "README.md", 3, "print(1 + 2)\n#> 4\n", {})


def test_an_error_names_the_line_of_the_page():
    with pytest.raises(ZeroDivisionError) as error:
        run(ROOT / "README.md", 10, "a = 1\na / 0\n", {})
    assert error.traceback[-1].lineno + 1 == 12
