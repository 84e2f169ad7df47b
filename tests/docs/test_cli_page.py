"""The page of the command line has every command, with its real help, and the keys of its JSON."""

from __future__ import annotations

import json
import re

import pytest
import typer

from radixkv.cli import main
from radixkv.cli.app import app

from .test_examples import ROOT

PAGE = (ROOT / "docs" / "cli.md").read_text()
OUTPUT = re.compile(r"^<!-- output: (radixkv.*) -->$", re.M)


def commands(command=None, path="radixkv"):
    """Yield the path of each command, groups before what is in them."""
    command = command or typer.main.get_command(app)
    yield path
    for name, child in sorted(getattr(command, "commands", {}).items()):
        yield from commands(child, f"{path} {name}")


COMMANDS = list(commands())


def section(command: str) -> str:
    return PAGE.partition(f"\n## {command}\n")[2].partition("\n## ")[0]


def test_the_commands_are_those_of_the_plan():
    assert ["radixkv", *(f"radixkv {name}" for name in ("bench", "demo", "info", "replay"))] == COMMANDS


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_is_on_the_page(command):
    assert f"{command} --help" in OUTPUT.findall(PAGE)
    if command != "radixkv":
        text = section(command)
        assert f"<!-- output: {command} --help -->" in text
        assert f"$ {command} " in text, "an example"
        assert "Exit code" in text
        assert "JSON" in text
        assert f"(#{command.replace(' ', '-')})" in PAGE.partition("\n## ")[0]


def test_nothing_else_is_run_while_the_site_is_built():
    assert set(OUTPUT.findall(PAGE)) == {f"{command} --help" for command in COMMANDS} | {"radixkv --version"}


def test_every_exit_code_is_explained():
    import radixkv.cli

    codes = {value for name, value in vars(radixkv.cli).items() if name.startswith("EXIT_")}
    rows = re.findall(r"^\| (\d+) \|", section("Exit codes"), re.M)
    assert {int(code) for code in rows} == codes


def objects(document, path: str):
    """All objects that a path such as `workloads[].ways.*` names."""
    found = [document]
    for part in [] if path == "the document" else path.replace("[]", ".[]").split("."):
        if part == "[]":
            found = [one for many in found for one in many]
        elif part == "*":
            found = [one for many in found for one in many.values()]
        else:
            found = [one[part] for one in found]
    assert found, path
    return found


def compare(command: str, document) -> None:
    rows = re.findall(r"^\| (?:`(.+?)`|(the document)) \| (.+) \|$", section(command), re.M)
    told = {}
    for name, whole, keys in rows:
        # Remarks in brackets and behind a colon or a semicolon name keys of other objects.
        names = re.sub(r"\([^()]*\)|[:;].*", "", keys)
        told[name or whole] = set(re.findall(r"`(\w+)`", names))
    assert len(told) == len(rows) > 1
    for path, names in told.items():
        for one in objects(document, path):
            assert set(one) == names, path


def test_json_of_info(capsys):
    assert main(["info", "--format", "json"]) == 0
    compare("radixkv info", json.loads(capsys.readouterr().out))


def test_json_of_replay(capsys, tmp_path):
    trace = tmp_path / "t.jsonl"
    trace.write_text('{"token_ids": [1, 2, 3]}\n')
    assert main(["replay", str(trace), "--format", "json"]) == 0
    compare("radixkv replay", json.loads(capsys.readouterr().out))


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        "demo --tiny --quick --max-new-tokens 2",
        "bench --tiny --quick --workload none --skip generate_batch --requests 2 --max-new-tokens 2",
    ],
)
def test_json_of_what_runs_a_model(arguments, capsys):
    assert main([*arguments.split(), "--format", "json"]) == 0
    compare(f"radixkv {arguments.split()[0]}", json.loads(capsys.readouterr().out))
