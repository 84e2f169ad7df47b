"""A trace in memory: the requests, and what can be said about them before anything is replayed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from radixkv.core.errors import InvalidRequestError
from radixkv.core.eviction import Retention
from radixkv.core.tokens import TokenArray
from radixkv.replay.paths import BlockPaths

__all__ = ["HASH_IDS", "Request", "Trace"]

#: The shape of trace whose requests name blocks instead of tokens.
HASH_IDS = "hash_ids"


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a trace.

    Attributes:
        line: Its line in the file, from 1.
        content: int32 or int64: its token ids, or the hash ids of its blocks.
        num_tokens: Tokens of the prompt.
        timestamp: Milliseconds, from any start; None if the trace has none.
        retention: How long its blocks are to be kept, for policies that ask; None if it does not say.
    """

    line: int
    content: npt.NDArray[np.integer]
    num_tokens: int
    timestamp: float | None = None
    retention: Retention | None = None

    def tokens(self) -> TokenArray:
        """`content` as the tree takes it, int64."""
        return self.content.astype(np.int64, copy=False)


class Trace:
    """Requests in the order in which they came.

    Attributes:
        name: Where they are from, for messages.
        shape: "hash_ids", "token_ids", "prompt" or "messages".
        block_size: Tokens in a block: of the trace itself if its requests name blocks, else of the cache that is
            replayed.
        requests: The requests, at least one.
        num_skipped: Lines (or requests) that were left out.
    """

    def __init__(
        self, name: str, shape: str, block_size: int, requests: list[Request], num_skipped: int = 0
    ) -> None:
        self.name = name
        self.shape = shape
        self.block_size = block_size
        self.requests = requests
        self.num_skipped = num_skipped

    def __len__(self) -> int:
        return len(self.requests)

    def __repr__(self) -> str:
        return f"Trace({self.name!r}, {self.shape}, {len(self)} requests, {self.prompt_tokens} tokens)"

    @property
    def by_blocks(self) -> bool:
        """Whether the requests name blocks instead of tokens."""
        return self.shape == HASH_IDS

    @cached_property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(request.num_tokens for request in self.requests)

    @cached_property
    def num_blocks(self) -> int:
        """Blocks that all prompts fill, partly filled ones included."""
        return sum(self.blocks_of(request) for request in self.requests)

    @cached_property
    def longest(self) -> Request:
        """The first of the requests with most tokens."""
        return max(self.requests, key=lambda request: request.num_tokens)

    @cached_property
    def paths(self) -> BlockPaths:
        """The distinct blocks, and when each is used again."""
        tokens = (request.tokens() for request in self.requests)
        if self.by_blocks:
            return BlockPaths(tokens, 1, leave_one=False)
        return BlockPaths(tokens, self.block_size, leave_one=True)

    def blocks_of(self, request: Request) -> int:
        """Blocks that a `request` fills, a partly filled one included."""
        return -(-request.num_tokens // self.block_size)

    def require_room(self, num_blocks: int) -> None:
        """Make sure that every request fits into `num_blocks` blocks.

        Raises:
            InvalidRequestError: One does not; the message names its line and what it needs.
        """
        longest = self.longest
        needed = self.blocks_of(longest)
        if needed > num_blocks:
            raise InvalidRequestError(
                f"{self.name}, line {longest.line}: {longest.num_tokens:,} tokens need {needed:,} blocks of "
                f"{self.block_size}, more than the capacity of {num_blocks:,}: give a capacity of at least {needed}, "
                f"or leave such requests out with skip_bad (--skip-bad)"
            )

    def fitting(self, num_blocks: int) -> Trace:
        """This trace without the requests that do not fit into `num_blocks` blocks; they count as skipped.

        Raises:
            InvalidRequestError: None fits.
        """
        kept = [request for request in self.requests if self.blocks_of(request) <= num_blocks]
        if len(kept) == len(self.requests):
            return self
        if not kept:
            self.require_room(num_blocks)
        return Trace(
            self.name, self.shape, self.block_size, kept, self.num_skipped + len(self.requests) - len(kept)
        )
