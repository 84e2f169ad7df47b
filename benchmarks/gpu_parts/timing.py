"""Times of kernels: replayed from a CUDA graph, with the second-level cache flushed before each."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from gpu_parts.session import Session

_FLUSH_BYTES = 256 << 20  # several times the 50 MB of an H100's or H200's second-level cache


@dataclass(frozen=True)
class Timing:
    """Times of one call, in ms.

    Attributes:
        median, low, high: Of the repetitions; the latter two are quartiles.
        graph: Whether a CUDA graph was replayed; if not, launching is part of the time.
    """

    median: float
    low: float
    high: float
    graph: bool

    @property
    def us(self) -> float:
        return self.median * 1e3


def quartiles(times: list[float]) -> tuple[float, float, float]:
    if len(times) < 2:
        return times[0], times[0], times[0]
    low, middle, high = statistics.quantiles(times, n=4, method="inclusive")
    return middle, low, high


def kernel_time(session: Session, call: Callable[[], Any], seconds: float = 0.08) -> Timing:
    """Time what `call` gives to the device; on a CPU, time the call.

    Args:
        session: The run.
        call: Launches kernels on memory that stays where it is.
        seconds: To spend on repetitions, about.
    """
    call()  # what is made or compiled on the first call
    if not session.on_gpu:
        times = []
        for _ in range(2):
            began = time.perf_counter()
            call()
            times.append((time.perf_counter() - began) * 1e3)
        return Timing(*quartiles(times), graph=False)
    call()
    graph = _captured(call)
    replay = call if graph is None else graph.replay
    flush = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device=session.device)
    first = _timed(replay, flush, 3)
    repeats = int(min(max(seconds * 1e3 / max(min(first), 1e-3), 5), 60))
    times = _timed(replay, flush, repeats)
    return Timing(*quartiles(times), graph=graph is not None)


def _captured(call: Callable[[], Any]) -> torch.cuda.CUDAGraph | None:
    """The kernels of the call as a graph; None if it cannot be captured."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    try:
        with torch.cuda.stream(side):
            call()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
    except RuntimeError:
        torch.cuda.synchronize()
        return None
    return graph


def _timed(call: Callable[[], Any], flush: torch.Tensor, repeats: int) -> list[float]:
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for begin, end in events:
        flush.zero_()
        begin.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) for begin, end in events]


def host_time(session: Session, call: Callable[[], Any], repeats: int = 5) -> float:
    """Median ms that a call keeps the host busy, with the device idle before each."""
    times = []
    for _ in range(repeats):
        session.synchronize()
        began = time.perf_counter()
        call()
        times.append((time.perf_counter() - began) * 1e3)
    session.synchronize()
    return statistics.median(times)


def waits_for_device(session: Session, call: Callable[[], Any]) -> bool | None:
    """Whether a call returns only after the device has done what was queued before it; None without a GPU.

    With an idle device nobody sees that a call waits, for there is nothing to wait for.
    """
    if not session.on_gpu:
        call()
        return None
    size = 4096
    left, right = (torch.randn(size, size, device=session.device).to(session.dtype) for _ in "ab")
    out = torch.mm(left, right)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    for _ in range(2):  # the first time, to see how much of it takes 10 ms
        torch.cuda.synchronize(session.device)
        events[0].record()
        for _ in range(20):
            torch.mm(left, right, out=out)
        events[1].record()
    torch.cuda.synchronize(session.device)
    repeats = int(20 * 10 / max(events[0].elapsed_time(events[1]), 1e-3)) + 1
    for _ in range(repeats):
        torch.mm(left, right, out=out)
    events[1].record()
    call()
    waited = events[1].query()
    torch.cuda.synchronize(session.device)
    return bool(waited)


def busy_us(intervals: Iterable[tuple[float, float]]) -> float:
    """Time in which at least one of the intervals runs: kernels overlap, on one stream as well."""
    total, end = 0.0, -math.inf
    for begin, stop in sorted(intervals):
        total += max(0.0, stop - max(begin, end))
        end = max(end, stop)
    return total


def wall_time(session: Session, call: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds until the device has done what the call gave it, and what the call returned."""
    session.synchronize()
    began = time.perf_counter()
    result = call()
    session.synchronize()
    return time.perf_counter() - began, result
