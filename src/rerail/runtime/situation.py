"""Turns what the controller knows into the Situation that `decide.choose` is asked about. Called by `runtime.controller`."""

from __future__ import annotations

from rerail.decide.rules import Situation
from rerail.flow import Diagnosis
from rerail.runtime.fleet import Fleet, RankState


def seen_in(fleet: Fleet, diagnosis: Diagnosis) -> Situation:
    """The part that the fleet shows; the caller adds budget and history."""
    survivors = [rank for rank in fleet.members() if rank.rank not in diagnosis.lost]
    lost_nodes = {fleet.ranks[number].node for number in diagnosis.lost}
    return Situation(
        aware=fleet.aware,
        in_training=bool(survivors) and not fleet.dismissed and all(rank.can_be_interrupted() for rank in survivors),
        survivors=len(survivors),
        # one that may still come back will be told again
        nodes_up=all(fleet.agents[node].connected or fleet.agents[node].gone_since for node in lost_nodes),
        exited=len(fleet.in_state(RankState.EXITED)),
    )
