"""Records of single prompts: how much of each was hit, and why it was not more."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

__all__ = ["MISS_REASONS", "OTHER_CIRCUMSTANCES", "MissNote", "RequestStats"]

MISS_REASONS = {
    "never_seen": "never cached before",
    "evicted": "cached before and evicted since",
    "cleared": "cached before, until the cache was cleared",
    "other_namespace": "cached in another namespace",
    "bypassed": "computed before, but by a call that was passed through (see stats.bypasses)",
    "not_kept": "computed before, but there was no room to keep it",
    "unknown": "new, or so old that the cache has forgotten what became of it",
    "unused": "cached, but taking it was not worth its cost in this call",
}
"""Why a position is not served from the cache, as it follows "from position 12 on," or "the rest was"."""

OTHER_CIRCUMSTANCES = ", under other weights, adapters or settings of the model"
"""End of `seen_in` where the namespace is the prompt's own."""


class MissNote(NamedTuple):
    """What a lookup found of a prompt that is not cached whole.

    Attributes:
        diverged_at: The first position that is not cached.
        reason: Why not; a key of `MISS_REASONS`.
        seen_in: With "other_namespace": which one, readable.
    """

    diverged_at: int
    reason: str
    seen_in: str | None = None


@dataclass(frozen=True)
class RequestStats:
    """One prompt: `prompt_tokens = hit_tokens + computed_tokens`, always.

    Attributes:
        prompt_tokens: Tokens of the prompt, padding left out.
        hit_tokens: Of these, tokens whose prefill was skipped.
        computed_tokens: Of these, tokens that went through the model for this prompt.
        diverged_at: First position that the cache did not hold when the prompt was looked up; None if it held all
            that could be used. Mostly `hit_tokens`: that is less where a short hit was not worth taking, and more
            where another prompt of the same batch computed what both have in common.
        miss_reason: Why that position was not served; a key of `radixkv.observe.MISS_REASONS`, None for a full hit.
        seen_in: With "other_namespace": in which, as Python would print it.
        required_tokens: Tokens at the end that go through the model in any case: 1, or as many as logits were
            asked for.
        rid: The engine's name for the request; None elsewhere.
    """

    prompt_tokens: int
    hit_tokens: int
    computed_tokens: int
    diverged_at: int | None = None
    miss_reason: str | None = None
    seen_in: str | None = None
    required_tokens: int = 1
    rid: Hashable | None = None

    @classmethod
    def of(
        cls, prompt_tokens: int, hit_tokens: int, note: object, *, required: int = 1, rid: Hashable = None
    ) -> RequestStats:
        """The record of a prompt, with the note that its lookup gave; None is a note, too: all was cached."""
        required = max(1, min(required, prompt_tokens))
        diverged_at, reason, seen_in = note if isinstance(note, MissNote) else (None, None, None)
        if (
            hit_tokens >= prompt_tokens - required
        ):  # full, if only because of another prompt of the same batch
            reason = seen_in = diverged_at = None
        elif reason is None:
            reason = "unused"
        computed = prompt_tokens - hit_tokens
        return cls(prompt_tokens, hit_tokens, computed, diverged_at, reason, seen_in, required, rid)

    @property
    def outcome(self) -> str:
        """`"full"`: all was hit but what must be computed; else `"partial"`, or `"none"`. A single token is full."""
        if self.hit_tokens >= self.prompt_tokens - self.required_tokens:
            return "full"
        return "partial" if self.hit_tokens else "none"

    def explain(self) -> str:
        """One sentence: what was hit, and why it was not more."""
        hit = (
            f"hit {self.hit_tokens or 'none'} of {self.prompt_tokens} token{'s' * (self.prompt_tokens != 1)}"
        )
        if self.outcome == "full":
            if self.prompt_tokens <= self.required_tokens:
                return f"{hit}; all must be computed in any case"
            last = "the last one" if self.required_tokens == 1 else f"the last {self.required_tokens}"
            return f"{hit}; only {last} had to be computed"
        if self.miss_reason is None:
            return hit
        if self.diverged_at is None:
            return f"{hit}; the rest was {MISS_REASONS[self.miss_reason]}"
        if self.hit_tokens < self.diverged_at:
            cached = f"{self.diverged_at} {'was' if self.diverged_at == 1 else 'were'} cached"
            hit += f", though {cached}: taking {_those(self)} was not worth its cost"
        elif self.hit_tokens > self.diverged_at:
            more = self.hit_tokens - self.diverged_at
            hit += f", {more} of which another prompt of the same batch computed"
        why = MISS_REASONS[self.miss_reason]
        if self.seen_in is not None:
            if self.seen_in.endswith(OTHER_CIRCUMSTANCES):
                why = f"cached{OTHER_CIRCUMSTANCES[1:]}"
            elif self.seen_in == "None":
                why = "cached in the default namespace"
            else:
                why = f"cached in another namespace: {self.seen_in}"
        return f"{hit}; from position {self.diverged_at} on, {why}"

    def to_dict(self) -> dict[str, Any]:
        """Plain values, with `outcome`."""
        return {**asdict(self), "outcome": self.outcome}


def _those(request: RequestStats) -> str:
    if request.hit_tokens:
        return "more"
    return "it" if request.diverged_at == 1 else "them"
