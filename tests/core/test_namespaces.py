"""Canonical namespaces, read back: Python's own parser of literals says what the text stands for."""

from __future__ import annotations

import ast

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from radixkv.cache.miss_notes import readable
from radixkv.cache.tree_view.labels import digest, namespace_label
from radixkv.core.namespace import canonical_namespace, namespace_parts, namespace_text

TEXTS = st.text(st.characters() | st.integers(0xD800, 0xDFFF).map(chr), max_size=6)
NAMESPACES = st.recursive(
    st.none() | TEXTS | st.binary(max_size=6), lambda part: st.lists(part, max_size=4).map(tuple)
)
# Bytes that look much like a canonical namespace.
NEARLY = st.lists(
    st.sampled_from([b"s", b"b", b"t", b"n;", b":", b"1", b"2", b"0", b"10", b" ", b"-", b"_", b"\xff", b"x"])
).map(b"".join)


def rebuilt(parts):
    """The namespace that `namespace_parts` read."""

    def one():
        part = next(rest)
        return tuple(one() for _ in range(part)) if isinstance(part, int) else part

    rest = iter(parts)
    value = one()
    assert next(rest, "end") == "end"
    return value


@given(NAMESPACES)
def test_what_was_written_is_read_back(namespace):
    canonical = canonical_namespace(namespace)
    meant = None if namespace == b"" else namespace
    assert rebuilt(namespace_parts(canonical)) == meant
    assert ast.literal_eval(namespace_text(canonical)) == meant
    assert readable(canonical) == namespace_text(canonical)


@given(st.binary() | NEARLY)
@example(b"s")
@example(b"salt")
@example(b"team:1")
@example(b"t1_0:")
@example(b"s 1:x")
@example(b"s+1:x")
@example(b"s01:x")
@example(b"s1:\xff")
@example(b"s" + b"9" * 5000 + b":x")
@example(b"t" + b"9" * 17 + b":")
@example(b"n;")
@example(b"b0:")
@example(b"t-1:")
@example("s٣:abc".encode())
def test_any_bytes_are_read_or_refused_by_all_alike(canonical):
    parts = namespace_parts(canonical)
    if parts is None:
        assert namespace_text(canonical) is None
        assert readable(canonical) == repr(canonical)
        assert namespace_label(canonical) == digest(canonical)
    else:
        assert canonical_namespace(rebuilt(parts)) == canonical
        assert namespace_label(canonical) != digest(canonical)


@pytest.mark.parametrize("depth", [10, 9_000, 200_000])
def test_nesting_has_no_limit(depth):
    canonical = b"t1:" * depth + b"s1:x"
    assert len(namespace_parts(canonical)) == depth + 1
    text = namespace_text(canonical)
    assert text == ("(" * depth + "'x'" + ",)" * depth if depth < 10_000 else None)
    assert namespace_label(canonical)
    assert readable(canonical)
