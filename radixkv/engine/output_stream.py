"""Reading one request of an engine token by token."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

from radixkv.engine.completion import TokenOutput

__all__ = ["OutputStream"]


class OutputStream(Iterator[TokenOutput]):
    """The tokens of one prompt as they come; from `Engine.stream`.

    Iterating drives the engine, so that other requests go on, too. Closing it, leaving its `with` block or dropping it
    aborts the request if it is not finished.
    """

    def __init__(
        self,
        advance: Callable[[object], bool],
        abort: Callable[[object], None],
        abandon: Callable[[object], None],
    ) -> None:
        # `advance(inbox)`: one step, unless the request whose outputs go there is finished; whether it was not.
        self._advance = advance
        self._abort = abort
        self._abandon = abandon
        self.inbox: deque[TokenOutput] = deque()
        self._closed = False

    def __next__(self) -> TokenOutput:
        while not self.inbox:
            if self._closed or not self._advance(self.inbox):
                raise StopIteration
        return self.inbox.popleft()

    def close(self) -> None:
        """Abort the request, if it is not finished. Twice is once."""
        if not self._closed:
            self._abort(self.inbox)
            self._closed = True
            self.inbox.clear()

    def __enter__(self) -> OutputStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if not self._closed:  # at any line of any thread: the engine sees to it with its next step
            self._abandon(self.inbox)
