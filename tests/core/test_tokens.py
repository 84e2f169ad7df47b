"""What counts as a token sequence, and what is refused."""

from __future__ import annotations

import array

import numpy as np
import pytest

from radixkv.core import BlockPool, InvalidRequestError, RadixTree, as_tokens
from radixkv.core.tokens import MAX_BLOCK_SIZE, require_block_size


class Index:
    def __index__(self):
        return 3


@pytest.mark.parametrize(
    "tokens",
    [
        [1, 2, 3],
        (1, 2, 3),
        range(1, 4),
        np.array([1, 2, 3]),
        np.array([1, 2, 3], np.uint8),
        np.array([1, 2, 3], np.uint64),
        np.array([1, 2, 3], ">i8"),
        np.array([1, 9, 2, 9, 3])[::2],
        [np.int32(1), np.int64(2), Index()],
        array.array("q", [1, 2, 3]),
        array.array("B", [1, 2, 3]),
        memoryview(np.array([1, 2, 3], np.int32)),
        bytes([1, 2, 3]),
        bytearray([1, 2, 3]),
        iter([1, 2, 3]),
        {1: 0, 2: 0, 3: 0},
    ],
)
def test_anything_one_dimensional_of_integers(tokens):
    result = as_tokens(tokens)
    assert result.dtype == np.int64
    assert result.flags.c_contiguous
    assert result.tolist() == [1, 2, 3]


@pytest.mark.parametrize("empty", [[], (), range(0), np.array([], np.int64), np.array([], np.int32), b""])
def test_empty(empty):
    assert as_tokens(empty).shape == (0,)
    assert as_tokens(empty).dtype == np.int64


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([1.0, 2.0], "float"),
        ([1, 2.5], "float"),
        ([True, False], "bool"),
        ([1, True], "bool"),
        ([1, None], "NoneType"),
        (["a"], "str"),
        ("12", "got a str: tokenize it first"),
        (5, "int"),
        (None, "NoneType"),
        (np.array([1.0]), "float64"),
        (np.array([True]), "bool"),
        (np.array([1, -2, 3]), "negative, got -2"),
        ([-1], "negative"),
        (range(-1, 2), "negative"),
        (np.zeros((2, 3), np.int64), "one at a time|one row at a time"),
        ([[1, 2], [3, 4]], "list"),
        (np.int64(3), "one-dimensional|int64"),
        (np.array([2**63], np.uint64), "fit into int64"),
        ([2**63], "fit into int64"),
        (range(2**63, 2**63 + 2), "fit into int64"),
        (np.array(["a"]), "integers"),
        (array.array("d", [1.0]), "integers"),
    ],
)
def test_refused_with_one_clear_sentence(tokens, message):
    with pytest.raises(InvalidRequestError, match=message) as error:
        as_tokens(tokens)
    assert "\n" not in str(error.value)
    assert isinstance(error.value, ValueError)


def test_int64_is_not_copied():
    tokens = np.arange(10)
    assert as_tokens(tokens) is tokens
    buffer = array.array("q", range(10))
    assert np.shares_memory(as_tokens(buffer), np.frombuffer(buffer, np.int64))
    assert np.shares_memory(as_tokens(tokens[2:5]), tokens)
    frozen = tokens.copy()
    frozen.flags.writeable = False
    assert as_tokens(frozen) is frozen


def test_torch_tensors_without_importing_torch_ourselves():
    torch = pytest.importorskip("torch")
    tensor = torch.arange(5)
    assert np.shares_memory(as_tokens(tensor), tensor.numpy())
    assert as_tokens(tensor.to(torch.int32)).tolist() == [0, 1, 2, 3, 4]
    for wrong in (tensor.float(), tensor.bool(), tensor.to(torch.bfloat16), tensor[None]):
        with pytest.raises(InvalidRequestError):
            as_tokens(wrong)


# Python does not even write them.
HUGE = pytest.param(10**5000, id="10**5000")
MINUS_HUGE = pytest.param(-(10**5000), id="-10**5000")


@pytest.mark.parametrize(
    "size", [2**20 + 1, 10**7, 10**9, 10**11, 2**63 - 1, 2**63, 10**20, 10**400, HUGE, np.int64(2**40)]
)
def test_blocks_have_an_end(size):
    for make in (lambda: require_block_size(size), lambda: RadixTree(BlockPool(4), block_size=size)):
        with pytest.raises(InvalidRequestError, match=r"at most 1,048,576 tokens") as caught:
            make()
        assert len(str(caught.value)) < 100


@pytest.mark.parametrize("size", [0, -1, MINUS_HUGE, True, 2.0, "16", None])
def test_what_is_no_block_size(size):
    with pytest.raises(InvalidRequestError, match="must be an integer of at least 1"):
        require_block_size(size)


def test_the_largest_block_works():
    tree = RadixTree(BlockPool(4), block_size=MAX_BLOCK_SIZE)
    assert require_block_size(np.int32(16)) == 16
    tree.pool.release(tree.insert([1, 2, 3], tree.allocate(1)).blocks)
    assert tree.match_length([1, 2, 9]) == 2
    tree.check()
