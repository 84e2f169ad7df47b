"""What code that knows a model's library gives to `PrefixCache`, and attaching it for a `with` block."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from radixkv.core.eviction import Retention
from radixkv.core.namespace import Namespace

if TYPE_CHECKING:
    from radixkv.cache.prefix_cache import PrefixCache

__all__ = ["Attached", "ModelPlug"]


class ModelPlug(Protocol):
    """What the facade needs of the code that knows a model's library (see `radixkv.hf`)."""

    def attach(
        self,
        model: Any,
        namespace: Namespace,
        holder: list[int] | None = None,
        retention: Retention | None = None,
    ) -> None:
        """As `PrefixCache.attach`; a number for `detach` is appended to `holder`."""

    def detach(self, attachment: int | None = None) -> None:
        """Undo `attach`: of that number if one is given, and nothing if it is undone already."""

    def session(
        self, input_ids: Any, namespace: Namespace, attention_mask: Any, retention: Retention | None = None
    ) -> AbstractContextManager[Any]:
        """As `PrefixCache.session`."""

    def key(self, namespace: Namespace, num_tokens: int) -> bytes:
        """The tree namespace of a prompt of that many tokens, as things stand now."""

    def require_servable(self, model: Any) -> None:
        """Raise `InvalidRequestError` unless `model` is the one of the cache, unchanged in kind."""

    def circumstances(self, ahead: bool = False) -> Any:
        """What KV depends on beside tokens and namespace, as of now; equal values share KV."""

    def overtaken(self) -> bool:
        """Whether weights had changed when `circumstances(ahead=True)` said that they had not."""

    def attention(self) -> Any:
        """How attention is computed, as of now; a change of it is one of the circumstances, too."""

    def key_under(self, circumstances: Any, namespace: Namespace, num_tokens: int) -> bytes:
        """`key` under circumstances that were noted before."""

    def rest(self) -> None:
        """Let go of what is kept of the weights until `circumstances` is asked for again."""

    @property
    def vocab_size(self) -> int:
        """Token ids lie below it."""

    def flush(self) -> None:
        """Store what sessions of this thread have computed."""

    def vacate(self, namespace: bytes | None) -> None:
        """Take this thread's sessions out of the pool: those of a namespace, or all (None)."""

    def discard(self, namespace: bytes | None) -> None:
        """Let open sessions store nothing: those of a namespace, or all (None)."""

    def invalidate(self) -> None:
        """Treat the weights as changed."""


class Attached:
    """`with cache.attached(model)`. A class, so that Ctrl-C finds no gap between `attach` and the block."""

    def __init__(
        self,
        cache: PrefixCache,
        plug: ModelPlug,
        model: Any,
        namespace: Namespace,
        retention: Retention | None,
    ) -> None:
        self._cache = cache
        self._plug = plug
        self._call = (model, namespace)
        self._retention = retention
        self._attachments: list[int] = []

    def __enter__(self) -> PrefixCache:
        self._plug.attach(*self._call, self._attachments, self._retention)
        return self._cache

    def __exit__(self, *_: object) -> None:
        self._end()

    def __del__(self) -> None:
        # Ctrl-C at the very entry of `__exit__` ends it before its first line.
        self._end()

    def _end(self) -> None:
        while self._attachments:  # forgotten only when done, and done twice does no harm
            self._plug.detach(self._attachments[-1])
            self._attachments.pop()
