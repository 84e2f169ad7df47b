"""Traces from files: JSONL, JSONL.GZ or a pipe, one request a line."""

from __future__ import annotations

import gzip
import io
import json
import os
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import IO, Any

from radixkv.core.errors import InvalidRequestError
from radixkv.core.tokens import require_block_size
from radixkv.replay.shapes import BadRequest, RequestReader, shape_of
from radixkv.replay.tokenizing import as_tokenizer
from radixkv.replay.trace import HASH_IDS, Trace

__all__ = ["DEFAULT_BLOCK_SIZE", "HASH_BLOCK_SIZE", "Progress", "read_trace"]

#: Tokens that a hash id of the public Mooncake traces stands for.
HASH_BLOCK_SIZE = 512
#: Of a cache, as everywhere in radixkv.
DEFAULT_BLOCK_SIZE = 16

#: Called with what is being done, how much of it is done, and of how much; None if nobody knows.
Progress = Callable[[str, int, "int | None"], None]

_GZIP = b"\x1f\x8b"
_LONGEST_REASON = 200  # a number in a message may have hundreds of digits
_LOOK_EVERY = 64  # lines between two calls of `progress`


def read_trace(
    source: Any,
    *,
    block_size: int | None = None,
    tokenizer: Any = None,
    limit: int | None = None,
    skip_bad: bool = False,
    progress: Progress | None = None,
) -> Trace:
    """Read a whole trace, and check it.

    A request is an object in one of these shapes, and all requests of a trace are of one shape:

    - `{"hash_ids": [...], "input_length": n}`: each id names a block of the prompt together with all that stands
      before it, as in the public Mooncake traces.
    - `{"token_ids": [...]}`
    - `{"prompt": "..."}`, with a tokenizer
    - `{"messages": [...]}` as in OpenAI's API, and `tools` if there are any, with a tokenizer that has a chat template

    Beside them it may have `timestamp` (milliseconds, never going back), `output_length` (not used), and for
    policies that take a request's word for it (`policy="priority"`) `priority` (an integer, 1 if there is only a
    `ttl`) and `ttl` (seconds from its timestamp on). Blank lines mean nothing.

    Args:
        source: A path (gzip is recognised by its first bytes), "-" for standard input, a binary file object, or an
            iterable of such objects.
        block_size: Tokens in a block: with hash ids, those of the trace (default 512); else those of the
            cache (default 16).
        tokenizer: For prompts and messages: path of a `tokenizer.json`, folder or hub id of a model, or a
            tokenizer object.
        limit: Read at most this many requests.
        skip_bad: Leave out and count requests that make no sense, instead of refusing the trace.
        progress: Called now and then with "Reading", bytes read and bytes of the file.

    Raises:
        InvalidRequestError: The source cannot be read, holds no request, or one that makes no sense; the
            message names the line and says why.
    """
    check_options(block_size, limit)
    if isinstance(source, (str, os.PathLike)) or hasattr(source, "read"):
        name = _name_of(source)
        with _opened(source, name) as file:
            return _Reading(name, block_size, tokenizer, limit, skip_bad).run(_lines(file, name, progress))
    if isinstance(source, Iterable) and not isinstance(source, (bytes, dict)):
        items = ((number, item) for number, item in enumerate(source, 1))
        return _Reading("requests", block_size, tokenizer, limit, skip_bad).run(items)
    raise InvalidRequestError(f"a trace is a path, a file or an iterable, got {type(source).__name__}")


def check_options(block_size: int | None, limit: int | None) -> None:
    """Make sure that these are numbers of at least 1 that can be used, or None.

    Raises:
        InvalidRequestError: They are not.
    """
    if block_size is not None:
        require_block_size(block_size)
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
        raise InvalidRequestError(f"limit must be an integer of at least 1, got {limit!r}")


