"""Tiny models, plain references and checks shared by the tests of the transformers plug-in.

The right value always comes from a *twin*: a model with the same weights that no cache ever touched, so a fault
of the plug-in cannot leak into what it is compared with.

With ``RADIXKV_TEST_NULL=1`` the cache is replaced by one that does nothing. Every comparison with plain
transformers must then still hold; what is left of the suite tests the tests.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import pytest
import torch
import transformers
from transformers import DynamicCache

import radixkv
from radixkv import errors

DECODE = os.environ.get(
    "RADIXKV_TEST_DECODE", "auto"
)  # what `make_cache` takes; set by a fixture for `both_ways`
NULL = os.environ.get("RADIXKV_TEST_NULL") == "1"
TOLERANCE = 2e-3  # FC-49: largest difference of fp32 logits, cold against warm
PAD, BOS, EOS, FIRST, VOCAB = 0, 1, 2, 3, 64
TRANSFORMERS = tuple(int(part) for part in transformers.__version__.split(".")[:2])

both_ways = pytest.mark.parametrize("decode", ["contiguous", "paged"], indirect=True)
needs_cache = pytest.mark.skipif(NULL, reason="about the cache itself; the null cache has no such behaviour")

_COMMON: dict[str, Any] = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=512,
    initializer_range=0.25,  # wide, so that the output depends on every token and ties do not happen
    pad_token_id=PAD,
    bos_token_id=BOS,
    eos_token_id=EOS,
)


def _config(name: str, **more: Any) -> Any:
    tf = transformers
    if name == "llama":
        return tf.LlamaConfig(**{**_COMMON, "num_key_value_heads": 4, **more})
    if name == "llama_gqa":
        return tf.LlamaConfig(**{**_COMMON, "num_key_value_heads": 2, **more})
    if name == "mistral":
        return tf.MistralConfig(**{**_COMMON, "num_key_value_heads": 2, "sliding_window": 8, **more})
    if name == "qwen3":
        return tf.Qwen3Config(**{**_COMMON, "num_key_value_heads": 2, "head_dim": 8, **more})
    if name == "phi3":
        return tf.Phi3Config(**{**_COMMON, "num_key_value_heads": 2, **more})
    if name == "gemma3":
        layers = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
        mine = dict(num_hidden_layers=4, num_key_value_heads=1, head_dim=8, layer_types=layers)
        # With tied embeddings a random model repeats its last token for ever.
        mine |= dict(sliding_window=8, tie_word_embeddings=False)
        return tf.Gemma3TextConfig(**{**_COMMON, **mine, **more})
    if name == "gpt2":
        tokens = {
            key: _COMMON[key] for key in ("initializer_range", "pad_token_id", "bos_token_id", "eos_token_id")
        }
        shape = dict(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=512)
        return tf.GPT2Config(**{**tokens, **shape, **more})
    if name == "deepseek_v3":
        experts = dict(
            moe_intermediate_size=16, n_routed_experts=4, n_group=2, topk_group=1, num_experts_per_tok=2
        )
        mla = dict(kv_lora_rank=16, q_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=12)
        mine = dict(num_key_value_heads=4, n_shared_experts=1, first_k_dense_replace=1, **experts, **mla)
        return tf.DeepseekV3Config(**{**_COMMON, **mine, **more})
    raise KeyError(name)


ARCHS = ("llama", "llama_gqa", "gemma3", "qwen3", "gpt2", "mistral", "phi3", "deepseek_v3")
MAIN_ARCHS = ("llama_gqa", "gemma3", "gpt2")


def tiny(name: str = "llama_gqa", *, seed: int = 0, eos: bool = False, **overrides: Any) -> Any:
    """Build a random fp32 model in eval mode; the same arguments give the same weights.

    Args:
        name: One of `ARCHS`.
        seed: Of the weights.
        eos: Keep the end-of-sequence token; without it every answer has the full length.
        overrides: Configuration fields.
    """
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(_config(name, **overrides)).float().eval()
        for buffer_name, buffer in model.named_buffers():
            # The router's bias is made by `torch.zeros`/`empty`: give it a fixed value in all versions.
            if buffer_name.endswith("e_score_correction_bias"):
                buffer.zero_()
    if not eos:
        model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = PAD
    return model


def twin(model: Any) -> Any:
    """A fresh model with the weights that `model` has now: no hooks, no cache, never attached."""
    other = type(model)._from_config(model.config.__class__.from_dict(model.config.to_dict()))
    other = other.float().eval()
    other.load_state_dict(model.state_dict())
    other.generation_config = copy.deepcopy(model.generation_config)
    other.config._attn_implementation = model.config._attn_implementation
    return other


def prompt(length: int, seed: int = 0) -> torch.Tensor:
    """`[1, length]` token ids, none of them special."""
    generator = torch.Generator().manual_seed(1000 + seed)
    return torch.randint(FIRST, VOCAB, (1, length), generator=generator)


def join(*parts: torch.Tensor) -> torch.Tensor:
    return torch.cat(parts, dim=1)


def pad_left(rows: Sequence[torch.Tensor], width: int | None = None) -> dict[str, torch.Tensor]:
    """`input_ids` and `attention_mask` of prompts `[1, n]` of different lengths."""
    width = max(row.shape[1] for row in rows) if width is None else width
    ids = torch.full((len(rows), width), PAD)
    mask = torch.zeros((len(rows), width), dtype=torch.long)
    for i, row in enumerate(rows):
        ids[i, width - row.shape[1] :] = row[0]
        mask[i, width - row.shape[1] :] = 1
    return {"input_ids": ids, "attention_mask": mask}


def positions(mask: torch.Tensor) -> torch.Tensor:
    """Position ids as `generate()` makes them: 0, 1, 2... over the real tokens."""
    return (mask.cumsum(-1) - 1).clamp(min=0)


def plain(call: Callable[[], Any]) -> Any:
    """The result of a call on a plain model; skips the test where this version of transformers fails by itself."""
    try:
        return call()
    except Exception as error:  # whatever it is, there is no right value to compare with
        pytest.skip(
            f"plain transformers {transformers.__version__} fails: {type(error).__name__}: {str(error)[:80]}"
        )


def greedy(model: Any, ids: torch.Tensor, n: int = 8, **kwargs: Any) -> torch.Tensor:
    """`n` greedy tokens. With a mask: without one, a pad id in the ids would make a hole in the inferred mask."""
    kwargs.setdefault("attention_mask", torch.ones_like(ids))
    return model.generate(ids, max_new_tokens=n, do_sample=False, **kwargs)


def cache_keyword(model: Any) -> str:
    """`cache` in newer versions of transformers, `past_key_values` in older ones."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def cache_of(output: Any) -> Any:
    """The cache in a model output, whatever it is called, without a deprecation warning."""
    for name in ("cache", "past_key_values"):
        if name in output:
            return output[name]
    return None


