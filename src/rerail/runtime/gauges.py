"""Reads what ranks tell of their steps from their clock pages, once a beat, and only what is new. Called by `runtime.agent`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from rerail.runtime.clock import Metric, Took
from rerail.runtime.orders import Beat
from rerail.runtime.slots import Slot

PER_BEAT = 16
"""Steps of a rank that are told in one beat. Of faster ones every 2nd, 4th, 8th ... is told, the same by all ranks."""


class Told(NamedTuple):
    """What is new."""

    took: dict[int, list[Took]]
    metrics: dict[int, dict[str, Metric]]


class Gauges:
    """What has been told already, by place."""

    def __init__(self) -> None:
        self._told: dict[int, tuple[int, int]] = {}

    def beat(self, slots: Sequence[Slot], number: int) -> Beat:
        """What the controller is told of all ranks of the node."""
        placed = [(slot, slot.child) for slot in slots if slot.child is not None]
        told = self.read(slots)
        return Beat(
            versions={slot.rank: slot.version for slot, _ in placed},
            pids={slot.rank: child.pid for slot, child in placed},
            took=told.took,
            metrics=told.metrics,
            number=number,
        )

    def read(self, slots: Sequence[Slot]) -> Told:
        """One look at all ranks of the node."""
        return Told(self._took(slots), self._metrics(slots))

    def _took(self, slots: Sequence[Slot]) -> dict[int, list[Took]]:
        """New steps of every rank."""
        found: dict[int, list[Took]] = {}
        for slot in slots:
            if slot.child is None:
                continue
            pid, behind = self._told.get(slot.local_rank, (0, -1))
            steps = slot.clock.took(behind if pid == slot.child.pid else -1)
            if not steps:
                continue
            self._told[slot.local_rank] = slot.child.pid, steps[-1].version
            stride = 1 << max(0, math.ceil(math.log2(len(steps) / PER_BEAT)))
            found[slot.rank] = [step for step in steps if step.version % stride == 0]
        return found

    def _metrics(self, slots: Sequence[Slot]) -> dict[int, dict[str, Metric]]:
        """Newest metrics of every rank that has any."""
        found = {slot.rank: slot.clock.metrics() for slot in slots if slot.child is not None}
        return {rank: metrics for rank, metrics in found.items() if metrics}
