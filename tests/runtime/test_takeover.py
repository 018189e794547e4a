"""A new controller believes the nodes more than a journal that could not be written."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from rerail.runtime.fleet import Agent, Fleet, RankState
from rerail.runtime.orders import RankStatus
from rerail.runtime.takeover import Takeover

STATE: dict[str, Any] = {
    "generation": 4,
    "placement": [["a", 0], ["b", 0]],
    "master": ["10.0.0.1", 1],
    "incarnations": {},
}


def begin() -> tuple[Fleet, Takeover]:
    fleet = Fleet()
    desk: Any = SimpleNamespace(fleet=fleet, execution=SimpleNamespace(master=("", 0)))
    takeover = Takeover(desk, STATE, 0.0)
    fleet.agents["spare"] = Agent("spare", "10.0.0.3", 1, -1, "first", heard=0.0)
    return fleet, takeover


def status(rank: int, generation: int, state: RankState = RankState.RUNNING) -> RankStatus:
    return RankStatus(
        rank=rank,
        local_rank=0,
        pid=1,
        generation=generation,
        state=state.value,
        joined=True,
        replaceable=True,
        version=9,
    )


def test_a_rank_that_moved_after_the_last_word_of_the_journal_is_where_it_runs() -> None:
    fleet, takeover = begin()
    takeover.greeted("b", [status(1, 5, RankState.LOST)], 0.1)
    takeover.greeted("spare", [status(1, 6)], 0.1)
    assert fleet.ranks[1].node == "spare" and fleet.ranks[1].state is RankState.RUNNING and fleet.generation == 6


def test_what_is_left_of_a_rank_elsewhere_is_not_taken_for_it() -> None:
    for first, second in ((("b", 4), ("spare", 2)), (("spare", 2), ("b", 4))):
        fleet, takeover = begin()
        for node, generation in (first, second):
            takeover.greeted(node, [status(1, generation)], 0.1)
        assert fleet.ranks[1].node == "b"
