"""Small tokenizers of every kind."""

from __future__ import annotations

import json
from typing import Any

import transformers
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

CORPUS = [
    "the quick brown fox jumps over the lazy dog and stops there, stopping at the top stop",
    "żółć gęśla jaźń 漢字 かな 🙂🙃 end of sentence. Stop! \n\nUser: hello\nAssistant: bye",
    "don't stop me now. it 's a test . of spaces , and marks !",
] * 3
SPECIAL = ["<s>", "</s>", "<|im_end|>", "[UNK]"]


def byte_level() -> Any:
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    train = trainers.BpeTrainer(
        vocab_size=420, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    raw.train_from_iterator(CORPUS, train)
    return wrapped(raw)


def sentencepiece_like() -> Any:
    """Byte fallback and a marker for spaces, as Llama's and Gemma's."""
    trainer = trainers.BpeTrainer(vocab_size=150, special_tokens=SPECIAL)
    raw = Tokenizer(models.BPE())
    raw.normalizer = normalizers.Replace(" ", "▁")
    raw.train_from_iterator(CORPUS[:1], trainer)
    vocab = raw.get_vocab()
    for byte in range(256):
        vocab[f"<0x{byte:02X}>"] = len(vocab)
    merges = [tuple(pair) for pair in _merges(raw)]
    raw = Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True, unk_token="[UNK]"))
    raw.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    raw.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    raw.add_special_tokens(SPECIAL)
    return wrapped(raw)


def _merges(raw: Any) -> list[Any]:
    return [m.split(" ") if isinstance(m, str) else m for m in json.loads(raw.to_str())["model"]["merges"]]


def word_piece() -> Any:
    raw = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    raw.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    raw.decoder = decoders.WordPiece(cleanup=True)
    raw.train_from_iterator(CORPUS, trainers.WordPieceTrainer(vocab_size=200, special_tokens=SPECIAL))
    return wrapped(raw)


def words() -> Any:
    vocab = {
        token: i for i, token in enumerate([*SPECIAL, *sorted({w for line in CORPUS for w in line.split()})])
    }
    raw = Tokenizer(models.WordLevel(vocab=vocab, unk_token="[UNK]"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return wrapped(raw)


def wrapped(raw: Any) -> Any:
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=raw,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="[UNK]",
        additional_special_tokens=["<|im_end|>"],
        clean_up_tokenization_spaces=False,
    )


class Plain:
    """Knows `decode(ids)` and nothing else; ids are bytes of UTF-8."""

    def decode(self, ids: Any) -> str:
        return bytes(ids).decode("utf-8", errors="replace")

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": list(text.encode())}

    def __len__(self) -> int:
        return 256


KINDS = {
    "bytes": byte_level,
    "byte fallback": sentencepiece_like,
    "word pieces": word_piece,
    "words": words,
    "plain": Plain,
}
