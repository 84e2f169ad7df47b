"""Addresses of the sockets that KV events go through."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import socket
from typing import Any

__all__ = ["check_endpoint", "close_inherited", "open_endpoint"]

_TCP = re.compile(r"tcp://(?P<host>\*|[\w.-]+|\[[0-9A-Fa-f:.%\w*]+\]):(?P<port>\*|\d{1,5})")
_OTHER = re.compile(r"(?:ipc|inproc)://\S+")


def check_endpoint(endpoint: str, what: str, *, bind: bool = True) -> str:
    """The endpoint, if it is one.

    Args:
        endpoint: `tcp://HOST:PORT`, `ipc://PATH` or `inproc://NAME`.
        what: Its name in messages.
        bind: It will be listened on: `*` is a host, and `*` or 0 a port that the system picks.

    Raises:
        ValueError: It is not; the message says what to write.
    """
    tcp = _TCP.fullmatch(endpoint) if isinstance(endpoint, str) else None
    if tcp is None:
        if isinstance(endpoint, str) and _OTHER.fullmatch(endpoint):
            return endpoint
        raise ValueError(
            f"{what}={endpoint!r} is no endpoint: write tcp://HOST:PORT (tcp://*:5557 listens on every interface), "
            "ipc://PATH or inproc://NAME"
        )
    host, port = tcp["host"], tcp["port"]
    if port != "*" and int(port) > 65535:
        raise ValueError(f"{what}={endpoint!r}: a port is at most 65535")
    if not bind and (host == "*" or port in ("*", "0")):
        raise ValueError(f"{what}={endpoint!r} is nothing to connect to: name a host and a port, or bind")
    return endpoint


def open_endpoint(socket: Any, endpoint: str, what: str, *, bind: bool = True) -> str:
    """Bind or connect a ZeroMQ socket; returns the endpoint as it came out, port included.

    Raises:
        OSError: It cannot be had; the message says why.
    """
    import zmq

    if "[" in endpoint:
        socket.setsockopt(zmq.IPV6, 1)
    try:
        if bind:
            socket.bind(endpoint)
        else:
            socket.connect(endpoint)
    except zmq.ZMQError as error:
        number = error.errno or 0
        if number == errno.EADDRINUSE:
            why = "it is in use: another process, or another publisher of this one, listens there"
        elif number in (errno.EADDRNOTAVAIL, errno.ENODEV):
            why = "this machine has no such address or interface"
        elif number == errno.EACCES:
            why = "this user may not listen there"
        else:
            why = str(error)
        raise OSError(number, f"cannot open {what}={endpoint!r}: {why}") from error
    return socket.getsockopt_string(zmq.LAST_ENDPOINT)


def close_inherited(endpoint: str) -> None:
    """In a forked child: close what ZeroMQ opened in the parent at a TCP endpoint that was bound there.

    ZeroMQ has no call for that, and the port would stay taken, and readers connected, for as long as the child lives.
    """
    tcp = _TCP.fullmatch(endpoint)
    if tcp is None or not tcp["port"].isdigit():
        return
    with contextlib.suppress(OSError):
        for name in os.listdir("/dev/fd"):
            try:
                one = socket.socket(fileno=int(name))
            except (OSError, ValueError):  # no socket
                continue
            try:
                at = one.getsockname()
                ours = one.family in (socket.AF_INET, socket.AF_INET6) and at[1] == int(tcp["port"])
            except OSError:
                ours = False
            if ours:
                one.close()
            else:
                one.detach()
