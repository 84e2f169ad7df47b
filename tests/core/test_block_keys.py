import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.core.block_keys import block_keys

PATHS = st.lists(st.integers(0, 5), max_size=40)


def array(tokens):
    return np.array(tokens, np.int64)


def paths(tokens, size):
    return [tuple(tokens[: end + size]) for end in range(0, len(tokens), size)]


@given(PATHS, PATHS, st.sampled_from([1, 2, 3, 16]), st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1))
def test_keys_are_equal_where_paths_and_seeds_are(a, b, size, seed, other):
    seen = {}
    for tokens, s in ((a, seed), (b, seed), (a, other), (b, other)):
        keys = block_keys(array(tokens), size, s)
        assert keys.dtype == np.uint64
        assert len(keys) == -(-len(tokens) // size)
        for path, key in zip(paths(tokens, size), keys.tolist(), strict=True):
            assert seen.setdefault((s, path), key) == key
    assert len(set(seen.values())) == len(seen)


@given(st.lists(st.integers(0, 2**62), min_size=1, max_size=60), st.sampled_from([1, 4, 16]), st.data())
def test_keys_continue_from_any_block(tokens, size, data):
    keys = block_keys(array(tokens), size, 7)
    first = data.draw(st.integers(0, len(tokens) // size))
    rest = block_keys(array(tokens), size, 7, first=first, parent_key=int(keys[first - 1]) if first else 0)
    assert rest.tolist() == keys[first:].tolist()


@pytest.mark.parametrize("size", [1, 16])
def test_a_million_paths_have_a_million_keys(size):
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 4, 1_000_000 * size)
    assert len(np.unique(block_keys(tokens, size, 1))) == 1_000_000
    one_block = {int(block_keys(np.array([i] + [0] * (size - 1), np.int64), size, 1)[0]) for i in range(2000)}
    assert len(one_block) == 2000


def test_every_bit_of_a_key_is_as_good_as_another():
    keys = block_keys(np.arange(200_000), 1, 3)
    bits = np.unpackbits(keys.view(np.uint8)).reshape(-1, 64).mean(0)
    assert np.abs(bits - 0.5).max() < 0.01
