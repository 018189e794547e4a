"""What a rung of the ladder is: which faults it answers, what stands in its way, what it costs. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import msgspec

from rerail.decide.situation import Situation, broken
from rerail.flow import Cost, Diagnosis, Place, Rung


class Reason(NamedTuple):
    """Why a rung answers a fault: the name of the rule, for the journal, and words for people."""

    rule: str
    why: str


Moves = dict[int, Place]


def replaced(diagnosis: Diagnosis, now: Situation) -> tuple[int, ...]:
    """For rungs that end the processes of the broken ranks."""
    return broken(diagnosis)


def _nobody(diagnosis: Diagnosis, now: Situation) -> tuple[int, ...]:
    return ()


def _nowhere(diagnosis: Diagnosis, now: Situation) -> Moves:
    return {}


class Strategy(msgspec.Struct, frozen=True, kw_only=True):
    """One rung."""

    rung: Rung
    usual: Cost
    """Expected before this job has had a recovery of that kind: orders of magnitude, measured on small models."""
    answers: Callable[[Diagnosis, Situation], Reason | None]
    """None: it would not help against this."""
    obstacle: Callable[[Diagnosis, Situation], str]
    """Why it cannot be taken now, or nothing."""
    replaces: Callable[[Diagnosis, Situation], tuple[int, ...]] = _nobody
    """Ranks whose processes it ends."""
    moves: Callable[[Diagnosis, Situation], Moves] = _nowhere
    """Ranks that it gives another place."""
    besides: Callable[[Diagnosis, Situation], Cost] = lambda diagnosis, now: Cost()
    """What it costs beyond that, as things stand now."""


def in_place_obstacle(now: Situation) -> str:
    """What keeps the survivors from being kept."""
    if not now.aware:
        return "the script does not call rerail.join(), so its ranks cannot be repaired in place"
    if now.exited:
        return f"{now.exited} ranks have ended already"
    if not now.survivors:
        return "no rank has survived"
    if not now.in_training:
        return "not every rank has completed a step yet"
    return ""


def barred_among(diagnosis: Diagnosis, now: Situation) -> list[int]:
    """Ranks to be replaced that cannot stay where they are."""
    return [rank for rank in broken(diagnosis) if rank in now.barred]
