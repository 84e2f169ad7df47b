"""Eviction by what it would cost to compute a block again."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from radixkv.core.block_states import BlockIds, Index, fill, get, put
from radixkv.core.errors import InvalidRequestError
from radixkv.core.policies.ranked import RankedPolicy
from radixkv.core.tokens import TokenArray

ATTENTION_EQUALS_AT = 32_768


class CostAwarePolicy(RankedPolicy):
    """GreedyDual-Size-Frequency: keeps what is used often, was used lately and is dear to compute again.

    To compute a token anew costs `2 * parameters` floating point operations in the matrices, wherever it stands, and in
    the attention `4 * layers * width` for each token before it. So the cost of a block grows with its depth:

        cost = filled share of the block * (1 + position of its middle / attention_equals_at)

    in units of a block at position 0, where `attention_equals_at` is the position from which on attention is the larger
    part: `parameters / (2 * layers * width)`, about 31,000 for a Llama of 8 billion parameters (32 layers, 4,096
    wide). With each use a block gets the value

        value = inflation + uses * cost

    (all blocks are of one size, which drops out), and `inflation` is the highest value that was ever evicted, so that
    what is not used any more is overtaken as the cache turns over.

    Victim: lowest value. Ties: oldest last use; among blocks of one path the deeper one. It minimises computation
    rather than missed tokens: compare the seconds of prefill saved, not only hit rates. With `attention_equals_at`
    infinite it is `lfu-aged`.

    Costs: a match is a few vectorised operations over the blocks it hit; filing and cutting are logarithmic in the
    number of leaves.

    Source: Cao and Irani, "Cost-aware WWW proxy caching algorithms", USITS 1997 (GreedyDual-Size); Cherkasova,
    "Improving WWW proxies performance with Greedy-Dual-Size-Frequency caching policy", HP Labs HPL-98-69R1, 1998.

    Args:
        num_blocks: Blocks of the pool.
        attention_equals_at: Tokens, above 0; see above.

    Attributes:
        inflation: The highest value evicted so far.
    """

    name = "cost-aware"
    rank_dtype = np.float64

    def __init__(self, num_blocks: int, attention_equals_at: float = ATTENTION_EQUALS_AT) -> None:
        super().__init__(num_blocks)
        if not attention_equals_at > 0:
            raise InvalidRequestError(
                f"cost-aware: attention_equals_at must be above 0, got {attention_equals_at}"
            )
        self._attention_equals_at = attention_equals_at
        self.inflation = 0.0
        self._uses: npt.NDArray[np.int64] = np.zeros(num_blocks, np.int64)
        self._cost: npt.NDArray[np.float64] = np.zeros(num_blocks)

    def on_request(self, index: Index, num_hit: int, tokens: TokenArray, seed: int, now: int) -> None:
        """Count a use of the blocks hit, and value them anew."""
        uses = get(self._uses, index) + 1
        put(self._uses, index, uses)
        put(self.rank, index, self.inflation + uses * get(self._cost, index))
        fill(self.priority, index, now)

    def on_use(self, index: Index, now: int) -> None:
        """Note the time of use; ties go by it."""
        fill(self.priority, index, now)

    def on_insert(self, index: Index, first: int, tokens: TokenArray, seed: int, now: int) -> None:
        """Value new blocks by one use each."""
        cost = self._costs(first, len(tokens))
        fill(self._uses, index, 1)
        put(self._cost, index, cost)
        put(self.rank, index, self.inflation + cost)
        fill(self.priority, index, now)

    def on_grow(self, block: int, number: int, tokens: TokenArray, seed: int, now: int) -> None:
        """Value a block that was filled further by its new cost."""
        self._cost[block] = cost = self._costs(number, len(tokens)).item(0)
        self.rank[block] = self.inflation + self._uses.item(block) * cost
        self.priority[block] = now

    def on_replace(self, old: int, new: int) -> None:
        """The fuller block takes over the uses of the one that goes."""
        self._uses[new] = uses = self._uses.item(old)
        self.rank[new] = self.inflation + uses * self._cost.item(new)

    def on_evict(self, ids: BlockIds) -> None:
        """Raise `inflation` to the highest value evicted."""
        self.inflation = max(self.inflation, float(self.rank[ids].max()))

    def _costs(self, first: int, num_tokens: int) -> npt.NDArray[np.float64]:
        """Of the blocks from number `first` on of a path of so many tokens."""
        starts = np.arange(first * self.block_size, num_tokens, self.block_size)
        rows = np.minimum(num_tokens - starts, self.block_size)
        costs: npt.NDArray[np.float64] = (
            rows / self.block_size * (1 + (starts + rows / 2) / self._attention_equals_at)
        )
        return costs
