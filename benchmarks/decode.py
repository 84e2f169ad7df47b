"""Time per decoded token, attached against transformers' own `DynamicCache`.

Both decode the same text from the same context in turn, some tokens at a time. Gemma's step is dominated by its
output matrix of 262,144 rows; the Llama of 4 layers and 8 KV heads shows what copying the cache per token costs.
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
    llama,
    make_cache,
    pairs,
    parser,
    plain_twin,
    same_tokens,
    start,
)
from transformers import DynamicCache


class Stream:
    """A hand-written greedy loop that stops and goes on."""

    def __init__(self, model: Any, context: torch.Tensor, past: Any = None) -> None:
        self.model, self.keyword = model, cache_keyword(model)
        self.past, self.current = past, context
        self.step(1)

    def step(self, n: int) -> torch.Tensor:
        tokens = []
        with torch.inference_mode():
            for _ in range(n):
                out = self.model(self.current, use_cache=True, logits_to_keep=1, **{self.keyword: self.past})
                self.past = cache_of(out)
                self.current = out.logits[:, -1:].argmax(-1)
                tokens.append(self.current)
        return torch.cat(tokens, 1)


def compare(args: Any, report: Report, name: str, model: Any, context: int, batch: int, target: str) -> None:
    plain = plain_twin(model)
    prompt = torch.cat([ids(model, context, args.seed + row) for row in range(batch)])
    total = (context + (args.rounds + 2) * args.tokens + 64) * batch
    cache = make_cache(model, total)
    with cache.attached(model):
        baseline = Stream(plain, prompt, DynamicCache(config=plain.config))
        ours = Stream(model, prompt)
        candidates = {"plain": lambda: baseline.step(args.tokens), "ours": lambda: ours.step(args.tokens)}
        times = in_turn(args.rounds, lambda _: candidates, same_tokens)
    per_token = [(a / args.tokens, b / args.tokens) for a, b in pairs(times, "plain", "ours")]
    report.add(name, "DynamicCache", per_token, target, notes="ms per token")


def main(argv: Sequence[str] | None = None) -> None:
    made = parser((__doc__ or "").split("\n")[0], rounds=15, clock=True)
    made.add_argument("--tokens", type=int, default=8, help="tokens decoded at a time")
    made.add_argument("--only", choices=["gemma", "llama"], help="one of the models")
    args = start(made, argv)
    long, short = (4096, 2048) if not args.tiny else (64, 40)
    report = Report(
        "decode", args, {"gemma": f"1 x {short}", "llama 4 layers 8 KV heads d64": f"1 x {long}, 4 x {short}"}
    )
    if args.only != "llama":
        compare(args, report, f"Gemma 3 270M, context {short}", gemma(args), short, 1, "<= 1.03")
    if args.only != "gemma":
        model = llama(args)
        compare(
            args, report, f"Llama 4 layers, context {long}", model, long, 1, "<= 0.714 (1.4 times faster)"
        )
        compare(args, report, f"Llama 4 layers, 4 x context {short}", model, short, 4, "")
    report.finish()


if __name__ == "__main__":
    main()
