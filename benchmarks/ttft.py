"""Time to first token of a prompt whose beginning is cached.

1. One prefix of 2,048 tokens and 64 new ones, against
   the floor: the model's own forward over the 64 new tokens on a ready `DynamicCache`, with no copy of it;
   the recipe of the transformers docs: `copy.deepcopy(prompt_cache)` and `generate()`;
   plain `generate()` over the whole prompt.
2. A set of prompts with several prefixes that branch (two system texts, two documents under each, three questions
   to each), served one after the other from an empty cache. The recipe has one fixed prefix and helps only the
   prompts that begin with it.
"""

from __future__ import annotations

import copy
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
)
from transformers import DynamicCache


def first_token(model: Any, tokens: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    mask = torch.ones_like(tokens)
    return model.generate(tokens, attention_mask=mask, max_new_tokens=1, do_sample=False, **kwargs)[:, -1]


def forward(model: Any, tokens: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    with torch.inference_mode():
        return model(tokens, use_cache=True, logits_to_keep=1, **kwargs).logits[:, -1].argmax(-1)


def filled(model: Any, tokens: torch.Tensor) -> DynamicCache:
    """A cache as the docs make it: by a forward over the prefix."""
    keyword = cache_keyword(model)
    with torch.inference_mode():
        cache = DynamicCache(config=model.config)
        return cache_of(model(tokens, use_cache=True, logits_to_keep=1, **{keyword: cache}))


def one_prefix(args: Any, report: Report, model: Any, plain: Any) -> None:
    cached, new = report.shapes["cached"], report.shapes["new"]
    keyword = cache_keyword(model)
    prefix = ids(model, cached, args.seed)
    prompt_cache = filled(plain, prefix)
    cache = make_cache(model, cached + (args.rounds + 8) * (2 * new + 32))
    cache.attach(model)
    first_token(model, prefix)

    def prepare(index: int) -> dict[str, Any]:
        # Other new tokens in every round and for each of our two ways, or the second would hit them all.
        one = torch.cat([prefix, ids(model, new, 10_000 + index)], 1)
        two = torch.cat([prefix, ids(model, new, 20_000 + index)], 1)
        ready = [copy.deepcopy(prompt_cache) for _ in range(2)]
        return {
            "floor": lambda: forward(plain, one[:, cached:], **{keyword: ready[0]}),
            "attached forward": lambda: forward(model, one),
            "recipe": lambda: first_token(plain, two, **{keyword: copy.deepcopy(prompt_cache)}),
            "attached generate": lambda: first_token(model, two),
            "floor for generate": lambda: forward(plain, two[:, cached:], **{keyword: ready[1]}),
        }

    def check(results: dict[str, torch.Tensor]) -> None:
        same_tokens({key: results[key] for key in ("floor", "attached forward")})
        same_tokens({key: results[key] for key in ("recipe", "attached generate", "floor for generate")})
        hit = cache.last_requests[0].hit_tokens
        if hit != cached:
            raise SystemExit(
                f"the cache served {hit} tokens, not {cached}: this would measure something else"
            )

    times = in_turn(args.rounds, prepare, check)
    floor = "floor: forward on a ready cache"
    name, recipe = "one prefix, generate() attached", "deepcopy(prompt_cache) recipe"
    report.add("one prefix, model(...) attached", floor, pairs(times, "floor", "attached forward"), "<= 1.10")
    report.add(name, floor, pairs(times, "floor for generate", "attached generate"), "<= 1.10")
    report.add(name, recipe, pairs(times, "recipe", "attached generate"), "<= 1.00")
    report.add("the recipe itself", floor, pairs(times, "floor for generate", "recipe"))

    def prepare_cold(index: int) -> dict[str, Any]:
        tokens = torch.cat([prefix, ids(model, new, 30_000 + index)], 1)
        return {"plain": lambda: first_token(plain, tokens), "attached": lambda: first_token(model, tokens)}

    times = in_turn(args.cold_rounds, prepare_cold, same_tokens)
    report.add("one prefix, generate() attached", "plain generate()", pairs(times, "plain", "attached"))
    cache.detach()


def branching(args: Any, report: Report, model: Any, plain: Any) -> None:
    system, document, question = (report.shapes[key] for key in ("system", "document", "question"))
    keyword = cache_keyword(model)
    systems = [ids(model, system, 100 + i) for i in range(2)]
    documents = [
        [torch.cat([systems[i], ids(model, document, 200 + 2 * i + j)], 1) for j in range(2)]
        for i in range(2)
    ]
    prompts = [
        torch.cat([documents[i][j], ids(model, question, 300 + 10 * k + 2 * i + j)], 1)
        for k in range(3)
        for i in range(2)
        for j in range(2)
    ]
    report.shapes["set"] = f"{len(prompts)} prompts of {prompts[0].shape[1]}"
    cache = make_cache(model, sum(prompt.shape[1] + 32 for prompt in prompts))
    cache.attach(model)

    def serve_plain() -> torch.Tensor:
        return torch.cat([first_token(plain, prompt) for prompt in prompts])

    def serve_recipe() -> torch.Tensor:
        made = filled(plain, systems[0])
        answers = []
        for prompt in prompts:
            fits = torch.equal(prompt[:, :system], systems[0])
            answers.append(first_token(plain, prompt, **({keyword: copy.deepcopy(made)} if fits else {})))
        return torch.cat(answers)

    def serve_attached() -> torch.Tensor:
        return torch.cat([first_token(model, prompt) for prompt in prompts])

    def prepare(index: int) -> dict[str, Any]:
        cache.clear()
        cache.reset_stats()
        return {"plain": serve_plain, "recipe": serve_recipe, "attached": serve_attached}

    times = in_turn(args.set_rounds, prepare, same_tokens)
    stats = cache.stats
    note = f"{stats.hit_tokens:,} of {stats.prompt_tokens:,} prompt tokens served from the cache"
    name = "branching prompts, whole set, attached"
    report.add(name, "plain generate()", pairs(times, "plain", "attached"), notes=note)
    report.add(name, "deepcopy recipe, best prefix", pairs(times, "recipe", "attached"))
    cache.detach()


def main(argv: Sequence[str] | None = None) -> None:
    made = parser((__doc__ or "").split("\n")[0], rounds=15, clock=True)
    made.add_argument(
        "--cold-rounds", type=int, default=3, help="rounds against plain generate(), which is slow"
    )
    made.add_argument("--set-rounds", type=int, default=2, help="rounds of the set of branching prompts")
    args = start(made, argv)
    shapes: dict[str, Any] = dict(cached=2048, new=64, system=512, document=512, question=48)
    if args.tiny:
        shapes = dict(cached=48, new=8, system=16, document=16, question=6)
    model = gemma(args)
    plain = plain_twin(model)
    report = Report("time to first token", args, {"model": type(model).__name__, **shapes})
    one_prefix(args, report, model, plain)
    branching(args, report, model, plain)
    report.finish()


if __name__ == "__main__":
    main()
