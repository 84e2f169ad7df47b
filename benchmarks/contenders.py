"""The caches that `side_by_side.py` compares: one class each, `run` is one whole request.

What every one of them does for a request: find the longest cached prefix of whole blocks that leaves at least one
token to compute, hold it, take the blocks that are missing (evicting if none are free), make the whole blocks of the
request findable, let go. No logging, no metrics, no events, no KV memory behind the block ids.

Tokens come as an int64 array, as a list, or in the form that a contender works on (`native`); a form that it does
not take is converted inside `run`, by the fastest call that Python has for it.
"""

from __future__ import annotations

import importlib.metadata
import os
from array import array
from typing import Any

import numpy as np

Tokens = Any  # an int64 array, a list of int, or an array("q")


class Contender:
    """One cache.

    Attributes:
        calls: What `run` calls.
        evicts_by_block: Its hits must equal those of a block-granular LRU.
        native: The form of tokens that it works on.
    """

    name = ""
    package = ""
    calls = ""
    evicts_by_block = False
    native: type = list

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size

    @classmethod
    def version(cls) -> str:
        return importlib.metadata.version(cls.package)

    def run(self, tokens: Tokens) -> int:
        """One request; tokens it hit."""
        raise NotImplementedError


class RadixKV(Contender):
    name = "radixkv"
    package = "radixkv"
    calls = "as_tokens; RadixTree(policy='lru').match(partial=False), allocate, insert; BlockPool.release"
    evicts_by_block = True
    native = np.ndarray

    def __init__(self, num_blocks: int, block_size: int) -> None:
        from radixkv.core import BlockPool, RadixTree, as_tokens

        super().__init__(num_blocks, block_size)
        self.pool = BlockPool(num_blocks)
        self.tree = RadixTree(self.pool, block_size, policy="lru")
        self.as_tokens = as_tokens

    def run(self, tokens: Tokens) -> int:
        if isinstance(tokens, list):
            tokens = self.as_tokens(tokens)  # once, for the match and the insert
        num_whole = len(tokens) // self.block_size
        match = self.tree.match(tokens, max_tokens=len(tokens) - 1, partial=False)
        own = self.tree.allocate(num_whole - len(match.blocks))
        table = np.concatenate((match.take(), own))
        inserted = self.tree.insert(tokens[: num_whole * self.block_size], table)
        self.pool.release(inserted.blocks)
        return match.num_tokens


class Transformers(Contender):
    name = "transformers"
    package = "transformers"
    calls = (
        "PagedAttentionCache.search_prefix_match, can_store_request_tokens, evict_cached_blocks, "
        "count_new_complete_blocks, mark_complete_blocks, free_blocks (one layer, one head of 8)"
    )

    def __init__(self, num_blocks: int, block_size: int) -> None:
        import torch
        from transformers import ContinuousBatchingConfig, LlamaConfig
        from transformers.generation.continuous_batching.cache import PagedAttentionCache
        from transformers.generation.continuous_batching.distributed import DistributedHelper
        from transformers.generation.continuous_batching.requests import RequestState

        super().__init__(num_blocks, block_size)
        config = LlamaConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1)
        config._attn_implementation = "sdpa"
        settings = ContinuousBatchingConfig(
            page_size=block_size, num_blocks=num_blocks, max_batch_tokens=16, max_memory_percent=0.9
        )
        self.cache = PagedAttentionCache(config, settings, "cpu", DistributedHelper(None, 1), torch.int8)
        self.state = RequestState
        self.count = 0

    def run(self, tokens: Tokens) -> int:
        cache = self.cache
        tokens = tokens if isinstance(tokens, list) else tokens.tolist()
        self.count += 1
        state = self.state(str(self.count), tokens)
        hit = cache.search_prefix_match(state.request_id, tokens)
        state.position_offset = hit
        new = len(tokens) // self.block_size * self.block_size - hit
        if new:
            if not cache.can_store_request_tokens(state, new):
                cache.evict_cached_blocks()
                if not cache.can_store_request_tokens(state, new):
                    raise RuntimeError("the request does not fit")
            complete = cache.count_new_complete_blocks(state, new)
            state.position_offset += new
            cache.mark_complete_blocks(state, complete)
        cache.free_blocks(state.request_id)
        return hit


