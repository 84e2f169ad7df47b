"""Sizes of caches and of KV: from numbers, texts and configs."""

from __future__ import annotations

import json
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.errors import InvalidRequestError
from radixkv.replay import KVSize, kv_size, ladder, parse_capacity

SIZE = KVSize("m", 2, 4, 8, 8, "float16")  # 256 bytes a token
LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "torch_dtype": "bfloat16",
}


@pytest.mark.parametrize(
    ("capacity", "blocks"),
    [
        (1000, 1000),
        ("1000", 1000),
        (" 1,000 ", 1000),
        ("1_000", 1000),
        ("160tok", 10),
        ("175 tokens", 10),
        ("4096B", 1),
        ("1MiB", 256),
        ("0.5 mib", 128),
        (".5MB", 122),
        ("1GiB", 2**18),
        ("1GB", 10**9 // 4096),
        ("unlimited", 77),
    ],
)
def test_capacities(capacity, blocks):
    assert parse_capacity(capacity, 16, SIZE, 77) == blocks


@pytest.mark.parametrize(
    ("capacity", "reason"),
    [
        (0, "not even one block"),
        (-5, "not even one block"),
        ("-5", "cannot be understood"),
        ("15tok", "not even one block of 16 tokens"),
        ("1kB", "not even one block of 16 tokens, which take 4,096 bytes"),
        ("1.5", "whole numbers"),
        ("many", "cannot be understood"),
        ("", "cannot be understood"),
        ("5 apples", "cannot be understood"),
        ("1e3", "cannot be understood"),
        (2.0, "got 2.0"),
        (True, "got True"),
        (None, "got None"),
        (10**12, "at most"),
        ("9" * 20, "at most"),
        ("9" * 20 + ".5TiB", "at most"),
        ("9" * 5000, "cannot be understood"),
    ],
)
def test_capacities_that_are_none(capacity, reason):
    with pytest.raises(InvalidRequestError, match=reason):
        parse_capacity(capacity, 16, SIZE, 77)


def test_memory_needs_a_model():
    with pytest.raises(InvalidRequestError, match="--model-config"):
        parse_capacity("1GiB", 16, None, 77)


@given(fewest=st.integers(1, 10**6), more=st.integers(0, 10**7))
def test_a_ladder_leads_from_the_longest_request_to_everything(fewest, more):
    rungs = ladder(fewest, fewest + more)
    assert rungs == sorted(set(rungs))
    assert rungs[0] >= fewest
    assert rungs[-1] == fewest + more
    assert len(rungs) <= 24
    assert len(rungs) > 3 or more < 4


def test_a_ladder_has_round_numbers():
    assert ladder(247, 182790) == [500, 1000, 2000, 5000, 10000, 20000, 50000, 100000, 182790]


# -- KV of a token -------------------------------------------------------------------------------------------


def test_a_llama():
    size = kv_size(LLAMA)
    assert size.bytes_per_token == 32 * 8 * (128 + 128) * 2 == 131072
    assert "131,072 bytes a token" in str(size)


@pytest.mark.parametrize(
    ("fields", "numbers"),
    [
        ({"n_layer": 12, "n_head": 12, "n_embd": 768, "dtype": "float32"}, 12 * 12 * 128 * 4),
        ({**LLAMA, "head_dim": 256}, 32 * 8 * 512 * 2),
        ({**LLAMA, "num_key_value_heads": None}, 32 * 32 * 256 * 2),
        ({"n_layers": 4, "num_heads": 8, "d_model": 64, "multi_query": True}, 4 * 1 * 16 * 2),
        ({**LLAMA, "torch_dtype": "torch.float8_e4m3fn"}, 32 * 8 * 256),
        ({"text_config": LLAMA, "vision_config": {"num_hidden_layers": 99}}, 131072),
        ({"text_config": {**LLAMA, "torch_dtype": None}, "dtype": "float32"}, 2 * 131072),
        ({**LLAMA, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 96}, 32 * 8 * (192 + 96) * 2),
        ({**LLAMA, "num_kv_shared_layers": 12}, 20 * 8 * 256 * 2),
        ({**LLAMA, "layer_types": ["sliding_attention", "full_attention"] * 16}, 131072),
        ({**LLAMA, "layer_types": ["linear_attention", "full_attention"] * 16}, 131072 // 2),
    ],
)  # fmt: skip
def test_the_names_that_configs_have_for_it(fields, numbers):
    assert kv_size(fields).bytes_per_token == numbers


def test_paths(tmp_path):
    folder = tmp_path / "some-model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    for path in (folder, str(folder), folder / "config.json"):
        assert (kv_size(path).name, kv_size(path).bytes_per_token) == ("some-model", 131072)


SMALL = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 64}
GROUPED = {**SMALL, "num_key_value_heads": 2, "intermediate_size": 32, "pad_token_id": 0}
MLA = {
    **{**SMALL, "intermediate_size": 32, "q_lora_rank": 16, "kv_lora_rank": 16, "v_head_dim": 24},
    **{"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "head_dim": 8},
}
EXPERTS = {
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
}
GEMMA4 = {"head_dim": 16, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 64}
FAMILIES = [
    ("gpt2", SMALL),
    ("gpt_neox", SMALL),
    ("bloom", SMALL),
    ("mpt", SMALL),
    ("opt", {**SMALL, "ffn_dim": 32, "word_embed_proj_dim": 64}),
    ("llama", GROUPED),
    ("phi3", GROUPED),
    ("gemma3_text", {**GROUPED, "head_dim": 24}),
    ("qwen3", {**GROUPED, "head_dim": 24}),
    ("qwen3_next", {**GROUPED, "head_dim": 16}),
    ("lfm2", GROUPED),
    ("gpt_bigcode", SMALL),
    ("gpt_bigcode", {**SMALL, "multi_query": False}),
    ("falcon", SMALL),
    ("falcon", {**SMALL, "multi_query": True, "new_decoder_architecture": False, "num_kv_heads": 4}),
    ("falcon", {**SMALL, "multi_query": False}),
    ("falcon", {**SMALL, "new_decoder_architecture": True}),
    ("falcon", {**SMALL, "new_decoder_architecture": True, "num_kv_heads": 2}),
    ("gemma4_text", {**GROUPED, **GEMMA4}),
    ("gemma4_unified_text", {**GROUPED, **GEMMA4}),
    ("mimo_v2_flash", {**GROUPED, **EXPERTS, "head_dim": 16, "v_head_dim": 24}),
    ("minicpm3", MLA),
    ("deepseek_v2", {**MLA, **EXPERTS, "first_k_dense_replace": 1}),
    ("glm4_moe_lite", {**MLA, **EXPERTS, "first_k_dense_replace": 1}),
    ("deepseek_v3", {**MLA, **EXPERTS, "first_k_dense_replace": 1}),
]


@pytest.mark.parametrize(("family", "options"), FAMILIES)
def test_what_a_cache_of_the_model_takes(tmp_path, family, options):
    """The truth is what transformers itself keeps: the cache of a small model after one forward."""
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    known = transformers.models.auto.configuration_auto.CONFIG_MAPPING
    if family not in known or int(transformers.__version__.split(".")[0]) < 5:
        pytest.skip("not in this transformers, or not kept in this way")
    config = known[family](**options)
    config.dtype = torch.float32
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        cache = model(torch.arange(1, 6)[None], use_cache=True).past_key_values
    kept = [(x.keys, x.values) for x in cache.layers if getattr(x, "keys", None) is not None]
    truth = sum(keys.nbytes + values.nbytes for keys, values in kept) // 5
    size = kv_size(config)
    assert size.bytes_per_token == truth
    shapes = [(size.layers, size.heads, size.key_dim, size.value_dim), *size.others]
    shapes = [shape for num, *shape in shapes for _ in range(num)]
    assert sorted(shapes) == sorted([k.shape[1], k.shape[3], v.shape[3]] for k, v in kept)
    config.save_pretrained(tmp_path)
    assert kv_size(tmp_path).bytes_per_token == truth
    assert f"{truth:,} bytes a token" in str(size)


def test_a_falcon_of_before():
    assert kv_size({**LLAMA, "model_type": "falcon"}).heads == 1
    falcon_7b = {"model_type": "falcon", "num_attention_heads": 71, "num_kv_heads": 71, "multi_query": True}
    size = kv_size({**falcon_7b, "num_hidden_layers": 32, "hidden_size": 4544, "torch_dtype": "bfloat16"})
    assert size.bytes_per_token == 32 * 1 * (64 + 64) * 2


def test_a_config_that_leaves_out_defaults_is_completed(tmp_path):
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", "n_layer": 3}))
    assert kv_size(tmp_path).bytes_per_token == 3 * 12 * 128 * 2


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "is not JSON"),
        ("[]", "is not a JSON object"),
        ("\xff\xfe", "is not JSON"),
        ('{"num_hidden_layers": 2}', "cannot be loaded|does not say"),
        (json.dumps({**LLAMA, "torch_dtype": "int4"}), "dtype 'int4'"),
        ('{"a": ' + "[" * 200000 + "]" * 200000 + "}", "nested too deeply"),
        ('{"num_hidden_layers": ' + "9" * 5000 + "}", "is not JSON: Exceeds the limit"),
        *(
            (
                json.dumps({**LLAMA, "head_dim": 64, key: value}),
                f"{key} must be an integer from 1 to 1,000,000",
            )
            for key in ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")
            for value in (0, -3, 2.0, "2", [8, 4], {}, True, 10**7, 10**300, float("nan"))
        ),
        (json.dumps({**LLAMA, "hidden_size": 0}), "hidden_size must be an integer"),
        (json.dumps({**LLAMA, "hidden_size": 1}), "cannot be loaded|does not say"),
        *(
            (json.dumps({**LLAMA, key: value}), f"{key} must be an object, got {type(value).__name__}")
            for key in ("text_config", "llm_config")
            for value in ("x", [1], 5)
        ),
    ],
)
def test_configs_that_say_nothing(tmp_path, text, reason):
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(InvalidRequestError, match=reason) as caught:
        parse_capacity("1GiB", 16, kv_size(tmp_path), 1)
    assert "\n" not in str(caught.value)


def test_configs_that_are_not_there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for where in ("./none", "none.json", str(tmp_path)):
        with pytest.raises(InvalidRequestError, match="there is no"):
            kv_size(where)
    with pytest.raises(InvalidRequestError, match="got int"):
        kv_size(3)
    with pytest.raises(InvalidRequestError, match="does not say how many"):
        kv_size({})
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(InvalidRequestError, match='install the extra "hf"'):
        kv_size("some/model")


@pytest.mark.parametrize("fields", [{}, {"model_type": "llama", "num_attention_heads": 32}])
def test_a_config_may_say_no_more_than_what_is_cached(tmp_path, fields):
    shape = {"num_hidden_layers": 32, "num_key_value_heads": 8, "head_dim": 128, "dtype": "bfloat16"}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(shape | fields))
    assert kv_size(path).bytes_per_token == kv_size(shape | fields).bytes_per_token == 32 * 8 * 128 * 2 * 2
    path.write_text(json.dumps({"num_hidden_layers": 32}))
    with pytest.raises(
        InvalidRequestError, match="it needs num_hidden_layers, num_key_value_heads and head_dim"
    ):
        kv_size(path)
