"""A random small Llama with a byte-level tokenizer: the demo without any download."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# Its answers are noise, but printable noise, which survives being put into the next prompt as text.
_PRINTABLE = {ord("\n"), *range(ord(" "), ord("~") + 1)}
_NUM_BYTES = 256
_BOS, _PAD = _NUM_BYTES, _NUM_BYTES + 1
_VOCAB = _NUM_BYTES + 2


def make_tiny(seed: int = 0) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model (float32, evaluation mode) and its tokenizer. The same seed gives the same weights."""
    return make_tiny_model(seed), make_byte_tokenizer()


def make_tiny_model(seed: int = 0) -> PreTrainedModel:
    """Four layers, grouped-query attention, one token per byte."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=_VOCAB,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=8192,
        # Wide enough that the best two logits are far apart: a random model must not be a model of ties.
        initializer_range=0.2,
        bos_token_id=_BOS,
        eos_token_id=None,
        # Of its own: where padding looks like the start, `generate()` without a mask takes the start for padding.
        pad_token_id=_PAD,
    )
    with torch.random.fork_rng(devices=[]):  # the caller's random numbers are theirs
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config).to(torch.float32).eval()
    model.name_or_path = "tiny random Llama"
    unprintable = sorted(set(range(_VOCAB)) - _PRINTABLE)
    model.generation_config.suppress_tokens = unprintable
    # And a loop that takes the largest logit itself, without `generate()`, answers the same.
    with torch.no_grad():
        model.lm_head.weight[unprintable] = 0
    return model


def make_byte_tokenizer() -> PreTrainedTokenizerBase:
    """Byte `b` is token `b`; a prompt starts with token 256, and is padded with token 257."""
    from tokenizers import Tokenizer, decoders, pre_tokenizers, processors
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    # The byte-level pre-tokenizer writes each byte as a character of its own, so that none of them is white space.
    shown = [chr(byte) if _is_shown_as_itself(byte) else None for byte in range(_NUM_BYTES)]
    others = iter(range(_NUM_BYTES, 2 * _NUM_BYTES))
    vocab = {char or chr(next(others)): byte for byte, char in enumerate(shown)}
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<bos>", "<pad>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", _BOS)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<bos>",
        pad_token="<pad>",
        model_input_names=["input_ids", "attention_mask"],  # version 4 would add token types
    )


def _is_shown_as_itself(byte: int) -> bool:
    """GPT-2's rule: printable Latin-1 characters stand for themselves, all others for characters from 256 on."""
    return ord("!") <= byte <= ord("~") or 0xA1 <= byte <= 0xAC or 0xAE <= byte <= 0xFF
