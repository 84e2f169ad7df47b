"""Weights that change, adapters that are switched, activations that are steered: no call gets KV of another model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hf_testkit import (
    MAIN_ARCHS,
    NULL,
    books,
    both_ways,
    cache_keyword,
    expect_hits,
    expect_same,
    greedy,
    join,
    make_cache,
    needs_cache,
    prompt,
    right_or_clear_error,
    rows,
    same,
    tiny,
    twin,
)

pytestmark = pytest.mark.filterwarnings("default")

IDS = prompt(24)


def fill_gradients(model: Any, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def step(kind: str) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        fill_gradients(model)
        optimizer = {
            "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
            "sgd fused": lambda p: torch.optim.SGD(p, lr=0.05, fused=True),
            "adamw": lambda p: torch.optim.AdamW(p, lr=0.05),
            "adamw foreach": lambda p: torch.optim.AdamW(p, lr=0.05, foreach=True),
            "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.05, fused=True),
            "adagrad fused": lambda p: torch.optim.Adagrad(p, lr=0.05, fused=True),
        }[kind](model.parameters())
        optimizer.step()
        model.zero_grad()

    return change


def other_state(model: Any) -> dict[str, torch.Tensor]:
    return {key: value * 1.1 + 0.01 for key, value in model.state_dict().items()}


def load(**how: Any) -> Callable[[Any], None]:
    return lambda model: model.load_state_dict(other_state(model), **how) and None


@torch.no_grad()
def in_place(model: Any) -> None:
    for parameter in model.parameters():
        parameter.mul_(1.1)


@torch.inference_mode()
def in_place_in_inference_mode(model: Any) -> None:
    for parameter in model.parameters():
        parameter.mul_(1.1)


def data_in_place(model: Any) -> None:
    """What EMA code and RL weight transfers write; the version counter of the parameter does not move."""
    for parameter in model.parameters():
        parameter.data.mul_(1.1)


def data_copied(model: Any) -> None:
    for parameter in model.parameters():
        parameter.data.copy_(parameter.data * 1.1)


def data_replaced(model: Any) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data * 1.1


def a_projection(model: Any) -> torch.Tensor:
    """A matrix in the first layer that the keys or values depend on."""
    first = (model.model.layers if hasattr(model, "model") else model.transformer.h)[0]
    return next(p for name, p in first.named_parameters() if "k_proj" in name or "c_attn.weight" in name)


def one_weight_by_data(model: Any) -> None:
    projection = [
        p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name and "wte" not in name
    ]
    projection[1].data.mul_(-1.0)


def through_numpy(model: Any) -> None:
    for parameter in model.parameters():
        array = parameter.detach().numpy()
        array *= 1.1


@torch.no_grad()
def one_weight(model: Any) -> None:
    projection = [
        p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name and "wte" not in name
    ]
    projection[1].mul_(-1.0)


def new_embeddings(model: Any) -> None:
    table = torch.nn.Embedding(64, 32).eval()  # new modules are in training mode
    with torch.no_grad():
        table.weight.copy_(model.get_input_embeddings().weight.flip(0))
    model.set_input_embeddings(table)
    model.tie_weights()


def replaced_parameter(model: Any) -> None:
    module = model.get_input_embeddings()
    module.weight = torch.nn.Parameter(module.weight.detach() * 1.1)
    model.tie_weights()


CHANGES: dict[str, Callable[[Any], None]] = {
    **{f"step of {kind}": step(kind) for kind in ("sgd", "adamw", "adamw foreach")},
    **{f"step of {kind}": step(kind) for kind in ("sgd fused", "adamw fused", "adagrad fused")},
    "load_state_dict": load(),
    "load_state_dict(assign=True)": load(assign=True),
    "in place": in_place,
    "in place in inference mode": in_place_in_inference_mode,
    "one weight": one_weight,
    "new embeddings": new_embeddings,
    "a replaced parameter": replaced_parameter,
    ".data = new": data_replaced,
    ".data in place": data_in_place,
    ".data.copy_": data_copied,
    ".data of one weight": one_weight_by_data,
    "through numpy": through_numpy,
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("arch", ["llama_gqa", "gpt2"])
def test_changed_weights_between_calls(arch: str, change: str) -> None:
    """While attached, with no word to the cache; the answers before and after must differ for the test to mean much."""
    model = tiny(arch)
    cache = make_cache(model)
    long = join(IDS, prompt(4, seed=1))
    with cache.attached(model):
        before = greedy(model, IDS)
        greedy(model, IDS)
        expect_hits(cache, 23)
        CHANGES[change](model)
        reference = twin(model)
        expected = greedy(reference, IDS)
        same(greedy(model, IDS), expected)
        expect_hits(cache, 0)
        same(greedy(model, IDS), expected)
        expect_hits(cache, 23)
        same(greedy(model, long), greedy(reference, long))
    assert before.tolist() != expected.tolist()
    books(cache)


@pytest.mark.parametrize("change", CHANGES)
def test_changed_weights_while_detached(change: str) -> None:
    model = tiny()
    cache = make_cache(model)
    expect_same(cache, model, lambda m: greedy(m, IDS))
    CHANGES[change](model)
    expect_same(cache, model, lambda m: greedy(m, IDS))
    expect_same(cache, model, lambda m: greedy(m, IDS))
    expect_hits(cache, 23)


@pytest.mark.parametrize("layout", ["transposed", "part of a larger matrix"])
def test_data_of_a_weight_that_is_not_contiguous(layout: str) -> None:
    model = tiny()
    module = model.model.layers[0].self_attn.k_proj
    weight = module.weight.detach()
    weight = (
        weight.t().contiguous().t()
        if layout == "transposed"
        else torch.cat([weight, weight], 1)[:, : weight.shape[1]]
    )
    module.weight = torch.nn.Parameter(weight)
    assert not module.weight.is_contiguous()
    cache = make_cache(model)
    expect_same(cache, model, lambda m: greedy(m, IDS))
    module.weight.data.mul_(-1.0)
    expect_same(cache, model, lambda m: greedy(m, IDS))
    expect_hits(cache, 0)


@both_ways
@pytest.mark.parametrize("change", ["in place", "step of adamw fused", ".data in place"])
def test_weights_changed_during_a_session(change: str) -> None:
    """KV of the old and of the new weights never meet in the cache (FC-39)."""
    model = tiny()
    cache = make_cache(model)
    with cache.session(IDS) as past, torch.no_grad():
        model(IDS[:, past.num_cached_tokens :], **{cache_keyword(model): past})
        with torch.enable_grad():
            CHANGES[change](model)
        model(prompt(5, seed=1), **{cache_keyword(model): past})
    books(cache)
    for text in (IDS, join(IDS, prompt(5, seed=1)), join(IDS, prompt(7, seed=1))):
        expect_same(cache, model, lambda m, ids=text: greedy(m, ids))


@both_ways
def test_weights_changed_by_a_streamer_in_the_middle_of_generate() -> None:
    model = tiny()

    class Changer:
        puts = 0

        def put(self, value: torch.Tensor) -> None:
            self.puts += 1
            if self.puts == 4:
                in_place(model)

        def end(self) -> None: ...

    cache = make_cache(model)
    with cache.attached(model):
        answered = greedy(model, IDS, streamer=Changer())
    books(cache)
    for text in (IDS, answered, join(answered, prompt(3))):
        expect_same(cache, model, lambda m, ids=text: greedy(m, ids))


@both_ways
def test_training_between_generations() -> None:
    """A loop of the kind RL code has: generate, learn from it, generate again, all while attached."""
    model = tiny()
    cache = make_cache(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with cache.attached(model):
        for _ in range(4):
            reference = twin(model)
            same(greedy(model, IDS), greedy(reference, IDS))
            answered = greedy(model, IDS)
            expect_hits(cache, 23)
            loss = model(answered, labels=answered).loss
            torch.testing.assert_close(loss, reference(answered, labels=answered).loss)
            loss.backward()
            assert all(parameter.grad is not None for parameter in model.parameters())
            optimizer.step()
            optimizer.zero_grad()
    books(cache)


@needs_cache
def test_invalidate() -> None:
    """The documented way to say that something changed behind the cache's back."""
    model = tiny()
    cache = make_cache(model)
    with cache.attached(model):
        greedy(model, IDS)
        greedy(model, IDS)
        expect_hits(cache, 23)
        cache.invalidate()
        assert cache.match_length(IDS[0]) == 0
        greedy(model, IDS)
        expect_hits(cache, 0)
        greedy(model, IDS)
        expect_hits(cache, 23)
    books(cache)


