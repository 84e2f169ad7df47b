"""Eviction by expected hits for each request of stay, learned from what the cache sees."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from radixkv.core.block_keys import BlockKeys, block_keys
from radixkv.core.block_states import BlockIds, Index, get, put
from radixkv.core.errors import CacheCorruptionError, InvalidRequestError
from radixkv.core.eviction import EvictionPolicy
from radixkv.core.hashing import block_hash
from radixkv.core.policies.ghosts import Cells, GhostTable, Uses
from radixkv.core.policies.leaf_cells import LeafCells
from radixkv.core.policies.reuse_rates import (
    CLASS_BITS,
    CLASS_MASK,
    CLASS_OF_LAST,
    CLASS_OF_USES,
    CLASSES_OF_USES,
    HORIZON,
    NEW_BUCKETS,
    NEXT_USES,
    RING_MASK,
    ReuseRates,
)
from radixkv.core.tokens import TokenArray, token_bytes

if TYPE_CHECKING:
    from radixkv.core.node import Node

GHOSTS_PER_BLOCK = 8
FEWEST_GHOSTS = 65_536

Counted = npt.NDArray[np.bool_]

UNANNOUNCED = (
    NEW_BUCKETS - 1
)  # class of blocks that are inserted without a request for them: used once, all new


class _Noted(NamedTuple):
    """What is noted of some blocks in a row."""

    keys: BlockKeys
    cells: Cells
    uses: Uses
    counted: Counted

    def part(self, start: int | None, stop: int | None) -> _Noted:
        at = slice(start, stop)
        return _Noted(self.keys[at], self.cells[at], self.uses[at], self.counted[at])

    def then(self, more: _Noted) -> _Noted:
        return _Noted(
            np.concatenate((self.keys, more.keys)),
            np.concatenate((self.cells, more.cells)),
            np.concatenate((self.uses, more.uses)),
            np.concatenate((self.counted, more.counted)),
        )


class _Expected(NamedTuple):
    """Blocks that the last request did not find, and that are likely to be inserted next."""

    first: int  # number of the first of them on its path
    behind: int  # key of the one before it
    seed: int  # of the namespace
    num_whole: int  # how many of them are whole; the last one may be a tail
    digest: int  # of the tokens of those, 0 if it is not known
    noted: _Noted


class HitDensityPolicy(EvictionPolicy):
    """Hit density: the block goes that brings the fewest hits for the time it takes up room.

    What a block is worth is estimated from what this cache has seen, evicted blocks included as long as they are
    remembered (ghosts): of the blocks of its class, how many were used again at its age and at higher ones, and how
    long one had to wait. The class is how often it was used (1, 2, 3-4, 5-8, 9 or more times, over evictions),
    whether it was the last block of its request, and how much of that request was new (quarters). The age is
    the number of requests since, in steps of a factor of sqrt 2. The worth is the highest ratio, over all times to keep
    the block on, of the hits to be expected to the time until then or until the hit (a Gittins index). Rates of
    which little was seen are drawn towards those of a larger group. No constant is in units of any traffic: they
    are statistical (how much evidence counts for how much) or bound memory.

    Victim: of the leaf blocks whose worth is at most twice that of the worst leaf (taken once an eviction), the one
    used longest ago; then the others, lowest worth first. So it departs from LRU only where it is sure. Leaves
    that nobody asked for in 16,384 requests go before all others, longest unused first: where the cache turns over
    so slowly, it is exactly LRU. Ties: the deeper block first.

    Costs: a request is a constant number of numpy calls over its blocks, and 28 rows of counts; an eviction looks at
    those of 28 * 40 cells of age and class that hold any leaves, and each cut is logarithmic in the number of leaves.
    Nothing grows with the tree. Of requests that have more than 128 blocks on average, one block in 2, 4, 8... is
    counted, and remembered as a ghost: it stands for those before it. Every 32 requests 1,120 numbers are
    estimated anew (0.3 ms).

    Memory: 18 bytes for each block, 8 ghosts for each (at least 65,536 in all; fewer where a sample is counted) of 33
    to 49 bytes, and 9 MB. So up to 410 bytes a block, and about 70 at 16 tokens and prompts of ten thousand; the KV
    of such a block takes 2 MiB in a model of 8 billion parameters.

    Source: Beckmann, Chen and Cidon, "LHD: improving cache hit rate by maximizing hit density", NSDI 2018, ranks
    objects by hits over time spent, by age and class, learned online. The best time to stop: Gittins, "Bandit processes
    and dynamic allocation indices", Journal of the Royal Statistical Society B 41(2), 1979. Ghosts: Megiddo and
    Modha, "ARC: a self-tuning, low overhead replacement cache", FAST 2003. Classes, shrinkage and the bound that ties
    it to LRU are our own.

    Args:
        num_blocks: Blocks of the pool.
        num_ghosts: Evicted blocks to remember; `max(8 * num_blocks, 65,536)` if None.
    """

    name = "hit-density"

    def __init__(self, num_blocks: int, num_ghosts: int | None = None) -> None:
        super().__init__(num_blocks)
        if num_ghosts is not None and num_ghosts < 1:
            raise InvalidRequestError(f"hit-density: num_ghosts must be at least 1, got {num_ghosts}")
        self._keys: BlockKeys = np.zeros(num_blocks, np.uint64)
        self._cells: Cells = np.zeros(num_blocks, np.int64)  # class and time of last use; 0 if not cached
        self._uses: Uses = np.zeros(num_blocks, np.uint8)
        self._counted: Counted = np.zeros(num_blocks, np.bool_)  # among the open blocks of the rates
        self._num_ghosts = num_ghosts or max(GHOSTS_PER_BLOCK * num_blocks, FEWEST_GHOSTS)
        self._ghosts = GhostTable(self._num_ghosts)
        self._rates = ReuseRates()
        self._leaves = LeafCells()
        self._expected: _Expected | None = None
        self._is_announced = False  # whether a request came after the last insert that none had announced
        self._evicting = False
        self._evicted: list[BlockIds] = []

    # -- what happens to blocks ------------------------------------------------------------------------------

    def on_request(self, index: Index, num_hit: int, tokens: TokenArray, seed: int, now: int) -> None:
        """Count the request, hits of ghosts included, and note the new class and age of its blocks."""
        self._remember_expected()
        self._advance()
        self._is_announced = True
        num = -(-len(tokens) // self.block_size)
        if not num:
            return
        rates = self._rates
        keys, num_whole, behind = self._missing(index, num_hit, tokens, seed)
        uses = np.ones(num_hit + len(keys), np.uint8)
        uses[:num_hit] = NEXT_USES[get(self._uses, index)]
        counted = np.zeros(len(uses), np.bool_)
        counted[:num_hit][rates.sample(0)] = True
        used = get(self._cells, index)[get(self._counted, index)]
        num_known = num_whole
        if len(keys):
            sample = rates.sample(num_whole)
            counted[num_hit:][sample] = True
            found, ghost_cells, ghost_uses = self._ghosts.take(keys[sample])
            if len(found):
                uses[num_hit:][sample][found] = NEXT_USES[ghost_uses]
                used = np.concatenate((used, ghost_cells))
                num_known += sample.start + sample.step * int(found[-1]) + 1
                # Whoever used a block used those above it.
                np.maximum.accumulate(uses[::-1], out=uses[::-1])
        rates.use(used)
        news = min(NEW_BUCKETS * (num - num_known) // num, NEW_BUCKETS - 1)
        classes = CLASS_OF_USES[uses] + news
        classes[-1] += CLASS_OF_LAST
        rates.enter(classes[counted])
        cells = rates.now(classes)
        put(self._cells, index, cells[:num_hit])
        put(self._uses, index, uses[:num_hit])
        put(self._counted, index, counted[:num_hit])
        if len(keys):
            noted = _Noted(keys, cells[num_hit:], uses[num_hit:], counted[num_hit:])
            end = len(tokens) // self.block_size
            digest = _digest(tokens[num_whole * self.block_size : end * self.block_size])
            self._expected = _Expected(num_whole, behind, seed, end - num_whole, digest, noted)
        if rates.count_request(num):
            self._rates.give_up(self._ghosts.limit(self._num_ghosts // rates.stride))

    def on_use(self, index: Index, now: int) -> None:
        """Make blocks as young as if they had just been asked for, without counting a hit."""
        cells = get(self._cells, index)
        if not len(cells):
            return
        time = self._rates.time
        if cells.item(0) >> CLASS_BITS == time and cells.item(-1) >> CLASS_BITS == time:
            return
        counted = get(self._counted, index)
        classes = cells & CLASS_MASK
        self._rates.give_up(cells[counted])
        self._rates.enter(classes[counted])
        put(self._cells, index, self._rates.now(classes))

    def on_insert(self, index: Index, first: int, tokens: TokenArray, seed: int, now: int) -> None:
        """Take up new blocks as `on_request` announced them, or as the ghosts know them."""
        behind = int(self._keys[self.behind]) if first else 0
        noted, rest = self._take_expected(first, behind, tokens, seed)
        if len(rest):
            # More than the last request announced: generated, or of an earlier request, which the ghosts know of.
            self._remember_expected()
            num = len(noted.keys)
            more = self._look_up(first + num, rest)
            noted = noted.then(more) if num else more
        put(self._keys, index, noted.keys)
        put(self._cells, index, noted.cells)
        put(self._uses, index, noted.uses)
        put(self._counted, index, noted.counted)

    def on_grow(self, block: int, number: int, tokens: TokenArray, seed: int, now: int) -> None:
        """Note a block that was filled further under its new key, as used now."""
        end = (number + 1) * self.block_size
        behind = int(self._keys[self.behind]) if number else 0
        keys = block_keys(tokens[:end], self.block_size, seed, first=number, parent_key=behind)
        self._keys[block] = keys[0]
        self.on_use([(block, block + 1)], now)

    def on_evict(self, ids: BlockIds) -> None:
        """Note which blocks go; they are remembered as ghosts when the eviction is over."""
        self._evicted.append(ids)
        if not self._evicting:
            self._remember_evicted()

    def on_drop(self, ids: BlockIds) -> None:
        """Forget blocks, without counting what became of them."""
        self._rates.give_up(self._cells[ids[self._counted[ids]]])
        self._cells[ids] = 0

    def on_replace(self, old: int, new: int) -> None:
        """The fuller block takes over the uses of the one that goes."""
        uses = self._uses.item(old)
        if uses > self._uses.item(new):
            cell = self._cells[new : new + 1]
            classes = (cell & CLASS_MASK) % CLASSES_OF_USES + CLASS_OF_USES[uses]
            if self._counted[new]:
                self._rates.give_up(cell)
                self._rates.enter(classes)
            self._cells[new] = self._rates.now(classes)[0]
            self._uses[new] = uses
        self.on_drop(np.array([old], np.int32))

    # -- the order of the leaves -----------------------------------------------------------------------------

    def file(self, leaf: Node, block: int) -> None:
        """File a leaf under the class and the last use of its last block."""
        self._leaves.file(leaf, self._cells.item(block))

    def unfile(self, leaf: Node) -> None:
        """Take a leaf out."""
        self._leaves.unfile(leaf)

    def begin(self) -> None:
        """Put the classes of leaves in the order of their worth now."""
        self._evicting = True
        self._leaves.begin(self._rates.index)

    def end(self) -> None:
        """Remember as ghosts what was evicted."""
        self._evicting = False
        self._leaves.end()
        self._remember_evicted()

    def first(self) -> Node | None:
        """The leaf to be shortened next; None if there is no leaf."""
        return self._leaves.first()

    def num_to_cut(self, leaf: Node, ids: BlockIds) -> int:
        """All blocks from the end with the class and last use of the last one."""
        cells = self._cells[ids]
        differ = (cells != cells[-1]).nonzero()[0]
        return len(ids) - 1 - int(differ[-1]) if len(differ) else len(ids)

    def num_filed(self) -> int:
        """Leaves that are filed. O(1)."""
        return len(self._leaves)

    def check(self, leaf: Node, block: int) -> None:
        """Verify that a leaf is filed under the class and the last use of its last block.

        Raises:
            CacheCorruptionError: It is not.
        """
        last, serial, kind, node = leaf.entry
        true = self._cells.item(block)
        if (last << CLASS_BITS | kind, serial) != (true, leaf.serial) or node is not leaf:
            raise CacheCorruptionError(
                f"hit-density: node {leaf.serial} is filed under {leaf.entry[:3]}, block {block} has cell {true}"
            )

    def check_all(self) -> None:
        """Verify all counts by recounts, in time that grows with the pool. For tests.

        Raises:
            CacheCorruptionError: One is wrong.
        """
        self._leaves.check()
        cells = [self._cells[(self._cells > 0) & self._counted], self._ghosts.cells()]
        if self._expected is not None:
            cells.append(self._expected.noted.cells[self._expected.noted.counted])
        every = np.concatenate(cells)
        every = every[self._rates.time - (every >> CLASS_BITS) < HORIZON]
        true = np.zeros_like(self._rates.open)
        np.add.at(true, ((every >> CLASS_BITS) & RING_MASK, every & CLASS_MASK), 1)
        if (true != self._rates.open).any():
            raise CacheCorruptionError("hit-density: the open blocks of a time and class are miscounted")

    # -- parts -----------------------------------------------------------------------------------------------

    def _advance(self) -> None:
        rows = self._rates.advance()
        self._leaves.advance(self._rates.time, rows)

    def _missing(
        self, index: Index, num_hit: int, tokens: TokenArray, seed: int
    ) -> tuple[BlockKeys, int, int]:
        """Keys of the blocks of a request that are not cached as they are; how many are before, the key of the last.

        The last block that was hit may have been matched in part: then the request has another one in its place.
        """
        if not num_hit:
            return block_keys(tokens, self.block_size, seed), 0, 0
        last, above = _last_two(index)
        behind = int(self._keys[above]) if above >= 0 else 0
        keys = block_keys(tokens, self.block_size, seed, first=num_hit - 1, parent_key=behind)
        if keys[0] == self._keys[last]:
            return keys[1:], num_hit, int(keys[0])
        return keys, num_hit - 1, behind

    def _take_expected(
        self, first: int, behind: int, tokens: TokenArray, seed: int
    ) -> tuple[_Noted, BlockKeys]:
        """What was noted of inserted blocks when the last request asked for them, and the keys of those behind."""
        expected, size = self._expected, self.block_size
        if expected is None or (first, behind, seed) != expected[:3]:
            keys = block_keys(tokens, size, seed, first=first, parent_key=behind)
            return _Noted(keys[:0], self._cells[:0], self._uses[:0], self._counted[:0]), keys
        noted, num, known = expected.noted, -(-len(tokens) // size) - first, 0
        if len(tokens) // size - first >= expected.num_whole > 0 and expected.digest == _digest(
            tokens[first * size : (first + expected.num_whole) * size]
        ):
            known = expected.num_whole  # as is usual; else their keys are compared
            behind = int(noted.keys[known - 1])
        rest = noted.keys[:0]
        if known < num:
            rest = block_keys(tokens, size, seed, first=first + known, parent_key=behind)
            common = min(len(rest), len(noted.keys) - known)
            differ = (rest[:common] != noted.keys[known : known + common]).nonzero()[0]
            same = int(differ[0]) if len(differ) else common
            known, rest = known + same, rest[same:]
        if known:
            left = noted.part(known, None)
            self._expected = None
            if len(left.keys):
                num_whole = max(expected.num_whole - known, 0)
                behind = int(noted.keys[known - 1])
                self._expected = _Expected(first + known, behind, seed, num_whole, 0, left)
        return noted.part(None, known), rest

    def _look_up(self, first: int, keys: BlockKeys) -> _Noted:
        """What the ghosts know of inserted blocks, which are none any more; the others are new."""
        rates, sample, num = self._rates, self._rates.sample(first), len(keys)
        cells, uses = np.zeros(num, np.int64), np.ones(num, np.uint8)
        counted = np.zeros(num, np.bool_)
        counted[sample] = True
        found, ghost_cells, ghost_uses = self._ghosts.take(keys[sample])
        cells[sample][found], uses[sample][found] = ghost_cells, ghost_uses
        if len(found):
            # Those between two that are counted are as the next one.
            places = np.arange(num)[sample][found]
            of = np.minimum(places.searchsorted(np.arange(num)), len(places) - 1)
            stands_for = places[of] - np.arange(num)
            near = (stands_for > 0) & (stands_for < rates.stride)
            cells[near], uses[near] = cells[places[of[near]]], uses[places[of[near]]]
        unknown = (cells == 0).nonzero()[0]
        if len(unknown):
            if not self._is_announced or not rates.time:
                self._advance()  # nobody asked since the last such insert: it counts as a request
            self._is_announced = False
            cells[unknown] = rates.now(np.full(len(unknown), UNANNOUNCED, np.int64))
            rates.enter(np.full(np.count_nonzero(counted[unknown]), UNANNOUNCED, np.int64))
        return _Noted(keys, cells, uses, counted)

    def _remember_expected(self) -> None:
        """Another request comes before all blocks of the last one were inserted: note them among the ghosts."""
        expected, self._expected = self._expected, None
        if expected is None:
            return
        keys, cells, uses, counted = expected.noted
        if not expected.num_whole:
            self._rates.give_up(cells[counted])  # only the tail is left: it will never come back as it is
        else:
            self._ghosts_add(keys[counted], cells[counted], uses[counted])

    def _remember_evicted(self) -> None:
        if self._evicted:
            ids = np.concatenate(self._evicted) if len(self._evicted) > 1 else self._evicted[0]
            self._evicted = []
            counted = ids[self._counted[ids]]
            if len(counted):
                self._ghosts_add(self._keys[counted], self._cells[counted], self._uses[counted])
            self._cells[ids] = 0

    def _ghosts_add(self, keys: BlockKeys, cells: Cells, uses: Uses) -> None:
        gone = self._ghosts.add(keys, cells, uses)
        if len(gone):
            self._rates.give_up(gone)


def _digest(tokens: TokenArray) -> int:
    return block_hash(token_bytes(tokens), 0) | 1 if len(tokens) else 0


def _last_two(index: Index) -> tuple[int, int]:
    """The last two blocks of a path, -1 for the second if there is only one."""
    if not isinstance(index, list):
        return int(index[-1]), int(index[-2]) if len(index) > 1 else -1
    start, stop = index[-1]
    if stop - start > 1:
        return stop - 1, stop - 2
    return start, index[-2][1] - 1 if len(index) > 1 else -1
