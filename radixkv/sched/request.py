"""What is asked, and the streams of tokens that answer it."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from radixkv.core.eviction import Retention
from radixkv.core.namespace import Namespace, canonical_namespace
from radixkv.core.tokens import TokenArray

if TYPE_CHECKING:
    from radixkv.sched.scheduler import Scheduler

Key = tuple[int, int]

# States of a sequence.
WAITING, RUNNING, SWAPPED, FINISHED = "waiting", "running", "swapped", "finished"


class Request:
    """A prompt and how many completions of which length are wanted. Made by `Scheduler.add`.

    Attributes:
        rid: What the caller calls it; unique among unfinished requests.
        tokens: `int64[...]`, the prompt.
        namespace: What must be equal beside the tokens for KV to be shared.
        max_new_tokens: Output tokens of each sequence.
        n: Completions that were asked for; forks made later are not counted.
        retention: How long its blocks are to be kept once cached; None leaves it to the policy.
        arrival: Rank among all requests, from 0.
        sequences: Its sequences, all of them from the start; forks are appended.
        num_cached_tokens: Prompt tokens that were cached when it was first admitted; 0 before.
        note: What a listener of the tree said of it (`Match.note`) when it was first admitted, or looked up
            before that; else None.
    """

    __slots__ = (
        "_asked",
        "_canonical",
        "_counted",
        "_first",
        "arrival",
        "max_new_tokens",
        "n",
        "namespace",
        "note",
        "num_cached_tokens",
        "retention",
        "rid",
        "sequences",
        "tokens",
    )

    def __init__(
        self,
        rid: Hashable,
        tokens: TokenArray,
        namespace: Namespace,
        max_new_tokens: int,
        n: int,
        arrival: int,
        retention: Retention | None = None,
    ) -> None:
        self.rid = rid
        self.tokens = tokens
        self.max_new_tokens = max_new_tokens
        self.n = n
        self.arrival = arrival
        self.retention = retention
        self.sequences: list[Sequence] = []
        self.num_cached_tokens = 0
        self.note: object | None = None
        self._asked = False  # whether the tree was asked for its prefix before
        self._first: Sequence | None = None  # the one whose admission counts as the request's
        self._counted = False  # that admission is in the statistics
        self.set_namespace(namespace)

    def set_namespace(self, namespace: Namespace) -> None:
        """Look for its prefix elsewhere from now on.

        Args:
            namespace: Where.

        Raises:
            InvalidRequestError: That is no namespace.
        """
        self._canonical = canonical_namespace(namespace)
        self.namespace = namespace

    @property
    def state(self) -> str:
        """That of its sequences: "running" if one of them is, else "swapped", "waiting" or "finished"."""
        states = {seq.state for seq in self.sequences}
        return next(state for state in (RUNNING, SWAPPED, WAITING, FINISHED) if state in states)

    def __repr__(self) -> str:
        return f"Request(rid={self.rid!r}, prompt={len(self.tokens)}, n={self.n}, state={self.state!r})"


class Sequence:
    """One stream of tokens: a prompt and what was generated behind it. Made by `Scheduler.add` and `Scheduler.fork`.

    *Computed* tokens are those whose KV is written. While a sequence decodes, all but the last token are.

    Attributes:
        request: What it answers.
        index: Which of the request's sequences it is, from 0.
        row: Its row in the scheduler's arrays while it runs, else -1.
        state: "waiting", "running", "swapped" or "finished".
        finish_reason: None until it is finished.
        num_preemptions: How often its blocks were taken back.
    """

    __slots__ = (
        "_blocker",
        "_followers",
        "_high_water",
        "_host",
        "_host_computed",
        "_leader",
        "_prefilling",
        "_scheduler",
        "_started",
        "_tokens",
        "_waiters",
        "finish_reason",
        "index",
        "key",
        "num_preemptions",
        "request",
        "row",
        "state",
    )

    def __init__(self, scheduler: Scheduler, request: Request, index: int, tokens: TokenArray) -> None:
        self.request = request
        self.index = index
        self.key: Key = (request.arrival, index)
        self.row = -1
        self.state = WAITING
        self.finish_reason: str | None = None
        self.num_preemptions = 0
        self._scheduler = scheduler
        self._tokens = tokens  # what was known when it last took or gave back a row
        self._started = False  # it was admitted before
        self._prefilling = False  # it runs, and has made no token since it was admitted
        self._leader: Sequence | None = None  # computes this one's known tokens too; it forks from it then
        self._followers: list[Sequence] = []  # the other way round
        self._high_water = 0  # the most tokens it ever had computed
        self._host: npt.NDArray[np.int32] | None = None  # host block of each logical block, -1 if it has none
        self._host_computed = 0  # tokens that were computed when it was swapped out
        self._blocker: Sequence | None = None  # who computes a prefix that this one waits for
        self._waiters: list[tuple[int, Sequence]] = []  # who waits until so many tokens are computed

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.tokens)

    @property
    def num_tokens(self) -> int:
        """Known tokens, prompt and output."""
        if self.row >= 0:
            return self._scheduler._rows.known.item(self.row)
        return len(self._tokens)

    @property
    def num_computed(self) -> int:
        """Tokens whose KV is written, in the pool or, while it is swapped out, in the host tier."""
        if self.row >= 0:
            return self._scheduler._rows.computed.item(self.row)
        return self._host_computed

    @property
    def block_table(self) -> npt.NDArray[np.int32]:
        """`int32[num_blocks]`, a copy: the blocks of the pool that it holds, in order; empty while it has no row."""
        if self.row < 0:
            return np.empty(0, np.int32)
        return self._scheduler._rows.table(self.row).copy()

    @property
    def host_blocks(self) -> npt.NDArray[np.int32]:
        """`int32[num_blocks]`, a copy: where each of its blocks is in the host tier, -1 for one that is not there.

        Empty unless it was swapped out.
        """
        return np.empty(0, np.int32) if self._host is None else self._host.copy()

    @property
    def num_output_tokens(self) -> int:
        """Generated tokens."""
        return self.num_tokens - len(self.request.tokens)

    @property
    def output_tokens(self) -> TokenArray:
        """`int64[num_output_tokens]`, a copy: what was generated."""
        start = len(self.request.tokens)
        if self.row >= 0 and len(self._tokens) == start:
            return self._scheduler._rows.new_tokens(self.row).copy()
        return self.all_tokens()[start:]

    def all_tokens(self) -> TokenArray:
        """`int64[num_tokens]`, a copy: prompt and output."""
        if self.row < 0:
            return self._tokens.copy()
        return np.concatenate((self._tokens, self._scheduler._rows.new_tokens(self.row)))

    def fork(self) -> Sequence:
        """`Scheduler.fork` of this one."""
        return self._scheduler.fork(self)

    def __repr__(self) -> str:
        return (
            f"Sequence({self.request.rid!r}, {self.index}, {self.state}, tokens={self.num_tokens}, "
            f"computed={self.num_computed})"
        )
