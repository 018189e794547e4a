"""Everything that a decision may depend on besides the diagnosis. Pure.

Made by `runtime.situation` and by the simulator, read by `decide.choose`, `decide.verdicts` and the rungs in `decide.ladder`.
"""

from __future__ import annotations

import msgspec

from rerail.decide.budget import Budget
from rerail.decide.setbacks import Setbacks
from rerail.flow import Cost, Diagnosis, Place, Rung


class Tally(msgspec.Struct, frozen=True, array_like=True):
    """How often a rung was taken in this job, and how often it brought the job back."""

    taken: int = 0
    ok: int = 0

    @property
    def odds(self) -> float:
        """A first guess that is sure, and less so with every failure."""
        return (self.ok + 1) / (self.taken + 1)


class Situation(msgspec.Struct, frozen=True, kw_only=True):
    """What is known when a decision is made."""

    aware: bool
    """Every rank has called rerail.join() and its groups can be rebuilt."""
    in_training: bool
    """Every survivor has completed a step, so it can be interrupted and has something to keep."""
    settled: bool = False
    """The script has run for a while; an error now is not a failure to start."""
    programming: bool = False
    """The fault is of the kind that fails in the same way each time: a wrong name, a missing module."""
    survivors: int
    exited: int = 0
    """Ranks that have ended with exit code 0."""
    elastic: bool = False
    """The script can go on without some of its ranks."""
    fillable: tuple[int, ...] = ()
    """Empty seats for which there is a place."""
    newcomers: tuple[int, ...] = ()
    """Ranks that are being built."""
    places: dict[int, Place] = {}
    """Where each rank is."""
    barred: dict[int, str] = {}
    """Ranks whose place cannot be used now, and why."""
    free: tuple[Place, ...] = ()
    """Places that are empty and healthy, the best first."""
    homeless: str = ""
    """Why there are not enough healthy places for all ranks, whoever moves where."""
    rungs: tuple[Rung, ...] = ()
    """What the policy allows for this fault, what is to be tried first at the front; empty: everything."""
    unfit: dict[Rung, str] = {}
    """Rungs that would leave this fault as it is."""
    wants_reset: bool = False
    """The fault is one that a reset of the device repairs."""
    no_reset: dict[int, str] = {}
    """Ranks whose device cannot be reset now, and why."""
    worn: str = ""
    """Why the broken ranks are not to be started anew where they are: it was done too often of late."""
    tried: dict[Rung, str] = {}
    """Rungs that have failed in this incident, with the reason."""
    budget: Budget = Budget()
    restarts_allowed: int = 3
    no_progress_limit: int = 3
    setbacks: Setbacks = Setbacks()
    roll_back_limit: int = 3
    kept_before: bool = True
    """There is a checkpoint from before the fault, or nothing has been trained that could be lost."""
    history: dict[Rung, Cost] = {}
    """What each rung has usually cost in this job so far."""
    tallies: dict[Rung, Tally] = {}


def broken(diagnosis: Diagnosis) -> tuple[int, ...]:
    """Ranks that a repair would replace."""
    return diagnosis.lost or diagnosis.ranks
