"""Steps made by hand, and models to run them on. The right logits come from plain forwards of a twin."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import hf_testkit as kit
import numpy as np
import torch
import transformers

from radixkv.attention import ReferenceBackend
from radixkv.engine.runner import ModelRunner
from radixkv.hf.support import probe_model
from radixkv.sched.step import Step
from radixkv.store import KVStore

BLOCK = 4
POOL = 64


@dataclass
class Seq:
    """A sequence: all its tokens, how many have KV, and its blocks."""

    tokens: np.ndarray
    blocks: list[int] = field(default_factory=list)
    done: int = 0


class Pool:
    """Hands out block ids in a scattered order, and makes steps."""

    def __init__(self, model: Any, *, block: int = BLOCK, blocks: int = POOL, scattered: bool = True) -> None:
        self.store = KVStore(probe_model(model), blocks, block)
        for tensor in (*self.store.keys, *self.store.values):
            if tensor is not None:
                tensor.fill_(float("nan"))  # whoever reads a slot that nobody wrote shows
        order = np.random.default_rng(7).permutation(blocks) if scattered else np.arange(blocks)
        self.free = order.tolist()

    def seq(self, length: int, seed: int = 0, vocab: int = kit.VOCAB) -> Seq:
        return Seq(np.random.default_rng(100 + seed).integers(kit.FIRST, vocab, length))

    def fork(self, seq: Seq, more: np.ndarray) -> Seq:
        """Share the whole blocks of `seq` that are computed; the rest is to be computed again."""
        whole = seq.done // self.store.block_size
        tokens = np.concatenate((seq.tokens[: whole * self.store.block_size], more))
        return Seq(tokens, seq.blocks[:whole], whole * self.store.block_size)

    def step(self, work: list[tuple[Seq, int]], sample: list[int] | None = None) -> Step:
        """A step that computes so many tokens of each sequence; samples all entries unless told otherwise."""
        size = self.store.block_size
        spans = []
        for seq, count in work:
            while len(seq.blocks) * size < seq.done + count:
                seq.blocks.append(self.free.pop())
            spans.append(np.arange(seq.done, seq.done + count))
            assert seq.done + count <= len(seq.tokens)
        lens = np.array([count for _, count in work], dtype=np.int32)
        width = max(len(seq.blocks) for seq, _ in work) + 1
        tables = np.full((len(work), width), 10**6, dtype=np.int32)
        slots = []
        for i, (seq, _) in enumerate(work):
            tables[i, : len(seq.blocks)] = seq.blocks
            slots.append(tables[i, spans[i] // size].astype(np.int64) * size + spans[i] % size)
        decodes = 0
        while decodes < len(work) and work[decodes][1] == 1 and work[decodes][0].done > 0:
            decodes += 1
        step = Step(
            number=0,
            rows=np.arange(len(work), dtype=np.int32),
            num_decodes=decodes,
            query_lens=lens,
            query_starts=np.concatenate(([0], lens.cumsum())).astype(np.int32),
            context_lens=np.array([seq.done + count for seq, count in work], dtype=np.int32),
            token_ids=np.concatenate([seq.tokens[s] for (seq, _), s in zip(work, spans, strict=True)]),
            positions=np.concatenate(spans),
            slot_mapping=np.concatenate(slots),
            block_tables=tables,
            sampling=np.array(range(len(work)) if sample is None else sample, dtype=np.int32),
        )
        for seq, count in work:
            seq.done += count
        return step


def plain_logits(model: Any, tokens: np.ndarray) -> torch.Tensor:
    """`[n, vocab]` float32, of a forward with transformers' own cache over the whole sequence."""
    cache = transformers.DynamicCache(config=model.config.get_text_config(decoder=True))
    with torch.no_grad():
        out = model(
            input_ids=torch.as_tensor(tokens)[None], use_cache=True, **{kit.cache_keyword(model): cache}
        )
    return out.logits[0].float()


def make_runner(model: Any, pool: Pool, backend: Any = None) -> ModelRunner:
    return ModelRunner(model, pool.store, ReferenceBackend() if backend is None else backend)


