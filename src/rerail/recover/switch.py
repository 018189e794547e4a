"""Newcomers that are made ready beside the ranks whose places they take: the first half of a hot switch.

    begin: Promote(beside) -> [training goes on] -> ready: all of them are parked -> the ordinary repair, with them in it

Kept by `recover.execute`. A fault meanwhile, or a newcomer that dies or takes too long, ends it: nothing has been lost.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from rerail.flow import Place
from rerail.runtime.fleet import Fleet, RankState
from rerail.runtime.orders import RankExited, Vacate
from rerail.runtime.wire import FromRank, Parked


@dataclass
class Beside:
    """One newcomer."""

    place: Place
    since: float
    parked: Parked | None = None


@dataclass
class Switch:
    """All newcomers of one hot switch."""

    fleet: Fleet
    waiting: dict[int, Beside] = field(default_factory=dict)
    problem: str = ""
    """Why it comes to nothing."""

    def begin(self, moves: Mapping[int, Place], now: float) -> None:
        self.waiting, self.problem = {rank: Beside(place, now) for rank, place in moves.items()}, ""

    def heard(self, rank: int, message: FromRank | RankExited) -> None:
        """The word of a newcomer."""
        if rank not in self.waiting:
            return
        if isinstance(message, Parked):
            self.waiting[rank].parked = message
        elif isinstance(message, RankExited):
            self.problem = f"the spare for rank {rank} died while it was made ready"

    @property
    def ready(self) -> bool:
        return bool(self.waiting) and all(one.parked is not None for one in self.waiting.values())

    def overdue(self, now: float, limit_s: float) -> None:
        """Give up a newcomer that takes too long, or whose node is gone."""
        for rank, one in self.waiting.items():
            agent = self.fleet.agents.get(one.place.node)
            if agent is None or not agent.connected:
                self.problem = f"node {one.place.node} was lost while a spare for rank {rank} was made ready there"
            elif one.parked is None and now >= one.since + limit_s:
                self.problem = f"the spare for rank {rank} was not ready within {limit_s:.0f} s"

    def deadline(self, limit_s: float) -> float | None:
        return min((one.since + limit_s for one in self.waiting.values() if one.parked is None), default=None)

    def abandon(self) -> None:
        """End the newcomers; the ranks stay where they are."""
        for rank, one in self.waiting.items():
            agent = self.fleet.agents.get(one.place.node)
            if agent is not None:
                agent.send(Vacate(generation=self.fleet.generation + 1, ranks=(rank,), beside=True))
        self.waiting = {}

    def offered(self, parked: Mapping[int, Parked]) -> dict[int, Parked]:
        """What everybody can offer once the newcomers have taken over: they get what their predecessors leave."""
        found = dict(parked)
        for rank, one in self.waiting.items():
            if one.parked is not None and rank in parked:
                left = parked[rank]
                smalls = tuple(sorted({*left.small_versions, *one.parked.small_versions}))
                found[rank] = msgspec.structs.replace(one.parked, small_versions=smalls, replicas=left.replicas)
        return found

    def take_over(self) -> None:
        """The newcomers are the ranks from now on, and their predecessors go."""
        fleet = self.fleet
        for number, one in self.waiting.items():
            rank = fleet.ranks[number]
            fleet.agents[rank.node].send(Vacate(generation=fleet.generation, ranks=(number,)))
            rank.move_to(one.place)
            rank.begin(fleet.generation, newcomer=True)
            rank.joined = rank.replaceable = True
            rank.parked = one.parked
            rank.move(RankState.PARKED)
        self.waiting = {}
