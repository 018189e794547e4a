"""Places that are out of use: who is kept out, who has to leave, and that nobody is left without a place for a passing fault."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rerail.config import Settings
from rerail.decide.quarantine import Entry
from rerail.diagnose.classify import Classifier
from rerail.faults.catalog import load_catalog
from rerail.flow import Diagnosis, Event, Place, Severity, Signal
from rerail.runtime.fleet import Agent, Fleet, RankState
from rerail.runtime.handling import Handling
from rerail.runtime.isolation import Isolation, members_of, place_of, spellings
from rerail.runtime.machines import Machines
from rerail.runtime.orders import CHECK, Chore, ChoreDone
from rerail.runtime.situation import seen_in

CATALOG = load_catalog()


class NoLink:
    def send(self, message: object) -> None: ...

    def close(self) -> None: ...


def fleet(spares: int = 0, **more: Any) -> Fleet:
    """One node n1 of two ranks in training."""
    found = Fleet()
    agent = Agent(node="n1", address="", slots=2, node_rank=0, incarnation="i", heard=0.0, link=NoLink(), **more)
    agent.devices = 2 + spares
    found.agents["n1"] = agent
    found.place([agent])
    for rank in found.ranks.values():
        rank.state, rank.joined, rank.replaceable, rank.trained = RankState.RUNNING, True, True, True
    return found


def isolation(found: Fleet, said: list[str], **settings: Any) -> tuple[Isolation, Handling]:
    handling = Handling(Settings(**settings), CATALOG, "j")
    return Isolation(found, handling, said.append), handling


def tell(keeper: Isolation, code: str, subject: str = "", *, over: bool = False, at: float = 1.0) -> None:
    fault = CATALOG.get(code)
    assert fault is not None, code
    payload: dict[str, Any] = {"subject": subject, "over": over}
    signal = Signal(id="s", job="j", at=at, source="machine", node="n1", payload=payload)
    keeper.heard(signal, Event(id="e", job="j", at=at, code=code, node="n1", severity=Severity(fault.severity)))


def test_a_device_that_a_fault_takes_out_of_use_is_left_for_a_spare_one() -> None:
    said: list[str] = []
    found = fleet(spares=1)
    keeper, _ = isolation(found, said)
    tell(keeper, "gpu.xid.79", "gpu1")
    assert "device:n1/1" in found.is_isolated(Place("n1", 1)) and found.free() == [Place("n1", 2)]
    diagnosis = keeper.evacuation("j", 2.0)
    assert diagnosis is not None and diagnosis.ranks == (1,) and diagnosis.code == "gpu.xid.79"
    assert any("device:n1/1 is out of use" in line for line in said)


def test_as_many_leave_as_there_are_places_and_one_stays_to_keep_the_state() -> None:
    said: list[str] = []
    found = fleet(spares=1)
    keeper, handling = isolation(found, said)
    for device in range(2):
        handling.add(Entry(subject=f"device:n1/{device}", reason=f"{device}", since=1.0, by="me"), (), force=True)
    keeper.refresh()
    diagnosis = keeper.evacuation("j", 2.0)
    assert diagnosis is not None and diagnosis.ranks == (0,)
    assert said == ["rank 1 stays in place, though device:n1/1 is out of use: 1: there is no other place"]
    found = fleet(spares=2)
    keeper, handling = isolation(found, [])
    for device in range(2):
        handling.add(Entry(subject=f"device:n1/{device}", reason=f"{device}", since=1.0, by="me"), (), force=True)
    keeper.refresh()
    diagnosis = keeper.evacuation("j", 2.0)
    assert diagnosis is not None and diagnosis.ranks == (0,), "the other one is next"


def test_nobody_moves_to_a_place_that_has_the_same_fault() -> None:
    found = fleet(spares=1)
    keeper, _ = isolation(found, [])
    found.agents["n1"].resets = False
    found.ranks[1].move_to(Place("n1", 2))  # it has left device 1 before
    for device in ("gpu0", "gpu1", "gpu2"):
        tell(keeper, "gpu.xid.48", device)
    assert Place("n1", 1) in found.isolated and not found.free()
    assert not found.homeless() and keeper.evacuation("j", 2.0) is None


def test_a_new_controller_knows_of_faults_that_stand() -> None:
    found = fleet(spares=1)
    keeper, handling = isolation(found, [])
    tell(keeper, "gpu.xid.48", "gpu1")
    again = Handling(Settings(), CATALOG, "j")
    again.restore(handling.state())
    assert list(found.isolated) == [Place("n1", 1)]
    Isolation(found, again, print)
    assert list(found.isolated) == [Place("n1", 1)]


def test_where_the_training_is_over_nobody_moves_any_more() -> None:
    found = fleet(spares=1)
    keeper, handling = isolation(found, [])
    handling.add(Entry(subject="device:n1/1", reason="x", since=1.0, by="me"), members_of(found))
    keeper.refresh()
    found.ranks[0].state = RankState.FINISHED
    assert keeper.evacuation("j", 2.0) is None


def test_a_muted_fault_is_acted_on_when_it_still_stands_at_the_end_of_its_window() -> None:
    said: list[str] = []
    found = fleet(spares=1)
    keeper, _ = isolation(found, said, policy=({"code": "gpu.xid.79", "mute_s": 60.0},))
    tell(keeper, "gpu.xid.79", "gpu0")
    tell(keeper, "gpu.xid.79", "gpu1")
    tell(keeper, "gpu.xid.79", "gpu0", over=True, at=30.0)
    keeper.tick(59.0)
    assert not found.isolated and keeper.evacuation("j", 59.0) is None
    keeper.tick(61.5)
    assert list(found.isolated) == [Place("n1", 1)], "the other one was gone in time"
    diagnosis = keeper.evacuation("j", 62.0)
    assert diagnosis is not None and diagnosis.ranks == (1,) and diagnosis.code == "gpu.xid.79"
    assert any("device:n1/1: gpu.xid.79 still stands after 60 s" in line for line in said)


def test_a_fault_that_lasts_counts_for_more_until_it_has_been_gone_for_a_while() -> None:
    said: list[str] = []
    found = fleet(spares=1)
    code = next(
        fault.code
        for fault in CATALOG.faults
        if fault.scope == "device"
        and fault.hardware
        and _admission(Handling(Settings(), CATALOG, "j"), fault.code) == "yes"
    )
    rule = {"code": code, "lasts_s": 20.0, "gone_s": 60.0, "admission": "not_now"}
    keeper, handling = isolation(found, said, escalation=(rule,))
    tell(keeper, code, "gpu1")
    assert not found.isolated
    keeper.tick(21.5)
    assert list(found.isolated) == [Place("n1", 1)] and any("has lasted 20 s" in line for line in said)
    tell(keeper, code, "gpu1", over=True, at=30.0)
    assert found.isolated and not handling.ledger.quarantine, "it may come again at once"
    tell(keeper, code, "gpu1", at=40.0)
    tell(keeper, code, "gpu1", over=True, at=50.0)
    keeper.tick(100.0)
    assert found.isolated
    keeper.tick(111.0)
    assert not found.isolated


def test_without_another_place_the_rank_stays_and_that_is_said_once() -> None:
    said: list[str] = []
    found = fleet()
    keeper, handling = isolation(found, said)
    handling.add(Entry(subject="device:n1/1", reason="it smells", since=1.0, by="me"), members_of(found))
    keeper.refresh()
    assert keeper.evacuation("j", 2.0) is None and keeper.evacuation("j", 3.0) is None
    assert said == ["rank 1 stays in place, though device:n1/1 is out of use: it smells: there is no other place"]
    assert not found.homeless() and not found.bar(1), "should its process break, it gets a new one there"


def test_what_only_broke_too_often_is_used_where_there_is_nothing_better() -> None:
    said: list[str] = []
    found = fleet()
    keeper, handling = isolation(found, said)
    often = Entry(subject="device:n1/1", reason="3 times", since=1.0, rule="anything-often", code="gpu.xid.48")
    handling.add(often, members_of(found))
    keeper.refresh()
    assert not found.homeless() and not found.bar(1), "a job that stops helps nobody"
    assert keeper.evacuation("j", 2.0) is None and "there is no other place" in said[0]
    found.agents["n1"].devices = 3
    keeper.refresh()
    diagnosis = keeper.evacuation("j", 3.0)
    assert found.bar(1) and diagnosis is not None and diagnosis.ranks == (1,), "now there is"


def test_a_fault_of_a_device_that_the_job_does_not_have_is_kept_and_that_is_said_once() -> None:
    said: list[str] = []
    found = fleet()
    keeper, handling = isolation(found, said)
    tell(keeper, "gpu.xid.79", "gpu17")
    tell(keeper, "gpu.xid.79", "gpu17", at=2.0)
    nowhere = [line for line in said if "there is no such place in this job" in line]
    assert len(nowhere) == 1 and nowhere[0].startswith("device:n1/17: ") and "2 devices there" in nowhere[0]
    assert "device:n1/17" in handling.ledger.quarantine and len(found.free()) == 0 and not found.homeless()


def test_a_device_is_elsewhere_if_the_job_has_it_and_the_rank_does_not() -> None:
    found = fleet(spares=1, accelerators=("0000:1a:00.0", "0000:3b:00.0", "0000:5e:00.0"))
    keeper, _ = isolation(found, [])
    assert keeper.is_elsewhere("n1", "gpu0", 1) and keeper.is_elsewhere("n1", "0000:1a:00", 1)
    for subject in ("gpu1", "0000:3b:00", "gpu17", "eth0", ""):
        assert not keeper.is_elsewhere("n1", subject, 1), subject


def test_where_places_are_lacking_it_is_said_whose_is_lost_and_by_which_fault() -> None:
    found = fleet()
    keeper, _ = isolation(found, [])
    tell(keeper, "gpu.xid.48", "gpu0")
    tell(keeper, "gpu.xid.79", "gpu1")
    told = seen_in(
        found, Diagnosis(id="d", job="j", at=1.0, code="gpu.xid.48", root="", node="n1", ranks=(0,), summary="")
    ).homeless
    assert told.startswith("1 of 2 ranks have no healthy place left: rank 1 on n1/1 (") and "gpu.xid.79" in told
    assert "gpu.xid.48" not in told


DIFFERS = "training.replica_differs"


def vote(keeper: Isolation, said: list[str], state: str = "replayed", rank: int = 1) -> None:
    """As the controller hears it: the same steps were computed again, and now it shows who was wrong."""
    payload: dict[str, Any] = {"state": state, "message": "at step 100", "subject": f"rank {rank}"}
    signal = Signal(id="s", job="j", at=1.0, source="training.vote", node="n1", rank=rank, payload=payload)
    Machines(Classifier(CATALOG), said.append, told=keeper.heard).heard(signal, None)


def test_the_place_of_a_rank_that_a_vote_names_is_left_for_a_spare_one_the_first_time() -> None:
    said: list[str] = []
    found = fleet(spares=1)
    keeper, _ = isolation(found, said)
    vote(keeper, said)
    assert found.bar(1) and any("device:n1/1 is out of use" in line and DIFFERS in line for line in said)
    diagnosis = keeper.evacuation("j", 2.0)
    assert diagnosis is not None and diagnosis.ranks == (1,) and diagnosis.code == DIFFERS


def test_without_another_place_the_rank_that_a_vote_names_stays_and_that_is_said() -> None:
    said: list[str] = []
    found = fleet()
    keeper, handling = isolation(found, said)
    event = Event(id="e", job="j", at=1.0, code=DIFFERS, node="n1", rank=1, severity=Severity.CRITICAL)
    keeper.blamed(event)
    assert "device:n1/1" in handling.ledger.quarantine and not found.homeless() and not found.bar(1)
    assert keeper.evacuation("j", 2.0) is None
    assert f"rank 1 stays in place, though device:n1/1 is out of use: {DIFFERS}: there is no other" in said[-1]


def test_a_vote_that_names_nobody_or_that_the_policy_says_nothing_of_takes_nothing_away() -> None:
    found = fleet(spares=1)
    keeper, _ = isolation(found, [])
    vote(keeper, [], "tie", -1)
    assert not found.isolated
    keeper, _ = isolation(found, [], policy=({"code": DIFFERS, "admission": "yes"},))
    vote(keeper, [])
    assert not found.isolated
    keeper, _ = isolation(found, [], policy=({"code": DIFFERS, "running": "no"},))
    vote(keeper, [])
    assert found.isolated and keeper.evacuation("j", 2.0) is None, "what runs there may finish"


def test_a_reset_that_has_failed_is_told_and_not_tried_again_for_the_same_sighting() -> None:
    said: list[str] = []
    found = fleet(resets=True)
    keeper, handling = isolation(found, said, reset_limit=2)
    tell(keeper, "gpu.xid.48", "gpu0", at=10.0)
    diagnosis = keeper.evacuation("j", 10.0)
    assert diagnosis is not None and diagnosis.ranks == (0,)
    ended = {Place("n1", 0): "device n1/0 could not be reset: false: exit code 1"}
    keeper.were_reset(ended, 11.0)
    assert said == ["device n1/0 could not be reset: false: exit code 1"] and not ended
    assert keeper.evacuation("j", 12.0) is None and "rank 0 stays in place" in said[-1]
    again = Isolation(found, handling, said.append)
    assert again.evacuation("j", 12.0) is None, "a new controller knows, too"
    found.agents["n1"].devices = 3
    again.refresh()
    assert again.evacuation("j", 13.0) is not None, "there is another place now"


def test_a_fault_that_a_reset_repairs_moves_nobody_where_the_budget_of_resets_is_used_up() -> None:
    said: list[str] = []
    found = fleet(resets=True)
    keeper, handling = isolation(found, said, reset_limit=1)
    handling.reset_done("device:n1/0", 1.0)
    tell(keeper, "gpu.xid.48", "gpu0", at=10.0)
    assert keeper.evacuation("j", 10.0) is None and "rank 0 stays in place" in said[-1]


@pytest.mark.parametrize("ok", [True, False])
def test_a_spare_node_on_probation_is_used_only_if_it_passes_its_check(ok: bool) -> None:
    said: list[str] = []
    asked: list[Chore] = []
    found = fleet()
    link: Any = SimpleNamespace(send=asked.append, close=lambda: None)
    found.agents["n2"] = Agent(node="n2", address="", slots=2, node_rank=1, incarnation="i", heard=0.0, link=link)
    keeper, handling = isolation(found, said)
    handling.add(Entry(subject="node:n2", reason="3 times", since=1.0, probation=True), members_of(found))
    keeper.tick(2.0)
    (order,) = asked
    assert order.kind == CHECK and found.is_isolated(Place("n2", 0)) and not found.free()
    keeper.checked(ChoreDone(id=order.id, ok=ok, text="gpu0: ok\ngpu1: memory is broken"))
    keeper.refresh()
    assert bool(found.is_isolated(Place("n2", 0))) is not ok and bool(found.free()) is ok
    assert ("may be used again" if ok else "stays out of use: gpu1: memory is broken") in said[-1]
    keeper.tick(3.0)
    assert asked == [order], "not asked again and again"


def test_a_passing_fault_of_the_only_node_keeps_nobody_from_going_on() -> None:
    found = fleet()
    keeper, handling = isolation(found, [])
    passing = next(f for f in CATALOG.faults if f.scope == "node" and _admission(handling, f.code) == "not_now")
    tell(keeper, passing.code)
    assert not found.homeless() and not found.bar(0)
    tell(keeper, passing.code, over=True)
    assert not found.isolated


def _admission(handling: Handling, code: str) -> str:
    return str(handling.verdict(code).axes.admission)


def test_subjects_are_places_and_addresses_are_known_in_every_spelling() -> None:
    assert place_of("node:n1") == Place("n1", -1) and place_of("device:n1/3") == Place("n1", 3)
    assert place_of("link:n1/eth0") is None and place_of("device:n1/0000:3b:00") is None
    assert {"0000:3b:00.0", "0000:3b:00", "3b:00", "00000000:3b:00.0"} <= spellings("0000:3B:00.0")


def test_a_device_known_by_its_address_is_the_one_of_that_number() -> None:
    found = fleet(spares=1, accelerators=("0000:1a:00.0", "0000:3b:00.0", "0000:5e:00.0"))
    keeper, _ = isolation(found, [])
    tell(keeper, "gpu.xid.79", "0000:3b:00")
    assert found.is_isolated(Place("n1", 1)) and not found.is_isolated(Place("n1", 0))