class _Reading:
    """One trace being read."""

    def __init__(
        self, name: str, block_size: int | None, tokenizer: Any, limit: int | None, skip_bad: bool
    ) -> None:
        self._name = name
        self._block_size = block_size
        self._tokenizer = tokenizer
        self._limit = limit
        self._skip_bad = skip_bad

    def run(self, items: Iterable[tuple[int, Any]]) -> Trace:
        """Read requests, or lines of them, with their numbers."""
        shape, size, reader = "", 0, None
        requests = []
        num_bad, first_bad = 0, ""
        for number, item in items:
            try:
                if isinstance(item, bytes):
                    item = _parse(item)
                if reader is None:
                    if not isinstance(item, dict):
                        raise BadRequest("not a JSON object: a trace has one request a line")
                    shape = shape_of(item)
                    size = self._block_size or (HASH_BLOCK_SIZE if shape == HASH_IDS else DEFAULT_BLOCK_SIZE)
                    reader = self._make_reader(shape, size)
                requests.append(reader.read(item, number))
            except BadRequest as error:
                said = str(error)
                said = said if len(said) <= _LONGEST_REASON else f"{said[:_LONGEST_REASON]}..."
                reason = f"{self._name}, line {number}: {said}"
                if not self._skip_bad:
                    raise InvalidRequestError(reason) from error
                num_bad += 1
                first_bad = first_bad or reason
                continue
            if len(requests) == self._limit:
                break
        if not requests:
            if num_bad:
                raise InvalidRequestError(
                    f"no request is left: all {num_bad} lines were skipped, the first because of {first_bad}"
                )
            raise InvalidRequestError(f"{self._name} is empty: a trace has one request a line")
        return Trace(self._name, shape, size, requests, num_bad)

    def _make_reader(self, shape: str, block_size: int) -> RequestReader:
        needed = shape in ("prompt", "messages") and self._tokenizer is not None
        return RequestReader(shape, block_size, as_tokenizer(self._tokenizer) if needed else None)


def _parse(line: bytes) -> Any:
    """What a line says, which is not blank."""
    try:
        return json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise BadRequest("not UTF-8 text") from error
    except json.JSONDecodeError as error:
        raise BadRequest(f"not JSON: {error.msg} at column {error.colno}") from error
    except RecursionError as error:
        raise BadRequest("not JSON of a request: nested too deeply") from error
    except ValueError as error:  # integers of thousands of digits
        raise BadRequest(f"not JSON of a request: {str(error).partition(';')[0]}") from error


def _name_of(source: Any) -> str:
    if isinstance(source, (str, os.PathLike)):
        return "stdin" if source == "-" else os.fspath(source)
    return str(getattr(source, "name", "trace"))


@contextmanager
def _opened(source: Any, name: str) -> Iterator[IO[bytes]]:
    """The bytes of a source; only what is opened here is closed."""
    if hasattr(source, "read"):
        if isinstance(source, io.TextIOBase):
            raise InvalidRequestError(f"{name} is open as text: open it with 'rb'")
        yield source
    elif source == "-":
        if sys.stdin is None:
            raise InvalidRequestError("standard input is closed: give a file")
        yield sys.stdin.buffer
    else:
        path = Path(source)
        try:
            file: AbstractContextManager[IO[bytes]] = path.open("rb")
        except FileNotFoundError as error:
            raise InvalidRequestError(f"{name}: there is no such file") from error
        except IsADirectoryError as error:
            raise InvalidRequestError(f"{name} is a folder: give a file") from error
        except (OSError, ValueError) as error:
            raise InvalidRequestError(
                f"{name} cannot be read: {getattr(error, 'strerror', None) or error}"
            ) from error
        with file as opened:
            yield opened


def _lines(file: IO[bytes], name: str, progress: Progress | None) -> Iterator[tuple[int, bytes]]:
    """The lines that are not blank, with their numbers from 1, unpacked if they are packed."""
    total = None
    if progress is not None:
        try:
            total = os.fstat(file.fileno()).st_size or None
        except (OSError, ValueError, AttributeError):  # not a file of the system
            total = None
    counted = _Counted(file)
    buffered = io.BufferedReader(counted, 1 << 20)
    number = 0
    try:
        unpacked: Any = buffered
        start = buffered.peek(4096)
        if start.startswith(_GZIP):
            unpacked = gzip.GzipFile(fileobj=buffered)
            start = unpacked.peek(4096)
        if b"\0" in start[:4096]:
            raise InvalidRequestError(f"{name} is not text, but binary: a trace is JSON, one request a line")
        for number, line in enumerate(unpacked, 1):
            if not line.isspace():
                yield number, line
            if progress is not None and number % _LOOK_EVERY == 0:
                progress("Reading", counted.num_bytes, total)
    except EOFError as error:
        raise InvalidRequestError(
            f"{name}, after line {number}: the packed data ends too early: is the file whole?"
        ) from error
    except (gzip.BadGzipFile, zlib.error) as error:
        raise InvalidRequestError(
            f"{name}, after line {number}: the packed data is damaged: {error}"
        ) from error
    except OSError as error:
        raise InvalidRequestError(f"{name} cannot be read: {error.strerror or error}") from error
    if progress is not None:
        progress("Reading", counted.num_bytes, counted.num_bytes)


class _Counted(io.RawIOBase):
    """A file that counts what was read from it, and is left open."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.num_bytes = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        read = getattr(self._file, "read1", self._file.read)
        data = read(len(buffer))
        buffer[: len(data)] = data
        self.num_bytes += len(data)
        return len(data)
