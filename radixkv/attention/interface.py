"""What every attention backend promises: planned once a step, run once a layer."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from radixkv.core.errors import InvalidRequestError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "AttentionBackend",
    "AttentionBatch",
    "AttentionSpec",
    "require_fitting",
    "require_whole_heads",
]


@dataclass(frozen=True)
class AttentionSpec:
    """What the attention of one layer computes. Layers with equal specs share a plan.

    A query of head `h` reads the keys and values of head `h // (num_heads // num_kv_heads)`.

    Attributes:
        num_heads: Query heads; a multiple of `num_kv_heads`.
        num_kv_heads: Heads of K and V.
        key_dim: Size of one query or key head.
        value_dim: Size of one value head.
        scale: Factor on the product of query and key, before soft-capping.
        window: Keys that a query can see, itself included (as `LayerLayout.window`); None is all before it.
        softcap: Logits become `softcap * tanh(logit / softcap)`; None is off.

    Raises:
        InvalidRequestError: The numbers describe no attention.
    """

    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    scale: float
    window: int | None = None
    softcap: float | None = None

    def __post_init__(self) -> None:
        if min(self.num_heads, self.num_kv_heads, self.key_dim, self.value_dim) < 1:
            raise InvalidRequestError(
                f"attention needs at least one head and one element per head, got {self}"
            )
        if self.num_heads % self.num_kv_heads:
            raise InvalidRequestError(
                f"{self.num_heads} query heads do not divide among {self.num_kv_heads} KV heads"
            )
        if self.window is not None and self.window < 1:
            raise InvalidRequestError(f"a sliding window holds at least one key, got {self.window}")
        if self.softcap is not None and not self.softcap > 0:
            raise InvalidRequestError(f"a soft cap must be above 0, got {self.softcap}; None turns it off")

    @property
    def group(self) -> int:
        """Query heads that read the same KV head."""
        return self.num_heads // self.num_kv_heads


@dataclass(frozen=True)
class AttentionBatch:
    """The sequences of one step: whose queries lie where, and where their context lies in the pool.

    Entry `i` has the query rows `query_starts[i] .. query_starts[i + 1]`. They are the last tokens of its
    context: with n rows and a context of c tokens they sit at the positions c - n .. c - 1, and each sees the
    positions up to its own. Token p of the context lies in block `block_tables[i, p // block_size]` at offset
    `p % block_size`. Table entries beyond the context are arbitrary and never looked at.

    Attributes:
        query_starts: int32 `[S + 1]`, ascending from 0.
        context_lens: int32 `[S]`, tokens with KV in this step, the queries' own included.
        block_tables: int32 `[S, W]`.
        block_size: Tokens per block.
        num_decodes: The first so many entries have one query each.
    """

    query_starts: npt.NDArray[np.int32]
    context_lens: npt.NDArray[np.int32]
    block_tables: npt.NDArray[np.int32]
    block_size: int
    num_decodes: int = 0

    @property
    def num_entries(self) -> int:
        """Sequences in the step (S)."""
        return len(self.context_lens)

    @property
    def num_tokens(self) -> int:
        """Query rows of all entries together (T)."""
        return int(self.query_starts[-1])

    @cached_property
    def query_lens(self) -> npt.NDArray[np.int32]:
        """int32 `[S]`: query rows of each entry."""
        return np.diff(self.query_starts)

    def check(self, num_blocks: int | None = None) -> None:
        """Raise if the arrays contradict one another. Linear in the blocks in use.

        Args:
            num_blocks: Blocks of the pool; None leaves the ids in use unchecked.

        Raises:
            InvalidRequestError: The first contradiction, with values.
        """
        entries, lens = len(self.context_lens), self.query_lens
        if self.block_size < 1:
            raise InvalidRequestError(f"a block holds at least one token, got {self.block_size}")
        if len(self.query_starts) != entries + 1 or self.block_tables.shape[:1] != (entries,):
            raise InvalidRequestError(
                f"{entries} contexts need {entries + 1} query starts and {entries} block tables, got "
                f"{len(self.query_starts)} and {self.block_tables.shape}"
            )
        if self.query_starts[0] != 0 or (lens < 0).any():
            raise InvalidRequestError(f"query starts must ascend from 0, got {self.query_starts}")
        if (lens > self.context_lens).any():
            raise InvalidRequestError(
                f"a context counts its queries: queries {lens}, contexts {self.context_lens}"
            )
        if not 0 <= self.num_decodes <= entries or (lens[: self.num_decodes] != 1).any():
            raise InvalidRequestError(f"{self.num_decodes} decodes in front, but query lengths are {lens}")
        used = -(-self.context_lens // self.block_size)
        if entries and used.max(initial=0) > self.block_tables.shape[1]:
            raise InvalidRequestError(
                f"a context of {self.context_lens.max()} tokens needs {used.max()} blocks of "
                f"{self.block_size}, its table has {self.block_tables.shape[1]}"
            )
        if num_blocks is not None:
            ids = self.block_tables[np.arange(self.block_tables.shape[1]) < used[:, None]]
            if len(ids) and not (ids.min() >= 0 and ids.max() < num_blocks):
                raise InvalidRequestError(f"block ids in use must lie in 0..{num_blocks - 1}, got {ids}")


@runtime_checkable
class AttentionBackend(Protocol):
    """Attention over the paged pool.

    `plan` is called once a step, `run` once a layer. A backend keeps one plan: the next `plan` replaces it.
    The step's own keys and values must be in the pool before `run`. A backend never writes to the pool.
    Not thread-safe: one object per model being run.
    """

    name: str

    def unsupported(self, spec: AttentionSpec) -> str | None:
        """Why this backend cannot run layers of the kind `spec`; None if it can."""

    def plan(self, batch: AttentionBatch, specs: Collection[AttentionSpec]) -> None:
        """Prepare a step. The arrays of `batch` must not change until the last `run` of the step.

        Args:
            batch: The step.
            specs: The distinct kinds of layers that `run` will be called for.
        """

    def run(
        self, spec: AttentionSpec, query: Tensor, keys: Tensor, values: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        """Attention of one layer.

        Args:
            spec: One of the planned kinds.
            query: `[T, num_heads, key_dim]`, rotated.
            keys: The layer's pool `[num_blocks, block_size, num_kv_heads, key_dim]`, rotated keys.
            values: The same with `value_dim`.
            sinks: `[num_heads]`, a logit of each head that takes its share of the softmax and has no value;
                neither scaled nor capped. None: no sinks.

        Returns:
            `[T, num_heads, value_dim]` in the dtype of `query`. The caller may write to it; it is valid until
            the next `run`.
        """


def require_fitting(
    spec: AttentionSpec, num_rows: int, block_size: int, query: Tensor, keys: Tensor, values: Tensor
) -> None:
    """Make sure that tensors given to `run` are those of a kind of layers and of the step.

    Args:
        spec: The kind.
        num_rows: Query rows of the step.
        block_size: Tokens per block.
        query: As in `AttentionBackend.run`, like the others.
        keys: The layer's pool.
        values: The same.

    Raises:
        InvalidRequestError: Shapes or dtypes are others.
    """
    page = (keys.shape[0], block_size, spec.num_kv_heads)
    wanted = (
        (num_rows, spec.num_heads, spec.key_dim),
        (*page, spec.key_dim),
        (*page, spec.value_dim),
    )
    given = tuple(tuple(tensor.shape) for tensor in (query, keys, values))
    if given != wanted:
        raise InvalidRequestError(f"queries, keys and values must be {wanted} for {spec}, got {given}")
    if not query.dtype == keys.dtype == values.dtype:
        raise InvalidRequestError(
            f"queries, keys and values must have one dtype, got {query.dtype}, {keys.dtype}, {values.dtype}"
        )


def require_whole_heads(keys: Tensor, values: Tensor) -> None:
    """Make sure that kernels can read a head of the pool in one go.

    Raises:
        InvalidRequestError: The elements of a head do not lie side by side.
    """
    if keys.stride(-1) != 1 or values.stride(-1) != 1:
        raise InvalidRequestError(
            f"the elements of a head must lie side by side in the pool, got strides {keys.stride()} for keys and "
            f"{values.stride()} for values"
        )
