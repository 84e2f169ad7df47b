from __future__ import annotations

import torch

from radixkv.demo.tiny import make_byte_tokenizer, make_tiny, make_tiny_model


def test_a_token_is_a_byte():
    tokenizer = make_byte_tokenizer()
    text = "Héllo — 東京\n\t <bos?> "
    ids = tokenizer(text).input_ids
    assert ids == [256, *text.encode()]
    assert set(tokenizer(text)) == {"input_ids", "attention_mask"}
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    every_byte = bytes(range(256))
    assert [tokenizer.convert_tokens_to_ids(tokenizer.convert_ids_to_tokens(b)) for b in every_byte] == [
        *every_byte
    ]


def test_the_same_seed_gives_the_same_model_and_leaves_the_callers_random_numbers():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first, second, other = make_tiny_model(1), make_tiny_model(1), make_tiny_model(2)
    assert torch.equal(torch.rand(3), expected)
    weights = [model.lm_head.weight for model in (first, second, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_answers_are_printable_and_depend_on_the_prompt():
    model, tokenizer = make_tiny()
    answers = set()
    for prompt in ("Good morning.", "Good evening."):
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False)
        new = out[0, ids.shape[1] :].tolist()
        assert len(new) == 20
        text = tokenizer.decode(new)
        assert text.isascii()
        assert tokenizer(text).input_ids[1:] == new
        answers.add(text)
    assert len(answers) == 2


def test_what_a_loop_of_ones_own_answers_is_what_generate_answers():
    """Padding is not the start, so no mask is needed, and the largest logit is that of a printable token."""
    model, tokenizer = make_tiny()
    texts = ["Good morning.", "What is the capital of France, and why?", "\n"]
    for text in texts:
        ids = tokenizer(text, return_tensors="pt").input_ids
        expected = model.generate(ids, max_new_tokens=12, do_sample=False)
        loop = ids
        with torch.no_grad():
            while loop.shape[1] < expected.shape[1]:
                loop = torch.cat([loop, model(loop).logits[:, -1:].argmax(-1)], dim=1)
        assert loop.tolist() == expected.tolist()
    tokenizer.padding_side = "left"
    batch = tokenizer(texts, return_tensors="pt", padding=True)
    assert batch.input_ids[0, 0] == tokenizer.pad_token_id != tokenizer.bos_token_id
    together = model.generate(**batch, max_new_tokens=12, do_sample=False)
    assert (
        together[1].tolist()[-12:]
        == model.generate(**tokenizer(texts[1], return_tensors="pt"), max_new_tokens=12, do_sample=False)[
            0
        ].tolist()[-12:]
    )
