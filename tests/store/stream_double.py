"""A copy stream for the CPU that carries out its work late, and notices when the main stream does not wait for it.

What happens before what is kept as on a GPU: each stream counts its operations, an event notes how far a stream has
come, and a stream knows of the other only what it waited for. An operation on a block that some earlier operation of
the other stream, of which it need not know, touches in a way that matters is a race, whatever came of it this time.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from radixkv.store.copy_stream import CopyStream
from radixkv.store.kv_store import KVStore, SlotRuns

__all__ = ["OrderError", "StreamDouble", "watch_runner", "watch_store"]


class OrderError(BaseException):
    """A race. No `Exception`: the engine takes those from a forward for the model's, and goes on."""


class StreamDouble(CopyStream):
    """Two streams, "main" and "side".

    Args:
        late: With which probability a copy is left undone until somebody waits for it.
        seed: Of that.
        raises: Raise at the first race; if not, the tensors show what comes of it.

    Attributes:
        num_copies: Operations that the side stream was given.
        log: `(stream, what, blocks)` of all operations, in the order in which they were issued.
        before_copy: Called with the number of a copy and "before" or "after" when it is issued; may raise.
    """

    def __init__(self, late: float = 1.0, seed: int = 0, raises: bool = True) -> None:
        self.late, self.rng, self.raises = late, random.Random(seed), raises
        self.done = {"main": 0, "side": 0}  # operations issued
        self.knows = {"main": 0, "side": 0}  # how many of the other stream's come before what is issued next
        self.last: dict[
            tuple[str, str, int], int
        ] = {}  # (stream, "read" or "write", block): its last operation
        self.queue: deque[tuple[int, Callable[[], None]]] = deque()
        self.log: list[tuple[str, str, tuple[int, ...]]] = []
        self.num_copies = 0
        self.before_copy: Callable[[int, str], None] = lambda number, when: None

    # -- what the tier asks for ------------------------------------------------------------------------------

    def record_main(self) -> Any:
        return "main", self.done["main"]

    def record(self) -> Any:
        return "side", self.done["side"]

    def wait(self, event: Any) -> None:
        self._learn("side", event)

    def main_waits(self, event: Any) -> None:
        self._learn("main", event)

    def run(self, work: Callable[[], None], reads: Any, writes: Any) -> None:
        self.num_copies += 1
        number = self.num_copies
        self.before_copy(number, "before")
        self._touch("side", reads.tolist(), writes.tolist())
        self.queue.append((self.done["side"], work))
        if self.rng.random() >= self.late:
            self.catch_up(self.done["side"])
        self.before_copy(number, "after")

    def synchronize(self) -> None:
        self.catch_up(self.done["side"])

    # -- what the main stream does ---------------------------------------------------------------------------

    def main(self, reads: Iterable[int] = (), writes: Iterable[int] = ()) -> None:
        """The main stream is given an operation."""
        self._touch("main", sorted(set(reads)), sorted(set(writes)))

    # -- inner -----------------------------------------------------------------------------------------------

    def catch_up(self, count: int) -> None:
        """Carry out the copies up to that one."""
        while self.queue and self.queue[0][0] <= count:
            self.queue.popleft()[1]()

    def _learn(self, stream: str, event: tuple[str, int]) -> None:
        source, count = event
        if source == stream:
            return
        self.knows[stream] = max(self.knows[stream], count)
        if source == "side":
            self.catch_up(count)

    def _touch(self, stream: str, reads: list[int], writes: list[int]) -> None:
        other = "side" if stream == "main" else "main"
        self.done[stream] += 1
        for how, blocks in (("read", reads), ("write", writes)):
            if blocks:
                self.log.append((stream, how, tuple(blocks)))
            for block in blocks:
                for before in ("write",) if how == "read" else ("read", "write"):
                    when = self.last.get((other, before, block), 0)
                    if when > self.knows[stream] and self.raises:
                        raise OrderError(
                            f"{stream} may {how} block {block} before operation {when} of {other} has "
                            f"{'read' if before == 'read' else 'written'} it: it knows of {self.knows[stream]}"
                        )
                self.last[stream, how, block] = self.done[stream]


def watch_store(store: KVStore, double: StreamDouble, monkeypatch: Any) -> None:
    """Tell the double of every block that is read or written through the store."""
    read, write, copy = store.read, store.write, store.copy_blocks

    def blocks(where: SlotRuns) -> set[int]:
        size = store.block_size
        return {b for slot, count in where.runs for b in range(slot // size, (slot + count - 1) // size + 1)}

    def watched_read(layer: int, where: SlotRuns, *args: Any) -> None:
        double.main(reads=blocks(where))
        read(layer, where, *args)

    def watched_write(layer: int, where: SlotRuns, *args: Any) -> None:
        double.main(writes=blocks(where))
        write(layer, where, *args)

    def watched_copy(sources: Any, targets: Any) -> None:
        double.main(reads=sources.tolist(), writes=targets.tolist())
        copy(sources, targets)

    monkeypatch.setattr(store, "read", watched_read)
    monkeypatch.setattr(store, "write", watched_write)
    monkeypatch.setattr(store, "copy_blocks", watched_copy)


def watch_runner(store: KVStore, double: StreamDouble, monkeypatch: Any) -> None:
    """Tell the double which blocks of this store each forward of an engine reads and writes."""
    from radixkv.engine.runner import ModelRunner

    execute = ModelRunner.execute

    def watched(runner: ModelRunner, step: Any) -> Any:
        if runner.store is store:
            size = store.block_size
            used = -(-step.context_lens // size)
            reads = {b for row, n in zip(step.block_tables, used, strict=True) for b in row[:n].tolist()}
            double.main(reads=reads, writes=np.unique(step.slot_mapping // size).tolist())
        return execute(runner, step)

    monkeypatch.setattr(ModelRunner, "execute", watched)
