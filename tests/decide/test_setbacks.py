"""Faults of the training: computed again, then left out, then the end; and that nothing else is rolled back."""

from __future__ import annotations

from typing import Any

import pytest

from rerail.decide.choose import choose
from rerail.decide.setbacks import BAD_BATCH, NAN, Setbacks
from rerail.decide.situation import Situation
from rerail.flow import Decision, Diagnosis, Rung

SPIKE = "training.loss_spike"


def fault(code: str = NAN, step: int = 20, trusted: int = 19, lost: tuple[int, ...] = ()) -> Diagnosis:
    return Diagnosis(
        id="d", job="j", at=1.0, code=code, root="e", node="n", ranks=(1,), lost=lost, step=step, trusted=trusted,
        rule="earliest-root",
    )  # fmt: skip


def after(*faults: Diagnosis) -> Setbacks:
    counted = Setbacks()
    for one in faults:
        counted = counted.note(one)
    return counted


def decide(*faults: Diagnosis, **now: Any) -> Decision:
    facts: dict[str, Any] = {"aware": True, "in_training": True, "survivors": 2, "setbacks": after(*faults), **now}
    return choose(faults[-1], Situation(**facts), at=2.0)


def test_the_same_step_is_computed_again_then_its_batch_left_out_then_the_job_stops() -> None:
    first, second, third = decide(fault()), decide(fault(), fault()), decide(fault(), fault(), fault())
    assert (first.rung, first.rule, first.skips) == (Rung.ROLL_BACK, "compute-again", {})
    assert (second.rung, second.rule, second.skips) == (Rung.ROLL_BACK, "leave-data-out", {20: 1})
    assert (third.rung, third.rule, third.exit_code, third.skips) == (Rung.STOP, "stays-bad", 93, {})


def test_looked_at_more_closely_an_earlier_step_is_the_one_and_is_left_out_if_it_stays_so() -> None:
    twice = [fault(step=20), fault(step=19, trusted=19)]
    assert after(*twice).skips == {19: 1}, "the loss was not finite because of the step before"
    closer = [fault(step=20), fault(step=13, trusted=13)]
    assert decide(*closer).rule == "compute-again", "it was sound the first time: this may be another one that passes"
    assert after(*closer, fault(step=13, trusted=13)).skips == {13: 1}
    assert decide(*closer, fault(step=13, trusted=13)).rung is Rung.ROLL_BACK


def test_two_that_pass_by_shortly_after_one_another_take_no_data_with_them() -> None:
    counted = after(fault(step=288, trusted=287), fault(step=284, trusted=284))
    assert (counted.times, counted.skips) == (1, {})


def test_a_loss_that_leapt_before_takes_all_batches_since_with_it() -> None:
    assert after(fault(step=25, trusted=20), fault(step=25, trusted=20)).skips == {20: 6}


def test_a_later_step_is_another_fault() -> None:
    counted = after(fault(step=20), fault(step=21, trusted=20))
    assert (counted.times, counted.in_a_row, counted.skips) == (1, 2, {})


def test_going_back_is_limited_unless_there_is_progress() -> None:
    near = [fault(step=step, trusted=step - 1) for step in (20, 50, 80, 110)]
    assert decide(*near[:3]).rung is Rung.ROLL_BACK
    stopped = decide(*near)
    assert (stopped.rule, stopped.exit_code) == ("stays-bad", 93) and "all went back 3 times" in stopped.why
    assert decide(fault(), roll_back_limit=0).rule == "stays-bad", "0: not even once"
    assert decide(*(fault(step=step, trusted=step - 1) for step in (20, 120, 220, 320))).rung is Rung.ROLL_BACK


def test_a_spike_is_the_same_where_it_may_have_begun_at_the_same_place() -> None:
    counted = after(fault(SPIKE, step=220, trusted=180), fault(SPIKE, step=226, trusted=181))
    assert (counted.times, counted.skips) == (2, {181: 45})


def test_the_script_may_refuse_batches_but_not_all_of_them() -> None:
    refused = [fault(BAD_BATCH, step=20, trusted=20)] * 4
    assert decide(*refused[:3]).rule == "batch-refused" and after(*refused[:3]).skips == {20: 3}
    assert decide(*refused).exit_code == 93
    apart = [fault(BAD_BATCH, step=step, trusted=step) for step in range(20, 40)]
    assert decide(*apart).rung is Rung.ROLL_BACK, "that is the script's own affair"


@pytest.mark.parametrize(("kept", "rung", "code"), [(True, Rung.RESTART_ALL, 0), (False, Rung.STOP, 93)])
def test_where_memory_holds_nothing_from_before_all_start_from_a_checkpoint_or_the_job_stops(
    kept: bool, rung: Rung, code: int
) -> None:
    decision = decide(fault(), tried={Rung.ROLL_BACK: "no snapshot"}, kept_before=kept)
    assert (decision.rung, decision.exit_code) == (rung, code)
    assert ("no snapshot" if kept else "neither a snapshot nor a checkpoint") in decision.why


def test_a_rank_that_is_lost_as_well_is_replaced() -> None:
    assert decide(fault(lost=(1,))).rung is Rung.REPLACE_RANK


@pytest.mark.parametrize("code", ["training.replica_differs", "process.killed", "training.decay"])
def test_nothing_else_is_rolled_back(code: str) -> None:
    found = fault(code, trusted=10 if code == "training.replica_differs" else -1)
    assert after(found) == Setbacks()
    decision = decide(found)
    assert decision.rung is not Rung.ROLL_BACK and Rung.ROLL_BACK not in decision.fallbacks