@both_ways
@needs_cache
def test_invalidate_during_a_session() -> None:
    """FC-39: refused, or what the running session holds is never committed."""
    model = tiny()
    reference = twin(model)
    cache = make_cache(model)
    with cache.attached(model):
        greedy(model, IDS[:, :10])
    with cache.session(IDS) as past, torch.no_grad():
        out = model(IDS[:, past.num_cached_tokens :], **{cache_keyword(model): past})
        try:
            cache.invalidate()
        except Exception as error:
            from radixkv import errors

            assert isinstance(error, errors.RadixKVError)  # noqa: PT017
            refused = True
        else:
            refused = False
        del out
    books(cache)
    if not refused:
        assert cache.match_length(IDS[0]) == 0
    expect_same(cache, model, lambda m: greedy(m, IDS), reference)


@both_ways
def test_steering_by_a_forward_hook() -> None:
    """A hook that adds a direction to a layer's output makes other KV; so does taking it away again."""
    model = tiny()
    reference = twin(model)
    direction = torch.randn(32, generator=torch.Generator().manual_seed(1))

    def steer(module: Any, inputs: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (output[0] + direction, *output[1:])
        return output + direction

    cache = make_cache(model)
    with cache.attached(model):
        plain_answer = greedy(reference, IDS)
        same(greedy(model, IDS), plain_answer)
        for _ in range(2):
            mine = model.model.layers[0].register_forward_hook(steer)
            theirs = reference.model.layers[0].register_forward_hook(steer)
            steered = greedy(reference, IDS)
            assert steered.tolist() != plain_answer.tolist()
            same(greedy(model, IDS), steered)
            same(greedy(model, IDS), steered)
            mine.remove()
            theirs.remove()
            same(greedy(model, IDS), plain_answer)
    books(cache)


@both_ways
def test_a_replaced_forward_of_one_layer() -> None:
    """Patching a method of a module steers as well."""
    model = tiny()
    reference = twin(model)
    cache = make_cache(model)

    def patch(m: Any) -> Callable[[], None]:
        mlp = m.model.layers[0].mlp
        plain_forward = mlp.forward
        mlp.forward = lambda x: plain_forward(x) * 0.5
        return lambda: mlp.__dict__.pop("forward")

    with cache.attached(model):
        plain_answer = greedy(reference, IDS)
        same(greedy(model, IDS), plain_answer)
        undo = [patch(model), patch(reference)]
        patched = greedy(reference, IDS)
        assert patched.tolist() != plain_answer.tolist()
        same(greedy(model, IDS), patched)
        for restore in undo:
            restore()
        same(greedy(model, IDS), plain_answer)


def test_a_hook_that_only_looks_does_not_stop_the_hits() -> None:
    """Profilers and counters: there before the cache came, they stay, see the shorter forwards, and hits go on."""
    model = tiny()
    seen: list[int] = []
    model.model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append((args[0] if args else kwargs["input_ids"]).shape[1]),
        with_kwargs=True,
    )
    reference = twin(model)
    cache = make_cache(model)
    for _ in range(3):
        expect_same(cache, model, lambda m: greedy(m, IDS, 4), reference)
    expect_hits(cache, 23)
    assert len(seen) >= 3 * 4


