"""What a tree tells those who watch it."""

from __future__ import annotations

from radixkv.core.block_states import BlockIds
from radixkv.core.tokens import TokenArray


class TreeListener:
    """Hears what a `RadixTree` does: the base of statistics that explain misses, and of KV events.

    Every method does nothing here; override those that are wanted and hand the object to `RadixTree.add_listener`.
    They are called under the lock of the pool, in the order in which things happen: they must be quick, must not
    raise, and must not call the tree or the pool. Arrays are the caller's: copy what is kept.
    """

    def on_matched(
        self, namespace: bytes, tokens: TokenArray, num_hit: int, limit: int, again: bool
    ) -> object | None:
        """A request was matched.

        Args:
            namespace: Canonical namespace.
            tokens: `int64[...]`, the whole request.
            num_hit: Leading tokens found.
            limit: Most that could have been found (`max_tokens`).
            again: The same request asked before (it waited, or was paused) and was heard of then.

        Returns:
            A note for whoever made the request: `match.note`. None leaves it to other listeners.
        """
        return None

    def on_stored(
        self, namespace: bytes, tokens: TokenArray, first: int, blocks: BlockIds, parent: int
    ) -> None:
        """Blocks are cached now.

        A parent is always announced before its child. A last block that is only partly filled (a tail) is
        announced again, under the same id, when it is filled further.

        Args:
            namespace: Canonical namespace.
            tokens: `int64[...]`, the path from position 0 on, up to the end of the last of these blocks.
            first: Number of the first of these blocks on that path.
            blocks: `int32[...]`, their ids: `blocks[i]` holds the tokens from `(first + i) * block_size` on.
            parent: The block before the first of them, announced before; -1 if `first` is 0. Whoever keeps something
                for each block can go on from there, and need not look at the whole path.
        """

    def on_removed(self, blocks: BlockIds) -> None:
        """Blocks are no longer cached: evicted, cleared, or a tail replaced by a fuller one.

        Called for a child before, or together with, its parent; within `blocks` a parent stands before its child.

        Args:
            blocks: `int32[...]`, their ids.
        """

    def on_cleared(self) -> None:
        """Everything was dropped, in all namespaces; `on_removed` is not called for it."""
