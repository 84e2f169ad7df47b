"""What the API pages show says all it should: each member, each argument, and nothing that is not run."""

from __future__ import annotations

import inspect
import re

import pytest

from .test_api_pages import DOCS, ENTRIES, FOR_OTHER_LAYERS, find, is_property

SHOWN = [(path, find(path)) for _, path, _ in ENTRIES]
CLASSES = [(path, value) for path, value in SHOWN if inspect.isclass(value)]
# Made by the library, not by users: their pages show no constructor.
MADE_FOR_USERS = {"Match", "Lease", "OutputStream", "Registration", "SessionCache", "Sequence"}
# Arguments that are those of another text, which this one names.
AS_TOLD_ELSEWHERE = {"ViewOptions": "tree_view"}


def members(cls):
    """Yield name and function or property of all that users call."""
    for name, value in vars(cls).items():
        if name.startswith("_") or name in FOR_OTHER_LAYERS.get(cls.__name__, ()):
            continue
        if is_property(value) or inspect.isroutine(getattr(value, "__func__", value)):
            yield name, getattr(value, "__func__", value)


def functions():
    """Yield a name and what can be called under it."""
    for path, value in SHOWN:
        if not callable(value):
            continue
        name = path.rpartition(".")[2]
        if name not in MADE_FOR_USERS | set(AS_TOLD_ELSEWHERE):
            yield path, value
        # Policies override what `EvictionPolicy` explains.
        if inspect.isclass(value) and not (name.endswith("Policy") and name != "EvictionPolicy"):
            for member, function in members(value):
                if not is_property(function):
                    yield f"{path}.{member}", function


def test_every_reason_to_pass_a_call_through_is_explained():
    from radixkv.hf.calls import WHY

    table = (DOCS / "limits.md").read_text().partition("| reason |")[2].partition("\n\n")[0]
    explained = {word for row in table.splitlines() for word in re.findall(r"`(\w+)`", row[1:].split("|")[0])}
    assert explained == set(WHY)


@pytest.mark.parametrize(("path", "cls"), CLASSES, ids=[path for path, _ in CLASSES])
def test_public_members_have_docstrings(path, cls):
    attributes = (cls.__doc__ or "").partition("Attributes:")[2]
    bare = [
        name
        for name, value in members(cls)
        if not value.__doc__ and not re.search(rf"^\s*{name}:", attributes, re.M)
    ]
    assert not bare, f"{path} has members without a docstring: {bare}"


@pytest.mark.parametrize(("path", "cls"), CLASSES, ids=[path for path, _ in CLASSES])
def test_fields_are_documented(path, cls):
    fields = getattr(cls, "_fields", None) or getattr(cls, "__struct_fields__", None)
    fields = fields or list(getattr(cls, "__dataclass_fields__", ()))
    if cls.__name__ not in AS_TOLD_ELSEWHERE:
        missing = [name for name in fields if not re.search(rf"^\s+{name}:", cls.__doc__, re.M)]
        properties = {name for name, _ in members(cls)}
        assert set(missing) <= properties, f"{path} says nothing of {missing}"


FUNCTIONS = dict(functions())


@pytest.mark.parametrize("path", FUNCTIONS)
def test_arguments_are_documented(path):
    function = FUNCTIONS[path]
    text = inspect.getdoc(function) or ""
    try:
        arguments = inspect.signature(function).parameters
    except ValueError:  # an exception that takes what any exception takes
        return
    missing = [
        name
        for name in arguments
        if name not in {"self", "cls", "args", "kwargs"}
        and not re.search(rf"^\s*{name}:", text, re.M)
        and not re.search(rf"`[^`]*\b{name}\b[^`]*`", text)
    ]
    assert not missing, f"{path} says nothing of {missing}"


@pytest.mark.parametrize(("path", "value"), SHOWN, ids=[path for path, _ in SHOWN])
def test_examples_stand_on_the_pages_where_they_are_run(path, value):
    texts = [inspect.getdoc(value) or ""]
    if inspect.isclass(value):
        texts += [inspect.getdoc(member) or "" for _, member in members(value)]
    for text in texts:
        assert not re.search(r">>>|```|^Examples?:", text, re.M), path


@pytest.mark.parametrize("path", FUNCTIONS)
def test_sections_are_those_that_the_pages_show(path):
    """A misspelt section would be shown as a sentence."""
    text = inspect.getdoc(FUNCTIONS[path]) or ""
    heads = re.findall(r"^(\w+):$", text, re.M)
    assert set(heads) <= {"Args", "Attributes", "Raises", "Returns", "Yields"}
    order = [head for head in ("Args", "Attributes", "Returns", "Yields", "Raises") if head in heads]
    assert heads == order
