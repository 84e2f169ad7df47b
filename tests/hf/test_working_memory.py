"""What a call holds beside the pool: sliding layers let go of what is stored and far before their window."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from hf_testkit import greedy, make_cache, plain, prompt, tiny, twin

from radixkv.hf.layers import SessionLayer


@pytest.mark.parametrize("block_size", [4, 16])
def test_long_cold_prompts_keep_only_the_window_and_go_on_exactly(block_size: int) -> None:
    model = tiny("gemma3")
    reference = twin(model)
    window = model.config.sliding_window
    cache = make_cache(model, block_size=block_size, num_blocks=256, decode="contiguous")
    ids = prompt(4 * window + 300)
    kwargs = dict(max_new_tokens=40, do_sample=False, return_dict_in_generate=True)
    with cache.attached(model):
        out = model.generate(ids, **kwargs)
        assert out.sequences.tolist() == reference.generate(ids, **kwargs).sequences.tolist()
        layers = [layer for layer in out.past_key_values.layers if layer.is_sliding]
        assert layers
        assert all(layer.length - layer.base < ids.shape[1] for layer in layers)
        chat = torch.cat([out.sequences, prompt(9, seed=1)], dim=1)
        del out
        assert greedy(model, chat).tolist() == greedy(reference, chat).tolist()
        assert cache.last_requests[0].hit_tokens == ids.shape[1] + 39
    cache.check()


@pytest.mark.parametrize("drafts", [3, 10])
def test_drafts_are_cropped_exactly_after_the_window_was_cut(drafts: int) -> None:
    model = tiny("gemma3")
    reference = twin(model)
    cache = make_cache(model, num_blocks=256)
    ids = prompt(30).repeat(1, 20)
    expected = plain(lambda: greedy(reference, ids, 30, prompt_lookup_num_tokens=drafts)).tolist()
    for _ in range(2):
        with cache.attached(model):
            assert greedy(model, ids, 30, prompt_lookup_num_tokens=drafts).tolist() == expected
    cache.check()


def test_buffers_are_freed_when_generate_returns() -> None:
    """Without a garbage collection: a cycle would keep a prompt's KV alive for an unknown time."""
    model = tiny("gemma3")
    cache = make_cache(model)
    seen: list[weakref.ref[SessionLayer]] = []

    def look(module: object, args: object, output: object) -> None:
        past = getattr(output, "cache", None) or output.past_key_values
        seen.extend(weakref.ref(layer) for layer in past.layers if isinstance(layer, SessionLayer))

    gc.collect()
    gc.disable()
    try:
        with cache.attached(model):
            handle = model.model.register_forward_hook(look)
            greedy(model, prompt(40))
            handle.remove()
            assert seen
            assert not [layer for layer in (ref() for ref in seen) if layer is not None]
    finally:
        gc.enable()
