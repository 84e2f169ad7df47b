"""`HFPlug`: forward hooks that let a transformers model reuse and feed a `PrefixCache`.

Two hooks do the work. The one on the model notes what a call wants (`logits_to_keep`, labels, ...). The one on
its base model sees the token ids, mask, positions and cache object of every forward that `generate()` or a
hand-written loop makes: on the first forward of a fresh cache it fills the cache with what is known and leaves
out the tokens that need no computing. Nothing else of the model is touched.
"""

from __future__ import annotations

import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from radixkv.cache.prefix_cache import PrefixCache
from radixkv.core.errors import InvalidRequestError, UnsupportedModelError
from radixkv.core.namespace import Namespace, canonical_namespace
from radixkv.core.tokens import as_tokens
from radixkv.hf.compat import (
    DynamicCache,
    ForwardCall,
    bare_cache,
    cache_length,
    fresh_layers,
    install_layers,
    is_fresh_dynamic,
    text_config,
)
from radixkv.hf.layers import RowsLayer, SessionLayer
from radixkv.hf.prefill import Row, plan_shared, plan_staircase
from radixkv.hf.rope import RopeRule
from radixkv.hf.session import Origin, Session
from radixkv.hf.support import check_supported, unwrap_model
from radixkv.hf.watch import ModelWatch
from radixkv.observe.stats import RequestStats

__all__ = ["HFPlug", "SessionCache"]

# A forward of its own has to save about as many token computations as its fixed cost is worth.
_MIN_SAVED = {"cpu": 8, "cuda": 64}
_ROPE_WARNING = "its rotary embedding changes with the length of the prompt"

_WHY = {
    "use_cache_false": "use_cache=False was given",
    "own_cache": "the call brought a cache that is already filled",
    "foreign_cache": "the call asked for another kind of cache (static, quantized, offloaded, ...)",
    "inputs_embeds": "the prompt was given as embeddings, which have no token ids",
    "extra_inputs": "the call has inputs beside text (images, adapter names, token types, ...)",
    "attention_mask": "the attention mask is not 'left padding, then ones'",
    "position_ids": "positions do not count up from 0 over the tokens of each row",
    "training": "the model is in training mode",
    "labels": "labels were given",
    "output_attentions": "attentions of all positions were asked for",
    "output_hidden_states": "hidden states of all positions were asked for",
    "layer_count": "the model was shortened (assistant_early_exit)",
    "full_logits": (
        "a plain forward wants the logits of every position; give logits_to_keep=1 or use_cache=True to reuse KV"
    ),
    "grad": "gradients are enabled; wrap the loop in torch.no_grad() or torch.inference_mode()",
    "rope_limit": _ROPE_WARNING,
    "empty": "the input is empty",
}

_attached: weakref.WeakKeyDictionary[torch.nn.Module, HFPlug] = weakref.WeakKeyDictionary()
_attach_lock = threading.Lock()


class SessionCache(DynamicCache):  # type: ignore[misc]
    """The cache object of an explicit session; use it as any transformers cache.

    Attributes:
        num_cached_tokens: Leading columns of the prompt that are already in it.
    """

    num_cached_tokens: int

    def __init__(self, layers: list[Any], num_cached_tokens: int) -> None:
        super().__init__()
        install_layers(self, layers)
        self.num_cached_tokens = num_cached_tokens


@dataclass
class _Outer:
    """What the call on the model itself asked for."""

    keep: Any
    labels: bool
    attentions: bool
    hidden: bool
    wants_cache: bool


@dataclass
class _Underway:
    """A first forward between its two hooks."""

    session: Session
    columns: int
    work: int
    began: float
    requests: list[RequestStats]


