"""A rank is lost that no replica holds, in a job whose ranks send each other messages: it alone does its steps again."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest
from harness import Start

Digests = Callable[..., dict[int, str]]
ENV = {"RERAIL_SNAPSHOT_EVERY": "20"}


@pytest.mark.parametrize("style", ["pp", "tp"])
def test_a_lost_rank_does_its_steps_again_while_the_others_stay_where_they_are(
    start: Start, undisturbed: Digests, style: str
) -> None:
    # the two pairs of tp meet in nothing but the guard, and one pair may be several steps ahead of the other
    guard = ("--guard-every", "7") if style == "pp" else ()
    run = start(style, "60", *guard, "--fault", "die@2@33", env=ENV)
    run.finish()
    (report,) = run.reports()
    assert (report["rung"], report["fidelity"], report["lost_steps"]) == ("replace_rank", "exact", 0), report
    (recovery,) = run.records("recovery")
    assert recovery.resumed_step == 33 or (style == "tp" and recovery.resumed_step > 33), recovery
    assert recovery.sources[2].startswith("its snapshot of step 20, steps"), recovery
    assert all(len(pids) == (2 if rank == 2 else 1) for rank, pids in run.pids.items()), run.pids
    assert run.digests == undisturbed(style, "60"), run.told("the same weights")


def test_a_survivor_that_was_one_step_behind_does_that_one_with_the_newcomer(
    start: Start, undisturbed: Digests
) -> None:
    run = start("pp", "60", "--fault", "skew@2@33", env=ENV)
    run.finish()
    (recovery,) = run.records("recovery")
    assert recovery.resumed_step == 34 and recovery.sources[3].startswith("its state of step 33, steps"), recovery
    assert run.digests == undisturbed("pp", "60"), run.told("the same weights")


def test_two_lost_ranks_do_their_steps_again_together(start: Start, undisturbed: Digests) -> None:
    run = start("pp", "60", "--fault", "die@2@33,die@3@33", env=ENV)
    run.finish()
    recoveries = run.records("recovery")
    assert all(one.resumed_step == 33 for one in recoveries), recoveries
    assert run.digests == undisturbed("pp", "60"), run.told("the same weights")


def test_a_rank_that_is_lost_while_it_does_its_steps_again(start: Start, undisturbed: Digests) -> None:
    run = start("pp", "60", "--fault", "die@2@33,again@2@27", env=ENV)
    run.finish()
    assert [one.resumed_step for one in run.records("recovery")][-1] == 33, run.records("recovery")
    assert run.digests == undisturbed("pp", "60"), run.told("the same weights")


def test_a_neighbour_that_is_lost_meanwhile(start: Start, undisturbed: Digests) -> None:
    """It is told what the newcomer has said so far, too: that one has kept what it said again."""
    run = start("pp", "60", "--sleep", "0.05", "--fault", "die@2@33", env=ENV)
    run.until(lambda: len(run.pids.get(2, [])) > 1 and run.steps[2] in range(21, 32), "rank 2 doing its steps again")
    run.send(3, signal.SIGKILL)
    run.finish()
    assert [one.resumed_step for one in run.records("recovery")][-1] == 33, run.records("recovery")
    assert run.digests == undisturbed("pp", "60"), run.told("the same weights")


def test_where_the_steps_are_not_the_same_the_second_time_all_go_back(start: Start, undisturbed: Digests) -> None:
    run = start("pp", "60", "--fault", "die@2@33,stray@2@27", env=ENV)
    run.finish()
    assert [one.resumed_step for one in run.records("recovery")][-1] == 20, run.records("recovery")
    assert run.digests == undisturbed("pp", "60"), run.told("the same weights")


def test_without_memory_for_it_all_go_back(start: Start, undisturbed: Digests) -> None:
    run = start("pp", "60", "--fault", "die@2@33", env={**ENV, "RERAIL_REPLAY_LOG": "0"})
    run.finish()
    (report,) = run.reports()
    assert (report["fidelity"], report["resumed_step"], report["lost_steps"]) == ("exact", 20, 13), report
    assert run.digests == undisturbed("pp", "60"), run.told("the same weights")
