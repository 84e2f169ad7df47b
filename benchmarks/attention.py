"""Attention of a whole step: the torch backend over the paged pool, against SDPA over a padded contiguous batch.

The baseline is what transformers does in each layer of a padded batch: append the new keys and values to the cache
with `torch.cat` (sliding layers then keep their last window only), repeat KV heads where its SDPA path does, and call
`scaled_dot_product_attention` with a mask where one is needed. Its masks are made beforehand, once. Ours writes the
new keys and values to the pool, plans the step and runs the layers. One figure is one step over all layers given in
the header; the outputs are compared before anything is timed. No model: nothing but attention is measured. Steps are
planned anew each time.

The last rows are the planning alone of decode steps that follow one another, for one layer of each kind: a plan that
is kept and grows, against a plan from nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from common import Report, in_turn, pairs, parser, start
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from radixkv.attention import AttentionBatch, AttentionSpec, TorchBackend

BLOCK = 16
NOTHING = AttentionBatch(np.zeros(1, np.int32), np.zeros(0, np.int32), np.zeros((0, 1), np.int32), BLOCK)


@dataclass(frozen=True)
class Shape:
    """Layers of a model: Gemma has five windowed ones to one full one."""

    name: str
    heads: int
    kv_heads: int
    dim: int
    windows: tuple[int | None, ...]

    def specs(self) -> list[AttentionSpec]:
        return [
            AttentionSpec(self.heads, self.kv_heads, self.dim, self.dim, self.dim**-0.5, window)
            for window in self.windows
        ]


@dataclass(frozen=True)
class Step:
    """`entries` are `(own context, queries)`; all entries share `shared` tokens before their own context."""

    name: str
    shared: int
    entries: tuple[tuple[int, int], ...]
    target: str


class Ours:
    """The pools of all layers, with the blocks laid out as the engine's allocator would."""

    def __init__(self, shape: Shape, step: Step, layers: list[dict[str, torch.Tensor]]) -> None:
        self.specs, self.layers = shape.specs(), layers
        self.kinds = set(self.specs)
        self.backend = TorchBackend()
        count = step.shared // BLOCK
        tables = [list(range(count)) for _ in step.entries]
        # A prompt's blocks come at admission, in one run; blocks of generated tokens come one by one, in turn.
        admitted = [own if queries > 1 else own // BLOCK * BLOCK for own, queries in step.entries]
        for table, tokens in zip(tables, admitted, strict=True):
            blocks = -(-tokens // BLOCK)
            table += range(count, count + blocks)
            count += blocks
        for (own, _), table in zip(step.entries, tables, strict=True):
            while len(table) * BLOCK < step.shared + own:
                table.append(count)
                count += 1
        contexts = np.array([step.shared + own for own, _ in step.entries], np.int32)
        queries = np.array([queries for _, queries in step.entries])
        starts = np.concatenate([[0], np.cumsum(queries)]).astype(np.int32)
        block_tables = np.zeros((len(tables), max(map(len, tables))), np.int32)
        for row, table in zip(block_tables, tables, strict=True):
            row[: len(table)] = table
        self.batch = AttentionBatch(starts, contexts, block_tables, BLOCK, int((queries == 1).sum()))
        self.pools = []
        slots = [
            torch.tensor([table[p // BLOCK] * BLOCK + p % BLOCK for p in range(context)])
            for table, context in zip(tables, contexts.tolist(), strict=True)
        ]
        for layer in layers:
            pool = tuple(torch.full((count, BLOCK, shape.kv_heads, shape.dim), float("nan")) for _ in "kv")
            for flat, rows in zip((one.flatten(0, 1) for one in pool), (layer["k"], layer["v"]), strict=True):
                for index, where in enumerate(slots):
                    flat[where] = rows[index, :, : len(where)].transpose(0, 1)
            self.pools.append(pool)
        self.new_slots = torch.cat(
            [where[len(where) - n :] for where, n in zip(slots, queries.tolist(), strict=True)]
        )
        self.new = [tuple(one.flatten(0, 1)[self.new_slots] for one in pool) for pool in self.pools]
        self.queries = [
            torch.cat([layer["q"][i, :, :n].transpose(0, 1) for i, n in enumerate(queries.tolist())])
            for layer in layers
        ]

    def __call__(self) -> list[torch.Tensor]:
        outs = []
        with torch.inference_mode():
            # A step between, so that the backend does not keep the plan of the last round.
            self.backend.plan(NOTHING, self.kinds)
            self.backend.plan(self.batch, self.kinds)
            for spec, pool, new, query in zip(self.specs, self.pools, self.new, self.queries, strict=True):
                for one, rows in zip(pool, new, strict=True):
                    one.flatten(0, 1).index_copy_(0, self.new_slots, rows)
                outs.append(self.backend.run(spec, query, *pool))
        return outs


class Padded:
    """Right-padded rows of one batch, as transformers runs them."""

    def __init__(self, shape: Shape, step: Step, layers: list[dict[str, torch.Tensor]]) -> None:
        self.scale, self.windows = shape.dim**-0.5, shape.windows
        self.module = SimpleNamespace(
            num_key_value_groups=shape.heads // shape.kv_heads, is_causal=True, training=False
        )
        queries = torch.tensor([queries for _, queries in step.entries])
        contexts = torch.tensor([step.shared + own for own, _ in step.entries])
        self.counts = queries.tolist()
        width = int(queries.max())
        pasts = contexts - queries
        past = int(pasts.max())
        self.past, self.new, self.masks, self.queries = [], [], [], []
        masks: dict[int | None, torch.Tensor | None] = {}
        for window, layer in zip(shape.windows, layers, strict=True):
            kept = past if window is None else min(past, window - 1)
            cached, new = {}, {}
            for name in "kv":
                rows = layer[name]
                # Left-padded contexts: every row's past ends where the new tokens begin.
                old = torch.zeros(len(pasts), shape.kv_heads, past, shape.dim)
                fresh = torch.zeros(len(pasts), shape.kv_heads, width, shape.dim)
                for i, (before, n) in enumerate(zip(pasts.tolist(), self.counts, strict=True)):
                    old[i, :, past - before :] = rows[i, :, :before]
                    fresh[i, :, :n] = rows[i, :, before : before + n]
                cached[name], new[name] = old[:, :, past - kept :].contiguous(), fresh
            self.past.append((cached["k"], cached["v"]))
            self.new.append((new["k"], new["v"]))
            self.queries.append(layer["q"])
            if window not in masks:
                key = torch.arange(past - kept, past + width)
                row = torch.arange(past, past + width)[:, None]
                seen = (key <= row)[None] & (key >= past - pasts[:, None, None])
                if window is not None:
                    seen = seen & (key > row - window)
                # transformers' rule for leaving the mask out.
                alike = len(set(pasts.tolist())) == 1 and len(set(self.counts)) == 1
                plain = (width == 1 or past == 0) and (window is None or kept + width < window)
                masks[window] = None if alike and plain else seen[:, None]
            self.masks.append(masks[window])

    def __call__(self) -> list[torch.Tensor]:
        outs = []
        with torch.inference_mode():
            for query, past, new, mask, window in zip(
                self.queries, self.past, self.new, self.masks, self.windows, strict=True
            ):
                # Also into an empty cache, as transformers does.
                keys, values = (torch.cat([old, rows], dim=2) for old, rows in zip(past, new, strict=True))
                if window is not None:
                    _kept = keys[:, :, 1 - window :], values[:, :, 1 - window :]
                out, _ = sdpa_attention_forward(self.module, query, keys, values, mask, scaling=self.scale)
                outs.append(out)
        return outs

    def rows(self, outs: list[torch.Tensor]) -> list[torch.Tensor]:
        return [torch.cat([out[i, :n] for i, n in enumerate(self.counts)]) for out in outs]


def compare(args: Any, report: Report, shape: Shape, step: Step) -> None:
    generator = torch.Generator().manual_seed(args.seed)
    count, longest = len(step.entries), step.shared + max(own for own, _ in step.entries)
    width = max(queries for _, queries in step.entries)
    layers = []
    for _ in shape.windows:
        keys, values = (
            torch.randn(count, shape.kv_heads, longest, shape.dim, generator=generator) for _ in "kv"
        )
        for rows in (keys, values):
            rows[:, :, : step.shared] = rows[:1, :, : step.shared]
        query = torch.randn(count, width, shape.heads, shape.dim, generator=generator).transpose(1, 2)
        layers.append({"k": keys, "v": values, "q": query})
    ours, padded = Ours(shape, step, layers), Padded(shape, step, layers)
    del layers

    def same(results: dict[str, Any]) -> None:
        for got, expected in zip(results["ours"], padded.rows(results["padded"]), strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)

    same({"ours": ours(), "padded": padded()})
    times = in_turn(args.rounds, lambda _: {"padded": padded, "ours": ours}, same)
    report.add(f"{shape.name}: {step.name}", "padded SDPA", pairs(times, "padded", "ours"), step.target)


def steps(tiny: bool) -> list[Step]:
    short, long, own, tail = (48, 80, 16, 5) if tiny else (512, 2048, 32, 8)
    prefix, few, many = short, 8, 8 if tiny else 64
    alone = prefix + own
    made = [
        Step(f"prefill 1 x {alone} from nothing", 0, ((alone, alone),), "<= 1"),
        Step(f"prefill {few} x {alone} from nothing", 0, ((alone, alone),) * few, "<= 1"),
        Step(f"decode {few} x {alone}, nothing shared", 0, ((alone + tail, 1),) * few, "<= 1"),
        Step(f"decode 1 x {2 * long}", 0, ((2 * long + tail, 1),), "<= 1"),
        Step(f"prefill {own} with {long} cached", long, ((own, own),), ""),
    ]
    for shared, sequences in itertools.product((short, long), (few, many)):
        entries = tuple((own + 1 + index % own // 2, 1) for index in range(sequences))
        made.append(Step(f"decode {sequences}, {shared} shared + {own}..", shared, entries, "< 1"))
    for shared in (short, long):
        entries = ((own + tail, 1), *((own, own),) * (few - 1))
        made.append(Step(f"prefill {few - 1} x {own} + 1 decode, {shared} shared", shared, entries, "< 1"))
    return made


class Planning:
    """Decode steps one after the other, each context one token longer than in the last."""

    def __init__(self, shape: Shape, shared: int, own: int, sequences: int, kept: bool) -> None:
        self.kinds, self.kept, self.number = set(shape.specs()), kept, 0
        self.backend = TorchBackend()
        self.starts = np.arange(sequences + 1, dtype=np.int32)
        self.contexts = shared + own + self.starts[:-1] % BLOCK
        leading = shared // BLOCK
        numbers = np.arange(sequences * (own // BLOCK + 64), dtype=np.int32) + leading
        prompts, later = np.split(numbers, [sequences * (own // BLOCK)])
        self.tables = np.concatenate(
            [
                np.broadcast_to(np.arange(leading, dtype=np.int32), (sequences, leading)),
                prompts.reshape(sequences, -1),
                later.reshape(-1, sequences).T,  # blocks of generated tokens come in turn
            ],
            axis=1,
        )

    def __call__(self) -> None:
        self.number += 1
        contexts = self.contexts + np.int32(self.number)
        if not self.kept:
            self.backend.plan(NOTHING, self.kinds)
        batch = AttentionBatch(self.starts, contexts, self.tables, BLOCK, len(contexts))
        self.backend.plan(batch, self.kinds)


def compare_planning(args: Any, report: Report, shape: Shape) -> None:
    for sequences, (shared, own) in itertools.product((8, 64, 256), ((512, 32), (0, 544))):
        name = f"{shape.name}: plan {sequences} decodes, {shared} shared + {own}.."
        if args.only and args.only not in name:
            continue
        anew, kept = (Planning(shape, shared, own, sequences, keep) for keep in (False, True))
        times = in_turn(4 * args.rounds, lambda _, a=anew, k=kept: {"anew": a, "kept": k}, lambda _: None)
        report.add(name, "plan anew", pairs(times, "anew", "kept"), "< 0.4 ms")


def main(argv: Sequence[str] | None = None) -> None:
    made = parser((__doc__ or "").split("\n")[0], rounds=9, clock=True)
    made.add_argument("--only", metavar="WORD", help="only cases whose name holds this")
    args = start(made, argv)
    window = 16 if args.tiny else 512
    shapes = [
        Shape("gemma", 4, 1, 8 if args.tiny else 256, (window,) * 5 + (None,)),
        Shape("llama", 8, 8, 8 if args.tiny else 64, (None,) * 2),
    ]
    report = Report(
        "attention",
        args,
        {
            "gemma": f"6 of 18 layers, 5 with window {window}: 4 heads of {shapes[0].dim}, 1 KV head",
            "llama": f"2 of 4 layers: 8 heads of {shapes[1].dim}, 8 KV heads",
        },
    )
    for shape in shapes:
        for step in steps(args.tiny):
            if not args.only or args.only in f"{shape.name}: {step.name}":
                compare(args, report, shape, step)
    if not report.rows:
        made.error(f"no case has {args.only!r} in its name")
    compare_planning(args, report, shapes[0])
    report.finish()


if __name__ == "__main__":
    main()
