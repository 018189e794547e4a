"""The judgement is pure, so every case is one look with made-up ages."""

from __future__ import annotations

import pytest

from rerail.config import Settings
from rerail.detect.hang import Facts, all_waiting, busy_limit, judge, limit, stopped_limit
from rerail.runtime.clock import Phase, Reading

SETTINGS = Settings()
STEPS = (0.1,) * 10


def reading(
    phase: Phase = Phase.COMPUTE,
    *,
    beat: float = 0.05,
    age: float = 0.0,
    pending: float = 0.0,
    durations: tuple[float, ...] = STEPS,
) -> Reading:
    return Reading(
        beat_age=beat,
        step=41,
        phase=phase,
        phase_age=age,
        generation=0,
        collectives=7,
        pending_age=pending,
        durations=durations,
    )


def facts(
    state: str = "S", *, observed: float = 1e6, cpu: float = 0.0, stall: float = 5.0, stopped: float = 0.0
) -> Facts:
    return Facts(state=state, joined=True, observed_s=observed, stall_s=stall, cpu_s=cpu, stopped_s=stopped)


def test_the_threshold_is_learnt_from_the_median_step() -> None:
    assert limit((0.1, 0.1, 0.1, 50.0), SETTINGS) == 2.0
    assert limit((4.0, 4.0, 4.0), SETTINGS) == 12.0
    assert busy_limit((4.0, 4.0, 4.0), SETTINGS) == 80.0


def test_without_history_only_the_busy_limit_counts() -> None:
    assert limit((0.1, 0.1), SETTINGS) == SETTINGS.busy_floor_s
    assert judge(reading(age=30.0, durations=()), facts(), SETTINGS) is None


@pytest.mark.parametrize("phase", list(Phase))
def test_a_stopped_process_is_found_within_the_limit_in_every_phase(phase: Phase) -> None:
    assert judge(reading(phase, beat=0.9), facts("T"), SETTINGS) is None
    verdict = judge(reading(phase, beat=1.1), facts("T"), SETTINGS)
    assert verdict is not None and verdict.kind == "stopped" and "SIGSTOP" in verdict.evidence


@pytest.mark.parametrize("median", [0.01, 0.5, 1.0, 10.0])
def test_a_stopped_process_is_never_judged_later_than_the_limit(median: float) -> None:
    assert stopped_limit((median,) * 5, SETTINGS) <= max(SETTINGS.hang_floor_s, SETTINGS.hang_factor * median)


def test_a_stopped_process_that_never_joined_is_found_by_the_time_it_was_seen_stopped() -> None:
    unaware = Facts(state="T", joined=False, observed_s=100.0, stopped_s=1.9)
    assert judge(reading(Phase.BUILDING, beat=100.0), unaware, SETTINGS) is None
    unaware = Facts(state="T", joined=False, observed_s=100.0, stopped_s=2.1)
    assert judge(reading(Phase.BUILDING, beat=100.0), unaware, SETTINGS) is not None


def test_a_debuggers_stop_is_named() -> None:
    verdict = judge(reading(beat=3.0), facts("t"), SETTINGS)
    assert verdict is not None and "debugger" in verdict.evidence


def test_a_silent_idle_process_is_frozen_at_the_limit() -> None:
    assert judge(reading(beat=1.9, age=1.9), facts("D"), SETTINGS) is None
    verdict = judge(reading(beat=2.1, age=2.1), facts("D"), SETTINGS)
    assert verdict is not None and verdict.kind == "frozen" and "step 42" in verdict.evidence


def test_a_silent_process_that_burns_cpu_has_the_busy_limit() -> None:
    assert judge(reading(beat=30.0, age=30.0), facts(cpu=4.0), SETTINGS) is None
    assert judge(reading(beat=61.0, age=61.0), facts(cpu=4.0), SETTINGS) is not None


def test_a_runnable_process_is_starved_rather_than_frozen() -> None:
    assert judge(reading(beat=30.0, age=30.0), facts("R"), SETTINGS) is None


def test_a_rank_that_stays_in_its_own_code_is_stuck() -> None:
    verdict = judge(reading(Phase.UPDATE, age=2.5), facts(), SETTINGS)
    assert verdict is not None and verdict.kind == "stuck" and "update" in verdict.evidence


def test_no_verdict_before_cpu_has_been_counted() -> None:
    assert judge(reading(age=2.5), facts(stall=0.0), SETTINGS) is None


def test_a_rank_that_waits_for_others_is_no_culprit() -> None:
    assert judge(reading(Phase.COMPUTE, age=50.0, pending=49.0), facts(), SETTINGS) is None
    assert judge(reading(Phase.COMM, age=50.0), facts(), SETTINGS) is None


@pytest.mark.parametrize("phase", [Phase.BUILDING, Phase.OUTSIDE, Phase.PARKED, Phase.DONE])
def test_phases_without_a_usual_length_are_not_judged(phase: Phase) -> None:
    assert judge(reading(phase, beat=500.0, age=500.0), facts(), SETTINGS) is None


def test_no_stall_is_older_than_the_observation() -> None:
    assert judge(reading(beat=500.0, age=500.0), facts(observed=0.5), SETTINGS) is None
    assert judge(reading(beat=500.0), facts("T", observed=0.5), SETTINGS) is None


def test_a_node_stalls_only_when_all_its_ranks_wait() -> None:
    waiting, late = reading(pending=3.0), reading(Phase.COMM, age=2.5)
    assert all_waiting([waiting, late], 1e6, SETTINGS) == 2.5
    assert all_waiting([waiting, reading(age=9.0)], 1e6, SETTINGS) == 0.0
    assert all_waiting([waiting, late], 1.0, SETTINGS) == 0.0
    assert all_waiting([], 1e6, SETTINGS) == 0.0