# ------------------------------------------------------------------------------------------------ the cache


class _NullStats:
    requests = prompt_tokens = hit_tokens = computed_tokens = 0
    hit_rate = 0.0
    bypasses: ClassVar[dict[str, int]] = {}


class NullCache:
    """Has the shape of a PrefixCache and does nothing: see the module's docstring."""

    stats = _NullStats()
    last_requests: ClassVar[list[Any]] = []

    def attached(self, model: Any, namespace: Any = None) -> Any:
        return contextlib.nullcontext()

    def attach(self, model: Any, namespace: Any = None) -> None: ...

    def detach(self) -> None: ...

    def check(self) -> None: ...

    def invalidate(self) -> None: ...

    def reset_stats(self) -> None: ...

    def clear(self, namespace: Any = None) -> None: ...

    @contextlib.contextmanager
    def session(self, input_ids: Any, namespace: Any = None, attention_mask: Any = None) -> Iterator[Any]:
        past = DynamicCache()
        past.num_cached_tokens = 0
        yield past


def make_cache(model: Any, **kwargs: Any) -> Any:
    """`PrefixCache.for_model`, in a pool of 256 blocks of 4 tokens unless told otherwise."""
    if NULL:
        return NullCache()
    if not kwargs.keys() & {"num_blocks", "num_tokens", "memory"}:
        kwargs["num_blocks"] = 256
    kwargs.setdefault("block_size", 4)
    kwargs.setdefault("decode", DECODE)
    return radixkv.PrefixCache.for_model(model, **kwargs)


def books(cache: Any, alive: bool = False) -> None:
    """Nothing is held by anybody but the tree, and every block is either free or cached.

    Args:
        cache: The cache.
        alive: Whether a cache object is alive, which holds its blocks where these are in the pool.
    """
    if NULL:
        return
    cache.check()
    if alive and DECODE == "paged":
        return
    assert cache.num_free_blocks + cache.num_cached_blocks == cache.num_blocks
    assert cache.num_evictable_blocks == cache.num_cached_blocks, "a block is still pinned"


