"""Choosing between the two ways of a session: in the pool, or in buffers of its own."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from radixkv.attention import AttentionBackend, backend_choice, make_backend
from radixkv.attention.flashinfer_backend import FlashInferBackend
from radixkv.cache.prefix_cache import PrefixCache
from radixkv.core.errors import RadixKVError, UnsupportedModelError, is_out_of_memory
from radixkv.core.warn import warn_user
from radixkv.hf.calls import OuterCall
from radixkv.hf.paged_session import Pages, Room
from radixkv.hf.paged_session_probe import find_out
from radixkv.hf.paged_session_step import PagedAttention
from radixkv.hf.routing import attention_name
from radixkv.hf.session import Session
from radixkv.hf.watch import ModelWatch

__all__ = ["PagedWay"]

_log = logging.getLogger(__name__)


class PagedWay:
    """Says which sessions of a model lie in the pool, and takes those out that cannot stay.

    Args:
        cache: Whose pool.
        model: The causal LM.
        watch: Tells how attention is computed.
        decode: As in `PrefixCache.for_model`.

    Attributes:
        make: Makes an attention backend; each is used by one thread at a time.
        reason: Why no session lies in the pool; None if they do, or it is not known yet.
    """

    def __init__(self, cache: PrefixCache, model: Any, watch: ModelWatch, decode: str) -> None:
        self.make: Callable[[], AttentionBackend] = lambda: make_backend("auto", cache.layout.device)
        self.reason: str | None = None
        self._cache = cache
        self._model = model
        self._watch = watch
        self._decode = decode
        self._lock = threading.RLock()
        self._room = Room(cache.pool, cache.store, cache.lock, cache.tree.allocate, cache.recorder)
        self._idle: deque[AttentionBackend] = deque()
        self._how: PagedAttention | None = None
        self._seen: Any = None
        if decode == "auto":
            name, reason = backend_choice(cache.layout.device)
            if name != "flashinfer":
                self._decode, self.reason = "contiguous", reason
        elif decode == "paged":
            self.look()

    def use(self, make: Callable[[], AttentionBackend]) -> None:
        """Take other attention backends from now on, as tests and benchmarks do.

        Args:
            make: Makes one; each is used by one thread at a time.
        """
        with self._lock:
            self.make, self._seen = make, None
            self._idle.clear()
        self.look()

    # -- the model ------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Find out how the model's attention can be taken over, unless that is known already.

        Where it cannot be, sessions are contiguous: with a warning if paged ones were asked for.
        """
        if self._decode == "contiguous":
            return
        with self._lock:
            seen = self._watch.attention_modules()
            if seen == self._seen:
                return
            self._how, self.reason = None, None
            try:
                how = find_out(self._model, self._cache.layout, self._take, self._idle.append)
                self._require_kernels(how)
                self._how = how
            except Exception as error:
                if not (isinstance(error, RadixKVError) or is_out_of_memory(error)):
                    raise
                self.reason = str(error)
                if self._decode == "paged":
                    warn_user(
                        f'decode="paged": sessions of this model keep their KV in buffers of their own ({error})'
                    )
                else:
                    _log.info("decode is contiguous: %s", error)
            self._seen = seen

    def _require_kernels(self, how: PagedAttention) -> None:
        """In `"auto"`, everything must run on FlashInfer."""
        backend = self._take()
        try:
            if self._decode != "auto":
                return
            for kind in how.kinds.values():
                if not isinstance(backend, FlashInferBackend):
                    raise UnsupportedModelError("FlashInfer cannot be used")
                reason = backend.fallback_reason(kind.spec, self._cache.layout.dtype)
                if reason is not None:
                    raise UnsupportedModelError(f"FlashInfer does not compute its attention: {reason}")
        finally:
            self._idle.append(backend)

    def _take(self) -> AttentionBackend:
        try:
            return self._idle.pop()
        except IndexError:
            return self.make()

    # -- sessions -------------------------------------------------------------------------------------------

    def pages(self, pads: Sequence[int], autocast: str) -> Pages | None:
        """Where a new session lies; None for buffers of its own."""
        if self._decode == "contiguous":
            return None
        self._room.tidy()
        if self._how is None or self._watch.attention_modules() != self._seen:
            self._cache.recorder.record_contiguous("model")
            return None
        if autocast:
            self._cache.recorder.record_contiguous("autocast")
            return None
        return Pages(self._room, self._how, pads, self._cache.recorder.record_contiguous)

    def tidy(self) -> None:
        """Give back what sessions left behind that ended where that was not possible."""
        self._room.tidy()

    def stay_or_leave(self, session: Session, call: dict[str, Any], outer: OuterCall | None) -> Pages | None:
        """The session's pages, if the forward that goes on with it can read the pool.

        Args:
            session: Told of all but this forward's tokens.
            call: Of the base model.
            outer: Of the model.
        """
        pages = session.pages
        if pages is None:
            return None
        reason = self._why_not(session, call, outer, pages)
        if reason is None:
            return pages
        pages.leave(reason)
        return None

    def _why_not(
        self, session: Session, call: dict[str, Any], outer: OuterCall | None, pages: Pages
    ) -> str | None:
        if not session.trusted:
            return "untrusted"
        wants = bool(call.get("output_attentions")) or (outer is not None and outer.attentions)
        if wants or getattr(self._model.config, "output_attentions", False):
            return "output_attentions"
        if self._seen[0] != _names(pages):
            return "model"
        ids, mask = call["input_ids"], call.get("attention_mask")
        if ids.shape[0] != session.num_rows:
            return "rows"
        if mask is not None and not _is_plain(session, mask, ids.shape[1]):
            return "attention_mask"
        return None


def _names(pages: Pages) -> tuple[Any, ...]:
    return tuple(attention_name(config) for config in pages.configs)


def _is_plain(session: Session, mask: Tensor, q: int) -> bool:
    """Whether a mask is the session's padding, then ones. On a GPU this waits for what is queued there."""
    total = session.columns + q
    if mask.dim() != 2 or tuple(mask.shape) != (session.num_rows, total):
        return False
    if not session.pads.any():
        return bool((mask == 1).all())
    pads = torch.as_tensor(session.pads, device=mask.device)[:, None]
    return bool((mask == (torch.arange(total, device=mask.device) >= pads)).all())
