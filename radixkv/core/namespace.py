"""Namespaces: what must be equal, beside the tokens, for KV to be shared."""

from __future__ import annotations

from typing import Any

from radixkv.core.errors import InvalidRequestError

Namespace = str | bytes | tuple[Any, ...] | None

DEFAULT_NAMESPACE = b""


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
