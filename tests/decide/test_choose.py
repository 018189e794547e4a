"""Decisions: which rung, by which rule, and that there always is one."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rerail.decide.budget import Budget
from rerail.decide.choose import choose
from rerail.decide.ladder import LADDER
from rerail.decide.situation import Situation, Tally, broken
from rerail.decide.verdicts import VERDICTS
from rerail.flow import Cost, Decision, Diagnosis, Place, Rung


def diagnosis(
    lost: tuple[int, ...] = (), ranks: tuple[int, ...] = (2,), rule: str = "earliest-root", step: int = 5
) -> Diagnosis:
    return Diagnosis(
        id="d", job="j", at=1.0, code="c", root="e", node="n", ranks=ranks, lost=lost, rule=rule, step=step, summary="s"
    )  # fmt: skip


def decide(found: Diagnosis, **now: Any) -> Decision:
    places = {rank: Place("n", rank) for rank in range(4)}
    facts: dict[str, Any] = {"aware": True, "in_training": True, "survivors": 3, "places": places, **now}
    return choose(found, Situation(**facts), at=2.0)


RAISED = diagnosis()
KILLED = diagnosis(lost=(2,))
EVACUATED = diagnosis(rule="evacuate")
GONE = {2: "the node of a lost rank is not connected"}


@pytest.mark.parametrize(
    ("found", "now", "rung", "rule"),
    [
        (KILLED, {}, Rung.REPLACE_RANK, "rank-lost"),
        (RAISED, {"budget": Budget(raised_count=1)}, Rung.RETRY_STEP, "raised-once"),
        (RAISED, {"budget": Budget(raised_count=2)}, Rung.REPLACE_RANK, "raised-again"),
        (diagnosis(rule="collective-alone"), {}, Rung.RETRY_STEP, "all-alive"),
        (diagnosis(rule="takeover", ranks=()), {}, Rung.RETRY_STEP, "all-alive"),
        (KILLED, {"in_training": False}, Rung.RESTART_ALL, "restart"),
        (KILLED, {"aware": False}, Rung.RESTART_ALL, "restart"),
        (KILLED, {"survivors": 0}, Rung.RESTART_ALL, "restart"),
        (KILLED, {"barred": GONE}, Rung.RESTART_ALL, "restart"),
        (KILLED, {"barred": GONE, "free": (Place("n", 9),)}, Rung.SWAP_DEVICE, "place-lost"),
        (KILLED, {"barred": GONE, "free": (Place("m", 0),)}, Rung.SWAP_NODE, "place-lost"),
        (KILLED, {"tried": {Rung.REPLACE_RANK: "no"}, "free": (Place("m", 0),)}, Rung.SWAP_NODE, "place-doubted"),
        (EVACUATED, {"free": (Place("m", 0),)}, Rung.HOT_SWITCH, "hot-switch"),
        (EVACUATED, {"free": (Place("n", 9),), "tried": {Rung.HOT_SWITCH: "no"}}, Rung.SWAP_DEVICE, "evacuate"),
        (EVACUATED, {"tried": {Rung.RESET_DEVICE: "no"}, "wants_reset": True}, Rung.REPLACE_RANK, "reset-failed"),
        (EVACUATED, {"tried": {Rung.RESET_DEVICE: "no"}, "free": (Place("n", 9),)}, Rung.HOT_SWITCH, "hot-switch"),
        (KILLED, {"exited": 1}, Rung.RESTART_ALL, "restart"),
        (KILLED, {"tried": {Rung.REPLACE_RANK: "no"}}, Rung.RESTART_ALL, "restart"),
        (KILLED, {"aware": False, "budget": Budget(restarts_used=3)}, Rung.STOP, "budget-used-up"),
        (KILLED, {"budget": Budget(stuck=3)}, Rung.STOP, "no-progress"),
        (KILLED, {"aware": False, "budget": Budget(error_count=3)}, Rung.STOP, "no-progress"),
        (RAISED, {"programming": True, "in_training": False}, Rung.STOP, "cannot-start"),
        (RAISED, {"programming": True}, Rung.RETRY_STEP, "raised-once"),
        (
            KILLED,
            {"programming": True, "in_training": False, "settled": True, "aware": False},
            Rung.RESTART_ALL,
            "restart",
        ),
    ],
)
def test_rule(found: Diagnosis, now: dict[str, Any], rung: Rung, rule: str) -> None:
    decision = decide(found, **now)
    assert (decision.rung, decision.rule) == (rung, rule)
    assert decision.why


def test_exit_codes() -> None:
    assert decide(KILLED, budget=Budget(stuck=3)).exit_code == 93
    assert decide(KILLED, aware=False, restarts_allowed=0).exit_code == 1
    assert "0 of 0" in decide(KILLED, aware=False, restarts_allowed=0).why
    assert decide(KILLED).exit_code == 0


def test_all_lost_ranks_are_replaced_and_the_raiser_is_when_nobody_is_lost() -> None:
    assert decide(diagnosis(lost=(1, 2), ranks=(1, 2))).ranks == (1, 2)
    assert decide(RAISED, budget=Budget(raised_count=2)).ranks == (2,)
    assert decide(RAISED).ranks == ()


def test_candidates_tell_every_rung_with_its_price() -> None:
    known = Cost(t1=9.0)
    decision = decide(KILLED, history={Rung.REPLACE_RANK: known})
    by_rung = {candidate.rung: candidate for candidate in decision.candidates}
    assert set(by_rung) == set(Rung)
    assert by_rung[Rung.REPLACE_RANK].expected == known
    assert by_rung[Rung.RESTART_ALL].expected.total >= known.total  # never taken, so not thought to be cheaper
    usual = {one.rung: one.usual for one in LADDER}
    assert decide(KILLED).candidates[-2].expected == usual[Rung.RESTART_ALL]
    assert not by_rung[Rung.RETRY_STEP].feasible and "rank 2" in by_rung[Rung.RETRY_STEP].why
    assert decision.fallbacks == (Rung.RESTART_ALL, Rung.STOP)


def test_rule_ids_are_unique() -> None:
    assert len({verdict.id for verdict in VERDICTS}) == len(VERDICTS)
    assert [strategy.rung for strategy in LADDER] == list(Rung)


def test_a_rung_that_fails_again_and_again_loses_to_a_dearer_one_that_does_not() -> None:
    free = (Place("m", 0),)
    assert decide(KILLED, free=free).rung is Rung.REPLACE_RANK
    often = {Rung.REPLACE_RANK: Tally(40, 0)}
    assert decide(KILLED, tallies=often).rung is Rung.RESTART_ALL
    assert decide(KILLED, tallies={Rung.REPLACE_RANK: Tally(40, 39)}).rung is Rung.REPLACE_RANK


def test_the_policy_can_forbid_rungs_but_not_to_stop() -> None:
    assert decide(KILLED, rungs=(Rung.RESTART_ALL,)).rung is Rung.RESTART_ALL
    stopped = decide(KILLED, rungs=(Rung.RETRY_STEP,))
    assert stopped.rung is Rung.STOP and "policy" in stopped.why


def test_only_those_move_that_cannot_stay() -> None:
    lost = diagnosis(lost=(1, 2), ranks=(1, 2))
    moved = decide(lost, barred={2: "isolated"}, free=(Place("m", 0), Place("m", 1)))
    assert (moved.rung, moved.ranks, moved.moves) == (Rung.SWAP_NODE, (1, 2), {2: Place("m", 0)})
    both = decide(lost, barred={1: "x", 2: "isolated"}, free=(Place("n", 8), Place("m", 1)))
    assert both.rung is Rung.RESTART_ALL


@given(
    lost=st.sets(st.integers(0, 3)), rule=st.sampled_from(["earliest-root", "collective-alone", "takeover"]),
    flags=st.tuples(*[st.booleans()] * 5), survivors=st.integers(0, 3), restarts=st.integers(0, 4),
    stuck=st.integers(0, 4), tried=st.sets(st.sampled_from([Rung.RETRY_STEP, Rung.REPLACE_RANK, Rung.RESTART_ALL])),
)  # fmt: skip
def test_there_is_always_a_decision_and_it_is_feasible(
    lost: set[int], rule: str, flags: tuple[bool, ...], survivors: int, restarts: int, stuck: int, tried: set[Rung]
) -> None:
    aware, in_training, settled, programming, nodes_up = flags
    found = diagnosis(lost=tuple(sorted(lost)), rule=rule)
    decision = decide(
        found,
        aware=aware, in_training=in_training, settled=settled, programming=programming,
        barred={} if nodes_up else dict.fromkeys(broken(found), "gone"),
        survivors=survivors, budget=Budget(restarts_used=restarts, stuck=stuck), tried=dict.fromkeys(tried, "failed"),
    )  # fmt: skip
    taken = next(c for c in decision.candidates if c.rung is decision.rung)
    assert taken.feasible and decision.rung not in tried
    assert decision.rung is not Rung.REPLACE_RANK or (decision.ranks and nodes_up)
    assert decision.rung is not Rung.RETRY_STEP or not lost


def test_budget_counts_standing_still_and_forgets_when_training_moves() -> None:
    budget = Budget()
    for expected in (1, 2, 3):
        budget = budget.note(KILLED, 10, aware=True)
        assert budget.stuck == expected
    assert budget.note(KILLED, 11, aware=True).stuck == 1


def test_budget_lets_different_faults_be_bad_luck_but_not_for_ever() -> None:
    budget = Budget()
    for rank in range(5):
        budget = budget.note(diagnosis(ranks=(rank,), lost=(rank,)), 10, aware=True)
    assert (budget.stuck, budget.standing) == (1, 5)
    assert decide(KILLED, budget=budget).rung is Rung.REPLACE_RANK
    assert decide(KILLED, budget=Budget(stuck=1, standing=15)).rule == "no-progress"


def test_budget_counts_an_exception_that_wanders_over_the_ranks() -> None:
    budget = Budget()
    for rank in (0, 1, 0):
        budget = budget.note(diagnosis(ranks=(rank,)), 5, aware=True)
    assert budget.stuck == 3


def test_budget_takes_replicas_that_differ_elsewhere_for_progress_and_at_the_same_step_for_none() -> None:
    def differing(*steps: int) -> Budget:
        budget = Budget()
        for step in steps:
            found = msgspec.structs.replace(diagnosis(ranks=(), step=step), code="training.replicas_tie", trusted=4)
            budget = budget.note(found, 200, aware=True)
        return budget

    assert (differing(200, 100, 200).stuck, differing(200, 100, 200).standing) == (1, 3)
    assert decide(RAISED, budget=differing(*range(14, 0, -1))).rung is not Rung.STOP
    assert decide(RAISED, budget=differing(*range(15, 0, -1))).rule == "no-progress", "but not for ever"
    assert decide(RAISED, budget=differing(200, 200, 200)).rule == "no-progress"


def test_budget_knows_the_step_of_a_raise_though_no_beat_has_told_it() -> None:
    once = Budget().note(diagnosis(step=5), 3, aware=True)
    assert once.note(diagnosis(step=5), 5, aware=True).raised_count == 2


def test_budget_counts_raises_of_one_step() -> None:
    once = Budget().note(diagnosis(step=5), 5, aware=True)
    twice = once.note(diagnosis(step=5), 5, aware=True)
    other = twice.note(diagnosis(step=6), 6, aware=True)
    assert (once.raised_count, twice.raised_count, other.raised_count) == (1, 2, 1)


def test_budget_counts_the_same_error_of_a_script_without_steps() -> None:
    budget = Budget()
    for expected in (1, 2, 3):
        budget = budget.note(RAISED, -1, aware=False)
        assert budget.error_count == expected
    assert budget.note(diagnosis(ranks=(1,)), -1, aware=False).error_count == 4
    assert budget.spend_restart().restarts_used == 1


NODE_LOST = diagnosis(lost=(2, 3), ranks=(2, 3), rule="node-lost")


def test_a_lost_agent_has_its_ranks_replaced_once_its_node_is_back() -> None:
    decision = decide(NODE_LOST, survivors=2)
    assert (decision.rung, decision.rule, decision.ranks) == (Rung.REPLACE_RANK, "rank-lost", (2, 3))


@pytest.mark.parametrize(
    ("now", "why"),
    [
        ({"barred": GONE}, "node of a lost rank is not connected"),
        ({"survivors": 0, "in_training": False}, "no rank has survived"),
        ({"tried": {Rung.REPLACE_RANK: "no replica holds it"}}, "no replica holds it"),
    ],
)
def test_a_lost_agent_otherwise_restarts_all(now: dict[str, Any], why: str) -> None:
    decision = decide(NODE_LOST, **{"survivors": 2, **now})
    assert decision.rung is Rung.RESTART_ALL and why in decision.why


def test_a_rank_that_is_behind_is_retried_and_then_replaced() -> None:
    late = diagnosis(ranks=(3,), rule="fewest-collectives")
    assert decide(late, budget=Budget(raised_count=1)).rung is Rung.RETRY_STEP
    again = decide(late, budget=Budget(raised_count=2))
    assert (again.rung, again.ranks) == (Rung.REPLACE_RANK, (3,))


def test_an_elastic_job_goes_on_without_the_ranks_of_a_lost_node() -> None:
    decision = decide(NODE_LOST, survivors=2, barred={2: "gone", 3: "gone"}, elastic=True)
    assert (decision.rung, decision.rule, decision.ranks) == (Rung.SHRINK, "fewer-ranks", (2, 3))
    assert Rung.RESTART_ALL in decision.fallbacks
    again = decide(
        NODE_LOST, survivors=2, barred={2: "gone", 3: "gone"}, elastic=True, tried={Rung.SHRINK: "a shard is lost"}
    )
    assert again.rung is Rung.RESTART_ALL


BACK = msgspec.structs.replace(diagnosis(ranks=()), code="node.returned")


def test_empty_seats_are_filled_when_their_node_is_back() -> None:
    decision = decide(BACK, elastic=True, fillable=(3,))
    assert (decision.rung, decision.rule, decision.ranks) == (Rung.GROW, "node-back", (3,))


def test_seats_that_could_not_be_filled_are_left_empty_once_more() -> None:
    decision = decide(BACK, elastic=True, newcomers=(3,), tried={Rung.GROW: "the script builds another model"})
    assert (decision.rung, decision.rule, decision.ranks) == (Rung.SHRINK, "not-back", (3,))


def test_a_node_that_is_back_is_no_fault_of_a_step() -> None:
    assert Budget().note(BACK, 5, aware=True).raised_count == 0


SPARE = (Place("n", 9),)


def test_a_device_that_needs_a_reset_is_left_or_reset_first_as_the_preset_says() -> None:
    moving = {"wants_reset": True, "free": SPARE, "barred": {2: "its device is faulty"}}
    rescheduling = (Rung.SWAP_DEVICE, Rung.RESET_DEVICE, Rung.RESTART_ALL)
    graceful = (Rung.RESET_DEVICE, Rung.SWAP_DEVICE, Rung.RESTART_ALL)
    assert decide(KILLED, rungs=rescheduling, **moving).rung is Rung.SWAP_DEVICE
    assert decide(KILLED, rungs=graceful, **moving).rung is Rung.RESET_DEVICE
    cannot = decide(KILLED, rungs=graceful, no_reset={2: "three resets in six hours are enough"}, **moving)
    assert cannot.rung is Rung.SWAP_DEVICE
    after = decide(KILLED, rungs=graceful, tried={Rung.RESET_DEVICE: "it did not come back"}, **moving)
    assert after.rung is Rung.SWAP_DEVICE


def test_a_rung_that_leaves_the_fault_as_it_is_is_taken_only_for_want_of_a_better_one() -> None:
    unfit = {Rung.REPLACE_RANK: "the same device", Rung.RESTART_ALL: "the same devices"}
    assert decide(KILLED, unfit=unfit, free=SPARE).rung is Rung.SWAP_DEVICE
    assert decide(KILLED, unfit=unfit, wants_reset=True).rung is Rung.RESET_DEVICE
    assert decide(KILLED, unfit=unfit).rung is Rung.REPLACE_RANK


def test_a_rank_that_was_replaced_too_often_moves_or_all_are_started_again() -> None:
    worn = "rank 2 was started anew 20 times within 3600 s, which is the limit"
    assert decide(KILLED, worn=worn, free=SPARE).rung is Rung.SWAP_DEVICE
    assert decide(KILLED, worn=worn).rung is Rung.RESTART_ALL


def test_nobody_who_still_works_is_moved_where_there_is_no_place_nor_is_anything_else_broken_for_it() -> None:
    decision = decide(EVACUATED, tried={Rung.HOT_SWITCH: "no"})
    assert decision.rung is Rung.RESTART_ALL


@pytest.mark.parametrize(
    "rung", [Rung.REPLACE_RANK, Rung.RESET_DEVICE, Rung.SWAP_DEVICE, Rung.SWAP_NODE, Rung.HOT_SWITCH]
)
def test_somebody_has_to_be_left_who_keeps_the_state(rung: Rung) -> None:
    everybody = msgspec.structs.replace(EVACUATED, ranks=(0, 1, 2, 3))
    places = {rank: Place("n1", rank) for rank in range(4)}
    free = tuple(Place("n1", device) for device in range(4, 8))
    decision = decide(everybody, places=places, free=free, wants_reset=True)
    (found,) = [one for one in decision.candidates if one.rung is rung]
    assert not found.feasible
    assert rung is Rung.REPLACE_RANK or found.why == "no rank would be left that keeps the state"
