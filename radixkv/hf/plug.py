"""`HFPlug`: forward hooks that let a transformers model reuse and feed a `PrefixCache`.

Two hooks do the work. The one on the model notes what a call wants (`logits_to_keep`, labels, ...). The one on
its base model sees the token ids, mask, positions and cache object of every forward that `generate()` or a
hand-written loop makes: on the first forward of a fresh cache it fills the cache with what is known and leaves
out the tokens that need no computing. While sessions are open, `prepare_inputs_for_generation` is watched, too
(see `radixkv.hf.guard`). Nothing else of the model is touched, and nothing stays.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from radixkv.cache.locking import InterruptsHeld, books_are_open
from radixkv.cache.prefix_cache import PrefixCache
from radixkv.core.errors import InvalidRequestError, UnsupportedModelError
from radixkv.core.eviction import Retention
from radixkv.core.namespace import Namespace, canonical_namespace
from radixkv.core.warn import warn_user
from radixkv.hf.calls import (
    WHY,
    OuterCall,
    brings_data,
    bypass_reason,
    cache_in,
    left_padding,
    read_prompt,
    trimmed,
)
from radixkv.hf.compat import ForwardCall, bare_cache, install_layers, not_traced, text_config
from radixkv.hf.explicit import ExplicitSession, SessionCache
from radixkv.hf.fill import Filler
from radixkv.hf.flops import prefill_cost
from radixkv.hf.guard import GenerateGuard, guard_prompt, place
from radixkv.hf.layers import SessionLayer
from radixkv.hf.own_forward import in_own_forward, is_running
from radixkv.hf.paged_session import Pages
from radixkv.hf.paged_session_way import PagedWay
from radixkv.hf.rope import RopeRule
from radixkv.hf.session import Origin, Session
from radixkv.hf.support import base_of, check_supported, unwrap_model
from radixkv.hf.watch import ModelWatch, State
from radixkv.observe.stats import RequestStats

__all__ = ["HFPlug"]

# Which plug a model is attached to. Weak on both sides: a plug holds its model.
_attached: weakref.WeakKeyDictionary[torch.nn.Module, weakref.ref[HFPlug]] = weakref.WeakKeyDictionary()
# Reentrant: an abandoned `with` may be ended by the garbage collector at any line.
_attach_lock = threading.RLock()


# Bypassed calls whose KV depends on more than the tokens, or does not begin with them.
_TOKENS_ARE_NOT_ALL = frozenset({"inputs_embeds", "extra_inputs", "position_ids", "own_cache", "empty"})
_MOST_PASSED = 16  # prompts on a GPU that were passed through and are not read back yet

Arguments = tuple[tuple[Any, ...], dict[str, Any]]  # of a call on the model, as a hook gets them


@dataclass
class _Underway:
    """A forward between its two hooks.

    Attributes:
        hooks: The handles of the hooks that saw its beginning.
        start: Columns that the session held before it.
        stop: Columns it must hold after it.
        work: Tokens computed; 0 for forwards that are no prefill.
        began: `time.perf_counter()` before it.
        requests: The prompts it is the first forward of.
        restore: Gives a cache object back the layers it had, if the forward fails.
        pages: What its attention reads, if that is the pool.
    """

    session: Session
    hooks: list[Any]
    start: int
    stop: int
    work: int = 0
    began: float = 0.0
    requests: Sequence[RequestStats] = ()
    restore: Callable[[], None] | None = None
    pages: Pages | None = None


class _Here(threading.local):
    """What one thread is in the middle of."""

    depth = 0
    outer: Arguments | None = None
    underway: _Underway | None = None
    passed_through = False
    last_bypass: tuple[str, int] | None = None


class HFPlug:
    """Connects one cache with one model. Made by `PrefixCache.for_model`.

    Args:
        cache: The cache to serve from and to feed.
        model: A causal LM of transformers, or a PEFT wrapper around one.
        decode: As in `PrefixCache.for_model`.
    """

    def __init__(self, cache: PrefixCache, model: Any, decode: str = "auto") -> None:
        self._cache = cache
        self.model = unwrap_model(model)
        self.base = base_of(self.model)
        self._config = text_config(self.model)
        self._rope = RopeRule.of(self.model)
        self._watch = ModelWatch(
            self.model, ignore=(self.model, self.base), derived_buffers=self._rope.kind == "plain"
        )
        self._fill = Filler(cache, self.model, may_compute=self._rope.kind == "plain")
        self._dtype = next(self.model.parameters()).dtype
        self._num_hidden_layers = self._count_layers()
        self._outer_call = ForwardCall(self.model)
        self._call = ForwardCall(self.base)
        self._leader = next(i for i, layer in enumerate(cache.layout.layers) if layer is not None)
        self._namespace: Namespace = None
        self._retention: Retention | None = None
        self._attached = False
        self._attachment = 0
        self._handles: list[Any] = []
        self._wrapper_handles: list[Any] = []
        self._users = 0
        self._lock = threading.RLock()
        self._here = _Here()
        self.guard = GenerateGuard(self.model, lambda past: self._explicit_session(past))
        self._live: weakref.WeakSet[Session] = weakref.WeakSet()
        self._dead: deque[Session] = deque()
        self._passed: weakref.WeakSet[Any] = weakref.WeakSet()
        self._passed_prompts: deque[tuple[bytes, Tensor, Tensor | None]] = deque()
        self._warned: set[str] = set()
        self.paged = PagedWay(cache, self.model, self._watch, decode)
        cache.recorder.cost = prefill_cost(self.base, self._config, cache.layout)

    # -- the interface of ModelPlug -------------------------------------------------------------------------

    def attach(
        self,
        model: Any,
        namespace: Namespace,
        holder: list[int] | None = None,
        retention: Retention | None = None,
    ) -> None:
        """As `PrefixCache.attach`; what `detach` takes is appended to `holder` before any interrupt gets through."""
        canonical_namespace(namespace)
        check_supported(unwrap_model(model))
        self._check_model(model)
        self.paged.look()
        attachment = None
        try:
            with InterruptsHeld(), _attach_lock:
                reference = _attached.get(self.model)
                other = None if reference is None else reference()
                if other is not None:
                    whose = "this cache" if other is self else "another cache"
                    raise InvalidRequestError(f"the model is attached to {whose} already: detach it first")
                self._namespace = namespace
                self._retention = retention
                self.install()
                if model is not self.model:  # a PEFT wrapper calls the forward of the model, past its hooks
                    self._wrapper_handles = [
                        model.register_forward_pre_hook(self._enter_model, with_kwargs=True),
                        model.register_forward_hook(self._leave_model, always_call=True),
                    ]
                self._attached = True
                _attached[self.model] = weakref.ref(self)
                self._attachment += 1
                attachment = self._attachment
                if holder is not None:
                    holder.append(attachment)
        except BaseException:  # a Ctrl-C that was held back arrives here, when all is done
            if attachment is not None:
                self.detach(attachment)
            raise

    def detach(self, attachment: int | None = None) -> None:
        """As `PrefixCache.detach`.

        Args:
            attachment: Undo only this one, as `attach` gave it to its `holder`, and nothing if it is undone already.

        Raises:
            InvalidRequestError: Nothing is attached.
        """
        with InterruptsHeld(), _attach_lock:
            if attachment is not None and not (self._attached and self._attachment == attachment):
                return  # the block this one belongs to was detached by hand
            if not self._attached:
                raise InvalidRequestError("no model is attached to this cache")
            self._attached = False
            _attached.pop(self.model, None)
            for handle in self._wrapper_handles:
                handle.remove()
            self._wrapper_handles = []
            self.uninstall()
            self._clear_away()
        self.flush()

    def session(
        self,
        input_ids: Any,
        namespace: Namespace,
        attention_mask: Any,
        retention: Retention | None = None,
    ) -> ExplicitSession:
        """As `PrefixCache.session`."""
        canonical_namespace(namespace)
        ids, pads = read_prompt(
            input_ids, attention_mask, int(self._config.vocab_size), self._cache.layout.device
        )
        self._check_model(self.model)
        self.paged.look()
        return ExplicitSession(self, ids, pads, namespace, retention)

    def key(self, namespace: Namespace, num_tokens: int) -> bytes:
        """The tree namespace of a prompt of that many tokens, as things stand now."""
        with self._busy():
            key = self._origin(namespace, num_tokens).key
            if not self._users:
                self._watch.rest()
            return key

    def flush(self) -> None:
        """Store what ended sessions, and this thread's own ones between two forwards, have computed."""
        if self._here.depth or books_are_open():
            return  # called by the garbage collector in the middle of something: later
        self._clear_away()
        with self._busy():
            while self._dead:
                try:
                    session = self._dead.popleft()
                except IndexError:  # another thread was quicker
                    break
                self._store(session, ends=True)
                # Its blocks are given back when its layers die, which somebody may have put into another cache.
                del session
            self.paged.tidy()
            me = threading.get_ident()
            now = None if self._here.underway is None else self._here.underway.session
            with self._lock:
                mine = [s for s in self._live if s.thread == me and not s.explicit and s is not now]
            for session in mine:
                self._store(session)

    def vacate(self, namespace: bytes | None) -> None:
        """Take this thread's sessions out of the pool, whether or not somebody still wants to go on with them."""
        self.flush()
        with self._lock:
            live = list(self._live)
        for session in live:
            if namespace is None or session.origin.namespace == namespace:
                pages = session.pages
                if pages is not None and pages.step is None and session.thread == threading.get_ident():
                    pages.leave("cleared")

    def discard(self, namespace: bytes | None) -> None:
        """Let open sessions store nothing: those of a namespace (canonical), or all (None)."""
        with self._lock:
            for session in list(self._live):
                if namespace is None or session.origin.namespace == namespace:
                    session.trusted = False

    def invalidate(self) -> None:
        """Treat the weights as changed."""
        self._watch.bump()

    # -- hooks on and off -----------------------------------------------------------------------------------

    def _check_model(self, model: Any) -> None:
        inner = unwrap_model(model)
        if inner is not self.model:
            raise InvalidRequestError(
                "this cache was made for another model object: make one with PrefixCache.for_model(model)"
            )
        parameter = next(inner.parameters())
        if parameter.device != self._cache.layout.device:
            raise InvalidRequestError(
                f"the model is on {parameter.device} and the cache on {self._cache.layout.device}: "
                "move the model back, or make a new cache with PrefixCache.for_model(model)"
            )
        if parameter.dtype != self._dtype:
            raise InvalidRequestError(
                f"the model is now in {parameter.dtype}, and was in {self._dtype} when the cache was made: "
                "make a new cache with PrefixCache.for_model(model)"
            )

    def _count_layers(self) -> int:
        return int(getattr(self._config, "num_hidden_layers", 0))

    def install(self) -> None:
        """One more user of the hooks; the first one puts them on the model."""
        with self._lock:
            self._users += 1
            if self._users == 1:
                self._handles = [
                    self.model.register_forward_pre_hook(self._enter_model, with_kwargs=True),
                    self.model.register_forward_hook(self._leave_model, always_call=True),
                    self.base.register_forward_pre_hook(self._before_base, with_kwargs=True),
                    self.base.register_forward_hook(self._after_base),
                    self.base.register_forward_hook(self._end_attention, always_call=True),
                ]

    def uninstall(self) -> None:
        """One user less; the last one takes the hooks off."""
        with self._lock:
            self._users -= 1
            if self._users == 0:
                for handle in self._handles:
                    handle.remove()
                self._handles = []
                self._watch.rest()

    # -- storing --------------------------------------------------------------------------------------------

    @contextmanager
    def _busy(self) -> Iterator[None]:
        """While set, a session ended by the garbage collector in this thread is only put aside."""
        self._here.depth += 1
        try:
            yield
        finally:
            self._here.depth -= 1

    def _adopt(self, past: Any, session: Session) -> None:
        with self._lock:
            self._live.add(session)
        # At exit there is nobody left to store for.
        weakref.finalize(past, self._cache_died, session).atexit = False

    def _cache_died(self, session: Session) -> None:
        self._dead.append(session)
        with InterruptsHeld(later=True):
            self.flush()

    def close(self, session: Session) -> None:
        """A session came to its end: store what it computed."""
        self._abandon()
        with self._busy():
            self._store(session, ends=True)

    def _store(self, session: Session, *, tails: bool = True, ends: bool = False) -> None:
        if not session.has_news:
            return
        if self._watch.may_drop():
            session.trusted = False
            return
        session.commit(self._cache, self._watch.state(), tails=tails, ends=ends)
        if session.wrong_dtype:
            session.wrong_dtype = False
            self._count("dtype")

    # -- the hook on the model ------------------------------------------------------------------------------

    @property
    def _stand_aside(self) -> bool:
        """Whether radixkv itself makes this thread's forward: none of the hooks' business."""
        return self._fill.running or in_own_forward()

    @not_traced
    def _enter_model(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._stand_aside:
            self._abandon()
            self._here.outer = (args, kwargs)

    @not_traced
    def _leave_model(self, *_: Any) -> None:
        if not self._stand_aside:
            self._here.outer = None
            self._abandon()

    def _read(self, outer: Arguments | None) -> OuterCall | None:
        """What the call on the model wants; None if the base model was called directly."""
        if outer is None:
            return None
        call = self._outer_call.by_name(*outer)
        return OuterCall.read(call, self._outer_call.cache_name, self.model.config)

    def _abandon(self) -> None:
        """If the last forward of this thread never came to its end, undo what was prepared for it."""
        self._end_attention()
        underway, self._here.underway = self._here.underway, None
        if underway is not None and underway.hooks is not self._handles:
            underway.session.trusted = False  # detached meanwhile: its end may just not have been seen
        elif underway is not None:
            underway.session.undo(underway.start)
            if underway.restore is not None:
                underway.session.trusted = False
                underway.restore()

    def _clear_away(self) -> None:
        """Let go of a forward that an interrupt has ended, after which torch calls no hooks."""
        if self._here.underway is not None and not self._stand_aside and not is_running(self.base):
            self._abandon()

    @not_traced
    def _end_attention(self, *_: Any) -> None:
        """Whatever became of this thread's forward, it does not attend over the pool any more."""
        underway = self._here.underway
        if underway is not None and underway.pages is not None and not self._stand_aside:
            underway.pages.end_step()

    # -- the hooks on the base model ------------------------------------------------------------------------

    @not_traced
    def _before_base(
        self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if self._stand_aside or module is not self.base:  # a copy of the model has copies of the hooks
            return None
        self._abandon()
        # An interrupt may have left these behind: torch runs no hooks after a KeyboardInterrupt.
        self._here.depth = 0
        outer, self._here.outer = self._here.outer, None
        self._here.passed_through = False
        call = self._call.by_name(args, kwargs)
        leader = self._leader_of(call.get(self._call.cache_name))
        if leader is not None and leader.ended:
            leader.refuse()
        session = None if leader is None else leader.book
        if isinstance(session, Session):
            if session.owner is self:
                return (), self._go_on(session, call, outer)
            if session.owner.model is not self.model:
                raise InvalidRequestError("this cache object belongs to a session of another model")
            return None  # another cache serves this call
        if not self._attached:
            return None
        edited = self._begin(call, outer)
        return None if edited is None else ((), edited)

    @not_traced
    def _after_base(self, module: Any, args: Any, output: Any) -> None:
        if self._stand_aside or module is not self.base:
            return
        if self._here.passed_through:
            # The cache that the model made itself comes back with the next token: not a new bypass.
            self._here.passed_through = False
            self._note_passed(cache_in(output))
        underway, self._here.underway = self._here.underway, None
        if underway is not None and underway.pages is not None:
            underway.pages.finish_step()
        if underway is None or not underway.work:
            return
        seconds = time.perf_counter() - underway.began
        session = underway.session
        if not session.consistent or session.columns != underway.stop:
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
                self._store(session, tails=False)
                session.forget_stored(self._cache.block_size)

    def _explicit_session(self, past: Any) -> Session | None:
        leader = self._leader_of(past)
        session = None if leader is None else leader.book
        return session if isinstance(session, Session) and session.explicit else None

    def _leader_of(self, past: Any) -> SessionLayer | None:
        """The layer of a cache object of ours that keeps in touch with its session."""
        layers = getattr(past, "layers", None)
        if not isinstance(layers, list) or len(layers) <= self._leader:
            return None
        leader = layers[self._leader]
        return leader if isinstance(leader, SessionLayer) else None

    # -- a fresh cache --------------------------------------------------------------------------------------

    def _begin(self, call: dict[str, Any], arguments: Arguments | None) -> dict[str, Any] | None:
        """First forward of a fresh cache: fill it and trim the call; None to leave everything alone."""
        name = self._call.cache_name
        past = call.get(name)
        outer = self._read(arguments) or OuterCall.read(call, name, self.model.config)
        self.flush()
        with self._busy():
            return self._begin_quietly(call, past, outer)

    def _begin_quietly(self, call: dict[str, Any], past: Any, outer: OuterCall) -> dict[str, Any] | None:
        name = self._call.cache_name
        parameter = next(self.model.parameters())
        reason = bypass_reason(
            call,
            name,
            outer,
            training=self._watch.may_drop(),
            use_cache_default=bool(getattr(self._config, "use_cache", True)),
            shortened=self._count_layers() != self._num_hidden_layers,
            moved=(parameter.device, parameter.dtype) != (self._cache.layout.device, self._dtype),
            # Cached KV has no graph: gradients through it would silently lack the prefix's part.
            differentiable=any(parameter.requires_grad for parameter in self.model.parameters()),
        )
        if reason is None:
            ids = call["input_ids"]
            pads, reason = left_padding(call, (ids.shape[0], ids.shape[1]))
        if reason is None:
            origin = self._origin(self._namespace, ids.shape[1] - int(pads.min()), self._retention)
            reason = self._unsharable(origin)
        if reason is not None:
            self._pass_through(reason, call, past)
            return None

        serve = outer.wants_cache
        if not serve:  # all logits are wanted, so all tokens must be computed; their KV can be kept
            self._count("full_logits")
        self._tell_passed()
        began = time.perf_counter()
        ahead = max(1, int(outer.keep or 0)) if serve else ids.shape[1]
        pages = self.paged.pages(pads.tolist(), self._autocast())
        filled = self._fill.fill(ids, call.get("attention_mask"), pads, origin, ahead, pages)
        session = self._new_session(origin, filled.layers, pads, ids, explicit=False)
        session.feed(ids, self._rope)
        restore = None
        if past is None:
            past = bare_cache(filled.layers)
        else:
            restore = install_layers(past, filled.layers)
        self._adopt(past, session)
        edited = trimmed(call, filled.skip)
        edited[name] = past
        work = ids.shape[0] * (ids.shape[1] - filled.skip) + filled.computed_ahead
        requests = filled.requests() if serve else []
        self._here.underway = _Underway(
            session, self._handles, filled.skip, ids.shape[1], work, began, requests, restore, session.pages
        )
        self._attend_over_pool()
        return edited

    def _attend_over_pool(self) -> None:
        """Let the forward under way, if its session lies in the pool, read and write there."""
        underway = self._here.underway
        assert underway is not None
        if underway.pages is not None:
            step = underway.pages.begin(underway.start, underway.stop - underway.start)
            if step is not None:
                step.open()

    def _pass_through(self, reason: str, call: dict[str, Any], past: Any) -> None:
        if reason in ("own_cache", "foreign_cache", "static_cache") and self._was_passed(past):
            return
        ids = call.get("input_ids")
        length = -1 if ids is None else int(ids.shape[-1])
        last, self._here.last_bypass = self._here.last_bypass, (reason, length)
        self._here.passed_through = True
        self._note_passed(past)
        # A loop without a cache sends everything again, one token longer: still the same call.
        if reason != "use_cache_false" or last != (reason, length - 1):
            self._count(reason)
            if reason not in _TOKENS_ARE_NOT_ALL:
                self._remember_passed(self._namespace, ids, call.get("attention_mask"))

    def _remember_passed(self, namespace: Namespace, ids: Any, mask: Any) -> None:
        """Note the prompts of a call that is passed through, so that a miss of them later can be explained."""
        if not isinstance(ids, Tensor) or ids.dim() != 2:
            return
        if not isinstance(mask, Tensor) or mask.shape != ids.shape:
            mask = None
        # A copy, for the caller may write to theirs; read back later, so as not to wait for a GPU now.
        self._passed_prompts.append((canonical_namespace(namespace), ids.detach().clone(), mask))
        if ids.device.type == "cpu" or len(self._passed_prompts) > _MOST_PASSED:
            self._tell_passed()

    def _tell_passed(self) -> None:
        while self._passed_prompts:
            try:
                user, ids, mask = self._passed_prompts.popleft()
            except IndexError:  # another thread was quicker
                return
            host = ids.cpu().numpy().astype(np.int64, copy=False)
            seen = None if mask is None else mask.detach().cpu().numpy() != 0
            for i, row in enumerate(host):
                self._cache.note_bypass(row if seen is None else row[seen[i]], user)

    def _was_passed(self, past: Any) -> bool:
        try:
            return past in self._passed
        except TypeError:  # tuples of old code cannot be referenced weakly
            return False

    def _note_passed(self, past: Any) -> None:
        if past is not None and not isinstance(past, tuple):
            self._passed.add(past)

    def _count(self, reason: str) -> None:
        self._cache.recorder.record_bypass(reason)
        with self._lock:
            first = reason not in self._warned
            self._warned.add(reason)
        if first:
            warn_user(
                f"radixkv passed a call through without reusing KV, because {WHY[reason]} "
                f"(counted in stats.bypasses[{reason!r}]; shown once)"
            )

    def _filler_ids(self) -> tuple[int, frozenset[int]] | None:
        """What `generate()` feeds rows with after their end, and the ids that end them."""
        config = getattr(self.model, "generation_config", None) or self.model.config
        ends = getattr(config, "eos_token_id", None)
        ends = frozenset(ends if isinstance(ends, (list, tuple)) else () if ends is None else (ends,))
        pad = getattr(config, "pad_token_id", None)
        if pad is None:
            pad = min(ends, default=None)
        return None if pad is None else (int(pad), ends)

    def _new_session(
        self, origin: Origin, layers: list[Any], pads: np.ndarray, ids: Tensor, *, explicit: bool
    ) -> Session:
        return Session(self, origin, layers, pads, ids, filler=self._filler_ids(), explicit=explicit)

    def _unsharable(self, origin: Origin) -> str | None:
        """Why KV of this origin must not be shared, judged by the model and not by the call."""
        if self._watch.rows_differ:
            return "extra_inputs"
        return "rope_limit" if self._rope.regime(origin.prompt_tokens) is None else None

    def _autocast(self) -> str:
        device = self._cache.layout.device.type
        return str(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else ""

    def _circumstances(self) -> tuple[bytes, int, str]:
        """What KV depends on beside weights and tokens, cheap enough to look at in every forward."""
        return (*self._watch.circumstances(), self._autocast())

    def _origin(self, namespace: Namespace, num_tokens: int, retention: Retention | None = None) -> Origin:
        circumstances = self.circumstances()
        state, cast = circumstances
        user = canonical_namespace(namespace)
        key = self.key_under(circumstances, namespace, num_tokens)
        self._cache.learn_key(key, user)
        return Origin(key, user, state, (state[1], state[2], cast), num_tokens, retention)

    # -- for engines ----------------------------------------------------------------------------------------

    @property
    def rope(self) -> RopeRule:
        """How long cached keys of this model stay right."""
        return self._rope

    @property
    def vocab_size(self) -> int:
        """Token ids lie below it."""
        return int(self._config.vocab_size)

    def require_servable(self, model: Any) -> None:
        """Make sure that `model` is the one of the cache, where and as it was, and in evaluation mode.

        Raises:
            InvalidRequestError: It is not; the message says what to do.
        """
        self._check_model(model)
        if self._watch.may_drop():
            raise InvalidRequestError(
                "the model is in training mode, where dropout makes KV random: call model.eval()"
            )
        if self._count_layers() != self._num_hidden_layers:
            raise InvalidRequestError("the model has another number of layers than when the cache was made")

    def circumstances(self, ahead: bool = False) -> tuple[State, str]:
        """What KV depends on beside tokens and namespace, as of now: weights, adapters, patches, autocast.

        Args:
            ahead: Do not wait for a GPU to compare weights; `overtaken` is asked before anything is computed.
        """
        return self._watch.state(ahead), self._autocast()

    def overtaken(self) -> bool:
        """Whether weights had changed when `circumstances(ahead=True)` said that they had not."""
        return self._watch.overtaken()

    def attention(self) -> tuple[Any, ...]:
        """How attention is computed, as of now; a change of it is one of circumstances, too."""
        return self._watch.attention()

    def rest(self) -> None:
        """Let go of views into the weights until `circumstances` is asked for again."""
        if not self._users:
            self._watch.rest()

    def key_under(self, circumstances: tuple[State, str], namespace: Namespace, num_tokens: int) -> bytes:
        """Namespace in the tree for a prompt of this length."""
        (epoch, adapters, patches), cast = circumstances
        regime = self._rope.regime(num_tokens) or "none"
        user = canonical_namespace(namespace)
        return canonical_namespace(("radixkv.hf", str(epoch), adapters, str(patches), cast, regime, user))

    # -- explicit sessions ----------------------------------------------------------------------------------

    def open(
        self, ids: Tensor, pads: np.ndarray, namespace: Namespace, retention: Retention | None
    ) -> tuple[SessionCache, Session]:
        """Make the cache of an explicit session, filled with what is cached of its prompt."""
        origin = self._origin(namespace, ids.shape[1] - int(pads.min()), retention)
        reason = "training" if self._watch.may_drop() else self._unsharable(origin)
        usable = reason is None
        columns = ids.shape[1]
        mask = None
        if pads.any():
            starts = torch.as_tensor(pads, device=ids.device)[:, None]
            mask = (torch.arange(columns, device=ids.device) >= starts).to(torch.int64)
        if reason is not None:
            self._count(reason)
            self._remember_passed(namespace, ids, mask)
        self._tell_passed()
        with self._busy():
            began = time.perf_counter()
            pages = self.paged.pages(pads.tolist(), self._autocast()) if usable else None
            filled = self._fill.fill(ids, mask, pads, origin, 1 if usable else columns, pages)
            if filled.computed_ahead and self._cache.layout.device.type == "cpu":
                self._cache.recorder.record_prefill(filled.computed_ahead, time.perf_counter() - began)
            requests = filled.requests() if usable else [_passed(row.tokens) for row in filled.rows]
            self._cache.recorder.record_requests(requests)
            session = self._new_session(origin, filled.layers, pads, ids, explicit=True)
            session.trusted = usable
            session.feed(ids[:, : filled.skip], self._rope)
            with self._lock:
                self._live.add(session)
        return SessionCache(filled.layers, filled.skip), session

    # -- later forwards -------------------------------------------------------------------------------------

    def _go_on(self, session: Session, call: dict[str, Any], arguments: Arguments | None) -> dict[str, Any]:
        name = self._call.cache_name
        takes_positions = self._call.accepts("position_ids")
        in_prompt = session.explicit and session.columns < session.prompt.shape[1]
        if in_prompt:
            call = guard_prompt(session, call, self._read(arguments) or OuterCall(), name, takes_positions)
            if call[name] is None:
                if not session.bypassed:
                    self._count("use_cache_false")
                session.bypassed = True
                return call
        elif call.get("use_cache") is False:
            if session.explicit:
                raise InvalidRequestError("use_cache=False with the cache of a session: leave use_cache out")
            session.trusted = False
        ids = call.get("input_ids")
        if ids is None or ids.dim() != 2 or self._count_layers() != self._num_hidden_layers:
            session.trusted = False
            if session.pages is not None:
                session.pages.leave("layer_count" if ids is not None else "inputs_embeds")
            return call
        if (
            self.base.training
            or brings_data(call, name)
            or self._circumstances() != session.origin.circumstances
        ):
            session.trusted = False
        if ids.shape[0] != session.num_rows and ids.shape[0] % session.num_rows == 0:
            session.expand(ids.shape[0] // session.num_rows)
        if session.explicit and not in_prompt:
            call = place(session, dict(call), takes_positions)
        session.expect_plain(call.get("attention_mask"), call.get("position_ids"), ids.shape[1])
        start = session.columns
        outer = None if session.pages is None else self._read(arguments)
        pages = self.paged.stay_or_leave(session, call, outer)
        session.feed(ids, self._rope)
        underway = _Underway(session, self._handles, start, start + ids.shape[1], pages=pages)
        if in_prompt:
            underway.work, underway.began = ids.numel(), time.perf_counter()
        self._here.underway = underway
        self._attend_over_pool()
        return call

    def __deepcopy__(self, memo: dict[int, Any]) -> HFPlug:
        # `copy.deepcopy(model)` copies its hooks: on the copy they find another module, and do nothing.
        return self


def _passed(tokens: np.ndarray) -> RequestStats:
    """The record of a prompt that is served, but not from the cache."""
    return RequestStats(len(tokens), 0, len(tokens), 0, "bypassed")
