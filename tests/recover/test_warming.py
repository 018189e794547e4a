"""A newcomer that is made ready beside a rank learns the place it will have, also on a node that has no ranks yet."""

from __future__ import annotations

from typing import Any

from rerail.config import JobSpec, Settings
from rerail.flow import Decision, Place, Rung
from rerail.recover.execute import Execution
from rerail.recover.stages import Marks
from rerail.runtime.fleet import Agent, Fleet, RankState
from rerail.runtime.incident import Incident
from rerail.runtime.intake import Intake
from rerail.runtime.orders import Kept, Promote, Vacate


class Line:
    def __init__(self) -> None:
        self.sent: list[Any] = []

    def send(self, message: Any) -> None:
        self.sent.append(message)

    def close(self) -> None:
        pass


def test_a_hot_switch_to_a_spare_node_tells_the_newcomer_of_its_new_place() -> None:
    fleet, lines = Fleet(), {node: Line() for node in ("a", "b", "spare")}
    for number, (node, line) in enumerate(lines.items()):
        fleet.agents[node] = Agent(node, f"10.0.0.{number}", 2, -1, "first", heard=0.0, link=line, arrival=number)
    fleet.place([fleet.agents["a"], fleet.agents["b"]])
    spec = JobSpec(job="j", min_nodes=2, max_nodes=2, spare_nodes=1, script="train.py")
    moves = {2: Place("spare", 0), 3: Place("spare", 1)}
    decision = Decision(id="d", job="j", at=0.0, rung=Rung.HOT_SWITCH, ranks=(2, 3), moves=moves)
    Execution(fleet, spec, Settings()).warm(decision, 0.0, 0.0)
    orders = [one for one in lines["spare"].sent if isinstance(one, Promote)]
    assert [order.assignment.rank for order in orders] == [2, 3] and all(order.beside for order in orders)
    for order in orders:
        env = order.assignment.env
        assert (env["LOCAL_WORLD_SIZE"], env["GROUP_RANK"], env["GROUP_WORLD_SIZE"]) == ("2", "1", "2")
        assert order.assignment.address == "10.0.0.2"
    assert [rank.node for rank in fleet.ranks.values()] == ["a", "a", "b", "b"], "nobody has moved yet"


def test_a_hot_switch_that_is_not_done_when_the_training_ends_is_dropped() -> None:
    fleet, line = Fleet(), Line()
    fleet.agents["a"] = Agent("a", "10.0.0.1", 2, -1, "first", heard=0.0, link=line)
    fleet.place(fleet.agents.values())
    execution = Execution(fleet, JobSpec(job="j", min_nodes=1, max_nodes=1, script="train.py"), Settings())
    moves = {1: Place("a", 2)}
    execution.warm(Decision(id="d", job="j", at=0.0, rung=Rung.HOT_SWITCH, ranks=(1,), moves=moves), 0.0, 0.0)
    execution.advance(1.0, 1.0)
    assert not execution.dropped
    fleet.ranks[0].state = RankState.FINISHED
    execution.advance(2.0, 2.0)
    assert "the training was over" in execution.dropped and not execution.problem
    assert isinstance(line.sent[-1], Vacate) and line.sent[-1].beside


def test_when_nobody_has_the_state_a_newcomer_in_another_place_is_not_tried() -> None:
    marks = Marks(stateless=True)
    assert set(marks.in_vain(Rung.SWAP_NODE)) == {
        Rung.SWAP_NODE,
        Rung.SWAP_DEVICE,
        Rung.REPLACE_RANK,
        Rung.RESET_DEVICE,
    }
    assert marks.in_vain(Rung.SWAP_NODE)[0] is Rung.SWAP_NODE
    assert marks.in_vain(Rung.SHRINK) == (Rung.SHRINK,) and Marks().in_vain(Rung.SWAP_NODE) == (Rung.SWAP_NODE,)
    incident = Incident(number=1, opened=0.0, fault_version=3, echo_deadline=0.0)
    incident.failed(marks.in_vain(Rung.SWAP_NODE), "no snapshot is shared by all")
    assert Rung.REPLACE_RANK in incident.tried and incident.attempted == [Rung.SWAP_NODE]


def test_a_node_that_is_back_with_empty_memory_is_told_what_its_ranks_had_kept() -> None:
    fleet, line, settings = Fleet(), Line(), Settings()
    for number, node in enumerate(("a", "b")):
        fleet.agents[node] = Agent(node, f"10.0.0.{number}", 1, -1, "first", heard=0.0, link=line, arrival=number)
    fleet.place(fleet.agents.values())
    fleet.pages.take(Kept(rank=1, version=7, body=b"small", rest=b""))
    Intake(fleet, "j", settings).agent_lost(fleet.agents["b"], "its agent was started anew", 0.0, 0.0)
    fleet.agents["b"].link = line
    spec = JobSpec(job="j", min_nodes=2, max_nodes=2, script="train.py")
    decision = Decision(id="d", job="j", at=0.0, rung=Rung.REPLACE_RANK, ranks=(1,))
    Execution(fleet, spec, settings).repair(decision, 0.0, 0.0)
    (order,) = [one for one in line.sent if isinstance(one, Promote)]
    assert [one.version for one in order.kept] == [7]
