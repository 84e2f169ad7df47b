"""Every public name has an entry in the API pages, an example that uses it, and a line in the index of all names."""

from __future__ import annotations

import ast
import importlib
import inspect
import itertools
import pkgutil
import re

import pytest

import radixkv

from .test_examples import ROOT, blocks

DOCS = ROOT / "docs"
API = sorted((DOCS / "api").glob("*.md"))
# The guide compares the policies, and describes each.
PAGES = [*API, DOCS / "guides" / "policies.md"]

# What a module of these exports is public.
PUBLIC_MODULES = [
    "radixkv",
    "radixkv.errors",
    "radixkv.replay",
    "radixkv.sched",
    "radixkv.attention",
    "radixkv.store",
    "radixkv.core",
    "radixkv.core.policies",
    "radixkv.cache",
    "radixkv.cache.tree_view",
    "radixkv.cache.event_stream",
    "radixkv.cache.event_listener",
    "radixkv.hf",
    "radixkv.observe",
    "radixkv.observe.kv_events",
    "radixkv.observe.prometheus",
]
# Packages that export nothing to users but what `radixkv` names, or the command line.
WITHOUT_NAMES = {"radixkv.bench", "radixkv.cli", "radixkv.demo", "radixkv.engine"}
# Said in the index, with the reason.
NOT_FOR_USERS = {
    "radixkv.cache.ModelPlug",
    "radixkv.observe.StatsRecorder",
    "radixkv.hf.HFPlug",
    "radixkv.hf.probe_model",
}
# What the layers above call on an object that users have, too.
FOR_OTHER_LAYERS = {
    "BlockPool": {
        "attach_tree", "cache", "complete", "drop_idle", "grow", "hold", "hold_path", "idle_suffix", "is_idle",
        "look_up_private", "require_held", "take_idle", "take_woken", "uncache", "unwatch", "watch",
    },
    "EventDirectory": {"abandon"},
    "FlashInferBackend": {"costs", "cut_of", "give_to_sinks", "transfers", "wrappers"},
    "Lease": {"end_after"},
    "MissNotes": {
        "belongs", "bypassed", "cleared", "describe", "forget", "learn", "not_kept", "on_cleared", "on_matched",
        "on_removed", "on_stored",
    },
    "OptimalPolicy": {"on_insert", "on_request"},
    "PrefixCache": {"learn_key", "note_bypass", "plug", "recorder", "register_key"},
    "PriorityPolicy": {"check", "file", "first", "num_filed", "unfile"},
    "Request": {"set_namespace"},
    "RequestStats": {"of"},
    "TreeEvents": {"abandon", "on_cleared", "on_removed", "on_stored"},
}  # fmt: skip

ENTRY = re.compile(r"^::: (?P<path>[\w.]+)$(?P<options>(?:\n {4}.*)*)", re.M)


def find(path: str):
    """The object that a dotted path names."""
    owner, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(owner), name)
    except ModuleNotFoundError:
        return getattr(find(owner), name)


def entries():
    """Yield (page, dotted path, listed members or None)."""
    for page in PAGES:
        for found in ENTRY.finditer(page.read_text()):
            listed = re.search(r"members:\s*(\[.*?\]|(?:\n\s*- \w+)+)", found["options"])
            yield page, found["path"], listed and set(re.findall(r"\w+", listed[1]))


ENTRIES = list(entries())


def public_names():
    """Dotted path and object of each public name, under the shortest of its paths."""
    known: dict[int, str] = {}
    for module in PUBLIC_MODULES:
        home = importlib.import_module(module)
        for name in home.__all__:
            path = f"{module}.{name}"
            value = getattr(home, name)
            if inspect.ismodule(value) or name == "__version__" or path in NOT_FOR_USERS:
                continue
            if id(value) not in known:
                known[id(value)] = path
                yield path, value


NAMES = dict(public_names())


def pages_of(value) -> list:
    return [page for page, path, _ in ENTRIES if find(path) is value]


