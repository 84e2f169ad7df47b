"""`SamplingParams`: how one request chooses its tokens and when it ends."""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from radixkv.core.errors import InvalidRequestError

__all__ = ["SamplingParams"]

_SEED_END = 2**63
_INT32_MAX = 2**31 - 1
_FLOAT32_MAX = 2.0**128 - 2.0**104


@dataclass(frozen=True)
class SamplingParams:
    """How one request chooses its tokens and when it ends.

    The default is greedy, and then the tokens are those of `model.generate(ids, do_sample=False)` of
    the same `max_new_tokens`, the model's own `generation_config` included, but for its lengths.
    How the two combine:

    - `temperature`, `top_k`, `top_p` and `min_p` come from here alone. A model whose `generation_config` says
      `do_sample=True, top_k=64` is still greedy here unless `temperature` is set, and then without top-k unless
      `top_k` is set too.
    - `repetition_penalty`, `min_new_tokens` and `bad_words_ids` are the model's own where they are None, the default.
      What is set here takes their place: 1.0, 0 and an empty list switch the model's own off.
    - `stop_token_ids`, `stop` and the end-of-sequence ids add up, `ignore_eos` leaves the model's ids out.
      `logit_bias` adds up with the model's `sequence_bias`.
    - All that has no field here, such as `suppress_tokens`, `no_repeat_ngram_size`, forced tokens or `typical_p`, is
      taken from the model. Beam search is not: there is one sequence for each of `n`.

    Attributes:
        max_new_tokens: Most tokens to generate, at least 1; None is up to the longest sequence that the model or the
            engine allows. Default 128.
        min_new_tokens: Until so many are generated, no end-of-sequence or stop token is chosen and no stop string
            looked for; `0 <= min_new_tokens <= max_new_tokens`. 0 is no such limit, of the model neither (its
            `min_new_tokens` and `min_length`). Default None: the model's own, which let stop strings count at once,
            as they do in `generate()`.
        n: Completions of the prompt, at least 1. Default 1. Greedy ones are all equal.
        temperature: Divides the logits before sampling: 0 is greedy, else a positive finite number. Default 0.
        top_k: Sample among the `top_k` likeliest tokens (and those equally likely as the last); 0 is all. Default 0.
        top_p: Sample among the likeliest tokens whose probabilities reach this sum, `0 < top_p <= 1`; 1 is all.
            Default 1.
        min_p: Sample among tokens at least this many times as likely as the likeliest, `0 <= min_p <= 1`; 0 is all.
            Default 0. Applied in this order: temperature, top-k, top-p, min-p.
        repetition_penalty: Positive logits of tokens that were seen, in the prompt or since, are divided by it,
            negative ones multiplied; positive and finite, 1 is none. Default None: the model's own.
        presence_penalty: Taken off the logit of every token generated so far, once; from -2 to 2. Default 0.
        frequency_penalty: Taken off it once for each time it was generated; from -2 to 2. Default 0.
        logit_bias: Added to the logits of tokens, as `{token id: number}`; minus infinity forbids a token. Kept as
            pairs in the order of the ids. Default none, as is None.
        allowed_token_ids: Only these tokens are chosen, an end-of-sequence token too only if it is among them; at
            least one. Default None: all.
        bad_words_ids: Rows of token ids that are not to appear: the last of a row is forbidden where the others are
            the last known tokens. A row of nothing but one end-of-sequence or stop token is left out, as by
            `generate()`. An empty list is none. Default None: the model's own.
        seed: Makes sampling reproducible, `0 <= seed < 2**63`: sequence `i` of `n` draws the tokens that
            `torch.manual_seed(seed + i)` makes `model.generate(do_sample=True)` draw, whatever else runs beside it.
            None draws a seed from torch's global generator when the request is added. Default None.
        stop_token_ids: Tokens that end a sequence; the token is kept, as an end-of-sequence token is. Default none.
        stop: Strings that end a sequence as soon as the text of its new tokens contains one; the text is cut before
            it, the tokens are kept. One string or several, none empty. Needs a tokenizer. Default none.
        include_stop_str_in_output: Cut the text behind the stop string that ended the sequence, not before it. Default
            False.
        ignore_eos: Do not end at the model's own end-of-sequence tokens. Default False.
        logprobs: For each new token give its log-probability, and the so many likeliest tokens with theirs, under
            the model's own distribution: a float32 log-softmax of the logits before any of the settings above.
            0 gives the chosen token's alone. Default None: nothing.
        logits_processors: `LogitsProcessor`s of transformers, or any functions of `([1, length] ids, [1, vocabulary]
            float32 scores)` that return scores. They see one sequence at a time, stand where `generate()` puts them
            (after its own processors, before temperature), and may change the scores in place. The very objects are
            called, for every sequence. One that keeps state can have a `fork()`, which then gives each its own; it is
            called before each step as well, so that a step that failed as a whole can be done again. Without a
            `fork()`, a processor is called again with the same ids then.
        stopping_criteria: `StoppingCriteria` of transformers, or any functions of `([1, length] ids, (scores,))` that
            return whether to stop, as a bool or a tensor of one. `scores` are those of the newest token, processed.
            Called after every token; `fork()` as above.

    Raises:
        InvalidRequestError: A value has no meaning. The message names the field, the value and what is allowed.
    """

    max_new_tokens: int | None = 128
    min_new_tokens: int | None = None
    n: int = 1
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]] | None = ()
    allowed_token_ids: Sequence[int] | None = None
    bad_words_ids: Sequence[Sequence[int]] | None = None
    seed: int | None = None
    stop_token_ids: Sequence[int] = ()
    stop: str | Sequence[str] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    logits_processors: Sequence[Callable[..., Any]] = ()
    stopping_criteria: Sequence[Callable[..., Any]] = ()

    def __post_init__(self) -> None:
        keep = self._keep
        if self.max_new_tokens is not None:
            keep("max_new_tokens", _integer("max_new_tokens", self.max_new_tokens, 1))
        if self.min_new_tokens is not None:
            keep("min_new_tokens", _integer("min_new_tokens", self.min_new_tokens, 0))
        if (self.min_new_tokens or 0) > (self.max_new_tokens or _INT32_MAX):
            raise InvalidRequestError(
                f"min_new_tokens={self.min_new_tokens} is more than max_new_tokens={self.max_new_tokens}: "
                "lower the one or raise the other"
            )
        keep("n", _integer("n", self.n, 1))
        keep(
            "temperature",
            _number("temperature", self.temperature, "0 (greedy) or positive", lambda x: x >= 0),
        )
        keep("top_k", _integer("top_k", self.top_k, 0, "0 (all tokens) or positive"))
        keep("top_p", _number("top_p", self.top_p, "above 0 and at most 1", lambda x: 0 < x <= 1))
        keep("min_p", _number("min_p", self.min_p, "from 0 to 1", lambda x: 0 <= x <= 1))
        if self.repetition_penalty is not None:
            penalty = _number("repetition_penalty", self.repetition_penalty, "positive", lambda x: x > 0)
            keep("repetition_penalty", penalty)
        for name in ("presence_penalty", "frequency_penalty"):
            keep(name, _number(name, getattr(self, name), "from -2 to 2", lambda x: -2 <= x <= 2))
        keep("logit_bias", () if self.logit_bias is None else _biases(self.logit_bias))
        if self.allowed_token_ids is not None:
            keep("allowed_token_ids", _token_ids("allowed_token_ids", self.allowed_token_ids))
            if not self.allowed_token_ids:
                raise _refused("allowed_token_ids", [], "None (all tokens) or at least one token id")
        if self.bad_words_ids is not None:
            keep("bad_words_ids", _rows_of_ids(self.bad_words_ids))
        if self.seed is not None:
            keep("seed", _integer("seed", self.seed, 0, "None or not negative", _SEED_END - 1))
        keep("stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids))
        keep("stop", _strings(self.stop))
        for name in ("include_stop_str_in_output", "ignore_eos"):
            value = getattr(self, name)
            if not _is_bool(value) or getattr(value, "shape", ()) != ():
                raise _refused(name, value, "True or False")
            keep(name, bool(value))
        if self.logprobs is not None:
            keep("logprobs", _integer("logprobs", self.logprobs, 0, "None, 0 or positive"))
        for name in ("logits_processors", "stopping_criteria"):
            keep(name, _callables(name, getattr(self, name)))

    def _keep(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken, without drawing any random number."""
        return self.temperature == 0.0


def _refused(name: str, value: Any, allowed: str) -> InvalidRequestError:
    return InvalidRequestError(f"{name} is {_shown(value)}: it must be {allowed}")


def _shown(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 60 else shown[:57] + "..."


def _integer(name: str, value: Any, low: int, allowed: str | None = None, high: int = _INT32_MAX) -> int:
    allowed = f"an integer, {allowed or f'at least {low}'}"
    if _is_bool(value) or isinstance(value, float):
        raise _refused(name, value, allowed)
    try:
        number = operator.index(value)
    except TypeError:
        raise _refused(name, value, allowed) from None
    if number < low:
        raise _refused(name, value, allowed)
    if number > high:
        raise _refused(name, value, f"at most {high}")
    return number


def _number(name: str, value: Any, allowed: str, is_allowed: Callable[[float], bool]) -> float:
    allowed = f"a finite number, {allowed}"
    # A numpy float32 is no `Real`, but says that it is one by `__float__`; strings and tensors of several do not.
    if _is_bool(value) or not (isinstance(value, numbers.Real) or _is_scalar(value)):
        raise _refused(name, value, allowed)
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise _refused(name, value, allowed) from None
    if not math.isfinite(number) or not is_allowed(number):
        raise _refused(name, value, allowed)
    return number


def _is_bool(value: Any) -> bool:
    if isinstance(value, bool):
        return True
    dtype = getattr(value, "dtype", None)
    return dtype is not None and str(dtype).rpartition(".")[2].startswith("bool")


def _is_scalar(value: Any) -> bool:
    """Of numpy or torch, of no dimension."""
    return getattr(value, "shape", None) == () and hasattr(value, "__float__")


def _token_ids(name: str, value: Any) -> tuple[int, ...]:
    """Distinct ids, in their order."""
    allowed = "token ids, such as [2, 5]"
    items = _listed(name, value, allowed)
    return tuple(dict.fromkeys(_token_id(name, value, item, allowed) for item in items))


def _listed(name: str, value: Any, allowed: str) -> list[Any]:
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise _refused(name, value, allowed)
    try:
        return list(value)
    except TypeError:  # an array of no dimension
        raise _refused(name, value, allowed) from None


def _token_id(name: str, value: Any, item: Any, allowed: str) -> int:
    if _is_bool(item):
        raise _refused(name, value, f"{allowed}, and {item!r} is none")
    try:
        token = operator.index(item)
    except (TypeError, ValueError):
        raise _refused(name, value, f"{allowed}, and {_shown(item)} is none") from None
    if not 0 <= token < _SEED_END:
        raise _refused(name, value, f"{allowed}, and {token} is none")
    return token


def _rows_of_ids(value: Any) -> tuple[tuple[int, ...], ...]:
    name, allowed = "bad_words_ids", "rows of token ids, such as [[2], [5, 6]]"
    found: dict[tuple[int, ...], None] = {}
    for row in _listed(name, value, allowed):
        if isinstance(row, (str, bytes)) or not isinstance(row, Iterable):
            raise _refused(name, value, f"{allowed}, and {_shown(row)} is none")
        ids = tuple(_token_id(name, value, item, allowed) for item in _listed(name, row, allowed))
        if not ids:
            raise _refused(name, value, f"{allowed}, none of them empty")
        found[ids] = None
    return tuple(found)


def _biases(value: Any) -> tuple[tuple[int, float], ...]:
    """Pairs of an id and a number, in the order of the ids."""
    name, allowed = "logit_bias", "token ids and numbers, such as {2: -1.5, 5: 100.0}"
    pairs = _listed(name, value.items() if isinstance(value, Mapping) else value, allowed)
    found: dict[int, float] = {}
    for pair in pairs:
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise _refused(name, value, f"{allowed}, and {_shown(pair)} is neither")
        token = _token_id(name, value, pair[0], allowed)
        if token in found:
            raise _refused(name, value, f"{allowed}, and {token} is there twice")
        if _is_bool(pair[1]) or not (isinstance(pair[1], numbers.Real) or _is_scalar(pair[1])):
            raise _refused(name, value, f"{allowed}, and {_shown(pair[1])} is no number")
        try:
            bias = float(pair[1])
        except (TypeError, ValueError, OverflowError):
            raise _refused(name, value, f"{allowed}, and {_shown(pair[1])} is no such number") from None
        if math.isnan(bias) or bias > _FLOAT32_MAX:
            raise _refused(
                name, value, f"{allowed}, and {bias} is no number to add: only -inf is, to forbid a token"
            )
        found[token] = bias
    return tuple(sorted(found.items()))


def _strings(value: Any) -> tuple[str, ...]:
    allowed = "a string or several, none of them empty"
    if isinstance(value, str):
        value = (value,)
    elif isinstance(value, bytes) or not isinstance(value, Iterable):
        raise _refused("stop", value, allowed)
    items = tuple(value)
    if not all(isinstance(item, str) and item for item in items):
        raise _refused("stop", items, allowed)
    return tuple(dict.fromkeys(items))


def _callables(name: str, value: Any) -> tuple[Callable[..., Any], ...]:
    allowed = f"a list of functions or objects of transformers, such as {name}=[mine]"
    items = tuple(_listed(name, value, allowed))
    for item in items:
        if not callable(item):
            raise _refused(name, value, f"{allowed}, and {_shown(item)} cannot be called")
        if isinstance(item, type):
            raise _refused(name, value, f"{allowed}, and {_shown(item)} is a class: give an object of it")
    return items
