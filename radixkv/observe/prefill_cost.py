"""How many floating-point operations a prefill takes: an estimate from a model's sizes."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["PrefillCost"]


@dataclass(frozen=True)
class PrefillCost:
    """Floating-point operations of a prompt's first tokens, of which a hit saves those of the tokens it hits.

    A multiplication and the addition behind it are two. A token costs two for each weight it is multiplied with,
    and, in each attention layer, two for each element of every query head against each of the keys that it sees,
    and two for each element of the values: `2 P n + sum over layers of 2 H (d_k + d_v) sum over i < n of
    min(i + 1, window)`. Left out: normalisation, activations, softmax, rotary angles, and the output layer, which is
    computed for the last token only.

    Attributes:
        parameters: P, weights that each token is multiplied with: those of the model without its embeddings and
            output layer; of the experts in a mixture, as many as are active.
        attention: `(window, elements)` for each kind of layer: how many keys a query sees (None: all before
            it), and the sum of `H (d_k + d_v)` over the layers of this kind, with H query heads.

    Source: the count of a forward pass in Kaplan et al., 2020, table 1 (arXiv:2001.08361), with keys counted
    one by one instead of a whole context for every token.
    """

    parameters: int
    attention: tuple[tuple[int | None, int], ...] = ()

    def flops(self, num_tokens: int) -> int:
        """Operations of the first `num_tokens` tokens of a prompt."""
        total = 2 * self.parameters * num_tokens
        for window, elements in self.attention:
            total += 2 * elements * _keys_seen(num_tokens, window)
        return total


def _keys_seen(num_tokens: int, window: int | None) -> int:
    """Sum over the first tokens of how many keys each sees, itself included."""
    rising = num_tokens if window is None else min(num_tokens, window)
    seen = rising * (rising + 1) // 2
    return seen if window is None else seen + (num_tokens - rising) * window