def test_every_package_is_looked_at():
    found = {
        f"radixkv.{part.name}"
        for part in pkgutil.iter_modules(radixkv.__path__)
        if not part.name.startswith("_")
    }
    assert found <= WITHOUT_NAMES | set(PUBLIC_MODULES)
    for name in WITHOUT_NAMES - {"radixkv.cli"}:
        assert not hasattr(importlib.import_module(name), "__all__"), name


@pytest.mark.parametrize("path", NAMES)
def test_a_public_name_has_one_entry_with_an_example_on_its_page(path):
    pages = pages_of(NAMES[path])
    assert len(pages) == 1, f"{path} has entries on {[page.name for page in pages]}"
    name = path.rpartition(".")[2]
    if pages[0].parent.name == "guides":  # the policies, which an API page uses all of
        pages = [DOCS / "api" / "eviction.md"]
    used = [line for line, code, wanted in blocks(pages[0]) if wanted and re.search(rf"\b{name}\b", code)]
    assert used, f"no example on {pages[0].name} uses {name}"


@pytest.mark.parametrize(("page", "path"), [(page, path) for page, path, _ in ENTRIES])
def test_an_entry_is_of_something_that_says_what_it_is(page, path):
    value = find(path)
    home = importlib.import_module(path.rpartition(".")[0])
    if inspect.isroutine(value) or inspect.isclass(value):
        assert inspect.getdoc(value)
    else:  # a constant or a type: a text stands below its assignment
        name = path.rpartition(".")[2]
        assert any(documents(module, name) for module in modules_behind(home)), path


def modules_behind(home):
    yield home
    for part in pkgutil.iter_modules(getattr(home, "__path__", [])):
        yield importlib.import_module(f"{home.__name__}.{part.name}")
    if home.__name__ == "radixkv.observe.kv_events":
        yield from (importlib.import_module(f"radixkv.observe.{m}") for m in ("kv_messages", "kv_sender"))


def documents(module, name: str) -> bool:
    body = ast.parse(inspect.getsource(module)).body
    return any(
        isinstance(one, ast.Assign)
        and name in {target.id for target in one.targets if isinstance(target, ast.Name)}
        and isinstance(behind, ast.Expr)
        and isinstance(behind.value, ast.Constant)
        for one, behind in itertools.pairwise(body)
    )


@pytest.mark.parametrize(("path", "listed"), [(p, m) for _, p, m in ENTRIES if m is not None])
def test_a_list_of_members_leaves_none_out(path, listed):
    value = find(path)
    members = {
        name
        for name, member in vars(value).items()
        if not name.startswith("_")
        and (inspect.isroutine(getattr(member, "__func__", member)) or is_property(member))
    }
    hidden = FOR_OTHER_LAYERS.get(value.__name__, set())
    if not path.startswith(
        ("radixkv.core.policies", "radixkv.core.eviction")
    ):  # they override what is documented
        assert members - hidden <= listed
    assert all(hasattr(value, name) or name in annotations(value) for name in listed)


def is_property(member) -> bool:
    return isinstance(member, property) or type(member).__name__ == "cached_property"


def annotations(cls) -> set[str]:
    return {name for base in cls.__mro__ for name in getattr(base, "__annotations__", {})}


def test_the_index_lists_every_entry_and_nothing_else():
    text = (DOCS / "api" / "index.md").read_text()
    rows = [row for row in text.splitlines() if row.startswith(("| [`radixkv", "| `radixkv"))]
    names = [re.match(r"\| \[?`([\w.]+)`", row)[1] for row in rows]
    assert len(set(names)) == len(names)
    modules = {"radixkv.errors", "radixkv.replay"}
    assert set(names) - modules - {"radixkv.__version__", "radixkv.cli.main"} == {p for _, p, _ in ENTRIES}
    for name, row in zip(names, rows, strict=True):
        find(name)
        what = row.split("|")[2].strip()
        assert 5 < len(what) < 90, row
        if f"][{name}]" not in row:
            assert name in modules | {"radixkv.__version__", "radixkv.cli.main"}, row
    assert set(re.findall(r"`(radixkv[\w.]+)`", text.partition("## Not for users")[2])) == NOT_FOR_USERS
