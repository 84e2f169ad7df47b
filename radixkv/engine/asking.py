"""Asking `model.generate()` what it would do to the scores of a request.

`generate()` merges its arguments with the model's `generation_config`, checks them, and makes lists of processors
and criteria out of them, in ways that differ from version to version. It is asked to do all that and then to run,
instead of its own loop, a function that takes the lists and returns: its `custom_generate` argument, public since
transformers 4.56. No forward runs, and what a model class overrides is asked too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers.generation import logits_process
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from radixkv.core.errors import InvalidRequestError
from radixkv.core.warn import warn_user
from radixkv.engine.recipe import Asked
from radixkv.engine.sampling_params import SamplingParams

__all__ = ["GenerateAsker", "vocabulary_of"]


class GenerateAsker:
    """Asks a model's `generate()` which processors and criteria it would use.

    Args:
        model: A model of transformers. One without `generate()` gets what `SamplingParams` says.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._device = _device_of(model)
        self._can_ask = callable(getattr(model, "generate", None))
        self._warned = False

    @property
    def config(self) -> Any:
        """The model's `generation_config`, or None."""
        return getattr(self._model, "generation_config", None)

    def stop_ids(self, params: SamplingParams) -> list[int] | None:
        """The ids that `generate()` is to take for the end of a sequence; None for none."""
        own = getattr(self.config, "eos_token_id", None)
        if self.config is None:
            own = getattr(getattr(self._model, "config", None), "eos_token_id", None)
        found = [] if params.ignore_eos or own is None else _as_list(own)
        found += [token for token in params.stop_token_ids if token not in found]
        return found or None

    def ask(
        self,
        params: SamplingParams,
        prompt: npt.NDArray[np.int64],
        max_new_tokens: int,
        processors: Sequence[Any],
        criteria: Sequence[Any],
    ) -> Asked:
        """What applies to a request.

        Args:
            params: Of the request.
            prompt: `[length]` ids.
            max_new_tokens: Most new tokens, in place of those in `params`.
            processors: The user's.
            criteria: The user's.

        Raises:
            InvalidRequestError: `generate()` refuses these settings, or the model's own config asks for something that
                the engine does not do.
        """
        self._refuse_unsupported()
        found = None
        if self._can_ask:
            found = self._ask(params, prompt, max_new_tokens, list(processors), list(criteria))
        if found is None:
            found = self._guess(params, len(prompt), list(processors)), list(criteria)
        users = set(map(id, criteria))
        kept = [c for c in found[1] if id(c) in users or type(c) not in (MaxLengthCriteria, EosTokenCriteria)]
        return Asked(found[0], kept, len(prompt), max_new_tokens)

    def _refuse_unsupported(self) -> None:
        scale = getattr(self.config, "guidance_scale", None)
        if scale not in (None, 1, 1.0):
            raise InvalidRequestError(
                f"the model's generation_config has guidance_scale={scale}, which runs the model a second time for "
                "each token; the engine does not: set model.generation_config.guidance_scale = None"
            )
        beams = getattr(self.config, "num_beams", None) or 1
        if beams > 1 and not self._warned:
            self._warned = True
            warn_user(
                f"the model's generation_config asks for beam search (num_beams={beams}); the engine has none and "
                "samples one sequence: set model.generation_config.num_beams = 1 to say so",
            )

    def _ask(
        self,
        params: SamplingParams,
        prompt: npt.NDArray[np.int64],
        max_new_tokens: int,
        processors: list[Any],
        criteria: list[Any],
    ) -> tuple[list[Any], list[Any]] | None:
        """The lists that `generate()` makes, or None if it does not give them away."""
        ids = torch.from_numpy(prompt.copy()).to(self._device)[None]
        taken: list[tuple[Tensor, list[Any], list[Any]]] = []

        def take(
            model: Any,
            input_ids: Any,
            logits_processor: Any,
            stopping_criteria: Any,
            generation_config: Any,
            **_: Any,
        ) -> Any:
            taken.append((input_ids, list(logits_processor), list(stopping_criteria)))
            return input_ids

        try:
            self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                logits_processor=logits_process.LogitsProcessorList(processors),
                stopping_criteria=criteria,
                prefix_allowed_tokens_fn=self._allowed(params),
                custom_generate=take,
                **self._arguments(params, len(prompt), max_new_tokens),
            )
        except Exception as error:
            raise InvalidRequestError(f"model.generate() refuses these settings: {error}") from error
        if not taken:
            self._can_ask = False
            warn_user(
                "model.generate() no longer tells how it would sample, so that of the model's generation_config only "
                "the end-of-sequence ids apply",
            )
            return None
        input_ids, found, criteria_found = taken[0]
        if input_ids.shape != ids.shape or not bool((input_ids.to(ids.device) == ids).all()):
            raise InvalidRequestError(
                "the model's generation_config makes generate() change the prompt (token_healing): the engine does "
                "not; set model.generation_config.token_healing = False"
            )
        return found, criteria_found

    def _arguments(self, params: SamplingParams, prompt_len: int, max_new_tokens: int) -> dict[str, Any]:
        """The settings as arguments of `generate()`; None is none, what is left out is the model's own."""
        config, stop_ids = self.config, self.stop_ids(params)
        sampling = not params.greedy
        found: dict[str, Any] = {
            "do_sample": sampling,
            # These have no meaning for greedy, and at their defaults generate() does not warn of that.
            "temperature": params.temperature if sampling else 1.0,
            "top_k": params.top_k if sampling else 50,
            "top_p": params.top_p if sampling else 1.0,
            "min_p": params.min_p if sampling and params.min_p > 0 else None,
            "num_beams": 1,
            "num_return_sequences": 1,
            "eos_token_id": stop_ids,
            "stop_strings": None,
            # Lengths as `max_length` and `min_length`: if the model's config has these, generate() would say with each
            # call that they are not used.
            "max_new_tokens": None,
            "max_length": prompt_len + max_new_tokens,
            "use_cache": False,  # or it would allocate one
            "cache_implementation": None,
        }
        if getattr(config, "pad_token_id", None) is None and stop_ids:
            found["pad_token_id"] = stop_ids[0]
        if params.repetition_penalty is not None:
            found["repetition_penalty"] = params.repetition_penalty
        if params.min_new_tokens is not None:
            least = prompt_len + params.min_new_tokens if params.min_new_tokens else 0
            found |= {"min_new_tokens": None, "min_length": least}
        if params.logit_bias:
            found["sequence_bias"] = self._biases(params)
        if params.bad_words_ids is not None:
            found["bad_words_ids"] = list(map(list, params.bad_words_ids)) or None
        if stop_ids is None:
            found["exponential_decay_length_penalty"] = None  # it is about these ids
        return found

    def _biases(self, params: SamplingParams) -> list[list[Any]]:
        """`logit_bias` and the model's `sequence_bias`, as `generate()` takes them."""
        own = getattr(self.config, "sequence_bias", None) or []
        found: dict[tuple[int, ...], float] = {}
        for ids, bias in own.items() if isinstance(own, dict) else own:
            found[tuple(ids)] = bias
        for token, bias in dict(params.logit_bias or ()).items():
            found[(token,)] = found.get((token,), 0.0) + bias
        return [[list(ids), bias] for ids, bias in found.items()]

    def _allowed(self, params: SamplingParams) -> Callable[[int, Tensor], Tensor] | None:
        """What `generate()` asks for the tokens that may come next."""
        if params.allowed_token_ids is None:
            return None
        ids = torch.tensor(params.allowed_token_ids, device=self._device)
        return lambda batch_id, sequence: ids

    def _guess(self, params: SamplingParams, prompt_len: int, given: list[Any]) -> list[Any]:
        """What `SamplingParams` says, in `generate()`'s order, for a model whose `generate()` cannot be asked."""
        tf = logits_process
        stop_ids = self.stop_ids(params)
        allowed = self._allowed(params)
        found: list[Any] = []
        if params.logit_bias:
            found.append(tf.SequenceBiasLogitsProcessor(self._biases(params)))
        if params.repetition_penalty not in (None, 1.0):
            found.append(tf.RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
        if params.bad_words_ids:
            found.append(tf.NoBadWordsLogitsProcessor(list(map(list, params.bad_words_ids)), stop_ids))
        if params.min_new_tokens and stop_ids:
            least = prompt_len + params.min_new_tokens
            found.append(tf.MinLengthLogitsProcessor(least, stop_ids, device=str(self._device)))
        if allowed is not None:
            found.append(tf.PrefixConstrainedLogitsProcessor(allowed, 1))
        found += given
        if not params.greedy:
            if params.temperature != 1.0:
                found.append(tf.TemperatureLogitsWarper(params.temperature))
            if params.top_k:
                found.append(tf.TopKLogitsWarper(params.top_k))
            if params.top_p < 1.0:
                found.append(tf.TopPLogitsWarper(params.top_p))
            if params.min_p:
                found.append(tf.MinPLogitsWarper(params.min_p))
        return found


def _as_list(ids: Any) -> list[int]:
    if isinstance(ids, Tensor):
        ids = ids.tolist()
    return [int(ids)] if isinstance(ids, int) else [int(token) for token in ids]


def _head_of(model: Any) -> Any:
    """The weight that makes its logits, `[vocabulary, hidden]`, or None."""
    find: Callable[[], Any] | None = getattr(model, "get_output_embeddings", None)
    try:
        return getattr(find() if find is not None else None, "weight", None)
    except (AttributeError, NotImplementedError):
        return None


def vocabulary_of(model: Any) -> int | None:
    """How many tokens its logits tell apart, or None if it does not say."""
    head = _head_of(model)
    if head is not None and len(head.shape) == 2 and head.is_floating_point():
        return int(head.shape[0])
    config = getattr(model, "config", None)
    find = getattr(config, "get_text_config", None)
    size = getattr(find() if callable(find) else config, "vocab_size", None)
    return size if isinstance(size, int) else None


def _device_of(model: Any) -> torch.device:
    """Where its logits come out."""
    weight = _head_of(model)
    if weight is None and hasattr(model, "parameters"):
        weight = next(iter(model.parameters()), None)
    if weight is None or weight.device.type == "meta":  # nothing known, or offloaded
        return torch.device("cpu")
    device: torch.device = weight.device
    return device
