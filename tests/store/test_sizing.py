"""Sizes: what is asked for, what is there, and what the error says."""

from __future__ import annotations

import pytest
import torch

from radixkv import KVLayout
from radixkv.core.errors import InvalidRequestError
from radixkv.store import free_memory_bytes, parse_memory, pick_num_blocks, sizing

LAYOUT = KVLayout.uniform(2, 4, 8, dtype=torch.float32)  # 2 layers * 4 heads * (8 + 8) * 4 bytes
TOKEN = 2 * 4 * 16 * 4


def test_bytes_of_a_token():
    assert LAYOUT.bytes_per_token == TOKEN
    assert KVLayout.uniform(2, 4, 8, dtype=torch.bfloat16).bytes_per_token == TOKEN // 2


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("2GiB", 2 * 2**30), ("512MiB", 512 * 2**20), ("1.5 gib", 3 * 2**29), ("1GB", 10**9), ("64k", 65536),
        ("4096", 4096), (4096, 4096), (0.5, 500), (1.0, 1000),
    ],
)  # fmt: skip
def test_memory_is_read(text, size):
    assert parse_memory(text, free=1000) == size


@pytest.mark.parametrize(
    "memory", ["lots", "", "-1GiB", "2 Gib/s", 0, -5, 0.0, 1.5, -0.1, float("nan"), True, None, [], "0GiB"]
)
def test_other_memory_is_refused(memory):
    with pytest.raises(InvalidRequestError, match="memory"):
        parse_memory(memory, free=1000)


def test_blocks_from_each_kind_of_size():
    assert pick_num_blocks(LAYOUT, 16, num_blocks=7) == 7
    assert pick_num_blocks(LAYOUT, 16, num_tokens=33) == 3
    assert pick_num_blocks(LAYOUT, 16, memory=TOKEN * 16 * 5 + 1) == 5
    free = free_memory_bytes("cpu")
    assert 0 < pick_num_blocks(LAYOUT, 16) * TOKEN * 16 <= free * 0.25


@pytest.mark.parametrize(
    "sizes",
    [
        {"num_blocks": 0}, {"num_blocks": -1}, {"num_blocks": 2.5}, {"num_blocks": True}, {"num_tokens": 0},
        {"memory": 100}, {"memory": "1PiB"}, {"num_blocks": 10**12}, {"num_blocks": 4, "memory": "1GiB"},
    ],
)  # fmt: skip
def test_impossible_sizes_are_refused(sizes):
    with pytest.raises(InvalidRequestError):
        pick_num_blocks(LAYOUT, 16, **sizes)


@pytest.mark.parametrize("block_size", [0, -1, 1.5, True, "16"])
def test_bad_block_sizes_are_refused(block_size):
    with pytest.raises(InvalidRequestError, match="block_size"):
        pick_num_blocks(LAYOUT, block_size, num_blocks=1)


def test_the_error_gives_what_was_asked_and_what_there_is():
    with pytest.raises(InvalidRequestError, match=r"take .*TiB, and cpu has .* free"):
        pick_num_blocks(LAYOUT, 16, memory="900TiB")


def test_a_container_limit_counts(tmp_path, monkeypatch):
    (tmp_path / "max").write_text("1000\n")
    (tmp_path / "current").write_text("400\n")
    monkeypatch.setattr(sizing, "_CGROUP_FILES", ((str(tmp_path / "max"), str(tmp_path / "current")),))
    assert free_memory_bytes("cpu") == 600
    (tmp_path / "max").write_text("max\n")
    assert free_memory_bytes("cpu") > 600
