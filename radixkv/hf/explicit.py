"""Sessions that the user opens: `with cache.session(input_ids) as past`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from radixkv.cache.locking import InterruptsHeld
from radixkv.core.errors import InvalidRequestError
from radixkv.core.eviction import Retention
from radixkv.core.namespace import Namespace
from radixkv.hf.compat import DynamicCache, install_layers
from radixkv.hf.session import Session

if TYPE_CHECKING:
    from radixkv.hf.plug import HFPlug

__all__ = ["ExplicitSession", "SessionCache"]


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


class ExplicitSession:
    """The context manager of a session. It can be entered once: its cache ends with the block.

    A class and not a generator, so that Ctrl-C finds no gap between set-up and the block.
    """

    def __init__(
        self,
        plug: HFPlug,
        ids: Tensor,
        pads: np.ndarray,
        namespace: Namespace,
        retention: Retention | None,
    ) -> None:
        self._plug = plug
        self._prompt = (ids, pads, namespace, retention)
        self._used = False
        self._installed = False
        self._session: Session | None = None

    def __enter__(self) -> SessionCache:
        if self._used:
            raise InvalidRequestError("a session can be entered once: open another with cache.session(...)")
        self._used = True
        try:
            with InterruptsHeld():
                self._plug.install()
                self._plug.guard.enter()
                self._installed = True
            past, self._session = self._plug.open(*self._prompt)
            return past
        except BaseException:
            self._end()
            raise

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        try:
            if kind is None and self._session is not None:
                self._plug.close(self._session)
        finally:
            self._end()

    def _end(self) -> None:
        with InterruptsHeld():
            if self._session is not None:
                self._session.close()
            if self._installed:
                self._installed = False
                self._plug.guard.leave()
                self._plug.uninstall()
