"""Models whose KV cannot be reused by prefix are refused when the cache is made or attached, and left as they were."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as tf
from hf_testkit import NULL, VOCAB, needs_cache, snapshot, tiny

import radixkv
from radixkv import errors

pytestmark = [pytest.mark.filterwarnings("default"), needs_cache]


SMALL: dict[str, Any] = dict(
    vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
)


def gemma_both_ways() -> Any:
    return tf.Gemma3ForCausalLM(
        tf.Gemma3TextConfig(**SMALL, num_key_value_heads=1, head_dim=8, use_bidirectional_attention=True)
    )


def jamba() -> Any:
    layers = dict(attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2, expert_layer_offset=1)
    mamba = dict(mamba_d_state=4, mamba_d_conv=2, use_mamba_kernels=False, num_experts=2)
    return tf.JambaForCausalLM(tf.JambaConfig(**SMALL, num_key_value_heads=2, **layers, **mamba))


def bamba() -> Any:
    mamba = dict(mamba_n_heads=8, mamba_d_head=8, mamba_n_groups=1, mamba_d_state=8)
    return tf.BambaForCausalLM(
        tf.BambaConfig(**SMALL, num_key_value_heads=2, attn_layer_indices=[1], **mamba)
    )


def bart() -> Any:
    layers = dict(encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2)
    config = tf.BartConfig(vocab_size=VOCAB, d_model=32, encoder_ffn_dim=32, decoder_ffn_dim=32, **layers)
    return tf.BartForConditionalGeneration(config)


MODELS = {
    "mamba": lambda: tf.MambaForCausalLM(
        tf.MambaConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, state_size=4)
    ),
    "mamba2": lambda: tf.Mamba2ForCausalLM(
        tf.Mamba2Config(
            vocab_size=VOCAB,
            hidden_size=32,
            num_hidden_layers=2,
            state_size=4,
            num_heads=8,
            head_dim=8,
            n_groups=1,
        )
    ),
    "rwkv": lambda: tf.RwkvForCausalLM(tf.RwkvConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2)),
    "recurrent gemma": lambda: tf.RecurrentGemmaForCausalLM(
        tf.RecurrentGemmaConfig(**{**SMALL, "num_hidden_layers": 3}, lru_width=32, attention_window_size=8)
    ),
    "jamba": jamba,
    "bamba": bamba,
    "t5": lambda: tf.T5ForConditionalGeneration(
        tf.T5Config(
            vocab_size=VOCAB, d_model=32, d_kv=8, d_ff=32, num_layers=2, num_heads=4, decoder_start_token_id=0
        )
    ),
    "bart": bart,
    "xlnet": lambda: tf.XLNetLMHeadModel(
        tf.XLNetConfig(vocab_size=VOCAB, d_model=32, n_layer=2, n_head=4, d_inner=32)
    ),
    "gemma with attention both ways": gemma_both_ways,
    "bert as an encoder": lambda: tf.BertLMHeadModel(tf.BertConfig(**SMALL)),
}


@pytest.mark.parametrize("name", MODELS)
def test_refused_with_one_clear_sentence(name: str) -> None:
    if name == "gemma with attention both ways" and "use_bidirectional_attention" not in vars(
        tf.Gemma3TextConfig(**SMALL)
    ):
        pytest.skip("not in this version")
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    before = snapshot(model)

    def use() -> None:
        cache = radixkv.PrefixCache.for_model(model, num_blocks=16, block_size=4)
        cache.attach(model)

    with pytest.raises(errors.UnsupportedModelError) as caught:
        use()
    assert len(str(caught.value)) > 20
    assert snapshot(model) == before


@pytest.mark.parametrize("name", ["mamba", "bart", "rwkv"])
def test_refused_at_attach_by_a_cache_of_another_model(name: str) -> None:
    cache = radixkv.PrefixCache.for_model(tiny(), num_blocks=16, block_size=4)
    model = MODELS[name]().eval()
    before = snapshot(model)
    with pytest.raises(errors.RadixKVError):
        cache.attach(model)
    assert snapshot(model) == before


@pytest.mark.parametrize("thing", [None, "gpt2", 3, torch.nn.Linear(2, 2), tf.LlamaConfig(), object()])
def test_not_a_model_at_all(thing: Any) -> None:
    assert not NULL
    with pytest.raises((errors.RadixKVError, TypeError)) as caught:
        radixkv.PrefixCache.for_model(thing, num_blocks=16)
    assert len(str(caught.value)) > 10
