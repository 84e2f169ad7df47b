"""One call of `Sampler.sample`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from radixkv.cache.locking import InterruptsHeld
from radixkv.core.errors import RadixKVError
from radixkv.engine.draws import best, rows_at_once
from radixkv.engine.sequence_sampler import SequenceSampler
from radixkv.engine.stopping import says_stop
from radixkv.engine.treatment import GREEDY, Treatment, Treatments
from radixkv.engine.undo import Undo
from radixkv.store.copy_stream import to_device

__all__ = ["Sampled", "SamplingCall", "TokenLogprobs", "TokensOf"]

TokensOf = Callable[[int], npt.NDArray[np.int64]]


@dataclass(frozen=True)
class TokenLogprobs:
    """How likely the model itself thought a token and its likeliest alternatives.

    All are natural logarithms from a float32 log-softmax of the model's logits, before temperature, penalties and
    whatever else changed them.

    Attributes:
        token_id: The token that was chosen.
        logprob: Its log-probability.
        top_ids: The likeliest tokens, likeliest first, as many as were asked for.
        top_logprobs: Theirs.
    """

    token_id: int
    logprob: float
    top_ids: list[int]
    top_logprobs: list[float]


@dataclass
class Sampled:
    """What one call of `Sampler.sample` gave, by position in its `states`.

    Attributes:
        token_ids: `[states]` int64. 0 where there is an error.
        finished: Why a sequence is done: `"stop"`, or `"error"` for each entry of `errors`.
        logprobs: Of each token, where they were asked for.
        errors: What went wrong with single sequences: their logits or scores are no distribution, or their
            processor or criterion raised (the error's `__cause__`). They got no token.
    """

    token_ids: npt.NDArray[np.int64]
    finished: dict[int, str] = field(default_factory=dict)
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    errors: dict[int, Exception] = field(default_factory=dict)


class SamplingCall:
    """One call of `Sampler.sample`.

    Args:
        model: Not copied with a processor that has to be.
        treatments: Known so far.
        logits: As for `sample`.
        states: As for `sample`.
        rows: As for `sample`.
        tokens: As for `sample`.
    """

    def __init__(
        self,
        model: Any,
        treatments: Treatments,
        logits: Tensor,
        states: Sequence[SequenceSampler],
        rows: npt.NDArray[np.integer],
        tokens: TokensOf,
    ) -> None:
        self.model = model
        self.treatments = treatments
        self.logits = logits.detach()
        self.states = states
        self.rows = rows
        self.tokens = tokens
        self.step = rows_at_once(logits.shape[-1], logits.device)
        self.undo = Undo(states)
        self.errors: dict[int, Exception] = {}
        self.known: dict[int, Tensor] = {}  # [1, length] ids of a sequence
        self.scores: dict[int, Tensor] = {}  # [1, vocabulary] processed, where a criterion wants to see them
        self.parts: list[tuple[list[int], Tensor, Tensor]] = []  # positions, ids, whether they mean anything

    def run(self) -> Sampled:
        """Sample; if that raises, every state is as it was."""
        try:
            return self._sample()
        except BaseException:
            with InterruptsHeld():
                self.undo.roll_back()
            raise

    def _sample(self) -> Sampled:
        plain: list[int] = []
        # Apart by whether scores must be shown to a criterion, so that nobody is treated differently for it.
        groups: dict[tuple[Treatment, bool], list[int]] = {}
        for i, state in enumerate(self.states):
            if state.lost is not None:
                self._failed(i, "fork() before a step that failed, of", *state.lost)
                continue
            if state.keeps_state:
                self.undo.keep_copies(state, self.model)
            if state.num_tokens >= state.changes_at:
                state.renew(self.treatments)
            if state.tail is GREEDY and not state.head:
                plain.append(i)
            else:
                groups.setdefault((state.tail, bool(state.criteria)), []).append(i)
        self._choose_plain(plain)
        for (treatment, shown), members in groups.items():
            for start in range(0, len(members), self.step):
                self._choose(treatment, members[start : start + self.step], shown)
        token_ids = self._gather()
        logprobs = self._logprobs(token_ids)
        finished = self._advance(token_ids)
        for i in self.errors:
            token_ids[i], logprobs[i], finished[i] = 0, None, "error"
        return Sampled(token_ids, finished, logprobs, self.errors)

    # -- choosing ------------------------------------------------------------------------------------------

    def _choose_plain(self, members: list[int]) -> None:
        """Greedy, and nothing was done to the logits."""
        if not members:
            return
        if 2 * len(members) >= len(self.logits):  # as well all rows: nothing is copied
            ids, usable = best(self.logits)
            rows = self.rows[members].astype(np.int64)
            if not np.array_equal(rows, np.arange(len(ids))):
                picked = to_device(rows, ids.device)
                ids, usable = ids[picked], usable[picked]
            self.parts.append((members, ids, usable))
        else:
            for start in range(0, len(members), self.step):
                part = members[start : start + self.step]
                ids, usable = best(self._rows_of(part))
                self.parts.append((part, ids, usable))
        for i in members:
            if self.states[i].criteria:
                self.scores[i] = self._own_row(i)

    def _choose(self, treatment: Treatment, members: list[int], shown: bool) -> None:
        """Sequences that end in the same treatment, at most `step` of them; `shown`: to a criterion."""
        if not any(self.states[i].head for i in members):
            scores = self._rows_of(members).float()
        else:
            own = [(i, self._own_scores(i)) for i in members]
            members = [i for i, row in own if row is not None]
            if not members:
                return
            scores = torch.cat([row for _, row in own if row is not None])
        generators: list[torch.Generator] = []
        if treatment.samples:
            chosen = [self.states[i] for i in members]
            self.undo.keep_random(chosen)
            generators = [state.generator(scores.device) for state in chosen]
        if shown:
            scores = treatment.process(scores)
            for place, i in enumerate(members):
                self.scores[i] = scores[place : place + 1].clone()
            ids, usable = treatment.choose_processed(scores, generators)
        else:
            ids, usable = treatment.choose(scores, generators)
        self.parts.append((members, ids, usable))

    def _rows_of(self, members: list[int]) -> Tensor:
        """`[members, vocabulary]` of the logits, copied."""
        picked = to_device(self.rows[members].astype(np.int64), self.logits.device)
        return self.logits.index_select(0, picked)

    def _own_row(self, i: int) -> Tensor:
        """`[1, vocabulary]` float32, a copy."""
        row = int(self.rows[i])
        return self.logits[row : row + 1].to(dtype=torch.float32, copy=True)

    def _own_scores(self, i: int) -> Tensor | None:
        """What a sequence's own processors make of its logits, or None if one of them failed."""
        scores = self._own_row(i)
        shape = scores.shape
        if not self.states[i].head:
            return scores
        ids = self._ids(i)
        for processor in self.states[i].head:
            try:
                scores = processor(ids, scores)
                if not isinstance(scores, Tensor) or scores.shape != shape:
                    got = tuple(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
                    raise TypeError(f"it must return scores of shape {tuple(shape)}, got {got}")
            except Exception as error:
                self._failed(i, "logits processor", processor, error)
                return None
        return scores.float()

    def _ids(self, i: int) -> Tensor:
        """`[1, length]`, a copy: what is called with it may write into it."""
        found = self.known.get(i)
        if found is None:
            array = np.array(self.tokens(i), dtype=np.int64)
            found = self.known[i] = to_device(array, self.logits.device)[None]
        return found

    def _failed(self, i: int, what: str, culprit: Any, error: Exception) -> None:
        name = getattr(culprit, "__name__", None) or type(culprit).__name__
        mine = RadixKVError(f"the {what} {name} raised {type(error).__name__}: {error}")
        mine.__cause__ = error
        self.errors[i] = mine

    def _gather(self) -> npt.NDArray[np.int64]:
        """The chosen ids of all, in one transfer from the device."""
        token_ids = np.zeros(len(self.states), np.int64)
        if not self.parts:
            return token_ids
        places = [i for part in self.parts for i in part[0]]
        # One tensor for both: -1 where the id means nothing.
        chosen = torch.cat([ids.masked_fill(~usable, -1) for _, ids, usable in self.parts])
        found = chosen.cpu().numpy()
        token_ids[places] = found
        if found.size and found.min() < 0:
            for place in np.flatnonzero(found < 0):
                i = places[place]
                token_ids[i] = 0
                self.errors[i] = self._no_distribution(i)
        return token_ids

    def _no_distribution(self, i: int) -> RadixKVError:
        row = self._own_row(i)
        processed = ""
        if bool(torch.isnan(row).any()):
            what = "its logits contain NaN"
        elif bool((row == -torch.inf).all()):
            what = "all its logits are minus infinity"
        elif bool((row == torch.inf).any()):
            what = "its logits contain infinity, and nothing can be sampled from that"
        else:
            what = "nothing is left to choose from after its processors"
            processed = ", or the temperature is so small that scores overflow"
        return RadixKVError(
            f"no token can be chosen after {self.states[i].num_tokens} tokens of this sequence: {what}{processed}"
        )

    # -- after the choice ----------------------------------------------------------------------------------

    def _logprobs(self, token_ids: npt.NDArray[np.int64]) -> list[TokenLogprobs | None]:
        found: list[TokenLogprobs | None] = [None] * len(self.states)
        by_count: dict[int, list[int]] = {}
        for i, state in enumerate(self.states):
            if state.params.logprobs is not None and i not in self.errors:
                by_count.setdefault(state.params.logprobs, []).append(i)
        for count, every in by_count.items():
            for start in range(0, len(every), self.step):
                members = every[start : start + self.step]
                logprobs = self._rows_of(members).float().log_softmax(dim=-1)
                chosen = to_device(token_ids[members], logprobs.device)
                own = logprobs.gather(1, chosen[:, None])[:, 0].tolist()
                # By count, not by the largest: among equals, topk may pick others for another count.
                top = logprobs.topk(count, dim=-1)
                values, ids = top.values.tolist(), top.indices.tolist()
                for place, i in enumerate(members):
                    found[i] = TokenLogprobs(int(token_ids[i]), own[place], ids[place], values[place])
        return found

    def _advance(self, token_ids: npt.NDArray[np.int64]) -> dict[int, str]:
        finished: dict[int, str] = {}
        for i, (state, token) in enumerate(zip(self.states, token_ids.tolist(), strict=True)):
            if self.errors and i in self.errors:
                continue
            state.num_tokens += 1
            if token in state.stop_token_ids:
                finished[i] = "stop"
            if state.strings is not None:
                self._look_for_string(i, token, finished)
            if state.criteria:
                self._ask_criteria(i, token, finished)
        return finished

    def _look_for_string(self, i: int, token: int, finished: dict[int, str]) -> None:
        state = self.states[i]
        assert state.strings is not None
        self.undo.keep_text(state)
        try:
            if not state.strings.add(token):
                return
        except Exception as error:
            self._failed(i, "tokenizer", state.strings.tokenizer, error)
            return
        output = np.asarray(self.tokens(i))[state.num_prompt_tokens :].tolist()
        try:
            state.stop_match = state.strings.match([*output, token])
        except Exception as error:
            self._failed(i, "tokenizer", state.strings.tokenizer, error)
            return
        if state.stop_match is not None:
            finished[i] = "stop"

    def _ask_criteria(self, i: int, token: int, finished: dict[int, str]) -> None:
        state = self.states[i]
        ids = torch.cat([self._ids(i), self._ids(i).new_tensor([[token]])], dim=1)
        for criterion in state.criteria:
            try:
                if says_stop(criterion, ids, (self.scores[i],)):
                    finished[i] = "stop"
            except Exception as error:
                self._failed(i, "stopping criterion", criterion, error)
                return
