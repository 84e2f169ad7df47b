"""Sessions whose KV stays in the pool: no second copy, shared blocks, and the way out wherever that cannot be."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from hf_testkit import (
    MAIN_ARCHS,
    books,
    cache_keyword,
    cache_of,
    close,
    expect_hits,
    expect_same,
    greedy,
    join,
    make_cache,
    needs_cache,
    pad_left,
    prompt,
    same,
    snapshot,
    tiny,
    twin,
)
from transformers import StoppingCriteria, StoppingCriteriaList

import radixkv
from radixkv import errors
from tests.attention.flashinfer_testkit import over_double

pytestmark = [pytest.mark.filterwarnings("default"), needs_cache]


def paged(model: Any, **options: Any) -> Any:
    return make_cache(model, decode="paged", **options)


def stays(cache: Any) -> None:
    """Every session so far kept its KV in the pool: nothing was gathered."""
    assert cache.stats.contiguous == {}
    assert cache.stats.gather_seconds == 0
    assert cache.plug.paged.reason is None


class AtEachToken(StoppingCriteria):
    """Calls a function after each token, in the middle of `generate()`."""

    def __init__(self, look: Callable[[int], None]) -> None:
        self.look, self.count = look, 0

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.count += 1
        self.look(self.count)
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


def watched(look: Callable[[int], None]) -> StoppingCriteriaList:
    return StoppingCriteriaList([AtEachToken(look)])


# ------------------------------------------------------------------------------------------ nothing twice


def tensor_bytes() -> dict[int, int]:
    """Bytes of the storages of all tensors alive."""
    gc.collect()
    found = {}
    for each in gc.get_objects():
        if type(each) is torch.Tensor:
            storage = each.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return found


@pytest.mark.parametrize("hit", [False, True])
def test_no_second_copy_exists_while_generate_runs(hit: bool) -> None:
    """Measured at each token, in both ways: what lives beside pool and model."""
    ids = prompt(400)
    most = {}
    for way in ("contiguous", "paged"):
        model = tiny(num_hidden_layers=16)  # of which the scratch memory of the torch backend is a small part
        cache = make_cache(model, num_blocks=256, decode=way)
        kv = cache.layout.bytes_per_token * ids.shape[1]
        with cache.attached(model):
            greedy(model, ids if hit else prompt(9), 2)
            before = tensor_bytes()
            beside: list[int] = []

            def look(_: int, before: Any = before, beside: Any = beside) -> None:
                beside.append(sum(n for at, n in tensor_bytes().items() if at not in before))

            greedy(model, ids, 2, stopping_criteria=watched(look))
        most[way] = max(beside)
        books(cache)
    assert most["contiguous"] >= kv
    assert most["paged"] < kv / 2


@pytest.mark.parametrize("arch", MAIN_ARCHS)
def test_a_hit_is_shared_and_nothing_is_gathered(arch: str) -> None:
    model = tiny(arch)
    cache = paged(model, num_blocks=64)
    base = prompt(30)
    with cache.attached(model):
        greedy(model, base, 3)
        known = cache.num_cached_blocks
        held: list[int] = []

        def look(_: int) -> None:
            held.append(cache.pool.num_held)

        # Four rows go on from 30 cached tokens: seven blocks and half a block, which each copies.
        batch = pad_left([join(base, prompt(5, seed=i)) for i in range(4)])
        model.generate(**batch, max_new_tokens=2, do_sample=False, stopping_criteria=watched(look))
    assert max(held) <= known + 4 * 3
    expect_hits(cache, 30, 30, 30, 30)
    stays(cache)
    assert cache.stats.stored_tokens == 32 + 4 * (2 + 5 + 1)
    assert cache.stats.cow_copies == 4
    books(cache)


def test_rows_with_one_cold_prompt_hold_its_blocks_once() -> None:
    model = tiny()
    cache = paged(model, num_blocks=128)
    held: list[int] = []
    ids = prompt(80)
    call = dict(max_new_tokens=6, do_sample=True, temperature=2.0, num_return_sequences=5)
    reference = twin(model)
    torch.manual_seed(1)
    expected = reference.generate(ids, **call)
    with cache.attached(model):
        torch.manual_seed(1)
        got = model.generate(
            ids, **call, stopping_criteria=watched(lambda _: held.append(cache.pool.num_held))
        )
    same(got, expected)
    assert max(held) <= 20 + 5 * 3
    stays(cache)
    books(cache)


# ------------------------------------------------------------------------------------------ other backends and layers


@pytest.mark.parametrize("arch", ["llama_gqa", "gemma3", "mistral"])
def test_over_the_flashinfer_double(arch: str) -> None:
    """The code path of a GPU: planned, paged, checked against the documented contract."""
    model = tiny(arch)
    reference = twin(model)
    cache = paged(model, block_size=4)
    cache.plug.paged.use(over_double)
    ids = prompt(21)
    for i in range(3):
        longer = join(ids, prompt(1 + 4 * i, seed=i))
        expect_same(cache, model, lambda m, ids=longer: greedy(m, ids, 5), reference)
    batch = pad_left([ids, join(ids, prompt(3, seed=7)), prompt(4), ids[:, :1]])
    for _ in range(2):
        expect_same(cache, model, lambda m: m.generate(**batch, max_new_tokens=5, do_sample=False), reference)
    expect_same(cache, model, lambda m: greedy(m, ids, 5, num_beams=3), reference)
    expect_same(cache, model, lambda m: greedy(m, prompt(15, seed=5), 4, prefill_chunk_size=4), reference)
    expect_same(cache, model, lambda m: greedy(m, ids, 8, prompt_lookup_num_tokens=3), reference)
    stays(cache)


def _special(name: str) -> Any:
    common = dict(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=256, initializer_range=0.25,
        sliding_window=8, pad_token_id=0, bos_token_id=1, eos_token_id=2, tie_word_embeddings=False,
    )  # fmt: skip
    if name == "gemma2":
        config = transformers.Gemma2Config(**common, attn_logit_softcapping=2.0, query_pre_attn_scalar=8)
        config._attn_implementation = "eager"  # sdpa leaves the soft cap out
    else:
        config = transformers.GptOssConfig(**common, num_local_experts=4, num_experts_per_tok=2)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(
            config, attn_implementation=config._attn_implementation
        )
        for parameter_name, parameter in model.named_parameters():
            if "sinks" in parameter_name:
                torch.nn.init.normal_(parameter)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.float().eval()


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("name", ["gemma2", "gpt_oss"])
def test_soft_caps_and_sinks(name: str, double: bool) -> None:
    model = _special(name)
    reference = copy.deepcopy(model)
    cache = paged(model)
    if double:
        cache.plug.paged.use(over_double)
    kinds = cache.plug.paged._how.kinds.values()
    assert any(kind.spec.softcap for kind in kinds) == (name == "gemma2")
    assert any(kind.has_sinks for kind in kinds) == (name == "gpt_oss")
    ids = prompt(21)
    batch = pad_left([ids, join(ids[:, :13], prompt(3, seed=7)), prompt(4)])
    for _ in range(2):
        expect_same(cache, model, lambda m: greedy(m, ids, 5), reference)
        expect_same(cache, model, lambda m: m.generate(**batch, max_new_tokens=5, do_sample=False), reference)
    stays(cache)


# ------------------------------------------------------------------------------------------ room


@pytest.mark.parametrize("arch", MAIN_ARCHS)
@pytest.mark.parametrize("num_blocks", [1, 5, 8, 13])
def test_a_pool_that_cannot_hold_the_sequence(arch: str, num_blocks: int) -> None:
    """From the start, in the middle of a batch's prefill, or in the middle of decoding: gathered once, and on."""
    model = tiny(arch)
    reference = twin(model)
    cache = paged(model, num_blocks=num_blocks)
    ids = prompt(18)
    batch = pad_left([join(ids[:, :9], prompt(6, seed=i)) for i in range(3)])
    for _ in range(2):
        expect_same(cache, model, lambda m: greedy(m, ids, 30), reference)
        expect_same(cache, model, lambda m: m.generate(**batch, max_new_tokens=9, do_sample=False), reference)
        expect_same(cache, model, lambda m: greedy(m, ids, 12, num_beams=2), reference)
    assert cache.stats.contiguous["room"] >= 2
    assert set(cache.stats.contiguous) == {"room"}


