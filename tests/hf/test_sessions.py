"""`cache.session`: a filled cache object for hand-written loops, guarded where a filled cache is silently wrong."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hf_testkit import (
    ARCHS,
    MAIN_ARCHS,
    NULL,
    books,
    both_ways,
    cache_keyword,
    close,
    count_tokens,
    expect_same,
    expect_totals,
    greedy,
    join,
    make_cache,
    needs_cache,
    pad_left,
    positions,
    prompt,
    right_or_clear_error,
    same,
    tiny,
    twin,
)

from radixkv import errors

pytestmark = pytest.mark.filterwarnings("default")


@needs_cache
@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ("a text", "got a str: tokenize first"),
        (["a", "text"], "got strings: tokenize first"),
        ({"input_ids": [[1, 2]]}, "got a dict: pass its input_ids"),
        ([[1, 2], [3]], r"\[batch, tokens\]"),
    ],
)
def test_what_is_no_prompt_is_told_what_to_do(tokens: Any, message: str) -> None:
    with pytest.raises(errors.InvalidRequestError, match=message):
        make_cache(tiny()).session(tokens)


def decode(model: Any, past: Any, ids: torch.Tensor, n: int = 6, step: int | None = None) -> torch.Tensor:
    """The loop of the documentation: feed what is not cached, then one token at a time."""
    keyword, start, tokens = cache_keyword(model), past.num_cached_tokens, []
    with torch.no_grad():
        cuts = [start, ids.shape[1]] if step is None else [*range(start, ids.shape[1], step), ids.shape[1]]
        for a, b in itertools.pairwise(cuts):
            out = model(ids[:, a:b], **{keyword: past})
        for i in range(n):
            current = out.logits[:, -1:].argmax(-1)
            tokens.append(current)
            if i < n - 1:
                out = model(current, **{keyword: past})
    return join(ids, *tokens)


def run(cache: Any, model: Any, ids: torch.Tensor, **how: Any) -> tuple[torch.Tensor, int]:
    with cache.session(ids) as past:
        return decode(model, past, ids, **how), past.num_cached_tokens


@both_ways
@pytest.mark.parametrize("arch", ARCHS)
def test_the_loop_of_the_documentation(arch: str) -> None:
    model = tiny(arch)
    reference = twin(model)
    cache = make_cache(model)
    base = prompt(23)
    cases = [
        (base, 0),
        (base, 22),
        (join(base, prompt(5, seed=1)), 23),
        (base[:, :11], 10),
        (join(base[:, :13], prompt(8, seed=2)), 13),
        (base[:, :1], 0),
    ]
    for ids, hit in cases:
        got, n = run(cache, model, ids)
        same(got, greedy(reference, ids, 6))
        assert NULL or n == hit
        books(cache)
        expect_totals(cache)


@pytest.mark.parametrize("arch", MAIN_ARCHS)
def test_what_was_decoded_is_committed(arch: str) -> None:
    model = tiny(arch)
    reference = twin(model)
    cache = make_cache(model)
    answered, _ = run(cache, model, prompt(13), n=10)
    chat = join(answered, prompt(4, seed=1))
    got, n = run(cache, model, chat)
    same(got, greedy(reference, chat, 6))
    assert NULL or n == 22
    expect_same(cache, model, lambda m: greedy(m, chat), reference)


@both_ways
@pytest.mark.parametrize("step", [1, 3, 7])
@pytest.mark.parametrize("arch", MAIN_ARCHS)
def test_prefill_in_pieces_by_hand(arch: str, step: int) -> None:
    model = tiny(arch)
    reference = twin(model)
    cache = make_cache(model)
    for i in range(3):
        ids = join(prompt(15), prompt(6, seed=i // 2))
        got, _ = run(cache, model, ids, step=step)
        same(got, greedy(reference, ids, 6))
        books(cache)


@pytest.mark.parametrize("arch", MAIN_ARCHS)
def test_into_generate(arch: str) -> None:
    """Also when the whole prompt and more is cached, where a plain filled cache runs the prompt twice."""
    model = tiny(arch)
    reference = twin(model)
    cache = make_cache(model)
    base = prompt(19)
    answered = greedy(reference, base, 8)
    for ids in (base, base, answered, base[:, :12], join(base[:, :9], prompt(4, seed=1)), answered[:, :22]):
        with cache.session(ids) as past:
            got = greedy(model, ids, 8, **{cache_keyword(model): past})
        same(got, greedy(reference, ids, 8))
        books(cache)
        expect_totals(cache)
    chat = join(answered, prompt(3, seed=2))
    expect_same(cache, model, lambda m: greedy(m, chat), reference)


@pytest.mark.filterwarnings("ignore")
def test_the_name_of_the_argument_in_the_readme() -> None:
    """`past_key_values=past` works with every version, also where the new name is `cache`."""
    model = tiny()
    reference = twin(model)
    cache = make_cache(model)
    ids = prompt(19)
    for _ in range(2):
        with cache.session(ids) as past:
            same(
                model.generate(ids, past_key_values=past, max_new_tokens=8, do_sample=False),
                greedy(reference, ids),
            )
        with cache.session(ids) as past, torch.no_grad():
            n = past.num_cached_tokens
            close(model(ids[:, n:], past_key_values=past).logits[:, -1], reference(ids).logits[:, -1])
        with cache.session(ids) as past, torch.inference_mode():
            n = past.num_cached_tokens
            close(
                model(ids[:, n:], past_key_values=past, use_cache=True).logits[:, -1],
                reference(ids).logits[:, -1],
            )
    assert NULL or n == 18


GENERATE_MODES: dict[str, dict[str, Any]] = {
    "prompt lookup": dict(prompt_lookup_num_tokens=4),
    "chunked": dict(prefill_chunk_size=5),
    "chunk larger than the prompt": dict(prefill_chunk_size=64),
    "beams": dict(num_beams=3),
    "return sequences": dict(num_beams=3, num_return_sequences=3),
    "no cache wanted": dict(use_cache=False),
}


@needs_cache
@pytest.mark.parametrize("mode", GENERATE_MODES)
@pytest.mark.parametrize("arch", MAIN_ARCHS)
def test_modes_in_which_a_filled_cache_is_silently_wrong(arch: str, mode: str) -> None:
    """The right tokens or one clear error, for no hit, a part, the whole prompt and more than the prompt."""
    model = tiny(arch, eos=True)
    reference = twin(model)
    cache = make_cache(model)
    phrase = prompt(6)
    base = join(phrase, prompt(5, seed=1), phrase, prompt(2, seed=2), phrase[:, :3])
    extra = GENERATE_MODES[mode]
    for known in (0, 7, base.shape[1] - 1, base.shape[1], base.shape[1] + 6):
        cache.clear()
        if known:
            with cache.attached(model):
                greedy(model, join(base, phrase[:, 3:], prompt(4, seed=3))[:, :known], 2)
        expected = greedy(reference, base, 10, **extra)

        def call() -> torch.Tensor:
            with cache.session(base) as past:
                return greedy(model, base, 10, **extra, **{cache_keyword(model): past})

        worked = right_or_clear_error(call, lambda got, expected=expected: same(got, expected))
        if mode in ("prompt lookup", "chunked", "chunk larger than the prompt"):
            assert worked, "the plug-in's own promise"
        books(cache)
        expect_same(cache, model, lambda m: greedy(m, base), reference)


@needs_cache
def test_sampling_and_assisted_into_generate() -> None:
    model = tiny()
    reference = twin(model)
    assistant = tiny(seed=3, num_hidden_layers=1)
    cache = make_cache(model)
    ids = prompt(19)
    for _ in range(2):
        for kwargs in (
            dict(do_sample=True, temperature=2.0),
            dict(do_sample=False, assistant_model=assistant),
        ):
            torch.manual_seed(4)
            expected = reference.generate(ids, max_new_tokens=9, **kwargs)

            def call(kwargs: Any = kwargs) -> torch.Tensor:
                torch.manual_seed(4)
                with cache.session(ids) as past:
                    return model.generate(ids, max_new_tokens=9, **kwargs, **{cache_keyword(model): past})

            right_or_clear_error(call, lambda got, expected=expected: same(got, expected))
            books(cache)


@needs_cache
@pytest.mark.parametrize("arch", MAIN_ARCHS)
@pytest.mark.parametrize("cached", [False, True])
def test_other_ids_than_it_was_opened_for(arch: str, cached: bool) -> None:
    model = tiny(arch)
    reference = twin(model)
    cache = make_cache(model)
    ids = prompt(20)
    if cached:
        with cache.attached(model):
            greedy(model, ids[:, :12], 1)
    before = cache.num_cached_tokens
    keyword = cache_keyword(model)
    others = {
        "another prompt": prompt(20, seed=5),
        "same start": join(ids[:, :15], prompt(5, seed=6)),
        "last token differs": join(ids[:, :19], (ids[:, 19:] - 2) % 61 + 3),
        "first token differs": join((ids[:, :1] - 2) % 61 + 3, ids[:, 1:]),
    }
    for other in others.values():
        with pytest.raises(errors.InvalidRequestError), cache.session(ids) as past:
            greedy(model, other, 4, **{keyword: past})
        books(cache)
        assert cache.num_cached_tokens == before, "an error inside drops the session"
    for name in ("another prompt", "same start", "last token differs"):
        with pytest.raises(errors.InvalidRequestError), cache.session(ids) as past, torch.no_grad():
            model(others[name][:, past.num_cached_tokens :], **{keyword: past})
        books(cache)
        assert cache.num_cached_tokens == before
    expect_same(cache, model, lambda m: greedy(m, ids), reference)
    for other in others.values():
        expect_same(cache, model, lambda m, ids=other: greedy(m, ids), reference)


@needs_cache
@pytest.mark.parametrize("arch", MAIN_ARCHS)
def test_the_whole_prompt_given_to_a_filled_session(arch: str) -> None:
    """Somebody forgets `[:, n:]`: one clear error or the right logits, never the prompt twice."""
    model = tiny(arch)
    reference = twin(model)
    cache = make_cache(model)
    ids = prompt(20)
    run(cache, model, ids[:, :14])
    with torch.no_grad():
        expected = reference(ids).logits[:, -1]

    def call() -> torch.Tensor:
        with cache.session(ids) as past, torch.no_grad():
            assert past.num_cached_tokens == 14
            return model(ids, **{cache_keyword(model): past}).logits[:, -1]

    right_or_clear_error(call, lambda got: close(got, expected))
    books(cache)
    expect_same(cache, model, lambda m: greedy(m, ids), reference)


@needs_cache
def test_a_prompt_fed_in_part_only() -> None:
    """What was not fed is not committed."""
    model = tiny()
    reference = twin(model)
    cache = make_cache(model)
    ids = prompt(20)
    with cache.session(ids) as past, torch.no_grad():
        model(ids[:, :9], **{cache_keyword(model): past})
    books(cache)
    assert cache.match_length(ids[0]) == 9
    with cache.session(ids) as past:
        pass
    assert cache.match_length(ids[0]) == 9
    expect_same(cache, model, lambda m: greedy(m, ids), reference)


@both_ways
@needs_cache
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, GeneratorExit])
def test_an_error_inside_drops_the_session(error: type[BaseException]) -> None:
    model = tiny()
    reference = twin(model)
    cache = make_cache(model)
    ids = prompt(20)

    def interrupted(text: torch.Tensor, cached: int) -> None:
        with cache.session(text) as past:
            assert past.num_cached_tokens == cached
            decode(model, past, text)
            raise error("mine")

    with pytest.raises(error):
        interrupted(ids, 0)
    books(cache)
    assert cache.num_cached_blocks == 0
    assert cache.match_length(ids[0]) == 0
    got, n = run(cache, model, ids)
    assert n == 0
    same(got, greedy(reference, ids, 6))

    with pytest.raises(error):
        interrupted(join(ids, prompt(9, seed=1)), 20)
    books(cache)
    assert cache.match_length(join(ids, prompt(9, seed=1))[0]) == 20


@both_ways
@needs_cache
def test_used_after_the_end() -> None:
    model = tiny()
    reference = twin(model)
    cache = make_cache(model)
    ids = prompt(20)
    token = prompt(1, seed=9)
    with torch.no_grad():
        expected = reference(join(ids, token)).logits[:, -1]
    with cache.session(ids) as past, torch.no_grad():
        model(ids, **{cache_keyword(model): past})

    def call() -> torch.Tensor:
        with torch.no_grad():
            return model(token, **{cache_keyword(model): past}).logits[:, -1]

    right_or_clear_error(call, lambda got: close(got, expected))
    books(cache)

    def into_generate() -> torch.Tensor:
        return greedy(model, ids, **{cache_keyword(model): past})

    right_or_clear_error(into_generate, lambda got: same(got, greedy(reference, ids)))
    books(cache)
    expect_same(cache, model, lambda m: greedy(m, join(ids, token)), reference)


@needs_cache
def test_entered_twice() -> None:
    model = tiny()
    cache = make_cache(model)
    ids = prompt(20)
    session = cache.session(ids)
    with session as past:
        decode(model, past, ids)
    with pytest.raises((errors.InvalidRequestError, RuntimeError)), session as past:
        decode(model, past, ids)
    books(cache)
    # Opened and never entered, or left behind half used: nothing stays pinned.
    del past, session
    cache.session(ids)
    books(cache)


@both_ways
@needs_cache
def test_used_twice_for_one_prompt() -> None:
    """Feeding the prompt again is one clear error, or it is the chat that goes on with these tokens."""
    model = tiny()
    reference = twin(model)
    cache = make_cache(model)
    ids = prompt(20)
    with torch.no_grad():
        expected = reference(join(ids, ids)).logits[:, -1]

    def call() -> torch.Tensor:
        with cache.session(ids) as past, torch.no_grad():
            model(ids, **{cache_keyword(model): past})
            return model(ids, **{cache_keyword(model): past}).logits[:, -1]

    right_or_clear_error(call, lambda got: close(got, expected))
    books(cache)

    def generate_twice() -> torch.Tensor:
        with cache.session(ids) as past:
            greedy(model, ids, **{cache_keyword(model): past})
            return greedy(model, ids, **{cache_keyword(model): past})

    right_or_clear_error(generate_twice, lambda got: same(got, greedy(reference, ids)))
    books(cache)
    expect_same(cache, model, lambda m: greedy(m, ids), reference)


@both_ways
@pytest.mark.parametrize("arch", MAIN_ARCHS)
def test_one_session_for_a_chat(arch: str) -> None:
    """`generate()` again with the longer chat and the same object, as plain code does with a DynamicCache."""
    model = tiny(arch)
    reference = twin(model)
    cache = make_cache(model)
    keyword = cache_keyword(model)
    for _ in range(2):
        chat = prompt(9)
        with cache.session(chat) as past:
            for turn in range(3):
                answered = greedy(model, chat, 5, **{keyword: past})
                same(answered, greedy(reference, chat, 5))
                chat = join(answered, prompt(4, seed=turn))
        books(cache)
    with count_tokens(model) as counts:
        got, n = run(cache, model, answered, n=1)
    same(got, greedy(reference, answered, 1))
    assert NULL or (n, sum(counts)) == (answered.shape[1] - 1, 1)


@both_ways
@pytest.mark.parametrize("arch", ["llama_gqa", "gemma3", "gpt2"])
def test_a_left_padded_batch(arch: str) -> None:
    """`num_cached_tokens` counts columns: short rows bring their padding along."""
    model = tiny(arch)
    reference = twin(model)
    cache = make_cache(model)
    prompts = [prompt(9), prompt(14, seed=1), join(prompt(9), prompt(2, seed=2))]
    batch = pad_left(prompts)
    ids, mask = batch["input_ids"], batch["attention_mask"]
    keyword = cache_keyword(model)
    with torch.no_grad():
        expected = reference(ids, attention_mask=mask, position_ids=positions(mask)).logits[:, -1]

    def by_hand() -> int:
        with cache.session(ids, attention_mask=mask) as past, torch.no_grad():
            n = past.num_cached_tokens
            place = positions(mask)[:, n:]
            out = model(ids[:, n:], attention_mask=mask, position_ids=place, **{keyword: past})
            close(out.logits[:, -1], expected)
            return n

    by_hand()  # cold: whatever it starts with, the logits are right
    books(cache)
    assert NULL or by_hand() == 13
    with cache.session(ids, attention_mask=mask) as past:
        got = model.generate(**batch, max_new_tokens=6, do_sample=False, **{keyword: past})
    same(got, reference.generate(**batch, max_new_tokens=6, do_sample=False))
    books(cache)
    for row in prompts:
        expect_same(cache, model, lambda m, ids=row: greedy(m, ids), reference)
        assert NULL or cache.last_requests[0].hit_tokens == row.shape[1] - 1


@needs_cache
def test_two_sessions_at_once_and_one_within_attached() -> None:
    model = tiny()
    reference = twin(model)
    cache = make_cache(model)
    one, two = prompt(20), join(prompt(12), prompt(7, seed=1))
    run(cache, model, prompt(12))
    with cache.session(one) as a, cache.session(two) as b:
        assert (a.num_cached_tokens, b.num_cached_tokens) == (12, 12)
        same(decode(model, b, two), greedy(reference, two, 6))
        same(decode(model, a, one), greedy(reference, one, 6))
    books(cache)
    with cache.attached(model):
        with cache.session(one) as a:
            same(decode(model, a, one), greedy(reference, one, 6))
            same(greedy(model, two), greedy(reference, two))
        same(greedy(model, one), greedy(reference, one))
    books(cache)


# ------------------------------------------------------------------------------- cut, reset, copy (FC-51)


@contextmanager
def four_tokens(model: Any, cache: Any, ids: torch.Tensor) -> Iterator[Any]:
    with cache.session(ids) as past, torch.no_grad():
        n = past.num_cached_tokens
        model(ids[:, n:], **{cache_keyword(model): past})
        assert past.get_seq_length() == 4
        yield past


@needs_cache
@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("arch", MAIN_ARCHS)
def test_cut_and_reset_at_the_edges(arch: str, warm: bool) -> None:
    model = tiny(arch)
    reference = twin(model)
    cache = make_cache(model)
    ids = prompt(4)
    keyword = cache_keyword(model)
    with torch.no_grad():
        expected = reference(ids[:, :3]).logits
    if warm:
        run(cache, model, ids)

    with four_tokens(model, cache, ids) as past:  # cut to length 0
        past.crop(-4)
        assert past.get_seq_length() == 0
        close(model(ids[:, :3], **{keyword: past}).logits, expected)
        assert past.get_seq_length() == 3
    books(cache)

    with four_tokens(model, cache, ids) as past:  # drop seven of four
        try:
            past.crop(-7)
        except (errors.RadixKVError, ValueError):
            assert past.get_seq_length() == 4
        else:
            assert past.get_seq_length() == 0
            close(model(ids[:, :3], **{keyword: past}).logits, expected)
    books(cache)

    with four_tokens(
        model, cache, ids
    ) as past:  # "drop minus two": an error, no change, or the length asked for
        try:
            past.crop(2)
        except (errors.RadixKVError, ValueError):
            assert past.get_seq_length() == 4
        else:
            assert past.get_seq_length() in (2, 4)
        length = past.get_seq_length()
        rest = join(ids, prompt(2, seed=3))
        close(model(rest[:, length:], **{keyword: past}).logits[:, -1], reference(rest).logits[:, -1])
    books(cache)

    with four_tokens(model, cache, ids) as past:
        past.crop(9)  # more than there is, as assisted decoding asks in old versions
        assert past.get_seq_length() == 4
    books(cache)

    with four_tokens(model, cache, ids) as past:
        past.reset()
        assert past.get_seq_length() == 0
        close(model(ids[:, :3], **{keyword: past}).logits, expected)
        assert past.get_seq_length() == 3
    books(cache)
    for other in (
        ids,
        join(ids[:, :3], prompt(5, seed=4)),
        join(ids, prompt(2, seed=3)),
        join(ids[:, :2], ids),
    ):
        expect_same(cache, model, lambda m, ids=other: greedy(m, ids), reference)


@pytest.mark.parametrize("arch", ["llama_gqa", "gpt2"])
def test_cut_and_go_on_with_other_tokens(arch: str) -> None:
    """Speculative decoding by hand: what was cut off is never committed, what replaced it is."""
    model = tiny(arch)
    reference = twin(model)
    cache = make_cache(model)
    keyword = cache_keyword(model)
    for i in range(3):
        ids = join(prompt(10), prompt(4, seed=i // 2))
        wrong, right = prompt(5, seed=10 + i), prompt(3, seed=20 + i)
        with cache.session(ids) as past, torch.no_grad():
            model(ids[:, past.num_cached_tokens :], **{keyword: past})
            model(wrong, **{keyword: past})
            past.crop(-4)
            out = model(right, **{keyword: past})
        kept = join(ids, wrong[:, :1], right)
        with torch.no_grad():
            close(out.logits[:, -1], reference(kept).logits[:, -1])
        books(cache)
        if not NULL:
            assert cache.match_length(kept[0]) == kept.shape[1]
            assert cache.match_length(join(ids, wrong)[0]) == ids.shape[1] + 1
        for text in (kept, join(ids, wrong)):
            longer = join(text, prompt(2, seed=30))
            expect_same(cache, model, lambda m, ids=longer: greedy(m, ids), reference)


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("arch", MAIN_ARCHS)
def test_a_copy_goes_its_own_way(arch: str, warm: bool) -> None:
    model = tiny(arch)
    reference = twin(model)
    cache = make_cache(model)
    keyword = cache_keyword(model)
    ids = prompt(14)
    if warm:
        run(cache, model, ids)
    one, two = prompt(4, seed=1), prompt(4, seed=2)
    with cache.session(ids) as past, torch.no_grad():
        model(ids[:, past.num_cached_tokens :], **{keyword: past})
        other = copy.deepcopy(past)
        assert other.get_seq_length() == 14
        a = model(one, **{keyword: past}).logits[:, -1]
        b = model(two, **{keyword: other}).logits[:, -1]
        c = model(prompt(2, seed=3), **{keyword: past}).logits[:, -1]
        close(a, reference(join(ids, one)).logits[:, -1])
        close(b, reference(join(ids, two)).logits[:, -1])
        close(c, reference(join(ids, one, prompt(2, seed=3))).logits[:, -1])
    del other, past
    books(cache)
    assert NULL or cache.match_length(join(ids, one)[0]) == 18
    for text in (join(ids, one), join(ids, two)):
        longer = join(text, prompt(2, seed=30))
        expect_same(cache, model, lambda m, ids=longer: greedy(m, ids), reference)


@needs_cache
def test_a_copy_does_not_copy_the_pool_or_the_model() -> None:
    """HF's recipe copies whatever the object refers to: that must not be gigabytes."""
    model = tiny()
    cache = make_cache(model, num_blocks=4096, block_size=16)
    ids = prompt(14)
    with cache.session(ids) as past, torch.no_grad():
        model(ids, **{cache_keyword(model): past})
        created: list[int] = []
        plain = torch.Tensor.__deepcopy__

        def counting(self: torch.Tensor, memo: Any) -> torch.Tensor:
            created.append(self.numel() * self.element_size())
            return plain(self, memo)

        torch.Tensor.__deepcopy__ = counting  # type: ignore[method-assign]
        try:
            copy.deepcopy(past)
        finally:
            torch.Tensor.__deepcopy__ = plain  # type: ignore[method-assign]
    assert sum(created) < cache.memory_bytes / 50


@needs_cache
def test_it_is_a_transformers_cache() -> None:
    from transformers import Cache

    model = tiny()
    cache = make_cache(model)
    ids = prompt(10)
    run(cache, model, ids)
    with cache.session(ids) as past:
        assert isinstance(past, Cache)
        assert past, "a cache that is false is taken for none by some models"
        assert len(past) == model.config.num_hidden_layers
        assert past.get_seq_length() == past.num_cached_tokens == 9


@needs_cache
def test_as_a_list_or_one_dimensional() -> None:
    """Tokens in any shape that can only mean one prompt, or one clear error."""
    model = tiny()
    cache = make_cache(model)
    ids = prompt(12)
    run(cache, model, ids)
    for given in (ids[0].tolist(), ids.tolist(), ids[0], ids[0].numpy(), ids.numpy(), tuple(ids[0].tolist())):

        def call(given: Any = given) -> int:
            with cache.session(given) as past:
                return past.num_cached_tokens

        right_or_clear_error(call, lambda n: same(n, 11))
        books(cache)
