"""The rungs that keep nothing: start all ranks again, or stop. Pure."""

from __future__ import annotations

from rerail.decide.ladder.strategy import Reason, Strategy, barred_among
from rerail.decide.situation import Situation
from rerail.flow import Cost, Diagnosis, Rung

NODE_S = 30.0
"""What it counts for that a node may have to be waited for."""


def _restart_waits(diagnosis: Diagnosis, now: Situation) -> Cost:
    return Cost(t1=NODE_S if len(barred_among(diagnosis, now)) > len(now.free) else 0.0)


def _restart_obstacle(diagnosis: Diagnosis, now: Situation) -> str:
    if now.budget.restarts_used >= now.restarts_allowed:
        return f"restart budget used up ({now.budget.restarts_used} of {now.restarts_allowed})"
    return now.homeless


RESTART_ALL = Strategy(
    rung=Rung.RESTART_ALL,
    usual=Cost(t0=5.0, t1=2.0, t2=0.1, t3=1.0),
    answers=lambda diagnosis, now: Reason("restart", "no finer repair is possible"),
    obstacle=_restart_obstacle,
    besides=_restart_waits,
)
STOP = Strategy(
    rung=Rung.STOP,
    usual=Cost(),
    answers=lambda diagnosis, now: Reason("nothing-left", "nothing else can be done"),
    obstacle=lambda diagnosis, now: "",
)
