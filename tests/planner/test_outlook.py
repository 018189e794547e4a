"""From the faults of a job to what its ranks plan with."""

from __future__ import annotations

import time

import pytest

from rerail.checkpoint.schedule import CheckFreq, Costs, Planned
from rerail.flow import Cost, Report, Rung
from rerail.planner.model import young_s
from rerail.planner.outlook import Course, Healed, Outlook, healed, look_ahead
from rerail.planner.rates import usual
from rerail.runtime.experience import Experience
from rerail.runtime.fleet import Fleet
from rerail.session.foresight import RECENT, Foresight

PRIOR = usual(0, 4)


def report(at: float, rung: Rung = Rung.REPLACE_RANK, lost: int = 3) -> Report:
    return Report(
        id=f"r{at}", job="j", at=at, incident=1, code="x", summary="", rung=rung, ok=True, cost=Cost(), lost_steps=lost
    )


@pytest.mark.parametrize(("prior", "began"), [(PRIOR, 0.0), (usual(16_384), 40_000.0)])
def test_time_without_faults_lowers_the_rate_as_a_new_estimate_would(prior: float, began: float) -> None:
    at_start = look_ahead([], [], 0.0, began, prior).lost
    later = look_ahead([], [], 0.0, began + 86_400.0, prior).lost
    assert at_start.between_s(86_400.0) == pytest.approx(later.between_s())


def test_many_faults_weigh_more_than_a_quiet_minute() -> None:
    at_start = look_ahead([], [], 0.0, 0.0, PRIOR).lost
    many = look_ahead([], [100.0 * n for n in range(1, 21)], 0.0, 2000.0, PRIOR).lost
    assert many.between_s(100.0) / many.between_s() < at_start.between_s(100.0) / at_start.between_s()


def test_only_what_lost_snapshots_makes_checkpoints_more_frequent() -> None:
    experience, fleet = Experience(), Fleet()
    experience.outlook(fleet, None, False, 1000.0)
    before = experience.outlook(fleet, None, False, 5000.0)
    for at in (2000.0, 3000.0, 4000.0):
        experience.note(report(at))
    behind = experience.outlook(fleet, None, False, 5000.0)
    assert behind.behind.per_s > 2 * before.behind.per_s and behind.lost == before.lost
    for at in (4200.0, 4400.0, 4600.0):
        experience.note(report(at, Rung.RESTART_ALL))
    assert experience.outlook(fleet, None, False, 5000.0).lost.per_s > 2 * before.lost.per_s


def test_faults_after_which_all_went_on_count_by_what_they_cost() -> None:
    times = [100.0 * n for n in range(1, 21)]
    full = look_ahead(times, [], 0.0, 2000.0, PRIOR)
    some = [Healed(at=at, rho=0.4) for at in times]
    share = look_ahead([], [], 0.0, 2000.0, PRIOR, some)
    assert share.behind.per_s == pytest.approx(0.4 * full.behind.per_s)
    assert share.lost == look_ahead([], [], 0.0, 2000.0, PRIOR).lost
    saved = look_ahead([], [], 0.0, 2000.0, PRIOR, [Healed(at=at, rho=0.4, saved=True) for at in times])
    assert saved.lost.per_s == pytest.approx(share.behind.per_s)
    half = look_ahead(times[:10], [], 0.0, 2000.0, PRIOR, some[10:])
    assert half.behind.per_s == pytest.approx(0.7 * full.behind.per_s)
    free = look_ahead([], [], 0.0, 2000.0, PRIOR, [Healed(at=at, rho=0.0) for at in times])
    assert 0 < free.behind.per_s <= 0.1 * full.behind.per_s, "never none at all"


