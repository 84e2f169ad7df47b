"""A driver that samples as an engine does, but computes every logit with a plain forward of the whole sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from radixkv.engine.sampler import Sampler, SequenceSampler, TokenLogprobs
from radixkv.engine.sampling_params import SamplingParams

LONGEST = 30  # new tokens where a request says None


@dataclass
class Run:
    """One sequence of the driver."""

    state: SequenceSampler
    ids: list[int]
    prompt_len: int
    reason: str | None = None
    error: Exception | None = None
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)

    @property
    def output(self) -> list[int]:
        return self.ids[self.prompt_len :]


def last_logits(model: Any, ids: Sequence[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([list(ids)]), use_cache=False).logits[0, -1]


def drive(
    model: Any,
    requests: Sequence[tuple[Sequence[int], SamplingParams]],
    *,
    tokenizer: Any = None,
    sampler: Sampler | None = None,
    shuffle: int | None = None,
    shared_rows: bool = True,
    logits_of: Any = last_logits,
) -> list[list[Run]]:
    """Complete all requests at once; returns their sequences.

    Args:
        model: Plain.
        requests: Prompts and how to sample.
        tokenizer: For stop strings.
        sampler: To use; None makes one.
        shuffle: Seed: every step the sequences come in another order, their rows too, and some wait for a while.
        shared_rows: Sequences with the same tokens read the same row of logits.
        logits_of: `(model, ids) -> [vocabulary]`.
    """
    sampler = Sampler(model, tokenizer) if sampler is None else sampler
    random = np.random.default_rng(shuffle)
    runs: list[list[Run]] = []
    for prompt, params in requests:
        array = np.array(prompt, np.int64)
        runs.append(
            [
                Run(sampler.start(params, array, i), list(map(int, prompt)), len(array))
                for i in range(params.n)
            ]
        )
    every = [run for group in runs for run in group]
    while live := [run for run in every if run.reason is None]:
        if shuffle is not None:
            live = [live[i] for i in random.permutation(len(live))[: random.integers(1, len(live) + 1)]]
        step(model, sampler, live, random if shuffle is not None else None, shared_rows, logits_of)
    return runs


def step(
    model: Any,
    sampler: Sampler,
    live: list[Run],
    random: Any,
    shared_rows: bool,
    logits_of: Any = last_logits,
) -> None:
    keys = [tuple(run.ids) if shared_rows else (id(run), *run.ids) for run in live]
    distinct = list(dict.fromkeys(keys))
    if random is not None:
        distinct = [distinct[i] for i in random.permutation(len(distinct))]
    where = {key: row for row, key in enumerate(distinct)}
    skip = 0 if shared_rows else 1
    logits = torch.stack([logits_of(model, key[skip:]) for key in distinct])
    before = logits.clone()
    rows = np.array([where[key] for key in keys])
    sampled = sampler.sample(
        logits, [run.state for run in live], rows, lambda i: np.array(live[i].ids, np.int64)
    )
    assert torch.equal(logits.nan_to_num(7.25), before.nan_to_num(7.25)), "the logits are not ours to change"
    assert sampled.token_ids.dtype == np.int64
    assert len(sampled.token_ids) == len(sampled.logprobs) == len(live)
    assert set(sampled.errors) <= set(sampled.finished)
    for i, run in enumerate(live):
        if i in sampled.errors:
            run.reason, run.error = sampled.finished[i], sampled.errors[i]
            continue
        run.ids.append(int(sampled.token_ids[i]))
        run.logprobs.append(sampled.logprobs[i])
        run.reason = sampled.finished.get(i)
        if run.reason is None and len(run.output) >= (run.state.params.max_new_tokens or LONGEST):
            run.reason = "length"


def outputs(runs: Sequence[Sequence[Run]]) -> list[list[list[int]]]:
    return [[run.output for run in group] for group in runs]


def one(model: Any, prompt: Sequence[int], params: SamplingParams, **kwargs: Any) -> Run:
    """The only sequence of one request."""
    ((run,),) = drive(model, [(prompt, params)], **kwargs)
    return run


def generated(model: Any, prompt: Any, n: int, seed: int | None = None, **kwargs: Any) -> list[int]:
    """The new tokens of plain `generate()` on one prompt."""
    ids = torch.as_tensor(prompt).reshape(1, -1)
    if seed is not None:
        torch.manual_seed(seed)
    kwargs.setdefault("do_sample", False)
    kwargs.setdefault("attention_mask", torch.ones_like(ids))
    return model.generate(ids, max_new_tokens=n, **kwargs)[0, ids.shape[1] :].tolist()