def run_and_compare(
    runner: ModelRunner,
    reference: Any,
    pool: Pool,
    work: list[tuple[Seq, int]],
    tolerance: float = kit.TOLERANCE,
) -> torch.Tensor:
    """Execute one step and check each row of logits against the twin's plain forward."""
    step = pool.step(work)
    logits = runner.execute(step)
    assert logits.dtype == torch.float32
    assert logits.shape[0] == len(work)
    for row, (seq, _) in zip(logits, work, strict=True):
        expected = plain_logits(reference, seq.tokens[: seq.done])[-1]
        torch.testing.assert_close(row, expected, rtol=0, atol=tolerance)
    return logits


# -- more kinds of models than the plug-in's tests have -------------------------------------------------------

_C = kit._COMMON
_GQA = {"num_key_value_heads": 2}


def _gemma3n(tf: Any) -> Any:
    more = dict(num_hidden_layers=6, head_dim=8, sliding_window=8, num_kv_shared_layers=2, altup_num_inputs=2)
    more |= dict(vocab_size_per_layer_input=kit.VOCAB, hidden_size_per_layer_input=8, laurel_rank=8)
    layers = ["sliding_attention", "full_attention"] * 3
    return tf.Gemma3nTextConfig(**_C | _GQA | more, layer_types=layers, activation_sparsity_pattern=[0.0] * 6)


def _gemma2(tf: Any) -> Any:
    more = dict(num_hidden_layers=4, head_dim=8, sliding_window=8, query_pre_attn_scalar=8)
    caps = dict(attn_logit_softcapping=3.0, final_logit_softcapping=30.0)
    return tf.Gemma2Config(**_C | _GQA | more | caps, tie_word_embeddings=False)


def _gpt_oss(tf: Any) -> Any:
    experts = dict(num_local_experts=4, num_experts_per_tok=2)
    return tf.GptOssConfig(**_C | _GQA | experts, head_dim=8, sliding_window=8)


def _llama4(tf: Any) -> Any:
    more = dict(num_hidden_layers=4, head_dim=8, attention_chunk_size=8, intermediate_size_mlp=48)
    return tf.Llama4TextConfig(**_C | _GQA | more, num_local_experts=2, use_qk_norm=False)


_GPT = dict(vocab_size=kit.VOCAB, n_embd=32, n_layer=2, n_head=4, initializer_range=0.25)
_SHAPE = dict(vocab_size=kit.VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=4)

MORE = {
    "opt": lambda tf: tf.OPTConfig(
        **_SHAPE, ffn_dim=48, max_position_embeddings=512, init_std=0.25, word_embed_proj_dim=32
    ),
    "bloom": lambda tf: tf.BloomConfig(
        vocab_size=kit.VOCAB, hidden_size=32, n_layer=2, n_head=4, initializer_range=0.25
    ),
    "neox": lambda tf: tf.GPTNeoXConfig(**_C),
    "falcon": lambda tf: tf.FalconConfig(**_SHAPE, initializer_range=0.25),
    "gemma2": _gemma2,
    "gpt_oss": _gpt_oss,
    "gemma3n": _gemma3n,
    "llama4": _llama4,
    "mixtral": lambda tf: tf.MixtralConfig(**_C | _GQA),
    "gptj": lambda tf: tf.GPTJConfig(**_GPT, rotary_dim=8),
    "gpt_bigcode": lambda tf: tf.GPTBigCodeConfig(**_GPT, n_positions=512),
}


def build(name: str, **attributes: Any) -> Any:
    """A tiny random model of `kit.ARCHS` or `MORE`."""
    if name in kit.ARCHS:
        return kit.tiny(name, **attributes)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = MORE[name](transformers)
        model = transformers.AutoModelForCausalLM.from_config(config, **attributes).float().eval()
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, kit.PAD
    return model


ALL = (*kit.ARCHS, *MORE)

# Where they fall back depends on the version of transformers: not at all, always, or until some version.
FLAT = (
    "llama",
    "llama_gqa",
    "gemma3",
    "qwen3",
    "gpt2",
    "mistral",
    "phi3",
    "neox",
    "gemma2",
    "gpt_oss",
    "gemma3n",
)
FLAT += ("mixtral", "gpt_bigcode")
ONE_BY_ONE = ("bloom", "falcon", "llama4")
