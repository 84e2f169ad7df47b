"""The size of KV read from a config, against the layout of the model itself, for families that can be built small."""

from __future__ import annotations

import signal
import sys

import pytest

import radixkv
from radixkv.errors import UnsupportedModelError
from radixkv.replay import kv_size

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform == "win32", reason="needs SIGALRM, for families whose defaults are huge"),
]
FEWEST = 60  # of about 100 in transformers 5.24; the others are refused, or need more than these options to be small
SMALL = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim"), 32),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads", "n_heads"), 4),
    **dict.fromkeys(("intermediate_size", "ffn_dim"), 48),
    **{"vocab_size": 64, "max_position_embeddings": 128, "head_dim": 8},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")


class TooLarge(Exception):
    """It took too long to build."""


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


def test_every_family_that_is_supported(tmp_path):
    transformers = pytest.importorskip("transformers", minversion="5")
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    transformers.logging.set_verbosity_error()

    def give_up(*_):
        raise TooLarge

    wrong, num_compared = {}, 0
    before = signal.signal(signal.SIGALRM, give_up)
    try:
        for family in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
            signal.alarm(8)
            try:
                sizes = sizes_of(CONFIG_MAPPING[family], tmp_path / family)
            except UnsupportedModelError:
                continue
            except Exception:  # cannot be built from these options, of whatever kind
                continue
            finally:
                signal.alarm(0)
            num_compared += 1
            if len(set(sizes)) > 1:
                wrong[family] = sizes
    finally:
        signal.signal(signal.SIGALRM, before)
    assert not wrong
    assert num_compared >= FEWEST
