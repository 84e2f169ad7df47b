"""Which block holds which positions of one sequence."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from radixkv.core.block_pool import BlockIdsLike, BlockPool, as_block_ids
from radixkv.core.block_states import BlockIds
from radixkv.core.errors import CacheCorruptionError, InvalidRequestError

if TYPE_CHECKING:
    from radixkv.core.radix_tree import Match


class BlockCopy(NamedTuple):
    """Copy the leading `num_rows` rows of block `src` to block `dst`, in every layer, before anything else is written.

    Attributes:
        src: Id of the block that others hold, too.
        dst: Id of the block that the table names in its place.
        num_rows: Rows (tokens) to copy, from row 0 on.
    """

    src: int
    dst: int
    num_rows: int


class BlockTable:
    """The blocks of one sequence, and how many of its tokens have room in them.

    A table holds one reference on each of its blocks. Forks share blocks; a block that somebody else holds too
    (a fork, a match, the tree) is never written: `append` replaces it by a copy first, and says what to copy.

    Invariants, verified by `check()`:

    1. `len(blocks) >= ceil(num_tokens / block_size)`; blocks beyond are room taken ahead.
    2. Every block has at least one reference, and no block is named twice.

    A table belongs to one sequence and is not for several threads at once.

    Args:
        pool: The pool of the blocks.
        block_size: Tokens in a block.
        blocks: Blocks to start with; the caller's references on them become the table's.
        num_tokens: How many tokens those hold.
    """

    def __init__(
        self, pool: BlockPool, block_size: int, blocks: BlockIdsLike | None = None, num_tokens: int = 0
    ) -> None:
        if isinstance(block_size, bool) or block_size < 1:
            raise InvalidRequestError(f"block_size must be at least 1, got {block_size!r}")
        ids = np.empty(0, np.int32) if blocks is None else as_block_ids(blocks).copy()
        if not 0 <= num_tokens <= len(ids) * block_size:
            raise InvalidRequestError(f"{len(ids)} blocks of {block_size} do not hold {num_tokens} tokens")
        self._pool = pool
        self._block_size = int(block_size)
        self._num_tokens = int(num_tokens)
        self._ids = ids  # the first `_num_blocks` count; the array grows by doubling
        self._num_blocks = len(ids)
        self._released = False

    @classmethod
    def adopt(cls, match: Match) -> BlockTable:
        """A table that goes on behind a match and takes over its references.

        The tail of the match, if any, becomes the partly filled last block; being shared, it is copied by the
        first `append`.

        Args:
            match: From `RadixTree.match`; it counts as released afterwards.

        Raises:
            InvalidRequestError: Its references are gone already.
        """
        return cls(match.tree.pool, match.tree.block_size, match.take_all(), match.num_tokens)

    def __repr__(self) -> str:
        return f"BlockTable(num_tokens={self._num_tokens}, blocks={self.blocks.tolist()})"

    def __len__(self) -> int:
        return self._num_blocks

    @property
    def pool(self) -> BlockPool:
        """The pool of the blocks."""
        return self._pool

    @property
    def block_size(self) -> int:
        """Tokens in a block."""
        return self._block_size

    @property
    def num_tokens(self) -> int:
        """Tokens of the sequence that have a slot."""
        return self._num_tokens

    @property
    def blocks(self) -> BlockIds:
        """`int32[len(self)]`, a read-only view, good until the table changes."""
        view = self._ids[: self._num_blocks]
        view.flags.writeable = False
        return view

    def append(self, n: int, allocate: Callable[[int], BlockIds] | None = None) -> list[BlockCopy]:
        """Make room for `n` more tokens.

        Args:
            n: Tokens to be written behind the present ones.
            allocate: Where blocks come from: `pool.allocate` if None, or `tree.allocate`, which evicts.

        Returns:
            What to copy before writing: one `BlockCopy` if the partly filled last block is shared, else nothing.
            Until it is carried out, let nobody write.

        Raises:
            OutOfBlocksError: From `allocate`. Nothing is changed.
        """
        self._require_alive()
        if n < 0:
            raise InvalidRequestError(f"cannot append {n} tokens: use truncate")
        if n == 0:
            return []
        last, rows = divmod(self._num_tokens, self._block_size)
        copies = rows > 0 and self._pool.refcount(self._ids.item(last)) > 1
        missing = max(0, -(-(self._num_tokens + n) // self._block_size) - self._num_blocks)
        fresh = np.empty(0, np.int32)
        if missing + copies:
            fresh = (allocate or self._pool.allocate)(missing + copies)
        todo = []
        if copies:
            shared, own = self._ids.item(last), fresh.item(0)
            fresh = fresh[1:]
            todo.append(BlockCopy(shared, own, rows))
            self._ids[last] = own
            self._pool.release(shared)
        if missing:
            end = self._num_blocks + missing
            if end > len(self._ids):
                self._ids = np.concatenate((self._ids[: self._num_blocks], np.empty(end, np.int32)))
            self._ids[self._num_blocks : end] = fresh
            self._num_blocks = end
        self._num_tokens += n
        return todo

    def fork(self) -> BlockTable:
        """A second table with the same tokens, sharing every block; room taken ahead is not shared.

        Raises:
            InvalidRequestError: This table was released already.
        """
        self._require_alive()
        used = self._ids[: -(-self._num_tokens // self._block_size)]
        self._pool.retain(used)
        return BlockTable(self._pool, self._block_size, used, self._num_tokens)

    def truncate(self, num_tokens: int) -> None:
        """Keep only the first `num_tokens` tokens; blocks beyond, also those taken ahead, are released.

        Raises:
            InvalidRequestError: There are fewer tokens, or the table was released already.
        """
        self._require_alive()
        if not 0 <= num_tokens <= self._num_tokens:
            raise InvalidRequestError(f"cannot truncate {self._num_tokens} tokens to {num_tokens}")
        keep = -(-num_tokens // self._block_size)
        self._pool.release(self._ids[keep : self._num_blocks])
        self._num_blocks = keep
        self._num_tokens = int(num_tokens)

    def replace(self, blocks: BlockIdsLike) -> None:
        """Take the table that `RadixTree.insert` returned for the leading blocks of this one.

        `insert` has moved the references already, so none are taken or given back here.

        Args:
            blocks: `InsertResult.blocks`.

        Raises:
            InvalidRequestError: They are more than this table has, or it was released already.
        """
        self._require_alive()
        ids = as_block_ids(blocks)
        if len(ids) > self._num_blocks:
            raise InvalidRequestError(f"{len(ids)} blocks cannot replace {self._num_blocks}")
        self._ids[: len(ids)] = ids

    def release(self) -> None:
        """Give all blocks back; the table cannot be used any more.

        Raises:
            InvalidRequestError: It was released already.
        """
        self._require_alive()
        self._pool.release(self._ids[: self._num_blocks])
        self._released = True
        self._num_blocks = self._num_tokens = 0

    def slots(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """`int64[stop - start]`: where the tokens at positions `start` to `stop - 1` lie.

        A slot is `block_id * block_size + offset`.

        Raises:
            InvalidRequestError: Some of these positions have no room in the table.
        """
        if not 0 <= start <= stop <= self._num_tokens:
            raise InvalidRequestError(f"positions {start} to {stop} are not within {self._num_tokens} tokens")
        position = np.arange(start, stop, dtype=np.int64)
        block, offset = np.divmod(position, self._block_size)
        return self._ids[block].astype(np.int64) * self._block_size + offset

    def check(self) -> None:
        """Raise `CacheCorruptionError`, with values, at the first invariant broken. For tests."""
        ids = self._ids[: self._num_blocks]
        if self._num_tokens > self._num_blocks * self._block_size:
            raise CacheCorruptionError(
                f"table invariant 1: {self._num_tokens} tokens in {self._num_blocks} blocks"
            )
        refs = self._pool.refcounts[ids]
        if (refs < 1).any():
            raise CacheCorruptionError(f"table invariant 2: block {int(ids[refs.argmin()])} is free")
        if len(np.unique(ids)) != len(ids):
            raise CacheCorruptionError(f"table invariant 2: a block is named twice in {ids.tolist()}")

    def _require_alive(self) -> None:
        if self._released:
            raise InvalidRequestError("this block table was released already")
