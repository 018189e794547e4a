"""Policy and ledger of a job: events become counts, the journal keeps them, and people can change the quarantine."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rerail.config import Settings
from rerail.decide.escalate import What
from rerail.errors import UsageError
from rerail.faults.catalog import load_catalog
from rerail.flow import Event, Severity
from rerail.runtime.handling import Handling, problems_with
from rerail.runtime.journal import FILE_NAME, Journal
from rerail.runtime.quarantining import Order, carry_out, listing, take

CATALOG = load_catalog()
HOUR = 3600.0
MEMBERS = frozenset({"node:n1", "device:n1/0", "device:n1/1", "node:n2", "device:n2/0"})


def event(at: float, code: str = "gpu.xid.48", node: str = "n1", **more: Any) -> Event:
    return Event(id=f"e{at}", job="j", at=at, code=code, node=node, severity=Severity.CRITICAL, evidence="seen", **more)


def handling(**settings: Any) -> Handling:
    found = Handling(Settings(**settings), CATALOG, "j")
    found.members = MEMBERS
    return found


def settle(found: Handling, until: float) -> list[str]:
    told = []
    while (due := found.next_deadline()) is not None and due <= until:
        told += [change.what for change in found.tick(due)]
    return told


def test_events_are_counted_and_the_quarantine_outlives_the_controller(tmp_path: Path) -> None:
    first = handling()
    assert first.heard(event(0.0), "gpu0") == [] and settle(first, HOUR) == []
    with contextlib.closing(Journal(tmp_path / FILE_NAME)) as journal:
        journal.append([], first.state())
        second = Handling.of(Settings(), CATALOG, "j", journal)
        second.members = MEMBERS
        assert second.ledger == first.ledger
        second.heard(event(2 * HOUR), "gpu0")
        assert settle(second, 3 * HOUR) == [What.STRONGER, What.QUARANTINED]
        journal.append([], second.state())
        third = Handling.of(Settings(), CATALOG, "j", journal)
    assert not third.usable("device:n1/0") and third.usable("device:n1/1") and third.usable("node:n1")


def test_the_state_is_the_same_object_as_long_as_nothing_has_changed() -> None:
    found = handling()
    before = found.state()["handling"]
    assert found.state()["handling"] is before
    found.heard(event(0.0), "gpu0")
    assert found.state()["handling"] is not before


def test_a_ledger_that_cannot_be_read_is_begun_anew_and_that_is_said() -> None:
    told: list[str] = []
    found = Handling(Settings(), CATALOG, "j", told.append)
    found.restore({"handling": {"quarantine": 7}})
    assert found.ledger.quarantine == {} and "begin anew" in told[0]


def test_faults_that_no_rule_counts_leave_no_trace() -> None:
    found = handling()
    assert found.heard(event(0.0, "process.killed")) == [] and found.ledger.standing == {}


def test_one_device_has_one_count_whatever_it_is_called() -> None:
    found = handling()
    found.same = {"device:n1/0000:3b:00": "device:n1/1"}
    found.heard(event(0.0), "0000:3b:00")
    settle(found, HOUR)
    found.heard(event(2 * HOUR), "gpu1")
    settle(found, 3 * HOUR)
    assert set(found.ledger.quarantine) == {"device:n1/1"}


def test_a_fault_that_takes_its_device_out_of_use_does_so_at_once_but_never_the_last() -> None:
    found = handling()
    for subject in ("device:n1/0", "device:n1/1"):
        (change,) = found.isolate(found.seen(event(0.0, "gpu.xid.79"), subject), 0.0)
        assert change.what is What.QUARANTINED
    (change,) = found.isolate(found.seen(event(0.0, "gpu.xid.79", "n2"), "device:n2/0"), 0.0)
    assert change.what is What.SPARED and found.usable("device:n2/0")


def test_mute_windows_and_verdicts_know_job_and_node() -> None:
    found = handling(policy=({"code": "gpu.xid.48", "node": "n1", "job": "j", "mute_s": 60},))
    assert found.verdict("gpu.xid.48", node="n1").mute_s == 60.0
    assert found.verdict("gpu.xid.48", node="n2").mute_s == 0.0
    assert found.verdict("no.such", severity=Severity.CRITICAL).axes.repair == "replace"


def test_restarts_and_resets_have_limits() -> None:
    found = handling(restart_limits="rank=1, node=2", reset_limit=1)
    found.restarted({3: "n1"}, 0.0)
    assert "rank 3" in found.may_restart({3: "n1"}, 1.0) and found.may_restart({4: "n1"}, 1.0) == ""
    found.restarted({4: "n1"}, 1.0)
    assert "node n1" in found.may_restart({5: "n1"}, 2.0)
    assert found.may_reset("device:n1/0", 0.0) == ""
    found.reset_done("device:n1/0", 0.0)
    assert "used up" in found.may_reset("device:n1/0", 1.0)


# --- orders of people ---


def order(action: str, subject: str, **more: Any) -> Order:
    return Order(action=action, subject=subject, **{"reason": "fan is loud", "by": "ada", **more})


def test_a_person_takes_something_out_of_use_and_back() -> None:
    found = handling()
    assert "until it is released" in carry_out(found, order("add", "n1/gpu0"), MEMBERS, 5.0)
    (entry,) = listing(found)["quarantine"]
    assert (entry["subject"], entry["reason"], entry["by"], entry["since"], entry["ends"]) == (
        "device:n1/0", "fan is loud", "ada", 5.0, None,
    )  # fmt: skip
    assert carry_out(found, order("release", "device:n1/0"), MEMBERS, 6.0) == (
        "device:n1/0 may be used again (was out of use: fan is loud)"
    )
    assert listing(found) == {"quarantine": []}


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        (order("release", "n1"), "node:n1 is not in quarantine"),
        (order("add", "n9"), "this job has no node:n9"),
        (order("add", "n1/9"), "node:n1 has no device 9 in this job"),
        (order("add", "n1", reason=" "), "needs a reason"),
        (order("burn", "n1"), "nothing called 'burn'"),
        (order("add", "?"), "names nothing"),
    ],
)
def test_orders_that_cannot_be_carried_out_say_why(wanted: Order, words: str) -> None:
    found = handling()
    with pytest.raises(UsageError, match=words):
        carry_out(found, wanted, MEMBERS, 1.0)
    assert found.ledger.quarantine == {}


def test_quarantine_of_everything_is_refused_unless_forced() -> None:
    found = handling()
    carry_out(found, order("add", "n1"), MEMBERS, 1.0)
    with pytest.raises(UsageError, match="node:n2 is the last node of this job that may be used"):
        carry_out(found, order("add", "n2"), MEMBERS, 1.0)
    carry_out(found, order("add", "n2", force=True), MEMBERS, 1.0)
    assert set(found.ledger.quarantine) == {"node:n1", "node:n2"}


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 422),
        (b"[]", 422),
        (b'{"action": "add", "subject": "n1", "reason": "r", "more": 1}', 422),
        (b'{"action": "add", "subject": 7}', 422),
        (b"\xff\xfe", 422),
        (b"[" * 100_000, 422),
        (b'{"action": "release", "subject": "n1"}', 409),
        (msgspec.json.encode(order("add", "n1", reason="a\x1b[2Jb" + "x" * 999)), 200),
    ],
)
def test_what_comes_over_the_network_is_checked(body: bytes, status: int) -> None:
    found = handling()
    answered, answer = take(found, body, MEMBERS)
    assert answered == status and ("done" in answer) is (status == 200), answer
    if status == 200:
        reason = answer["quarantine"][0]["reason"]
        assert "\x1b" not in reason and len(reason) <= 300
        assert json.dumps(answer)


def test_everything_that_cannot_be_read_is_told_at_once() -> None:
    rules = ({"code": "gpu.*", "repair": "retri"}, {"cod": "gpu.*", "mute_s": 1.0})
    found = problems_with(Settings(policy=rules, escalation=({"times": -1},)), CATALOG.faults, "here.toml")
    assert [line.partition(":")[0] for line in found] == [
        "here.toml, policy 1",
        "here.toml, policy 2",
        "here.toml, escalation 1",
    ]


@pytest.mark.parametrize("settings", [{"rungs": "replace_rank, stop"}, {"reset_limit": 0}])
def test_a_preset_that_can_do_nothing_is_told(settings: dict[str, Any]) -> None:
    found = problems_with(Settings(handling="graceful", **settings), CATALOG.faults)
    assert "handling is graceful, but no device may be reset" in found[0]
