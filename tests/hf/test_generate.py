"""Greedy `generate()` with the cache attached gives the tokens of plain transformers, on every kind of model."""

from __future__ import annotations

import pytest
import torch
from hf_testkit import (
    ARCHS,
    EOS,
    MAIN_ARCHS,
    NULL,
    books,
    both_ways,
    cache_keyword,
    close,
    count_tokens,
    expect_hits,
    expect_same,
    expect_totals,
    greedy,
    join,
    make_cache,
    needs_cache,
    prompt,
    same,
    tiny,
    twin,
)
from transformers import GenerationConfig

pytestmark = pytest.mark.filterwarnings("default")


@both_ways
@pytest.mark.parametrize("arch", ARCHS)
def test_cold_warm_longer_shorter_and_diverging(arch: str) -> None:
    model = tiny(arch)
    reference = twin(model)
    cache = make_cache(model)
    base = prompt(29)

    expect_same(cache, model, lambda m: greedy(m, base), reference)
    expect_hits(cache, 0)
    expect_same(cache, model, lambda m: greedy(m, base), reference)
    expect_hits(cache, 28)  # the last token is always computed: its logits start the decoding
    for extra in (1, 4, 17):
        longer = join(base, prompt(extra, seed=extra))
        expect_same(cache, model, lambda m, ids=longer: greedy(m, ids), reference)
    for length in (28, 16, 9, 2, 1):
        shorter = base[:, :length]
        expect_same(cache, model, lambda m, ids=shorter: greedy(m, ids), reference)
        expect_hits(cache, length - 1)
    for keep in (23, 13, 8, 1):  # inside a block, at its edge, before and after the window of sliding layers
        other = join(base[:, :keep], prompt(11, seed=50 + keep))
        expect_same(cache, model, lambda m, ids=other: greedy(m, ids), reference)
    expect_same(cache, model, lambda m: greedy(m, prompt(20, seed=99)), reference)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_every_cut_of_one_prompt(arch: str, block_size: int) -> None:
    """A hit of any length: the prompt with its end replaced after 0, 1, 2... tokens."""
    model = tiny(arch)
    reference = twin(model)
    cache = make_cache(model, block_size=block_size, num_blocks=512)
    base = prompt(21)
    with cache.attached(model):
        greedy(model, base, 2)
    for keep in range(0, 21, 2):
        other = join(base[:, :keep], (base[:, keep : keep + 1] - 2) % 61 + 3, prompt(3, seed=keep))
        expect_same(cache, model, lambda m, ids=other: greedy(m, ids, 4), reference)
        expect_hits(cache, keep)


@pytest.mark.parametrize("arch", MAIN_ARCHS)
def test_scores_cold_and_warm_stay_within_the_tolerance(arch: str) -> None:
    """FC-49: once cold and three times warm, over several block boundaries."""
    model = tiny(arch)
    reference = twin(model)
    cache = make_cache(model)
    call = dict(max_new_tokens=20, do_sample=False, return_dict_in_generate=True, output_logits=True)
    for length in (15, 16, 17, 33):
        ids = prompt(length, seed=length)
        expected = reference.generate(ids, **call)
        for _ in range(4):
            with cache.attached(model):
                got = model.generate(ids, **call)
            same(got.sequences, expected.sequences)
            close(torch.stack(got.logits), torch.stack(expected.logits))
    del got  # and the cache object in it
    books(cache)


@pytest.mark.parametrize("arch", MAIN_ARCHS)
def test_positional_and_keyword_input(arch: str) -> None:
    model = tiny(arch)
    reference = twin(model)
    cache = make_cache(model)
    ids = prompt(19)
    mask = torch.ones_like(ids)
    config = GenerationConfig(max_new_tokens=7, do_sample=False, pad_token_id=0, eos_token_id=None)
    calls = [
        lambda m: m.generate(ids, max_new_tokens=7, do_sample=False),
        lambda m: m.generate(inputs=ids, max_new_tokens=7, do_sample=False),
        lambda m: m.generate(input_ids=ids, max_new_tokens=7, do_sample=False),
        lambda m: m.generate(input_ids=ids, attention_mask=mask, max_new_tokens=7, do_sample=False),
        lambda m: m.generate(ids, config),
        lambda m: m.generate(ids, generation_config=config, attention_mask=mask),
        lambda m: m.generate(ids, generation_config=config, max_new_tokens=3),
        lambda m: m.generate(ids, max_length=24, do_sample=False, use_cache=True),
    ]
    for i, call in enumerate(calls):
        expect_same(cache, model, call, reference)
        expect_hits(cache, 18 if i else 0)


