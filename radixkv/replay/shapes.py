"""What a line of a trace means: its shape, checked and turned into a request."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from radixkv.core.errors import InvalidRequestError, first_line
from radixkv.core.eviction import Retention
from radixkv.core.tokens import as_tokens
from radixkv.replay.tokenizing import Tokenizer
from radixkv.replay.trace import HASH_IDS, Request

__all__ = ["SHAPES", "BadRequest", "RequestReader", "shape_of"]

#: Keys that tell shapes apart, in the order in which they are looked for.
SHAPES = (HASH_IDS, "token_ids", "prompt", "messages")


class BadRequest(Exception):
    """One request of a trace makes no sense; the reader adds where it stands."""


def shape_of(item: dict[str, Any]) -> str:
    """The shape of a request.

    Raises:
        BadRequest: It is of no known one.
    """
    for shape in SHAPES:
        if shape in item:
            return shape
    raise BadRequest(f"not a request of a known shape: none of {', '.join(SHAPES)} is in it")


class RequestReader:
    """Turns the objects of one trace into requests.

    Args:
        shape: One of `SHAPES`.
        block_size: Tokens in a block, for traces of hash ids.
        tokenizer: For prompts and messages.

    Raises:
        InvalidRequestError: The shape needs a tokenizer, and there is none.
    """

    def __init__(self, shape: str, block_size: int, tokenizer: Tokenizer | None) -> None:
        self._shape = shape
        self._block_size = block_size
        self._tokenizer = tokenizer
        if shape in ("prompt", "messages") and tokenizer is None:
            raise InvalidRequestError(
                f"the requests of this trace are texts ({shape}): pass --tokenizer (in Python tokenizer=) with "
                "the folder or hub id of the model, or a tokenizer.json"
            )
        self._last: tuple[float, int] | None = None
        self._content: Callable[[dict[str, Any]], npt.NDArray[np.int64]] = {
            HASH_IDS: self._hash_ids,
            "token_ids": lambda item: _integers(item, "token_ids"),
            "prompt": self._prompt,
            "messages": self._messages,
        }[shape]

    def read(self, item: Any, line: int) -> Request:
        """One request.

        Raises:
            BadRequest: It makes no sense; the message says why.
        """
        if not isinstance(item, dict):
            raise BadRequest(f"a request is a JSON object, this is {_kind(item)}")
        if self._shape not in item:
            raise BadRequest(f"no {self._shape}, which the requests before it have")
        content = self._content(item)
        num_tokens = len(content)
        if self._shape == HASH_IDS:
            num_tokens = self._input_length(item, num_tokens)
        elif not num_tokens:
            raise BadRequest(f"{self._shape} is empty: a request has at least one token")
        if "output_length" in item:
            _count(item, "output_length", least=0)
        timestamp = _number(item, "timestamp")
        retention = _retention(item, timestamp)
        if timestamp is not None:
            if self._last is not None and timestamp < self._last[0]:
                before, where = self._last
                raise BadRequest(f"timestamp {timestamp:g} goes back: line {where} has {before:g}")
            self._last = timestamp, line
        if not len(content) or int(content.max()) <= np.iinfo(np.int32).max:
            content = content.astype(np.int32)  # half of the memory
        return Request(line, content, num_tokens, timestamp, retention)

    def _hash_ids(self, item: dict[str, Any]) -> npt.NDArray[np.int64]:
        return _integers(item, HASH_IDS)

    def _prompt(self, item: dict[str, Any]) -> npt.NDArray[np.int64]:
        assert self._tokenizer is not None
        return _encoded(self._tokenizer.encode_prompt, _text(item, "prompt"))

    def _messages(self, item: dict[str, Any]) -> npt.NDArray[np.int64]:
        assert self._tokenizer is not None
        return _encoded(self._tokenizer.encode_messages, *_chat(item))

    def _input_length(self, item: dict[str, Any], num_ids: int) -> int:
        if "input_length" not in item:
            raise BadRequest("no input_length, which hash_ids need beside them")
        num_tokens = _count(item, "input_length", least=1)
        needed = -(-num_tokens // self._block_size)
        if num_ids != needed:
            raise BadRequest(
                f"{num_ids} hash_ids, but an input_length of {num_tokens} fills {needed} blocks of "
                f"{self._block_size} tokens: is another block_size (--block-size) right for this trace?"
            )
        return num_tokens


def _encoded(encode: Callable[..., list[int]], *text: Any) -> npt.NDArray[np.int64]:
    try:
        return as_tokens(encode(*text))
    except InvalidRequestError:
        raise  # about the tokenizer, not about this text
    except Exception as error:  # of a template or a tokenizer, whose errors have no common base
        raise BadRequest(f"the tokenizer refuses it: {first_line(error)}") from error


def _integers(item: dict[str, Any], key: str) -> npt.NDArray[np.int64]:
    value = item[key]
    if not isinstance(value, (list, tuple, range, np.ndarray)):
        raise BadRequest(f"{key} must be a list of integers, got {_kind(value)}")
    try:
        return as_tokens(value)
    except InvalidRequestError as error:
        reason = str(error).replace("a token does", "an id does").replace("tokens must", "ids must")
        raise BadRequest(f"{key}: {reason}") from error


def _text(item: dict[str, Any], key: str) -> str:
    value = item[key]
    if not isinstance(value, str):
        raise BadRequest(f"{key} must be a text, got {_kind(value)}; token ids are given as token_ids")
    return value


def _chat(item: dict[str, Any]) -> tuple[list[dict[str, Any]], Any]:
    messages = item["messages"]
    if not isinstance(messages, list) or not messages:
        raise BadRequest(f"messages must be a list of at least one message, got {_kind(messages)}")
    return [_message(message) for message in messages], item.get("tools")


def _message(message: Any) -> dict[str, Any]:
    """A message whose content is one text, as chat templates want it."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise BadRequest("a message is an object with a role and a content")
    content = message.get("content")
    if isinstance(content, list):
        texts = []
        for part in content:
            if (
                not isinstance(part, dict)
                or part.get("type") != "text"
                or not isinstance(part.get("text"), str)
            ):
                kind = part.get("type") if isinstance(part, dict) else _kind(part)
                raise BadRequest(f"messages may hold texts only, this one has a part of type {kind}")
            texts.append(part["text"])
        return {**message, "content": "\n".join(texts)}
    if content is not None and not isinstance(content, str):
        raise BadRequest(f"the content of a message must be a text, got {_kind(content)}")
    return {**message, "content": content or ""}


