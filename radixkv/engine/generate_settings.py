"""What `model.generate()` itself would do to the scores of a request, and where it would stop.

`generate()` merges its arguments with the model's `generation_config`, checks them, and makes lists of processors
and criteria out of them, in ways that differ from version to version. It is asked to do all that and then to run,
instead of its own loop, a function that takes the lists and returns: its `custom_generate` argument, public since
transformers 4.56. No forward runs, and what a model class overrides is asked too.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers.generation import logits_process
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from radixkv.core.errors import InvalidRequestError
from radixkv.engine.processors import OutputPenalty, forked, is_shareable
from radixkv.engine.sampling_params import SamplingParams

__all__ = ["GenerateSettings", "Lists", "vocabulary_of"]

_UNSET: Any = object()


@dataclass(frozen=True)
class Lists:
    """How one sequence is sampled and stopped.

    Attributes:
        processors: In the order in which `generate()` applies them.
        criteria: Stopping criteria beyond length, end-of-sequence ids and stop strings.
        stop_ids: Ids that end the sequence: the model's, unless they are to be ignored, and the request's.
        stop_strings: The model's and the request's.
        given: `id()` of the objects that are the user's, in both lists.
    """

    processors: tuple[Any, ...]
    criteria: tuple[Any, ...]
    stop_ids: frozenset[int]
    stop_strings: tuple[str, ...]
    given: frozenset[int] = frozenset()


class GenerateSettings:
    """Asks a model's `generate()` how it would sample a request, and remembers the answer where it may.

    Args:
        model: A model of transformers. One without `generate()` gets the settings of `SamplingParams` and its
            end-of-sequence ids.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._device = _device_of(model)
        self._config_seen: Any = _UNSET
        self._known: dict[Any, Lists] = {}
        self._can_ask = callable(getattr(model, "generate", None))
        self._warned = False

    @property
    def config(self) -> Any:
        """The model's `generation_config`, or None."""
        return getattr(self._model, "generation_config", None)

    def lists(self, params: SamplingParams, prompt: npt.NDArray[np.int64]) -> Lists:
        """What applies to one new sequence.

        Raises:
            InvalidRequestError: `generate()` refuses these settings, or the model's own config asks for something that
                the engine does not do.
        """
        self._notice_changes()
        key = (
            params.temperature,
            params.top_k,
            params.top_p,
            params.min_p,
            params.repetition_penalty,
            params.stop_token_ids,
            params.stop,
            params.ignore_eos,
        )
        penalised = bool(params.presence_penalty or params.frequency_penalty)
        plain = not (
            penalised or params.logits_processors or params.stopping_criteria or params.min_new_tokens
        )
        if plain and key in self._known:
            return self._known[key]
        self._refuse_unsupported()
        mine: list[Any] = [forked(processor) for processor in params.logits_processors]
        criteria: list[Any] = [forked(criterion) for criterion in params.stopping_criteria]
        given = frozenset(id(item) for item in (*mine, *criteria))
        if penalised:
            mine.insert(0, OutputPenalty(params.presence_penalty, params.frequency_penalty, len(prompt)))
        stop_ids = self._stop_ids(params)
        asked = self._ask(params, prompt, stop_ids, mine, criteria) if self._can_ask else None
        if asked is None:
            asked = self._guess(params, prompt, stop_ids, mine), criteria
        lists = self._sort_out(params, asked, stop_ids, criteria, given)
        if plain and all(map(is_shareable, lists.processors)) and not lists.criteria:
            if len(self._known) >= 1024:
                self._known.clear()
            self._known[key] = lists
        return lists

    def _notice_changes(self) -> None:
        """Forget what was known if somebody changed the model's `generation_config`."""
        config = self.config
        now = None if config is None else vars(config)
        try:
            if self._config_seen is not _UNSET and bool(now == self._config_seen):
                return
        except (RuntimeError, ValueError):  # tensors among the values cannot be compared like this
            pass
        self._config_seen = copy.deepcopy(now)
        self._known.clear()

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
            warnings.warn(
                f"the model's generation_config asks for beam search (num_beams={beams}); the engine has none and "
                "samples one sequence: set model.generation_config.num_beams = 1 to say so",
                stacklevel=2,
            )

    def _stop_ids(self, params: SamplingParams) -> list[int] | None:
        """The ids that `generate()` is to take for the end of a sequence; None for none."""
        own = getattr(self.config, "eos_token_id", None)
        if self.config is None:
            own = getattr(getattr(self._model, "config", None), "eos_token_id", None)
        found = [] if params.ignore_eos or own is None else _as_list(own)
        found += [token for token in params.stop_token_ids if token not in found]
        return found or None

    def _ask(
        self,
        params: SamplingParams,
        prompt: npt.NDArray[np.int64],
        stop_ids: list[int] | None,
        processors: list[Any],
        criteria: list[Any],
    ) -> tuple[list[Any], list[Any]] | None:
        """The lists that `generate()` makes, or None if it does not give them away."""
        config = self.config
        sampling = not params.greedy
        ids = torch.from_numpy(prompt.copy()).to(self._device)[None]
        settings: dict[str, Any] = {
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
            "max_length": len(prompt) + params.max_new_tokens,
            "use_cache": False,  # or it would allocate one
            "cache_implementation": None,
        }
        if getattr(config, "pad_token_id", None) is None and stop_ids:
            settings["pad_token_id"] = stop_ids[0]
        if params.repetition_penalty != 1.0:
            settings["repetition_penalty"] = params.repetition_penalty
        if params.min_new_tokens:
            settings |= {"min_new_tokens": None, "min_length": len(prompt) + params.min_new_tokens}
        if stop_ids is None:
            settings["exponential_decay_length_penalty"] = None  # it is about these ids
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
                custom_generate=take,
                **settings,
            )
        except Exception as error:
            raise InvalidRequestError(f"model.generate() refuses these settings: {error}") from error
        if not taken:
            self._can_ask = False
            warnings.warn(
                "model.generate() no longer tells how it would sample, so that of the model's generation_config only "
                "the end-of-sequence ids apply",
                stacklevel=2,
            )
            return None
        input_ids, found, criteria_found = taken[0]
        if input_ids.shape != ids.shape or not bool((input_ids.to(ids.device) == ids).all()):
            raise InvalidRequestError(
                "the model's generation_config makes generate() change the prompt (token_healing): the engine does "
                "not; set model.generation_config.token_healing = False"
            )
        return found, criteria_found

    def _guess(
        self,
        params: SamplingParams,
        prompt: npt.NDArray[np.int64],
        stop_ids: list[int] | None,
        given: list[Any],
    ) -> list[Any]:
        """What `SamplingParams` says, in `generate()`'s order, for a model whose `generate()` cannot be asked."""
        tf = logits_process
        found: list[Any] = []
        if params.repetition_penalty != 1.0:
            found.append(tf.RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
        if params.min_new_tokens and stop_ids:
            least = len(prompt) + params.min_new_tokens
            found.append(tf.MinLengthLogitsProcessor(least, stop_ids, device=str(self._device)))
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

    def _sort_out(
        self,
        params: SamplingParams,
        asked: tuple[list[Any], list[Any]],
        stop_ids: list[int] | None,
        given_criteria: list[Any],
        given: frozenset[int],
    ) -> Lists:
        processors, criteria = asked
        ends = frozenset(stop_ids or ())
        if any(type(criterion) is EosTokenCriteria for criterion in given_criteria):
            ends = frozenset(
                params.stop_token_ids
            )  # as in generate(), the user's own takes the place of the model's
        kept = [c for c in criteria if id(c) in given or type(c) not in (MaxLengthCriteria, EosTokenCriteria)]
        own_strings = getattr(self.config, "stop_strings", None) or ()
        if isinstance(own_strings, str):
            own_strings = (own_strings,)
        strings = tuple(dict.fromkeys((*own_strings, *params.stop)))
        return Lists(tuple(processors), tuple(kept), ends, strings, given)


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
