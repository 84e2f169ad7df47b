"""A step of sampling that fails as a whole changes nothing, and can be made again."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hf_testkit import prompt, tiny
from sampling_testkit import last_logits, one
from tokenizer_testkit import SPECIAL, byte_level

from radixkv.engine import draws, sampling_call, treatment
from radixkv.engine.growing_text import GrowingText
from radixkv.engine.processors import OutputPenalty
from radixkv.engine.sampler import Sampled, Sampler
from radixkv.engine.sampling_call import SamplingCall
from radixkv.engine.sampling_params import SamplingParams
from radixkv.engine.stopping import StopStrings


class Cycle:
    """A processor with state: it wants another token with each call."""

    def __init__(self, calls: int = 0) -> None:
        self.calls = calls

    def fork(self) -> Cycle:
        return Cycle(self.calls)

    def __call__(self, ids: Any, scores: Any) -> Any:
        self.calls += 1
        scores[:, 20 + self.calls % 30] += 4.0
        return scores


class After:
    """A criterion with state: it stops at its seventh call."""

    def __init__(self, left: int = 7) -> None:
        self.left = left

    def fork(self) -> After:
        return After(self.left)

    def __call__(self, ids: Any, scores: Any) -> bool:
        self.left -= 1
        return self.left <= 0


KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0},
    {"temperature": 1.0, "top_k": 9, "logprobs": 2},
    {"temperature": 1.3, "repetition_penalty": 1.3, "presence_penalty": 0.5},
    {"frequency_penalty": 0.5, "min_new_tokens": 4, "stop_token_ids": [40]},
    {"stop": ["e", "qu"], "temperature": 1.0, "min_new_tokens": 6},
    {"stop": ["never there"], "logprobs": 1},
    {"logits_processors": [Cycle()], "temperature": 1.0},
    {"stopping_criteria": [After()], "temperature": 1.0, "top_p": 0.9},
    {"logits_processors": [Cycle()], "stopping_criteria": [After()], "logit_bias": {30: 1.0}},
]
PROMPTS = [prompt(4 + i % 3, seed=i % 4)[0].tolist() for i in range(len(KINDS))]
BEFORE, STEPS = 3, 6
_SEEN: dict[Any, dict[tuple[int, ...], torch.Tensor]] = {}  # logits, by model


def make_pair(marked: bool) -> Any:
    tokenizer = byte_level()
    model = tiny("llama_gqa", vocab_size=len(tokenizer), seed=3)
    if marked:
        model.generation_config.suppress_tokens = list(range(len(SPECIAL)))
        model.generation_config.watermarking_config = transformers.SynthIDTextWatermarkingConfig(
            ngram_len=3, keys=[1, 2, 3]
        )
    return model, tokenizer


@pytest.fixture(scope="module")
def pair() -> Any:
    return make_pair(False)


@pytest.fixture(scope="module")
def right(pair: Any) -> list[Any]:
    return Scene(pair).rest()


class Scene:
    """Sequences of many kinds, some tokens into their outputs."""

    def __init__(self, pair: Any, before: int = BEFORE) -> None:
        self.model, tokenizer = pair
        self.sampler = Sampler(self.model, tokenizer)
        self._seen = _SEEN.setdefault(self.model, {})
        self.rows = [list(ids) for ids in PROMPTS]
        self.states = [
            self.sampler.start(
                SamplingParams(max_new_tokens=50, ignore_eos=True, **{"seed": i, **kind}), np.array(ids)
            )
            for i, (kind, ids) in enumerate(zip(KINDS, PROMPTS, strict=True))
        ]
        for _ in range(before):
            self.take(self.sample())

    def logits(self, row: list[int]) -> torch.Tensor:
        key = tuple(row)
        if key not in self._seen:
            self._seen[key] = last_logits(self.model, row)
        return self._seen[key]

    def sample(self, tokens: Any = None) -> Sampled:
        logits = torch.stack([self.logits(row) for row in self.rows])
        tokens = tokens or (lambda i: np.array(self.rows[i]))
        return self.sampler.sample(logits, self.states, np.arange(len(self.states)), tokens)

    def take(self, sampled: Sampled) -> Any:
        assert not sampled.errors
        for row, token in zip(self.rows, sampled.token_ids.tolist(), strict=True):
            row.append(token)
        return sampled.token_ids.tolist(), sampled.finished, sampled.logprobs

    def rest(self) -> list[Any]:
        """All that comes from here on."""
        return [self.take(self.sample()) for _ in range(STEPS)]

    def shown(self) -> list[Any]:
        """State that can be compared."""
        found: list[Any] = []
        for state in self.states:
            random, strings = state.random_state(), state.strings
            found.append((state.num_tokens, state.stop_match, None if random is None else random.tolist()))
            if strings is not None:
                found.append(
                    (strings._num_tokens, strings._tail, strings._text._known, list(strings._text._tokens))
                )
        return found


def test_the_scene_is_one(right: list[Any]) -> None:
    """Every sort of end comes up, or the test tests nothing."""
    ended = {i for _, finished, _ in right for i in finished}
    assert {5, 8, 9} <= ended
    assert len({tuple(tokens) for tokens, _, _ in right}) == STEPS


STAGES: list[tuple[Any, str]] = [
    (sampling_call, "best"),
    (sampling_call, "says_stop"),
    (treatment, "draw"),
    (treatment.Treatment, "process"),
    (treatment.Treatment, "choose"),
    (draws, "_waits"),
    (SamplingCall, "_choose_plain"),
    (SamplingCall, "_choose"),
    (SamplingCall, "_own_scores"),
    (SamplingCall, "_rows_of"),
    (SamplingCall, "_gather"),
    (SamplingCall, "_logprobs"),
    (SamplingCall, "_advance"),
    (SamplingCall, "_look_for_string"),
    (SamplingCall, "_ask_criteria"),
    (Cycle, "__call__"),
    (After, "__call__"),
    (OutputPenalty, "__call__"),
    (OutputPenalty, "_count"),
    (StopStrings, "add"),
    (GrowingText, "add"),
    (GrowingText, "_decode"),
]


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    "stage", STAGES, ids=lambda stage: f"{stage[0].__name__}.{stage[1]}".rpartition("engine.")[2]
)
def test_every_stage(
    pair: Any, right: list[Any], stage: tuple[Any, str], when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, name = stage
    if name == "_waits" and not draws._exponential_is_log_of_uniform(torch.device("cpu")):
        pytest.skip("logarithms are not taken")
    original = getattr(owner, name) if name != "_decode" else None
    failed = 0
    for which in range(12):
        scene = Scene(pair)
        left = [which]

        def raises(*args: Any, _left: list[int] = left, **kwargs: Any) -> Any:
            _left[0] -= 1
            if _left[0] == -1 and when == "before":
                raise KeyboardInterrupt
            result = original(*args, **kwargs)  # noqa: B023
            if _left[0] == -1:
                raise KeyboardInterrupt
            return result

        before = scene.shown()
        with monkeypatch.context() as patch:
            if name == "_decode":
                texts = [state.strings._text for state in scene.states if state.strings is not None]
                original = texts[which % len(texts)]._decode
                left[0] = which // len(texts)
                texts[which % len(texts)]._decode = raises
            else:
                patch.setattr(owner, name, raises)
            try:
                scene.take(scene.sample())
            except KeyboardInterrupt:
                failed += 1
            else:
                break
        if name == "_decode":
            for state in scene.states:
                if state.strings is not None:
                    state.strings._text._decode = state.strings._decode
        assert scene.shown() == before
        assert scene.rest() == right
    assert failed or name in ("_waits", "_count", "process")


def test_running_out_of_memory(pair: Any, right: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(pair)
    for owner, name in (
        (torch.Tensor, "softmax"),
        (torch.Tensor, "log_softmax"),
        (torch.Tensor, "index_select"),
    ):
        with monkeypatch.context() as patch:

            def full(*_: Any, **__: Any) -> Any:
                raise torch.OutOfMemoryError("CUDA out of memory")

            patch.setattr(owner, name, full)
            with pytest.raises(torch.OutOfMemoryError):
                scene.sample()
    assert scene.rest() == right


def test_tokens_that_cannot_be_had(pair: Any, right: list[Any]) -> None:
    scene = Scene(pair)
    for broken in range(len(KINDS)):

        def tokens(i: int, broken: int = broken, rows: list[list[int]] = scene.rows) -> Any:
            if i == broken:
                raise LookupError("no such sequence")
            return np.array(rows[i])

        before = scene.shown()
        try:
            sampled = scene.sample(tokens)
        except LookupError:
            assert scene.shown() == before
        else:
            assert scene.take(sampled) == right[0]
            scene = Scene(pair)
    assert scene.rest() == right


def lines(limit: int) -> Any:
    """Raises `KeyboardInterrupt` at one of the lines that are run in the engine's modules."""
    left = [limit]

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        if "/radixkv/engine/" not in frame.f_code.co_filename.replace("\\", "/"):
            return None
        if event == "line":
            left[0] -= 1
            if left[0] == 0:
                raise KeyboardInterrupt
        return trace

    return trace