@pytest.mark.parametrize(
    ("figures", "rho"),
    [
        ({"behind": 100.0, "expected": 40.0}, 0.4),
        ({"behind": 100.0, "expected": 40.0, "lag": 10.0, "lag_error": 0.1}, 0.1),
        ({"behind": 100.0, "expected": 40.0, "lag": 10.0, "lag_error": 20.0}, 0.25),
        ({"behind": 100.0, "expected": 40.0, "lag": -900.0, "lag_error": 1e6}, 0.4),
        ({"behind": 100.0, "expected": 40.0, "lag": -50.0, "lag_error": 0.1}, 0.0),
        ({"behind": 100.0, "expected": 40.0, "lag": 500.0, "lag_error": 0.1}, 1.0),
    ],
)
def test_what_was_measured_counts_as_far_as_it_is_sure(figures: dict[str, float], rho: float) -> None:
    found = healed(5.0, figures)
    assert found is not None and found.rho == pytest.approx(rho, abs=0.01)
    assert healed(5.0, {"message": "loss 2"}) is None


def test_faults_that_cost_no_work_do_not_count() -> None:
    experience, fleet = Experience(), Fleet()
    experience.outlook(fleet, None, False, 1000.0)
    before = experience.outlook(fleet, None, False, 5000.0)
    experience.note(report(2000.0, lost=0))
    experience.note(report(2500.0, Rung.RETRY_STEP, lost=0))
    assert experience.outlook(fleet, None, False, 5000.0) == before


def test_the_fault_that_is_being_repaired_counts_already() -> None:
    experience, fleet = Experience(), Fleet()
    calm = experience.outlook(fleet, None, False, 1000.0)
    assert experience.outlook(fleet, Rung.RESTART_ALL, False, 1000.0).lost.per_s > calm.lost.per_s
    assert experience.outlook(fleet, Rung.REPLACE_RANK, True, 1000.0).behind.per_s > calm.behind.per_s
    assert experience.outlook(fleet, Rung.REPLACE_RANK, False, 1000.0) == calm


@pytest.mark.parametrize("times", [10.0, 0.1])
def test_checkpoints_follow_a_tenfold_change_of_the_rate_within_five_faults(times: float) -> None:
    """Faults every 2,000 seconds, then ten times as many or as few, a stall of one second."""
    lost = [2000.0 * n for n in range(1, 31)]
    lost += [lost[-1] + 2000.0 / times * n for n in range(1, 6)]
    outlook = look_ahead([], lost, 0.0, lost[-1], PRIOR)
    costs = Costs(step_s=0.01, stall_s=1.0, save_s=0.1, mtbf_s=outlook.lost.between_s())
    best = young_s(1.0, 2000.0 / times)
    assert Planned(overhead=1.0).steps(costs) * 0.01 == pytest.approx(best, rel=0.1)


@pytest.mark.parametrize("times", [10.0, 0.1])
def test_checkpoints_follow_a_tenfold_change_of_the_write_speed_within_ten_saves(times: float) -> None:
    foresight = Foresight()
    saved = [8.0] * 30 + [8.0 / times] * 10
    foresight.stalled(0.001)
    costs = foresight.costs([0.1] * 64, saved[-RECENT:])
    assert costs.save_s == 8.0 / times
    rule = CheckFreq()  # its interval is the time that a save takes, where the stall is small
    assert rule.steps(costs) * 0.1 == pytest.approx(8.0 / times, rel=0.1)


def test_snapshots_become_rarer_as_a_job_proves_sound_and_never_cost_more_than_their_share() -> None:
    foresight = Foresight()
    foresight.take(Outlook(behind=Course(per_s=1 / 100)), 0)
    often = foresight.snapshot_steps(0.01, 0.1, share=0.5)
    foresight.take(Outlook(behind=Course(per_s=1 / 100_000)), 0)
    assert foresight.snapshot_steps(0.01, 0.1, share=0.5) > 10 * often
    assert foresight.snapshot_steps(0.01, 0.1, share=1e-6) == 100_000


def test_a_save_that_is_not_done_yet_takes_at_least_as_long_as_it_has_taken() -> None:
    foresight = Foresight()
    assert foresight.costs([0.1], [], since=time.monotonic() - 60).save_s >= 60
    assert foresight.costs([0.1], [2.0], since=time.monotonic() - 1).save_s == 2.0