class HFPlug:
    """Connects one cache with one model. Made by `PrefixCache.for_model`.

    Args:
        cache: The cache to serve from and to feed.
        model: A causal LM of transformers, or a PEFT wrapper around one.
    """

    def __init__(self, cache: PrefixCache, model: Any) -> None:
        self._cache = cache
        self.model = unwrap_model(model)
        self.base = self.model.base_model
        self._watch = ModelWatch(self.model, ignore=(self.model, self.base))
        self._rope = RopeRule.of(self.model)
        self._dtype = next(self.model.parameters()).dtype
        self._num_hidden_layers = self._count_layers()
        self._outer_call = ForwardCall(self.model)
        self._call = ForwardCall(self.base)
        self._leader = next(i for i, layer in enumerate(cache.layout.layers) if layer is not None)
        self._min_saved = _MIN_SAVED.get(cache.layout.device.type, 64)
        self._namespace: Namespace = None
        self._attached = False
        self._wrapper: Any = None
        self._handles: list[Any] = []
        self._users = 0
        self._lock = threading.RLock()
        self._local = threading.local()
        self._live: weakref.WeakSet[Session] = weakref.WeakSet()
        self._dead: deque[Session] = deque()
        self._passed: weakref.WeakSet[Any] = weakref.WeakSet()
        self._warned: set[str] = set()

    # -- the interface of ModelPlug -------------------------------------------------------------------------

    def attach(self, model: Any, namespace: Namespace) -> None:
        canonical_namespace(namespace)
        self._check_model(model)
        with _attach_lock:
            other = _attached.get(self.model)
            if other is not None:
                whose = "this cache" if other is self else "another cache"
                raise InvalidRequestError(f"the model is attached to {whose} already: detach it first")
            self._namespace = namespace
            self._install(model)
            self._attached = True
            _attached[self.model] = self

    def detach(self) -> None:
        with _attach_lock:
            if not self._attached:
                raise InvalidRequestError("no model is attached to this cache")
            self._attached = False
            del _attached[self.model]
            self._uninstall()
        self.flush()

    @contextmanager
    def session(self, input_ids: Any, namespace: Namespace, attention_mask: Any) -> Iterator[SessionCache]:
        self._check_model(self.model)
        ids, mask = self._prompt(input_ids, attention_mask)
        self.flush()
        self._install(self.model)
        session: Session | None = None
        try:
            past, session = self._open(ids, mask, namespace)
            yield past
            with self._busy():
                self._store(session)
        finally:
            if session is not None:
                session.close()
            self._uninstall()

    def key(self, namespace: Namespace, num_tokens: int) -> bytes:
        return self._origin(namespace, num_tokens).key

    def flush(self) -> None:
        """Store what ended sessions, and this thread's own ones between two forwards, have computed."""
        if self._local_depth() or self._cache_locked():
            return
        with self._busy():
            while self._dead:
                try:
                    session = self._dead.popleft()
                except IndexError:  # another thread was quicker
                    break
                self._store(session)
            me = threading.get_ident()
            with self._lock:
                mine = [s for s in self._live if s.thread == me and not s.explicit]
            for session in mine:
                self._store(session)

    def discard(self, namespace: bytes | None) -> None:
        with self._lock:
            for session in list(self._live):
                if namespace is None or session.origin.namespace == namespace:
                    session.trusted = False

    def invalidate(self) -> None:
        self._watch.bump()

    # -- hooks on and off -----------------------------------------------------------------------------------

    def _check_model(self, model: Any) -> None:
        inner = unwrap_model(model)
        if inner is not self.model:
            raise InvalidRequestError(
                f"this cache was made for another model: make one with PrefixCache.for_model({type(inner).__name__})"
            )
        check_supported(inner)
        parameter = next(inner.parameters())
        if parameter.device != self._cache.layout.device:
            raise InvalidRequestError(
                f"the model is on {parameter.device} and the cache on {self._cache.layout.device}: "
                "move the model back, or make a new cache with PrefixCache.for_model"
            )
        if parameter.dtype != self._dtype:
            raise InvalidRequestError(
                f"the model is now in {parameter.dtype}, and was in {self._dtype} when the cache was made: "
                "make a new cache with PrefixCache.for_model"
            )

    def _count_layers(self) -> int:
        return int(getattr(text_config(self.model), "num_hidden_layers", 0))

    def _install(self, model: Any) -> None:
        with self._lock:
            self._users += 1
            if self._users == 1:
                self._handles = [
                    self.model.register_forward_pre_hook(self._enter_model, with_kwargs=True),
                    self.model.register_forward_hook(self._leave_model, always_call=True),
                    self.base.register_forward_pre_hook(self._before_base, with_kwargs=True),
                    self.base.register_forward_hook(self._after_base),
                ]
            if model is not self.model:  # a PEFT wrapper calls the forward of the model, past its hooks
                self._handles += [
                    model.register_forward_pre_hook(self._enter_model, with_kwargs=True),
                    model.register_forward_hook(self._leave_model, always_call=True),
                ]

    def _uninstall(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0:
                for handle in self._handles:
                    handle.remove()
                self._handles = []

    # -- reentrancy -----------------------------------------------------------------------------------------

    def _local_depth(self) -> int:
        return getattr(self._local, "depth", 0)

    def _cache_locked(self) -> bool:
        return self._cache.locked_by_me

    @contextmanager
    def _busy(self) -> Iterator[None]:
        """While set, a session ended by the garbage collector in this thread is only put aside."""
        self._local.depth = self._local_depth() + 1
        try:
            yield
        finally:
            self._local.depth -= 1

    def _cache_died(self, session: Session) -> None:
        self._dead.append(session)
        self.flush()

    def _store(self, session: Session) -> None:
        session.commit(self._cache, self._watch.state(), self._rope.storable)

    # -- the hook on the model ------------------------------------------------------------------------------

    def _enter_model(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if getattr(self._local, "internal", False):
            return
        call = self._outer_call.by_name(args, kwargs)
        config = self.model.config
        self._local.outer = _Outer(
            keep=call.get("logits_to_keep"),
            labels=call.get("labels") is not None,
            attentions=_either(call.get("output_attentions"), getattr(config, "output_attentions", False)),
            hidden=_either(call.get("output_hidden_states"), getattr(config, "output_hidden_states", False)),
            wants_cache=call.get("use_cache") is True or call.get(self._outer_call.cache_name) is not None,
        )

    def _leave_model(self, *_: Any) -> None:
        self._local.outer = None
        self._local.underway = None

    # -- the hooks on the base model ------------------------------------------------------------------------

    def _before_base(
        self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if getattr(self._local, "internal", False):
            return None
        self._local.underway = None
        call = self._call.by_name(args, kwargs)
        session = self._session_of(call.get(self._call.cache_name))
        if session is not None:
            return ((), self._go_on(session, call))
        if not self._attached:
            return None
        edited = self._begin(call)
        return None if edited is None else ((), edited)

    def _after_base(self, module: Any, args: Any, output: Any) -> None:
        if getattr(self._local, "internal", False):
            return
        if getattr(self._local, "passed_through", False):
            # The cache that the model made itself comes back with the next token: not a new bypass.
            self._local.passed_through = False
            self._note_passed(_cache_in(output))
        underway: _Underway | None = getattr(self._local, "underway", None)
        self._local.underway = None
        if underway is None:
            return
        seconds = time.perf_counter() - underway.began
        session = underway.session
        if not session.consistent or session.columns != underway.columns:
            session.trusted = False
            raise UnsupportedModelError(
                f"{type(self.model).__name__} did not append to the KV cache it was given: it cannot be served"
            )
        if self._cache.layout.device.type == "cpu":  # elsewhere work is asynchronous, and waiting would cost
            self._cache.recorder.record_prefill(underway.work, seconds)
        if underway.requests:
            self._cache.recorder.record_requests(underway.requests)
        if not session.explicit:
            with self._busy():
                self._store(session)

    def _session_of(self, past: Any) -> Session | None:
        layers = getattr(past, "layers", None)
        if not isinstance(layers, list) or len(layers) <= self._leader:
            return None
        book = getattr(layers[self._leader], "book", None)
        return book if isinstance(book, Session) else None

    def _note_passed(self, past: Any) -> None:
        if past is not None:
            try:
                self._passed.add(past)
            except TypeError:  # tuples of old code cannot be referenced weakly
                return

    # -- a fresh cache --------------------------------------------------------------------------------------

    def _begin(self, call: dict[str, Any]) -> dict[str, Any] | None:
        """First forward of a fresh cache: fill it and trim the call; None to leave everything alone."""
        outer: _Outer | None = getattr(self._local, "outer", None)
        past = call.get(self._call.cache_name)
        wants_cache = past is not None or call.get("use_cache") is True
        if outer is not None:
            wants_cache = outer.wants_cache or outer.keep is not None
        keep = 0 if outer is None or outer.keep is None else outer.keep
        reason = self._bypass_reason(call, outer, past, wants_cache, keep)
        if reason is None:
            ids = call["input_ids"]
            pads, reason = self._padding(call, ids)
        if reason is None:
            origin = self._origin(self._namespace, ids.shape[1] - int(pads.min()))
            if self._rope.regime(origin.prompt_tokens) is None:
                reason = "rope_limit"
        if reason is not None:
            self._pass_through(reason, call, past)
            return None

        serve = wants_cache and not (isinstance(keep, int) and keep == 0 and not wants_cache)
        if not serve:
            self._count("full_logits")
        self.flush()
        began = time.perf_counter()
        with self._busy():
            ahead = max(1, int(keep)) if serve else ids.shape[1]
            layers, skip, rows = self._fill(ids, call.get("attention_mask"), pads, origin, ahead)
            session = Session(origin, layers, pads, ids, filler=self._filler(), explicit=False)
            session.feed(ids)
            if past is None:
                past = bare_cache(layers)
            else:
                install_layers(past, layers)
            self._adopt(past, session)
        edited = self._trimmed(call, skip)
        edited[self._call.cache_name] = past
        work = ids.shape[0] * (ids.shape[1] - skip) + sum(row.computed for row in rows)
        requests = [_request_stats(row, skip) for row in rows] if serve else []
        self._local.underway = _Underway(session, ids.shape[1], work, began, requests)
        return edited

    def _adopt(self, past: Any, session: Session) -> None:
        with self._lock:
            self._live.add(session)
        weakref.finalize(past, self._cache_died, session).atexit = False

    def _bypass_reason(
        self, call: dict[str, Any], outer: _Outer | None, past: Any, wants_cache: bool, keep: Any
    ) -> str | None:
        use_cache = call.get("use_cache")
        if use_cache is None:
            use_cache = getattr(text_config(self.model), "use_cache", True)
        known = {"input_ids", "attention_mask", "position_ids", "cache_position", self._call.cache_name}
        attentions = call.get("output_attentions") or (outer is not None and outer.attentions)
        hidden = call.get("output_hidden_states") or (outer is not None and outer.hidden)
        checks = (
            ("training", self.base.training),
            ("labels", outer is not None and outer.labels),
            ("use_cache_false", not use_cache),
            ("inputs_embeds", call.get("input_ids") is None),
            ("output_attentions", attentions),
            ("output_hidden_states", hidden),
            ("layer_count", self._count_layers() != self._num_hidden_layers),
            ("own_cache", past is not None and cache_length(past) != 0),
            ("foreign_cache", past is not None and not is_fresh_dynamic(past)),
            ("extra_inputs", any(_is_data(value) for name, value in call.items() if name not in known)),
            ("full_logits", isinstance(keep, Tensor)),
            ("grad", not wants_cache and torch.is_grad_enabled()),
        )
        for reason, applies in checks:
            if applies:
                return reason
        ids = call["input_ids"]
        if ids.dim() != 2 or ids.numel() == 0:
            return "empty"
        return None

    def _padding(self, call: dict[str, Any], ids: Tensor) -> tuple[np.ndarray, str | None]:
        """Columns of left padding of each row; a reason to bypass if mask or positions are anything else."""
        rows, columns = ids.shape
        pads = np.zeros(rows, dtype=np.int64)
        mask = call.get("attention_mask")
        if mask is not None:
            if not isinstance(mask, Tensor) or tuple(mask.shape) != (rows, columns):
                return pads, "attention_mask"
            ones = mask.detach().cpu().numpy()
            if not np.isin(ones, (0, 1)).all():
                return pads, "attention_mask"
            ones = ones != 0
            pads = columns - ones.sum(axis=1)
            if (ones != (np.arange(columns) >= pads[:, None])).any() or (pads == columns).any():
                return pads, "attention_mask"
        positions = call.get("position_ids")
        if positions is None:
            return pads, "position_ids" if pads.any() else None
        if not isinstance(positions, Tensor) or positions.dim() != 2 or positions.shape[1] != columns:
            return pads, "position_ids"
        expected = np.arange(columns) - pads[:, None]
        real = positions.detach().cpu().numpy()
        if real.shape[0] not in (1, rows) or ((real != expected) & (expected >= 0)).any():
            return pads, "position_ids"
        return pads, None

    def _pass_through(self, reason: str, call: dict[str, Any], past: Any) -> None:
        if past is not None and reason in ("own_cache", "foreign_cache"):
            try:
                seen = past in self._passed
            except TypeError:
                seen = False
            if seen:
                return
        # A loop without a cache sends everything again, one token longer: still the same call.
        ids = call.get("input_ids")
        length = -1 if ids is None else int(ids.shape[-1])
        last = getattr(self._local, "last_bypass", None)
        self._local.last_bypass = (reason, length)
        self._local.passed_through = True
        self._note_passed(past)
        if reason == "use_cache_false" and last == (reason, length - 1):
            return
        self._count(reason)

    def _count(self, reason: str) -> None:
        self._cache.recorder.record_bypass(reason)
        with self._lock:
            first = reason not in self._warned
            self._warned.add(reason)
        if first and reason != "empty":
            warnings.warn(
                f"radixkv passed a call through without reusing KV, because {_WHY[reason]} "
                f"(counted in stats.bypasses[{reason!r}]; shown once)",
                stacklevel=2,
            )

    def _trimmed(self, call: dict[str, Any], skip: int) -> dict[str, Any]:
        edited = dict(call)
        if skip:
            edited["input_ids"] = call["input_ids"][:, skip:]
            for name in ("position_ids", "cache_position"):
                if isinstance(call.get(name), Tensor):
                    edited[name] = call[name][..., skip:]
        return edited

    def _filler(self) -> tuple[int, frozenset[int]] | None:
        config = getattr(self.model, "generation_config", None) or self.model.config
        ends = getattr(config, "eos_token_id", None)
        ends = frozenset(ends if isinstance(ends, (list, tuple)) else () if ends is None else (ends,))
        pad = getattr(config, "pad_token_id", None)
        if pad is None:
            pad = min(ends, default=None)  # what generate() falls back to
        return None if pad is None else (int(pad), ends)

    # -- filling --------------------------------------------------------------------------------------------

    def _origin(self, namespace: Namespace, num_tokens: int) -> Origin:
        state = self._watch.state()
        epoch, adapters, patches = state
        device = self._cache.layout.device.type
        cast = str(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else ""
        user = canonical_namespace(namespace)
        regime = self._rope.regime(num_tokens) or "none"
        key = canonical_namespace(("radixkv.hf", str(epoch), adapters, str(patches), cast, regime, user))
        self._cache.register_key(user, key)
        return Origin(key, user, state, num_tokens)

    def _layers(self) -> list[Any]:
        shapes = self._cache.layout.layers
        plain = fresh_layers(self.model)
        return [SessionLayer(shape) if shape is not None else plain[i] for i, shape in enumerate(shapes)]

    def _fill(
        self, ids: Tensor, mask: Tensor | None, pads: np.ndarray, origin: Origin, ahead: int
    ) -> tuple[list[Any], int, list[Row]]:
        """Layers with all that is cached, or worth computing now; and how many columns that are.

        Args:
            ids: `[rows, columns]`.
            mask: `[rows, columns]` or None.
            pads: `[rows]`.
            ahead: Columns at the end that the caller's forward has to do in any case.
        """
        columns = ids.shape[1]
        host = ids.detach().cpu().numpy().astype(np.int64, copy=False)
        rows = [
            Row(host[i, pad:], pad, max(0, min(columns - pad, columns - ahead - pad)))
            for i, pad in enumerate(pads.tolist())
        ]
        layers = self._layers()
        matches = []
        try:
            for row in rows:
                if row.limit:
                    match = self._cache.lookup(row.tokens, origin.key, max_tokens=row.limit)
                    matches.append(match)
                    row.have = match.num_tokens
                else:
                    matches.append(None)
            cached = [row.have for row in rows]
            shared, climbs = [], []
            skip = min(row.column for row in rows)
            if len(rows) > 1 and self._rope.kind == "plain" and ahead < columns:
                shared = plan_shared(rows, self._min_saved)
                climbs, skip = plan_staircase(rows, self._min_saved)
            skip = min(skip, columns - ahead)
            if skip <= 0:
                return layers, 0, rows
            self._allocate(layers, rows, cached, columns)
            self._gather(layers, rows, cached, matches)
        finally:
            for match in matches:
                if match is not None:
                    self._cache.release(match)
        for step in shared:
            self._compute_row(layers, rows[step.leader], step.leader, ids, step.start, step.stop)
            for follower in step.followers:
                self._copy_row(layers, rows, step.leader, follower, step.copy_from, step.stop)
        for climb in climbs:
            self._compute_columns(layers, climb.rows, rows, ids, mask, climb.start, climb.stop)
        for layer in layers:
            if isinstance(layer, SessionLayer):
                layer.length = skip
        return layers, skip, rows

    def _allocate(self, layers: list[Any], rows: list[Row], cached: list[int], columns: int) -> None:
        layout = self._cache.layout
        size = self._cache.block_size
        for layer in layers:
            if not isinstance(layer, SessionLayer):
                continue
            base = 0
            if layer.window is not None:
                # Attention needs the window before the first new token; storing needs the block it falls into.
                base = min(
                    row.pad + min(have - layer.window + 1, have // size * size)
                    for row, have in zip(rows, cached, strict=True)
                )
            layer.allocate(len(rows), columns, max(0, base), layout.dtype, layout.device)
        self._blank_padding(layers, rows)

    @staticmethod
    def _blank_padding(layers: list[Any], rows: list[Row]) -> None:
        # Masked scores become weights of 0, but 0 times a stray NaN is NaN.
        for layer in layers:
            if isinstance(layer, SessionLayer):
                for i, row in enumerate(rows):
                    if row.pad > layer.base:
                        for part in layer.view(slice(i, i + 1), layer.base, row.pad):
                            part.zero_()

    def _gather(self, layers: list[Any], rows: list[Row], cached: list[int], matches: list[Any]) -> None:
        began = time.perf_counter()
        store = self._cache.store
        for i, (row, have, match) in enumerate(zip(rows, cached, matches, strict=True)):
            if not have:
                continue
            blocks = match.blocks
            if match.tail is not None:
                blocks = np.append(blocks, np.int32(match.tail.block))
                self._cache.recorder.add(cow_copies=1)
            places: dict[int, Any] = {}
            for index, layer in enumerate(layers):
                if not isinstance(layer, SessionLayer):
                    continue
                start = max(0, layer.base - row.pad)
                if start >= have:
                    continue
                if start not in places:
                    places[start] = store.locate(blocks, start, have)
                keys, values = layer.view(slice(i, i + 1), row.pad + start, row.pad + have)
                store.read(index, places[start], keys[0], values[0])
        self._cache.recorder.add(gather_seconds=time.perf_counter() - began)

    def _compute_row(
        self, layers: list[Any], row: Row, index: int, ids: Tensor, start: int, stop: int
    ) -> None:
        if start < stop:
            tokens = ids[index : index + 1, row.pad + start : row.pad + stop]
            self._forward(layers, slice(index, index + 1), row.pad, start, tokens, None, None)

    @staticmethod
    def _copy_row(
        layers: list[Any], rows: list[Row], source: int, target: int, start: int, stop: int
    ) -> None:
        for layer in layers:
            if not isinstance(layer, SessionLayer):
                continue
            first = max(start, layer.base - rows[source].pad, layer.base - rows[target].pad)
            if first < stop:
                pad = rows[source].pad
                keys, values = layer.view(slice(source, source + 1), pad + first, pad + stop)
                layer.put(slice(target, target + 1), rows[target].pad + first, keys, values)

    def _compute_columns(
        self,
        layers: list[Any],
        group: tuple[int, ...],
        rows: list[Row],
        ids: Tensor,
        mask: Tensor | None,
        start: int,
        stop: int,
    ) -> None:
        if len(group) == 1:
            row = rows[group[0]]
            self._compute_row(layers, row, group[0], ids, max(0, start - row.pad), stop - row.pad)
            return
        pads = torch.tensor([rows[i].pad for i in group], device=ids.device)
        which: slice | Tensor = torch.tensor(group, device=ids.device)
        tokens = ids[which, start:stop]
        if group == tuple(range(group[0], group[-1] + 1)):
            which = slice(group[0], group[-1] + 1)
        padded = bool(pads.any())
        positions = None
        if padded:
            positions = (torch.arange(start, stop, device=ids.device)[None] - pads[:, None]).clamp(min=0)
            mask = mask[which, :stop] if mask is not None else None
        self._forward(layers, which, 0, start, tokens, mask if padded else None, positions)
        if padded:
            self._blank_padding(layers, rows)

    def _forward(
        self,
        layers: list[Any],
        which: slice | Tensor,
        origin: int,
        length: int,
        ids: Tensor,
        mask: Tensor | None,
        positions: Tensor | None,
    ) -> None:
        """Run the base model on some rows; their KV lands in `layers`."""
        plain = fresh_layers(self.model)
        view = bare_cache(
            [
                RowsLayer(layer, which, origin, length) if isinstance(layer, SessionLayer) else plain[i]
                for i, layer in enumerate(layers)
            ]
        )
        call: dict[str, Any] = {"input_ids": ids, self._call.cache_name: view, "use_cache": True}
        if mask is not None:
            call["attention_mask"] = mask
        if self._call.accepts("position_ids"):
            if positions is None:
                positions = torch.arange(length, length + ids.shape[1], device=ids.device)[None]
            call["position_ids"] = positions.expand(ids.shape[0], -1)
        self._local.internal = True
        try:
            with torch.no_grad():
                self.base(**call)
        finally:
            self._local.internal = False

    # -- explicit sessions ----------------------------------------------------------------------------------

    def _prompt(self, input_ids: Any, attention_mask: Any) -> tuple[Tensor, np.ndarray]:
        """Ids `[rows, columns]` on the cache's device, and the padding of each row."""
        ids = input_ids if isinstance(input_ids, Tensor) else torch.as_tensor(np.asarray(input_ids))
        if ids.dim() == 1:
            ids = ids[None]
        if ids.dim() != 2:
            raise InvalidRequestError(
                f"input_ids are [batch, tokens] or [tokens], got shape {tuple(ids.shape)}"
            )
        if ids.numel() == 0:
            raise InvalidRequestError("the prompt is empty: give at least one token")
        flat = as_tokens(ids.reshape(-1))
        vocab = int(text_config(self.model).vocab_size)
        if int(flat.max()) >= vocab:
            raise InvalidRequestError(f"token id {int(flat.max())} is outside the vocabulary of {vocab}")
        ids = ids.to(device=self._cache.layout.device, dtype=torch.int64)
        pads = np.zeros(ids.shape[0], dtype=np.int64)
        if attention_mask is not None:
            mask = torch.as_tensor(attention_mask)
            mask = mask[None] if mask.dim() == 1 else mask
            pads, reason = self._padding({"attention_mask": mask, "position_ids": None}, ids)
            if reason == "attention_mask":
                raise InvalidRequestError(
                    f"attention_mask must be zeros (left padding), then ones, in the shape {tuple(ids.shape)}"
                )
        return ids, pads

    def _open(self, ids: Tensor, pads: np.ndarray, namespace: Namespace) -> tuple[SessionCache, Session]:
        origin = self._origin(namespace, ids.shape[1] - int(pads.min()))
        with self._busy():
            began = time.perf_counter()
            mask = None
            if pads.any():
                device = ids.device
                mask = (
                    torch.arange(ids.shape[1], device=device) >= torch.as_tensor(pads, device=device)[:, None]
                )
                mask = mask.to(torch.int64)
            usable = self._rope.regime(origin.prompt_tokens) is not None
            layers, skip, rows = self._fill(ids, mask, pads, origin, 1 if usable else ids.shape[1])
            session = Session(origin, layers, pads, ids, filler=self._filler(), explicit=True)
            if not usable:
                session.trusted = False
                self._count("rope_limit")
            if skip:
                session.feed(ids[:, :skip])
            past = SessionCache(layers, skip)
            with self._lock:
                self._live.add(session)
            own = sum(row.computed for row in rows)
            if own and self._cache.layout.device.type == "cpu":
                self._cache.recorder.record_prefill(own, time.perf_counter() - began)
            self._cache.recorder.record_requests([_request_stats(row, skip) for row in rows])
        return past, session

    # -- later forwards -------------------------------------------------------------------------------------

    def _go_on(self, session: Session, call: dict[str, Any]) -> dict[str, Any]:
        if session.closed:
            raise InvalidRequestError(
                "this session has ended: its cache can no longer be used; open another with cache.session(...)"
            )
        ids = call.get("input_ids")
        if session.explicit and session.columns < session.prompt.shape[1]:
            call = self._guard(session, call)
            if call[self._call.cache_name] is None:
                return call
            ids = call["input_ids"]
        elif call.get("use_cache") is False:
            if session.explicit:
                raise InvalidRequestError(
                    "a session was opened, but the call has use_cache=False: leave that out"
                )
            session.trusted = False
        if ids is None or ids.dim() != 2:
            session.trusted = False
            return call
        if ids.shape[0] != session.num_rows and ids.shape[0] % session.num_rows == 0:
            session.expand(ids.shape[0] // session.num_rows)
        if self._count_layers() != self._num_hidden_layers:
            session.trusted = False
        session.expect_plain(call.get("attention_mask"), call.get("position_ids"), ids.shape[1])
        session.feed(ids)
        return call

    def _guard(self, session: Session, call: dict[str, Any]) -> dict[str, Any]:
        """The prompt phase of an explicit session: make sure that what is fed continues what is there.

        transformers slices a prompt by the length of the cache and never compares ids; in some modes it does
        not slice at all. What can be set right is set right; what cannot is refused.
        """
        ids = call.get("input_ids")
        name = self._call.cache_name
        if ids is None:
            raise InvalidRequestError(
                "this session was opened with token ids, and the forward brings inputs_embeds"
            )
        if ids.dim() == 2 and ids.shape[0] != session.num_rows and ids.shape[0] % session.num_rows == 0:
            session.expand(ids.shape[0] // session.num_rows)
        prompt, done, q = session.prompt, session.columns, ids.shape[1]
        from_start = _agrees(prompt, 0, ids)
        if call.get("use_cache") is False:
            if not from_start or q < prompt.shape[1]:
                raise InvalidRequestError(
                    "use_cache=False with a part of the prompt: the rest lies in the cache; leave use_cache out"
                )
            session.trusted = False
            self._count("use_cache_false")
            return {**call, name: None}
        goes_on = _agrees(prompt, done, ids)
        first = _first_column(call, int(session.pads[0]), q)
        if goes_on and not (from_start and done and first == 0):
            skip = 0
        elif from_start:
            # Not sliced: leave out what is there, but never all of it, nor logits that are wanted.
            outer: _Outer | None = getattr(self._local, "outer", None)
            keep = outer.keep if outer is not None and isinstance(outer.keep, int) else 1
            skip = max(0, min(done, q - max(1, keep)))
            if not all(layer.can_cut(skip) for layer in session.layers if isinstance(layer, SessionLayer)):
                skip = 0
            if skip < done:
                pads = session.pads
                for layer in session.layers:
                    if isinstance(layer, SessionLayer):
                        layer.cut(skip)
                session.pads = pads
                session.trusted = True if skip == 0 else session.trusted
        else:
            raise InvalidRequestError(
                f"the forward brings other token ids than this session was opened for (it holds {done} of "
                f"{prompt.shape[1]} prompt columns, so feed input_ids[:, {done}:])"
            )
        call = self._trimmed(call, skip)
        return self._place(session, call)

    def _place(self, session: Session, call: dict[str, Any]) -> dict[str, Any]:
        """Positions and mask that fit the padding of the session, where the caller gave none or wrong lengths."""
        ids = call["input_ids"]
        total = session.columns + ids.shape[1]
        mask = call.get("attention_mask")
        pads = torch.as_tensor(session.pads, device=ids.device)[:, None]
        columns = torch.arange(total, device=ids.device)[None]
        padded = bool(session.pads.any())
        if isinstance(mask, Tensor) and mask.dim() == 2 and mask.shape[1] != total:
            mask = None if not padded else mask.new_zeros(0)
            call["attention_mask"] = None
        if padded and (mask is None or mask.numel() == 0):
            call["attention_mask"] = (columns >= pads).to(torch.int64)
        positions = call.get("position_ids")
        if padded and positions is None:
            if not self._call.accepts("position_ids"):
                raise InvalidRequestError(
                    "this model takes no position_ids, so a padded batch cannot be continued"
                )
            call["position_ids"] = (columns[:, session.columns :] - pads).clamp(min=0)
        return call


def _request_stats(row: Row, skip: int) -> RequestStats:
    hit = min(len(row.tokens), max(0, skip - row.pad - row.computed))
    return RequestStats(len(row.tokens), hit, len(row.tokens) - hit)


def _either(given: Any, default: Any) -> bool:
    return bool(default if given is None else given)


def _is_data(value: Any) -> bool:
    """Whether an argument is an input beyond the ones that are understood (flags and names are not)."""
    if isinstance(value, (list, tuple)):
        return len(value) > 0
    return isinstance(value, (Tensor, np.ndarray))


def _agrees(prompt: Tensor, start: int, ids: Tensor) -> bool:
    """Whether `ids` are the prompt from column `start` on, as far as the prompt goes."""
    if ids.dim() != 2 or ids.shape[0] != prompt.shape[0]:
        return False
    n = min(ids.shape[1], prompt.shape[1] - start)
    return n > 0 and bool((prompt[:, start : start + n] == ids[:, :n].to(prompt.device)).all())


def _first_column(call: dict[str, Any], pad: int, q: int) -> int | None:
    """The column that the caller thinks a forward starts at, if it says so."""
    where = call.get("cache_position")
    if isinstance(where, Tensor) and where.numel() == q:
        return int(where.reshape(-1)[0])
    where = call.get("position_ids")
    if isinstance(where, Tensor) and where.dim() == 2 and where.shape[1] == q:
        first = int(where[0, 0])
        return first + pad if first else 0
    return None


def _cache_in(output: Any) -> Any:
    for name in ("cache", "past_key_values"):
        value = getattr(output, "__dict__", {}).get(name)
        if value is not None:
            return value
    return None
