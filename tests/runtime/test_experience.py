"""What repairs have cost, as the next decision is told."""

from __future__ import annotations

from pathlib import Path

from rerail.decide.choose import choose
from rerail.decide.situation import Situation
from rerail.flow import Cost, Diagnosis, Place, Report, Rung
from rerail.runtime.experience import Experience
from rerail.runtime.journal import Journal
from rerail.runtime.samples import Mark, MarkKind
from rerail.runtime.takeover import _began


def report(rung: Rung, **cost: float) -> Report:
    return Report(id="r", job="j", at=1.0, incident=1, code="x", summary="", rung=rung, ok=True, cost=Cost(**cost))


def test_one_fault_that_was_found_late_does_not_speak_for_all() -> None:
    experience = Experience()
    for cost in ({"t1": 0.1}, {"t1": 0.2}, {"t0": 600.0, "detect": 3600.0, "t1": 0.3}):
        experience.note(report(Rung.RETRY_STEP, **cost))
    assert experience.history == {Rung.RETRY_STEP: Cost(t1=0.2)}


def test_going_on_with_fewer_costs_what_it_takes_to_fill_the_seats_again() -> None:
    lost = Diagnosis(id="d", job="j", at=1.0, code="node.lost", root="e", node="n1", ranks=(1,), lost=(1,))
    now = Situation(
        aware=True,
        in_training=True,
        survivors=3,
        elastic=True,
        places={n: Place(f"n{n}", 0) for n in range(4)},
        barred={1: "node n1 is not connected"},
        free=(Place("spare", 0),),
        history={Rung.SHRINK: Cost(t1=1.0), Rung.GROW: Cost(t1=40.0), Rung.SWAP_NODE: Cost(t1=30.0)},
    )
    decision = choose(lost, now, at=1.0)
    prices = {one.rung: one.expected.total for one in decision.candidates}
    assert prices[Rung.SHRINK] > 41.0
    assert decision.rung is Rung.SWAP_NODE


def test_a_new_controller_knows_since_when_the_job_runs(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.sqlite")
    journal.append(
        [(1, report(Rung.REPLACE_RANK))], marks=[Mark(500.0, MarkKind.BEGIN), Mark(900.0, MarkKind.TAKEOVER)]
    )
    assert _began(journal) == 500.0
    old = Journal(tmp_path / "old.sqlite")
    old.append([(1, report(Rung.REPLACE_RANK))])
    assert _began(old) == 1.0
    journal.close()
    old.close()
