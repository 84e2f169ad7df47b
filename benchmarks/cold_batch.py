"""Time to first token of a cold batch of 8 prompts with 512 shared and 32 own tokens each.

The floor is what cannot be avoided: one forward over the shared tokens, then one over the 8 x 32 own ones (the
repetition of the cache between them is not timed). Plain `generate()` computes the shared tokens eight times.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from common import (
    Report,
    cache_keyword,
    cache_of,
    gemma,
    ids,
    in_turn,
    make_cache,
    pairs,
    parser,
    plain_twin,
    same_tokens,
    start,
    timed,
)
from transformers import DynamicCache


def first_tokens(model: Any, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return model.generate(tokens, attention_mask=mask, max_new_tokens=1, do_sample=False)[:, -1]


class Floor:
    """The two forwards; `outside_ms` is time spent between them, to be taken off."""

    def __init__(self, model: Any, batch: torch.Tensor, shared: int) -> None:
        self.model, self.batch, self.shared = model, batch, shared
        self.keyword, self.outside_ms = cache_keyword(model), 0.0

    def __call__(self) -> torch.Tensor:
        with torch.inference_mode():
            cache = {self.keyword: DynamicCache(config=self.model.config)}
            past = cache_of(
                self.model(self.batch[:1, : self.shared], use_cache=True, logits_to_keep=1, **cache)
            )
            self.outside_ms, _ = timed(lambda: past.batch_repeat_interleave(self.batch.shape[0]))
            out = self.model(
                self.batch[:, self.shared :], use_cache=True, logits_to_keep=1, **{self.keyword: past}
            )
            return out.logits[:, -1].argmax(-1)


def main(argv: Sequence[str] | None = None) -> None:
    made = parser((__doc__ or "").split("\n")[0], rounds=5, clock=True)
    args = start(made, argv)
    rows, shared, own = (8, 512, 32) if not args.tiny else (3, 24, 6)
    model = gemma(args)
    plain = plain_twin(model)
    report = Report(
        "cold batch", args, {"model": type(model).__name__, "rows": rows, "shared": shared, "own": own}
    )
    cache = make_cache(model, shared + rows * (own + 64))

    cache.attach(model)

    def build(index: int, ragged: bool) -> tuple[torch.Tensor, torch.Tensor]:
        prefix = ids(model, shared, 1000 * index + args.seed)
        batch = torch.cat(
            [torch.cat([prefix, ids(model, own, 1000 * index + 1 + row)], 1) for row in range(rows)]
        )
        mask = torch.ones_like(batch)
        if ragged:  # rows that lack up to half of their own tokens, padded on the left
            for row in range(rows):
                gone = row * own // 2 // rows
                batch[row] = torch.cat([batch.new_zeros(gone), batch[row, : batch.shape[1] - gone]])
                mask[row, :gone] = 0
        return batch, mask

    outside: list[float] = []

    def prepare(index: int) -> dict[str, Any]:
        cache.clear()
        batch, mask = build(index, ragged=False)
        floor = Floor(plain, batch, shared)

        def timed_floor() -> torch.Tensor:
            result = floor()
            if index:
                outside.append(floor.outside_ms)
            return result

        return {
            "floor": timed_floor,
            "attached": lambda: first_tokens(model, batch, mask),
            "plain": lambda: first_tokens(plain, batch, mask),
        }

    times = in_turn(args.rounds, prepare, same_tokens)
    times["floor"] = [spent - between for spent, between in zip(times["floor"], outside, strict=True)]
    report.add(
        f"{rows} x ({shared} + {own}), attached",
        "floor: two forwards",
        pairs(times, "floor", "attached"),
        "<= 1.15",
    )
    report.add(
        f"{rows} x ({shared} + {own}), attached",
        "plain generate()",
        pairs(times, "plain", "attached"),
        "0.21 to 0.25",
    )

    def prepare_ragged(index: int) -> dict[str, Any]:
        cache.clear()
        batch, mask = build(index + 500, ragged=True)

        return {
            "plain": lambda: first_tokens(plain, batch, mask),
            "attached": lambda: first_tokens(model, batch, mask),
        }

    times = in_turn(max(1, args.rounds // 2), prepare_ragged, same_tokens)
    report.add(f"{rows} ragged rows, attached", "plain generate(), padded", pairs(times, "plain", "attached"))
    report.finish()


if __name__ == "__main__":
    main()
