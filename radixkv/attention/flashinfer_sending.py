"""The tables of a cut step, on the device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from radixkv.attention.flashinfer_plan import Launch, StepCut
from radixkv.attention.flashinfer_transfer import Transfers
from radixkv.attention.interface import AttentionBatch, AttentionSpec

__all__ = ["PlannedLaunch", "PlannedStep", "send_step"]


class PlannedLaunch:
    """A launch whose page table is on the device.

    Args:
        launch: From the plan of the step.
        indices: int32 `[pages]` on the device.
        mask: bool `[rows]` on the device, or None.
    """

    __slots__ = ("indices", "launch", "mask", "num_rows", "run", "start", "stop")

    def __init__(self, launch: Launch, indices: Tensor, mask: Tensor | None) -> None:
        self.launch, self.indices, self.mask = launch, indices, mask
        self.start, self.stop = launch.first_row, launch.stop_row
        self.num_rows = self.stop - self.start
        # Set by `Wrappers.plan`.
        self.run: Any = None


class PlannedStep:
    """A step for one kind of layers, its tables on the device.

    Attributes:
        own, shared: Launches.
        order: int32 `[T]`: rows in the order of the launches, on the device; None: as they are.
        inverse: int32 `[T]`: where each row then is.
        dtype: That the wrappers are planned for; None while they are not.
        checked: Whether the tensors of this step have been looked at.
    """

    __slots__ = ("checked", "dtype", "inverse", "order", "own", "shared")

    def __init__(self) -> None:
        self.own: list[PlannedLaunch] = []
        self.shared: list[PlannedLaunch] = []
        self.order: Tensor | None = None
        self.inverse: Tensor | None = None
        self.dtype: torch.dtype | None = None
        self.checked = False

    def roles(self) -> Iterator[tuple[str, PlannedLaunch]]:
        """The launches with what each is among them: every role of a kind has a wrapper of its own."""
        for one in self.own:
            yield "decodes" if one.launch.decode else "prompts", one
        for depth, one in enumerate(self.shared):
            yield f"shared {depth}", one


def send_step(
    batch: AttentionBatch, cuts: dict[AttentionSpec, StepCut], transfers: Transfers
) -> dict[AttentionSpec, PlannedStep]:
    """Put all tables of a step on the device, in one transfer.

    Args:
        batch: The step.
        cuts: The step cut for each kind of layers. Kinds that have one cut in common share its tables.
        transfers: The way there.
    """
    layout = _Layout()
    for cut in cuts.values():
        for launch in cut.launches:
            layout.add(id(launch.table), launch.table.num_pages)
            if launch.mask is not None:
                layout.add(id(launch.mask), -(-len(launch.mask) // 4))
        if cut.order is not None:
            layout.add(id(cut.order), 2 * len(cut.order))
    if not layout.size:
        return {spec: PlannedStep() for spec in cuts}
    host = transfers.host(layout.size)
    for cut in cuts.values():
        for launch in cut.launches:
            launch.table.write(batch.block_tables, layout.part(id(launch.table), host))
            if launch.mask is not None:
                layout.part(id(launch.mask), host).view(np.bool_)[: len(launch.mask)] = launch.mask
        if cut.order is not None:
            both = layout.part(id(cut.order), host).reshape(2, -1)
            both[0] = cut.order
            both[1, cut.order] = np.arange(len(cut.order))
    device = transfers.send(layout.size)
    steps = {}
    for spec, cut in cuts.items():
        step = steps[spec] = PlannedStep()
        for launches, planned in ((cut.own, step.own), (cut.shared, step.shared)):
            for launch in launches:
                mask = None
                if launch.mask is not None:
                    bits = layout.part(id(launch.mask), device).view(torch.uint8)
                    mask = bits[: len(launch.mask)].view(torch.bool)
                planned.append(PlannedLaunch(launch, layout.part(id(launch.table), device), mask))
        if cut.order is not None:
            step.order, step.inverse = layout.part(id(cut.order), device).view(2, -1)
    return steps


class _Layout:
    """Where several int32 arrays lie in one, each at a border of 16 bytes."""

    def __init__(self) -> None:
        self.size = 0
        self._places: dict[int, tuple[int, int]] = {}

    def add(self, key: int, size: int) -> None:
        if key not in self._places:
            self._places[key] = self.size, size
            self.size += -(-size // 4) * 4

    def part(self, key: int, whole: Any) -> Any:
        start, size = self._places[key]
        return whole[start : start + size]
