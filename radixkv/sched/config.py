"""What a scheduler may be told."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from radixkv.core.errors import InvalidRequestError

PREEMPTION_MODES = ("recompute", "swap", "auto")
ORDERS = ("fcfs", "prefix")
_MOST_SEQS = 2**20  # each takes a row in arrays that are made at once


@dataclass(frozen=True)
class SchedulerConfig:
    """Limits and policies of a `Scheduler`.

    Attributes:
        max_num_seqs: Sequences that run at the same time; a request with n completions takes n of them.
        max_batched_tokens: Tokens in one step. Decodes go first; what is left goes to prefill chunks.
        max_seq_len: Tokens of one sequence, prompt and output; a sequence that reaches it ends with "length".
            None: what the pool holds, where a sequence that outgrows it ends with "capacity".
        preemption: What happens to a sequence whose blocks are taken back: "recompute" drops them, "swap" copies
            them to the host tier (and drops them if that is full), "auto" takes what costs less; see `swap_cost`.
        order: Who is admitted next: "fcfs", in order of arrival, or "prefix", longest cached prefix first.
        max_overtakes: With "prefix", a waiting request is passed by at most so many later ones.
        watermark: Share of the pool that an admission leaves free while others run, for them to grow into.
        share_prefixes: Use what is cached, and cache what is computed.
        keep_cached: Keep blocks cached when nobody holds them any more. If False, only requests that run at the
            same time share.
        swap_cost: Time to move the KV of one token between the tiers, as a multiple of the time to compute it.
            "auto" swaps where moving a sequence's own blocks out and in again costs less than computing their
            tokens: `2 * swap_cost * blocks * block_size < tokens`. The default is an estimate for a GPU over
            PCIe, not measured on one yet: about 0.13 MB for a token of an 8B model, 6 us, against 50 us to
            compute it. `benchmarks/gpu.py` prints what it is on yours. On a CPU, where
            `benchmarks/preemption.py` measures it, it is 0.005 to 0.03.

    Raises:
        InvalidRequestError: A value makes no sense.
    """

    max_num_seqs: int = 256
    max_batched_tokens: int = 2048
    max_seq_len: int | None = None
    preemption: str = "auto"
    order: str = "fcfs"
    max_overtakes: int = 256
    watermark: float = 0.01
    share_prefixes: bool = True
    keep_cached: bool = True
    swap_cost: float = 0.125

    def __post_init__(self) -> None:
        _require_int("max_num_seqs", self.max_num_seqs, 1)
        if self.max_num_seqs > _MOST_SEQS:
            raise InvalidRequestError(f"max_num_seqs must be at most {_MOST_SEQS}, got {self.max_num_seqs}")
        _require_int("max_batched_tokens", self.max_batched_tokens, 1)
        _require_int("max_overtakes", self.max_overtakes, 0)
        if self.max_seq_len is not None:
            _require_int("max_seq_len", self.max_seq_len, 2)
        if self.preemption not in PREEMPTION_MODES:
            raise InvalidRequestError(
                f"preemption must be one of {', '.join(PREEMPTION_MODES)}, got {self.preemption!r}"
            )
        if self.order not in ORDERS:
            raise InvalidRequestError(f"order must be one of {', '.join(ORDERS)}, got {self.order!r}")
        _require_number("watermark", self.watermark)
        if self.watermark >= 1:
            raise InvalidRequestError(f"watermark is a share of the pool, below 1, got {self.watermark}")
        _require_number("swap_cost", self.swap_cost)


def _require_int(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
        raise InvalidRequestError(f"{name} must be an integer of at least {least}, got {value!r}")


def _require_number(name: str, value: object) -> None:
    is_number = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
    if not is_number or not 0 <= float(value) < math.inf:  # type: ignore[arg-type]
        raise InvalidRequestError(f"{name} must be a number of at least 0, got {value!r}")
