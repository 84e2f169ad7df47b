"""The scheduler: admission, chunked prefill, decode, preemption. Needs numpy, never torch."""

from radixkv.sched.config import SchedulerConfig
from radixkv.sched.request import Request, Sequence
from radixkv.sched.scheduler import Scheduler
from radixkv.sched.stats import SchedulerStats
from radixkv.sched.step import BlockMoves, Completed, Step

__all__ = [
    "BlockMoves",
    "Completed",
    "Request",
    "Scheduler",
    "SchedulerConfig",
    "SchedulerStats",
    "Sequence",
    "Step",
]
