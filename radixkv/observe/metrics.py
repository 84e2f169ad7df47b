"""Which metrics there are, and where their values come from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from radixkv.observe.histogram import HistogramStats

__all__ = ["CACHE", "ENGINE", "Metric", "ShownCache", "ShownEngine", "Value", "of_cache", "of_engine"]


class ShownCache(Protocol):
    """What is asked of a `PrefixCache`."""

    @property
    def lifetime_stats(self) -> Any:
        """Its `CacheStats` since it was made."""

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool."""

    @property
    def num_free_blocks(self) -> int:
        """Blocks that hold nothing."""

    @property
    def num_cached_blocks(self) -> int:
        """Blocks the tree holds."""

    @property
    def num_cached_tokens(self) -> int:
        """Tokens the tree holds."""

    @property
    def num_evictable_blocks(self) -> int:
        """Cached blocks that nobody but the tree holds."""

    @property
    def block_size(self) -> int:
        """Tokens in a block."""


class ShownEngine(Protocol):
    """What is asked of an `Engine`."""

    @property
    def lifetime_stats(self) -> Any:
        """Its `EngineStats` since it was made."""

    @property
    def cache(self) -> Any:
        """The cache it works in."""


@dataclass(frozen=True)
class Metric:
    """A family: its name without prefix, kind, help text, and the label that its values differ in, if any."""

    name: str
    kind: str
    help: str
    label: str = ""


CACHE = [
    Metric("prefix_cache_queries", "counter", "Prefix cache queries, in number of tokens asked for."),
    Metric("prefix_cache_hits", "counter", "Prefix cache hits, in number of tokens whose prefill was skipped."),
    Metric("prefix_cache_requests", "counter",
            "Prompts by outcome: full (all but what must be computed was cached), partial, none.", "outcome"),
    Metric("prefix_cache_misses", "counter",
            "Prompts that were no full hit, by why the first position that was missing was not cached.", "reason"),
    Metric("prefix_cache_bypasses", "counter", "Calls passed through without the cache, by reason.", "reason"),
    Metric("prefix_cache_contiguous", "counter",
            "Sessions with decode=paged that kept KV in a buffer of their own after all, by reason.", "reason"),
    Metric("prefix_cache_hit_share", "histogram", "Share of its tokens that a prompt found cached, 0 to 1."),
    Metric("kv_cache_usage_perc", "gauge",
            "KV-cache usage: share of the blocks that are in use. 1 means 100 percent. Blocks that are merely cached "
            "and could be evicted at once are not in use."),
    Metric("kv_cache_blocks", "gauge",
            "Blocks of the pool by state: free, evictable (cached, and held by nobody), used.", "state"),
    Metric("kv_cache_cached_tokens", "gauge", "Tokens whose KV is cached."),
    Metric("stored_tokens", "counter", "Tokens whose KV was written to the pool by the plug-in."),
    Metric("evicted_blocks", "counter", "Cached blocks evicted to make room."),
    Metric("evicted_tokens", "counter", "Tokens whose KV was evicted to make room."),
    Metric("cow_copies", "counter", "Hits of the plug-in that ended inside a block, whose rows were copied."),
    Metric("prefill_seconds", "counter", "Time in forwards that computed prompts (measured on CPUs only)."),
    Metric("prefill_seconds_saved", "counter",
            "Estimate of the prefill time that hits have saved, at the measured cost of a token (on CPUs only)."),
    Metric("prefill_flops_saved", "counter", "Estimate of the floating-point operations that hits have saved."),
    Metric("lookup_seconds", "counter", "Time of the plug-in in matching prompts."),
    Metric("gather_seconds", "counter", "Time of the plug-in in copying cached KV to where the model reads it."),
    Metric("commit_seconds", "counter", "Time of the plug-in in storing new KV."),
]  # fmt: skip
ENGINE = [
    Metric("num_requests_running", "gauge", "Number of sequences that are being computed now."),
    Metric("num_requests_waiting", "gauge",
            "Number of sequences that wait to be computed, for the first time or again."),
    Metric("num_requests_swapped", "gauge", "Number of sequences swapped to host memory."),
    Metric("num_preemptions", "counter", "Cumulative number of preemptions."),
    Metric("preemptions_by_kind", "counter",
            "Preemptions by how blocks were given back: recompute (dropped) or swap (copied to the host).", "kind"),
    Metric("prompt_tokens", "counter", "Number of prompt tokens of admitted requests, cached ones included."),
    Metric("prompt_tokens_cached", "counter", "Number of these that were cached."),
    Metric("generation_tokens", "counter", "Number of generation tokens."),
    Metric("resumed_tokens", "counter", "Tokens that preempted sequences still found when they went on."),
    Metric("recomputed_tokens", "counter", "Tokens computed again after a preemption."),
    Metric("request_success", "counter", "Completions that ended, by reason.", "finished_reason"),
    Metric("engine_steps", "counter", "Steps that computed tokens."),
    Metric("swapped_blocks", "counter", "Blocks copied to (out) and from (in) host memory.", "direction"),
    Metric("swapped_bytes", "counter", "Bytes copied to (out) and from (in) host memory.", "direction"),
    Metric("engine_cow_copies", "counter", "Blocks the engine copied because others hold them too."),
    Metric("block_utilisation", "gauge",
            "Share of the slots in blocks of running sequences that hold a token; 1 if nothing runs."),
    Metric("peak_used_blocks", "gauge", "The most blocks that were in use at the beginning of a step."),
    Metric("time_to_first_token_seconds", "histogram", "Time to first token in seconds."),
    Metric("e2e_request_latency_seconds", "histogram", "End to end latency of completions in seconds."),
]  # fmt: skip

