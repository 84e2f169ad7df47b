"""What one token's keys and values look like in each layer of a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from radixkv.core.errors import InvalidRequestError

__all__ = ["KVLayout", "LayerLayout"]


@dataclass(frozen=True)
class LayerLayout:
    """Shape of the keys and values that one attention layer caches for a token.

    Attributes:
        num_kv_heads: Heads of K and V (not of the queries).
        key_dim: Size of one key head.
        value_dim: Size of one value head; differs from `key_dim` in MLA models.
        window: Keys that a query of this layer can see, itself included; None is full attention.
    """

    num_kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None = None

    def __post_init__(self) -> None:
        if min(self.num_kv_heads, self.key_dim, self.value_dim) < 1:
            raise InvalidRequestError(f"a layer needs at least one head and one element per head, got {self}")
        if self.window is not None and self.window < 1:
            raise InvalidRequestError(f"a sliding window holds at least one key, got {self.window}")

    @property
    def elements_per_token(self) -> int:
        """Elements of K and V together that one token takes in this layer."""
        return self.num_kv_heads * (self.key_dim + self.value_dim)


@dataclass(frozen=True)
class KVLayout:
    """The layers of a model, their dtype and their device.

    Attributes:
        layers: One entry for each cache layer, None where a layer keeps no KV of its own (layers that
            share the KV of an earlier one).
        dtype: Element type of K and V.
        device: Where they live.

    Raises:
        InvalidRequestError: No layer keeps KV.
    """

    layers: tuple[LayerLayout | None, ...]
    dtype: torch.dtype
    device: torch.device

    def __post_init__(self) -> None:
        if not any(layer is not None for layer in self.layers):
            raise InvalidRequestError("a layout needs at least one layer that holds keys and values")

    @classmethod
    def uniform(
        cls,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        windows: Sequence[int | None] | None = None,
    ) -> KVLayout:
        """The usual case: every layer alike, but for its window.

        Args:
            num_layers: Layers of the model.
            num_kv_heads: Heads of K and V in each.
            head_dim: Size of one head, of keys and of values.
            dtype: Element type.
            device: Where the KV lives.
            windows: The window of each layer, None for full attention; None: no layer has one.

        Raises:
            InvalidRequestError: The number of windows is not that of the layers.
        """
        kinds = windows if windows is not None else [None] * num_layers
        layers = tuple(LayerLayout(num_kv_heads, head_dim, head_dim, window) for window in kinds)
        if len(layers) != num_layers:
            raise InvalidRequestError(f"{len(layers)} windows given for {num_layers} layers")
        return cls(layers, dtype, torch.device(device))

    @property
    def bytes_per_token(self) -> int:
        """Bytes of K and V of one token over all layers."""
        elements = sum(layer.elements_per_token for layer in self.layers if layer is not None)
        return elements * self.dtype.itemsize
