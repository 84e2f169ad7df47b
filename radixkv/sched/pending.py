"""Prefixes that a running sequence has blocks for but has not computed yet."""

from __future__ import annotations

from radixkv.core.tokens import TokenArray
from radixkv.sched.request import Sequence

_Key = tuple[bytes, int, bytes]


class PendingPrefixes:
    """Who is about to compute which prefix, so that nobody computes it a second time meanwhile.

    A sequence is filed under the first block of tokens that it will compute, and how many blocks stand before it.
    Whoever has the same prompt up to there has also matched no less, because those blocks are cached and held.
    So a look-up is one dictionary access for each distinct depth, of which there are few.

    Args:
        block_size: Tokens in a block.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._seqs: dict[_Key, list[Sequence]] = {}
        self._keys: dict[Sequence, _Key] = {}
        self._depths: dict[int, int] = {}  # how many keys there are of each depth

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, seq: Sequence, tokens: TokenArray, num_blocks: int) -> None:
        """`seq` will compute its known tokens, of which the first `num_blocks` blocks are cached."""
        start = num_blocks * self._block_size
        if start + self._block_size > len(tokens):
            return  # it will publish nothing
        key = self._key(seq, tokens, num_blocks)
        self._keys[seq] = key
        self._seqs.setdefault(key, []).append(seq)
        self._depths[num_blocks] = self._depths.get(num_blocks, 0) + 1

    def discard(self, seq: Sequence) -> None:
        """Forget a sequence, if it is known: it has computed its tokens, or never will."""
        key = self._keys.pop(seq, None)
        if key is None:
            return
        seqs = self._seqs[key]
        seqs.remove(seq)
        if not seqs:
            del self._seqs[key]
        left = self._depths[key[1]] - 1
        if left:
            self._depths[key[1]] = left
        else:
            del self._depths[key[1]]

    def replace(self, seq: Sequence, other: Sequence) -> None:
        """`other` computes what `seq` was to compute."""
        key = self._keys.pop(seq, None)
        if key is not None:
            self._keys[other] = key
            seqs = self._seqs[key]
            seqs[seqs.index(seq)] = other

    def find(self, seq: Sequence, tokens: TokenArray, num_matched: int) -> tuple[Sequence, int] | None:
        """Who will compute more of a prompt than is cached.

        Args:
            seq: Who asks.
            tokens: What is known of it.
            num_matched: How many of its tokens are cached.

        Returns:
            Of those that will compute at least one more whole block of it, the one that shares most, and how many
            tokens that one must have computed; or None.
        """
        best: Sequence | None = None
        most = num_matched // self._block_size * self._block_size
        for depth in self._depths:
            if (depth + 1) * self._block_size > len(tokens):
                continue
            for other in self._seqs.get(self._key(seq, tokens, depth), ()):
                shared = num_common(tokens, other._tokens) // self._block_size * self._block_size
                if shared > most and other.num_computed < shared:
                    best, most = other, shared
        return None if best is None else (best, most)

    def _key(self, seq: Sequence, tokens: TokenArray, depth: int) -> _Key:
        start = depth * self._block_size
        return seq.request._canonical, depth, tokens[start : start + self._block_size].tobytes()


def num_common(a: TokenArray, b: TokenArray) -> int:
    """Length of the common prefix."""
    size = min(len(a), len(b))
    differ = a[:size] != b[:size]
    at = int(differ.argmax()) if size else 0
    return at if size and differ[at] else size
