"""Turns what the controller knows into the Situation that `decide.choose` is asked about. Called by `runtime.controller`."""

from __future__ import annotations

from typing import Protocol

import msgspec

from rerail.config import Settings
from rerail.decide.axes import Repair
from rerail.decide.budget import EVACUATE, Budget
from rerail.decide.situation import Situation, broken
from rerail.diagnose.classify import Classifier
from rerail.flow import Diagnosis, Rung
from rerail.runtime.experience import Experience
from rerail.runtime.fleet import Fleet, RankState
from rerail.runtime.handling import Handling
from rerail.runtime.rollbacks import Rollbacks

NAMED = 4
"""Ranks that are named where there may be many."""


class Desk(Protocol):
    """What is needed of `runtime.controller.Controller`; the controller knows this module, not the other way round."""

    fleet: Fleet
    settings: Settings
    classifier: Classifier
    handling: Handling
    rollbacks: Rollbacks
    budget: Budget
    experience: Experience


def situation_of(
    desk: Desk, diagnosis: Diagnosis, tried: dict[Rung, str], *, settled: bool, restarts_allowed: int, at: float
) -> Situation:
    """All of it."""
    fault = desk.classifier.catalog.get(diagnosis.code)
    verdict = desk.handling.verdict(diagnosis.code, node=diagnosis.node)
    acts = bool(diagnosis.lost) or diagnosis.rule == EVACUATE
    starting = {rank: desk.fleet.ranks[rank].node for rank in broken(diagnosis)}
    return msgspec.structs.replace(
        seen_in(desk.fleet, diagnosis),
        settled=settled,
        programming=fault is not None and fault.kind == "programming",
        tried=tried,
        budget=desk.budget,
        restarts_allowed=restarts_allowed,
        no_progress_limit=max(1, desk.settings.no_progress_limit),
        history=desk.experience.history,
        tallies=desk.experience.tallies,
        worn=desk.handling.may_restart(starting, at),
        wants_reset=verdict.axes.repair is Repair.RESET_DEVICE,
        no_reset={rank: why for rank in starting if (why := _no_reset(desk, rank, at))},
        rungs=verdict.rungs,
        # what a process says of itself, and that a node was out of reach, is no verdict on a device
        unfit=verdict.unfit if fault is not None and fault.hardware and fault.scope == "device" and acts else {},
        **desk.rollbacks.facts(diagnosis),
    )


def _no_reset(desk: Desk, rank: int, at: float) -> str:
    """Why the device of a rank cannot be reset now, or nothing."""
    place = desk.fleet.ranks[rank].place
    agent = desk.fleet.agents.get(place.node)
    if agent is None or not agent.connected:
        return f"node {place.node} is not connected"
    if not agent.resets:
        return f"no command is known that resets devices of {place.node} (setting reset_command)"
    return desk.handling.may_reset(f"device:{place}", at)


def seen_in(fleet: Fleet, diagnosis: Diagnosis) -> Situation:
    """The part that the fleet shows."""
    survivors = [rank for rank in fleet.members() if rank.rank not in diagnosis.lost]
    fillable = tuple(rank.rank for rank in fleet.fillable())
    return Situation(
        aware=fleet.aware,
        in_training=bool(survivors) and not fleet.dismissed and all(rank.can_be_interrupted() for rank in survivors),
        survivors=len(survivors),
        exited=len(fleet.in_state(RankState.EXITED)),
        places={rank.rank: rank.place for rank in fleet.ranks.values()},
        barred={rank: why for rank in (*diagnosis.lost, *diagnosis.ranks, *fillable) if (why := fleet.bar(rank))},
        free=tuple(fleet.free()),
        homeless=_homeless(fleet),
        elastic=fleet.elastic,
        fillable=fillable,
        newcomers=tuple(rank.rank for rank in fleet.members() if rank.newcomer),
    )


def _homeless(fleet: Fleet) -> str:
    """Why there are not enough healthy places, with the ranks whose places are lost and what has taken them; or nothing."""
    lacking = fleet.homeless()
    lost = [f"rank {r.rank} on {r.place} ({why})" for r in fleet.ranks.values() if (why := fleet.is_isolated(r.place))]
    more = f" and {len(lost) - NAMED} more" if len(lost) > NAMED else ""
    return f"{lacking}: {', '.join(lost[:NAMED])}{more}" if lacking and lost else lacking
