"""What the cache costs when it never hits: distinct prompts, `generate()` attached against plain.

The pool is smaller than all prompts together, so that eviction is part of what is measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from common import (
    Report,
    gemma,
    ids,
    in_turn,
    llama,
    make_cache,
    pairs,
    parser,
    plain_twin,
    same_tokens,
    start,
)


def compare(
    args: Any, report: Report, name: str, model: Any, rows: int, length: int, new: int, target: str
) -> None:
    plain = plain_twin(model)
    cache = make_cache(model, 3 * rows * (length + new))
    wrong: list[int] = []

    def prepare(index: int) -> dict[str, Any]:
        batch = torch.cat([ids(model, length, 1 + 100 * index + row) for row in range(rows)])
        # Different first tokens, or a chance hit of one token would make the batch other than announced.
        batch[:, 0] = torch.arange(rows) + 20 + rows * index

        def run(m: Any) -> torch.Tensor:
            mask = torch.ones_like(batch)
            return m.generate(
                batch, attention_mask=mask, max_new_tokens=new, min_new_tokens=new, do_sample=False
            )

        def attached() -> torch.Tensor:
            result = run(model)
            wrong.extend(row.hit_tokens for row in cache.last_requests if row.hit_tokens)
            return result

        return {"plain": lambda: run(plain), "attached": attached}

    with cache.attached(model):
        times = in_turn(args.rounds, prepare, same_tokens)
    if wrong:
        raise SystemExit(f"{len(wrong)} prompts hit after all: this would measure something else")
    report.add(name, "plain generate()", pairs(times, "plain", "attached"), target)


def main(argv: Sequence[str] | None = None) -> None:
    made = parser((__doc__ or "").split("\n")[0], rounds=15, clock=True)
    made.add_argument("--only", choices=["gemma", "llama"], help="one of the models")
    args = start(made, argv)
    length, new = (512, 16) if not args.tiny else (24, 4)
    report = Report("no hit", args, {"prompt": length, "new": new})
    if args.only != "llama":
        model = gemma(args)
        compare(args, report, f"Gemma 3 270M, {length} + {new}", model, 1, length, new, "<= 1.03")
        compare(args, report, f"Gemma 3 270M, first token only, {length}", model, 1, length, 1, "<= 1.03")
        compare(
            args, report, f"Gemma 3 270M, 4 x {length // 2} + {new}", model, 4, length // 2, new, "<= 1.03"
        )
    if args.only != "gemma":
        model = llama(args)
        compare(args, report, f"Llama 4 layers, {length} + {new}", model, 1, length, new, "<= 1.03")
        compare(args, report, f"Llama 4 layers, {length // 8} + {new}", model, 1, length // 8, new, "<= 1.03")
        compare(
            args, report, f"Llama 4 layers, 8 x {length // 8} + {new}", model, 8, length // 8, new, "<= 1.03"
        )
    report.finish()


if __name__ == "__main__":
    main()
