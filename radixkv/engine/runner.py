"""Forwarding a step of the scheduler through a transformers model."""

from __future__ import annotations

import logging
import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from radixkv.attention import AttentionBackend, AttentionBatch, AttentionSpec, make_backend
from radixkv.attention.flashinfer_backend import FlashInferBackend
from radixkv.attention.flashinfer_graphs import GraphAttention, graph_device
from radixkv.core.errors import InvalidRequestError, UnsupportedModelError
from radixkv.engine.gathered import gathered_cache
from radixkv.engine.graph_checks import Tolerances
from radixkv.engine.graphs import DecodeGraphs, GraphForward
from radixkv.engine.runner_probe import RunnerProbe
from radixkv.hf.attention_survey import LayerKind
from radixkv.hf.compat import ForwardCall, text_config
from radixkv.hf.own_forward import own_forward
from radixkv.hf.paged import PagedForward, PoolWriter, SlotWriter
from radixkv.hf.plug import HFPlug
from radixkv.hf.rope import RopeRule
from radixkv.hf.routing import Routing, attention_configs
from radixkv.hf.support import base_of, unwrap_model
from radixkv.sched.step import Step
from radixkv.store.copy_stream import to_device
from radixkv.store.kv_store import KVStore

__all__ = ["GraphLimits", "ModelRunner"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class GraphLimits:
    """How large the decode steps of an engine can be.

    Attributes:
        max_rows: Sequences in a step.
        max_len: Tokens of a sequence.
    """

    max_rows: int
    max_len: int


class ModelRunner:
    """Runs steps on a causal LM of transformers, whose KV lives in a pool.

    All sequences of a step go through the model as one row of tokens without padding, each layer's attention
    is computed by a backend from the pool, and the head sees the last token of each sequence that samples.
    Whether the model bears that is found out once, by comparing a small ragged batch with plain forwards. A
    model that does not runs one sequence at a time instead.

    The model object stays as it is found, whatever happens in a forward.

    Args:
        model: A causal LM of transformers, or a PEFT wrapper around one.
        store: The pool, made for this model.
        backend: An attention backend, or the name of one.
        graphs: For what decode steps graphs may be recorded; None: for none.

    Attributes:
        fallback_reason: Why the model runs one sequence at a time; None if it does not.
        rope: Up to which length keys stay right. Nothing here refuses longer sequences.
        vocab_size: Logits of each token; may exceed the number of token ids.
        graphs: Runs decode steps as CUDA graphs; None if nothing here can.
        no_graphs_reason: Why nothing can; None if something does.
        watched_reason: Why the last step was run without them all the same; None if it need not be.

    Raises:
        InvalidRequestError: No transformers model, or it does not fit the store.
        UnsupportedModelError: Not even one sequence at a time gives the logits of a plain forward.
    """

    def __init__(
        self,
        model: Any,
        store: KVStore,
        backend: AttentionBackend | str = "auto",
        graphs: GraphLimits | None = None,
    ) -> None:
        self.model = unwrap_model(model)
        _refuse_prompt_learning(model)
        self.store = store
        device = store.layout.device
        if next(self.model.parameters()).device != device:
            raise InvalidRequestError(
                f"the pool is on {device}, the model is not: make a pool for this model"
            )
        self.backend = make_backend(backend, device) if isinstance(backend, str) else backend
        self.rope = RopeRule.of(self.model)
        self.vocab_size = int(text_config(self.model).vocab_size)
        self.fallback_reason: str | None = None
        self._base = base_of(self.model)
        self._call = ForwardCall(self.model)
        self._base_call = ForwardCall(self._base)
        self._configs = attention_configs(self.model)
        self._writer = PoolWriter(store)
        self._kinds: dict[Any, LayerKind] = {}
        self._specs: list[AttentionSpec] = []
        self._picks_logits = self._call.accepts("logits_to_keep")
        self._find_out()
        self._patched = False
        self._told: set[str] = set()
        self.watched_reason: str | None = None
        self.graphs: DecodeGraphs | None = None
        self.no_graphs_reason = self._make_graphs(graphs)

    def execute(self, step: Step) -> Tensor:
        """Run the forward of a step. Block moves are the caller's, and come first.

        Args:
            step: From the scheduler.

        Returns:
            float32 `[k, vocab_size]`: logits after the last token of each distinct entry of `step.sampling`,
            in ascending order of entries. On the device of the model.
        """
        if len(step.token_ids) == 0:
            return torch.empty(0, self.vocab_size, device=self.store.layout.device)
        entries = np.unique(step.sampling)

        def forward() -> Tensor:
            if self.fallback_reason is None:
                return self._flattened(self.store, self._writer, step, entries)
            return self._one_by_one(self.store, step, entries)

        with torch.no_grad():  # not inference mode: what a model keeps of a forward must stay usable
            if self.graphs is not None and self._nothing_watches():
                logits = self.graphs.run(step, lambda: own_forward(forward).float())
                if logits is not None:
                    return logits
            return own_forward(forward).float()

    def under(self, circumstances: Any, patched: bool = False) -> None:
        """Say under what weights, adapters and hooks the next steps run: graphs hold for the same ones only.

        Args:
            circumstances: Compared by `==`.
            patched: Whether hooks or other forwards than its own are in place inside the model.
        """
        self._patched = patched
        if self.graphs is not None:
            self.graphs.under((circumstances, torch.get_float32_matmul_precision()))

    def record_graphs(self) -> None:
        """Record graphs for all sizes of decode steps, if there are to be any."""
        if self.graphs is not None and self._nothing_watches():
            with torch.no_grad():
                self.graphs.record_all()

    # -- one row of tokens ------------------------------------------------------------------------------------

    def _flattened(
        self, store: KVStore, writer: PoolWriter, step: Step, entries: npt.NDArray[np.int32]
    ) -> Tensor:
        device = store.layout.device
        last = step.query_starts[entries + 1].astype(np.int64) - 1
        inputs = _to_device(device, step.token_ids, step.positions, step.slot_mapping, last)
        ids, positions, slots, keep = inputs
        writer.aim(step.slot_mapping, slots)
        batch = AttentionBatch(
            step.query_starts, step.context_lens, step.block_tables, store.block_size, step.num_decodes
        )
        self.backend.plan(batch, self._specs)
        forward = PagedForward(store, self.backend, self._kinds, writer)
        routing = Routing(self._configs, forward)
        logits: Tensor = routing.around(
            lambda: self._forward(ids[None], positions[None], forward.cache, keep)
        )
        forward.check_complete()
        return logits

    def _forward(self, ids: Tensor, positions: Tensor, cache: Any, keep: Tensor | int) -> Tensor:
        """Logits `[k, vocab]` at the positions `keep` (or of the last so many) of one row."""
        sampled = keep if isinstance(keep, int) else keep.shape[0]
        call = self._call if sampled else self._base_call
        arguments: dict[str, Any] = {"input_ids": ids, call.cache_name: cache, "use_cache": True}
        if call.accepts("position_ids"):
            arguments["position_ids"] = positions
        if not sampled:  # in the middle of prompts: nothing is asked of the head
            self._base(**arguments)
            return ids.new_empty(0, self.vocab_size, dtype=torch.float32)
        if self._picks_logits:
            arguments["logits_to_keep"] = keep
        output = self.model(**arguments)
        logits: Tensor = output.logits if hasattr(output, "logits") else output[0]
        if not self._picks_logits:
            logits = logits[:, -keep:] if isinstance(keep, int) else logits[:, keep]
        return logits[0]

    # -- decodes as graphs ------------------------------------------------------------------------------------

    def _make_graphs(self, limits: GraphLimits | None) -> str | None:
        if limits is None:
            return "they are switched off"
        device = graph_device(self.backend)
        if device is None:
            return f"attention runs on {self.backend.name} on {self.store.layout.device}"
        if self.fallback_reason is not None:
            return f"sequences are run one by one: {self.fallback_reason}"
        assert isinstance(self.backend, FlashInferBackend)
        for spec in self._specs:
            reason = self.backend.fallback_reason(spec, self.store.layout.dtype)
            if reason is not None:
                return f"FlashInfer does not compute all layers: {reason}"
        self.graphs = DecodeGraphs(
            self.store,
            self.backend,
            device,
            self._specs,
            _weakly(self),
            max_rows=limits.max_rows,
            max_len=limits.max_len,
            tolerances=Tolerances.of(next(self.model.parameters()).dtype, self.store.layout.device.type),
        )
        return None

    def _nothing_watches(self) -> bool:
        """Whether nothing is in place that wants to see each forward: a replay calls no Python."""
        reason = None
        if torch.is_autocast_enabled(self.store.layout.device.type):
            reason = "autocast is on"
        elif self._patched or _watched_globally() or any(map(_is_watched, (self.model, self._base))):
            reason = "hooks or replaced forwards are in place, which a replay would not call"
        self.watched_reason = reason
        if reason is not None and reason not in self._told:
            self._told.add(reason)
            _log.warning("decode steps run without CUDA graphs: %s", reason)
        return reason is None

    def _from_buffers(self, inputs: Tensor, attention: GraphAttention) -> Tensor:
        """`[rows, vocabulary]` logits of one token of each of some sequences."""
        ids, positions, slots = inputs
        writer = SlotWriter(self.store, slots)
        forward = PagedForward(self.store, attention, self._kinds, writer, scratch=True)
        logits: Tensor = Routing(self._configs, forward).around(
            lambda: self._forward(ids[None], positions[None], forward.cache, attention.rows)
        )
        forward.check_complete()
        return logits

    # -- one sequence at a time -------------------------------------------------------------------------------

    def _one_by_one(self, store: KVStore, step: Step, entries: npt.NDArray[np.int32]) -> Tensor:
        ids, positions = _to_device(store.layout.device, step.token_ids, step.positions)
        sampled = set(entries.tolist())
        rows: list[Tensor] = []
        for entry, stop in enumerate(step.context_lens.tolist()):
            a, b = int(step.query_starts[entry]), int(step.query_starts[entry + 1])
            cache = gathered_cache(self.model, store, step.block_tables[entry], stop - (b - a), stop)
            keep = 1 if entry in sampled else 0
            rows.append(self._forward(ids[None, a:b], positions[None, a:b], cache, keep))
        return torch.cat([row.float() for row in rows])

    # -- which of them ----------------------------------------------------------------------------------------

    def _find_out(self) -> None:
        """Choose between the two ways by trying them on a small pool."""
        probe = RunnerProbe(self.model, self.store)
        try:
            self._kinds = probe.survey(self._configs, self.backend)
            self._specs = list(dict.fromkeys(kind.spec for kind in self._kinds.values()))
            self._try_flattened(probe)
        except UnsupportedModelError as error:
            self.fallback_reason = str(error)
            self._kinds, self._specs = {}, []
            self._picks_logits = self._call.accepts("logits_to_keep")
            probe.check(self._one_by_one, "a forward over its KV in the pool")

    def _try_flattened(self, probe: RunnerProbe) -> None:
        def run(store: KVStore, step: Step, entries: npt.NDArray[np.int32]) -> Tensor:
            return self._flattened(store, PoolWriter(store), step, entries)

        way = "a forward over several sequences in one row"
        try:
            probe.check(run, way)
        except UnsupportedModelError:
            if not self._picks_logits:
                raise
            self._picks_logits = False  # it may just not take a tensor there
            probe.check(run, way)


def _weakly(runner: ModelRunner) -> GraphForward:
    """Its forward over buffers, for graphs that it owns: the memory of both is free when the runner is dropped."""
    reference = weakref.ref(runner)

    def forward(inputs: Tensor, attention: GraphAttention) -> Tensor:
        owner = reference()
        assert owner is not None
        return own_forward(lambda: owner._from_buffers(inputs, attention))

    return forward


def _to_device(device: torch.device, *arrays: npt.NDArray[np.int64]) -> list[Tensor]:
    """int64 arrays as tensors, in one transfer."""
    joined = to_device(np.concatenate(arrays, dtype=np.int64), device)
    return list(joined.split([len(array) for array in arrays]))


def _is_watched(module: torch.nn.Module) -> bool:
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    # Those of an attached cache leave an engine's forwards alone.
    return any(not isinstance(getattr(hook, "__self__", None), HFPlug) for hook in hooks)


def _watched_globally() -> bool:
    modules = torch.nn.modules.module
    return bool(modules._global_forward_hooks or modules._global_forward_pre_hooks)


def _refuse_prompt_learning(model: Any) -> None:
    config = getattr(model, "active_peft_config", None)
    if getattr(config, "is_prompt_learning", False):
        raise UnsupportedModelError(
            "prompt and prefix tuning put virtual tokens before every prompt, which an engine does not know of"
        )
