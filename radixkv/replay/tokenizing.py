"""Texts into token ids: a tokenizer of transformers or of the `tokenizers` package, loaded when it is needed."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any, Protocol

from radixkv.core.errors import InvalidRequestError, first_line, install_hint
from radixkv.replay.hub import hub_options, not_reached

__all__ = ["Tokenizer", "as_tokenizer"]


class Tokenizer(Protocol):
    """What the reader of a trace needs."""

    def encode_prompt(self, text: str) -> list[int]:
        """Ids of a whole prompt, with the tokens that the model wants in front."""

    def encode_messages(self, messages: list[dict[str, Any]], tools: Any) -> list[int]:
        """Ids of a chat, up to where the answer begins."""


class _Transformers:
    """A tokenizer of transformers."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def encode_prompt(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text))

    def encode_messages(self, messages: list[dict[str, Any]], tools: Any) -> list[int]:
        if not getattr(self._tokenizer, "chat_template", None):
            raise InvalidRequestError(
                "the tokenizer has no chat template to turn messages into a prompt: take the tokenizer of a "
                "chat model"
            )
        text = self._tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=False, add_generation_prompt=True
        )
        # The template writes the special tokens itself.
        return list(self._tokenizer.encode(text, add_special_tokens=False))


class _File:
    """A `tokenizer.json` alone, read by the `tokenizers` package; it has no chat template."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def encode_prompt(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text).ids)

    def encode_messages(self, messages: list[dict[str, Any]], tools: Any) -> list[int]:
        raise InvalidRequestError(
            "a tokenizer.json has no chat template to turn messages into a prompt: name the folder of the model, "
            "or its hub id"
        )


def as_tokenizer(tokenizer: Any) -> Tokenizer:
    """A tokenizer from whatever names it.

    Args:
        tokenizer: Path of a `tokenizer.json`, folder or hub id of a model, or a tokenizer object of
            transformers or of `tokenizers`.

    Raises:
        InvalidRequestError: It cannot be loaded, or a package is missing; the message says which.
    """
    if hasattr(tokenizer, "encode_prompt") and hasattr(tokenizer, "encode_messages"):
        return tokenizer  # type: ignore[no-any-return]
    if isinstance(tokenizer, (str, Path)):
        return _load(str(tokenizer))
    if hasattr(tokenizer, "apply_chat_template"):
        return _Transformers(tokenizer)
    if hasattr(tokenizer, "encode"):
        return _File(tokenizer)
    raise InvalidRequestError(
        f"tokenizer is a path, a hub id or a tokenizer object, got {type(tokenizer).__name__}"
    )


def _load(name: str) -> Tokenizer:
    path = Path(name).expanduser()
    options: dict[str, Any] = {}
    try:
        if path.suffix == ".json" or path.is_file():
            tokenizers = _package("tokenizers")
            if not path.is_file():
                raise InvalidRequestError(f"tokenizer {name}: there is no such file")
            return _File(tokenizers.Tokenizer.from_file(str(path)))
        if name.startswith((".", "/", "~")) and not path.is_dir():
            raise InvalidRequestError(f"tokenizer {name}: there is no such folder")
        where = str(path) if path.is_dir() else name
        transformers = _package("transformers")
        options = {} if path.is_dir() else hub_options(name)
        return _Transformers(transformers.AutoTokenizer.from_pretrained(where, **options))
    except InvalidRequestError:
        raise
    except Exception as error:  # of several packages, whose errors have no common base
        reason = first_line(error).rstrip(".")
        hint = not_reached(options, "a folder or a tokenizer.json")
        raise InvalidRequestError(f"tokenizer {name} cannot be loaded: {reason}{hint}") from error


def _package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise InvalidRequestError(f"a tokenizer needs {name}: {install_hint('hf')}") from error
