"""What a prefill of a transformers model costs."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from radixkv.observe.prefill_cost import PrefillCost
from radixkv.store.layout import KVLayout

__all__ = ["prefill_cost"]


def prefill_cost(base: torch.nn.Module, config: Any, layout: KVLayout) -> PrefillCost:
    """Estimate it from the sizes of a model; see `PrefillCost`.

    Args:
        base: The model without its output layer.
        config: Its text config: number of query heads, and of experts.
        layout: Sizes and windows of the attention layers.
    """
    embeddings = {
        id(p)
        for m in base.modules()
        if isinstance(m, torch.nn.Embedding)
        for p in m.parameters(recurse=False)
    }
    active = _share_of_experts(config)
    total = 0.0
    for name, parameter in base.named_parameters():
        if parameter.dim() > 1 and id(parameter) not in embeddings:
            total += parameter.numel() * (active if ".experts." in name else 1.0)

    heads = getattr(config, "num_attention_heads", None)
    kinds: Counter[int | None] = Counter()
    if isinstance(heads, int):
        shape = next(layer for layer in layout.layers if layer is not None)
        for layer in layout.layers:
            shape = shape if layer is None else layer  # it reads the KV of an earlier layer
            kinds[shape.window] += heads * (shape.key_dim + shape.value_dim)
    return PrefillCost(round(total), tuple(kinds.items()))


def _share_of_experts(config: Any) -> float:
    """Share of the experts of a mixture that one token goes through; 1.0 if there is no mixture."""
    used = getattr(config, "num_experts_per_tok", None)
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    there = next((n for n in (getattr(config, name, None) for name in names) if isinstance(n, int)), None)
    return used / there if isinstance(used, int) and there else 1.0
