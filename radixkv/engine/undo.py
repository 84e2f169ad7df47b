"""`Undo`: a step of sampling that failed as a whole leaves no trace."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from radixkv.engine.sequence_sampler import SequenceSampler
from radixkv.engine.stopping import StopMatch, StopStrings

__all__ = ["Undo"]


class Undo:
    """What a step of sampling changes, as it was before.

    Of each kind of state a record is made right before it is changed, so that most sequences cost a number each.

    Args:
        states: Of the sequences of the step.
    """

    def __init__(self, states: Sequence[SequenceSampler]) -> None:
        self._lengths = [(state, state.num_tokens) for state in states]
        self._random: list[tuple[SequenceSampler, Tensor | None]] = []
        self._texts: list[tuple[SequenceSampler, StopStrings | None, StopMatch | None]] = []
        self._copies: list[tuple[SequenceSampler, list[tuple[Any, Any]]]] = []

    def keep_random(self, states: Iterable[SequenceSampler]) -> None:
        """Before numbers are drawn."""
        for state in states:
            self._random.append((state, state.random_state()))

    def keep_text(self, state: SequenceSampler) -> None:
        """Before a token is added to the text that is searched for stop strings."""
        assert state.strings is not None
        self._texts.append((state, state.strings.fork(), state.stop_match))

    def keep_copies(self, state: SequenceSampler, model: Any) -> None:
        """Before processors and criteria that keep state are called."""
        self._copies.append((state, state.copies(model)))

    def roll_back(self) -> None:
        """Put everything back."""
        for state, length in self._lengths:
            state.num_tokens = length
        for state, random in self._random:
            state.set_random_state(random)
        for state, strings, match in self._texts:
            state.strings, state.stop_match = strings, match
        for state, pairs in self._copies:
            state.put_back(pairs)