def lines_of_a_step(pair: Any) -> int:
    scene = Scene(pair)
    count = [0]

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        if "/radixkv/engine/" not in frame.f_code.co_filename.replace("\\", "/"):
            return None
        count[0] += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        scene.sample()
    finally:
        sys.settrace(before)
    return count[0]


@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.parametrize("part", range(3))
def test_an_interrupt_at_any_line(part: int, marked: bool) -> None:
    """With a watermark, every sequence has a processor with state that generate() made."""
    pair = make_pair(marked)
    right = Scene(pair).rest()
    total = lines_of_a_step(pair)
    assert total > 500
    chosen = np.random.default_rng(part).choice(np.arange(1, total), 10, replace=False)
    for limit in chosen.tolist():
        scene = Scene(pair)
        before = scene.shown()
        tracer = sys.gettrace()
        sys.settrace(lines(limit))
        try:
            sampled = scene.sample()
        except KeyboardInterrupt:
            sys.settrace(tracer)
            assert scene.shown() == before, limit
            assert scene.rest() == right, limit
        else:  # it came where exceptions are swallowed
            sys.settrace(tracer)
            assert scene.take(sampled) == right[0], limit


def test_several_failures_in_a_row(pair: Any, right: list[Any]) -> None:
    scene = Scene(pair)
    random = np.random.default_rng(0)
    got = []
    for _ in range(STEPS):
        for _ in range(2):
            sys.settrace(lines(int(random.integers(1, 500))))
            try:
                with pytest.raises(KeyboardInterrupt):
                    scene.sample()
            finally:
                sys.settrace(None)
        got.append(scene.take(scene.sample()))
    assert got == right