class VLLM(Contender):
    name = "vllm, sha256"
    package = "vllm"
    calls = "Request (which hashes its blocks), KVCacheManager.get_computed_blocks, allocate_slots, free"
    evicts_by_block = True
    hash_name = "sha256"

    def __init__(self, num_blocks: int, block_size: int) -> None:
        import torch
        from vllm.sampling_params import SamplingParams
        from vllm.utils.hashing import get_hash_fn_by_name
        from vllm.v1.core.kv_cache_manager import KVCacheManager
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.request import Request

        super().__init__(num_blocks, block_size)
        hash_fn = get_hash_fn_by_name(self.hash_name)
        init_none_hash(hash_fn)
        spec = FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=8, dtype=torch.int8)
        config = KVCacheConfig(
            num_blocks=num_blocks + 1,  # one of them is its null block
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
        )
        self.manager = KVCacheManager(
            config, max_model_len=1 << 22, scheduler_block_size=block_size, hash_block_size=block_size
        )
        self.hasher = get_request_block_hasher(block_size, hash_fn)
        self.params = SamplingParams(max_tokens=1)
        self.request = Request
        self.count = 0

    def run(self, tokens: Tokens) -> int:
        manager = self.manager
        tokens = tokens if isinstance(tokens, list) else tokens.tolist()
        self.count += 1
        request = self.request(
            request_id=str(self.count),
            prompt_token_ids=tokens,
            sampling_params=self.params,
            pooling_params=None,
            block_hasher=self.hasher,
        )
        blocks, hit, _ = manager.get_computed_blocks(request)
        new = len(tokens) // self.block_size * self.block_size - hit
        if new or hit:
            got = manager.allocate_slots(request, new, hit, blocks)
            if got is None:
                raise RuntimeError("the request does not fit")
            manager.free(request)
        return hit


class VLLMxxHash(VLLM):
    name = "vllm, xxhash"
    hash_name = "xxhash"


class SGLang(Contender):
    name = "sglang RadixCache"
    package = "sglang"
    calls = (
        "RadixCache.match_prefix, path_device_indices, lock, evict, insert, unlock; "
        "PagedTokenToKVPoolAllocator.alloc, free_segment"
    )
    native = array

    def __init__(self, num_blocks: int, block_size: int) -> None:
        _let_torchvision_load()
        import torch
        from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
        from sglang.srt.mem_cache.radix_cache import RadixKey

        super().__init__(num_blocks, block_size)
        self.key, self.match_params = RadixKey, MatchPrefixParams
        self.insert_params, self.evict_params = InsertParams, EvictParams
        self.cat = torch.cat
        self.allocator = PagedTokenToKVPoolAllocator(
            num_blocks * block_size, block_size, torch.int8, "cpu", None, need_sort=False
        )
        self.cache = self.make_cache()

    def make_cache(self) -> Any:
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.mem_cache.radix_cache import RadixCache

        return RadixCache(
            CacheInitParams(
                disable=False,
                req_to_token_pool=None,
                token_to_kv_pool_allocator=self.allocator,
                page_size=self.block_size,
            )
        )

    def run(self, tokens: Tokens) -> int:
        cache, allocator = self.cache, self.allocator
        if isinstance(tokens, list):
            tokens = array("q", tokens)
        elif not isinstance(tokens, array):
            tokens = array("q", tokens.tobytes())
        size = len(tokens)
        whole = size // self.block_size * self.block_size
        found = cache.match_prefix(self.match_params(self.key(tokens, limit=size - 1)))
        node, hit = found.last_device_node, found.device_prefix_len
        lock = cache.lock(node)
        missing = whole - hit - allocator.available_size()
        if missing > 0:
            cache.evict(self.evict_params(num_tokens=missing))
        own = allocator.alloc(whole - hit)
        value = self.cat((cache.path_device_indices(node), own)) if hit else own
        self.insert(self.key(tokens, limit=whole), value, hit)
        cache.unlock(lock)
        return hit

    def insert(self, key: Any, value: Any, hit: int) -> None:
        result = self.cache.insert(self.insert_params(key=key, value=value))
        if result.prefix_len > hit:  # computed again because of the last token, and cached already
            self.allocator.free_segment(value[hit : result.prefix_len], start_pos=hit)


class SGLangUnified(SGLang):
    name = "sglang Unified, Rust"
    backend = "rust"
    calls = (
        "UnifiedRadixCache (its default, with the tree in Rust): match_prefix, path_device_indices, lock, "
        "evict, insert, unlock; PagedTokenToKVPoolAllocator.alloc"
    )

    def make_cache(self) -> Any:
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
        from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

        cache = UnifiedRadixCache(
            CacheInitParams(
                disable=False,
                req_to_token_pool=None,
                token_to_kv_pool_allocator=self.allocator,
                page_size=self.block_size,
                tree_components=(ComponentType.FULL,),
                tree_core_backend=self.backend,
            )
        )
        if cache._tree_core_backend != self.backend:
            raise RuntimeError(f"sglang fell back to its tree in {cache._tree_core_backend}")
        return cache

    def insert(self, key: Any, value: Any, hit: int) -> None:
        # It frees what was computed again by itself.
        self.cache.insert(self.insert_params(key=key, value=value, prev_prefix_len=hit))


def _let_torchvision_load() -> None:
    """SGLang imports torchvision, which without its compiled part fails over operators nobody calls here."""
    os.environ.setdefault("SGLANG_RUST_BUILD_MODE", "never")
    import torch

    try:
        import torchvision  # noqa: F401
    except RuntimeError:
        library = torch.library.Library("torchvision", "FRAGMENT")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _kept.append(library)


_kept: list[Any] = []  # what torch would take back with the object

CONTENDERS: dict[str, type[Contender]] = {
    cls.name: cls for cls in (RadixKV, Transformers, VLLM, VLLMxxHash, SGLang, SGLangUnified)
}
