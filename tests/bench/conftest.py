from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from radixkv.demo.tiny import make_tiny


class FakeEngine:
    """Answers one prompt at a time with plain `generate`; what a way needs of an engine, and no more."""

    def __init__(
        self, model, tokenizer=None, *, changed: int | None = None, reason: str = "length", **options
    ):
        self.model, self.options, self.changed, self.reason = model, options, changed, reason
        self.requests: list = []
        self.fallback_reason = None
        self.cleared = 0
        self.cache = SimpleNamespace(
            num_blocks=100,
            num_free_blocks=90,
            num_evictable_blocks=4,
            block_size=16,
            clear=self._clear,
            layout=SimpleNamespace(bytes_per_token=1024),
        )

    def _clear(self):
        self.cleared += 1

    def add_request(self, prompt, sampling):
        self.requests.append((prompt, sampling))
        return len(self.requests) - 1

    def step(self):
        rid = next(i for i, request in enumerate(self.requests) if request is not None)
        prompt, sampling = self.requests[rid]
        self.requests[rid] = None
        is_last = not any(self.requests)
        if is_last:
            self.requests = []
        ids = torch.tensor([prompt])
        out = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=sampling.max_new_tokens,
            do_sample=False,
            eos_token_id=list(sampling.stop_token_ids) or None,
            pad_token_id=0,
        )
        tokens = out[0, len(prompt) :].tolist()
        if self.changed is not None and is_last:
            tokens[self.changed] += 1
        completion = SimpleNamespace(
            token_ids=tokens,
            finish_reason=self.reason if is_last else "length",
            num_cached_tokens=3,
            error=None,
        )
        return [SimpleNamespace(rid=rid, completion=None), SimpleNamespace(rid=rid, completion=completion)]


@pytest.fixture(scope="session")
def tiny():
    return make_tiny()


@pytest.fixture
def fake_engine():
    return FakeEngine
