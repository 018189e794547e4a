"""What one line says of an incident that took more than one diagnosis."""

from __future__ import annotations

import msgspec

from rerail.flow import Decision, Diagnosis, Rung
from rerail.report.compose import compose
from rerail.report.timeline import Timeline
from rerail.runtime.incident import Incident

GONE = Diagnosis(id="d1", job="j", at=1.0, code="gpu.xid.79", root="e", node="n", summary="n gpu1: GPU is gone")
STOPPED = Decision(id="x", job="j", at=1.0, rung=Rung.STOP, why="nothing is left")


def test_the_same_summary_is_not_said_twice() -> None:
    incident = Incident(number=1, opened=0.0, fault_version=3, echo_deadline=0.0)
    for number, summary in ((1, GONE.summary), (2, GONE.summary), (3, "rank 0 killed")):
        incident.decided(msgspec.structs.replace(GONE, id=f"d{number}", summary=summary), STOPPED)
    _, report = compose(incident, Timeline(opened=0.0, ended=1.0, fault_version=3), {}, 1, 2.0, "")
    assert report.summary == "n gpu1: GPU is gone; then rank 0 killed"
