"""The rung that undoes what went wrong in the training itself: all go back to before it. Pure."""

from __future__ import annotations

from rerail.decide.ladder.strategy import Reason, Strategy, in_place_obstacle
from rerail.decide.setbacks import BAD_BATCH, UNHEALED, is_setback
from rerail.decide.situation import Situation
from rerail.flow import Cost, Diagnosis, Rung
from rerail.wording import ranks


def _answers(diagnosis: Diagnosis, now: Situation) -> Reason | None:
    if not is_setback(diagnosis):
        return None
    if diagnosis.code == BAD_BATCH:
        return Reason("batch-refused", "the script does not want this batch: all leave it out and take the next one")
    if diagnosis.code == UNHEALED:
        return Reason(
            "not-healed", "the loss is not what it was: all go back to the last exact state and compute again"
        )
    if now.setbacks.times > 1:
        why = "it went wrong again when the same was computed again: all go back once more and leave its data out"
        return Reason("leave-data-out", why)
    why = "all go back to before it and compute the same again: if it was a passing fault, it is gone"
    return Reason("compute-again", why)


def _obstacle(diagnosis: Diagnosis, now: Situation) -> str:
    if found := in_place_obstacle(now):
        return found
    if diagnosis.lost:
        return f"{ranks(diagnosis.lost)} cannot go on"
    return "" if is_setback(diagnosis) else "the training itself has not gone wrong"


ROLL_BACK = Strategy(
    rung=Rung.ROLL_BACK,
    usual=Cost(t0=1.0, t1=0.05, t2=0.02, t3=0.1),
    answers=_answers,
    obstacle=_obstacle,
)