Value = float | int | HistogramStats | Mapping[str, float] | None


def of_cache(cache: ShownCache) -> dict[str, Value]:
    """Values by name; a mapping where a metric has a label of its own."""
    stats = cache.lifetime_stats
    num, free, idle = cache.num_blocks, cache.num_free_blocks, cache.num_evictable_blocks
    used = max(0, num - free - idle)  # the three are not read at one instant
    return {
        "prefix_cache_queries": stats.prompt_tokens,
        "prefix_cache_hits": stats.hit_tokens,
        "prefix_cache_requests": {
            "full": stats.full_hits,
            "partial": stats.partial_hits,
            "none": stats.no_hits,
        },
        "prefix_cache_misses": stats.misses,
        "prefix_cache_bypasses": stats.bypasses,
        "prefix_cache_contiguous": stats.contiguous,
        "prefix_cache_hit_share": stats.hit_shares,
        "kv_cache_usage_perc": used / num,
        "kv_cache_blocks": {"free": free, "evictable": idle, "used": used},
        "kv_cache_cached_tokens": cache.num_cached_tokens,
        "stored_tokens": stats.stored_tokens,
        "evicted_blocks": stats.evicted_blocks,
        "evicted_tokens": stats.evicted_tokens,
        "cow_copies": stats.cow_copies,
        "prefill_seconds": stats.prefill_seconds,
        "prefill_seconds_saved": stats.prefill_seconds_saved,
        "prefill_flops_saved": stats.prefill_flops_saved,
        "lookup_seconds": stats.lookup_seconds,
        "gather_seconds": stats.gather_seconds,
        "commit_seconds": stats.commit_seconds,
    }


def of_engine(engine: ShownEngine) -> dict[str, Value]:
    """Values by name; a mapping where a metric has a label of its own."""
    stats = engine.lifetime_stats
    return {
        "num_requests_running": stats.running,
        "num_requests_waiting": stats.waiting,
        "num_requests_swapped": stats.swapped,
        "num_preemptions": stats.preemptions,
        "preemptions_by_kind": {"recompute": stats.preemptions_recompute, "swap": stats.preemptions_swap},
        "prompt_tokens": stats.prompt_tokens,
        "prompt_tokens_cached": stats.hit_tokens,
        "generation_tokens": stats.generated_tokens,
        "resumed_tokens": stats.resumed_tokens,
        "recomputed_tokens": stats.recomputed_tokens,
        "request_success": stats.finished_by_reason,
        "engine_steps": stats.steps,
        "swapped_blocks": {"out": stats.swapped_out_blocks, "in": stats.swapped_in_blocks},
        "swapped_bytes": {"out": stats.swapped_out_bytes, "in": stats.swapped_in_bytes},
        "engine_cow_copies": stats.cow_copies,
        "block_utilisation": stats.block_utilisation,
        "peak_used_blocks": stats.peak_used_blocks,
        "time_to_first_token_seconds": stats.ttft,
        "e2e_request_latency_seconds": stats.latency,
    }