@both_ways
def test_the_float_type_changed() -> None:
    """While attached the result is right; a pool of the wrong type may be refused when it is attached anew."""
    model = tiny()
    cache = make_cache(model)
    with cache.attached(model):
        greedy(model, IDS)
        model.to(torch.float64)
        expected = greedy(twin(model).double(), IDS)
        for _ in range(2):
            same(greedy(model, IDS), expected)
    books(cache)

    def attach_again() -> torch.Tensor:
        with cache.attached(model):
            return greedy(model, IDS)

    right_or_clear_error(attach_again, lambda got: same(got, expected))
    model.to(torch.float32)
    for _ in range(2):
        expect_same(cache, model, lambda m: greedy(m, IDS))


def test_the_rope_base_changed_in_the_config_has_its_own_kv() -> None:
    """Something a user may do for long contexts; the frequencies are a buffer of the model."""
    model = tiny()
    cache = make_cache(model)
    expect_same(cache, model, lambda m: greedy(m, IDS))
    model.model.rotary_emb.inv_freq.mul_(0.5)
    reference = twin(model)
    reference.model.rotary_emb.inv_freq.mul_(0.5)
    expect_same(cache, model, lambda m: greedy(m, IDS), reference)


# ------------------------------------------------------------------------------------------------ adapters


def with_adapters(model: Any) -> Any:
    peft = pytest.importorskip("peft")
    target = ["q_proj", "v_proj"] if hasattr(model, "model") else ["c_attn"]
    config = dict(r=4, lora_alpha=16, target_modules=target, init_lora_weights=False)
    with torch.random.fork_rng():
        torch.manual_seed(7)
        try:
            wrapped = peft.get_peft_model(model, peft.LoraConfig(**config), adapter_name="one")
            wrapped.add_adapter("two", peft.LoraConfig(**config))
        except Exception as error:
            pytest.skip(f"peft does not work with this version of transformers: {error!r}")
    return wrapped.eval()


