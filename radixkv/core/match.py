"""What the tree answers: matches, which hold what they found, and results of inserts."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple

from radixkv.core.block_states import BlockIds
from radixkv.core.errors import InvalidRequestError

if TYPE_CHECKING:
    from radixkv.core.radix_tree import RadixTree


class Tail(NamedTuple):
    """A block of which only the leading rows match: copy them before writing behind them.

    Attributes:
        block: Its id.
        num_rows: Rows (tokens) that match, at least 1 and less than `block_size`.
    """

    block: int
    num_rows: int


class Match:
    """A held match: its blocks stay cached and unchanged until `release()` or `take()`.

    Attributes:
        num_tokens: Leading tokens found: `len(blocks) * block_size`, and the rows of the tail.
        blocks: `int32[...]`, the wholly matched blocks.
        tail: Block and number of its leading rows that match beyond `blocks`, or None.
        tree: The tree it came from.
        note: What a listener of the tree had to say about the request, or None.
    """

    __slots__ = ("_held", "_released", "blocks", "note", "num_tokens", "tail", "tree")

    def __init__(
        self,
        tree: RadixTree,
        num_tokens: int,
        held: BlockIds,
        tail: Tail | None,
        note: object | None = None,
    ) -> None:
        self.tree = tree
        self.note = note
        self.num_tokens = num_tokens
        self.tail = tail
        self._held = held
        self.blocks = held if tail is None else held[:-1]
        self._released = False

    def __repr__(self) -> str:
        state = ", released" if self._released else ""
        return f"Match(num_tokens={self.num_tokens}, blocks={self.blocks.tolist()}, tail={self.tail}{state})"

    @property
    def released(self) -> bool:
        """Whether the references are gone, given back or handed over."""
        return self._released

    def release(self) -> None:
        """Give the references back.

        Raises:
            InvalidRequestError: They are gone already.
        """
        self._end()
        self.tree.pool.release(self._held)

    def take(self) -> BlockIds:
        """Hand the references on `blocks` over to the caller; the one on the tail is given back.

        Raises:
            InvalidRequestError: The references are gone already.
        """
        self._end()
        if self.tail is not None:
            self.tree.pool.release(self.tail.block)
        return self.blocks

    def take_all(self) -> BlockIds:
        """Like `take`, but the tail's reference and block id are handed over too, as the last block.

        Raises:
            InvalidRequestError: The references are gone already.
        """
        self._end()
        return self._held

    def _end(self) -> None:
        with self.tree.pool.lock:  # of two threads that release at once, one gets the error
            if self._released:
                raise InvalidRequestError("this match was released or taken already")
            self._released = True

    def __enter__(self) -> Match:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._released:
            self.release()


class InsertResult(NamedTuple):
    """What `RadixTree.insert` did.

    Attributes:
        blocks: `int32[...]`, the table to go on with. The caller holds one reference on each, as before: where
            the tree already had a block with those tokens, it is the tree's block instead of the caller's.
            (If nothing was replaced it is the very array that the caller gave.)
        num_new_blocks: Blocks the tree took over.
        num_duplicate_blocks: Blocks of the caller that were replaced in `blocks` and released.
        num_new_tokens: By how much `num_cached_tokens` rose.
    """

    blocks: BlockIds
    num_new_blocks: int
    num_duplicate_blocks: int
    num_new_tokens: int