def test_an_interval_stays_until_something_has_changed_for_good() -> None:
    foresight, when = Foresight(), Planned(overhead=1.0)
    for stall in (0.001, 0.0011, 0.0009, 0.001, 0.05, 0.001):  # one that was held up by something else
        foresight.stalled(stall)
    costs = foresight.costs([0.1] * 8, [0.5])
    assert costs.stall_s == pytest.approx(0.001)
    foresight.agreed = foresight.steps(when, costs)
    again = costs._replace(stall_s=costs.stall_s * 1.3)  # its root is 1.14
    assert foresight.steps(when, again) == foresight.agreed
    assert foresight.steps(when, costs._replace(stall_s=costs.stall_s * 4)) > 1.5 * foresight.agreed


def test_the_same_interval_is_told_once() -> None:
    foresight, when = Foresight(), Planned()
    foresight.take(Outlook(lost=Course(per_s=1 / 1000)), 0)
    foresight.stalled(0.5)
    costs = foresight.costs([0.1], [2.0])
    assert "every 500 steps, about 50 s, so that saves hold up 1% of the time" in foresight.worth_telling(
        when, 500, costs, 500
    )
    assert not foresight.worth_telling(when, 550, costs, 550)
    assert "every 1000 steps" in foresight.worth_telling(when, 1000, costs, 1000)


def test_the_reason_is_the_one_that_gives_the_interval() -> None:
    when = Planned()
    for costs, words in (
        (Costs(step_s=0.1, stall_s=0.01, save_s=0.1, mtbf_s=86_400.0), "cost least"),
        (Costs(step_s=0.1, stall_s=1.0, save_s=0.1, mtbf_s=1000.0), "hold up 1% of the time"),
        (Costs(step_s=0.1, stall_s=0.01, save_s=90.0, mtbf_s=1000.0), "store is busy half of the time"),
    ):
        steps = when.steps(costs)
        told = Foresight().worth_telling(when, steps, costs, steps)
        assert words in told and f"every {steps} steps" in told and "Planned" not in told
    told = Foresight().worth_telling(when, 400, Costs(0.1, 0.01, 0.1, 1240.0), 50)
    assert "as another rank has asked for" in told and "own times ask for 50" in told and "every 21 min" in told
    assert "this one is new" in Foresight().worth_telling(when, 400, Costs(0.0, 0.0, 0.0), 0)
    assert "by the rule CheckFreq" in Foresight().worth_telling(CheckFreq(), 9, Costs(0.1, 0.01, 0.1), 9)


def test_a_rank_that_knows_too_little_leaves_it_to_the_others() -> None:
    foresight, when = Foresight(), Planned()
    costs = Costs(step_s=0.1, stall_s=0.0, save_s=0.4)
    assert foresight.wish(when, costs, 2, new_here=True) == 0
    for stall in (0.9, 0.01, 0.012):  # the first of a process is none to go by
        foresight.stalled(stall)
        assert foresight.wish(when, costs, 20, new_here=True) == 0
    assert foresight.costs([0.1] * 20, []).stall_s == pytest.approx(0.011)
    foresight.stalled(0.011)
    assert foresight.wish(when, costs, 20, new_here=True) > 0
    assert Foresight().wish(when, costs, 20, new_here=False) > 0, "without snapshots there is nothing more to know"
    assert Foresight().wish(when, costs, 2, new_here=False) == 0


def test_rates_fall_while_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    foresight = Foresight()
    foresight.take(Outlook(), 7)
    now = time.monotonic()
    before = foresight.costs([], []).mtbf_s
    monkeypatch.setattr(time, "monotonic", lambda: now + 3600.0)
    assert foresight.costs([], []).mtbf_s == pytest.approx(before + 3600.0, rel=0.01)
    assert foresight.resumed == 7
