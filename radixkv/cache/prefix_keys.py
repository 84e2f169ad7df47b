"""64-bit keys of the prefixes of prompts, token by token."""

from __future__ import annotations

import numpy as np

from radixkv.cache.key_table import Keys
from radixkv.core.tokens import TokenArray

__all__ = ["MASK", "PrefixKeys"]

MASK = 2**64 - 1
_STEP = np.uint64(0x9E3779B97F4A7C15)  # added for each token, so that a token 0 counts
_SPAN = 1 << 17


class PrefixKeys:
    """A key for each prefix of a prompt: a multilinear form of its tokens with random factors, modulo 2**64.

    The factor of a position is that of its place in a span of 131,072 tokens, times that of the span; so prompts of
    any length need no more than 1 MiB of factors. The high bits of a key are the good ones.

    Source: Carter and Wegman, "Universal classes of hash functions", Journal of Computer and System Sciences 18, 1979.

    Args:
        span: Tokens in a span.
    """

    def __init__(self, span: int = _SPAN) -> None:
        self._span = span
        self._factors: Keys = np.empty(0, np.uint64)
        self._span_factors = [1]
        self._random = np.random.default_rng()

    @property
    def num_bytes(self) -> int:
        """Memory that the factors can come to take."""
        return 8 * self._span

    def key(self, tokens: TokenArray, stop: int, start: int = 0, key: int = 0) -> int:
        """Key of the first `stop` tokens; `key` is that of the first `start`."""
        self._grow(stop)
        key += (stop - start) * int(_STEP)
        while start < stop:
            span, at = divmod(start, self._span)
            end = min(stop, start - at + self._span)
            factors = self._factors[at : at + end - start]
            key += int(np.dot(tokens[start:end].view(np.uint64), factors)) * self._span_factors[span]
            start = end
        return key & MASK

    def following(self, tokens: TokenArray, start: int, key: int) -> Keys:
        """`uint64[len(tokens) - start]`: the keys of the first `start + 1`, `start + 2`, ... tokens.

        Args:
            tokens: `int64[...]`, from position 0 on; those before `start` are not looked at.
            start: At least one token follows it.
            key: Of the first `start` tokens, or plus something that is to be added to all.
        """
        stop = len(tokens)
        self._grow(stop)
        keys: Keys = np.empty(stop - start, np.uint64)
        begin = start
        while begin < stop:
            span, at = divmod(begin, self._span)
            end = min(stop, begin - at + self._span)
            out = keys[begin - start : end - start]
            np.multiply(tokens[begin:end].view(np.uint64), self._factors[at : at + end - begin], out=out)
            if span:
                out *= np.uint64(self._span_factors[span])
            begin = end
        keys += _STEP
        keys[:1] += np.uint64(key)
        return np.cumsum(keys, out=keys)

    def _grow(self, num: int) -> None:
        wanted = min(num, self._span)
        if wanted > len(self._factors):
            more = min(self._span, max(1024, wanted, 2 * len(self._factors))) - len(self._factors)
            self._factors = np.concatenate((self._factors, self._odd(more)))
        if num > self._span * len(self._span_factors):
            more = -(-num // self._span) - len(self._span_factors)
            self._span_factors += self._odd(more).tolist()

    def _odd(self, num: int) -> Keys:
        return self._random.integers(0, 2**64, num, dtype=np.uint64) | np.uint64(1)
