"""A device that works later than it is told to, as a GPU does: nothing is known to be done until somebody waits."""

from __future__ import annotations

import contextlib
import functools
from collections import deque

import torch
from torch.utils._python_dispatch import _disable_current_modes

from radixkv.attention.flashinfer_transfer import Transfers


class ContractError(AssertionError):
    """A call breaks FlashInfer's contract; on a GPU it would compute something else, or crash."""


def demand(condition, message):
    if not condition:
        raise ContractError(message)


@contextlib.contextmanager
def unwatched():
    """What the double itself does with tensors is not seen by those who watch this thread."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        yield


def recorded(name):
    """Note a call as it was made. The first argument leads to the double."""

    def decorate(function):
        @functools.wraps(function)
        def noted(self, *args, **kwargs):
            double = getattr(self, "double", self)
            double.calls.append((name, args, kwargs))
            return function(self, *args, **kwargs)

        return noted

    return decorate


class Timeline:
    """What the device has been given, and what the host knows to be done.

    Copies from page-locked memory are looked at as late as they may happen: when a kernel is about to read what they
    bring.

    Attributes:
        given: Number of the last operation given to the device.
        known: Number of the last one that the host waited for.
        steps: Transfers so far.
    """

    def __init__(self):
        self.given = self.known = self.steps = 0
        self._pending = []
        # Kept alive, so that no other tensor gets their memory.
        self._on_device = deque(maxlen=16)
        self._stays = []

    def enqueue(self, operation=None):
        self.given += 1
        if operation is not None:
            self._pending.append(operation)
        return self.given

    def execute(self):
        """Do all that is pending, as before a kernel."""
        pending, self._pending = self._pending, []
        with unwatched():
            for operation in pending:
                operation()

    def synchronize(self, number=None):
        """Wait for an operation, or for all."""
        self.execute()
        self.known = max(self.known, self.given if number is None else number)

    def put(self, tensor):
        """Call a tensor one on the device."""
        self._on_device.append(tensor)
        return tensor

    def keep(self, tensor):
        """Call a tensor one that stays on the device."""
        self._stays.append(tensor)
        return tensor

    @property
    def tells_places(self):
        """Whether tensors on the device are known."""
        return bool(self._on_device)

    def holds(self, tensor):
        place = tensor.untyped_storage().data_ptr()
        return any(one.untyped_storage().data_ptr() == place for one in (*self._on_device, *self._stays))


class FakeEvent:
    def __init__(self, timeline):
        self._timeline, self._number = timeline, timeline.given

    def query(self):
        return self._timeline.known >= self._number

    def synchronize(self):
        self._timeline.synchronize(self._number)


class FakeTransfers(Transfers):
    """Transfers to a device whose copies are late, and which notices memory that is written before it is read."""

    def __init__(self, device, timeline):
        super().__init__(device)
        self.timeline = timeline
        self.num_transfers = 0
        self._sent = {}  # number of the last transfer from each buffer

    def host(self, size):
        array = super().host(size)
        number = self._sent.get(id(self._buffers[self._turn]), 0)
        demand(
            number <= self.timeline.known,
            "page-locked memory is written while its last transfer may be under way",
        )
        return array

    def _copy(self, host):
        self.num_transfers += 1
        self.timeline.steps += 1
        # At once, since torch's own operations on the result do not wait for the timeline; what counts is that the
        # same would come of it later.
        target = host.clone()
        self.timeline.put(target)

        def arrive():
            demand(torch.equal(host, target), "page-locked memory was written before its transfer")

        self._sent[id(self._buffers[self._turn])] = self.timeline.enqueue(arrive)
        return target

    def empty(self, size):
        return self.timeline.keep(super().empty(size))

    def _copy_into(self, target, host):
        demand(self.timeline.holds(target), "the place must be on the device")
        self.num_transfers += 1
        self.timeline.steps += 1
        target.copy_(host)

        def arrive():
            demand(torch.equal(host, target), "page-locked memory was written before its transfer")

        self._sent[id(self._buffers[self._turn])] = self.timeline.enqueue(arrive)

    def mark(self):
        return FakeEvent(self.timeline)
