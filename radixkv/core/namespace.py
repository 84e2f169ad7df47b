"""Namespaces: what must be equal, beside the tokens, for KV to be shared."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from radixkv.core.errors import InvalidRequestError

Namespace = str | bytes | tuple[Any, ...] | None
"""What must be equal, beside the tokens, for KV to be shared; tuples hold strings, bytes and such tuples."""

DEFAULT_NAMESPACE = b""

# A number of more digits is the length of nothing that fits into memory.
_HEAD = re.compile(rb"n;|([stb])(0|[1-9][0-9]{0,17}):")


def canonical_namespace(namespace: Namespace) -> bytes:
    """One byte string per namespace; different namespaces never share one.

    Every part is written as its kind, its length and its content, so that neither the kinds
    (`"a"` and `b"a"`) nor the borders (`("a", "bc")` and `("ab", "c")`) can be confused. `None` and `b""` are
    the default namespace, `b""`.

    Args:
        namespace: `str | bytes | None`, or a tuple of those and of such tuples.

    Raises:
        InvalidRequestError: Anything else is in it.
    """
    if namespace is None or (type(namespace) is bytes and not namespace):
        return DEFAULT_NAMESPACE
    out: list[bytes] = []
    todo: list[Any] = [namespace]  # a stack instead of recursion: nesting has no limit
    while todo:
        part = todo.pop()
        if part is None:
            out.append(b"n;")
        elif isinstance(part, str):
            text = part.encode("utf-8", "surrogatepass")
            out.append(b"s%d:%b" % (len(text), text))
        elif isinstance(part, bytes):
            out.append(b"b%d:%b" % (len(part), part))
        elif isinstance(part, tuple):
            out.append(b"t%d:" % len(part))
            todo.extend(reversed(part))
        else:
            kind = type(part).__name__
            raise InvalidRequestError(
                f"a namespace is made of str, bytes, None and tuples of them, got {kind}"
            )
    return b"".join(out)


def namespace_parts(canonical: bytes) -> list[str | bytes | int | None] | None:
    """Read a canonical namespace back; takes any bytes and never raises.

    Returns:
        The parts in the order in which they were written; a number N stands for a tuple of the next N parts, of
        which each may be such a tuple itself. None if `canonical_namespace` never gives these bytes.
    """
    if not canonical:
        return [None]
    parts: list[str | bytes | int | None] = []
    at, missing = 0, 1
    while missing:
        head = _HEAD.match(canonical, at)
        if head is None:
            return None
        at = head.end()
        missing -= 1
        if head[1] is None:
            parts.append(None)
            continue
        size = int(head[2])
        if head[1] == b"t":
            parts.append(size)
            missing += size
            continue
        content = canonical[at : at + size]
        at += size
        if len(content) < size:
            return None
        if head[1] == b"b":
            parts.append(content)
            continue
        try:
            parts.append(content.decode("utf-8", "surrogatepass"))
        except UnicodeDecodeError:
            return None
    # Alone, these two are the default namespace, which is written otherwise.
    return parts if at == len(canonical) and canonical not in (b"n;", b"b0:") else None


def namespace_text(
    canonical: bytes, write: Callable[[str | bytes | None], str] = repr, most_parts: int = 10_000
) -> str | None:
    """A canonical namespace as the user wrote it; takes any bytes and never raises.

    Args:
        canonical: What `canonical_namespace` gave.
        write: Text of a part that is not a tuple.
        most_parts: Whatever has more parts is not written out.

    Returns:
        `'tenant'`, `('lora', 'x')`, `None`, ...; None if it is no canonical namespace, or too large.
    """
    parts = namespace_parts(canonical)
    if parts is None or len(parts) > most_parts:
        return None
    out: list[str] = []
    tuples: list[list[int]] = []  # parts still to come, and parts in all, of those that are open
    for part in parts:
        if tuples and tuples[-1][0] < tuples[-1][1]:
            out.append(", ")
        if tuples:
            tuples[-1][0] -= 1
        if isinstance(part, int):
            out.append("(")
            tuples.append([part, part])
        else:
            out.append(write(part))
        while tuples and not tuples[-1][0]:
            out.append(",)" if tuples.pop()[1] == 1 else ")")
    return "".join(out)
