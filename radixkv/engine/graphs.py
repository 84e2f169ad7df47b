"""Decode steps as CUDA graphs: one launch instead of hundreds, where that is known to give the same logits."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from radixkv.attention.device_graphs import Captured, GraphDevice, NotCapturable
from radixkv.attention.flashinfer_backend import FlashInferBackend
from radixkv.attention.flashinfer_graphs import GraphAttention, StepBuffers, sharing_pays
from radixkv.attention.interface import AttentionBatch, AttentionSpec
from radixkv.core.errors import first_line
from radixkv.engine.graph_checks import Tolerances, attention_problem, logits_problem
from radixkv.sched.step import Step
from radixkv.store.kv_store import KVStore

__all__ = ["DecodeGraphs", "GraphForward", "graph_sizes"]

_log = logging.getLogger(__name__)

# A forward over `[3, rows]` token ids, positions and slots, which lie in memory that stays where it is.
GraphForward = Callable[[Tensor, GraphAttention], Tensor]


def graph_sizes(most: int) -> list[int]:
    """Batch sizes that graphs are made for, ascending, up to `most`: 1, 2, 4, 8, then in steps that grow.

    Rows of padding cost little, as long as the weights are what takes the time; each size costs memory.
    """
    sizes = [1, 2, 4]
    size = 8
    while size < most:
        sizes.append(size)
        size += 8 if size < 64 else 16 if size < 128 else 32 if size < 256 else 64
    return [one for one in sizes if one < most] + [most]


@dataclass
class _SizedGraph:
    """A graph, and the steps that it has been held against the plain forward for.

    Attributes:
        attention: Its attention.
        captured: What was recorded.
        longest: Longest context of those steps; 0 before the first of them.
        padded: Whether any had rows of padding.
    """

    attention: GraphAttention
    captured: Captured
    longest: int = 0
    padded: bool = False

    def is_unlike(self, step: Step) -> bool:
        """Whether a step is of another kind than those: the first one padded, or several times as long."""
        if step.num_seqs < self.attention.rows and not self.padded:
            return True
        return not self.longest or int(step.context_lens.max()) >= 4 * max(self.longest, 16)

    def has_agreed(self, step: Step) -> None:
        """Note a step."""
        self.longest = max(self.longest, int(step.context_lens.max()))
        self.padded |= step.num_seqs < self.attention.rows


class DecodeGraphs:
    """Runs decode steps by replaying graphs, one for each batch size of a ladder, recorded when it is first needed.

    A graph is believed only after its attention alone has been held against torch's, and its logits against those of
    the plain forward: those of its first step, of the first one with rows of padding, and whenever contexts are four
    times as long. If they differ, or it cannot be recorded, steps are run without, and why is logged once.

    Graphs hold for weights, adapters and hooks as they were: see `under`.

    Args:
        store: The pool.
        backend: Computes the attention of all `specs`.
        device: Records graphs.
        specs: Kinds of layers.
        forward: What is recorded: the whole forward of the model.
        max_rows: Sequences in a step, at most.
        max_len: Tokens of a sequence, at most.
        tolerances: What rounding explains.

    Attributes:
        reason: Why steps are run without graphs, or further batch sizes are; None if nothing is wrong.
        num_replays: Steps that were replayed.
        num_compared: Steps that were replayed and run without a graph, too, and are not counted otherwise.
        num_planned_ahead: Of these, steps whose plan was made while the device computed the step before.
    """

    def __init__(
        self,
        store: KVStore,
        backend: FlashInferBackend,
        device: GraphDevice,
        specs: Collection[AttentionSpec],
        forward: GraphForward,
        *,
        max_rows: int,
        max_len: int,
        tolerances: Tolerances,
    ) -> None:
        self.reason: str | None = None
        self.num_replays = 0
        self.num_planned_ahead = 0
        self.num_compared = 0
        self._told = False
        self._store = store
        self._backend = backend
        self._device = device
        self._specs = list(dict.fromkeys(specs))
        self._forward = forward
        self._tolerances = tolerances
        self._ladder = graph_sizes(max_rows)
        self._blocks = min(-(-max_len // store.block_size), store.num_blocks)
        self._buffers: StepBuffers | None = None
        self._graphs: dict[int, _SizedGraph] = {}
        self._circumstances: Any = None

    @property
    def sizes(self) -> list[int]:
        """Batch sizes that there is a graph for."""
        return sorted(self._graphs)

    def under(self, circumstances: Any) -> None:
        """Say under what weights, adapters and hooks the next step is run; graphs of others are dropped."""
        if circumstances != self._circumstances:
            self.forget()
            self.reason = None
            self._circumstances = circumstances

    def forget(self) -> None:
        """Drop all graphs, and the memory that they share."""
        self._graphs.clear()
        self._buffers = None

    # -- one step ---------------------------------------------------------------------------------------------

    def run(self, step: Step, plain: Callable[[], Tensor]) -> Tensor | None:
        """The logits of a step, or None if it is to be run without a graph.

        Args:
            step: Any step.
            plain: Runs the step without a graph; called where a graph is held against it.

        Returns:
            float32 `[S, vocabulary]`, after each sequence, in memory of their own.
        """
        if not self._fits(step):
            return None
        size = self._size_for(step.num_seqs)
        if size is None:
            return None
        graph = self._graphs.get(size) or self._new(size)
        if graph is None:
            return None
        ahead = graph.attention.is_planned(step.context_lens)
        try:
            logits = self._replay(graph, step)
        except Exception as error:
            self._graphs.pop(size, None)
            self._give_up(f"a graph for {size} sequences failed: {_why(error)}")
            return None
        if graph.is_unlike(step):
            return self._compared(graph, step, logits, plain)
        self.num_replays += 1
        self.num_planned_ahead += ahead
        self._look_ahead(graph.attention, step)
        return logits

    def record_all(self) -> None:
        """Record what graphs are missing, the largest first, whose memory the others then share."""
        for size in reversed(self._ladder):
            if self.reason is None and size not in self._graphs:
                self._new(size)

    def _fits(self, step: Step) -> bool:
        n = step.num_seqs
        if not n or step.num_decodes != n or len(step.sampling) != n or n > self._ladder[-1]:
            return False
        if not np.array_equal(step.sampling, np.arange(n)):
            return False
        batch = AttentionBatch(
            step.query_starts, step.context_lens, step.block_tables, self._store.block_size, n
        )
        return not sharing_pays(self._backend, batch, self._specs, self._store.layout.dtype.itemsize)

    def _size_for(self, rows: int) -> int | None:
        size = self._ladder[bisect_left(self._ladder, rows)]
        if self.reason is None or size in self._graphs:
            return size
        # Nothing more is recorded; what there is serves smaller batches, too.
        return next((known for known in self.sizes if known >= rows), None)

    def _replay(self, graph: _SizedGraph, step: Step) -> Tensor:
        if not graph.attention.is_planned(step.context_lens):
            graph.attention.plan(step.context_lens)
        self._send(graph.attention, step)
        graph.captured.replay()
        # The next replay overwrites its output.
        return graph.captured.output[: step.num_seqs].to(torch.float32, copy=True)

    def _look_ahead(self, attention: GraphAttention, step: Step) -> None:
        """While the device computes, plan for the same sequences with one token more.

        Nothing depends on it: if it fails, so will the plan of the next step, in its own time.
        """
        try:
            lengths = step.context_lens + 1
            if -(-int(lengths.max()) // self._store.block_size) <= self._blocks:
                attention.plan(lengths)
        except Exception as error:
            attention.forget_plan()
            if not self._told:
                self._told = True
                _log.warning("a decode step could not be planned ahead: %s", _why(error))

    def _send(self, attention: GraphAttention, step: Step) -> None:
        assert self._buffers is not None
        n, rows = step.num_seqs, attention.rows
        inputs = np.zeros((3, rows), np.int64)
        inputs[:, :n] = step.token_ids, step.positions, step.slot_mapping
        inputs[2, n:] = self._scratch_slots(rows - n)
        self._buffers.send(inputs, attention.tables, step.block_tables, rows - n, self._store.scratch_block)

    def _scratch_slots(self, count: int) -> npt.NDArray[np.int64]:
        size = self._store.block_size
        return np.arange(count) % size + self._store.scratch_block * size

    # -- recording, and whether it is right -------------------------------------------------------------------

    def _new(self, size: int) -> _SizedGraph | None:
        """A graph whose attention has been tried; None if there is none, and why is told."""
        try:
            # What is made here is written to inside and outside of inference mode; leaving it turns gradients on.
            with torch.inference_mode(False), torch.no_grad():
                graph = self._record(size)
                problem = self._attention_problem(graph.attention)
        except Exception as error:
            self._give_up(_why(error))
            return None
        if problem is not None:
            self._refuse(size, problem)
            return None
        self._graphs[size] = graph
        return graph

    def _attention_problem(self, attention: GraphAttention) -> str | None:
        assert self._buffers is not None
        return attention_problem(
            attention,
            self._device,
            self._specs,
            self._store.layout.dtype,
            self._buffers,
            self._store.block_size,
            self._blocks,
            self._tolerances,
        )

    def _compared(self, graph: _SizedGraph, step: Step, found: Tensor, plain: Callable[[], Tensor]) -> Tensor:
        """Run a step that was replayed without its graph, too, and believe the latter.

        The plain forward comes last: whatever a wrong graph may have written to this step's slots is overwritten.
        """
        logits = plain()
        self.num_compared += 1
        problem = logits_problem(logits, found, self._tolerances)
        if problem is None:
            graph.has_agreed(step)
        else:
            self._refuse(graph.attention.rows, problem)
        return logits

    def _refuse(self, size: int, problem: str) -> None:
        """What is wrong with one is likely wrong with all."""
        self.forget()
        self._give_up(f"a graph for {size} sequences gave {problem}")

    def _record(self, size: int) -> _SizedGraph:
        """A graph recorded over inputs that are all padding."""
        if self._buffers is None:
            windows = list(dict.fromkeys(spec.window for spec in self._specs))
            self._buffers = StepBuffers(
                self._backend.transfers, windows, self._ladder[-1], self._store.block_size, self._blocks
            )
        attention = GraphAttention(
            self._backend, self._specs, self._store.layout.dtype, size, self._buffers, self._store.block_size
        )
        attention.plan(np.empty(0, np.int64))
        inputs = np.zeros((3, size), np.int64)
        inputs[2] = self._scratch_slots(size)
        no_tables = np.empty((0, 1), np.int32)
        self._buffers.send(inputs, attention.tables, no_tables, size, self._store.scratch_block)
        place = self._buffers.inputs(size)
        return _SizedGraph(attention, self._device.capture(lambda: self._forward(place, attention)))

    def _give_up(self, reason: str) -> None:
        self.reason = reason
        _log.warning("decode steps run without further CUDA graphs: %s", reason)


def _why(error: Exception) -> str:
    text = first_line(error)
    return text if isinstance(error, NotCapturable) else f"{type(error).__name__}: {text}"