def rows(cache: Any) -> list[tuple[int, int]]:
    """`(prompt tokens, hit tokens)` of each row of the last call, after checking that they add up."""
    for row in cache.last_requests:
        assert row.hit_tokens + row.computed_tokens == row.prompt_tokens
        assert 0 <= row.hit_tokens < row.prompt_tokens
    return [(row.prompt_tokens, row.hit_tokens) for row in cache.last_requests]


def expect_hits(cache: Any, *hits: int) -> None:
    """The rows of the last call hit exactly so many tokens each."""
    if not NULL:
        assert [hit for _, hit in rows(cache)] == list(hits)


def expect_totals(cache: Any) -> None:
    """FC-35: totals are bounded and add up."""
    if NULL:
        return
    stats = cache.stats
    assert stats.hit_tokens + stats.computed_tokens == stats.prompt_tokens
    assert 0 <= stats.hit_tokens <= stats.prompt_tokens
    assert 0.0 <= stats.hit_rate <= 1.0
    if stats.prompt_tokens:
        assert stats.hit_rate == pytest.approx(stats.hit_tokens / stats.prompt_tokens)


def same(got: Any, expected: Any) -> None:
    """Tokens are equal; says where they part if not."""
    got, expected = torch.as_tensor(got), torch.as_tensor(expected)
    assert got.tolist() == expected.tolist()


def close(got: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=0, atol=TOLERANCE)


def expect_same(
    cache: Any, model: Any, call: Callable[[Any], torch.Tensor], reference: Any = None
) -> torch.Tensor:
    """`call(model)`, with the cache attached, gives the tokens of `call(twin)`; returns them."""
    reference = twin(model) if reference is None else reference
    expected = plain(lambda: call(reference))
    with cache.attached(model):
        got = call(model)
    same(got, expected)
    books(cache)
    expect_totals(cache)
    return expected


@contextlib.contextmanager
def count_tokens(model: Any) -> Iterator[list[int]]:
    """Collects how many tokens (rows x query length) each forward embeds.

    Counts in `torch.nn.functional.embedding`, for the model's own table only: unlike a hook on the model it
    cannot be seen by the plug-in, does not depend on the order of hooks, and misses no forward that the
    plug-in makes by itself.
    """
    counts: list[int] = []
    table = model.get_input_embeddings().weight
    plain = torch.nn.functional.embedding

    def counting(ids: torch.Tensor, weight: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if weight is table:
            counts.append(ids.numel())
        return plain(ids, weight, *args, **kwargs)

    torch.nn.functional.embedding = counting
    try:
        yield counts
    finally:
        torch.nn.functional.embedding = plain


def distinct_tokens(prompts: Sequence[torch.Tensor]) -> int:
    """Nodes of the trie of these prompts: what has to be computed if every prefix is computed once."""
    return len({tuple(row[0, : i + 1].tolist()) for row in prompts for i in range(row.shape[1])})


def snapshot(model: Any) -> dict[str, Any]:
    """What must be as before once a cache has let go of a model."""
    state: dict[str, Any] = {
        "config": model.config.to_dict(),
        "attention": model.config._attn_implementation,
        "generation": model.generation_config.to_dict(),
        "class": type(model),
    }
    for name, module in model.named_modules():
        own = vars(module)
        state[f"{name}: keys"] = sorted(own)
        state[f"{name}: training"] = module.training
        state[f"{name}: forward"] = own.get("forward")
        state[f"{name}: generate"] = own.get("generate")
        for key, value in own.items():
            if key.endswith(("_hooks", "_hooks_with_kwargs", "_hooks_always_called")) and isinstance(
                value, dict
            ):
                state[f"{name}: {key}"] = dict(value)
    return state


def right_or_clear_error(call: Callable[[], Any], check: Callable[[Any], None]) -> bool:
    """Run `call`: either a RadixKVError with a message, or `check` decides. True when there was a result."""
    if NULL:
        return False
    result = None
    try:
        result = call()
    except errors.RadixKVError as error:
        message = str(error)
    else:
        check(result)
        return True
    assert len(message) > 10, "not a clear error"
    return False
