"""Who leaves a place that is out of use: when there is somewhere to go, and again when there was not."""

from __future__ import annotations

import time

from rerail.config import Settings
from rerail.decide.quarantine import Entry
from rerail.faults.catalog import Catalog
from rerail.runtime.fleet import Agent, Fleet, RankState
from rerail.runtime.handling import Handling
from rerail.runtime.isolation import TRIES, Isolation


class Line:
    def send(self, message: object) -> None:
        pass

    def close(self) -> None:
        pass


def arrive(fleet: Fleet, node: str) -> None:
    fleet.agents[node] = Agent(node, "10.0.0.1", 1, -1, "first", heard=0.0, link=Line(), arrival=len(fleet.agents))


def two_nodes() -> tuple[Fleet, Isolation, list[str]]:
    """Rank 0 on node a, rank 1 on node b, and node b is out of use."""
    fleet, told = Fleet(), list[str]()
    for node in ("a", "b"):
        arrive(fleet, node)
    fleet.place(fleet.agents.values())
    for rank in fleet.ranks.values():
        rank.state, rank.joined, rank.replaceable, rank.trained = RankState.RUNNING, True, True, True
    handling = Handling(Settings(), Catalog(()), "")
    handling.add(Entry(subject="node:b", reason="loud", since=time.time(), by="ada"), {"node:a", "node:b"}, force=True)
    isolation = Isolation(fleet, handling, told.append)
    return fleet, isolation, told


def test_a_rank_without_another_place_stays_and_leaves_when_a_spare_node_comes() -> None:
    fleet, isolation, told = two_nodes()
    assert isolation.evacuation("job", 0.0) is None and isolation.evacuation("job", 0.0) is None
    assert len(told) == 1 and "there is no other place" in told[0]
    arrive(fleet, "spare")
    found = isolation.evacuation("job", 0.0)
    assert found is not None and found.ranks == (1,)


def test_a_rank_whose_leaving_came_to_nothing_tries_again_but_not_for_ever() -> None:
    fleet, isolation, _ = two_nodes()
    arrive(fleet, "spare")
    assert all(isolation.evacuation("job", 0.0) is not None for _ in range(TRIES))
    assert isolation.evacuation("job", 0.0) is None
    arrive(fleet, "another")
    assert isolation.evacuation("job", 0.0) is not None
