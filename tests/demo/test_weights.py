from __future__ import annotations

import hashlib
import threading
import types
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from radixkv.demo import weights
from radixkv.demo.errors import DemoError


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("RADIXKV_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def fake_conversion(monkeypatch):
    """Conversion in no time; returns the list of folders that were made."""
    made = []

    def convert(gguf_file, folder, report):
        made.append(folder)
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr(weights, "join_parts", lambda path, report: path.write_bytes(b"x") and "digest")
    monkeypatch.setattr(weights, "convert", convert)
    return made


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.suffix != ".lock")


def test_converts_once_and_leaves_nothing_else(cache, fake_conversion):
    folder = weights.gemma_folder(progress=False)
    assert weights.gemma_folder(progress=False) == folder == cache / weights.FOLDER_NAME
    assert len(fake_conversion) == 1
    assert names(cache) == [weights.FOLDER_NAME]
    assert names(folder) == ["config.json", weights.MANIFEST]


@pytest.mark.parametrize("damage", ["no manifest", "garbled manifest", "short file", "missing file"])
def test_a_broken_folder_is_made_again(cache, fake_conversion, damage):
    folder = weights.gemma_folder(progress=False)
    if damage == "no manifest":
        (folder / weights.MANIFEST).unlink()
    elif damage == "garbled manifest":
        (folder / weights.MANIFEST).write_text('{"sizes": [')
    elif damage == "short file":
        (folder / "config.json").write_text("{")
    else:
        (folder / "config.json").unlink()
    (folder / "left-over").write_text("")
    (cache / f".{weights.FOLDER_NAME}-killed").mkdir()
    assert weights.gemma_folder(progress=False) == folder
    assert weights.is_complete(folder)
    assert names(cache) == [weights.FOLDER_NAME]
    assert names(folder) == ["config.json", weights.MANIFEST]


def test_an_error_or_ctrl_c_leaves_nothing(cache, fake_conversion, monkeypatch):
    def convert(gguf_file, folder, report):
        raise KeyboardInterrupt

    monkeypatch.setattr(weights, "convert", convert)
    with pytest.raises(KeyboardInterrupt):
        weights.gemma_folder(progress=False)
    assert names(cache) == []


