"""What an engine made, against the same weights in a wider dtype; and a watch on what replayed graphs touch.

In half precision near ties fall either way, so tokens alone say little. Given the tokens, logits and keys can be held
against exact ones: an engine that computes what it should is as far from them as the plain forward of its own dtype is.
"""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import numpy as np
import torch
from torch import Tensor

# How much further than the plain forward the engine may be, on the average and at the worst place. Both make the same
# kind of rounding errors: on a CPU the averages were within 2% of each other.
FURTHER, WORST = 1.5, 3.0
# Below this an error is nothing: log-probabilities are computed in float32.
FLOOR = 1e-5


class Truth:
    """A model as it is and with the same weights in a wider dtype, forwarded plainly.

    Args:
        model: Untouched by what is judged; `float32` is judged by `float64`, all else by `float32`.
    """

    def __init__(self, model: Any) -> None:
        wide = torch.float64 if model.dtype == torch.float32 else torch.float32
        self.plain = model
        self.exact = type(model)(copy.deepcopy(model.config)).to(model.device, wide).eval()
        self.exact.load_state_dict(model.state_dict())

    def forward(self, model: Any, tokens: list[int]) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """Log-probabilities `[tokens, vocabulary]`, and keys and values `[heads, tokens, dim]` of each layer."""
        from common import cache_keyword
        from transformers import DynamicCache

        cache = DynamicCache(config=model.config)
        with torch.inference_mode():
            ids = torch.tensor([tokens], device=model.device)
            logits = model(ids, use_cache=True, **{cache_keyword(model): cache}).logits[0]
        kept = [(layer.keys[0].double(), layer.values[0].double()) for layer in cache.layers]
        return logits.double().log_softmax(-1), kept

    def answers(self, prompts: list[list[int]], outs: list[Any]) -> dict[str, Any]:
        """Log-probabilities of every token that was chosen, and how far that token is from the likeliest.

        Args:
            prompts: Token ids.
            outs: Greedy answers with `logprobs=1`.

        Returns:
            Figures for a row of results; `right` says whether the engine is as good as the plain forward.
        """
        ours, plain, behind = [], [], []
        for prompt, out in zip(prompts, outs, strict=True):
            tokens = list(out.token_ids)
            if out.error is not None or not tokens:
                return {"right": False, "error": f"no answer: {out.error}"}
            chosen = torch.tensor(tokens)[:, None]
            exact, other = (
                self.forward(model, prompt + tokens)[0][-len(tokens) - 1 : -1].cpu()
                for model in (self.exact, self.plain)
            )
            right = exact.gather(1, chosen)[:, 0]
            ours.append(torch.tensor([one.logprob for one in out.logprobs]).double() - right)
            plain.append(other.gather(1, chosen)[:, 0] - right)
            behind.append(exact.max(1).values - right)
        found, usual = torch.cat(ours).abs(), torch.cat(plain).abs()
        gap = float(torch.cat(behind).max())
        figures: dict[str, Any] = {
            "tokens": len(found),
            "rms": _rms(found),
            "plain_rms": _rms(usual),
            "worst": float(found.max()),
            "plain_worst": float(usual.max()),
            "largest_gap": gap,  # to the likeliest token: what rounding can bridge, twice, where nothing is wrong
        }
        figures["right"] = (
            figures["rms"] <= FURTHER * figures["plain_rms"] + FLOOR
            and figures["worst"] <= WORST * figures["plain_worst"] + FLOOR
            and gap <= 2 * WORST * figures["plain_worst"] + FLOOR
        )
        return figures

    def pool(self, cache: Any) -> dict[str, Any]:
        """Keys and values of all that a cache holds, read from its pool.

        Returns:
            Figures for a row of results, among them `right`.
        """
        store, errors, usual, size = cache.store, 0.0, 0.0, 0.0
        num_tokens = 0
        for tokens, blocks in cached_paths(cache.tree):
            exact, plain = (self.forward(model, tokens)[1] for model in (self.exact, self.plain))
            ids = torch.from_numpy(blocks.astype(np.int64)).to(store.layout.device)
            num_tokens += len(tokens)
            for layer in range(len(exact)):
                for part, pool in enumerate((store.keys, store.values)):
                    held = pool[layer][ids].flatten(0, 1)[: len(tokens)].transpose(0, 1).double()
                    wanted = exact[layer][part]
                    errors += float((held - wanted).square().sum())
                    usual += float((plain[layer][part] - wanted).square().sum())
                    size += float(wanted.square().sum())
        rel, plain_rel = ((total / max(size, 1e-30)) ** 0.5 for total in (errors, usual))
        right = num_tokens > 0 and rel <= FURTHER * plain_rel + 1e-5
        return {"pool_tokens": num_tokens, "pool_rel": rel, "pool_plain_rel": plain_rel, "right": right}