@pytest.mark.parametrize("field", ["logits_processors", "stopping_criteria"])
def test_a_fork_that_raises(pair: Any, field: str) -> None:
    """It matters only where it would have been needed, and there its sequence ends, rather than go on wrongly."""

    class Torn:
        def __init__(self) -> None:
            self.forks = 0

        def fork(self) -> Torn:
            if self.forks:
                raise ZeroDivisionError("torn")
            torn = Torn()
            torn.forks = 1
            return torn

        def __call__(self, ids: Any, scores: Any) -> Any:
            if ids.shape[1] == len(PROMPTS[0]) + 3 and interrupts:
                raise interrupts.pop()
            return scores if isinstance(scores, torch.Tensor) else False

    interrupts: list[BaseException] = []
    params = SamplingParams(max_new_tokens=6, **{field: [Torn()]})  # type: ignore[arg-type]
    assert one(pair[0], PROMPTS[0], params).reason == "length"
    interrupts.append(KeyboardInterrupt())
    sampler = Sampler(pair[0])
    state = sampler.start(params, np.array(PROMPTS[0]))
    other = sampler.start(SamplingParams(), np.array(PROMPTS[0]))
    row = list(PROMPTS[0])
    for _ in range(6):
        logits = last_logits(pair[0], row)[None]
        try:
            sampled = sampler.sample(logits, [state, other], np.zeros(2, int), lambda i: np.array(row))
        except KeyboardInterrupt:
            sampled = sampler.sample(logits, [state, other], np.zeros(2, int), lambda i: np.array(row))
            assert sampled.finished == {0: "error"}
            assert "Torn raised ZeroDivisionError: torn" in str(sampled.errors[0])
            return
        assert not sampled.errors
        row.append(int(sampled.token_ids[1]))
    raise AssertionError


def test_what_cannot_be_copied_is_called_all_the_same(pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = pair[0]

    class Stubborn:
        def __deepcopy__(self, memo: Any) -> Any:
            raise TypeError("not me")

        def __call__(self, ids: Any, scores: Any) -> Any:
            return scores.roll(1, dims=-1)

    get = model._get_logits_processor
    monkeypatch.setattr(
        model,
        "_get_logits_processor",
        lambda *args, **kwargs: transformers.LogitsProcessorList([*get(*args, **kwargs), Stubborn()]),
    )
    assert one(model, PROMPTS[0], SamplingParams(max_new_tokens=4)).reason == "length"


@pytest.fixture(autouse=True)
def _no_trace_is_left() -> Iterator[None]:
    before = sys.gettrace()
    yield
    sys.settrace(before)
