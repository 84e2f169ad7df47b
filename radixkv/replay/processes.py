"""Replays in several processes."""

from __future__ import annotations

import multiprocessing
import pickle
import signal
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

from radixkv.core.errors import InvalidRequestError
from radixkv.replay.runs import Policy, Run, run
from radixkv.replay.trace import Trace

__all__ = ["require_processes", "run_all"]


def require_processes(policies: list[Policy]) -> None:
    """Make sure that other processes can take part.

    Raises:
        InvalidRequestError: A policy cannot be sent to them.
        SystemExit: This is one of them, which is importing the script that started it, and came by that call
            again: it ends, and the process that started it says why.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise SystemExit(1)
    for policy in policies:
        try:
            pickle.dumps(policy)
        except Exception as error:  # PicklingError, AttributeError, TypeError, whatever a class raises
            raise InvalidRequestError(
                f"the policy {policy!r} cannot be sent to other processes: take one that can be imported, such as a "
                "class or function of a module, or jobs=1"
            ) from error


def run_all(
    trace: Trace,
    policies: list[Policy],
    todo: list[tuple[int, int]],
    jobs: int,
    steps: Callable[[int], None] | None,
) -> list[Run]:
    """Replay a trace with several policies and pools.

    Args:
        trace: The trace.
        policies: The policies.
        todo: Number of a policy and blocks of a pool, for each run.
        jobs: Processes that take part.
        steps: Called now and then with how many requests more are done.

    Raises:
        InvalidRequestError: The processes could not do it.
    """
    if jobs == 1 or len(todo) == 1:
        return [run(trace, policies[number], blocks, steps) for number, blocks in todo]
    trace.paths.next_uses(0)  # once, before there are several processes
    # A progress bar has a thread, which a fork would not survive.
    context = multiprocessing.get_context("spawn")
    try:
        with ProcessPoolExecutor(min(jobs, len(todo)), context, _start, (trace, policies)) as pool:
            try:
                runs = []
                for found in pool.map(_run_one, todo):
                    runs.append(found)
                    if steps is not None:
                        steps(len(trace))
                return runs
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
    except BrokenProcessPool as error:
        raise InvalidRequestError(
            f"jobs={jobs}: a process ended before its work was done. In a script, call simulate below "
            'if __name__ == "__main__": as each process imports the script; if that is so, it may have run out of '
            "memory. jobs=1 needs no processes"
        ) from error


_work: tuple[Trace, list[Policy]]


def _start(trace: Trace, policies: list[Policy]) -> None:
    """In a process of its own: what all its runs have in common."""
    global _work
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that the user started
    _work = trace, policies


def _run_one(which: tuple[int, int]) -> Run:
    trace, policies = _work
    number, blocks = which
    return run(trace, policies[number], blocks)