def test_leases_and_other_sessions_take_the_room() -> None:
    model = tiny()
    reference = twin(model)
    cache = paged(model, num_blocks=20)
    keyword = cache_keyword(model)
    with cache.attached(model):
        greedy(model, prompt(30), 2)
    with cache.pin(prompt(30)[0]), cache.session(prompt(30, seed=1)) as past, torch.no_grad():
        logits = model(prompt(30, seed=1), **{keyword: past}).logits[:, -1]
        assert cache.pool.num_free <= 5
        ids = prompt(28, seed=2)
        with cache.attached(model):
            same(greedy(model, ids, 8), greedy(reference, ids, 8))
        assert cache.stats.contiguous == {"room": 1}
        token = logits.argmax(-1, keepdim=True)
        close(
            model(token, **{keyword: past}).logits[:, -1],
            reference(join(prompt(30, seed=1), token)).logits[:, -1],
        )
    books(cache)


def test_what_left_the_pool_is_stored_as_far_as_there_is_room_and_the_rest_is_recorded() -> None:
    model = tiny()
    cache = paged(model, num_blocks=6)
    ids = prompt(18)
    with cache.attached(model):
        answered = greedy(model, ids, 30)
        assert cache.match_length(answered[0]) == 24
        greedy(model, answered, 2)
    assert cache.last_requests[0].miss_reason == "not_kept"
    books(cache)


