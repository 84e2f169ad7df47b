"""Namespaces and content addresses: equal only when everything is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.core import (
    BlockPool,
    ContentHasher,
    InvalidRequestError,
    RadixTree,
    canonical_namespace,
    content_hashes,
)

parts = st.recursive(
    st.none() | st.text(max_size=3) | st.binary(max_size=3), lambda p: st.lists(p, max_size=3).map(tuple)
)


def is_default(namespace):
    return namespace is None or namespace == b""


@given(parts, parts)
def test_canonical_namespaces_are_equal_only_if_the_namespaces_are(one, other):
    same = one == other or (is_default(one) and is_default(other))
    assert (canonical_namespace(one) == canonical_namespace(other)) == same


def test_nesting_has_no_limit():
    namespace = ("x",)
    for _ in range(100_000):
        namespace = (namespace,)
    assert canonical_namespace(namespace).endswith(b"t1:s1:x")
    while namespace != ("x",):  # taken apart here, as Python itself would recurse
        (namespace,) = namespace


def test_lone_surrogates_are_a_namespace_too():
    assert canonical_namespace("\ud800") != canonical_namespace("?")


@pytest.mark.parametrize("wrong", [1, 1.5, ["a"], ("a", 1), bytearray(b"a"), {"a"}])
def test_what_is_no_namespace(wrong):
    with pytest.raises(InvalidRequestError, match="namespace"):
        canonical_namespace(wrong)


@given(
    st.lists(st.integers(0, 3), max_size=20),
    st.lists(st.integers(0, 3), max_size=20),
    st.integers(1, 4),
)
def test_addresses_agree_exactly_as_far_as_whole_blocks_do(one, other, block_size):
    a, b = content_hashes(one, block_size), content_hashes(other, block_size)
    assert len(a) == len(one) // block_size
    assert all(len(digest) == 16 for digest in a)
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        end = (i + 1) * block_size
        assert (x == y) == (one[:end] == other[:end])


@given(st.lists(st.lists(st.integers(0, 9), max_size=7), max_size=6), st.integers(1, 4))
def test_addresses_can_be_made_bit_by_bit(pieces, block_size):
    hasher = ContentHasher(block_size, "tenant")
    fresh = [digest for piece in pieces for digest in hasher.update(piece)]
    tokens = [token for piece in pieces for token in piece]
    assert fresh == hasher.digests == content_hashes(tokens, block_size, "tenant")
    assert hasher.num_tokens == len(tokens)


def test_addresses_depend_on_namespace_and_block_size():
    tokens = [1] * 8
    digests = [content_hashes(tokens, size, ns)[-1] for size in (2, 4) for ns in (None, "a", b"a", ("a",))]
    assert len(set(digests)) == len(digests)
    assert content_hashes(tokens, 2, None) == content_hashes(tokens, 2, b"")


def test_addresses_do_not_change_between_versions_and_machines():
    assert content_hashes(range(4), 2, "ns")[1].hex() == "f0f7873d2d80402a0561430773200d33"


def test_the_tree_offers_its_own():
    tree = RadixTree(BlockPool(4), 4)
    assert tree.content_hashes(range(9), "x") == content_hashes(range(9), 4, "x")


def test_block_size_zero():
    with pytest.raises(InvalidRequestError, match="block_size"):
        ContentHasher(0)
