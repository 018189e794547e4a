"""When an incident began: its echoes may be there long before its cause is known, and no second is counted twice."""

from __future__ import annotations

import time

from rerail.flow import Event, Role, Signal
from rerail.runtime.incident import Incident
from rerail.runtime.intake import Sighting


def seen(incident: Incident, code: str, role: Role, age_s: float) -> None:
    signal = Signal(id=f"s-{code}", job="j", at=1.0, source="x", node="n1")
    event = Event(id=f"e-{code}", job="j", at=1.0, code=code, node="n1", role=role)
    incident.add(Sighting(signal, age_s), event)


def begun(ago_s: float) -> Incident:
    return Incident(number=1, opened=time.monotonic() - ago_s, fault_version=3, echo_deadline=0.0)


def test_the_time_until_the_cause_was_known_is_no_part_of_the_repair() -> None:
    incident = begun(9.0)
    seen(incident, "collective.failed", Role.SYMPTOM, 0.0)
    incident.opened -= 9.0
    seen(incident, "node.lost", Role.ROOT, 9.3)
    assert incident.detect_s == 9.3 and time.monotonic() - incident.opened < 5.0
    later = begun(0.0)
    seen(later, "collective.failed", Role.SYMPTOM, 0.0)
    later.opened -= 2.0
    seen(later, "process.killed", Role.ROOT, 0.01)
    assert 2.0 <= later.detect_s < 7.0, "an echo came first: the fault is at least as old as that"


def test_a_cause_that_comes_first_is_what_counts() -> None:
    incident = begun(0.0)
    seen(incident, "process.killed", Role.ROOT, 0.2)
    opened = incident.opened
    seen(incident, "collective.failed", Role.SYMPTOM, 0.0)
    assert (incident.detect_s, incident.opened) == (0.2, opened)
