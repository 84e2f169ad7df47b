"""What sequences have in common at the end of their processing, so that it is done for many in one call."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from radixkv.engine.draws import best, draw, race_is_exact
from radixkv.engine.processors import depends_on_scores_only, signature
from radixkv.engine.shortlist import Shortlist

__all__ = ["GREEDY", "Treatment", "Treatments"]


class Treatment:
    """Processors that look at scores alone, and then the likeliest token or a random one.

    Args:
        processors: Each `depends_on_scores_only`.
        samples: Draw, rather than take the likeliest.
    """

    def __init__(self, processors: Sequence[Any], samples: bool) -> None:
        self.processors = tuple(processors)
        self.samples = samples
        self._shortlist = Shortlist.for_processors(processors) if samples else None

    def process(self, scores: Tensor) -> Tensor:
        """`[rows, vocabulary]` float32 scores after all processors; may reuse the tensor it is given."""
        if self.processors:
            no_ids = torch.empty((len(scores), 0), dtype=torch.int64, device=scores.device)
            for processor in self.processors:
                scores = processor(no_ids, scores)
        return scores

    def choose(self, scores: Tensor, generators: Sequence[torch.Generator]) -> tuple[Tensor, Tensor]:
        """One token for each row.

        Args:
            scores: `[rows, vocabulary]` float32, the caller's to give away.
            generators: One for each row if this samples.

        Returns:
            `[rows]` int64 ids and `[rows]` bool: whether they mean anything.
        """
        short, vocab_size = self._shortlist, scores.shape[-1]
        if short is None or not short.fits(vocab_size) or not race_is_exact(scores.device):
            return self.choose_processed(self.process(scores), generators)
        probabilities, ids, decided = short(scores)
        where = decided.nonzero()[:, 0].tolist()
        if len(where) == len(scores):
            return draw(probabilities, generators, ids, vocab_size)
        chosen = torch.empty(len(scores), dtype=torch.int64, device=scores.device)
        usable = torch.empty(len(scores), dtype=torch.bool, device=scores.device)
        if where:
            mine = [generators[i] for i in where]
            chosen[where], usable[where] = draw(probabilities[where], mine, ids[where], vocab_size)
        rest = (~decided).nonzero()[:, 0].tolist()
        mine = [generators[i] for i in rest]
        chosen[rest], usable[rest] = self.choose_processed(self.process(scores[rest]), mine)
        return chosen, usable

    def choose_processed(
        self, scores: Tensor, generators: Sequence[torch.Generator]
    ) -> tuple[Tensor, Tensor]:
        """The same from scores that `process` has made."""
        if not self.samples:
            return best(scores)
        return draw(scores.softmax(dim=-1), generators)


GREEDY = Treatment((), False)


class Treatments:
    """One `Treatment` for all sequences that need the same."""

    def __init__(self) -> None:
        self._known: dict[Hashable, Treatment] = {((), False): GREEDY}

    def split(self, processors: Sequence[Any], samples: bool) -> tuple[tuple[Any, ...], Treatment]:
        """The processors that must run for a sequence alone, and how it goes on after them."""
        end = len(processors)
        keys: list[Hashable] = []
        while end and depends_on_scores_only(processors[end - 1]):
            key = signature(processors[end - 1])
            if key is None:
                break
            keys.append(key)
            end -= 1
        whole = (tuple(reversed(keys)), samples)
        treatment = self._known.get(whole)
        if treatment is None:
            if len(self._known) >= 1024:
                self._known = {((), False): GREEDY}
            treatment = self._known[whole] = Treatment(processors[end:], samples)
        return tuple(processors[:end]), treatment
