"""Bytes of KV that a token takes in a model, from its config."""

from __future__ import annotations

import importlib
import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from radixkv.core.errors import InvalidRequestError, first_line, install_hint
from radixkv.replay.hub import hub_options, not_reached

__all__ = ["KVSize", "kv_size"]

# The names that configs have for the same thing, the usual one first.
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "num_decoder_layers")
_HEADS = ("num_attention_heads", "n_head", "num_heads", "n_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num")
_WIDTH = ("hidden_size", "n_embd", "d_model", "dim")
_DTYPES = ("dtype", "torch_dtype")
# Where a config of several models has the one of the text.
_TEXT = ("text_config", "llm_config")
_MOST = 10**6  # layers, heads or dimensions: more is a mistake, and nothing to count with

_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8": 1, "int8": 1}
_DEFAULT_DTYPE = "bfloat16"


@dataclass(frozen=True)
class KVSize:
    """What the keys and values of one token take.

    Attributes:
        name: Of the model.
        layers: Layers that keep keys and values; sliding ones count like all others. Where layers differ, those of the
            most common shape.
        heads: Key-value heads of such a layer.
        key_dim: Numbers of a key, for one head.
        value_dim: Numbers of a value, for one head.
        dtype: Of those numbers.
        others: Layers, heads, key and value numbers of each other shape.
    """

    name: str
    layers: int
    heads: int
    key_dim: int
    value_dim: int
    dtype: str
    others: tuple[tuple[int, int, int, int], ...] = ()

    @property
    def _shapes(self) -> tuple[tuple[int, int, int, int], ...]:
        return ((self.layers, self.heads, self.key_dim, self.value_dim), *self.others)

    @property
    def bytes_per_token(self) -> int:
        """Of all layers."""
        numbers = sum(layers * heads * (key + value) for layers, heads, key, value in self._shapes)
        return numbers * _bytes_of(self.dtype)

    def __str__(self) -> str:
        shapes = " and ".join(
            f"{layers} layers × {heads} KV heads × ({key} + {value})"
            for layers, heads, key, value in self._shapes
        )
        return f"{self.name}: {shapes} × {self.dtype} = {self.bytes_per_token:,} bytes a token"


def kv_size(config: Any) -> KVSize:
    """Read a config of transformers.

    What counts is what a cache of the keys and values of every layer takes, as transformers 5.24 gives them and radixkv
    keeps them: layers with a sliding window count in full, latent attention (DeepSeek's) with its latent vectors.
    (Earlier transformers may expand those to all heads, which takes many times as much.)

    Args:
        config: Path of a `config.json`, folder or hub id of a model, a dict, or a config object of transformers.

    Raises:
        InvalidRequestError: It cannot be read, or does not say what is needed.
    """
    name, fields = _load(config)
    fields = _of_text(name, fields)
    found = _read(name, fields)
    if found is None and isinstance(config, (str, Path)) and "model_type" in fields:
        # A config.json may leave out what is its model type's default, which transformers knows.
        fields = _with_defaults(name, str(Path(config).parent if Path(config).is_file() else config))
        found = _read(name, fields)
    if found is None:
        raise InvalidRequestError(
            f"model config {name}: does not say how many layers, heads and dimensions the model has: it needs "
            f"num_hidden_layers, num_key_value_heads and head_dim at least"
        )
    return found


def _of_text(name: str, fields: dict[str, Any]) -> dict[str, Any]:
    """The fields of the text model, where a config holds several."""
    for key in _TEXT:
        if not isinstance(inner := fields.get(key) or {}, dict):
            raise InvalidRequestError(
                f"model config {name}: {key} must be an object, got {type(inner).__name__}"
            )
        if inner:
            return inner
    return fields


def _read(name: str, fields: dict[str, Any]) -> KVSize | None:
    shapes = _shapes(fields)
    if not shapes:
        return None
    (first, layers), *others = Counter(shapes).most_common()
    dtype = next((str(fields[key]) for key in _DTYPES if fields.get(key)), _DEFAULT_DTYPE)
    return KVSize(
        name, layers, *first, dtype.removeprefix("torch."), tuple((num, *shape) for shape, num in others)
    )


def _shapes(fields: dict[str, Any]) -> list[tuple[int, int, int]] | None:
    """KV heads, and numbers of a key and a value, of each layer that keeps some; None if that is not said."""
    layers = _first(fields, _LAYERS)
    heads = _first(fields, _HEADS) or _positive(fields, "num_key_value_heads")
    if layers is None or heads is None:
        return None
    model = fields.get("model_type")
    if model == "longcat_flash":
        layers = 2 * (_positive(fields, "num_layers") or layers)  # two attentions in each
    key_dim = _first(fields, ("head_dim", "kv_channels"))
    width = _first(fields, _WIDTH)
    if key_dim is None and width is not None:
        key_dim = width // heads or None
    value_dim = _positive(fields, "v_head_dim") or key_dim
    kv_heads = _kv_heads(fields, heads)
    latent, rope = _positive(fields, "kv_lora_rank"), _positive(fields, "qk_rope_head_dim")
    nope = _positive(fields, "qk_nope_head_dim")
    if latent is not None and rope is not None:
        kv_heads = 1
        key_dim, value_dim = latent, rope
    elif nope is not None and rope is not None:
        key_dim = nope + rope
    if key_dim is None or value_dim is None:
        return None
    kinds = fields.get("layer_types")
    own = fields.get("per_layer_config")
    shapes = []
    # The last layers may read the KV of others, and keep none.
    for layer in range(layers - (_positive(fields, "num_kv_shared_layers") or 0)):
        kind = "full_attention"
        if isinstance(kinds, list):
            kind = str(kinds[layer]) if layer < len(kinds) else ""
        if "attention" not in kind or "linear" in kind:
            continue
        shape = kv_heads, key_dim, value_dim
        if kind == "full_attention" and _positive(fields, "global_head_dim"):  # Gemma 4
            dim = _positive(fields, "global_head_dim") or key_dim
            shape = _positive(fields, "num_global_key_value_heads") or kv_heads, dim, dim
        elif kind == "sliding_attention" and model == "mimo_v2_flash":
            shape = 2 * kv_heads, key_dim, value_dim
        if isinstance(own, dict) and isinstance(of_layer := _of_layer(own, layer), dict):
            own_dim = _first(of_layer, ("head_dim",))
            shape = _first(of_layer, _KV_HEADS) or shape[0], own_dim or shape[1], own_dim or shape[2]
        shapes.append(shape)
    return shapes


