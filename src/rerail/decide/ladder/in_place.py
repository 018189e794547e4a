"""The rungs that leave every rank where it is: do the step again, or replace a process by a standby. Pure."""

from __future__ import annotations

from rerail.decide.budget import EVACUATE, NODE_BACK, UNBROKEN, raised
from rerail.decide.ladder.strategy import Reason, Strategy, barred_among, in_place_obstacle, replaced
from rerail.decide.setbacks import REFUSED, is_setback
from rerail.decide.situation import Situation, broken
from rerail.flow import Cost, Diagnosis, Rung
from rerail.wording import ranks

REPLICAS = ("training.replicas_tie", "training.replica_differs")


def _retry_answers(diagnosis: Diagnosis, now: Situation) -> Reason | None:
    if diagnosis.lost or diagnosis.rule == EVACUATE or diagnosis.code == NODE_BACK or is_setback(diagnosis):
        return None
    if diagnosis.code in REPLICAS:
        why = "all go back to where the replicas agreed and compute the same again: whoever was wrong shows"
        return Reason("replicas-differ", why)
    if diagnosis.code == REFUSED:
        why = "nothing has been changed yet: what was lost is restored in the next best way, or all go back"
        return Reason("source-refused", why)
    if diagnosis.rule in UNBROKEN:
        return Reason("all-alive", "every rank is alive: new connections are all it needs")
    if now.budget.raised_count <= 1:
        return Reason("raised-once", "first time at this step, and every process is alive")
    return None


def _retry_obstacle(diagnosis: Diagnosis, now: Situation) -> str:
    if found := in_place_obstacle(now):
        return found
    return f"{ranks(diagnosis.lost)} cannot go on" if diagnosis.lost else _spoilt(diagnosis)


def _spoilt(diagnosis: Diagnosis) -> str:
    return "what the ranks hold is not to be gone on from" if is_setback(diagnosis) and not diagnosis.lost else ""


def _replace_answers(diagnosis: Diagnosis, now: Situation) -> Reason | None:
    if diagnosis.lost:
        return Reason("rank-lost", "the other ranks are alive and keep their state")
    if raised(diagnosis) and not is_setback(diagnosis) and diagnosis.code != REFUSED:
        return Reason("raised-again", "the step raised again when it was retried: the process itself may be broken")
    if diagnosis.rule == EVACUATE and Rung.RESET_DEVICE in now.tried and not now.free:
        why = f"{now.tried[Rung.RESET_DEVICE]}; there is no other place, so a new process goes on in the same one"
        return Reason("reset-failed", why)
    return None


def _replace_obstacle(diagnosis: Diagnosis, now: Situation) -> str:
    if found := in_place_obstacle(now):
        return found
    if not broken(diagnosis) or _spoilt(diagnosis):
        return _spoilt(diagnosis) or "no rank is broken"
    return next((now.barred[rank] for rank in barred_among(diagnosis, now)), "") or now.worn


RETRY_STEP = Strategy(
    rung=Rung.RETRY_STEP,
    usual=Cost(t1=0.05, t2=0.02),
    answers=_retry_answers,
    obstacle=_retry_obstacle,
)
REPLACE_RANK = Strategy(
    rung=Rung.REPLACE_RANK,
    usual=Cost(t1=0.3, t2=0.02, t3=0.05),
    answers=_replace_answers,
    obstacle=_replace_obstacle,
    replaces=replaced,
)
