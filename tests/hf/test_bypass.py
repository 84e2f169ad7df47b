"""What cannot be cached safely is passed through untouched, bit for bit, and counted by reason."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_testkit import (
    MAIN_ARCHS,
    NULL,
    TRANSFORMERS,
    books,
    cache_keyword,
    cache_of,
    expect_hits,
    expect_same,
    expect_totals,
    greedy,
    join,
    make_cache,
    needs_cache,
    pad_left,
    plain,
    prompt,
    tiny,
    twin,
)
from transformers import StaticCache

pytestmark = pytest.mark.filterwarnings("default")

IDS = prompt(18)
HOLES = torch.tensor([[1, 1, 0, 1, 1] + [1] * 9 + [0, 1, 1, 1]])
RIGHT = torch.tensor([[1] * 14 + [0] * 4])


def bits(value: Any) -> Any:
    """All tensors of a result as plain lists; cache objects are left out."""
    if isinstance(value, torch.Tensor):
        return (tuple(value.shape), value.detach().tolist())
    if isinstance(value, dict):
        return {key: bits(item) for key, item in value.items() if key not in ("cache", "past_key_values")}
    if isinstance(value, (tuple, list)):
        return [bits(item) for item in value]
    return value if isinstance(value, (int, float, str, bool, type(None))) else type(value).__name__


def forward(**kwargs: Any) -> Callable[[Any], Any]:
    """One forward that could be served from the cache if it were not for `kwargs`."""

    def call(model: Any) -> Any:
        with torch.no_grad():
            return dict(model(**{"input_ids": IDS, "use_cache": True, **kwargs}))

    return call


def generate(**kwargs: Any) -> Callable[[Any], Any]:
    def call(model: Any) -> Any:
        arguments = {"input_ids": IDS, "max_new_tokens": 5, "do_sample": False, **kwargs}
        return model.generate(**arguments)

    return call


def own_cache(model: Any) -> Any:
    """A cache that plain code has filled before, out of the plug-in's sight."""
    with torch.no_grad():
        past = cache_of(twin(model)(IDS[:, :9], use_cache=True))
        return dict(model(IDS[:, 9:], use_cache=True, **{cache_keyword(model): past}))


def generate_with_own_cache(model: Any) -> Any:
    with torch.no_grad():
        past = cache_of(twin(model)(IDS[:, :9], use_cache=True))
    return greedy(model, IDS, 5, **{cache_keyword(model): past})


def static_object(model: Any) -> Any:
    return greedy(model, IDS, 5, **{cache_keyword(model): StaticCache(config=model.config, max_cache_len=64)})


