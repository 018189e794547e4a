"""Empty seats as the controller knows them."""

from __future__ import annotations

import msgspec

from rerail.runtime.fleet import Agent, Fleet, RankState
from rerail.runtime.orders import RankStatus, ToAgent


class Wire:
    """A connection that leads nowhere."""

    def send(self, message: ToAgent) -> None:
        """Nobody hears it."""

    def close(self) -> None:
        """There is nothing to close."""


def fleet() -> Fleet:
    found = Fleet()
    for number in range(2):
        node, link = f"node{number}", Wire()
        found.agents[node] = Agent(node, "127.0.0.1", 2, number, f"{node}-first", 0.0, link=link, arrival=number)
    found.place(found.connected())
    for rank in found.ranks.values():
        rank.state, rank.elastic = RankState.RUNNING, True
    return found


def test_an_empty_seat_takes_no_part_and_is_not_waited_for() -> None:
    job = fleet()
    job.ranks[3].leave(job.agents["node1"])
    assert [rank.rank for rank in job.members()] == [0, 1, 2]
    for number in range(3):
        job.ranks[number].state = RankState.FINISHED
    assert job.finished and not job.done
    assert not job.ranks[3].move(RankState.LOST), "nobody is there to be lost"


def test_a_seat_is_filled_by_a_node_that_is_back_and_not_by_one_that_could_not_fill_it() -> None:
    job = fleet()
    gone, there = job.agents["node1"], job.agents["node0"]
    gone.link = None
    job.ranks[3].leave(gone)
    job.ranks[1].leave(there)
    assert job.fillable() == []
    gone.link = Wire()
    assert [rank.rank for rank in job.fillable()] == [3]
    there.incarnation = "node0-second"
    assert [rank.rank for rank in job.fillable()] == [1, 3]


def test_the_next_controller_knows_which_seats_are_empty() -> None:
    job = fleet()
    job.ranks[1].leave(job.agents["node0"])
    heir = Fleet(agents=job.agents)
    heir.recall(msgspec.json.decode(msgspec.json.encode(job.remembered())))
    assert [rank.rank for rank in heir.vacant()] == [1] and heir.elastic
    assert heir.fillable() == [], "the agent that could not fill it is still the same"
    zombie = RankStatus(
        rank=1, local_rank=1, pid=1, generation=0, state="running", joined=True, replaceable=True, version=3
    )
    heir.adopt(zombie)
    assert heir.ranks[1].state is RankState.VACANT, "a process of before does not take the seat back"
