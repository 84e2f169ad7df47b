"""Who runs, and who holds which rows and blocks."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from radixkv.core.block_pool import BlockPool
from radixkv.core.block_states import CACHED, BlockIds
from radixkv.core.radix_tree import RadixTree
from radixkv.sched.config import SchedulerConfig
from radixkv.sched.decodes import Decodes
from radixkv.sched.request import FINISHED, RUNNING, SWAPPED, WAITING, Sequence
from radixkv.sched.rows import Rows
from radixkv.sched.stats import Counters
from radixkv.sched.waiting import insert_by_key, remove_by_key


class Books:
    """What the parts of the scheduler share: rows, tables, the tree, the host tier, and the lists of who runs.

    Attributes:
        decoding: Sequences that run and have made a token since they were admitted, in order of arrival.
        prefilling: Sequences that run and have not, in order of arrival; not those that will fork from one of
            these once it has computed its tokens.
        num: Sequences in each state.
        num_strict: Sequences that run and were preempted more than once.
        epoch: Changes with whatever may let a sequence in that was refused, except for blocks becoming free.
    """

    def __init__(self, tree: RadixTree, config: SchedulerConfig, host: BlockPool | None) -> None:
        self.tree = tree
        self.pool = tree.pool
        self.host = host
        self.config = config
        self.block_size = tree.block_size
        self.num_blocks = tree.pool.num_blocks
        self.rows = Rows(config.max_num_seqs)
        self.decoding: list[Sequence] = []
        self.prefilling: list[Sequence] = []
        self.num = {WAITING: 0, RUNNING: 0, SWAPPED: 0, FINISHED: 0}
        self.num_strict = 0
        self.epoch = 0
        self.counters = Counters()
        self._decodes: Decodes | None = None

    @property
    def anybody_runs(self) -> bool:
        """Whether a sequence runs."""
        return bool(self.decoding or self.prefilling)

    @property
    def room(self) -> int:
        """Blocks that could be allocated now."""
        return self.pool.num_free + self.pool.num_idle

    def decodes(self) -> Decodes:
        """The decoding sequences as arrays."""
        if self._decodes is None:
            self._decodes = Decodes(self.rows, self.decoding, self.block_size)
        return self._decodes

    def decodes_changed(self) -> None:
        """Their arrays must be made anew."""
        self._decodes = None

    def set_state(self, seq: Sequence, state: str) -> None:
        """Note the state of a sequence."""
        strict = seq.num_preemptions > 1
        self.num_strict += strict * ((state == RUNNING) - (seq.state == RUNNING))
        self.num[seq.state] -= 1
        self.num[state] += 1
        seq.state = state

    # -- rows ------------------------------------------------------------------------------------------------

    def take_row(self, seq: Sequence) -> int:
        """Give a sequence a row, without blocks."""
        rows = self.rows
        seq.row = row = rows.take(seq, seq._tokens)
        rows.limit[row] = limit = self.limit(seq)
        rows.max_blocks[row] = self.max_blocks(limit)
        return row

    def limit(self, seq: Sequence) -> int:
        """How long a sequence may become, in known tokens."""
        return min(len(seq.request.tokens) + seq.request.max_new_tokens, self.config.max_seq_len or 2**62)

    def max_blocks(self, limit: int) -> int:
        """Blocks of a sequence that has reached its limit: the last token's KV is never needed."""
        return min(-(-(limit - 1) // self.block_size), self.num_blocks)

    def give_row_back(self, seq: Sequence) -> None:
        """The sequence keeps its tokens, but not its row."""
        seq._tokens = seq.all_tokens()
        self.rows.give_back(seq.row)
        seq.row = -1

    # -- lists -----------------------------------------------------------------------------------------------

    def start_prefilling(self, seq: Sequence) -> None:
        """It has a row and blocks for all its known tokens."""
        seq._prefilling = True
        insert_by_key(self.prefilling, seq)

    def start_decoding(self, seq: Sequence) -> None:
        """It has computed all its known tokens."""
        seq._prefilling = False
        insert_by_key(self.decoding, seq)
        self._decodes = None

    def stop(self, seq: Sequence) -> None:
        """It runs no longer, or does not prefill any longer."""
        if seq._prefilling:
            remove_by_key(self.prefilling, seq)
            seq._prefilling = False
        else:
            remove_by_key(self.decoding, seq)
            self._decodes = None
        self.epoch += 1

    # -- blocks ----------------------------------------------------------------------------------------------

    def publish(self, seq: Sequence, with_tail: bool) -> None:
        """Make what a sequence has computed visible to others; its partly filled last block only `with_tail`."""
        rows, row = self.rows, seq.row
        num_tokens = rows.computed.item(row)
        if not with_tail:
            num_tokens -= num_tokens % self.block_size
        if not num_tokens or not self.config.share_prefixes:
            return
        tokens = seq._tokens if num_tokens <= len(seq._tokens) else seq.all_tokens()
        blocks = rows.tables[row, : -(-num_tokens // self.block_size)]
        request = seq.request
        result = self.tree.insert(tokens[:num_tokens], blocks, request.namespace, retention=request.retention)
        self.epoch += 1
        if result.num_duplicate_blocks:
            blocks[:] = result.blocks
            self._decodes = None

    def publish_prompt(self, seq: Sequence) -> None:
        """Make what is computed visible, of a sequence that goes on; its last block too if that says anything new.

        The sequence fills its partly filled last block further, behind the rows that the tree knows of. It must
        not get somebody else's in its place, as it would if the tree knew all its tokens already.
        """
        tokens, namespace = seq._tokens, seq.request.namespace
        num_tokens = self.rows.computed.item(seq.row)
        tail = num_tokens % self.block_size and self.config.share_prefixes
        self.publish(seq, with_tail=bool(tail) and self.tree.match_length(tokens, namespace) < num_tokens)

    def share_blocks(self, seq: Sequence, child: Sequence) -> None:
        """`child`, which has a row and no blocks, goes on where `seq` is."""
        rows = self.rows
        table = rows.table(seq.row).copy()
        self.pool.retain(table)
        rows.set_table(child.row, table)
        rows.computed[child.row] = computed = rows.computed.item(seq.row)
        child._high_water = computed
        if computed % self.block_size:
            rows.set_shared(seq.row, True)
            rows.set_shared(child.row, True)

    def release(self, seq: Sequence) -> None:
        """Give back the blocks and the row of a sequence."""
        self.pool.release(self.rows.table(seq.row))
        self.give_row_back(seq)
        self.epoch += 1

    def release_host(self, seq: Sequence) -> None:
        """Give back the host blocks of a sequence, if it has any."""
        if seq._host is not None:
            assert self.host is not None
            self.host.release(seq._host[seq._host >= 0])
            seq._host = None
            seq._host_computed = 0

    def drop_uncached(self) -> None:
        """If nothing is to stay cached that nobody holds: evict it."""
        if not self.config.keep_cached and self.pool.num_idle:
            self.tree.evict(self.pool.num_idle)

    def running(self) -> list[Sequence]:
        """All that hold blocks and run."""
        return self.decoding + self.prefilling

    def used_slots(self) -> tuple[int, int]:
        """Slots of the blocks that running sequences hold, and how many of those hold a token."""
        seqs = self.running()
        if not seqs:
            return 0, 0
        size = self.block_size
        filled = np.zeros(self.num_blocks, np.int64)
        held = np.zeros(self.num_blocks, np.bool_)
        for seq in seqs:
            table: BlockIds = self.rows.table(seq.row)
            whole, rest = divmod(self.rows.computed.item(seq.row), size)
            held[table] = True
            filled[table[:whole]] = size
            if rest:
                filled[table[whole]] = max(filled[table[whole]], rest)
        return int(held.sum()) * size, int(filled.sum())

    def is_shared(self, block: int, num_rows: int, let_go: dict[int, int]) -> bool:
        """Whether a sequence that has filled so many rows of this block must not fill the next one.

        It must not if another sequence holds the block, or the tree does and says more of it than those rows.
        References that are about to go do not count.
        """
        state = self.pool._state.item(block)
        others = (state >> 1) - let_go.get(block, 0) - 1
        if state & CACHED and self.block_size - self.pool._gaps.item(block) <= num_rows:
            others -= 1
        return others > 0

    def holders(self, blocks: BlockIds, let_go: dict[int, int]) -> npt.NDArray[np.int32]:
        """How many hold each of these blocks, without the tree, and without references that are about to go."""
        state = self.pool._state[blocks]
        count = (state >> 1) - (state & CACHED)
        if let_go:
            count -= np.array([let_go.get(block, 0) for block in blocks.tolist()], np.int32)
        return count