# ------------------------------------------------------------------------------------------ the way out


def test_what_cannot_read_the_pool_goes_on_contiguously() -> None:
    model = tiny()
    reference = twin(model)
    ids, keyword = prompt(20), cache_keyword(model)
    hole = torch.ones(1, 21, dtype=torch.long)
    hole[0, 4] = 0

    def mask_with_a_hole(m: Any, past: Any, token: torch.Tensor) -> Any:
        return m(token, attention_mask=hole, position_ids=torch.tensor([[20]]), **{keyword: past})

    def mask_4d(m: Any, past: Any, token: torch.Tensor) -> Any:
        seen = torch.ones(1, 1, 1, 21, dtype=torch.bool)
        seen[..., :7] = False
        return m(token, attention_mask=seen, position_ids=torch.tensor([[20]]), **{keyword: past})

    def embeddings(m: Any, past: Any, token: torch.Tensor) -> Any:
        return m(inputs_embeds=m.get_input_embeddings()(token), **{keyword: past})

    ways = {"attention_mask": mask_with_a_hole, "untrusted": mask_4d, "inputs_embeds": embeddings}
    for reason, step in ways.items():
        cache = paged(model)

        def run(m: Any, step: Any = step) -> torch.Tensor:
            with torch.no_grad():
                past = cache_of(m(ids, use_cache=True))
                first = step(m, past, prompt(1, seed=3)).logits
                second = m(prompt(1, seed=4), **{keyword: past}, use_cache=True).logits
            return torch.cat([first, second], 1)

        with cache.attached(model):
            close(run(model), run(reference))
        assert sum(cache.stats.contiguous.values()) == 1, reason
        books(cache)
        expect_same(cache, model, lambda m: greedy(m, ids), reference)


