"""Turns the agents' beats into samples of the job's time, at a bounded rate, and marks when it begins, trains and ends.

Called by `runtime.controller`: with every beat, for every checkpoint, and once a turn. Judges nothing: what the time was lost to, or won for, is for
`report.accounts`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from rerail.flow import Signal
from rerail.runtime.clock import Took
from rerail.runtime.fleet import Fleet
from rerail.runtime.journal import Journal
from rerail.runtime.orders import Beat
from rerail.runtime.samples import MOST, Mark, MarkKind, Sample

SAVED = "checkpoint.saved"
PERIOD_S = 1.0
"""Between two samples; twice as long each time the journal has halved them."""


class Sampler:
    """What was heard since the last sample."""

    def __init__(self, fleet: Fleet, before: Sequence[Sample] = (), *, taking_over: bool = False) -> None:
        self._fleet, self._period_s, self._count = fleet, _period(before), len(before)
        last = before[-1].step if before and taking_over else -1
        self._high = last if last >= 0 else None
        """The highest version so far; None: no step has been completed."""
        self._begun = MarkKind.TAKEOVER if taking_over else MarkKind.BEGIN
        self._since: float | None = None
        self._steps, self._moved = 0, 0.0
        self._loss: float | None = None
        self._sums: dict[int, list[float]] = {}
        """By rank: seconds of data, compute, communication and checkpoint, and how many steps they are the sum of."""
        self._summed: dict[int, int] = {}
        """By rank: the version up to which its steps have been added."""
        self._saves, self._saved = 0, -1
        """Checkpoints, and the version of the newest."""
        self._marks: list[Mark] = []

    @classmethod
    def of(cls, fleet: Fleet, journal: Journal, taking_over: bool) -> Sampler:
        """The one of a controller that begins, or goes on where another was."""
        return cls(fleet, journal.history()[0], taking_over=taking_over)

    def hear(self, beat: Beat, wall: float) -> None:
        """What the ranks of one node tell of their steps."""
        first = min(beat.metrics, default=-1)
        loss = beat.metrics[first].get("loss") if first >= 0 else None
        if loss is not None and math.isfinite(loss.value):
            self._loss = loss.value
        told = [took.version for steps in beat.took.values() for took in steps]
        if self._high is None and told:  # before that a version says little: a checkpoint may yet be loaded
            self._high = min(told) - 1
            self._marks.append(Mark(wall - _longest(beat), MarkKind.TRAINED, str(self._high)))
        self._rise(max(beat.versions.values(), default=-1), wall)
        for rank, steps in beat.took.items():
            self._add(rank, steps)

    def note(self, signal: Signal) -> None:
        """A rank tells of a checkpoint; several may tell of the same."""
        if signal.source == SAVED and signal.step != self._saved:
            self._saves, self._saved = self._saves + 1, signal.step

    def tick(self, now: float, wall: float, exit_code: int | None) -> tuple[list[Sample], list[Mark]]:
        """What is to be written in this turn; mostly nothing."""
        self._rise(self._fleet.high_version, wall)
        marks, self._marks = self._marks, []
        if self._since is None:
            self._since = now
            marks.insert(0, Mark(wall, self._begun))
        if exit_code is not None:
            return [self._sample(now, wall)], [*marks, Mark(wall, MarkKind.END, str(exit_code))]
        return [self._sample(now, wall)] if now - self._since >= self._period_s else [], marks

    def _rise(self, version: int, wall: float) -> None:
        """This version was reached by now."""
        if self._high is not None and version > self._high:
            self._steps += version - self._high
            self._high, self._moved = version, wall

    def _sample(self, now: float, wall: float) -> Sample:
        fleet, span = self._fleet, now - self._since if self._since is not None else 0.0
        ready = fleet.connected()
        data, compute, communication, checkpoint, told = self._slowest()
        sample = Sample(
            at=wall,
            span_s=span,
            step=self._high if self._high is not None else -1,
            steps=self._steps,
            moved=self._moved,
            loss=self._loss,
            data=data,
            compute=compute,
            communication=communication,
            checkpoint=checkpoint,
            told=told,
            standbys=sum(agent.ready for agent in ready),
            spares=max(0, sum(max(agent.devices, agent.slots) for agent in ready) - len(fleet.ranks)),
            joined=sum(rank.joined for rank in fleet.ranks.values()),
            saves=self._saves,
        )
        self._since, self._steps, self._moved, self._loss, self._saves = now, 0, 0.0, None, 0
        self._sums.clear()
        self._count += 1
        if self._count > MOST:
            self._count, self._period_s = (self._count + 1) // 2, self._period_s * 2
        return sample

    def _add(self, rank: int, steps: list[Took]) -> None:
        sums, behind = self._sums.setdefault(rank, [0.0] * 5), self._summed.get(rank, -1)
        for took in steps:
            known = math.isfinite(took.data + took.compute + took.communication + took.checkpoint)
            if (
                took.version > behind and known
            ):  # a new process finds its predecessor's steps in the page and tells them again
                for place, seconds in enumerate((took.data, took.compute, took.communication, took.checkpoint, 1.0)):
                    sums[place] += seconds
        self._summed[rank] = max(behind, max((took.version for took in steps), default=-1))

    def _slowest(self) -> tuple[float, float, float, float, int]:
        """Means of the rank that waited least for others: its steps are what the job's time went into."""
        found = [sums for sums in self._sums.values() if sums[4]]
        if not found:
            return 0.0, 0.0, 0.0, 0.0, 0
        *seconds, told = min(found, key=lambda sums: sums[2] / sums[4])
        data, compute, communication, checkpoint = (value / told for value in seconds)
        return data, compute, communication, checkpoint, int(told)


def _longest(beat: Beat) -> float:
    """Seconds of the first steps that are told, on the rank where they took longest."""
    return max(
        (sum(t.data + t.compute + t.communication + t.checkpoint for t in s) for s in beat.took.values()), default=0.0
    )


def _period(before: Sequence[Sample]) -> float:
    """The one these were taken with, however often they have been merged since."""
    usual = statistics.median([sample.span_s for sample in before] or [PERIOD_S])
    return PERIOD_S * 2 ** max(0, round(math.log2(usual / PERIOD_S))) if usual > PERIOD_S else PERIOD_S