def test_other_integer_types_and_views() -> None:
    model = tiny()
    reference = twin(model)
    cache = make_cache(model)
    ids = prompt(20)
    expect_same(cache, model, lambda m: greedy(m, ids), reference)
    expect_same(cache, model, lambda m: greedy(m, ids.to(torch.int32)), reference)
    strided = torch.stack([ids[0], ids[0]], dim=1).T[:1]
    assert not strided.is_contiguous() or strided.stride() != ids.stride()
    expect_same(cache, model, lambda m: greedy(m, strided), reference)
    expect_hits(cache, 19)


@pytest.mark.parametrize("arch", MAIN_ARCHS)
@pytest.mark.parametrize("block_size", [1, 4])
def test_one_token_prompts(arch: str, block_size: int) -> None:
    """FC-17: nothing to skip, nothing to break."""
    model = tiny(arch)
    reference = twin(model)
    cache = make_cache(model, block_size=block_size)
    for token in (7, 7, 8, 7):
        expect_same(cache, model, lambda m, t=token: greedy(m, torch.tensor([[t]])), reference)
        expect_hits(cache, 0)
    expect_same(cache, model, lambda m: greedy(m, torch.tensor([[7, 9]])), reference)
    expect_hits(cache, 1)


@both_ways
@pytest.mark.parametrize("block_size", [1, 16])
@pytest.mark.parametrize("arch", MAIN_ARCHS)
def test_the_next_turn_hits_through_the_answer(arch: str, block_size: int) -> None:
    """FC-14, token by token: all but the last sampled token, which was never run through the model."""
    model = tiny(arch)
    reference = twin(model)
    cache = make_cache(model, block_size=block_size, num_blocks=1024)
    chat = prompt(60)
    expected = 0
    for turn in range(4):
        answered = expect_same(cache, model, lambda m, ids=chat: greedy(m, ids, 25), reference)
        expect_hits(cache, expected)
        assert answered.shape[1] == chat.shape[1] + 25
        expected = answered.shape[1] - 1
        chat = join(answered, prompt(30, seed=turn + 1))


def test_an_answer_that_stops_early_is_reused_too() -> None:
    model = tiny(eos=True)
    cache = make_cache(model)
    stopped = 0
    for seed in range(20):
        ids = prompt(12, seed=seed)
        answered = expect_same(cache, model, lambda m, ids=ids: greedy(m, ids, 30))
        stopped += answered[0, -1].item() == EOS
        chat = join(answered, prompt(5, seed=100 + seed))
        expect_same(cache, model, lambda m, ids=chat: greedy(m, ids, 3))
        expect_hits(cache, answered.shape[1] - 1)
    assert stopped > 2, "the tiny model never stops by itself: the test shows nothing"


def test_the_whole_prompt_and_more_is_cached() -> None:
    """FC-13: at least one token goes through the model."""
    model = tiny()
    reference = twin(model)
    cache = make_cache(model)
    answered = expect_same(cache, model, lambda m: greedy(m, prompt(12), 12), reference)
    for length in (12, 13, 16, 20, 23):
        ids = answered[:, :length]
        with count_tokens(model) as counts:
            expect_same(cache, model, lambda m, ids=ids: greedy(m, ids, 1), reference)
        expect_hits(cache, length - 1)
        assert NULL or sum(counts) == 1


@both_ways
@needs_cache
@pytest.mark.parametrize("arch", MAIN_ARCHS)
def test_the_answer_is_in_the_cache_as_soon_as_generate_returns(arch: str) -> None:
    model = tiny(arch)
    cache = make_cache(model)
    with cache.attached(model):
        answered = greedy(model, prompt(18), 9)
        assert cache.match_length(answered[0]) == 18 + 9 - 1
        books(cache)
    assert cache.match_length(answered[0]) == 18 + 9 - 1
    assert cache.match_length(answered[0, :10]) == 10
    assert cache.match_length(prompt(18, seed=5)[0]) <= 1


