"""The messages of the KV event stream, as vLLM and SGLang write them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from radixkv.errors import install_hint

try:
    import msgspec
except ImportError as error:
    raise ImportError(f"KV events need msgspec and pyzmq: {install_hint('observe')}") from error

__all__ = [
    "DIALECTS",
    "AllBlocksCleared",
    "BlockRemoved",
    "BlockStored",
    "Dialect",
    "KVCacheEvent",
    "external_hashes",
    "pick_dialect",
]

Hash = int | bytes


class KVCacheEvent(msgspec.Struct, omit_defaults=True, tag=True):
    """One change of what is cached. On the wire: a map whose key `type` names the class."""


class BlockStored(KVCacheEvent):
    """A run of whole blocks is cached, each the child of the one before.

    Attributes:
        block_hashes: One for each block.
        parent_block_hash: Of the block before the first of them; None at the start of a prompt.
        token_ids: Tokens of all these blocks: `len(block_hashes) * block_size`.
        block_size: Tokens in a block.
        lora_id: Kept by the formats for old readers; always None here.
        medium: Where the KV lies: `"GPU"` or `"CPU"`.
        lora_name: Adapter that computed it, if the namespace names one.
        extra_keys: One entry for each block, None for most: what sets it apart beside its tokens (vLLM's field).
        cache_salt: The same as one string (SGLang's field).
    """

    block_hashes: list[Hash]
    parent_block_hash: Hash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[str, ...] | None] | None = None
    cache_salt: str | None = None


class BlockRemoved(KVCacheEvent):
    """Blocks are no longer cached; a child stands before its parent.

    Attributes:
        block_hashes: One for each block.
        medium: Where they lay.
    """

    block_hashes: list[Hash]
    medium: str | None


class AllBlocksCleared(KVCacheEvent):
    """Nothing is cached any more."""


@dataclass(frozen=True)
class Dialect:
    """One of the forms of the stream that readers in the field expect.

    All of them send a batch as the array `[ts, events, rank]`, with `ts` in seconds since 1970.

    Attributes:
        name: What it is asked for by.
        positional: Events are arrays, `["BlockStored", hashes, parent, ...]`, instead of maps.
        replay_topic: Answers to replay requests start with the topic, as live messages do.
        hashes: Usual form of block hashes, see `external_hashes`.
    """

    name: str
    positional: bool
    replay_topic: bool
    hashes: str


DIALECTS = {
    dialect.name: dialect
    for dialect in (
        # vLLM from 0.24 on: events are maps (vllm-project/vllm#42892), replay has the topic (vllm-project/vllm#45177).
        Dialect("vllm", positional=False, replay_topic=True, hashes="uint64"),
        # SGLang from September 2026 on: the same maps (sgl-project/sglang#37482), signed hashes.
        Dialect("sglang", positional=False, replay_topic=False, hashes="int64"),
        # Both before that.
        Dialect("array", positional=True, replay_topic=False, hashes="uint64"),
    )
}
"""The dialects by name: `"vllm"`, `"sglang"` and `"array"`."""

Hashes = Callable[[Sequence[bytes]], list[Hash]]


def _last_eight(dtype: str) -> Hashes:
    def convert(digests: Sequence[bytes]) -> list[Hash]:
        return np.frombuffer(b"".join(digests), dtype)[1::2].tolist()

    return convert


_HASHES: dict[str, Hashes] = {"uint64": _last_eight(">u8"), "int64": _last_eight(">i8"), "bytes": list}


def external_hashes(form: str) -> Hashes:
    """How content addresses of 16 bytes are written into events.

    Args:
        form: `"uint64"` or `"int64"`: their last 64 bits as a number, big-endian; `"bytes"`: all of them.

    Returns:
        A function that takes the addresses of some blocks and returns what stands for them in an event.

    Raises:
        ValueError: Another form was asked for.
    """
    if not isinstance(form, str) or form not in _HASHES:
        raise ValueError(f"hashes={form!r} is unknown: choose one of {', '.join(map(repr, _HASHES))}")
    return _HASHES[form]


def pick_dialect(name: str) -> Dialect:
    """The dialect of a `name` (a key of `DIALECTS`).

    Raises:
        ValueError: There is none.
    """
    if not isinstance(name, str) or name not in DIALECTS:
        raise ValueError(f"dialect={name!r} is unknown: choose one of {', '.join(map(repr, DIALECTS))}")
    return DIALECTS[name]


_encoder = msgspec.msgpack.Encoder()


def encode_batch(events: Sequence[KVCacheEvent], ts: float, rank: int | None, dialect: Dialect) -> bytes:
    """One batch as msgpack.

    Sources of the format: `vllm/distributed/kv_events.py` in vllm-project/vllm and
    `python/sglang/srt/disaggregation/kv_events.py` in sgl-project/sglang.
    """
    items: list[Any] = [_array(event) for event in events] if dialect.positional else list(events)
    return _encoder.encode([ts, items, rank])


def _array(event: KVCacheEvent) -> list[Any]:
    """Fields by position; the ones that came late only if they say something, as old readers do not know them."""
    if isinstance(event, BlockStored):
        array: list[Any] = [
            "BlockStored",
            event.block_hashes,
            event.parent_block_hash,
            event.token_ids,
            event.block_size,
        ]
        array += [event.lora_id, event.medium]
        if event.lora_name is not None or event.extra_keys is not None:
            array.append(event.lora_name)
        if event.extra_keys is not None:
            array.append(event.extra_keys)
        return array
    if isinstance(event, BlockRemoved):
        return ["BlockRemoved", event.block_hashes, event.medium]
    return [type(event).__name__]
