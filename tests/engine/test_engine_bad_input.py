"""One clear error for what makes no sense; the others finish, nothing is lost, and the model works as before."""

from __future__ import annotations

import threading
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from engine_testkit import (
    alone,
    balanced,
    drained,
    family,
    make_engine,
    params,
    prompt,
    tiny,
    tokens_of,
    twin,
)
from hf_testkit import snapshot
from transformers import BatchEncoding

import radixkv
from radixkv import Engine
from radixkv.errors import InvalidRequestError


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny("llama_gqa")


BAD_PROMPTS = [
    ([], "empty"),
    (torch.empty(0, dtype=torch.long), "empty"),
    ([1, 2, 64], r"0\.\.63"),
    ([1, -2], r"0\.\.63"),
    ([1.0, 2.0], "integers"),
    (np.array([1.5]), "integers"),
    ([True, False], "integers"),
    ("some text", "tokenizer"),
    ([{"role": "user", "content": "hi"}], "tokenizer"),
    (None, "NoneType"),
    (b"bytes", "bytes"),
    ({5, 6}, "set"),
    (["a text", "another"], "one prompt at a time"),
    (BatchEncoding({"input_ids": [5, 6]}), "input_ids"),
    ([[1, 2], [3, 4]], "integers|one-dimensional"),
    (list(range(3, 60)) * 10, "512"),
]


@pytest.mark.parametrize(("bad", "match"), BAD_PROMPTS)
def test_a_bad_prompt_gets_an_error_of_its_own_and_the_others_finish(
    model: Any, bad: Any, match: str
) -> None:
    engine = make_engine(model)
    first, last = family(9, 3, 5)
    with pytest.raises(InvalidRequestError, match=match):
        engine.add_request(bad, params(4))
    drained(engine)
    with pytest.warns(UserWarning, match="1 of 3 completions failed") as caught:
        outs = engine.generate([first, bad, last], params(4))
    assert caught[0].filename == __file__
    assert [c.finish_reason for c in outs] == ["length", "error", "length"]
    assert isinstance(outs[1].error, InvalidRequestError)
    assert [c.prompt_index for c in outs] == [0, 1, 2]
    reference = twin(model)
    assert [outs[0].token_ids, outs[2].token_ids] == [alone(reference, p, 4) for p in (first, last)]
    drained(engine)


def test_a_prompt_that_can_never_fit_says_what_it_needs_and_what_exists(model: Any) -> None:
    engine = make_engine(model, num_blocks=8, block_size=16)
    with pytest.raises(InvalidRequestError, match=r"13.*8"):
        engine.add_request(prompt(200)[0], params(4))
    assert len(engine.generate(family(0, 5, 9, 30), params(4))) == 3
    drained(engine)


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"max_batched_tokens": 0}, "max_batched_tokens"),
        ({"max_num_seqs": True}, "max_num_seqs"),
        ({"max_seq_len": 100_000}, "max_seq_len"),
        ({"max_seq_len": 0}, "max_seq_len"),
        ({"preemption": "drop"}, "preemption"),
        ({"preemption": "swap"}, "host_memory"),
        ({"host_memory": "lots"}, "lots"),
        ({"preemption": "recompute", "host_memory": "1MiB"}, "host_memory"),
        ({"swap_cost": -1.0}, "swap_cost"),
        ({"order": "random"}, "order"),
        ({"watermark": 1.5}, "watermark"),
        ({"watermark": float("nan")}, "watermark"),
        ({"attention": "magic"}, "magic"),
        ({"max_overtakes": -1}, "max_overtakes"),
    ],
)
def test_options_that_make_no_sense(model: Any, kwargs: dict[str, Any], match: str) -> None:
    before = snapshot(model)
    with pytest.raises(InvalidRequestError, match=match):
        make_engine(model, **kwargs)
    assert snapshot(model) == before


def test_unknown_options_are_refused(model: Any) -> None:
    with pytest.raises(TypeError):
        make_engine(model, max_seqs=3)


def test_a_cache_brings_its_own_size(model: Any) -> None:
    cache = radixkv.PrefixCache.for_model(model, num_blocks=16)
    with pytest.raises(InvalidRequestError, match="num_blocks"):
        Engine(model, cache=cache, num_blocks=4)
    with pytest.raises(InvalidRequestError, match="must be a PrefixCache"):
        Engine(model, None, 8)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="tokenizer"):
        Engine(model, "gpt2")
    with pytest.raises(InvalidRequestError, match="another model"):
        Engine(tiny("llama_gqa", seed=1), cache=cache)


def test_a_model_in_training_mode_is_refused(model: Any) -> None:
    other = tiny("gpt2")
    engine = make_engine(other)
    other.train()
    with pytest.raises(InvalidRequestError, match="eval"):
        engine.generate([[5, 6, 7]], params(2))
    other.eval()
    assert engine.generate([[5, 6, 7]], params(2))[0].token_ids == alone(twin(other), [5, 6, 7], 2)
    drained(engine)


