"""Finding out by trial whether a way to run a model gives the logits of its plain forwards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from radixkv.attention import AttentionBackend
from radixkv.core.errors import UnsupportedModelError
from radixkv.hf.attention_survey import AttentionSurvey, LayerKind
from radixkv.hf.compat import DynamicCache, ForwardCall, text_config
from radixkv.hf.routing import Routing
from radixkv.hf.trials import ModelTrials
from radixkv.sched.step import Step
from radixkv.store.kv_store import KVStore

__all__ = ["RunnerProbe"]

# Tokens that each of three sequences computes in each step: a whole prompt and a part of one, then a decode
# beside the rest of that prompt and a new one, then decodes alone.
_SCRIPT = ((5, 4, 0), (1, 5, 3), (1, 1, 1))
_BLOCK_SIZE = 4

Run = Callable[[KVStore, Step, npt.NDArray[np.int32]], Tensor]


class RunnerProbe(ModelTrials):
    """Trials of one model over a few tokens, in a pool of their own. Nothing of the model stays changed.

    Args:
        model: The causal LM.
        store: The pool it is to run on: tells layout and block size, and is not touched.
    """

    def __init__(self, model: Any, store: KVStore) -> None:
        super().__init__(model, store.layout.device)
        self._layout = store.layout
        self._block_size = min(_BLOCK_SIZE, store.block_size)
        vocab = int(text_config(model).vocab_size)
        lengths = np.sum(_SCRIPT, axis=0)
        self._prompts = [(np.arange(n) * 7 + 1 + 13 * i) % vocab for i, n in enumerate(lengths)]

    def survey(self, configs: Sequence[Any], backend: AttentionBackend) -> dict[Any, LayerKind]:
        """What every attention module of the model computes.

        Args:
            configs: From `attention_configs`.
            backend: That is to compute it.

        Raises:
            UnsupportedModelError: It cannot be taken over, or is nothing that the backend knows.
        """
        self.require_interface()
        watch = AttentionSurvey(self._layout)

        def trial() -> None:
            tokens = self._prompts[1]
            Routing(configs, watch).around(lambda: self._call(tokens, watch.cache(), positions=True))
            watch.conclude(backend)
            # What another thread gets that runs the model meanwhile.
            logits = Routing(configs, None).around(lambda: self._call(tokens, self._fresh_cache()))
            self.compare(self._plain[1], logits, "when its attention implementation has another name")

        self.undisturbed(trial, "a forward whose attention is watched")
        return watch.kinds

    def check(self, run: Run, way: str) -> None:
        """Run a small ragged batch, and compare its logits with those of plain forwards.

        Args:
            run: Called with a pool, a step, and the entries whose logits it must return.
            way: What that is, for the message.

        Raises:
            UnsupportedModelError: The logits differ, or the way does not work at all; the message says so.
        """

        def trial() -> None:
            pool, tables = self._pool()
            done = np.zeros(3, dtype=np.int64)
            for counts in _SCRIPT:
                chosen = [i for i in range(3) if counts[i]]
                chosen.sort(key=lambda i: (counts[i] > 1 or not done[i], i))  # decodes first
                step = self._step(chosen, done[chosen], np.array(counts)[chosen], tables[chosen])
                done += counts
                logits = run(pool, step, step.sampling)
                if len(logits) != len(chosen):
                    raise UnsupportedModelError(f"{way} gives other logits than those asked for")
                for i, row in zip(chosen, logits, strict=True):
                    self.compare(self._plain[i][done[i] - 1], row, f"in {way}")

        self.undisturbed(trial, way)

    def _pool(self) -> tuple[KVStore, npt.NDArray[np.int32]]:
        """A pool for the script, and the block tables of its sequences."""
        width = -(-max(map(len, self._prompts)) // self._block_size)
        # The first sequence lies in consecutive blocks, the others in between one another and backwards.
        others = np.arange(3 * width - 1, width - 1, -1).reshape(width, 2)
        tables = np.stack([np.arange(width), others[:, 0], others[:, 1]]).astype(np.int32)
        pool = KVStore(self._layout, 3 * width, self._block_size)
        for tensor in (*pool.keys, *pool.values):
            if tensor is not None:
                tensor.fill_(float("nan"))  # memory as it comes may hold that, too
        return pool, tables

    def _step(
        self,
        chosen: list[int],
        starts: npt.NDArray[np.int64],
        counts: npt.NDArray[np.int64],
        tables: npt.NDArray[np.int32],
    ) -> Step:
        """So many tokens of some of the prompts; all are sampled."""
        size = self._block_size
        entry = np.repeat(np.arange(len(chosen)), counts)
        positions = np.concatenate(
            [start + np.arange(count) for start, count in zip(starts, counts, strict=True)]
        )
        tokens = [self._prompts[i][a : a + n] for i, a, n in zip(chosen, starts, counts, strict=True)]
        return Step(
            number=0,
            rows=np.array(chosen, dtype=np.int32),
            num_decodes=int(((counts == 1) & (starts > 0)).sum()),
            query_lens=counts.astype(np.int32),
            query_starts=np.concatenate(([0], counts.cumsum())).astype(np.int32),
            context_lens=(starts + counts).astype(np.int32),
            token_ids=np.concatenate(tokens),
            positions=positions,
            slot_mapping=tables[entry, positions // size].astype(np.int64) * size + positions % size,
            block_tables=tables,
            sampling=np.arange(len(chosen), dtype=np.int32),
        )

    @cached_property
    def _plain(self) -> list[Tensor]:
        """Logits `[n, vocab]` of each prompt, by a forward as anybody makes it."""
        return [self._call(tokens, self._fresh_cache()) for tokens in self._prompts]

    def _fresh_cache(self) -> Any:
        return DynamicCache(config=text_config(self._model))

    def _call(self, tokens: npt.NDArray[np.int64], cache: Any, positions: bool = False) -> Tensor:
        call = ForwardCall(self._model)
        ids = torch.from_numpy(tokens).to(self._layout.device)[None]
        arguments: dict[str, Any] = {"input_ids": ids, call.cache_name: cache, "use_cache": True}
        if positions and call.accepts("position_ids"):
            arguments["position_ids"] = torch.arange(len(tokens), device=ids.device)[None]
        output = self._model(**arguments)
        return output.logits[0] if hasattr(output, "logits") else output[0][0]
