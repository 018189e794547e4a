"""The lease: it runs from the sending of what was answered, fences once it is over, and is never longer than the controller's patience."""

from __future__ import annotations

import asyncio
import time

import pytest

from rerail.config import JobSpec, Settings
from rerail.runtime import lease as module
from rerail.runtime.admission import Admission
from rerail.runtime.clock import StepClock, make_page, now_ns
from rerail.runtime.fleet import Agent, Fleet
from rerail.runtime.intake import Intake
from rerail.runtime.lease import Lease
from rerail.runtime.orders import AgentHello, Beat, Heard, ToAgent


class Line:
    """A link that keeps what is sent."""

    def __init__(self) -> None:
        self.sent: list[ToAgent] = []

    def send(self, message: ToAgent) -> None:
        self.sent.append(message)

    def close(self) -> None:
        pass


@pytest.fixture
def page() -> StepClock:
    return StepClock(make_page())


def spec(nodes: int) -> JobSpec:
    return JobSpec(job="test", script="train.py", min_nodes=1, max_nodes=nodes)


def test_a_job_of_one_node_has_no_lease(page: StepClock) -> None:
    lease = Lease.of(spec(1), Settings(), lambda: [page], lambda silent: pytest.fail("fenced"))
    lease.renew(1)
    asyncio.run(lease.run())
    assert not lease.over and not page.lease_over


def test_a_lease_is_shorter_than_the_time_after_which_a_node_is_given_up() -> None:
    for lost_s in (0.5, 5.0, 60.0):
        lease = Lease.of(spec(2), Settings(agent_lost_s=lost_s), lambda: [], lambda silent: None)
        assert 0 < lease.length_s < lost_s and lease.beat_s * 4 < lease.length_s


def test_a_lease_runs_from_the_sending_of_the_beat_that_was_answered(
    page: StepClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [100]
    monkeypatch.setattr(module, "now_ns", lambda: int(clock[0] * 1e9))
    monkeypatch.setattr(module, "is_over", lambda until: 0 < until < clock[0] * 1e9)
    lease = Lease(4.0, lambda: [page], lambda silent: None)
    assert not lease.over, "before the first contact there is nothing to end"
    first = lease.next_beat()
    clock[0] = 103
    second = lease.next_beat()
    lease.heard(first)  # late: it says nothing of the time since
    clock[0] = 105
    assert lease.over
    lease.heard(second)
    assert not lease.over
    clock[0] = 108
    lease.heard(second)
    lease.heard(77)
    assert lease.over, "an answer counts once, and one to nothing not at all"


def test_what_outlived_its_lease_is_ended_before_a_new_one_begins(page: StepClock) -> None:
    fenced: list[float] = []
    lease = Lease(1.0, lambda: [page], fenced.append)
    lease.renew(now_ns() - 3_000_000_000)
    assert page.lease_over and not fenced
    lease.renew(now_ns())
    assert len(fenced) == 1 and fenced[0] > 1.0 and not page.lease_over


def test_the_node_is_fenced_when_its_lease_is_over(page: StepClock) -> None:
    async def wait() -> float:
        fenced = asyncio.Event()
        lease = Lease(0.3, lambda: [page], lambda silent: fenced.set())
        began = time.monotonic()
        lease.renew(now_ns())
        watching = asyncio.create_task(lease.run())
        await asyncio.wait_for(fenced.wait(), 30)
        watching.cancel()
        return time.monotonic() - began

    assert asyncio.run(wait()) >= 0.3
    assert page.lease_over


def test_the_controller_answers_a_beat_and_gives_a_node_up_only_after_its_lease() -> None:
    settings = Settings()
    for several in (False, True):
        fleet, line = Fleet(), Line()
        agent = Agent("a", "10.0.0.1", 1, 0, "first", heard=10.0, link=line)
        fleet.agents["a"] = agent
        fleet.place([agent])
        intake = Intake(fleet, "test", settings, several=several)
        intake.take(agent, Beat(versions={0: 1}, number=5), wall=0.0)
        intake.take(agent, Beat(versions={0: 1}), wall=0.0)
        assert line.sent == [Heard(number=5)]
        agent.link, agent.gone_since = None, 10.5
        early, late = 10.5 + settings.agent_back_s, 10.0 + settings.agent_lost_s
        assert intake.next_deadline() == (late if several else early)
        assert bool(intake.lost_agents(early, 0.0)) is not several
        if several:
            assert not intake.lost_agents(late - 0.01, 0.0) and intake.lost_agents(late, 0.0)


def test_a_refused_connection_counts_as_contact_at_the_time_it_was_asked_for(page: StepClock) -> None:
    lease = Lease(5.0, lambda: [page], lambda silent: None)
    lease.renew(now_ns() - 1_000_000_000)  # what the uplink calls on a refusal
    assert not lease.over and not page.lease_over


def hello(incarnation: str, address: str = "10.0.0.1", token: str = "") -> AgentHello:
    return AgentHello(job="test", token=token, node="a", address=address, slots=1, incarnation=incarnation)


def test_another_machine_gets_no_name_whose_lease_may_run() -> None:
    fleet = Fleet()
    door = Admission(fleet, spec(2), "", lost_s=5.0)
    first = door.greet(Line(), hello("first", "10.0.0.1"), 10.0).agent
    assert first is not None
    first.link, first.gone_since = None, 11.0
    assert "takes part already" in door.greet(Line(), hello("second", "10.0.0.2"), 14.9).refusal
    assert door.greet(Line(), hello("third", "10.0.0.1"), 14.9).replaced is first, (
        "its own launcher has started it anew"
    )
    first.link, first.gone_since, fleet.agents["a"] = None, 11.0, first
    assert door.greet(Line(), hello("second", "10.0.0.2"), 15.1).replaced is first


def test_a_node_that_starts_again_behind_a_link_that_was_down_asks_again_and_is_let_in() -> None:
    fleet = Fleet()
    door = Admission(fleet, spec(2), "", lost_s=5.0)
    first = door.greet(Line(), hello("first"), 10.0).agent
    early = door.greet(line := Line(), hello("second"), 11.0)
    assert early.agent is None and not early.refusal, "nobody knows yet that the first is gone"
    early.turn_away(line)
    assert not line.sent, "no word that would end it"
    assert door.greet(Line(), hello("second"), 13.1).replaced is first


def test_a_second_node_of_the_same_name_is_refused_in_the_end() -> None:
    fleet = Fleet()
    door = Admission(fleet, spec(2), "", lost_s=5.0)
    first = door.greet(Line(), hello("first"), 10.0).agent
    assert first is not None
    assert "token" in door.greet(Line(), hello("second", token="guessed"), 10.0).refusal
    for now in (10.0, 12.0, 15.9):
        first.heard = now
        assert not door.greet(Line(), hello("second"), now).refusal
    first.heard = 16.0
    refused = door.greet(line := Line(), hello("second"), 16.0)
    assert "takes part already" in refused.refusal
    refused.turn_away(line)
    assert len(line.sent) == 1
