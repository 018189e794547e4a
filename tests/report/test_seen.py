"""What was seen besides an incident, and when it belongs to it."""

from __future__ import annotations

from rerail.flow import Signal
from rerail.report.seen import Seen, places_seen


def test_a_verdict_on_replicas_belongs_to_the_incident_before_it() -> None:
    verdict = Seen(code="training.replica_differs", node="n0", rank=1, first=200.0, last=200.0)
    other = Seen(code="training.straggler_compute", node="n0", rank=1, first=200.0, last=200.0)
    assert verdict.near(100.0, 110.0) and not verdict.near(300.0, 310.0)
    assert not other.near(100.0, 110.0)


def place(at: float, source: str, text: str, node: str = "n0") -> Signal:
    return Signal(id=f"s{at}", job="j", at=at, source=source, node=node, rank=0, payload={"message": text})


def test_a_place_for_checkpoints_that_was_out_is_seen_with_how_often_and_whether_it_is_over() -> None:
    out = "the place /mnt/a b for checkpoints is out: read-only; the other places are used meanwhile"
    back = "the place /mnt/a b for checkpoints works again and is used"
    told = [
        place(1.0, "checkpoint.saved", "checkpoint of step 3 saved to /mnt/a b"),
        place(2.0, "checkpoint.tier_out", out),
        place(3.0, "checkpoint.tier_back", back),
        place(4.0, "checkpoint.tier_out", out),
        place(5.0, "checkpoint.tier_out", out.replace("/mnt/a b", "s3://b")),
        place(6.0, "checkpoint.tier_back", back),
    ]
    first, second = places_seen(told)
    assert (first.subject, first.count, first.over, first.over_at) == ("/mnt/a b", 2, True, 6.0)
    assert first.message == "is out: read-only; the other places are used meanwhile"
    assert (second.subject, second.over) == ("s3://b", False)
