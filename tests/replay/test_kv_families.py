"""The size of KV read from a config, against the layout of the model itself, for families that can be built small."""

from __future__ import annotations

import pytest

import radixkv
from radixkv.replay import kv_size

pytestmark = pytest.mark.slow

# Those of transformers 5.24 that these options make small, and the cache serves.
FAMILIES = """
    afmoe apertus apertus1p5_text arcee aria_text beam big_bird biogpt bitnet bloom cohere cohere2
    cohere2_moe ctrl cwm diffllama doge ernie4_5 ernie4_5_moe exaone exaone4 exaone_moe falcon flex_olmo
    flint gemma gemma2 gemma3_text gemma4_text gemma4_unified_text git glm glm4 glm4_moe glm4_moe_lite
    gpt-sw3 gpt2 gpt_bigcode gpt_neox gpt_neox_japanese gpt_oss granite granite_swa granitemoe granitemoe_swa
    granitemoeshared helium hrm_text hunyuan_v1_dense hunyuan_v1_moe hy_v3 hyperclovax internlm3 iquestcoder
    jais2 jetmoe kolibri1 laguna lfm2 llama llama4_text mellum mimo_v2_flash minicpm3 minimax_m2
    minimax_m3_vl_text ministral ministral3 mistral mixtral modernbert-decoder moshi mpt nanochat olmo olmo2
    olmo3 olmoe opt persimmon phi phi3 phimoe qwen2 qwen2_moe qwen3
""".split()  # noqa: SIM905
SMALL = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim"), 32),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads", "n_heads"), 4),
    **dict.fromkeys(("intermediate_size", "ffn_dim"), 48),
    **{"vocab_size": 64, "max_position_embeddings": 128, "head_dim": 8},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")


def small_config(config_class):
    usual = config_class()
    known = usual.to_dict()
    options = {key: value for key, value in SMALL.items() if key in known or key in usual.attribute_map}
    options |= {key: 2 for key in LAYERS if key in known}
    if known.get("num_key_value_heads") is not None:
        grouped = known["num_key_value_heads"] != known.get("num_attention_heads")
        options["num_key_value_heads"] = 2 if grouped else 4
    if known.get("layer_types"):
        options["layer_types"] = known["layer_types"][:2]
    return config_class(**options)


def sizes_of(config_class, folder):
    """Bytes a token: of the model, and read from its config as an object and as a file."""
    import transformers

    config = small_config(config_class)
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    layout = radixkv.PrefixCache.for_model(model, num_blocks=4, block_size=4).layout
    model.config.dtype = "float32"
    model.config.save_pretrained(folder)
    return layout.bytes_per_token, kv_size(model.config).bytes_per_token, kv_size(folder).bytes_per_token


@pytest.mark.parametrize("family", FAMILIES)
def test_sizes_of_families(family, tmp_path):
    transformers = pytest.importorskip("transformers", minversion="5")
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if family not in CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    model, from_config, from_file = sizes_of(CONFIG_MAPPING[family], tmp_path / family)
    assert from_config == from_file == model
