"""How far a hit moves the logits: the same prompt computed whole, and as cached prefix and rest.

For prompts cut at several places, the largest difference of a logit of the last position, the spread of those
logits, and in how many cases greedy decoding gives other tokens (with the gap between the two best logits where it
first does). float32 and bfloat16, Gemma 3 270M and a random Llama.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from common import gemma, header, ids, llama, make_cache, parser, plain_twin, start


def measure(model: Any, prompts: int, length: int, cuts: Sequence[int], new: int) -> dict[str, Any]:
    plain = plain_twin(model)
    largest = spread = 0.0
    gaps: list[float] = []
    cases = 0
    for seed in range(prompts):
        prompt = ids(model, length, seed)
        with torch.no_grad():
            expected = plain(prompt, logits_to_keep=1).logits[0, -1].float()
        spread = max(spread, float(expected.std()))
        kwargs = dict(max_new_tokens=new, do_sample=False, output_logits=True, return_dict_in_generate=True)
        answer = plain.generate(prompt, **kwargs)
        for cut in cuts:
            cache = make_cache(model, 2 * (length + new))
            with cache.attached(model):
                model.generate(prompt[:, :cut], max_new_tokens=1)
                got = model.generate(prompt, **kwargs)
            assert cache.last_requests[0].hit_tokens >= min(cut, length - 1) - 1
            cases += 1
            largest = max(largest, float((got.logits[0][0].float() - expected).abs().max()))
            differ = (got.sequences != answer.sequences)[0, length:]
            if differ.any():
                best = answer.logits[int(differ.int().argmax())][0].float().topk(2).values
                gaps.append(float(best[0] - best[1]))
    return {"cases": cases, "largest": largest, "spread": spread, "differ": len(gaps), "gaps": gaps}


def main(argv: Sequence[str] | None = None) -> None:
    made = parser((__doc__ or "").split("\n")[0], rounds=2)
    args = start(made, argv)
    results: dict[str, Any] = header("numbers", args, dtype="float32 and bfloat16")
    print(
        f"\n{'model':<28} {'cases':>5} {'largest difference':>18} {'spread':>7} {'greedy differs':>14}  gaps there"
    )
    for name, make, length, cuts in (
        ("Gemma 3 270M", gemma, 640, (100, 300, 512, 600, 639)),
        ("Llama, 4 layers, random", llama, 300, (16, 100, 150, 250, 299)),
    ):
        for dtype in (torch.float32, torch.bfloat16):
            if args.tiny:
                length, cuts = 40, (7, 39)
            row = measure(make(args).to(dtype), args.rounds, length, cuts, 16)
            results[f"{name}, {dtype}"] = row
            label = f"{name}, {str(dtype).removeprefix('torch.')}"
            gaps = ", ".join(f"{gap:.3g}" for gap in row["gaps"])
            numbers = f"{row['cases']:>3} {row['largest']:>12.2g} {row['spread']:>7.2g} {row['differ']:>6}"
            print(f"{label:<38} {numbers}  {gaps}")
    if args.json:
        Path(args.json).write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
