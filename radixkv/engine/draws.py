"""Choosing tokens from scores: the likeliest one, or a random one with a generator for each row."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

__all__ = ["best", "draw", "fork_seed", "race_is_exact", "rows_at_once", "sequence_seed"]

# Of float32 temporaries. On CPU small enough to stay in reach of the caches and below what malloc maps anew each time;
# elsewhere large enough that launches do not matter.
_ELEMENTS_CPU, _ELEMENTS = 1 << 21, 1 << 25
_LARGE_VOCABULARY = 8192
_LIKELY = 1024
_CHECKED = 4096


def rows_at_once(vocab_size: int, device: torch.device) -> int:
    """How many rows to work on at a time, so that temporary tensors stay small however large the batch."""
    elements = _ELEMENTS_CPU if device.type == "cpu" else _ELEMENTS
    return max(1, elements // max(vocab_size, 1))


def best(scores: Tensor) -> tuple[Tensor, Tensor]:
    """The first of the highest scores of each row, as `torch.argmax` of the row in float32.

    Args:
        scores: `[rows, vocabulary]`, any float dtype. Only read.

    Returns:
        `[rows]` int64 ids, and `[rows]` bool: whether that score is a number above minus infinity. It is not if any
        score of the row is NaN or if none is above minus infinity; the id then means nothing.
    """
    if scores.device.type != "cpu":
        if scores.dtype == torch.float64:
            scores = scores.float()
        ids = scores.argmax(dim=-1)
        return ids, scores.gather(1, ids[:, None])[:, 0] > -torch.inf
    if scores.dtype == torch.float32:
        return _best_cpu(scores)
    # numpy has no bfloat16 and is slow with float16; one small buffer serves all rows.
    num_rows, vocab_size = scores.shape
    step = min(num_rows, max(1, rows_at_once(vocab_size, scores.device) // 4))
    buffer = torch.empty((step, vocab_size), dtype=torch.float32, device=scores.device)
    parts = []
    for start in range(0, num_rows, max(step, 1)):
        part = scores[start : start + step]
        parts.append(_best_cpu(buffer[: len(part)].copy_(part)))
    ids = torch.cat([part[0] for part in parts])
    return ids, torch.cat([part[1] for part in parts])


def _best_cpu(scores: Tensor) -> tuple[Tensor, Tensor]:
    # numpy's argmax reads a row at memory speed, ten times as fast as torch's on one thread. Both give the first
    # of equals and both let NaN win.
    array = scores.detach().numpy()
    ids = array.argmax(axis=1)
    values = array[np.arange(len(array)), ids]
    return torch.from_numpy(ids.astype(np.int64, copy=False)), torch.from_numpy(values > -np.inf)


def draw(
    probabilities: Tensor,
    generators: Sequence[torch.Generator],
    ids: Tensor | None = None,
    vocab_size: int = 0,
) -> tuple[Tensor, Tensor]:
    """One random token for each row, each with its own generator.

    The tokens are those of `torch.multinomial(row, 1, generator=...)` on each row by itself, and the generators are
    left in the same state. That is a race: token `i` arrives after `q_i / p_i`, with `q` exponentially
    distributed, and the first one wins.

    Args:
        probabilities: `[rows, candidates]` float32. Only read.
        generators: One for each row, on the device of `probabilities`.
        ids: `[rows, candidates]`: the tokens that these are the probabilities of, where all others have none; None if
            the candidates are the whole vocabulary. Needs `race_is_exact`.
        vocab_size: With `ids`, the tokens there are.

    Returns:
        `[rows]` int64 ids, and `[rows]` bool: whether the row was a distribution at all.
    """
    device = probabilities.device
    if not race_is_exact(device):
        return _draw_one_by_one(probabilities, generators)
    if ids is None:
        if probabilities.shape[-1] >= _LARGE_VOCABULARY and _exponential_is_log_of_uniform(device):
            return _draw_large(probabilities, generators)
        waits = torch.empty_like(probabilities)
        for row, generator in zip(waits, generators, strict=True):
            row.exponential_(1, generator=generator)
    else:
        waits = _waits_of(ids, generators, vocab_size)
    race = torch.div(probabilities, waits, out=waits)
    positions, _ = best(race)
    winners = positions if ids is None else ids.gather(1, positions[:, None])[:, 0]
    # NaN wins every race, and all is NaN after the softmax of a row with NaN, plus infinity or only minus infinity.
    return winners, race.gather(1, positions[:, None])[:, 0] > 0


def _waits_of(ids: Tensor, generators: Sequence[torch.Generator], vocab_size: int) -> Tensor:
    """What `exponential_` draws for some tokens of a row as long as the vocabulary."""
    waits = torch.empty(ids.shape, dtype=torch.float32, device=ids.device)
    if _exponential_is_log_of_uniform(ids.device):
        # Most of the time goes into logarithms: take them of the few candidates only.
        uniform = torch.empty(vocab_size, dtype=torch.float64, device=ids.device)
        for row, chosen, generator in zip(waits, ids, generators, strict=True):
            row.copy_(_waits(uniform.uniform_(generator=generator)[chosen]))
        return waits
    every = torch.empty(vocab_size, dtype=torch.float32, device=ids.device)
    for row, chosen, generator in zip(waits, ids, generators, strict=True):
        torch.index_select(every.exponential_(1, generator=generator), 0, chosen, out=row)
    return waits


def _draw_large(probabilities: Tensor, generators: Sequence[torch.Generator]) -> tuple[Tensor, Tensor]:
    """The same race where most logarithms are not taken.

    Once the likeliest tokens have run, a token less likely than all of them can only win if its own wait is very
    short, which its uniform number tells without a logarithm.
    """
    top, ids = probabilities.topk(_LIKELY, dim=-1)
    winners, usable = [], []
    uniform = torch.empty(probabilities.shape[-1], dtype=torch.float64, device=probabilities.device)
    for row, likely, places, generator in zip(probabilities, top, ids, generators, strict=True):
        uniform.uniform_(generator=generator)
        race = likely / _waits(uniform[places])
        lead = float(race.max())
        # wait = -log(1 - u) < p / lead, with p the least of the likely ones; the margin is for rounding.
        bound = -math.expm1(-float(likely[-1]) / lead * 1.001) if lead > 0 else 0.0
        late = (uniform < bound).nonzero()[:, 0]
        places = torch.cat([places, late])
        race = torch.cat([race, row[late] / _waits(uniform[late])])
        # In the order of the vocabulary, as ties are broken.
        best_time = race.max()
        winners.append(places[race == best_time].min() if lead > 0 else places[0])
        usable.append(lead > 0)
    return torch.stack(winners), torch.tensor(usable, device=probabilities.device)


def _waits(uniform: Tensor) -> Tensor:
    return torch.log1p(-uniform).neg_().float()


def _draw_one_by_one(probabilities: Tensor, generators: Sequence[torch.Generator]) -> tuple[Tensor, Tensor]:
    usable = torch.isfinite(probabilities).all(dim=-1) & (probabilities.sum(dim=-1) > 0)
    ids = torch.zeros(len(probabilities), dtype=torch.int64, device=probabilities.device)
    for i, is_usable in enumerate(usable.tolist()):
        if is_usable:
            ids[i] = torch.multinomial(probabilities[i], 1, generator=generators[i])[0]
    return ids, usable


@functools.cache
def race_is_exact(device: torch.device) -> bool:
    """Whether `torch.multinomial` draws one token by the race that `draw` runs; looked at once for each device.

    It does since 2019, but nothing promises that it will.
    """
    row = torch.linspace(-9, 9, _CHECKED, dtype=torch.float32, device=device).softmax(dim=-1)[None]
    mine, theirs = (torch.Generator(device).manual_seed(7) for _ in range(2))
    for _ in range(4):
        waits = torch.empty_like(row)
        waits[0].exponential_(1, generator=mine)
        if (row / waits).argmax(dim=-1).item() != torch.multinomial(row, 1, generator=theirs).item():
            return False
    return bool(torch.equal(mine.get_state(), theirs.get_state()))


@functools.cache
def _exponential_is_log_of_uniform(device: torch.device) -> bool:
    """Whether `exponential_` is, bit for bit, a logarithm of a float64 `uniform_`.

    So it is on CPU unless torch draws from another library's stream; elsewhere drawing them all costs little.
    """
    if device.type != "cpu":
        return False
    mine, theirs = (torch.Generator(device).manual_seed(11) for _ in range(2))
    plain = torch.empty(_CHECKED, dtype=torch.float32, device=device).exponential_(1, generator=theirs)
    uniform = torch.empty(_CHECKED, dtype=torch.float64, device=device).uniform_(generator=mine)
    return torch.equal(plain, _waits(uniform)) and torch.equal(mine.get_state(), theirs.get_state())


def sequence_seed(seed: int | None, index: int) -> int:
    """The seed of sequence `index` of a request: `seed + index`, or one drawn from torch's global generator.

    `seed + index` is also what vLLM gives the sequences of a request.
    """
    if seed is None:
        return int(torch.randint(2**63 - 1, (1,), device="cpu").item())
    return seed + index


def fork_seed(seed: int, num_tokens: int, num_forks: int) -> int:
    """A seed for a fork: a hash of the seed it forks from, where it does, and how many did before."""
    return int(
        np.random.SeedSequence([seed, num_tokens, num_forks]).generate_state(1, np.uint64)[0] >> np.uint64(1)
    )