STATES: dict[str, Callable[[Any], Any]] = {
    "one": lambda peft: peft.set_adapter("one"),
    "two": lambda peft: peft.set_adapter("two"),
    "none": lambda peft: peft.base_model.disable_adapter_layers(),
    "again": lambda peft: peft.base_model.enable_adapter_layers(),
}


@both_ways
@pytest.mark.parametrize("arch", ["llama_gqa", "gpt2"])
@pytest.mark.parametrize("attach_to", ["the inner model", "the peft model"])
def test_adapters_switched_between_calls(arch: str, attach_to: str) -> None:
    wrapped = with_adapters(tiny(arch))
    inner = wrapped.get_base_model()
    order = ["one", "two", "one", "none", "again", "two", "none", "again", "one"]
    expected = {}
    for name in order:
        STATES[name](wrapped)
        key = (wrapped.active_adapter, name == "none")
        expected[key] = greedy(wrapped, IDS)
    assert len({tuple(value[0].tolist()) for value in expected.values()}) > 2
    wrapped.base_model.enable_adapter_layers()
    target = inner if attach_to == "the inner model" else wrapped
    cache = make_cache(target)
    with cache.attached(target):
        for name in order * 2:
            STATES[name](wrapped)
            key = (wrapped.active_adapter, name == "none")
            same(greedy(wrapped, IDS), expected[key])
            same(greedy(inner, IDS), expected[key])
        if not NULL:  # switching back finds the KV of that adapter
            assert rows(cache)[0][1] == 23
    books(cache)


@both_ways
def test_disable_adapter_as_a_context() -> None:
    wrapped = with_adapters(tiny())
    inner = wrapped.get_base_model()
    with_one = greedy(wrapped, IDS)
    with wrapped.disable_adapter():
        without = greedy(wrapped, IDS)
    assert with_one.tolist() != without.tolist()
    cache = make_cache(inner)
    with cache.attached(inner):
        for _ in range(2):
            same(greedy(wrapped, IDS), with_one)
            with wrapped.disable_adapter():
                same(greedy(wrapped, IDS), without)
                same(greedy(wrapped, IDS), without)
        expect_hits(cache, 23)
    books(cache)


@both_ways
def test_merge_and_unmerge() -> None:
    wrapped = with_adapters(tiny())
    inner = wrapped.get_base_model()
    cache = make_cache(inner)
    expected = greedy(wrapped, IDS)
    with cache.attached(inner):
        same(greedy(wrapped, IDS), expected)
        wrapped.set_adapter("two")
        cache_free = greedy(wrapped, IDS)
        cache.detach()
        second = greedy(wrapped, IDS)
        same(cache_free, second)
        cache.attach(inner)
        wrapped.merge_adapter()
        same(greedy(wrapped, IDS), second)
        wrapped.unmerge_adapter()
        same(greedy(wrapped, IDS), second)
        wrapped.set_adapter("one")
        same(greedy(wrapped, IDS), expected)
    books(cache)


@both_ways
def test_the_scaling_and_the_weights_of_an_adapter() -> None:
    wrapped = with_adapters(tiny())
    inner = wrapped.get_base_model()
    cache = make_cache(inner)

    def scale(factor: float) -> None:
        for module in wrapped.modules():
            if isinstance(getattr(module, "scaling", None), dict):
                module.scaling["one"] *= factor

    def train(sign: float) -> None:
        with torch.no_grad():
            for name, parameter in wrapped.named_parameters():
                if "lora_B.one" in name:
                    parameter.mul_(sign)

    answers = []
    for change in (
        lambda: None,
        lambda: scale(-2.0),
        lambda: scale(-0.5),
        lambda: train(-1.0),
        lambda: train(-1.0),
    ):
        change()
        expected = greedy(wrapped, IDS)
        answers.append(tuple(expected[0].tolist()))
        with cache.attached(inner):
            for _ in range(2):
                same(greedy(wrapped, IDS), expected)
        expect_hits(cache, 23)
    assert len(set(answers)) == 3


@both_ways
@pytest.mark.parametrize("arch", MAIN_ARCHS)
def test_two_models_with_two_caches(arch: str) -> None:
    """The same ids in two models at once: nothing is shared between caches."""
    one, two = tiny(arch, seed=1), tiny(arch, seed=2)
    reference_one, reference_two = twin(one), twin(two)
    first, second = make_cache(one), make_cache(two)
    with first.attached(one), second.attached(two):
        for _ in range(2):
            same(greedy(one, IDS), greedy(reference_one, IDS))
            same(greedy(two, IDS), greedy(reference_two, IDS))
    expect_hits(first, 23)
    expect_hits(second, 23)