def test_copies_and_reads_of_a_cache_object() -> None:
    model = tiny("gemma3")
    reference = twin(model)
    cache = paged(model)
    keyword = cache_keyword(model)
    batch = pad_left([prompt(14), prompt(9, seed=1)])
    more = dict(attention_mask=torch.cat([batch["attention_mask"], torch.ones(2, 1, dtype=torch.long)], 1))
    more |= dict(position_ids=torch.tensor([[14], [9]]), use_cache=True)
    token = torch.tensor([[5], [6]])

    def prefill(m: Any) -> Any:
        mask = batch["attention_mask"]
        places = (mask.cumsum(-1) - 1).clamp(min=0)
        return cache_of(m(**batch, position_ids=places, use_cache=True))

    with torch.no_grad():
        theirs = prefill(reference)
        expected = reference(token, **more, **{keyword: copy.deepcopy(theirs)}).logits
        with cache.attached(model):
            past = prefill(model)
            for mine, plain in zip(past.layers, theirs.layers, strict=True):
                seen = plain.keys.shape[2]
                close(mine.keys[0, :, -seen:], plain.keys[0])
                close(mine.values[1, :, -min(seen, 9) :], plain.values[1, :, -min(seen, 9) :])
            for other in (copy.deepcopy(past), pickle.loads(pickle.dumps(past)), past):
                close(model(token, **more, **{keyword: other}).logits, expected)
            stays(cache)
            del past, other, mine  # a layer that somebody keeps holds the blocks, too
        books(cache)


def test_a_cache_object_outlives_its_attachment() -> None:
    model = tiny()
    reference = twin(model)
    cache = paged(model)
    ids, keyword = prompt(20), cache_keyword(model)
    with torch.no_grad():
        with cache.attached(model):
            out = model(ids, use_cache=True)
        past = cache_of(out)
        token = prompt(1, seed=3)
        close(model(token, **{keyword: past}).logits, reference(join(ids, token)).logits[:, -1:])
    assert cache.stats.contiguous == {"outside": 1}
    books(cache)


def test_clear_takes_sessions_out_of_the_pool() -> None:
    model = tiny()
    reference = twin(model)
    cache = paged(model)
    ids, keyword = prompt(20), cache_keyword(model)
    with torch.no_grad(), cache.attached(model):
        past = cache_of(model(ids, use_cache=True))
        cache.clear()
        assert cache.num_free_blocks == cache.num_blocks
        token = prompt(1, seed=3)
        close(model(token, **{keyword: past}).logits, reference(join(ids, token)).logits[:, -1:])
    books(cache)
    assert cache.num_cached_blocks == 0, "what was forgotten must not come back"


def test_rows_are_picked_repeated_and_cut() -> None:
    """What recipes from the hub do to a cache, by hand, against a plain cache."""
    model = tiny("gemma3")
    reference = twin(model)
    cache = paged(model)
    ids, keyword = prompt(30).view(3, 10), cache_keyword(model)

    def recipe(m: Any) -> torch.Tensor:
        seen = []
        with torch.no_grad():
            past = cache_of(m(ids, use_cache=True))
            for change in (
                lambda: past.reorder_cache(torch.tensor([2, 2, 0])),
                lambda: past.batch_repeat_interleave(2),
                lambda: past.batch_select_indices(torch.tensor([0, 3, 5])),
                lambda: past.crop(-2) if m is model else None,
            ):
                change()
                rows = past.layers[0].keys.shape[0]
                if m is reference and len(seen) == 3:
                    seen.append(seen[-1])
                    continue
                new = prompt(2 * rows, seed=rows).view(rows, 2)
                seen.append(m(new, use_cache=True, **{keyword: past}).logits.flatten(0, 1))
        return torch.cat(seen)

    with cache.attached(model):
        got = recipe(model)
    close(got, recipe(reference))
    stays(cache)
    books(cache)


# ------------------------------------------------------------------------------------------ interrupts


