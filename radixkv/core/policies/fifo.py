"""First in, first out."""

from __future__ import annotations

from radixkv.core.block_states import Index, fill
from radixkv.core.eviction import PriorityPolicy
from radixkv.core.tokens import TokenArray


class FIFOPolicy(PriorityPolicy):
    """First in, first out: the leaf block that was inserted longest ago goes, whether it was used since or not.

    Victim: oldest insertion. Ties: blocks inserted together go deepest first. Never better than LRU where recent use
    says anything; it is here as a yardstick, and where traffic is one pass over distinct prompts it costs nothing.

    Costs: filing and cutting are logarithmic in the number of leaves; a match writes nothing.

    Source: the column `fifo` of the reference values; for its anomaly, Belady, Nelson and Shedler, "An anomaly in
    space-time characteristics of certain programs running in a paging machine", CACM 12(6), 1969.

    Args:
        num_blocks: Blocks of the pool.
    """

    name = "fifo"

    def on_insert(self, index: Index, first: int, tokens: TokenArray, seed: int, now: int) -> None:
        """Note the time of insertion."""
        fill(self.priority, index, now)
