"""A small HTTP server that tells viewers such as radixview where the events are."""

from __future__ import annotations

import json
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

__all__ = ["EventDirectory"]

_MOST_BYTES = 16 << 20


class EventDirectory:
    """Answers `GET /server_info` and `POST /detokenize` as an SGLang server does, as far as readers of events ask.

    Without it a reader must be told the endpoint, and shows token ids only.

    Args:
        address: `HOST:PORT` to listen on; port 0 lets the system pick one.
        endpoint: The publisher's, `tcp://HOST:PORT`.
        topic: Of its messages.
        block_size: Tokens in a block.
        detokenize: Text of some token ids; None shows the ids themselves.

    Raises:
        ValueError: The address is none, or the endpoint is not reached by TCP.
        OSError: It cannot be listened on.

    Source: what radixview 0.1.0 reads (`radixview/discover.py`, `radixview/text.py`).
    """

    def __init__(
        self,
        address: str,
        *,
        endpoint: str,
        topic: str,
        block_size: int,
        detokenize: Callable[[Sequence[int]], str] | None = None,
    ) -> None:
        host, separator, port = str(address).rpartition(":")
        if not separator or not port.isdigit() or int(port) > 65535:
            raise ValueError(f"http={address!r} is no address: write HOST:PORT, such as 127.0.0.1:30000")
        if not endpoint.startswith("tcp://"):
            raise ValueError(
                f"http= tells readers a TCP port, but events go to {endpoint!r}: publish to tcp://"
            )
        info = {
            "kv_events": {
                "publisher": "zmq",
                # Readers dial the host that they reached this server under.
                "endpoint_host": "*",
                "endpoint_port_base": int(endpoint.rpartition(":")[2]),
                "topic": topic,
                "block_size": block_size,
                "dp_size": 1,
            },
            "page_size": block_size,
            "dp_size": 1,
        }
        try:
            self._server = ThreadingHTTPServer((host.strip("[]"), int(port)), _handler(info, detokenize))
        except OSError as error:
            raise OSError(error.errno, f"cannot listen on http={address!r}: {error.strerror}") from error
        self._server.daemon_threads = True
        shown = f"[{host.strip('[]')}]" if ":" in host else host
        self.url = f"http://{shown}:{self._server.server_address[1]}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.1,), name="radixkv-kv-directory", daemon=True
        )
        self._thread.start()
        # A collection of garbage may happen on the very thread that has to stop: leave it to another one.
        self._finalizer = weakref.finalize(self, _close_aside, self._server)
        self._finalizer.atexit = False
        _open.add(self)

    def close(self) -> None:
        """Stop answering. Twice is once."""
        if self._finalizer.detach():
            _close(self._server)
            self._thread.join(2.0)

    def abandon(self) -> None:
        """In a forked child, which has no thread that answers: let go of the port, which is the parent's."""
        if self._finalizer.detach():
            self._server.socket.close()


def _close(server: ThreadingHTTPServer) -> None:
    server.shutdown()
    server.server_close()


def _close_aside(server: ThreadingHTTPServer) -> None:
    threading.Thread(target=_close, args=(server,), daemon=True).start()


def _handler(
    info: dict[str, Any], detokenize: Callable[[Sequence[int]], str] | None
) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = 10

        def do_GET(self) -> None:
            if urlsplit(self.path).path in ("/server_info", "/get_server_info"):
                self._reply(200, info)
            else:
                self._reply(404, {"error": "only /server_info and /detokenize are here"})

        def do_POST(self) -> None:
            if urlsplit(self.path).path != "/detokenize":
                self._reply(404, {"error": "only /server_info and /detokenize are here"})
                return
            try:
                size = int(self.headers.get("Content-Length", ""))
                if not 0 <= size <= _MOST_BYTES:
                    raise ValueError(f"{size} bytes")
                tokens = json.loads(self.rfile.read(size))["tokens"]
                text = " ".join(map(str, tokens)) if detokenize is None else detokenize(tokens)
            except Exception as error:  # whatever a stranger sent, or a tokenizer made of it
                self._reply(400, {"error": f"{type(error).__name__}: {error}"})
                return
            self._reply(200, {"text": text})

        def log_message(self, format: str, *args: Any) -> None:
            pass

        def _reply(self, status: int, body: dict[str, Any]) -> None:
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    return Handler


_open: weakref.WeakSet[EventDirectory] = weakref.WeakSet()


def _abandon_all() -> None:
    for directory in list(_open):
        directory.abandon()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_abandon_all)
