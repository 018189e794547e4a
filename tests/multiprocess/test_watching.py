"""A real job is watched: the replica with a flipped bit, the slow rank and what the kernel says of a dead one are named."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import pytest
from harness import Run, Start

from rerail.flow import Event

pytestmark = pytest.mark.timeout(300)
KMSG = Path("/dev/kmsg")


def events(run: Run, code: str) -> list[Event]:
    return [event for event in run.records("event") if event.code == code]


def awaited(run: Run, code: str, seconds: float = 60.0) -> Event:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        found = events(run, code)
        if found:
            return found[0]
        time.sleep(0.2)
    raise AssertionError(run.told(f"{code} to be seen within {seconds:.0f} s"))


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_flipped_bit_is_found_its_rank_named_and_the_run_ends_as_if_nothing_had_been(
    start: Start, ranks: int
) -> None:
    """With three replicas two outvote the third; of two the wrong one shows when both compute the same again."""
    env = {"RERAIL_ALLOW_INJECT": "1", "RERAIL_VOTE_EVERY": "10"}
    run = start("ddp", "70", "--sleep", "0.15", ranks=ranks, env=env)
    run.reach(14)
    assert events(run, "training.replica_differs") == [], "healthy replicas agree"
    told = run.inject("bitflip", "--rank", "1", "--seed", "3")
    (flipped,) = re.findall(r"step (\d+)", str(told["message"]))
    run.finish()
    seen = events(run, "training.replicas_tie" if ranks == 2 else "training.replica_differs")
    assert seen[0].step - int(flipped) <= 10, (told, seen)
    named = events(run, "training.replica_differs")
    assert {one.rank for one in named} == {1} and all(one.node for one in named), run.told(
        "rank 1 and its node to be named"
    )
    for words in ("/1 is out of use for 48 h without a fault", "rank 1 stays in place, though"):
        assert any(words in line for line in run.output), run.told(words)
    (report,) = run.reports()
    assert (report["rung"], report["ok"]) == ("retry_step", True) and report["lost_steps"] > 0, report
    assert report["resumed_step"] <= int(flipped), "from before it happened"
    assert [len(pids) for pids in run.pids.values()] == [1] * ranks, "no process was lost"
    again = start("ddp", "70", ranks=ranks)
    again.finish()
    assert run.digests == again.digests, run.told("the weights of an undisturbed run")


@pytest.mark.parametrize("fault", ["", "again@1@6"])
def test_what_was_disputed_is_voted_on_again_when_snapshots_come_at_other_steps(start: Start, fault: str) -> None:
    """Replicas differ at step 8, a multiple of the first interval only. A newcomer that comes in between votes there, too."""
    env = {"RERAIL_VOTE_EVERY": "1000", "RERAIL_SNAPSHOT_EVERY": "4"}
    run = start("ddp", "20", "--flip-at", "6", "--replan", "1000", "--fault", fault, ranks=2, env=env)
    run.finish()
    (tie,) = events(run, "training.replicas_tie")
    named = events(run, "training.replica_differs") + events(run, "training.replicas_recomputed")
    assert tie.step == 8 and [one.step for one in named] == [8], run.told("a second vote on step 8")
    assert fault or named[0].rank == 1, run.told("rank 1 to be named")
    assert len(run.reports()) == (2 if fault else 1), run.reports()
    again = start("ddp", "20", ranks=2)
    again.finish()
    assert run.digests == again.digests, run.told("the weights of an undisturbed run")


def test_bits_that_flip_again_and_again_on_both_ranks_leave_no_trace(start: Start) -> None:
    """Also while the same steps are computed again."""
    env = {"RERAIL_ALLOW_INJECT": "1", "RERAIL_VOTE_EVERY": "10"}
    run = start("ddp", "90", "--sleep", "0.12", ranks=2, env=env)
    for seed, step in ((0, 12), (1, 12), (2, 50)):
        run.reach(step)
        run.inject("bitflip", "--rank", str(seed % 2), "--seed", str(seed))
    run.finish()
    assert 2 <= len(run.reports()) <= 3 and all(report["ok"] for report in run.reports()), run.reports()
    again = start("ddp", "90", ranks=2)
    again.finish()
    assert run.digests == again.digests, run.told("the weights of an undisturbed run")


def test_a_flip_in_the_very_last_step_is_found_before_the_job_ends(start: Start) -> None:
    run = start("ddp", "30", "--flip-at", "29", ranks=2)
    run.finish()
    assert {one.rank for one in events(run, "training.replica_differs")} == {1}, run.told("rank 1 to be named")
    again = start("ddp", "30", ranks=2)
    again.finish()
    assert run.digests == again.digests, run.told("the weights of an undisturbed run")


def test_replicas_that_always_differ_are_told_of_once_and_train_on(start: Start) -> None:
    run = start("ddp", "60", "--sleep", "0.02", "--drift-from", "20", ranks=2, env={"RERAIL_VOTE_EVERY": "10"})
    run.finish()
    assert len(run.reports()) == 1, "going back is tried once"
    told = {event.code for event in run.records("event") if event.code.startswith("training.replica")}
    assert told == {"training.replicas_tie", "training.replicas_differ_again"}, told
    assert run.digests[0] != run.digests[1]


def test_a_slow_rank_is_named(start: Start) -> None:
    run = start("ddp", "100000", "--sleep", "0.1", ranks=4, env={"RERAIL_ALLOW_INJECT": "1"})
    run.reach(30)
    run.inject("slow", "--rank", "2", "--factor", "1.8", "--for", "200")
    assert awaited(run, "training.straggler_compute", 120.0).rank == 2


APART = """
import os
from pathlib import Path
import torch, torch.distributed as dist, rerail
job = rerail.join()
groups = [dist.new_group([0, 1]) for _ in range(2)]
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
job.track(model=model, optimizer=optimizer)
mark = Path(os.environ["TEST_DIR"], f"mark{job.rank}")
for _ in job.steps(range(20), until=20):
    with job.step():
        if job.version == 10 and not mark.exists():
            mark.touch()
            dist.all_reduce(torch.ones(3 + job.rank), group=groups[job.rank])
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
"""
"""Once, each rank calls a group in which the other never comes."""


def test_when_all_ranks_wait_the_flight_recorder_tells_who_has_not_come_where(start: Start, tmp_path: Path) -> None:
    script = tmp_path / "apart.py"
    script.write_text(APART)
    run = start(ranks=2, script=script)
    run.finish()
    (stalled,) = events(run, "collective.stalled")
    assert [line for line in stalled.evidence.splitlines() if line.startswith("flight recorder: ")] == [
        "flight recorder: rank 1 has not begun all_reduce #1 of group 1 (3), which rank 0 waits in",
        "flight recorder: rank 0 has not begun all_reduce #1 of group 2 (4), which rank 1 waits in",
    ], stalled


@pytest.mark.skipif(not os.access(KMSG, os.W_OK), reason="/dev/kmsg cannot be written: not root, or a container")
@pytest.mark.parametrize(("own", "cause"), [(True, "memory.oom_global"), (False, "process.killed")])
def test_what_the_kernel_says_of_a_killed_rank_is_its_root_cause(start: Start, own: bool, cause: str) -> None:
    run = start("ddp", "100000", "--sleep", "0.02", ranks=2, env={"RERAIL_ALLOW_INJECT": "1"})
    run.reach(6)
    said = "NVRM: Xid (PCI:0000:3b:00): 31, pid=1, name=x, Ch 00000008, intr 00000000"
    until = time.monotonic() + 60.0
    while not events(run, "gpu.xid.31") and time.monotonic() < until:
        run.inject("kernel-log", "--line", said)  # until the monitor is there and hears it
        time.sleep(1.0)
    victim = run.pids[1][0] if own else os.getpid()
    line = f"Out of memory: Killed process {victim} (python) total-vm:53312244kB, anon-rss:31451456kB, file-rss:74816kB"
    run.inject("kernel-log", "--line", line)
    awaited(run, "memory.oom_global")
    run.inject("kill", "--rank", "1")
    until = time.monotonic() + 60.0
    while not run.reports() and time.monotonic() < until:
        time.sleep(0.2)
    (report,) = run.reports()
    assert report["code"] == cause and report["ranks"] == [1] and report["ok"], report
    assert any(line.startswith("rerail:   ") for line in run.output), run.told("advice below a fault of the machine")
    for command in (("incidents",), ("report", "1")):
        told = run.command(*command, timeout=120).stdout
        assert "also seen" in told and "gpu.xid.31" in told and (own or "memory.oom_global" in told), told