def feed(model: Any, cache: Any, ids: torch.Tensor) -> None:
    """Three forwards of a session."""
    with cache.session(ids) as past, torch.no_grad():
        for start in (0, 7, 14):
            model(ids[:, start : start + 7], **{cache_keyword(model): past})


@pytest.mark.parametrize("layer", [0, 3])
@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError, SystemExit])
def test_an_interrupt_in_the_middle_of_a_forward_leaves_the_model_alone(
    error: type[BaseException], layer: int
) -> None:
    """Also where torch calls no hooks any more: at the end of the block at the latest, all is as it was."""
    model = tiny("gemma3")
    reference = twin(model)
    before = snapshot(model)
    cache = paged(model)
    for fail_at in (1, 3):
        count = 0

        def fail(*_: Any, fail_at: int = fail_at) -> None:
            nonlocal count
            count += 1
            if count == fail_at:
                raise error

        handle = model.model.layers[layer].mlp.register_forward_pre_hook(fail)
        with pytest.raises(error), cache.attached(model):
            greedy(model, prompt(20))
        handle.remove()
        assert snapshot(model) == before
        handle = model.model.layers[layer].mlp.register_forward_pre_hook(fail)
        count = 0
        with pytest.raises(error):
            feed(model, cache, prompt(20, seed=9))
        handle.remove()
        assert snapshot(model) == before
        gc.collect()
        books(cache)
        expect_same(cache, model, lambda m: greedy(m, prompt(20)), reference)
        cache.clear()


def test_a_generator_that_is_closed() -> None:
    model = tiny()
    cache = paged(model)
    keyword = cache_keyword(model)

    def tokens(ids: torch.Tensor) -> Any:
        with cache.session(ids) as past, torch.no_grad():
            current = ids[:, past.num_cached_tokens :]
            while True:
                current = model(current, **{keyword: past}).logits[:, -1:].argmax(-1)
                yield int(current)

    before = snapshot(model)
    stream = tokens(prompt(17))
    first = [next(stream) for _ in range(5)]
    assert cache.pool.num_held >= 5
    stream.close()
    assert cache.pool.num_held == 0
    assert snapshot(model) == before
    same(torch.tensor([first]), greedy(twin(model), prompt(17), 5)[:, 17:])


def test_blocks_are_given_back_with_the_cache_object() -> None:
    """Without a garbage collection, and with one in the middle of somebody's bookkeeping."""
    model = tiny()
    cache = paged(model)
    gc.disable()
    try:
        with torch.no_grad(), cache.attached(model):
            out = model(prompt(20), use_cache=True)
            assert cache.num_evictable_blocks < cache.num_cached_blocks
            with cache.lock:
                del out
            cache.check()
            assert cache.num_evictable_blocks == cache.num_cached_blocks
    finally:
        gc.enable()
    books(cache)


def test_threads_do_not_meet() -> None:
    """Paged and plain forwards of one model at once: every thread has a plan of its own."""
    model = tiny("gemma3")
    reference = twin(model)
    cache = paged(model, num_blocks=96)
    ids = [join(prompt(12), prompt(2 + i, seed=i)) for i in range(4)]
    expected = [greedy(reference, each, 12) for each in ids]
    wrong: list[str] = []

    def work(number: int) -> None:
        torch.set_num_threads(1)
        for _ in range(4):
            bypass = dict(use_cache=False) if number == 3 else {}
            got = greedy(model, ids[number], 12, **bypass)
            if got.tolist() != expected[number].tolist():
                wrong.append(f"thread {number}")

    before = snapshot(model)
    with cache.attached(model):
        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong
    assert snapshot(model) == before
    books(cache)