def test_two_at_once_convert_once(cache, fake_conversion):
    folders = []
    threads = [
        threading.Thread(target=lambda: folders.append(weights.gemma_folder(progress=False)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert folders == [cache / weights.FOLDER_NAME] * 4
    assert len(fake_conversion) == 1


def test_a_cache_folder_that_cannot_be_written_is_said_in_one_line(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("RADIXKV_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(DemoError, match="set RADIXKV_CACHE to a writable folder") as caught:
        weights.gemma_folder(progress=False)
    assert "\n" not in str(caught.value)


def test_too_little_disk_space_is_said_before_the_work(cache, fake_conversion, monkeypatch):
    monkeypatch.setattr(weights.shutil, "disk_usage", lambda path: types.SimpleNamespace(free=10**8))
    with pytest.raises(DemoError, match=r"needs 1\.5 GB .* 0\.1 GB are free"):
        weights.gemma_folder(progress=False)
    assert not fake_conversion


def test_parts_are_joined_and_checked(tmp_path, monkeypatch):
    parts = [tmp_path / "0", tmp_path / "1"]
    parts[0].write_bytes(b"abc")
    parts[1].write_bytes(b"de")
    digest = hashlib.sha256(b"abcde").hexdigest()
    package = types.SimpleNamespace(chunk_paths=lambda: parts, EXPECTED_SHA256=digest)
    monkeypatch.setitem(weights.sys.modules, weights.PACKAGE, package)
    steps = []
    assert weights.join_parts(tmp_path / "whole", lambda *step: steps.append(step)) == digest
    assert (tmp_path / "whole").read_bytes() == b"abcde"
    assert steps[-1][1:] == (5, 5)
    parts[1].write_bytes(b"dX")
    with pytest.raises(DemoError, match="damaged"):
        weights.join_parts(tmp_path / "whole", lambda *step: None)
    parts[1].unlink()
    with pytest.raises(DemoError, match="missing"):
        weights.join_parts(tmp_path / "whole", lambda *step: None)


def test_missing_package_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(weights.sys.modules, weights.PACKAGE, None)
    with pytest.raises(DemoError, match='install the extra "demo"'):
        weights.join_parts(tmp_path / "whole", lambda *step: None)


def sentencepiece(text: str, scores: dict[str, float]) -> list[str]:
    """SentencePiece's byte-pair encoding: join the leftmost pair with the best score, again and again."""
    pieces = list(text)
    while True:
        joins = [(-scores[a + b], i) for i, (a, b) in enumerate(pairwise(pieces)) if a + b in scores]
        if not joins:
            return pieces
        _, i = min(joins)
        pieces[i : i + 2] = [pieces[i] + pieces[i + 1]]


def test_merges_encode_like_sentencepiece():
    from tokenizers import Tokenizer
    from tokenizers.models import BPE

    rng = np.random.default_rng(0)
    for _ in range(20):
        pieces = list("abc")
        while len(pieces) < 14:
            joined = "".join(rng.choice(pieces, 2))
            if joined not in pieces:
                pieces.append(joined)
        scores = [-float(i) for i in range(len(pieces))]
        merges = weights.find_merges(pieces, scores, [True] * len(pieces))
        tokenizer = Tokenizer(BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=merges))
        for _ in range(20):
            text = "".join(rng.choice(list("abc"), 12))
            expected = sentencepiece(text, dict(zip(pieces, scores, strict=True)))
            assert tokenizer.encode(text).tokens == expected


def test_pieces_that_are_not_normal_never_merge():
    assert weights.find_merges(["a", "aa", "aaa"], [0, -1, -2], [True, False, True]) == []


@pytest.fixture(scope="module")
def gemma():
    pytest.importorskip(weights.PACKAGE)
    pytest.importorskip("gguf")
    return weights.load_gemma(progress=False)


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    weights.join_parts(path, lambda *step: None)
    yield path
    path.unlink()


@pytest.mark.slow
def test_gemma_config_is_what_the_gguf_file_says(gemma, gguf_file):
    from gguf import GGUFReader

    fields = GGUFReader(gguf_file).fields
    said = {
        name.removeprefix("gemma3."): field.contents() for name, field in fields.items() if "gemma3." in name
    }
    config = gemma[0].config
    assert said["block_count"] == config.num_hidden_layers == 18
    assert said["embedding_length"] == config.hidden_size == 640
    assert said["feed_forward_length"] == config.intermediate_size
    assert said["attention.head_count"] == config.num_attention_heads
    assert said["attention.head_count_kv"] == config.num_key_value_heads == 1
    assert said["attention.key_length"] == said["attention.value_length"] == config.head_dim == 256
    assert said["attention.sliding_window"] == config.sliding_window == 512
    assert said["context_length"] == config.max_position_embeddings
    assert np.float32(config.rms_norm_eps) == np.float32(said["attention.layer_norm_rms_epsilon"])
    assert "output.weight" not in fields  # the output matrix is the embedding
    assert config.tie_word_embeddings
    assert gemma[0].lm_head.weight.data_ptr() == gemma[0].model.embed_tokens.weight.data_ptr()
    # One full layer after five sliding ones; the rotary base of full layers is in the file, the other is not.
    assert [i for i, kind in enumerate(config.layer_types) if kind == "full_attention"] == [5, 11, 17]
    rope = getattr(config, "rope_parameters", None) or {
        "full_attention": {"rope_theta": config.rope_theta},
        "sliding_attention": {"rope_theta": config.rope_local_base_freq},
    }
    assert rope["full_attention"]["rope_theta"] == said["rope.freq_base"] == 1e6
    assert rope["sliding_attention"]["rope_theta"] == 1e4


@pytest.mark.slow
def test_gemma_weights_and_tokens_are_those_that_transformers_reads(gemma, gguf_file):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = gemma
    where = {"pretrained_model_name_or_path": gguf_file.parent, "gguf_file": gguf_file.name}
    ours, theirs = (
        model.state_dict(),
        AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32).state_dict(),
    )
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name
    their_tokenizer = AutoTokenizer.from_pretrained(**where)
    for path in sorted(Path(weights.__file__).parent.glob("*.py")):
        text = path.read_text(encoding="utf-8") + "\n\n\n\t\tdéjà vu, 東京, 🦙 <b>12345</b>   end"
        assert tokenizer(text).input_ids == their_tokenizer(text).input_ids
        assert tokenizer.decode(tokenizer(text).input_ids)[len("<bos>") :] == text.replace("▁", " ")


@pytest.mark.slow
def test_gemma_talks(gemma):
    model, tokenizer = gemma
    assert not model.training
    for prompt, expected in [
        ("1 2 3 4 5 6 7 8 9 10 11", " 12 13 14"),
        ("Paris is the capital of France. Berlin is the capital of", " Germany"),
    ]:
        inputs = tokenizer(prompt, return_tensors="pt")
        out = model.generate(**inputs, max_new_tokens=12, do_sample=False)[0, inputs.input_ids.shape[1] :]
        assert tokenizer.decode(out).startswith(expected)
    chat = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": " Hello "},
        {"role": "assistant", "content": "Hi."},
        {"role": "user", "content": "How are you?"},
    ]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<bos><start_of_turn>user\nBe brief.\n\nHello<end_of_turn>\n<start_of_turn>model\nHi.<end_of_turn>\n"
        "<start_of_turn>user\nHow are you?<end_of_turn>\n<start_of_turn>model\n"
    )
    ids = tokenizer(text, add_special_tokens=False).input_ids
    special = {"<bos>": 2, "<start_of_turn>": 105, "<end_of_turn>": 106}
    assert {name: tokenizer.convert_tokens_to_ids(name) for name in special} == special
    assert [ids.count(i) for i in special.values()] == [1, 4, 3]
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id) == (0, 1, 2)
