"""Costs from marks: every second in its place."""

from __future__ import annotations

import itertools

import pytest

from rerail.report.timeline import Timeline, lost_steps, measure, phases
from rerail.runtime.wire import Formed, Parked, Resumed


def line(**changes: object) -> Timeline:
    values: dict[str, object] = {
        "opened": 100.0, "detect_s": 0.2, "parked_at": 100.3, "formed_at": 100.4, "ended": 100.6,
        "fault_version": 12, "resumed_version": 12,
        "parked": {0: Parked(rank=0, generation=1, version=12, intact=False, in_training=True, phases={"build": 0.1, "run_out": 0.05})},
        "formed": {r: Formed(rank=r, generation=1, version=12, phases={"communication": 0.01 * r, "load": 0.02}) for r in (1, 2)},
        "resumed": {
            0: Resumed(rank=0, generation=1, version=13, step_s=0.05, usual_step_s=0.04),
            1: Resumed(rank=1, generation=1, version=13, step_s=0.10, usual_step_s=0.04),
        },
        **changes,
    }  # fmt: skip
    return Timeline(**values)  # type: ignore[arg-type]


def test_each_part() -> None:
    cost = measure(line())
    assert cost.detect == 0.2
    assert cost.t0 == pytest.approx(0.04)
    assert cost.t1 == pytest.approx(0.3)
    assert cost.t2 == pytest.approx(0.02)
    assert cost.t3 == pytest.approx(0.02)
    assert cost.t4 == pytest.approx(0.06)


def test_steps_gone_back_are_lost_work() -> None:
    back = line(resumed_version=8)
    assert lost_steps(back) == 4 and measure(back).t0 == pytest.approx(5 * 0.04)


def test_a_restart_nobody_reports_back_from() -> None:
    blind = Timeline(opened=10.0, ended=10.5)
    assert measure(blind).t1 == pytest.approx(0.5) and measure(blind).total == pytest.approx(0.5)
    assert lost_steps(blind) == 0
    assert phases(blind) == ()


def test_phases_follow_each_other() -> None:
    stages, told = phases(line())[:3], phases(line())[3:]
    assert [p.name for p in stages] == ["reschedule", "form", "replay"]
    assert all(before.end == after.start for before, after in itertools.pairwise(stages))
    assert [(p.name, p.start, p.end) for p in told] == [
        ("rank 0: build", 0.0, 0.1),
        ("rank 0: run out", 0.1, pytest.approx(0.15)),
    ]


def test_steps_that_one_rank_does_again_are_lost_work_and_no_forming() -> None:
    formed = {r: Formed(rank=r, generation=1, version=12, phases={"again": 3.0} if r == 2 else {}) for r in (1, 2)}
    again = line(formed=formed, formed_at=103.4, ended=103.6)
    assert lost_steps(again) == 0 and measure(again).t0 == pytest.approx(0.04 + 3.0)
    ends = {phase.name: phase.end for phase in phases(again)}
    assert ends["form"] == pytest.approx(0.4) and ends["replay"] == pytest.approx(3.6)
