"""Taking the attention of an unmodified transformers model over for the length of a forward.

transformers asks `AttentionInterface` for the attention function that a config names, and
`AttentionMaskInterface` for the mask function. Under the name that is put into the configs for the length of a
forward, both look at a context variable: in a thread with a `Diversion` that takes over, everywhere else (in
another thread that runs the same model, say) they do what the model does without us. The name carries the
implementation that the model had, so nothing has to be looked up for that.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Sequence
from contextvars import ContextVar, Token
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from radixkv.cache.locking import InterruptsHeld
from radixkv.core.errors import UnsupportedModelError
from radixkv.hf.compat import not_traced
from radixkv.hf.support import base_of

__all__ = ["AttentionCall", "Diversion", "Routing", "attention_configs", "attention_name", "plain_mask"]

_PREFIX = "radixkv_paged_"


# -- the registered functions -------------------------------------------------------------------------------


@dataclass
class AttentionCall:
    """What a module handed to the attention function, and the name of the one it meant."""

    original: str
    module: Any
    query: Tensor
    key: Tensor
    value: Tensor
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def plain(self) -> Any:
        """What the model would have computed."""
        function = plain_attention(self.original, self.module)
        return function(self.module, self.query, self.key, self.value, *self.args, **self.kwargs)


class Diversion:
    """What takes attention and masks over while it is the current one of this thread."""

    def attend(self, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
        """Attention of one layer: its output, and the weights or None."""
        raise NotImplementedError

    def mask(self, original: str, args: Any, kwargs: Any) -> Any:
        """What the model gets for a mask."""
        raise NotImplementedError


_current: ContextVar[Diversion | None] = ContextVar("radixkv_paged_forward", default=None)
_lock = threading.RLock()
_names: dict[str, str] = {}


def _name_for(original: str) -> str:
    """The registered name under which a model that had `original` falls through to it."""
    if original.startswith(_PREFIX):  # a copy of a config that was made during a forward
        return original
    with _lock:
        if original not in _names:
            name = _PREFIX + original
            AttentionInterface.register(name, functools.partial(_attention, original))
            AttentionMaskInterface.register(name, functools.partial(_mask, original))
            _names[original] = name
        return _names[original]


@not_traced
def _attention(
    original: str, module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
) -> Any:
    call = AttentionCall(original, module, query, key, value, args, kwargs)
    diverted = _current.get()
    return call.plain() if diverted is None else diverted.attend(call)


@not_traced
def _mask(original: str, *args: Any, **kwargs: Any) -> Any:
    diverted = _current.get()
    return plain_mask(original, args, kwargs) if diverted is None else diverted.mask(original, args, kwargs)


def plain_mask(original: str, args: Any, kwargs: Any) -> Any:
    """The mask that the model would have got under the name `original`."""
    function = ALL_MASK_ATTENTION_FUNCTIONS.get(original)
    return None if function is None else function(*args, **kwargs)


def plain_attention(original: str, module: Any) -> Any:
    """The function that the attention module would have called under the name `original`.

    Raises:
        UnsupportedModelError: There is none to be found.
    """
    for kind in type(module).__mro__:  # a class derived elsewhere runs the forward of the file it comes from
        names = vars(sys.modules.get(kind.__module__, object))
        interface = names.get("ALL_ATTENTION_FUNCTIONS")
        if interface is None:
            continue
        if original in interface:  # a file may have functions of its own
            return interface[original]
        if original == "eager" and "eager_attention_forward" in names:
            return names["eager_attention_forward"]
    if original in ALL_ATTENTION_FUNCTIONS:
        return ALL_ATTENTION_FUNCTIONS[original]
    raise UnsupportedModelError(f"{type(module).__name__} has no attention function of the name {original!r}")


# -- putting the name into configs ----------------------------------------------------------------------------


def attention_name(config: Any) -> Any:
    """The attention implementation that a config names, also while a forward diverts it."""
    name = getattr(config, "_attn_implementation", None)
    return name.removeprefix(_PREFIX) if isinstance(name, str) else name


def attention_configs(model: Any) -> tuple[Any, ...]:
    """The configs in which the decoder layers of a model, and what makes their masks, look the name up."""
    base = base_of(model)
    found = {id(base.config): base.config}
    by_name = dict(base.named_modules())
    for path, module in by_name.items():
        if getattr(module, "layer_idx", None) is None:
            continue
        parts = path.split(".")
        for depth in range(len(parts) + 1):
            config = getattr(by_name[".".join(parts[:depth])], "config", None)
            if hasattr(config, "_attn_implementation_internal"):
                found[id(config)] = config
    return tuple(found.values())


@dataclass
class _Route:
    config: Any
    original: str
    users: int


_routes: dict[int, _Route] = {}  # by id of the config; a route holds its config


class Routing:
    """Diverts the attention of a model, in this thread, for the length of a call.

    Args:
        configs: From `attention_configs`; empty where nothing is to be diverted.
        diverted: What takes over; None falls through, as in any other thread.
    """

    def __init__(self, configs: Sequence[Any], diverted: Diversion | None) -> None:
        self._configs = configs
        self._diverted = diverted
        self._routed: list[Any] = []
        self._token: Token[Diversion | None] | None = None

    def around(self, forward: Callable[[], Any]) -> Any:
        """The result of `forward()`. Model and thread are afterwards as they were, also when it raises."""
        try:
            try:
                self.open()
                return forward()
            finally:
                self.close()
        finally:  # once more: Ctrl-C may have come at the first line of the other
            self.close()

    def open(self) -> None:
        """Begin to divert. What is not between two lines of one function, see `around`, must be closed by hand."""
        with InterruptsHeld(), _lock:
            self._token = _current.set(self._diverted)
            for config in self._configs:
                _divert(config)
                self._routed.append(config)

    def close(self) -> None:
        """Stop diverting. Nothing happens if it has stopped already."""
        if self._token is None:
            return
        with InterruptsHeld(), _lock:
            while self._routed:
                _restore(self._routed.pop())
            token, self._token = self._token, None
            # Opened in another thread or task, nothing there looks at it after this.
            with contextlib.suppress(ValueError):
                _current.reset(token)


def _divert(config: Any) -> None:
    route = _routes.get(id(config))
    if route is None:
        original = config._attn_implementation
        if not isinstance(original, str):
            raise UnsupportedModelError(
                f"the attention implementation of the model is {original!r}, not a name"
            )
        name = _name_for(original)
        _routes[id(config)] = route = _Route(config, original, 0)
        # Past the setter, which would hand the name on to the configs of vision towers and the like.
        vars(config)["_attn_implementation_internal"] = name
    route.users += 1


def _restore(config: Any) -> None:
    route = _routes[id(config)]
    route.users -= 1
    if route.users == 0:
        del _routes[id(config)]
        # Somebody may have set another one meanwhile, which then stays.
        if config._attn_implementation == _name_for(route.original):
            vars(config)["_attn_implementation_internal"] = route.original