@pytest.mark.parametrize("arch", MAIN_ARCHS)
def test_two_caches_on_one_model(arch: str) -> None:
    """Attached in turn, sessions of both at once, and one cache attached while a session of the other is open."""
    model = tiny(arch)
    reference = twin(model)
    one, two = paged(model, num_blocks=96), paged(model, num_blocks=96)
    ids, keyword = prompt(30), cache_keyword(model)
    expected = greedy(reference, ids, 6)
    for _ in range(2):
        for cache in (one, two):
            with cache.attached(model):
                same(greedy(model, ids, 6), expected)
    wanted = reference(ids).logits[:, -1]
    with torch.no_grad(), one.session(ids) as first, two.session(ids) as second:
        for past in (first, second):  # turn by turn: each forward reads the pool of its own cache
            assert past.num_cached_tokens == 29
            close(model(ids[:, 29:], **{keyword: past}).logits[:, -1], wanted)
        with two.attached(model):
            same(greedy(model, ids, 6), expected)
        more = prompt(1, seed=5)
        after = reference(join(ids, more)).logits[:, -1]
        for past in (second, first):
            close(model(more, **{keyword: past}).logits[:, -1], after)
    for cache in (one, two):
        stays(cache)
        books(cache)


def test_retention_of_paged_sessions() -> None:
    model = tiny()
    reference = twin(model)
    cache = paged(model, num_blocks=24, policy="priority")
    kept = prompt(30)
    with cache.attached(model, retention=radixkv.Retention(priority=90)):
        greedy(model, kept, 2)
    with cache.attached(model):
        for seed in range(1, 12):
            ids = prompt(30, seed)
            same(greedy(model, ids, 4), greedy(reference, ids, 4))
        assert cache.match_length(kept[0]) >= 30
        same(greedy(model, kept, 4), greedy(reference, kept, 4))
    stays(cache)
    books(cache)


def test_frequencies_that_depend_on_the_length() -> None:
    """Short and long prompts around the length at which longrope changes its factors."""
    half = tiny("phi3").config.hidden_size // tiny("phi3").config.num_attention_heads // 2
    # `type` is what 4.57 reads; newer versions take it too.
    rope = dict(type="longrope", short_factor=[1.0] * half, long_factor=[4.0] * half)
    model = tiny("phi3", rope_scaling=rope, original_max_position_embeddings=40, max_position_embeddings=160)
    reference = twin(model)
    cache = paged(model, num_blocks=96)
    with cache.attached(model):
        for size in (20, 36, 60, 20, 36, 60, 38):
            ids = prompt(size)
            same(greedy(model, ids, 6), greedy(reference, ids, 6))
    books(cache)


# ------------------------------------------------------------------------------------------ the choice


def test_auto_is_contiguous_on_a_cpu() -> None:
    model = tiny()
    cache = make_cache(model, decode="auto")
    with cache.attached(model):
        greedy(model, prompt(20))
        greedy(model, prompt(20))
    assert cache.stats.gather_seconds > 0
    assert cache.stats.contiguous == {}, "nothing else was asked for"
    assert "GPU" in cache.plug.paged.reason


def test_a_model_whose_attention_cannot_be_taken_over() -> None:
    model = tiny("deepseek_v3")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        cache = make_cache(model, decode="paged")
    if cache.plug.paged.reason is None:
        pytest.skip("this version of transformers caches what it attends over")
    assert any("buffers of their own" in str(warning.message) for warning in told)
    for _ in range(2):
        expect_same(cache, model, lambda m: greedy(m, prompt(20)))
    assert cache.stats.contiguous == {"model": 2}


def test_an_attention_that_is_set_while_attached() -> None:
    """Looked at once more when the next session is opened; one under way goes on contiguously."""
    model = tiny()
    cache = paged(model)
    expect_same(cache, model, lambda m: greedy(m, prompt(20)))
    model.set_attn_implementation("eager")
    expect_same(cache, model, lambda m: greedy(m, prompt(20)))
    stays(cache)
    with torch.no_grad(), cache.session(prompt(20)) as past:
        keyword = {cache_keyword(model): past}
        model(prompt(20)[:, :5], **keyword)
        model.set_attn_implementation("sdpa")
        close(model(prompt(20)[:, 5:], **keyword).logits[:, -1], twin(model)(prompt(20)).logits[:, -1])
    assert cache.stats.contiguous == {"model": 1}
    books(cache)


