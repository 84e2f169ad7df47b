"""The recording of "Blocks, block tables and preemption": six requests on a small pool, in every setting."""

from __future__ import annotations

import itertools
import json

from docs.tooling.scenes._blocks_encoding import DIGITS, Encoder
from docs.tooling.scenes._blocks_recorder import Counters, Recording, Setting, record
from docs.tooling.scenes._blocks_story import (
    BLOCK_SIZE,
    DEFAULT_POOL,
    HOST_BLOCKS,
    REQUESTS,
    SLAB,
    WORDS,
    tokens_of,
)

URI = "assets/interactive/blocks-recording.js"

MODES = ("recompute", "swap")
CHOICES = tuple(itertools.product(MODES, (True, False), (True, False)))


def record_all() -> dict[Setting, Recording]:
    """Every setting, from the smallest pool that serves all six requests up to where nobody is preempted: by trying."""
    recorded: dict[Setting, Recording] = {}

    def at(pool: int) -> list[Recording]:
        for mode, share, keep in CHOICES:
            setting = Setting(pool, mode, share, keep)
            if setting not in recorded:
                # What is not shared is not cached either: whether it is kept makes no difference.
                same = recorded.get(setting._replace(keep=True)) if not share else None
                recorded[setting] = same or record(setting)
        return [recorded[Setting(pool, *choice)] for choice in CHOICES]

    sizes = [-(-len(asked.text) // BLOCK_SIZE) for asked in REQUESTS]
    first = max(sizes)
    while first > 1 and all(each.all_done for each in at(first - 1)):
        first -= 1
    while not all(each.all_done for each in at(first)):
        first += 1
    # A larger pool may preempt where a smaller one does not, because it lets requests in earlier: look from above.
    # With every block that they ever hold at once, and one more for each to copy from, nobody waits for a block.
    peak = max(state.counters.used for each in at(sum(sizes)) for state in each.states)
    last = peak + len(REQUESTS)
    while not any(each.num_preempted for each in at(last - 1)):
        last -= 1
    pools = range(first, last + 1)
    return {
        Setting(pool, *choice): each for pool in pools for choice, each in zip(CHOICES, at(pool), strict=True)
    }


def make() -> str:
    """The recording, as a script."""
    recorded = record_all()
    encoder = Encoder()
    runs: dict[str, list[int]] = {}
    for setting, recording in recorded.items():
        name = f"{setting.mode}{int(setting.share)}{int(setting.keep)}"
        runs.setdefault(name, []).append(encoder.add(recording))
    pools = [setting.pool for setting in recorded]
    data = {
        "digits": DIGITS,
        "blockSize": BLOCK_SIZE,
        "slab": SLAB,
        "hostBlocks": HOST_BLOCKS,
        "pool": {"min": min(pools), "max": max(pools), "value": DEFAULT_POOL},
        "counters": list(Counters._fields),
        "words": WORDS,
        "requests": [
            {"arrives": asked.arrives, "prompt": len(asked.prompt), "tokens": tokens_of(asked.text)}
            for asked in REQUESTS
        ],
        # By setting, mode and 1 or 0 for share and keep; then by pool size, from the smallest.
        "settings": runs,
        "runs": encoder.runs,
        "steps": list(encoder.steps),
        "events": [[event.kind, list(event.requests), event.text] for event in encoder.events],
    }
    return f"window.radixkvBlocks = {json.dumps(data, separators=(',', ':'))};\n"
