"""Whether a graph computes what a plain forward does, told apart from what rounding does.

Two questions, since neither answers for the other. *Attention alone*, over random keys, is held against torch's: there
rounding is a fraction of a percent, so that one token too few shows in a short context, and a block too few in a long
one. *Logits* of real steps are held against those of the plain forward: they tell of everything else, but behind many
layers in half precision two right forwards may differ by percents.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from radixkv.attention.device_graphs import GraphDevice
from radixkv.attention.flashinfer_graphs import GraphAttention, StepBuffers
from radixkv.attention.interface import AttentionBatch, AttentionSpec
from radixkv.attention.torch_backend import TorchBackend

__all__ = ["Tolerances", "attention_problem", "logits_problem"]

# The longest context that is tried, and the blocks that all contexts are made of.
_LONGEST, _NUM_BLOCKS = 2048, 64


@dataclass(frozen=True)
class Tolerances:
    """Relative differences that rounding explains.

    Attributes:
        logits: Of the usual row of a step.
        worst_logits: Of the row that differs most: of many, one may be close to choosing another expert.
        attention: Of one head's output for one row.
    """

    logits: float
    worst_logits: float
    attention: float

    @staticmethod
    def of(dtype: torch.dtype, device_type: str) -> Tolerances:
        """Those of a model with parameters of a dtype.

        Rounding to bfloat16 is wrong by 0.2 % at most; what becomes of that in the logits of a deep model is an
        estimate.
        """
        if dtype == torch.bfloat16:
            return Tolerances(0.05, 0.2, 0.02)
        if dtype == torch.float16:
            return Tolerances(0.02, 0.1, 0.01)
        if device_type != "cpu":  # accelerators may multiply fp32 in TF32
            return Tolerances(0.01, 0.05, 0.01)
        return Tolerances(1e-3, 4e-3, 1e-3)


def logits_problem(right: Tensor, found: Tensor, tolerances: Tolerances) -> str | None:
    """What is wrong with logits `[rows, vocabulary]`, if they should be `right`; None if nothing is."""
    right, found = right.double(), found.double()
    spread = (right - right.mean(dim=-1, keepdim=True)).norm(dim=-1).clamp(min=1e-30)
    differences = (right - found).norm(dim=-1) / spread
    usual, worst = float(differences.median()), float(differences.max())
    if usual < tolerances.logits and worst < tolerances.worst_logits:  # not true of NaN
        return None
    return (
        f"other logits than the plain forward (relative difference {usual:.2g} of the usual row, {worst:.2g} of the "
        f"worst of {len(right)})"
    )


def attention_problem(
    attention: GraphAttention,
    device: GraphDevice,
    specs: Collection[AttentionSpec],
    dtype: torch.dtype,
    buffers: StepBuffers,
    block_size: int,
    max_blocks: int,
    tolerances: Tolerances,
) -> str | None:
    """What is wrong with the attention of a graph; None if nothing is.

    It is recorded as the forward of the model is, and replayed for contexts unlike those that it was recorded for:
    short and long ones, with and without rows of padding, with and without sinks.

    Args:
        attention: Of the graph. What is planned and sent is arbitrary afterwards.
        device: Records.
        specs: Kinds of layers.
        dtype: Of queries, keys and values.
        buffers: Where `attention` finds its page ids.
        block_size: Tokens per block.
        max_blocks: Blocks of a sequence, at most.
        tolerances: What rounding explains.
    """
    trial = _Trial(attention, specs, dtype, buffers, block_size)
    trial.send(np.empty(0, np.int64), np.empty((0, 1), np.int32))
    captured = device.capture(trial.forward)
    draw = np.random.default_rng(attention.rows)
    for contexts in _shapes(attention.rows, min(max_blocks * block_size, _LONGEST), block_size):
        blocks = draw.integers(
            0, _NUM_BLOCKS, (len(contexts), -(-int(contexts.max()) // block_size)), np.int32
        )
        trial.send(contexts, blocks)
        captured.replay()
        for spec, difference in trial.differences(captured.output, contexts, blocks):
            if not difference < tolerances.attention:
                return (
                    f"attention of {spec} is another than torch's (relative difference {difference:.2g}, contexts of "
                    f"{int(contexts.min())} to {int(contexts.max())} tokens)"
                )
    return None


def _shapes(rows: int, longest: int, block_size: int) -> Iterator[npt.NDArray[np.int64]]:
    """Context lengths of the steps to try."""
    borders = [longest, 1, block_size, block_size + 1, longest // 3, 2 * block_size - 1, 3, longest // 9]
    ragged = np.array([*borders, 3 * block_size, 5, block_size - 1, longest // 2, 2], np.int64)
    few = np.arange(rows) % (3 * block_size) + 1  # where one token more or less shows most
    several = np.where(np.arange(rows) < len(ragged), np.resize(ragged, rows), few).clip(1, longest)
    yield few.clip(1, longest)
    yield several
    if rows > 1:
        yield several[: max(1, rows - 1 - rows // 4)]


class _Trial:
    """Random queries, keys, values and sinks for every kind of layers."""

    def __init__(
        self,
        attention: GraphAttention,
        specs: Collection[AttentionSpec],
        dtype: torch.dtype,
        buffers: StepBuffers,
        block_size: int,
    ) -> None:
        self._attention, self._buffers, self._block_size = attention, buffers, block_size
        place = buffers.inputs(1).device
        generator = torch.Generator(place).manual_seed(attention.rows)

        def randn(*shape: int, spread: float = 1.0) -> Tensor:
            drawn = torch.randn(shape, generator=generator, device=place, dtype=torch.float32)
            return (drawn * spread).to(dtype)

        self._torch = TorchBackend(place)
        self._layers: list[tuple[AttentionSpec, Tensor, Tensor, Tensor, Tensor]] = []
        for spec in specs:
            page = _NUM_BLOCKS + 1, block_size, spec.num_kv_heads
            # Scores that spread by 1: every token of a context counts.
            query = randn(
                attention.rows, spec.num_heads, spec.key_dim, spread=1 / (spec.scale * spec.key_dim**0.5)
            )
            keys, values = randn(*page, spec.key_dim), randn(*page, spec.value_dim)
            self._layers.append((spec, query, keys, values, randn(spec.num_heads)))

    def forward(self) -> Tensor:
        found = []
        for spec, query, keys, values, sinks in self._layers:
            for some in (None, sinks):
                out = self._attention.run(spec, query, keys, values, some)
                found.append(out.to(torch.float32).flatten())
        return torch.cat(found)

    def send(self, contexts: npt.NDArray[np.int64], blocks: npt.NDArray[np.int32]) -> None:
        rows = self._attention.rows
        self._attention.plan(contexts)
        self._buffers.send(
            np.zeros((3, rows), np.int64), self._attention.tables, blocks, rows - len(contexts), _NUM_BLOCKS
        )

    def differences(
        self, found: Tensor, contexts: npt.NDArray[np.int64], blocks: npt.NDArray[np.int32]
    ) -> Iterator[tuple[AttentionSpec, float]]:
        """Of each kind, without and with sinks: the relative difference of the head and row that differs most."""
        count = len(contexts)
        batch = AttentionBatch(
            np.arange(count + 1, dtype=np.int32), contexts.astype(np.int32), blocks, self._block_size, count
        )
        sizes = [query.shape[0] * spec.num_heads * spec.value_dim for spec, query, *_ in self._layers]
        parts = iter(found.split([size for size in sizes for _ in range(2)]))
        for spec, query, keys, values, sinks in self._layers:
            for some in (None, sinks.float()):
                self._torch.plan(batch, [spec])
                right = self._torch.run(spec, query[:count].float(), keys.float(), values.float(), some)
                part = next(parts).view(-1, spec.num_heads, spec.value_dim)[:count]
                difference = (part - right).norm(dim=-1) / right.norm(dim=-1).clamp(min=1e-30)
                yield spec, float(difference.max())
