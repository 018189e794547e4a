"""The rung that repairs a device where it is: reset it, while the others wait, then replace its rank there. Pure."""

from __future__ import annotations

from rerail.decide.ladder.strategy import Reason, Strategy, in_place_obstacle, replaced
from rerail.decide.situation import Situation, broken
from rerail.flow import Cost, Diagnosis, Rung


def _answers(diagnosis: Diagnosis, now: Situation) -> Reason | None:
    if not now.wants_reset or not broken(diagnosis):
        return None
    return Reason("reset-device", "its device needs a reset, and may be as good as new then")


def _obstacle(diagnosis: Diagnosis, now: Situation) -> str:
    if found := in_place_obstacle(now):
        return found
    if not broken(diagnosis):
        return "no rank is broken"
    if not now.wants_reset:
        return "no device needs a reset"
    return next((why for rank in broken(diagnosis) if (why := now.no_reset.get(rank, ""))), "")


RESET_DEVICE = Strategy(
    rung=Rung.RESET_DEVICE,
    usual=Cost(t1=10.0, t2=0.02, t3=0.05),
    answers=_answers,
    obstacle=_obstacle,
    replaces=replaced,
)
