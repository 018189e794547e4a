"""The rungs that change how many ranks there are: go on without some, and fill their seats again later. Pure."""

from __future__ import annotations

from rerail.decide.budget import NODE_BACK
from rerail.decide.ladder.strategy import Moves, Reason, Strategy, in_place_obstacle
from rerail.decide.situation import Situation
from rerail.flow import Cost, Diagnosis, Rung

FEWER_S = 20.0
"""What it counts for that fewer ranks do the work until the seats are filled: more than any repair, less than waiting for a node."""


def _shrink_answers(diagnosis: Diagnosis, now: Situation) -> Reason | None:
    if diagnosis.lost:
        return Reason("fewer-ranks", "the others share the work of the lost ranks until these are back")
    if diagnosis.code == NODE_BACK:
        return Reason("not-back", "the empty seats could not be filled, and the others go on without")
    return None


def _shrink_obstacle(diagnosis: Diagnosis, now: Situation) -> str:
    if found := in_place_obstacle(now):
        return found
    if not now.elastic:
        return "the script does not share its data by job.deal() and job.weight, so no rank can be done without"
    return "" if diagnosis.lost or now.newcomers else "no rank is broken"


def _grow_answers(diagnosis: Diagnosis, now: Situation) -> Reason | None:
    return Reason("node-back", "there is a place for the empty seats again") if diagnosis.code == NODE_BACK else None


def _grow_obstacle(diagnosis: Diagnosis, now: Situation) -> str:
    return in_place_obstacle(now) or ("" if now.fillable else "no seat is empty, or there is no place for it")


def _grow_moves(diagnosis: Diagnosis, now: Situation) -> Moves:
    return dict(zip((rank for rank in now.fillable if rank in now.barred), now.free, strict=False))


def _shrink_besides(diagnosis: Diagnosis, now: Situation) -> Cost:
    """Fewer ranks do the work, and the seats have to be filled again one day."""
    if not diagnosis.lost:
        return Cost()
    filled = now.history.get(Rung.GROW, GROW.usual)
    return Cost(t0=FEWER_S + filled.t0, t1=filled.t1, t2=filled.t2, t3=filled.t3, t4=filled.t4)


GROW = Strategy(
    rung=Rung.GROW,
    usual=Cost(t1=2.0, t2=0.02, t3=0.05),
    answers=_grow_answers,
    obstacle=_grow_obstacle,
    replaces=lambda diagnosis, now: now.fillable,
    moves=_grow_moves,
)
SHRINK = Strategy(
    rung=Rung.SHRINK,
    usual=Cost(t1=0.1, t2=0.02),
    answers=_shrink_answers,
    obstacle=_shrink_obstacle,
    replaces=lambda diagnosis, now: diagnosis.lost or now.newcomers,
    besides=_shrink_besides,
)
