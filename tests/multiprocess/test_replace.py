"""A rank dies, freezes or raises under living survivors; the job ends with the weights it would have had anyway."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest
from harness import Run, Start

Digests = Callable[..., dict[int, str]]


def kept_their_processes(run: Run, *replaced: int) -> bool:
    return all(len(pids) == (2 if rank in replaced else 1) for rank, pids in run.pids.items())


@pytest.mark.parametrize("style", ["ddp", "zero", "fsdp", "hsdp", "tp", "pp"])
def test_a_killed_rank_is_replaced_and_the_weights_are_the_same(start: Start, undisturbed: Digests, style: str) -> None:
    run = start(style, "60", "--sleep", "0.01")
    run.reach(15)
    run.send(2, signal.SIGKILL)
    run.finish()
    assert kept_their_processes(run, 2), run.told(f"one new process, for rank 2, not {run.pids}")
    assert run.digests == undisturbed(style, "60"), run.told("the same weights")
    (report,) = run.reports()
    assert (report["rung"], report["ranks"], report["attempts"], report["ok"]) == ("replace_rank", [2], 1, True)
    assert report["code"] == "process.killed"


def test_a_module_that_is_tracked_without_its_wrapper_is_known_to_be_replicated(
    start: Start, undisturbed: Digests
) -> None:
    run = start("ddp", "60", "--sleep", "0.01", "--inner")
    run.reach(15)
    run.send(2, signal.SIGKILL)
    run.finish()
    assert run.digests == undisturbed("ddp", "60"), run.told("the same weights")
    (recovery,) = run.records("recovery")
    assert recovery.sources[2].startswith("replica") and recovery.attempts == 1, recovery


def test_a_rank_dies_in_the_middle_of_a_large_message(start: Start, undisturbed: Digests) -> None:
    """gloo forgets whoever waits for a message that is half sent."""
    run = start("ddp", "30", "--fault", "midway@2@15")
    run.finish()
    assert kept_their_processes(run, 2), run.told(f"one new process, for rank 2, not {run.pids}")
    assert run.digests == undisturbed("ddp", "30"), run.told("the same weights")


def test_rank_0_which_serves_the_store_is_replaced_like_any_other(start: Start, undisturbed: Digests) -> None:
    run = start("ddp", "70", "--sleep", "0.01")
    for step in (15, 40):
        run.reach(step)
        run.send(0, signal.SIGKILL)
        run.until(lambda step=step: len(run.pids[0]) > (1 if step == 15 else 2), "a new rank 0")
    run.finish()
    assert len(run.pids[0]) == 3 and all(len(run.pids[rank]) == 1 for rank in (1, 2, 3)), run.pids
    assert run.digests == undisturbed("ddp", "70"), run.told("the same weights")


def test_a_frozen_rank_is_named_and_replaced(start: Start, undisturbed: Digests) -> None:
    run = start("ddp", "60", "--sleep", "0.01")
    run.reach(15)
    run.send(1, signal.SIGSTOP)
    run.finish()
    assert kept_their_processes(run, 1), run.pids
    assert run.digests == undisturbed("ddp", "60"), run.told("the same weights")
    (report,) = run.reports()
    assert report["ranks"] == [1] and report["code"] == "process.stopped", report


def test_a_step_that_raises_once_is_retried_in_place(start: Start, undisturbed: Digests) -> None:
    run = start("ddp", "40", "--fault", "raise@3@20")
    run.finish()
    assert kept_their_processes(run), run.pids
    assert run.digests == undisturbed("ddp", "40"), run.told("the same weights")
    (report,) = run.reports()
    assert (report["rung"], report["ranks"]) == ("retry_step", [3]), report
    assert not any("Traceback" in line for line in run.output), run.told("no traceback for a repaired error")


def test_a_rank_that_raises_behind_its_collectives_takes_the_others_step(start: Start, undisturbed: Digests) -> None:
    """The others complete the step; the raiser runs it out alone and goes on behind it, in its own process."""
    run = start("ddp", "40", "--fault", "late@3@20")
    run.finish()
    assert kept_their_processes(run), run.pids
    assert run.digests == undisturbed("ddp", "40"), run.told("the same weights")


def test_under_fsdp_a_rank_that_raises_is_replaced(start: Start, undisturbed: Digests) -> None:
    run = start("fsdp", "40", "--fault", "raise@3@20")
    run.finish()
    assert kept_their_processes(run, 3), run.pids
    assert run.digests == undisturbed("fsdp", "40"), run.told("the same weights")


def test_a_step_that_always_raises_ends_the_job_with_93_and_one_traceback(start: Start) -> None:
    run = start("ddp", "40", "--fault", "always@1@20")
    run.finish(93)
    shown = [line for line in run.output if "ValueError: this batch is bad" in line]
    assert sum(line.startswith("ValueError") for line in shown) == 1, run.told("the root cause once")


def test_ranks_one_step_apart_are_brought_together(start: Start, undisturbed: Digests) -> None:
    """Rank 2 dies behind its last collective; 0 and 1 have updated, 3 has not: it advances with a replica's state."""
    run = start("ddp", "40", "--fault", "skew@2@20")
    run.finish()
    assert kept_their_processes(run, 2), run.pids
    assert run.digests == undisturbed("ddp", "40"), run.told("the same weights")
    (report,) = run.reports()
    assert report["resumed_step"] == 21, report


def test_two_ranks_die_at_once(start: Start, undisturbed: Digests) -> None:
    run = start("ddp", "60", "--sleep", "0.01")
    run.reach(15)
    run.send(0, signal.SIGKILL)
    run.send(3, signal.SIGKILL)
    run.finish()
    assert kept_their_processes(run, 0, 3), run.pids
    assert run.digests == undisturbed("ddp", "60"), run.told("the same weights")


def test_a_second_fault_during_the_recovery(start: Start, undisturbed: Digests) -> None:
    run = start("ddp", "60", "--sleep", "0.01")
    run.reach(15)
    run.send(2, signal.SIGKILL)
    run.until(lambda: run.status()["generation"] > 0, "the recovery to begin")
    run.send(1, signal.SIGKILL)
    run.finish()
    assert kept_their_processes(run, 1, 2), run.pids
    assert run.digests == undisturbed("ddp", "60"), run.told("the same weights")


def test_all_ranks_die_and_come_back_from_their_snapshots(start: Start, undisturbed: Digests) -> None:
    run = start("fsdp", "60", "--sleep", "0.02")
    run.reach(15)
    for rank in range(4):
        run.send(rank, signal.SIGKILL)
    run.finish()
    assert all(len(pids) == 2 for pids in run.pids.values()), run.pids
    assert min(run.steps.values()) == 60
    assert run.digests == undisturbed("fsdp", "60"), run.told("the same weights")


def test_a_fault_inside_a_guard(start: Start, undisturbed: Digests) -> None:
    run = start("ddp", "40", "--guard-every", "1", "--sleep", "0.01")
    run.reach(15)
    run.send(2, signal.SIGKILL)
    run.finish()
    assert run.digests == undisturbed("ddp", "40"), run.told("the same weights")


def test_the_controller_dies_and_the_ranks_train_on(start: Start, undisturbed: Digests) -> None:
    run = start("ddp", "80", "--sleep", "0.02")
    run.reach(15)
    run.kill_controller()
    run.until(lambda: any("controller" in line for line in run.output), "word of a new controller")
    run.reach(40)
    run.send(2, signal.SIGKILL)
    run.finish()
    assert kept_their_processes(run, 2), run.pids
    assert run.digests == undisturbed("ddp", "80"), run.told("the same weights")