def _rms(errors: Tensor) -> float:
    return float(errors.square().mean().sqrt())


def cached_paths(tree: Any) -> list[tuple[list[int], np.ndarray]]:
    """Tokens and blocks of all that is cached, from the root to each leaf."""
    nodes = list(tree.nodes())
    paths = []
    for leaf in nodes:
        if leaf.num_children or not len(leaf.tokens):
            continue
        edges = [leaf]
        while edges[0].parent >= 0:
            edges.insert(0, nodes[edges[0].parent])
        tokens = [int(token) for edge in edges for token in edge.tokens]
        paths.append((tokens, np.concatenate([edge.blocks for edge in edges])))
    return paths


class GraphWatch:
    """Spoils, before each replay, all that no running sequence may read; looks afterwards for what was written to.

    Unlike the tests' it raises nothing, for an engine may well catch it.

    Args:
        engine: Its graphs are watched from now on.

    Attributes:
        seen: Replays and rows of padding that were looked at.
        problems: What was wrong, at most a few.
    """

    def __init__(self, engine: Any) -> None:
        self.seen: Counter[str] = Counter(replays=0, padding=0)
        self.problems: list[str] = []
        self._store, self._pool = engine.cache.store, engine.cache.pool
        graphs = engine._runner.graphs
        self._replay = graphs._replay
        graphs._replay = self._watched

    def _tensors(self) -> list[Tensor]:
        store = self._store
        return [one for one in (*store.keys_and_scratch, *store.values_and_scratch) if one is not None]

    def _watched(self, graph: Any, step: Any) -> Any:
        store, device = self._store, self._store.layout.device
        tensors = self._tensors()
        free = np.append(np.flatnonzero(self._pool.refcounts == 0), store.scratch_block)
        spoiled = torch.from_numpy(free.astype(np.int64)).to(device)
        for tensor in tensors:
            tensor[spoiled] = float("nan")
        before = [tensor.clone() for tensor in tensors]
        logits = self._replay(graph, step)
        slots = torch.from_numpy(step.slot_mapping.astype(np.int64)).to(device)
        for tensor, old in zip(tensors, before, strict=True):
            now, was = tensor.flatten(0, 1), old.flatten(0, 1)
            same = ((now == was) | (now.isnan() & was.isnan())).flatten(1).all(1)
            same[slots] = True
            same[store.num_blocks * store.block_size :] = True  # the scratch block is there for that
            if not bool(same.all()):
                self._note("a replay wrote to somebody else's slot")
            if not bool(now[slots].isfinite().all()):
                self._note("a replay left a row of its own out, or wrote no numbers to it")
        if not bool(logits.isfinite().all()):
            self._note("a replay read what nobody wrote")
        self.seen["replays"] += 1
        self.seen["padding"] += graph.attention.rows - step.num_seqs
        return logits

    def _note(self, problem: str) -> None:
        if problem not in self.problems:
            self.problems.append(problem)
