"""Rotary embeddings whose angles depend on the length: there, cached keys are valid only within a regime."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from radixkv.hf.compat import text_config

__all__ = ["RopeRule"]


@dataclass(frozen=True)
class RopeRule:
    """How long cached keys stay right.

    Attributes:
        kind: `plain` (always right), `dynamic` (angles change with every length above `limit`) or
            `longrope` (one set of angles up to `limit`, another above).
        limit: In tokens; 0 for `plain`.
    """

    kind: str = "plain"
    limit: int = 0

    @classmethod
    def of(cls, model: Any) -> RopeRule:
        """Read it off the config of a model; of several kinds, `dynamic` before `longrope`."""
        config = text_config(model)
        kinds: set[str] = set()
        limits: list[int] = []
        pending = [getattr(config, "rope_parameters", None), getattr(config, "rope_scaling", None)]
        while pending:
            entry = pending.pop()
            if not isinstance(entry, dict):
                continue
            kinds.add(str(entry.get("rope_type", entry.get("type", "default"))))
            if isinstance(entry.get("original_max_position_embeddings"), int):
                limits.append(entry["original_max_position_embeddings"])
            pending.extend(value for value in entry.values() if isinstance(value, dict))
        original = getattr(config, "original_max_position_embeddings", None)
        if isinstance(original, int):
            limits.append(original)
        longest = int(getattr(config, "max_position_embeddings", 0) or 0)
        if "dynamic" in kinds:
            return cls("dynamic", min([*limits, longest]))
        if "longrope" in kinds:
            return cls("longrope", min([*limits, longest]))
        return cls()

    def regime(self, num_tokens: int) -> str | None:
        """Which keys a prompt of this length may share; None if it must not use the cache."""
        if self.kind == "plain" or num_tokens <= self.limit:
            return "short"
        return None if self.kind == "dynamic" else "long"

    def crosses(self, prompt_tokens: int, reach: int) -> bool:
        """Whether a forward that ends at position `reach` leaves the regime the prompt started in.

        All its keys then belong to the other regime, also those of positions below the limit: the angles
        follow the highest position of the forward.
        """
        return self.kind != "plain" and prompt_tokens <= self.limit < reach
