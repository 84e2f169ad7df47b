"""Memory: what a session needs beside the pool, and what is left after many calls.

One call at a time on Gemma 3 270M: the bytes of the cache object that decoding works on, against those of
transformers' own `DynamicCache` at the same length, cold and after a hit; then the resident memory of the process
after each of many calls, once the pool has been written all over.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
from common import gemma, header, ids, make_cache, parser, plain_twin, start

MIB = 2**20


def cache_bytes(past: Any) -> tuple[int, int]:
    """Bytes of keys and values that are filled, and bytes allocated for them."""
    filled = allocated = 0
    for layer in past.layers:
        for name in ("keys", "values"):
            view = getattr(layer, name)
            if view is not None:
                filled += view.numel() * view.element_size()
                allocated += view.untyped_storage().nbytes()
    return filled, allocated


def main(argv: Sequence[str] | None = None) -> None:
    made = parser((__doc__ or "").split("\n")[0], rounds=30)
    args = start(made, argv)
    model = gemma(args)
    plain = plain_twin(model)
    length, new = (60, 8) if args.tiny else (2048, 64)
    cache = make_cache(model, 2 * (length + new))
    prompt = ids(model, length, 0)
    longer = torch.cat([prompt, ids(model, new, 1)], dim=1)
    results: dict[str, Any] = {**header("memory", args), "pool_bytes": cache.memory_bytes}
    print(
        f"\npool: {cache.num_blocks} blocks of {cache.block_size} tokens, {cache.memory_bytes / MIB:.1f} MiB"
    )

    def run(m: Any, batch: torch.Tensor) -> Any:
        return m.generate(batch, max_new_tokens=2, do_sample=False, return_dict_in_generate=True)

    with cache.attached(model):
        cases = (
            ("DynamicCache", run(plain, longer)),
            ("attached, no hit", run(model, longer[:, 1:])),
            ("attached, hit", (run(model, prompt), run(model, longer))[1]),
        )
        for name, out in cases:
            filled, allocated = cache_bytes(out.past_key_values)
            results[name] = {"filled": filled, "allocated": allocated}
            print(
                f"{name:<18} {filled / MIB:7.1f} MiB of KV in {allocated / MIB:7.1f} MiB, {length + new} tokens"
            )
        assert cases[0][1].sequences.equal(cases[2][1].sequences), "outputs differ"
        del cases, out
        resident = []
        for i in range(args.rounds):
            model.generate(ids(model, length, 10 + i), max_new_tokens=2, do_sample=False)
            gc.collect()
            resident.append(psutil.Process().memory_info().rss)
    grown = (resident[-1] - resident[len(resident) // 3]) / MIB
    results["resident_mib"] = [round(value / MIB, 1) for value in resident]
    print(f"resident memory over the last two thirds of {args.rounds} calls: {grown:+.1f} MiB")
    if args.json:
        Path(args.json).write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
