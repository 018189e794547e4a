"""Brings the steps of ranks together: turns what single ranks report into whole steps, ready to be compared. Pure.

Called by `diagnose.straggler`. Ranks report each for itself, in any order; some reports are lost, ranks come and go. A
step is whole when every known rank has reported it or a later one, or has fallen too far behind to be waited for.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Generic, TypeVar

Report = TypeVar("Report")
Found = TypeVar("Found")

LAG = 128
"""Steps a rank may be behind before the others go on without it. Reports come in lots, one rank's after the other's."""
LATE = 8
"""A rank that reports a step so far behind its own newest has gone back; fewer, and the report is merely late."""


class Lockstep(ABC, Generic[Report, Found]):
    """Reports of ranks, kept until their step is whole and can be judged."""

    def __init__(self) -> None:
        self._begin(0)

    @abstractmethod
    def judge(self, step: int, reports: dict[int, Report]) -> list[Found]:
        """What a whole step shows; called once for each, in order."""

    def _begin(self, step: int) -> None:
        self._open: dict[int, dict[int, Report]] = {}
        """Reports by step and rank, only of steps that are not done."""
        self._last: dict[int, int] = {}
        """The newest step of each rank."""
        self._done = self._newest = step - 1
        self._behind = 0
        """Ranks that have not come beyond the steps that are done."""

    def take(self, rank: int, step: int, report: Report) -> list[Found]:
        """One report; what the steps show that are whole by it."""
        last, reports = self._last.get(rank, -1), self._open.get(step)
        if reports is None or not -1 < last < step:
            return self._take_irregular(rank, step, report)
        reports[rank] = report
        self._last[rank] = step
        if last <= self._done:
            self._behind -= 1
            if not self._behind:
                return self._settle()
        return []

    def forget(self, rank: int) -> list[Found]:
        """The rank is gone; the others need not wait for it."""
        for reports in self._open.values():
            reports.pop(rank, None)
        if -1 < self._last.pop(rank, -1) <= self._done:
            self._behind -= 1
        return [] if self._behind else self._settle()

    def _take_irregular(self, rank: int, step: int, report: Report) -> list[Found]:
        """The first report of a step, the first of a rank, one that comes late, or one of a job that went back."""
        last = self._last.get(rank, -1)
        if step <= last - LATE:
            self._begin(step)  # the job went back: what was under way is void
            last = -1
        if step <= self._newest - LAG:
            return []  # too late to be compared
        if step > self._done:
            self._open.setdefault(step, {})[rank] = report
            if -1 < last <= self._done:
                self._behind -= 1
        elif last < 0:
            self._behind += 1
        self._last[rank] = max(last, step)
        self._newest = max(self._newest, step)
        return [] if self._behind and self._newest - self._done <= LAG else self._settle()

    def _settle(self) -> list[Found]:
        """Judge all steps up to where the hindmost stands, without those that are too far behind to wait for."""
        lasts = list(self._last.values())
        if min(lasts, default=0) <= self._newest - LAG:
            self._last = {rank: last for rank, last in self._last.items() if last > self._newest - LAG}
            lasts = list(self._last.values())
        self._done = max(self._done, min(lasts, default=-1))
        self._behind = lasts.count(self._done)
        whole = [(step, self._open.pop(step)) for step in sorted(self._open) if step <= self._done]
        return [one for step, reports in whole for one in self.judge(step, reports)]
