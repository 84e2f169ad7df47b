"""`Sampler`: one new token for each of many sequences, from the logits of one step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from radixkv.core.errors import InvalidRequestError
from radixkv.engine.asking import vocabulary_of
from radixkv.engine.draws import sequence_seed
from radixkv.engine.generate_settings import GenerateSettings
from radixkv.engine.sampling_call import Sampled, SamplingCall, TokenLogprobs, TokensOf
from radixkv.engine.sampling_params import SamplingParams
from radixkv.engine.sequence_sampler import SequenceSampler
from radixkv.engine.stopping import StopStrings
from radixkv.engine.treatment import Treatments

__all__ = ["Sampled", "Sampler", "SequenceSampler", "TokenLogprobs"]


class Sampler:
    """Chooses the next tokens of many sequences from the logits of one step.

    Each sequence gets the token it would get if it were alone: what others want only decides which rows share a
    call. The logits are only read.

    Args:
        model: The model whose logits these are: its `generate()` is asked, without running it, which processors and
            end-of-sequence ids of its own apply.
        tokenizer: Needed for stop strings only.

    Rows that are greedy and have no processors cost one argmax over all of them; rows whose processors look at the
    scores alone (temperature, top-k, top-p, min-p, suppressed tokens, ...) go together where these are equal; all
    others run through their own processors one by one.
    """

    def __init__(self, model: Any, tokenizer: Any = None) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._settings = GenerateSettings(model)
        self._treatments = Treatments()
        self._vocab_size = vocabulary_of(model)

    def start(self, params: SamplingParams, prompt: npt.NDArray[np.int64], index: int = 0) -> SequenceSampler:
        """The state of a new sequence.

        With a temperature and without a seed, one is drawn from torch's global generator, on CPU.

        Args:
            params: How to sample it.
            prompt: `[length]` int64 token ids.
            index: Which of the `n` sequences of its request.

        Raises:
            InvalidRequestError: Token ids or `logprobs` go beyond the vocabulary, stop strings have no tokenizer, or
                the model's `generate()` refuses the settings.
        """
        size = self._vocab_size
        if size is not None and params.logprobs is not None and params.logprobs > size:
            raise InvalidRequestError(f"logprobs is {params.logprobs}: the vocabulary has only {size} tokens")
        lists = self._settings.lists(params, prompt, index)
        strings = None
        if lists.stop_strings:
            if self._tokenizer is None:
                raise InvalidRequestError(
                    f"stop strings {list(lists.stop_strings)!r} need a tokenizer to read the text: give the engine "
                    "one, or use stop_token_ids"
                )
            strings = StopStrings(self._tokenizer, lists.stop_strings, params.min_new_tokens or 0)
        seed = None if params.greedy else sequence_seed(params.seed, index)
        return SequenceSampler(params, lists, index, len(prompt), seed, strings)

    def fork(self, state: SequenceSampler) -> SequenceSampler:
        """The state of a sequence that goes on from where another is, with random numbers of its own.

        Its seed is a hash of the other's seed, of how many tokens that has, and of how often it was forked before;
        the other's random numbers stay what they would have been.
        """
        return state.fork(self._model)

    def sample(
        self,
        logits: Tensor,
        states: Sequence[SequenceSampler],
        rows: npt.NDArray[np.integer],
        tokens: TokensOf,
    ) -> Sampled:
        """Choose one token for each sequence, and say which are done.

        What goes wrong with one sequence is in `Sampled.errors`. If the call raises as a whole, all states are as
        before, random numbers included, and the same call can be made again.

        Args:
            logits: `[k, vocabulary]` of any float dtype. Only read.
            states: Of the sequences; each is one token further afterwards.
            rows: `[len(states)]`: the row of `logits` that each reads; several may read the same.
            tokens: `tokens(i)`: all tokens known of sequence `i`, prompt and output, int64. Called only for sequences
                that need them.
        """
        with torch.no_grad():
            return SamplingCall(self._model, self._treatments, logits, states, np.asarray(rows), tokens).run()
