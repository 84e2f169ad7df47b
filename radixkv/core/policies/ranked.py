"""Base of policies that order blocks by a rank first and by their last use second."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from radixkv.core.block_states import BlockIds
from radixkv.core.errors import CacheCorruptionError
from radixkv.core.eviction import PriorityPolicy

if TYPE_CHECKING:
    from radixkv.core.node import Node

Value = tuple[Any, int]  # rank, last use


class RankedPolicy(PriorityPolicy):
    """The leaf whose last block has the lowest rank goes first; of those, the one whose block was used longest ago.

    A leaf has one value of each at a time, and two leaves have the same only if one request used both: then the node
    that was made first goes first. Within a leaf the deeper block always goes first.

    Costs: as `PriorityPolicy`.

    Attributes:
        rank: `rank_dtype[num_blocks]`, meaningful for cached blocks.
        priority: `int64[num_blocks]`, logical time of the last use.
    """

    rank_dtype: ClassVar[type] = np.int64

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self.rank: npt.NDArray[Any] = np.zeros(num_blocks, self.rank_dtype)

    def value(self, block: int) -> Value:
        """What a leaf with this last block is filed under."""
        return self.rank.item(block), self.priority.item(block)

    def above(self, ids: BlockIds, bound: Value) -> npt.NDArray[np.bool_]:
        """Which of these blocks come after a leaf that is filed under `bound`."""
        rank, last = bound
        ranks = self.rank[ids]
        return (ranks > rank) | ((ranks == rank) & (self.priority[ids] > last))

    def file(self, leaf: Node, block: int) -> None:
        """File a leaf under the value of its last block."""
        self._push((self.value(block), leaf.serial, leaf, block))

    def refile(self, leaf: Node, block: int) -> None:
        """File a leaf anew if its last block or that block's value is another one now."""
        if leaf.entry[3] != block or leaf.entry[0] != self.value(block):
            self.unfile(leaf)
            self.file(leaf, block)

    def num_to_cut(self, leaf: Node, ids: BlockIds) -> int:
        """All blocks from the end that do not come after the second leaf."""
        bound = self._second()
        if bound is None:
            return len(ids)
        above = self.above(ids, bound)
        # The last block is the one that `first` chose; two that are equal go one by one.
        return max(1, int(above[::-1].argmax())) if above.any() else len(ids)

    def check(self, leaf: Node, block: int) -> None:
        """Verify that a leaf is filed under the value of its last block.

        Raises:
            CacheCorruptionError: It is not.
        """
        filed = leaf.entry[:2] + leaf.entry[3:]
        true = (self.value(block), leaf.serial, block)
        if filed != true or leaf.entry[2] is not leaf:
            raise CacheCorruptionError(
                f"{self.name}: node {leaf.serial} is filed as {filed}, should be {true}"
            )

    def check_all(self) -> None:
        """Verify what holds for the policy as a whole, in time that grows with the pool. For tests.

        Raises:
            CacheCorruptionError: It does not; the message gives the values.
        """
