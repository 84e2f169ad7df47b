"""The four ways to answer a list of prompts with one model.

Each is given the token ids of some prompts and returns the new tokens of each, an end token left out. All decode
greedily, with the same limit and the same end tokens. What each does to prepare (padding, a request list) is part of
its time; making an engine or a model is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from radixkv.bench.continuous import continuous_batch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Ids = list[int]

#: Names of the ways, in the order of the tables; the engine is the one that the others are compared with.
NAMES = ("one_by_one", "padded", "generate_batch", "engine")


class NotMeasured(Exception):
    """A way that cannot run here, and why."""


@dataclass(frozen=True)
class Outcome:
    """What a way made of a list of prompts.

    Attributes:
        tokens: New tokens of each prompt.
        peak_kv_bytes: Most memory that keys and values took or were reserved for at a time, computed.
        hit_tokens: Prompt tokens whose prefill was skipped; None where the way does not say.
        problems: What went wrong with single requests: one text each.
    """

    tokens: list[Ids]
    peak_kv_bytes: int
    hit_tokens: int | None = 0
    problems: tuple[str, ...] = ()


class Way(Protocol):
    """One way to answer prompts."""

    name: str
    title: str

    def reset(self) -> None:
        """Forget everything: the next prompts meet a cold cache."""

    def run(self, prompts: Sequence[Ids]) -> Outcome:
        """Answer these prompts.

        Raises:
            NotMeasured: It cannot run here.
        """


@dataclass(frozen=True)
class Setting:
    """What all ways have in common.

    Attributes:
        model: In evaluation mode.
        max_new_tokens: Limit of each answer.
        end_ids: Tokens that end an answer.
        pad_id: Token for padding.
        bytes_per_token: Bytes of keys and values of one token over all layers, sliding ones in full.
    """

    model: PreTrainedModel
    max_new_tokens: int
    end_ids: tuple[int, ...]
    pad_id: int
    bytes_per_token: int

    def until_end(self, tokens: Sequence[int]) -> Ids:
        """An answer without its end token and what follows it."""
        end = next((i for i, token in enumerate(tokens) if token in self.end_ids), len(tokens))
        return list(tokens[:end])


class _Generate:
    """The two ways that go through `model.generate`."""

    name: str
    title: str

    def __init__(self, setting: Setting) -> None:
        self._setting = setting

    def reset(self) -> None:
        """Nothing is kept between calls."""

    def _generate(self, prompts: Sequence[Ids]) -> tuple[list[Ids], int]:
        """New tokens and reserved bytes of one rectangular batch, padded on the left."""
        import torch

        setting, model = self._setting, self._setting.model
        longest = max(map(len, prompts))
        ids = torch.full((len(prompts), longest), setting.pad_id, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, longest - len(prompt) :] = torch.tensor(prompt)
            mask[row, longest - len(prompt) :] = 1
        with torch.inference_mode():
            out = model.generate(
                ids.to(model.device),
                attention_mask=mask.to(model.device),
                max_new_tokens=setting.max_new_tokens,
                do_sample=False,
                num_beams=1,
                eos_token_id=list(setting.end_ids) or None,
                pad_token_id=setting.pad_id,
            )
        reserved = len(prompts) * (longest + setting.max_new_tokens) * setting.bytes_per_token
        return [setting.until_end(row) for row in out[:, longest:].tolist()], reserved


class OneByOne(_Generate):
    """`model.generate` for each prompt alone: no padding, no sharing; the tokens that count as right."""

    name, title = "one_by_one", "one by one"

    def run(self, prompts: Sequence[Ids]) -> Outcome:
        """One call a prompt."""
        outputs = [self._generate([prompt]) for prompt in prompts]
        tokens = [row for rows, _ in outputs for row in rows]
        return Outcome(tokens, max(reserved for _, reserved in outputs))


class Padded(_Generate):
    """`model.generate` for batches, padded on the left to the longest prompt of each.

    Args:
        setting: What all ways have in common.
        batch_size: Rows of a batch; the last may have fewer.
    """

    name, title = "padded", "padded batch"

    def __init__(self, setting: Setting, batch_size: int) -> None:
        super().__init__(setting)
        self._batch_size = batch_size

    def run(self, prompts: Sequence[Ids]) -> Outcome:
        """One call a batch."""
        tokens: list[Ids] = []
        peak = 0
        for start in range(0, len(prompts), self._batch_size):
            rows, reserved = self._generate(prompts[start : start + self._batch_size])
            tokens += rows
            peak = max(peak, reserved)
        return Outcome(tokens, peak)


class GenerateBatch:
    """transformers' own continuous batching, `model.generate_batch`."""

    name, title = "generate_batch", "generate_batch"

    def __init__(self, setting: Setting, max_batched_tokens: int) -> None:
        self._setting, self._max_batched_tokens = setting, max_batched_tokens

    def reset(self) -> None:
        """Its cache lives for one call."""

    def run(self, prompts: Sequence[Ids]) -> Outcome:
        """One call for all prompts."""
        setting = self._setting
        try:
            tokens, slots = continuous_batch(
                setting.model,
                prompts,
                max_new_tokens=setting.max_new_tokens,
                end_ids=setting.end_ids,
                max_batched_tokens=self._max_batched_tokens,
            )
        except Exception as error:  # whatever it is: it is another library's, and the reader wants to see it
            reason = " ".join(str(error).split()) or type(error).__name__
            raise NotMeasured(reason) from error
        rows = [setting.until_end(row) for row in tokens]
        return Outcome(rows, slots * setting.bytes_per_token, hit_tokens=None)


class EngineWay:
    """`radixkv.Engine`.

    Args:
        setting: What all ways have in common.
        engine: Made for the model of the setting.
    """

    name, title = "engine", "radixkv engine"

    def __init__(self, setting: Setting, engine: Any) -> None:
        self._setting, self.engine = setting, engine

    def reset(self) -> None:
        """Drop what is cached."""
        self.engine.cache.clear()

    def run(self, prompts: Sequence[Ids]) -> Outcome:
        """All prompts at once, step by step."""
        from radixkv.engine.sampling_params import SamplingParams

        setting, cache = self._setting, self.engine.cache
        sampling = SamplingParams(max_new_tokens=setting.max_new_tokens, stop_token_ids=setting.end_ids)
        rids = [self.engine.add_request(prompt, sampling) for prompt in prompts]
        done: dict[Any, Any] = {}
        peak, start = 0, _occupied(cache)
        while len(done) < len(rids):
            nobody_ended = not done
            for output in self.engine.step():
                if output.completion is not None:
                    done[output.rid] = output.completion
            # Blocks that only the cache holds are spare room: anybody who needs one takes it.
            peak = max(peak, _occupied(cache) - cache.num_evictable_blocks)
            if nobody_ended:
                # Who ended in this step has given its blocks to the cache by now; they were new to it.
                peak = max(peak, _occupied(cache) - start)
        completions = [done[rid] for rid in rids]
        problems = tuple(
            f"request {i + 1} ended with {c.finish_reason!r}{f': {c.error}' if c.error else ''}"
            for i, c in enumerate(completions)
            if c.finish_reason not in ("stop", "length")
        )
        return Outcome(
            tokens=[setting.until_end(c.token_ids) for c in completions],
            peak_kv_bytes=peak * cache.block_size * setting.bytes_per_token,
            hit_tokens=sum(c.num_cached_tokens for c in completions),
            problems=problems,
        )


def _occupied(cache: Any) -> int:
    """Blocks that are not free."""
    return int(cache.num_blocks - cache.num_free_blocks)
