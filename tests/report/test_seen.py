"""What was seen besides an incident, and when it belongs to it."""

from __future__ import annotations

from rerail.report.seen import Seen


def test_a_verdict_on_replicas_belongs_to_the_incident_before_it() -> None:
    verdict = Seen(code="training.replica_differs", node="n0", rank=1, first=200.0, last=200.0)
    other = Seen(code="training.straggler_compute", node="n0", rank=1, first=200.0, last=200.0)
    assert verdict.near(100.0, 110.0) and not verdict.near(300.0, 310.0)
    assert not other.near(100.0, 110.0)
