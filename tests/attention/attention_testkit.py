"""Random steps over a paged pool, and a judge that shares no code with the library."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from radixkv.attention import AttentionBatch, AttentionSpec

JUNK_IDS = [-1, -(2**31), 2**31 - 1, 10**6, 0]


@dataclass
class Scene:
    """A step with its tensors; `contents` are the blocks of each entry as lists of ids."""

    spec: AttentionSpec
    batch: AttentionBatch
    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    sinks: torch.Tensor | None = None
    blocks: list[list[int]] = field(default_factory=list)


def make_scene(
    spec,
    paths,
    *,
    block_size=4,
    permute=True,
    dtype=torch.float64,
    sinks=False,
    seed=0,
    window_junk=False,
):
    """A step from a description of what is shared.

    Args:
        paths: For each entry `(path, context, queries)`. `path` is a list of `(name, blocks)`: entries whose paths
            begin with the same pairs share those blocks, and the rest of the context lies in blocks of their own.
        permute: Whether block ids are shuffled; else they are handed out in order.
        window_junk: Put NaN also into what lies before every window; "blocks": only into whole blocks, since FlashInfer
            multiplies by 0 what it reads before a window.
    """
    rng = np.random.default_rng(seed)
    generator = torch.Generator().manual_seed(seed)
    tables: list[list[int]] = []
    named: dict[tuple, list[int]] = {}
    count = 0

    def fresh(n):
        nonlocal count
        count += n
        return list(range(count - n, count))

    for path, context, queries in paths:
        table: list[int] = []
        for depth in range(len(path)):
            key = tuple(path[: depth + 1])
            if key not in named:
                named[key] = fresh(path[depth][1])
            table += named[key]
        usable = (context - queries) // block_size  # queries write into blocks of their own
        table = table[:usable]
        table += fresh(-(-context // block_size) - len(table))
        tables.append(table)
    spare = 3
    ids = rng.permutation(count + spare) if permute else np.arange(count + spare)
    tables = [[int(ids[block]) for block in table] for table in tables]
    width = max((len(table) for table in tables), default=0) + 2
    block_tables = rng.choice(np.array(JUNK_IDS, np.int64), size=(len(paths), width)).astype(np.int32)
    for row, table in zip(block_tables, tables, strict=True):
        row[: len(table)] = table
    contexts = np.array([context for _, context, _ in paths], np.int32)
    query_lens = np.array([queries for _, _, queries in paths], np.int32)
    starts = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
    decodes = 0
    while decodes < len(paths) and query_lens[decodes] == 1:
        decodes += 1
    batch = AttentionBatch(starts, contexts, block_tables, block_size, decodes)

    shape = (count + spare, block_size, spec.num_kv_heads)
    keys = torch.randn(*shape, spec.key_dim, generator=generator, dtype=torch.float64)
    values = torch.randn(*shape, spec.value_dim, generator=generator, dtype=torch.float64)
    used = np.zeros(shape[:2], bool)
    for (_, context, queries), table in zip(paths, tables, strict=True):
        low = 0
        if window_junk and spec.window is not None:
            low = max(0, context - queries + 1 - spec.window)
            if window_junk == "blocks":
                low -= low % block_size
        positions = np.arange(low if queries else context, context)
        used[np.array(table, np.int64)[positions // block_size], positions % block_size] = True
    hidden = torch.from_numpy(~used)
    keys[hidden], values[hidden] = float("nan"), float("nan")
    query = torch.randn(
        int(starts[-1]), spec.num_heads, spec.key_dim, generator=generator, dtype=torch.float64
    )
    sink_logits = torch.randn(spec.num_heads, generator=generator, dtype=torch.float64) if sinks else None
    return Scene(
        spec,
        batch,
        query.to(dtype),
        keys.to(dtype),
        values.to(dtype),
        None if sink_logits is None else sink_logits.to(dtype),
        tables,
    )


def dense_attention(scene):
    """The formula over each entry's whole context as one matrix with an explicit mask, float64."""
    spec, batch = scene.spec, scene.batch
    out = torch.full(
        (scene.query.shape[0], spec.num_heads, spec.value_dim), float("nan"), dtype=torch.float64
    )
    for entry, table in enumerate(scene.blocks):
        rows = range(int(batch.query_starts[entry]), int(batch.query_starts[entry + 1]))
        context = int(batch.context_lens[entry])
        if not len(rows):
            continue
        # [context, heads, dim], the KV heads repeated; what is NaN here is masked below, so any number will do.
        keys, values = (
            torch.cat([pool[block].double() for block in table])[:context]
            .nan_to_num(0.0)
            .repeat_interleave(spec.num_heads // spec.num_kv_heads, dim=1)
            for pool in (scene.keys, scene.values)
        )
        query = scene.query[rows.start : rows.stop].double()
        logits = torch.einsum("qhd,khd->hqk", query, keys) * spec.scale
        if spec.softcap is not None:
            logits = torch.tanh(logits / spec.softcap) * spec.softcap
        positions = torch.arange(context - len(rows), context)[:, None]
        others = torch.arange(context)[None, :]
        allowed = others <= positions
        if spec.window is not None:
            allowed &= others > positions - spec.window
        logits = logits.masked_fill(~allowed, float("-inf"))
        if scene.sinks is not None:
            extra = scene.sinks.double()[:, None, None].expand(-1, len(rows), 1)
            logits = torch.cat([logits, extra], dim=-1)
        weights = torch.softmax(logits, dim=-1)[..., :context]
        out[rows.start : rows.stop] = torch.einsum("hqk,khd->qhd", weights, values)
    return out


def run(backend, scene):
    backend.plan(scene.batch, [scene.spec])
    return backend.run(scene.spec, scene.query, scene.keys, scene.values, scene.sinks)