def test_a_second_engine_on_the_same_model(model: Any) -> None:
    one, two = make_engine(model), make_engine(model)
    rid = one.add_request([5, 6, 7], params(4))
    with pytest.raises(InvalidRequestError, match="another engine"):
        two.generate([[5, 6, 7]], params(2))
    with pytest.raises(InvalidRequestError, match="another engine"):
        two.add_request([5, 6, 7])
    one.step()
    assert one.abort(rid)
    assert two.generate([[5, 6, 7]], params(2))[0].finish_reason == "length"
    drained(one)
    drained(two)


def test_a_second_thread_gets_an_error_and_the_first_its_result(model: Any) -> None:
    engine = make_engine(model)
    inside, go_on = threading.Event(), threading.Event()

    def slow(*_: Any) -> None:
        inside.set()
        go_on.wait(20)

    ids = prompt(9)[0].tolist()
    outs: list[Any] = []
    handle = model.register_forward_pre_hook(slow)
    try:
        worker = threading.Thread(target=lambda: outs.extend(engine.generate([ids], params(3))))
        worker.start()
        assert inside.wait(20)
        calls = [
            lambda: engine.generate([ids], params(3)),
            lambda: engine.add_request(ids),
            lambda: engine.step(),
            lambda: engine.abort(0),
            lambda: engine.check(),
            lambda: engine.stream(ids),
        ]
        for call in calls:
            with pytest.raises(InvalidRequestError, match="another thread"):
                call()
        go_on.set()
        worker.join(20)
    finally:
        go_on.set()
        handle.remove()
    assert tokens_of(outs) == [alone(twin(model), ids, 3)]
    drained(engine)


def test_names_in_use_and_unknown_names(model: Any) -> None:
    engine = make_engine(model)
    assert engine.add_request([5, 6], params(2), rid="x") == "x"
    with pytest.raises(InvalidRequestError, match="'x'"):
        engine.add_request([5, 6], params(2), rid="x")
    with pytest.raises(InvalidRequestError, match="hashable"):
        engine.add_request([5, 6], params(2), rid=[1])
    assert not engine.abort("y")
    assert engine.abort("x")
    assert not engine.abort("x")
    assert engine.has_unfinished, "somebody has to be told"
    (out,) = engine.step()
    assert out.completion is not None
    assert out.completion.finish_reason == "abort"
    assert not engine.has_unfinished
    assert engine.step() == []
    with pytest.raises(InvalidRequestError, match="fork"):
        engine.fork("x")
    drained(engine)


@pytest.mark.parametrize("sampling", [{"max_new_tokens": 3}, 3, "greedy", [params(2)]])
def test_sampling_that_is_none(model: Any, sampling: Any) -> None:
    engine = make_engine(model)
    with pytest.raises(InvalidRequestError, match="sampling"):
        engine.generate([[5, 6], [7, 8]], sampling)
    drained(engine)


def test_stop_strings_need_a_tokenizer(model: Any) -> None:
    engine = make_engine(model)
    with pytest.raises(InvalidRequestError, match="tokenizer"):
        engine.add_request([5, 6], params(2, stop="."))
    drained(engine)


def test_no_prompts_no_completions(model: Any) -> None:
    engine = make_engine(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert engine.generate([], params(2)) == []
        assert engine.step() == []
    drained(engine)


def test_prompts_in_all_their_shapes(model: Any) -> None:
    engine = make_engine(model)
    ids = [5, 6, 7, 8]
    expected = [alone(twin(model), ids, 3)]
    shapes: list[Any] = [
        [ids],
        ids,
        tuple(ids),
        range(5, 9),
        torch.tensor(ids),
        torch.tensor([ids], dtype=torch.int32),
        np.array([ids], dtype=np.uint8),
        [torch.tensor([ids])],
        {"input_ids": [ids]},
        {"input_ids": ids, "attention_mask": [1, 1, 1, 1]},
        {
            "input_ids": torch.tensor([[0, 0, *ids]]),
            "attention_mask": torch.tensor([[0, 0, 1, 1, 1, 1]]),
        },
        {"input_ids": torch.tensor([[*ids, 0]]), "attention_mask": torch.tensor([[1, 1, 1, 1, 0]])},
        {
            "input_ids": torch.tensor([[0, *ids]]),
            "attention_mask": torch.tensor([[False, True, True, True, True]]),
        },
        {"input_ids": [[0, *ids]], "attention_mask": [[0.0, 1.0, 1.0, 1.0, 1.0]]},
    ]
    for shape in shapes:
        assert tokens_of(engine.generate(shape, params(3))) == expected, shape
    bad_ones: list[Any] = [5, None, b"x", {"ids": [1]}, {"input_ids": 5}, {"input_ids": None}]
    bad_ones += [
        {"input_ids": [[1, 2, 3]], "attention_mask": mask} for mask in (5, [[1, 0, 1]], [[1, 2, 1]], [[1]])
    ]
    for bad in bad_ones:
        with pytest.raises(InvalidRequestError):
            engine.generate(bad, params(3))
    balanced(engine)