def embeds_forward(model: Any) -> Any:
    embeds = torch.randn(1, 18, 32, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        return dict(model(inputs_embeds=embeds, use_cache=True))


def embeds_generate(model: Any) -> Any:
    embeds = torch.randn(1, 18, 32, generator=torch.Generator().manual_seed(3))
    return model.generate(inputs_embeds=embeds, max_new_tokens=5, do_sample=False)


def training(model: Any) -> Any:
    model.train()
    torch.manual_seed(0)  # GPT-2 has dropout
    try:
        with torch.no_grad():
            return dict(model(IDS, use_cache=True))
    finally:
        model.eval()


def with_gradients(model: Any) -> Any:
    model.zero_grad()
    out = model(IDS, use_cache=True)
    out.logits[:, -1].sum().backward()
    return dict(logits=out.logits, gradients=[parameter.grad for parameter in model.parameters()])


def causal_4d(model: Any) -> Any:
    mask = torch.full((18, 18), torch.finfo(torch.float32).min).triu(1)[None, None]
    mask[..., 5:, 3] = torch.finfo(torch.float32).min  # not the usual one
    return forward(attention_mask=mask)(model)


SHIFTED = torch.arange(3, 21)[None]
ALL_CASES: dict[str, tuple[Callable[[Any], Any], set[str]]] = {
    "own cache": (own_cache, {"own_cache"}),
    "own cache in generate": (generate_with_own_cache, {"own_cache"}),
    "use_cache=False": (forward(use_cache=False), {"use_cache_false"}),
    "use_cache=False in generate": (generate(use_cache=False), {"use_cache_false"}),
    "embeds": (embeds_forward, {"inputs_embeds"}),
    "embeds in generate": (embeds_generate, {"inputs_embeds"}),
    "holes": (forward(attention_mask=HOLES), {"attention_mask"}),
    "holes in generate": (generate(attention_mask=HOLES), {"attention_mask"}),
    "right padding": (forward(attention_mask=RIGHT), {"attention_mask"}),
    "right padding in generate": (generate(attention_mask=RIGHT), {"attention_mask"}),
    "4D mask": (causal_4d, {"attention_mask"}),
    "shifted positions": (forward(position_ids=SHIFTED), {"position_ids"}),
    "positions that jump": (forward(position_ids=torch.arange(18)[None] * 2), {"position_ids"}),
    "padding without positions": (forward(attention_mask=RIGHT.flip(-1)), {"position_ids", "attention_mask"}),
    "static": (generate(cache_implementation="static"), {"static_cache", "foreign_cache"}),
    "static object": (static_object, {"static_cache", "foreign_cache", "own_cache"}),
    "training": (training, {"training"}),
    "labels": (forward(labels=IDS), {"labels"}),
    "attentions": (forward(output_attentions=True), {"output_attentions"}),
    "hidden states": (forward(output_hidden_states=True), {"output_hidden_states"}),
    "hidden states in generate": (
        generate(output_hidden_states=True, return_dict_in_generate=True),
        {"output_hidden_states"},
    ),
    "attentions in generate": (
        generate(output_attentions=True, return_dict_in_generate=True),
        {"output_attentions"},
    ),
    "full logits": (lambda model: plain_forward(model), {"full_logits"}),
    "gradients": (with_gradients, {"grad"}),
}


def plain_forward(model: Any) -> Any:
    with torch.no_grad():
        return dict(logits=model(IDS).logits)


@pytest.mark.parametrize("case", ALL_CASES)
@pytest.mark.parametrize("arch", MAIN_ARCHS)
def test_passed_through_bit_for_bit(arch: str, case: str) -> None:
    """Cold and with the very prompt cached; afterwards the cache holds nothing wrong."""
    call, reasons = ALL_CASES[case]
    model = tiny(arch)
    if "attentions" in case:
        model.set_attn_implementation("eager")
    reference = twin(model)
    expected = bits(plain(lambda: call(reference)))
    cache = make_cache(model)
    with cache.attached(model):
        assert bits(call(model)) == expected
        cache.check()
        greedy(model, join(IDS, prompt(5, seed=1)), 6)
        assert bits(call(model)) == expected
    books(cache)
    expect_totals(cache)
    if not NULL:
        counted = {reason for reason, count in cache.stats.bypasses.items() if count}
        assert counted & reasons, f"counted as {counted}"
        assert counted <= reasons | {"full_logits"}
    # Nothing that was passed through has left anything wrong behind.
    for text in (IDS, join(IDS, prompt(5, seed=1)), join(IDS[:, :9], prompt(4, seed=2)), IDS[:, :14]):
        expect_same(cache, model, lambda m, ids=text: greedy(m, ids), reference)


SINGLE = [
    "use_cache=False",
    "embeds",
    "holes",
    "right padding",
    "shifted positions",
    "labels",
    "hidden states",
    "training",
    "full logits",
]


@needs_cache
@pytest.mark.parametrize("case", SINGLE)
def test_counted_once_for_each_forward(case: str) -> None:
    call, reasons = ALL_CASES[case]
    model = tiny()
    cache = make_cache(model)
    with cache.attached(model):
        for times in (1, 2, 3):
            call(model)
            assert sum(cache.stats.bypasses.get(reason, 0) for reason in reasons) == times
    assert sum(cache.stats.bypasses.values()) == 3
    cache.reset_stats()
    assert not any(cache.stats.bypasses.values())


@needs_cache
@pytest.mark.parametrize("case", [case for case in ALL_CASES if case not in ("full logits", "gradients")])
def test_one_warning_for_each_reason(case: str, caplog: pytest.LogCaptureFixture) -> None:
    """The first time says why; the hundredth does not repeat it. By `warnings` or by the library's logger."""
    call, _ = ALL_CASES[case]
    model = tiny()
    if "attentions" in case:
        model.set_attn_implementation("eager")
    reference = twin(model)
    with warnings.catch_warnings(record=True) as base:
        warnings.simplefilter("always")
        plain(lambda: call(reference))
    not_ours = {str(entry.message) for entry in base}
    cache = make_cache(model)

    def said() -> int:
        with caplog.at_level(logging.INFO), warnings.catch_warnings(record=True) as caught:
            caplog.clear()
            warnings.simplefilter("always")
            with cache.attached(model):
                call(model)
        ours = [entry for entry in caught if str(entry.message) not in not_ours]
        assert {Path(entry.filename).parent for entry in ours} <= {Path(__file__).parent}, "the user's line"
        logged = [record for record in caplog.records if record.name.startswith("radixkv")]
        return len(ours) + len(logged)

    assert said() == 1
    assert said() == 0


def test_token_type_ids_are_extra_input() -> None:
    """GPT-2 adds an embedding for them: the same ids, other KV."""
    model = tiny("gpt2")
    reference = twin(model)
    cache = make_cache(model)
    types = torch.randint(3, 60, (1, 18), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        expected = reference(IDS, token_type_ids=types, use_cache=True).logits
        with cache.attached(model):
            greedy(model, IDS)
            assert torch.equal(model(IDS, token_type_ids=types, use_cache=True).logits, expected)
    assert NULL or cache.stats.bypasses.get("extra_inputs") == 1
    expect_same(cache, model, lambda m: greedy(m, IDS), reference)
    expect_same(cache, model, lambda m: greedy(m, IDS, token_type_ids=types), reference)


def test_embeds_first_and_ids_later() -> None:
    """The ids that follow an embedded prompt have KV that depends on it: never stored under the ids alone."""
    model = tiny()
    reference = twin(model)
    cache = make_cache(model)
    embeds = torch.randn(1, 6, 32, generator=torch.Generator().manual_seed(3))
    tail = prompt(9, seed=4)

    def call(m: Any) -> torch.Tensor:
        with torch.no_grad():
            past = cache_of(m(inputs_embeds=embeds, use_cache=True))
            return m(tail, use_cache=True, **{cache_keyword(m): past}).logits

    expected = call(reference)
    with cache.attached(model):
        assert torch.equal(call(model), expected)
    for text in (tail, join(tail, prompt(3))):
        expect_same(cache, model, lambda m, ids=text: greedy(m, ids), reference)
    expect_hits(cache, 9)


def test_a_served_loop_that_turns_strange() -> None:
    """A loop that starts well and then jumps in its positions, masks a hole or feeds vectors: right, and not stored."""
    model = tiny()
    reference = twin(model)
    embeds = torch.randn(1, 3, 32, generator=torch.Generator().manual_seed(3))
    strange: list[dict[str, Any]] = [
        dict(input_ids=prompt(3, seed=1), position_ids=torch.tensor([[30, 31, 32]])),
        dict(input_ids=prompt(3, seed=1), attention_mask=torch.tensor([[1] * 8 + [0] * 4 + [1] * 9])),
        dict(inputs_embeds=embeds),
    ]
    for i, second in enumerate(strange):
        cache = make_cache(model)

        def call(m: Any, second: dict[str, Any] = second) -> torch.Tensor:
            with torch.no_grad():
                past = cache_of(m(IDS, use_cache=True))
                a = m(**second, use_cache=True, **{cache_keyword(m): past}).logits
                b = m(prompt(2, seed=2), use_cache=True, **{cache_keyword(m): past})
                return torch.cat([a, b.logits], 1)

        if i == 1:

            def call(m: Any, second: dict[str, Any] = second) -> torch.Tensor:
                with torch.no_grad():
                    past = cache_of(m(IDS, use_cache=True))
                    return m(**second, use_cache=True, **{cache_keyword(m): past}).logits

        expected = call(reference)
        for _ in range(2):
            with cache.attached(model):
                torch.testing.assert_close(call(model), expected, rtol=0, atol=2e-3)
        for text in (IDS, join(IDS, prompt(3, seed=1)), join(IDS, prompt(3, seed=1), prompt(2, seed=2))):
            expect_same(cache, model, lambda m, ids=text: greedy(m, ids), reference)


@pytest.mark.skipif(TRANSFORMERS < (5, 0), reason="older versions want optional packages for it")
@pytest.mark.parametrize(
    "implementation", ["offloaded", "quantized", "static", "dynamic", "hybrid", "sliding_window"]
)
def test_cache_implementations_asked_for(implementation: str) -> None:
    """Whatever plain transformers does with the name happens, the same error included."""
    model = tiny()
    reference = twin(model)
    cache = make_cache(model)

    def outcome(m: Any) -> Any:
        try:
            return greedy(m, IDS, 5, cache_implementation=implementation).tolist()
        except Exception as error:
            return type(error).__name__

    expected = outcome(reference)
    with cache.attached(model):
        for _ in range(2):
            assert outcome(model) == expected
    books(cache)
    expect_same(cache, model, lambda m: greedy(m, IDS), reference)


def test_a_static_cache_in_the_generation_config() -> None:
    model = tiny()
    model.generation_config.cache_implementation = "static"
    reference = twin(model)
    expected = plain(lambda: greedy(reference, IDS))
    cache = make_cache(model)
    with cache.attached(model):
        for _ in range(2):
            assert torch.equal(greedy(model, IDS), expected)
    books(cache)


def test_use_cache_false_in_the_config() -> None:
    model = tiny()
    model.config.use_cache = False
    reference = twin(model)
    cache = make_cache(model)

    def call(m: Any) -> torch.Tensor:
        with torch.no_grad():
            out = m(IDS, logits_to_keep=1)
        assert cache_of(out) is None
        return out.logits

    expected = call(reference)
    with cache.attached(model):
        for _ in range(2):
            assert torch.equal(call(model), expected)
    books(cache)


def test_a_padded_row_in_a_static_batch() -> None:
    model = tiny()
    reference = twin(model)
    cache = make_cache(model)
    batch = pad_left([prompt(6), prompt(11, seed=1)])
    call = dict(max_new_tokens=5, do_sample=False, cache_implementation="static")
    expected = plain(lambda: reference.generate(**batch, **call))
    with cache.attached(model):
        assert torch.equal(model.generate(**batch, **call), expected)
    expect_same(cache, model, lambda m: m.generate(**batch, max_new_tokens=5, do_sample=False), reference)