def test_no_such_way() -> None:
    with pytest.raises(errors.InvalidRequestError, match="contiguous"):
        radixkv.PrefixCache.for_model(tiny(), num_blocks=8, decode="flat")


def test_a_gradient_that_would_miss_the_cached_part_is_refused() -> None:
    model = tiny()
    cache = paged(model)
    with cache.session(prompt(20)) as past:
        loss = model(prompt(20), **{cache_keyword(model): past}).logits.sum()
        with pytest.raises(errors.InvalidRequestError, match="gradients"):
            loss.backward()
    books(cache)


@pytest.mark.parametrize("policy", ["lru", "fifo", "slru"])
@pytest.mark.parametrize("num_blocks", [5, 9, 10])
def test_a_tail_to_be_copied_is_not_evicted_for_the_next_row(num_blocks: int, policy: str) -> None:
    model = tiny()
    plain = twin(model)
    rows = [prompt(size, seed) for seed, size in enumerate((6, 5, 7, 6)[: 2 if num_blocks == 5 else 4])]
    cache = paged(model, num_blocks=num_blocks, policy=policy)
    with cache.attached(model):
        for row in rows:
            greedy(model, row, 1)
        for _ in range(2):
            batch = pad_left(rows)
            wanted = plain.generate(**batch, max_new_tokens=3, do_sample=False)
            assert torch.equal(model.generate(**batch, max_new_tokens=3, do_sample=False), wanted)
    gc.collect()
    cache.check()
    assert cache.num_evictable_blocks == cache.num_cached_blocks


def test_a_step_whose_copies_fail_leaves_nothing_wrong_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny()
    plain = twin(model)
    cache = paged(model, num_blocks=32)
    ids = torch.cat([prompt(6, 1), prompt(6, 2)])
    token = prompt(1, 7).expand(2, 1)
    with cache.attached(model), torch.no_grad():
        past = model(ids, use_cache=True).past_key_values
        assert cache.stats.stored_tokens == 12  # and so the tails of a live session are in the tree

        def fail(*_: Any) -> None:
            raise RuntimeError("out of memory")

        with monkeypatch.context() as patch:
            patch.setattr(cache.store, "copy_blocks", fail)
            with pytest.raises(RuntimeError, match="out of memory"):
                model(token, **{cache_keyword(model): past})
        with pytest.raises(errors.InvalidRequestError, match="start anew"):
            model(token, **{cache_keyword(model): past})
        del past
        gc.collect()
        cache.check()
        assert cache.num_evictable_blocks == cache.num_cached_blocks
        for row in ids:
            longer = torch.cat([row[None], prompt(3, 5)], 1)
            assert torch.equal(greedy(model, longer, 4), greedy(plain, longer, 4))


@pytest.mark.parametrize("way", ["copied", "moved"])
def test_layers_that_outlive_their_cache_object_keep_their_kv(way: str) -> None:
    model = tiny()
    cache = paged(model)

    def tokens(m: Any) -> list[int]:
        with torch.no_grad():
            out = m(prompt(13), use_cache=True)
            if way == "copied":
                past = copy.copy(out.past_key_values)
            else:
                past = transformers.DynamicCache()
                past.layers = out.past_key_values.layers
            del out
            gc.collect()
            found, token = [], prompt(1, 4)
            for _ in range(4):
                token = m(token, **{cache_keyword(m): past}).logits[:, -1:].argmax(-1)
                found.append(int(token))
            return found

    with cache.attached(model):
        assert tokens(model) == tokens(twin(model))
    gc.collect()
    cache.check()
    assert cache.num_evictable_blocks == cache.num_cached_blocks
