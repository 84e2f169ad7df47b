"""Calls from the edges of what people do with a model: each gives what plain transformers gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hf_testkit import (
    MAIN_ARCHS,
    NULL,
    books,
    cache_keyword,
    cache_of,
    close,
    expect_hits,
    expect_same,
    greedy,
    join,
    make_cache,
    pad_left,
    plain,
    prompt,
    right_or_clear_error,
    same,
    tiny,
    twin,
)

pytestmark = pytest.mark.filterwarnings("default")

IDS = prompt(22)


@pytest.mark.parametrize("arch", MAIN_ARCHS)
def test_a_long_answer(arch: str) -> None:
    """Longer than any room allocated ahead, alone and in a batch of very different lengths."""
    model = tiny(arch)
    reference = twin(model)
    cache = make_cache(model, num_blocks=1024)
    for _ in range(2):
        expect_same(cache, model, lambda m: greedy(m, IDS, 300), reference)
    batch = pad_left([prompt(1), prompt(200, seed=1), IDS])
    for _ in range(2):
        expect_same(
            cache, model, lambda m: m.generate(**batch, max_new_tokens=150, do_sample=False), reference
        )


@pytest.mark.parametrize("arch", MAIN_ARCHS)
def test_a_chat_that_hands_the_returned_cache_back(arch: str) -> None:
    model = tiny(arch)
    reference = twin(model)
    cache = make_cache(model)

    def chat(m: Any) -> torch.Tensor:
        ids, past = IDS, None
        for turn in range(3):
            out = m.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=6,
                do_sample=False,
                return_dict_in_generate=True,
                **{cache_keyword(m): past},
            )
            past = cache_of(out)
            ids = join(out.sequences, prompt(4, seed=turn))
        return out.sequences

    for _ in range(3):
        answered = expect_same(cache, model, chat, reference)
    longer = join(answered, prompt(3, seed=9))
    expect_same(cache, model, lambda m: greedy(m, longer), reference)


@pytest.mark.parametrize("arch", MAIN_ARCHS)
def test_the_returned_cache_after_detach(arch: str) -> None:
    """It may outlive the `with`: right tokens, or one clear error."""
    model = tiny(arch)
    reference = twin(model)
    cache = make_cache(model)

    def first(m: Any) -> Any:
        return m.generate(IDS, max_new_tokens=6, do_sample=False, return_dict_in_generate=True)

    def go_on(m: Any, out: Any) -> torch.Tensor:
        ids = join(out.sequences, prompt(4, seed=1))
        return greedy(m, ids, 5, **{cache_keyword(m): cache_of(out)})

    expected = go_on(reference, first(reference))
    for _ in range(2):
        with cache.attached(model):
            out = first(model)
        right_or_clear_error(lambda out=out: go_on(model, out), lambda got: same(got, expected))
        books(cache)
    for text in (IDS, expected):
        expect_same(cache, model, lambda m, ids=text: greedy(m, ids), reference)


def test_classifier_free_guidance() -> None:
    """A logits processor that runs the model itself, with other prompts, in the middle of `generate()`."""
    model = tiny()
    reference = twin(model)
    cache = make_cache(model)
    negative = prompt(7, seed=3)
    for extra in (dict(), dict(negative_prompt_ids=negative)):
        for _ in range(2):
            expect_same(
                cache, model, lambda m, extra=extra: greedy(m, IDS, guidance_scale=1.7, **extra), reference
            )
            expect_same(cache, model, lambda m: greedy(m, IDS), reference)


def test_generate_from_nothing() -> None:
    """Without a prompt `generate()` starts from the begin token."""
    model = tiny()
    reference = twin(model)
    cache = make_cache(model)
    for _ in range(2):
        expect_same(cache, model, lambda m: m.generate(max_new_tokens=6, do_sample=False), reference)


@pytest.mark.parametrize("arch", MAIN_ARCHS)
def test_model_forward_and_the_inner_model_called_directly(arch: str) -> None:
    """Without `model(...)` the outer hooks do not run; features of all positions are what such callers want."""
    model = tiny(arch)
    reference = twin(model)
    cache = make_cache(model)
    with torch.no_grad(), cache.attached(model):
        greedy(model, IDS)
        for _ in range(2):
            close(model.forward(IDS).logits, reference(IDS).logits)
            # (`base_model` of Gemma 3 is the model itself in transformers 4.57.)
            inner, right = (m.base_model if m.base_model is not m else m.model for m in (model, reference))
            close(inner(IDS).last_hidden_state, right(IDS).last_hidden_state)
            got = model.forward(IDS, use_cache=True).logits
            close(got[:, -1], reference(IDS).logits[:, -1])
    expect_same(cache, model, lambda m: greedy(m, IDS), reference)


def test_a_failed_call_leaves_nothing_for_the_next() -> None:
    """What a call asked for (`logits_to_keep`, labels) must not be taken for the wish of the next one."""
    model = tiny()
    reference = twin(model)
    cache = make_cache(model)
    with torch.no_grad(), cache.attached(model):
        greedy(model, IDS)
        for bad in (dict(logits_to_keep=1), dict(labels=IDS[:, :3]), dict(output_hidden_states=True)):
            with pytest.raises(Exception):  # noqa: B017
                model(torch.tensor([[999]]), **bad)
            close(model(IDS).logits, reference(IDS).logits)
            close(model.forward(IDS).logits, reference(IDS).logits)
            got = model(IDS, use_cache=True, logits_to_keep=2).logits
            close(got, reference(IDS, logits_to_keep=2).logits)
    books(cache)


@pytest.mark.parametrize("arch", MAIN_ARCHS)
def test_a_batch_without_mask_or_positions(arch: str) -> None:
    model = tiny(arch)
    reference = twin(model)
    cache = make_cache(model)
    batch = torch.cat([IDS, join(IDS[:, :9], prompt(13, seed=1)), prompt(22, seed=2)])

    def call(m: Any) -> torch.Tensor:
        with torch.no_grad():
            out = m(batch, use_cache=True)
            return join(
                out.logits[:, -1:].argmax(-1),
                m(batch[:, :2], use_cache=True, **{cache_keyword(m): cache_of(out)}).logits.argmax(-1),
            )

    for hits in ((), (21, 21, 21)):
        expect_same(cache, model, call, reference)
        if hits:
            expect_hits(cache, *hits)


@pytest.mark.parametrize("arch", MAIN_ARCHS)
def test_plain_positions_given_by_hand(arch: str) -> None:
    model = tiny(arch)
    reference = twin(model)
    cache = make_cache(model)
    place = torch.arange(22)[None]
    with torch.no_grad():
        expected = reference(IDS, position_ids=place).logits[:, -1]
        for _ in range(2):
            with cache.attached(model):
                close(model(IDS, position_ids=place, use_cache=True).logits[:, -1], expected)
    expect_hits(cache, 21)


@pytest.mark.parametrize("arch", ["llama_gqa", "gpt2"])
def test_keys_and_values_can_be_read(arch: str) -> None:
    """Code that looks into the layers of a cache finds `[rows, heads, tokens, head size]`."""
    model = tiny(arch)
    reference = twin(model)
    cache = make_cache(model)
    with torch.no_grad():
        expected = cache_of(reference(IDS, use_cache=True))
        for _ in range(2):
            with cache.attached(model):
                got = cache_of(model(IDS, use_cache=True))
            assert got.get_seq_length() == 22
            assert len(got) == len(expected) == 2
            for mine, theirs in zip(got.layers, expected.layers, strict=True):
                close(mine.keys, theirs.keys)
                close(mine.values, theirs.values)


@pytest.mark.parametrize("arch", MAIN_ARCHS)
def test_rows_repeated_and_selected(arch: str) -> None:
    """Recipes fork a prompt into many answers by hand: `batch_repeat_interleave`, then `batch_select_indices`."""
    model = tiny(arch)
    reference = twin(model)
    cache = make_cache(model)

    def call(m: Any) -> torch.Tensor:
        keyword = cache_keyword(m)
        with torch.no_grad():
            past = cache_of(m(IDS, use_cache=True))
            past.batch_repeat_interleave(3)
            tails = torch.cat([prompt(4, seed=i) for i in range(3)])
            a = m(tails, use_cache=True, **{keyword: past}).logits[:, -1:].argmax(-1)
            past.batch_select_indices(torch.tensor([2, 0]))
            b = m(a[[2, 0]], use_cache=True, **{keyword: past}).logits[:, -1:].argmax(-1)
        return torch.cat([a, b])

    for _ in range(2):
        expect_same(cache, model, call, reference)
    for i in range(3):
        ids = join(IDS, prompt(4, seed=i), prompt(2, seed=9))
        expect_same(cache, model, lambda m, ids=ids: greedy(m, ids), reference)


def test_rows_reordered_by_hand() -> None:
    model = tiny()
    reference = twin(model)
    cache = make_cache(model)
    batch = torch.cat([IDS, join(IDS[:, :9], prompt(13, seed=1)), prompt(22, seed=2)])
    order = torch.tensor([2, 2, 0])

    def call(m: Any) -> torch.Tensor:
        with torch.no_grad():
            past = cache_of(m(batch, use_cache=True))
            past.reorder_cache(order)
            return m(
                prompt(5, seed=4).repeat(3, 1), use_cache=True, **{cache_keyword(m): past}
            ).logits.argmax(-1)

    for _ in range(2):
        expect_same(cache, model, call, reference)
    for row in batch[order]:
        ids = join(row[None], prompt(5, seed=4), prompt(2, seed=5))
        expect_same(cache, model, lambda m, ids=ids: greedy(m, ids), reference)


# ------------------------------------------------------------------------- surroundings that change the KV


def test_autocast_has_kv_of_its_own() -> None:
    """Under autocast keys and values are bfloat16 of lower precision: they never serve a full-precision call."""
    model = tiny()
    reference = twin(model)
    cache = make_cache(model)
    texts = [IDS, join(IDS, prompt(5, seed=1)), IDS]

    def low(m: Any, ids: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = m.generate(
                ids, max_new_tokens=1, do_sample=False, return_dict_in_generate=True, output_logits=True
            )
        return out.logits[0].float()

    def exact(m: Any, ids: torch.Tensor) -> torch.Tensor:
        return m.generate(
            ids, max_new_tokens=1, do_sample=False, return_dict_in_generate=True, output_logits=True
        ).logits[0]

    with cache.attached(model):
        for ids in texts:
            torch.testing.assert_close(low(model, ids), low(reference, ids), rtol=0, atol=0.3)
            close(exact(model, ids), exact(reference, ids))
            torch.testing.assert_close(low(model, ids), low(reference, ids), rtol=0, atol=0.3)
    books(cache)


def test_dropout_that_is_on_in_a_model_that_is_not_training() -> None:
    """Monte-Carlo dropout: `model.eval()`, then the dropout layers alone back to training. Random KV is not reused."""
    model = tiny("gpt2")
    reference = twin(model)
    cache = make_cache(model)

    def seeded(m: Any) -> torch.Tensor:
        torch.manual_seed(5)
        return greedy(m, IDS)

    expect_same(cache, model, seeded, reference)
    for m in (model, reference):
        for module in m.modules():
            if isinstance(module, torch.nn.Dropout):
                module.train()
    for _ in range(2):
        expect_same(cache, model, seeded, reference)
    for m in (model, reference):
        m.eval()
    expect_same(cache, model, seeded, reference)


def test_gradient_checkpointing_switched_on_for_the_next_training() -> None:
    model = tiny()
    model.gradient_checkpointing_enable()
    reference = twin(model)
    cache = make_cache(model)
    for _ in range(2):
        expect_same(cache, model, lambda m: greedy(m, IDS), reference)
    expect_hits(cache, 21)


def test_a_custom_generate_function() -> None:
    """`custom_generate` receives a prepared cache and runs its own loop."""

    def mine(
        model: Any, input_ids: torch.Tensor, generation_config: Any = None, **kwargs: Any
    ) -> torch.Tensor:
        past, current, tokens = kwargs.get(cache_keyword(model)), input_ids, []
        for _ in range(5):
            out = model(current, use_cache=True, logits_to_keep=1, **{cache_keyword(model): past})
            past = cache_of(out)
            current = out.logits[:, -1:].argmax(-1)
            tokens.append(current)
        return join(input_ids, *tokens)

    model = tiny()
    reference = twin(model)
    cache = make_cache(model)
    call: Callable[[Any], torch.Tensor] = lambda m: m.generate(IDS, custom_generate=mine)  # noqa: E731
    plain(lambda: call(reference))
    for _ in range(2):
        expect_same(cache, model, call, reference)
    expect_hits(cache, 21)


@pytest.mark.parametrize("new", [0, 1])
def test_no_new_token_or_one(new: int) -> None:
    model = tiny()
    reference = twin(model)
    cache = make_cache(model)

    def outcome(m: Any) -> Any:
        try:
            return m.generate(IDS, max_new_tokens=new, do_sample=False).tolist()
        except Exception as error:
            return type(error).__name__

    expected = outcome(reference)
    for _ in range(2):
        with cache.attached(model):
            assert outcome(model) == expected
        books(cache)


def test_a_model_used_through_a_wrapper_module() -> None:
    """A module that owns the model and calls it is no concern of the cache."""

    class Owner(torch.nn.Module):
        def __init__(self, inner: Any) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return greedy(self.inner, ids)

    model = tiny()
    reference = twin(model)
    cache = make_cache(model)
    owner = Owner(model)
    for _ in range(2):
        with cache.attached(model):
            same(owner(IDS), greedy(reference, IDS))
    expect_hits(cache, 21)
    assert NULL or cache.stats.requests == 2


def test_an_interrupt_while_decoding_says_nothing_to_a_later_call_of_the_inner_model() -> None:
    """torch runs no hooks after a KeyboardInterrupt, so what the call wanted must not be kept for its end."""
    model = tiny()
    reference = twin(model)
    cache = make_cache(model)
    steps: list[int] = []

    def stop(*_: Any) -> None:
        steps.append(1)
        if len(steps) == 4:
            raise KeyboardInterrupt

    with cache.attached(model):
        handle = model.model.layers[0].register_forward_hook(stop)
        with pytest.raises(KeyboardInterrupt):
            greedy(model, IDS)
        handle.remove()
        with torch.no_grad():
            close(model.model(IDS).last_hidden_state, reference.model(IDS).last_hidden_state)
    cache.check()
