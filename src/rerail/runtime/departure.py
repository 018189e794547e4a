"""The user's wish to end the job: has all ranks keep what they hold, at one version, before they are ended.

    LeaveJob -> InterruptAll -> Parked -> FormAll(leaving) -> a snapshot of that very version -> Formed -> Shutdown

What is in memory then is saved by `checkpoint.gasp`, so that a preemption costs no step. Whatever comes in between ends the job at
once: the newest snapshot is older then. Called by `runtime.controller`.
"""

from __future__ import annotations

import msgspec

from rerail.flow import Decision, Rung, new_id
from rerail.recover.execute import Execution
from rerail.recover.stages import Stage
from rerail.runtime.fleet import Fleet, RankState
from rerail.runtime.orders import LeaveJob

LIMIT_S = 6.0
"""Seconds that the ranks have for it. Agents wait for the controller's answer for a little longer."""


class Departure:
    """Of one job."""

    def __init__(self, fleet: Fleet, execution: Execution) -> None:
        self._fleet, self._execution = fleet, execution
        self._asked: LeaveJob | None = None
        self.deadline: float | None = None

    @property
    def asked(self) -> bool:
        """From now on faults are no matter."""
        return self._asked is not None

    def ask(self, wish: LeaveJob, calm: bool, now: float, wall: float) -> None:
        """`calm`: nothing is being repaired."""
        if self._asked is not None:
            return
        self._asked, self.deadline = wish, now
        fleet, members = self._fleet, self._fleet.members()
        if (
            calm
            and fleet.aware
            and members
            and not fleet.dismissed
            and all(rank.can_be_interrupted() for rank in members)
        ):
            self.deadline = now + LIMIT_S
            self._execution.leaving = True
            fleet.back = msgspec.structs.replace(fleet.back, trusted=-1)  # of a fault that is over
            again = Decision(id=new_id("decision"), job="", at=wall, cause_id="", rung=Rung.RETRY_STEP)
            self._execution.repair(again, now, wall)

    def over(self, now: float) -> LeaveJob | None:
        """What was asked, once there is nothing to wait for any more."""
        if self._asked is None or self.deadline is None:
            return None
        execution, gone = self._execution, self._fleet.in_state(RankState.LOST, RankState.EXITED)
        kept = execution.stage in (Stage.REPLAYING, Stage.IDLE)
        return self._asked if kept or gone or execution.problem or now >= self.deadline else None
