"""Noticing that a model computes other KV than it did before.

Most changes show in version counters or in the identity of parameters. Fused optimizers and writes through
`.data` do not; for those an optimizer hook and a small sample of every tensor's content are compared.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
import xxhash
from torch.optim.optimizer import register_optimizer_step_post_hook

from radixkv.hf.routing import attention_configs, attention_name
from radixkv.store.copy_stream import Fetched

__all__ = ["ModelWatch", "State"]

State = tuple[int, bytes, int]

_SAMPLES = 4  # elements of each tensor that are compared
_MAX_PATCHES = 16  # sets of hooks whose KV can be found again

# A part exchanged by `set_input_embeddings`, say, comes in training mode, which changes nothing for these.
_SAME_IN_TRAINING = (torch.nn.Embedding, torch.nn.Linear, torch.nn.LayerNorm, torch.nn.ModuleList)

_watches: weakref.WeakSet[ModelWatch] = weakref.WeakSet()
_hook_lock = threading.RLock()
_hook: Any = None


def _after_optimizer_step(optimizer: Any, *_: Any) -> None:
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for watch in list(_watches):
        watch.note_step(stepped)


class ModelWatch:
    """Says by one small key under what weights, adapters and patches a model now runs.

    `state()` gives the same value as long as nothing changed. A change of weights gives a value never seen
    before; switching an adapter or a patch back gives the earlier value again.

    Args:
        model: The causal LM whose KV is cached.
        ignore: Modules whose own hooks do not count (where observers sit, and our own hooks).
        derived_buffers: Whether buffers outside of the state dict count, such as rotary frequencies. Not where
            the model itself rewrites them as prompts grow.

    Attributes:
        rows_differ: Whether at the last `state()` the rows of a batch ran under different adapters.
    """

    def __init__(
        self, model: torch.nn.Module, ignore: tuple[torch.nn.Module, ...], derived_buffers: bool = True
    ) -> None:
        global _hook
        self._model = model
        self._ignore = {id(module) for module in ignore}
        self._derived_buffers = derived_buffers
        self._epoch = 0
        # Reentrant: a garbage collection inside may end a session, which asks for the state.
        self._lock = threading.RLock()
        self._patches: OrderedDict[tuple[int, ...], tuple[int, list[Callable[[], Any]]]] = OrderedDict()
        self._num_patches = 0
        self._windows: list[list[torch.Tensor]] | None = None
        self._comparison: Fetched | None = None  # under way
        self.rows_differ = False
        self._read()
        with _hook_lock:
            if _hook is None:
                _hook = register_optimizer_step_post_hook(_after_optimizer_step)
            _watches.add(self)

    def state(self, ahead: bool = False) -> State:
        """`(weights epoch, adapters, patches)` as of now.

        Args:
            ahead: Do not wait for a GPU to compare the content of tensors: whether it has found a difference is to be
                asked of `overtaken` before anything is computed under this state.
        """
        with self._lock:
            changed = self._structure() != self._seen_structure or self._versions() != self._seen_versions
            if not changed and ahead and self._compares_elsewhere():
                self._begin_comparison()
            elif changed or not self._same_content():
                self._epoch += 1
                self._read()
            return (self._epoch, *self.circumstances())

    def overtaken(self) -> bool:
        """Whether the content that `state(ahead=True)` had compared had changed; it counts as changed now, if so."""
        with self._lock:
            found, self._comparison = self._comparison, None
            if found is None or not bool(found.get()):
                return False
            self._epoch += 1
            self._read()
            return True

    def circumstances(self) -> tuple[bytes, int]:
        """`(adapters, patches)` as of now, without looking at the weights."""
        return self._adapters(), self._patch_number()

    def rest(self) -> None:
        """Let go of views into the weights, so that a model that is moved meanwhile frees its old memory."""
        with self._lock:
            self._windows = None

    def may_drop(self) -> bool:
        """Whether something inside the model is in training mode that may behave otherwise then (dropout)."""
        return any(module.training and type(module) not in _SAME_IN_TRAINING for module in self._modules)

    def bump(self) -> None:
        """Treat the weights as changed."""
        with self._lock:
            self._epoch += 1

    def note_step(self, stepped: set[int]) -> None:
        """An optimizer stepped tensors of these ids: if some are the model's, the weights have changed."""
        with self._lock:
            if not self._tensor_ids.isdisjoint(stepped):
                self._epoch += 1

    # -- what is compared -----------------------------------------------------------------------------------

    def _read(self) -> None:
        self._modules = list(self._model.modules())
        self._attentions = [module for module in self._modules if "layer_idx" in module.__dict__]
        self._configs = attention_configs(self._model)
        tensors: dict[int, torch.Tensor] = {}
        for module in self._modules:
            skipped = () if self._derived_buffers else module._non_persistent_buffers_set
            buffers = (b for name, b in module._buffers.items() if name not in skipped)
            for tensor in (*module._parameters.values(), *buffers):
                if tensor is not None:
                    tensors.setdefault(id(tensor), tensor)
        # Held, so that no other object can take over an id.
        self._tensors = list(tensors.values())
        self._tensor_ids = set(tensors)
        self._versioned = [t for t in self._tensors if not t.is_inference()]
        self._tuners: list[Any] = [
            m for m in self._modules if hasattr(m, "active_adapters") and hasattr(m, "scaling")
        ]
        self._seen_structure = self._structure()
        self._seen_versions = self._versions()
        self._windows = None
        self._comparison = None
        self._seen_content = self._content()

    def _structure(self) -> list[Any]:
        seen: list[Any] = []
        for module in self._modules:
            seen.extend(map(id, module._modules.values()))
            seen.extend(map(id, module._parameters.values()))
            if self._derived_buffers:
                seen.extend(map(id, module._buffers.values()))
        seen.extend(self.attention())
        return seen

    def attention(self) -> tuple[Any, ...]:
        """How attention is computed, as far as configs and plain attributes say: implementation, windows, scales."""
        seen: list[Any] = []
        for config in self._configs:
            seen += [attention_name(config), getattr(config, "sliding_window", None)]
        for module in self._attentions:
            seen.extend(
                value
                for name, value in module.__dict__.items()
                if type(value) in (int, float, bool, str) and name != "training"
            )
        return tuple(seen)

    def attention_modules(self) -> tuple[Any, ...]:
        """The names of the attention implementations, then everything else that says which code attends."""
        names = tuple(attention_name(config) for config in self._configs)
        parts = tuple((id(module), "forward" in module.__dict__) for module in self._attentions)
        return names, parts, self.attention()

    def _versions(self) -> list[int]:
        return [t._version for t in self._versioned] + [_address(t) for t in self._tensors]

    def _sample_windows(self) -> list[list[torch.Tensor]]:
        """Views of a few spread elements of each tensor, grouped by what one `cat` can join."""
        groups: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
        for tensor in self._tensors:
            if tensor.numel() == 0 or tensor.device.type == "meta" or tensor.layout != torch.strided:
                continue
            if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
                continue
            flat = _line(tensor.detach())
            step = max(1, flat.numel() // _SAMPLES)
            # Starts off the edge: first rows are often special tokens that training leaves alone.
            window = flat[step // 2 :: step][:_SAMPLES]
            groups.setdefault((flat.dtype, flat.device), []).append(window)
        return list(groups.values())

    def _content(self) -> list[torch.Tensor]:
        if self._windows is None:
            self._windows = self._sample_windows()
        with torch.no_grad():
            return [torch.cat(group) for group in self._windows]

    def _same_content(self) -> bool:
        # Bytes, not values: NaN must equal itself.
        return all(
            torch.equal(now.view(torch.uint8), seen.view(torch.uint8))
            for now, seen in zip(self._content(), self._seen_content, strict=True)
        )

    def _compares_elsewhere(self) -> bool:
        """Whether the result of a comparison would have to be waited for."""
        return any(group.device.type != "cpu" for group in self._seen_content)

    def _begin_comparison(self) -> None:
        differ = [
            (now.view(torch.uint8) != seen.view(torch.uint8)).any()
            for now, seen in zip(self._content(), self._seen_content, strict=True)
            if now.numel()
        ]
        by_device: dict[torch.device, list[torch.Tensor]] = {}
        for flag in differ:
            by_device.setdefault(flag.device, []).append(flag)
        flags = [torch.stack(group).any() for group in by_device.values()]
        whole = flags[0] if len(flags) == 1 else torch.stack([flag.cpu() for flag in flags]).any()
        self._comparison = Fetched(whole)

    def _adapters(self) -> bytes:
        if not self._tuners:
            return b""
        state = [
            (
                tuple(tuner.active_adapters),
                bool(getattr(tuner, "disable_adapters", False)),
                tuple(getattr(tuner, "merged_adapters", ())),
                sorted((str(name), repr(scale)) for name, scale in dict(tuner.scaling).items()),
            )
            for tuner in self._tuners
        ]
        return xxhash.xxh3_128_digest(repr(state).encode())

    def _patch_number(self) -> int:
        """Which set of foreign hooks and replaced forwards inside the model is in place (0: none)."""
        patches: list[Any] = []
        for module in self._modules:
            if id(module) in self._ignore:
                continue
            if module._forward_hooks:
                patches.extend(module._forward_hooks.values())
            if module._forward_pre_hooks:
                patches.extend(module._forward_pre_hooks.values())
            if "forward" in module.__dict__:
                patches.append(module.__dict__["forward"])
        # PEFT tells its layers the adapter of each row by hooks that live for one call.
        self.rows_differ = any(
            isinstance(patch, functools.partial) and "adapter_names" in patch.keywords for patch in patches
        )
        if not patches:
            return 0
        ids = tuple(map(id, patches))
        number, references = self._patches.get(ids, (0, []))
        if number and all(ref() is patch for ref, patch in zip(references, patches, strict=True)):
            self._patches.move_to_end(ids)
            return number
        self._num_patches += 1
        # Weak references: they tell a patch from a later one with the same id, and keep nothing alive.
        self._patches[ids] = (self._num_patches, [_reference(patch) for patch in patches])
        if len(self._patches) > _MAX_PATCHES:
            self._patches.popitem(last=False)
        return self._num_patches


def _reference(patch: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(patch)
    except TypeError:  # built-in functions and the like, which nobody makes anew
        return lambda: patch


def _line(tensor: torch.Tensor) -> torch.Tensor:
    """Elements of a tensor in a line, as a view: all of them, or if there is no such view those through its middle."""
    if tensor.is_contiguous():
        return tensor.view(-1)
    longest = max(range(tensor.dim()), key=tensor.size)
    for dim in reversed(range(tensor.dim())):
        if dim != longest:
            tensor = tensor.select(dim, tensor.size(dim) // 2)
    return tensor


def _address(tensor: torch.Tensor) -> int:
    try:
        return tensor.data_ptr()
    except RuntimeError:  # wrapper subclasses have no storage of their own
        return 0