def test_attach_and_detach_instead_of_with() -> None:
    model = tiny()
    reference = twin(model)
    cache = make_cache(model)
    ids = prompt(20)
    cache.attach(model)
    for _ in range(2):
        same(greedy(model, ids), greedy(reference, ids))
    cache.detach()
    expect_hits(cache, 19)
    before = cache.stats.requests
    same(greedy(model, ids), greedy(reference, ids))
    assert cache.stats.requests == before
    with cache.attached(model):  # what it holds is still there
        same(greedy(model, ids), greedy(reference, ids))
    expect_hits(cache, 19)
    expect_totals(cache)


@both_ways
def test_a_cache_made_by_generate_is_not_needed() -> None:
    """An empty DynamicCache handed to `generate()` is as good as none."""
    from transformers import DynamicCache

    model = tiny()
    reference = twin(model)
    cache = make_cache(model)
    ids = prompt(20)
    expected = greedy(reference, ids)
    for _ in range(2):
        with cache.attached(model):
            same(greedy(model, ids, **{cache_keyword(model): DynamicCache()}), expected)
        books(cache)


@both_ways
def test_generate_inside_inference_mode_and_then_outside() -> None:
    """A buffer made in inference mode cannot be written outside of it later."""
    model = tiny()
    reference = twin(model)
    cache = make_cache(model, num_blocks=16)
    for i in range(6):
        ids = join(prompt(10), prompt(9, seed=i // 2))
        with torch.inference_mode(i % 2 == 0):
            expect_same(cache, model, lambda m, ids=ids: greedy(m, ids), reference)


@both_ways
@pytest.mark.parametrize("arch", ["llama_gqa", "gemma3"])
def test_eager_attention(arch: str) -> None:
    model = tiny(arch)
    model.set_attn_implementation("eager")
    cache = make_cache(model)
    for i in range(3):
        ids = join(prompt(15), prompt(4, seed=i))
        expect_same(cache, model, lambda m, ids=ids: greedy(m, ids))
    expect_hits(cache, 15)


@both_ways
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_float_types_run(dtype: torch.dtype) -> None:
    """No promise of equal tokens in bfloat16: the hit is right if its logits are near those of the plain model."""
    model = tiny().to(dtype)
    reference = twin(tiny()).to(dtype)
    cache = make_cache(model)
    ids = prompt(24)
    call = dict(max_new_tokens=1, do_sample=False, return_dict_in_generate=True, output_logits=True)
    expected = reference.generate(ids, **call).logits[0]
    for _ in range(2):
        with cache.attached(model):
            got = model.generate(ids, **call).logits[0]
        torch.testing.assert_close(got, expected, rtol=0, atol=0.25 if dtype is torch.bfloat16 else 1e-9)
    expect_hits(cache, 23)


@pytest.mark.parametrize(("kind", "limit"), [("dynamic", 32), ("linear", 32), ("llama3", 32), ("yarn", 32)])
def test_scaled_rope_below_and_above_the_trained_length(kind: str, limit: int) -> None:
    """With dynamic scaling keys change with the length of the prompt: such keys must not meet."""
    more = {"llama3": dict(low_freq_factor=1.0, high_freq_factor=4.0)}.get(kind, {})
    scaling = dict(
        rope_type=kind, factor=4.0, original_max_position_embeddings=limit, rope_theta=10000.0, **more
    )
    if kind != "llama3":
        del scaling["original_max_position_embeddings"]
    model = tiny("llama_gqa", max_position_embeddings=limit, rope_scaling=scaling)
    reference = twin(model)  # one for all: the dynamic frequencies of a model depend on what it ran before
    cache = make_cache(model)
    base = prompt(60)
    for length in (20, 28, 40, 24, 60, 31, 33, 60, 16):
        expect_same(cache, model, lambda m, n=length: greedy(m, base[:, :n], 6), reference)