def _kv_heads(fields: dict[str, Any], heads: int) -> int:
    model = fields.get("model_type")
    multi_query = fields.get("multi_query", model in ("falcon", "gpt_bigcode")) is True
    if (
        model == "falcon" or "new_decoder_architecture" in fields
    ):  # newer ones cache what is broadcast to all heads
        return 1 if multi_query and not fields.get("new_decoder_architecture") else heads
    if multi_query:
        return 1
    return heads if model == "gpt_bigcode" else _first(fields, _KV_HEADS) or heads


def _of_layer(own: dict[Any, Any], layer: int) -> Any:
    """What a config says of one layer alone; numbers of layers may be written `"05"`."""
    return next((value for key, value in own.items() if str(key).isdecimal() and int(key) == layer), None)


def _first(fields: dict[str, Any], names: tuple[str, ...]) -> int | None:
    """The first of these that is there; what has no meaning is refused, so that no wrong size comes of it."""
    for name in names:
        if fields.get(name) is None:
            continue
        if (value := _positive(fields, name)) is None:
            got = type(fields[name]).__name__
            if isinstance(fields[name], (int, float, str)) and not _is_huge(fields[name]):
                got = str(fields[name])
            raise InvalidRequestError(
                f"model config: {name} must be an integer from 1 to {_MOST:,}, got {got[:40]}"
            )
        return value
    return None


def _is_huge(value: Any) -> bool:
    """Whether it is a number of more digits than anybody wants to read."""
    return isinstance(value, int) and abs(value) >= 2**63


def _positive(fields: dict[str, Any], name: str) -> int | None:
    value = fields.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= _MOST else None


def _bytes_of(dtype: str) -> int:
    for name, size in _BYTES.items():
        if dtype.startswith(name):
            return size
    raise InvalidRequestError(
        f"model config: no size is known for dtype {dtype!r}, only for {', '.join(_BYTES)}"
    )


def _load(config: Any) -> tuple[str, dict[str, Any]]:
    """Name and fields; what a text model inside of another one inherits (its dtype) is put in it."""
    if isinstance(config, dict):
        name, fields = str(config.get("_name_or_path") or "model"), dict(config)
    elif hasattr(config, "to_dict"):
        name, fields = str(getattr(config, "name_or_path", "") or "model"), _fields(config)
    elif isinstance(config, (str, Path)):
        name, fields = _from_path(str(config))
    else:
        raise InvalidRequestError(
            f"model_config is a path, a hub id, a dict or a config object, got {type(config).__name__}"
        )
    for key in _TEXT:
        if isinstance(fields.get(key), dict):
            inherited = {k: fields[k] for k in _DTYPES if fields.get(k)}
            fields[key] = {**inherited, **fields[key]}
    return name, fields


def _from_path(name: str) -> tuple[str, dict[str, Any]]:
    path = Path(name).expanduser()
    if path.is_dir():
        path /= "config.json"
    elif path.suffix != ".json" and not name.startswith((".", "/", "~")) and not path.exists():
        return name, _with_defaults(name, name)
    try:
        fields = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise InvalidRequestError(f"model config {name}: there is no {path.name}") from error
    except OSError as error:
        raise InvalidRequestError(f"model config {name} cannot be read: {error.strerror or error}") from error
    except RecursionError as error:
        raise InvalidRequestError(f"model config {name} is nested too deeply to be one") from error
    except ValueError as error:
        reason = str(error).partition(";")[0]  # what follows is advice to programmers
        raise InvalidRequestError(f"model config {name} is not JSON: {reason}") from error
    if not isinstance(fields, dict):
        raise InvalidRequestError(f"model config {name} is not a JSON object")
    folder = path.absolute().parent.name
    return (folder if path.name == "config.json" and folder else path.name), fields


def _with_defaults(name: str, where: str) -> dict[str, Any]:
    """The fields of a config that transformers loads."""
    try:
        transformers = importlib.import_module("transformers")
    except ImportError as error:
        raise InvalidRequestError(
            f"model config {name} needs transformers to be read: {install_hint('hf')}"
        ) from error
    options = {} if Path(where).exists() else hub_options(where)
    try:
        return _fields(transformers.AutoConfig.from_pretrained(where, **options))
    except Exception as error:  # of several packages, whose errors have no common base
        reason = first_line(error).rstrip(".")
        hint = not_reached(options, "a folder or a config.json")
        raise InvalidRequestError(f"model config {name} cannot be loaded: {reason}{hint}") from error


def _fields(config: Any) -> dict[str, Any]:
    """The fields of the text model in a config object, under their usual names."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    fields = dict(text.to_dict())
    for usual, own in getattr(text, "attribute_map", {}).items():
        fields.setdefault(usual, fields.get(own))
    for key in _DTYPES:
        fields.setdefault(key, getattr(config, key, None))
    return fields
