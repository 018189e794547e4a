"""Nodes and devices that break and come back, and who sits where: turns faults into ranks that are hit and places that are free.

Holds what is true, known or not; what is known to be out of use comes from `sim.desk` (`isolated`). Called by `sim.job` and `sim.desk`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeVar

from rerail.flow import Place
from rerail.sim.faults import Fault
from rerail.sim.scenario import Scenario

WHOLE_NODE = -1
_K = TypeVar("_K")
LASTING = ("reboot", "replace", "outage")
"""What a fault needs that leaves something broken behind."""


class Cluster:
    """Where ranks are, and what is broken."""

    def __init__(self, scenario: Scenario) -> None:
        self.per_node, self.world = scenario.per_node, scenario.gpus
        self.nodes = scenario.nodes + scenario.spare_nodes
        self.names = [f"n{number}" for number in range(self.nodes)]
        self.places: dict[int, Place] = {}
        """By rank; those that are vacant keep the one they had."""
        self.vacant: set[int] = set()
        self.isolated: dict[Place, str] = {}
        """Where no rank is to be put, and why; a device of -1 stands for the whole node."""
        self._holder: dict[Place, int] = {}
        self._away: dict[str, int] = {}
        self._broken: dict[Place, int] = {}
        self._mended: dict[str, int] = {}
        """How often something of a node came back from repair."""
        self._left: dict[int, int] = {}
        """The same when a seat was left empty: its own place is of no use before there is something new."""
        self.doubted: set[Place] = set()
        """Where newcomers have died, until something is repaired there."""
        self._arrival = {name: number for number, name in enumerate(self.names)}
        self._arrivals = self.nodes
        self._open: dict[str, set[int]] = {}
        """Devices that nobody has, by node."""
        for rank in range(self.world):
            place = Place(self.names[rank // self.per_node], rank % self.per_node)
            self.places[rank] = place
            self._holder[place] = rank
        for name in self.names[scenario.nodes :]:
            self._open[name] = set(range(self.per_node))

    # --- what breaks ---

    def nodes_of(self, fault: Fault) -> list[str]:
        """Nodes that a fault concerns."""
        last = min(fault.node + fault.nodes, self.nodes)
        return self.names[fault.node : last] if fault.node < self.nodes else []

    def hit(self, fault: Fault) -> list[int]:
        """Ranks that a fault hits, before it has changed anything."""
        if fault.scope == "job":
            rank = (fault.node * self.per_node + fault.device) % self.world
            return [rank] if rank not in self.vacant else []
        if fault.scope == "device":
            place = Place(self.names[fault.node], fault.device)
            rank = self._holder.get(place, -1)
            return [rank] if rank >= 0 and place.node not in self._away else []
        return sorted(rank for name in self.nodes_of(fault) if name not in self._away for rank in self.on(name))

    def damage(self, fault: Fault) -> None:
        """What it leaves broken, until `mend`."""
        if fault.needs not in LASTING or fault.scope == "job":
            return
        if fault.scope == "device":
            place = Place(self.names[fault.node], fault.device)
            self._broken[place] = self._broken.get(place, 0) + 1
            return
        for name in self.nodes_of(fault):
            self._away[name] = self._away.get(name, 0) + 1

    def mend(self, fault: Fault) -> None:
        """What it had broken is whole; a node that is back waits behind the others."""
        for name in self.nodes_of(fault):
            self._mended[name] = self._mended.get(name, 0) + 1
            self.doubted = {place for place in self.doubted if place.node != name}
        if fault.scope == "device":
            _less(self._broken, Place(self.names[fault.node], fault.device))
            return
        for name in self.nodes_of(fault):
            _less(self._away, name)
            if name not in self._away:
                self._arrivals += 1
                self._arrival[name] = self._arrivals

    def works(self, place: Place) -> bool:
        """Whether a rank could really run there, whatever is known."""
        return place not in self._broken and place.node not in self._away

    # --- who is where ---

    def on(self, name: str) -> list[int]:
        """Ranks of a node."""
        found = (self._holder.get(Place(name, device), -1) for device in range(self.per_node))
        return [rank for rank in found if rank >= 0]

    def is_away(self, name: str) -> bool:
        return name in self._away

    def bar(self, rank: int) -> str:
        """Why a rank cannot be put where it was, or nothing; as far as is known."""
        place = self.places[rank]
        if place.node in self._away:
            return f"node {place.node} of rank {rank} is not connected"
        return self.isolated.get(place) or self.isolated.get(Place(place.node, WHOLE_NODE), "")

    def free(self, wanted: int, near: Iterable[str] = ()) -> tuple[Place, ...]:
        """Places for new ranks as production orders them: nodes without a rank first. Those on `near`, and so many others."""
        own, found, others = set(near), [], 0
        order = sorted(self._open, key=lambda name: (len(self._open[name]) < self.per_node, self._arrival[name]))
        for name in order:
            if name in self._away or Place(name, WHOLE_NODE) in self.isolated or (others >= wanted and name not in own):
                continue
            places = [Place(name, device) for device in sorted(self._open[name])]
            here = [place for place in places if place not in self.isolated and place not in self.doubted]
            found += here
            others += len(here) if name not in own else 0
        return tuple(found)

    def homeless(self) -> str:
        """Why there are not enough healthy places for all ranks, though every node may come back; or nothing."""
        whole = {place.node for place in self.isolated if place.device == WHOLE_NODE}
        single = sum(place.device != WHOLE_NODE and place.node not in whole for place in self.isolated)
        lacking = self.world - (self.nodes * self.per_node - len(whole) * self.per_node - single)
        return f"{lacking} of {self.world} ranks have no healthy place left" if lacking > 0 else ""

    def move(self, moves: Mapping[int, Place]) -> None:
        """These ranks have another place now."""
        for rank in moves:
            self._leave(rank)
        for rank, place in moves.items():
            self._take(rank, place)

    def empty(self, ranks: Iterable[int]) -> None:
        """Nobody is these ranks for now."""
        for rank in ranks:
            self._leave(rank)
            self.vacant.add(rank)
            self._left[rank] = self._mended.get(self.places[rank].node, 0)

    def fill(self, ranks: Iterable[int]) -> None:
        """Those without another place go back to their own."""
        for rank in ranks:
            if rank in self.vacant:
                self._take(rank, self.places[rank])

    def fillable(self) -> tuple[int, ...]:
        """Empty seats whose place is usable, or for which there is another one."""
        own = [rank for rank in sorted(self.vacant) if not self.bar(rank) and self._may_return(rank)]
        others = [rank for rank in sorted(self.vacant) if self.bar(rank)]
        taken = {self.places[rank] for rank in own}
        free = [place for place in self.free(len(self.vacant) + len(own)) if place not in taken] if others else []
        return tuple(sorted([*own, *others[: len(free)]]))

    def _may_return(self, rank: int) -> bool:
        place = self.places[rank]
        return place not in self._holder and self._mended.get(place.node, 0) > self._left[rank]

    def _leave(self, rank: int) -> None:
        place = self.places[rank]
        if self._holder.get(place) == rank:
            del self._holder[place]
            self._open.setdefault(place.node, set()).add(place.device)

    def _take(self, rank: int, place: Place) -> None:
        self.places[rank] = place
        self._holder[place] = rank
        self.vacant.discard(rank)
        devices = self._open.get(place.node, set())
        devices.discard(place.device)
        if not devices:
            self._open.pop(place.node, None)


def _less(counts: dict[_K, int], key: _K) -> None:
    left = counts[key] - 1
    if left:
        counts[key] = left
    else:
        del counts[key]
