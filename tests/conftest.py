"""Tiny models, seeds and Hypothesis profiles that all tests share.

Nothing here imports torch before a test needs a model, so the tests of `core` start in milliseconds.
"""

from __future__ import annotations

import os
import random
import signal
import sys

# Before anything imports torch: two threads that spin on a shared machine make tests slow.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# A shell starts what runs in the background with Ctrl-C ignored, and some tests send it to themselves.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings

# Without the explain phase: before Python 3.12 it traces every line of torch, several times slower.
_SHARED = {
    "deadline": None,
    "suppress_health_check": [HealthCheck.too_slow],
    "phases": [Phase.explicit, Phase.reuse, Phase.generate, Phase.target, Phase.shrink],
}
settings.register_profile("dev", max_examples=30, stateful_step_count=30, **_SHARED)
settings.register_profile("ci", max_examples=80, stateful_step_count=50, derandomize=True, **_SHARED)
settings.register_profile("long", max_examples=3000, stateful_step_count=100, **_SHARED)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))


@pytest.fixture(autouse=True)
def _same_numbers_every_time():
    random.seed(0)
    np.random.seed(0)
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)
        torch.manual_seed(0)


def _seeded(model_class, config):
    """A random model in fp32, its weights spread so that no two tokens are nearly equal.

    Nor are its embeddings tied: a tied random model repeats its last token whatever came before, and a test
    on it would notice no wrong key or value.
    """
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = model_class(config).float().eval()
    # No token ends a sequence early: a test that wants one says so.
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def _llama(**overrides):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = {
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "initializer_range": 0.2,
        "tie_word_embeddings": False,
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    return _seeded(LlamaForCausalLM, LlamaConfig(**{**config, **overrides}))


def _gemma3(**overrides):
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    config = {
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "max_position_embeddings": 2048,
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
        "initializer_range": 0.2,
        "tie_word_embeddings": False,
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    return _seeded(Gemma3ForCausalLM, Gemma3TextConfig(**{**config, **overrides}))


def _gpt2(**overrides):
    from transformers import GPT2Config, GPT2LMHeadModel

    config = {
        "vocab_size": 256,
        "n_embd": 64,
        "n_layer": 3,
        "n_head": 4,
        "n_positions": 1024,
        "initializer_range": 0.2,
        "tie_word_embeddings": False,
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    return _seeded(GPT2LMHeadModel, GPT2Config(**{**config, **overrides}))


def _assert_no_hooks(model):
    """A test must leave the model as it was: it is shared with all others."""
    for name, module in model.named_modules():
        hooks = (module._forward_pre_hooks, module._forward_hooks)
        assert not any(hooks), f"the test left hooks on {name or 'the model'}: detach what it attaches"


def _model_fixtures(name, build):
    @pytest.fixture(scope="session", name=f"_{name}_once")
    def once():
        return build()

    @pytest.fixture(name=name)
    def each(request):
        model = request.getfixturevalue(f"_{name}_once")
        yield model
        _assert_no_hooks(model)

    return once, each


# One model of each kind for the whole run. To change weights or configuration, take a `copy.deepcopy`.
_1, tiny_llama = _model_fixtures("tiny_llama", _llama)
_2, tiny_llama_mha = _model_fixtures("tiny_llama_mha", lambda: _llama(num_key_value_heads=4))
_3, tiny_llama_mqa = _model_fixtures("tiny_llama_mqa", lambda: _llama(num_key_value_heads=1))
_4, tiny_gemma3 = _model_fixtures("tiny_gemma3", _gemma3)
_5, tiny_gpt2 = _model_fixtures("tiny_gpt2", _gpt2)