def _count(item: dict[str, Any], key: str, least: int) -> int:
    value = item[key]
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise BadRequest(f"{key} must be an integer, got {_kind(value)}")
    if value < least:
        raise BadRequest(f"{key} must be at least {least}, got {value}")
    if value > np.iinfo(np.int64).max:
        raise BadRequest(f"{key} is {value}, more than fits into int64")
    return int(value)


def _number(item: dict[str, Any], key: str) -> float | None:
    value = item.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float, np.number)):
        raise BadRequest(f"{key} must be a number, got {_kind(value)}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise BadRequest(f"{key} must be a finite number, got {value}")
    return number


def _retention(item: dict[str, Any], timestamp: float | None) -> Retention | None:
    priority, ttl = item.get("priority"), _number(item, "ttl")
    if priority is None and ttl is None:
        return None
    if isinstance(priority, bool) or not isinstance(priority, (int, np.integer, type(None))):
        raise BadRequest(f"priority must be an integer, got {_kind(priority)}")
    if priority is not None and not -(2**63) <= priority < 2**63:
        raise BadRequest(f"priority does not fit into int64: {priority}")
    if ttl is not None and ttl <= 0:
        raise BadRequest(f"ttl must be a number of seconds above 0, got {ttl:g}")
    if ttl is not None and timestamp is None:
        raise BadRequest("a ttl without a timestamp: nobody knows when it ends")
    return Retention(1 if priority is None else int(priority), ttl)


def _kind(value: Any) -> str:
    """What JSON calls it."""
    names = {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    number = f"the number {value}" if isinstance(value, (int, float)) else f"a {type(value).__name__}"
    return names.get(type(value), number)
