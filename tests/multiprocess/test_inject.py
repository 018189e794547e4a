"""`rerail inject` on real jobs: what it says it did is what happens, it is in the journal, and the job deals with it."""

from __future__ import annotations

import json
import math
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import Run, Start

from rerail.flow import Signal

pytestmark = pytest.mark.timeout(400)
ALLOWED = {"RERAIL_ALLOW_INJECT": "1", "RERAIL_VOTE_EVERY": "0"}
Begin = Callable[..., Run]


@pytest.fixture
def begin(start: Start) -> Begin:
    """A job of two ranks that allows it, past its first steps."""

    def job(steps: int, *, sleep: float = 0.05, **env: str) -> Run:
        run = start("ddp", str(steps), "--sleep", str(sleep), ranks=2, env={**ALLOWED, **env})
        run.reach(6)
        return run

    return job


def recorded(run: Run) -> list[Signal]:
    """Signals of injected faults in the journal."""
    return [one for one in run.records("signal") if one.source.startswith("inject")]


def test_a_rank_is_killed_repaired_and_the_journal_tells_that_it_was_on_purpose(begin: Begin) -> None:
    run = begin(60)
    told = run.command("inject", "kill", "--rank", "1", "--seed", "4", timeout=120)
    assert told.returncode == 0 and "kill on rank 1 at step" in told.stdout, told
    assert f"sent SIGKILL to rank 1 (pid {run.pids[1][0]})" in told.stdout
    run.finish()
    assert (len(run.pids[0]), len(run.pids[1])) == (1, 2), run.pids
    assert run.digests[0] == run.digests[1]
    (report,) = run.reports()
    assert (report["code"], report["rung"], report["ranks"]) == ("process.killed", "replace_rank", [1])
    (record,) = recorded(run)
    assert (record.source, record.rank, record.payload["kind"], record.payload["seed"]) == ("inject", 1, "kill", 4)
    assert record.at <= report["at"] and record.payload["order"] in told.stdout


def test_an_exception_is_raised_in_a_step_and_the_step_repaired_in_place(begin: Begin) -> None:
    run = begin(60)
    answer = run.inject("exception", "--rank", "0", "--line", "the object store went away")
    run.finish()
    assert [len(pids) for pids in run.pids.values()] == [1, 1], run.pids
    assert run.digests[0] == run.digests[1]
    (report,) = run.reports()
    assert (report["rung"], report["ranks"]) == ("retry_step", [0]), report
    assert "RuntimeError('the object store went away')" in answer["message"]
    assert [one.payload["order"] for one in recorded(run)] == [answer["id"]]


def test_a_gradient_becomes_nan_and_the_loss_follows(begin: Begin) -> None:
    run = begin(50)
    answer = run.inject("nan", "--rank", "1", "--seed", "2")
    run.finish()
    assert not run.reports()
    bad = [step for rank, step in run.losses if rank == 1 and math.isnan(run.losses[rank, step])]
    good = [step for rank, step in run.losses if rank == 1 and not math.isnan(run.losses[rank, step])]
    named = int(answer["message"].split("in step ")[1])
    assert good and bad and max(good) == named, (answer, bad)
    assert "the gradient of model.module." in answer["message"]


def test_a_flipped_bit_stays_on_its_rank_and_the_same_seed_flips_the_same(begin: Begin) -> None:
    run = begin(400)
    first, second = run.inject("bitflip", "--seed", "5"), run.inject("bitflip", "--seed", "5")
    other = run.inject("bitflip", "--seed", "6")
    run.finish()
    assert not run.reports()
    assert first["rank"] == second["rank"], "the seed picks the rank"

    def chosen(answer: dict[str, Any]) -> str:
        return str(answer["message"]).split(" flipped")[0]

    assert chosen(first) == chosen(second) != chosen(other)
    assert first["id"] != second["id"] and len(recorded(run)) == 3
    assert run.digests[0] != run.digests[1], "nothing but the flipped bits makes replicas differ"


def test_a_slow_rank_slows_the_job_by_its_factor_and_for_its_time(begin: Begin) -> None:
    run = begin(100_000, sleep=0.05)

    def seconds(steps: int) -> float:
        first, began = min(run.steps.values()), time.monotonic()
        run.reach(first + steps)
        return time.monotonic() - began

    seconds(20)
    usual = seconds(20)
    answer = run.inject("slow", "--rank", "1", "--factor", "5", "--for", "8")
    slowed = seconds(20)
    assert slowed > 2.5 * usual, (usual, slowed, answer)
    run.until(lambda: len(recorded(run)) > 1, "word that it is over")
    assert [one.source for one in recorded(run)] == ["inject", "inject.over"]
    assert seconds(20) < slowed / 2
    assert not run.reports(), "slow is no fault"


def test_the_report_of_a_hang_shows_what_torchs_flight_recorder_says(begin: Begin) -> None:
    """Before and after a repair: the new wires number their collectives from one again."""
    run = begin(800, sleep=0.02)
    for incident in (1, 2):
        run.inject("hang", "--rank", "1")
        run.until(lambda seen=incident: len(run.pids[1]) > seen, "a new rank 1")
        run.reach(max(run.steps.values()) + 3)
    run.finish()
    told = [one.evidence[1] for one in run.records("diagnosis") if one.code == "process.hung"]
    assert len(told) == 2, run.reports()
    for line in told:
        assert re.fullmatch(
            r"flight recorder: rank 1 has not begun \w+ #\d+ of group default \(.*\), which rank 0 waits in", line
        ), told


def test_a_rank_that_sleeps_for_a_while_or_ends_by_itself(begin: Begin) -> None:
    run = begin(400, sleep=0.02)
    run.inject("hang", "--rank", "0", "--for", "1")
    run.until(lambda: len(recorded(run)) > 1, "word that it is over")
    run.inject("exit", "--rank", "1")
    run.until(run.reports, "the end of the incident")
    (report,) = run.reports()
    assert (report["code"], report["ranks"], report["rung"]) == ("process.exited", [1], "replace_rank"), report
    assert [one.payload["kind"] for one in recorded(run)] == ["hang", "hang", "exit"]


def test_a_rank_whose_connections_are_cut_is_connected_again(begin: Begin) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root")
    run = begin(80)
    assert "TCP connections" in run.inject("network-cut", "--rank", "1")["message"]
    run.finish()
    assert [len(pids) for pids in run.pids.values()] == [1, 1], run.pids
    assert run.digests[0] == run.digests[1]
    assert run.reports() and recorded(run)


@pytest.fixture
def small_memory() -> Iterator[Path]:
    """A cgroup that may use 200 MiB beyond what its processes had before."""
    folder = Path("/sys/fs/cgroup/memory", f"rerail-test-{os.getpid()}")
    try:
        folder.mkdir()
        (folder / "memory.limit_in_bytes").write_text(str(200 << 20))
    except OSError:
        pytest.skip("no memory cgroup of v1 can be made here")
    yield folder
    deadline = time.monotonic() + 20
    while folder.exists() and time.monotonic() < deadline:
        try:
            folder.rmdir()
        except OSError:
            time.sleep(0.1)


def test_a_rank_runs_out_of_memory_only_below_a_small_limit(begin: Begin, small_memory: Path) -> None:
    run = begin(100_000, sleep=0.02)
    refused = run.command("inject", "oom", "--rank", "1", timeout=120)
    assert refused.returncode == 1 and "memory limit below --max-size (1024 MiB)" in refused.stderr, refused
    (small_memory / "cgroup.procs").write_text(str(run.pids[1][0]))
    run.inject("oom", "--rank", "1", "--max-size", "0.5GiB")
    run.until(run.reports, "the end of the incident")
    (report,) = run.reports()
    assert (report["rung"], report["ranks"]) == ("replace_rank", [1]), report
    assert report["code"] in ("process.killed", "memory.oom_cgroup"), "the kernel log may tell of it in time"


def test_without_permission_nothing_is_done(start: Start) -> None:
    run = start("ddp", "40", "--sleep", "0.05", ranks=2, env={"RERAIL_INJECT": "1", "RERAIL_ALLOW_INJECT": "0"})
    run.reach(6)
    told = run.command("inject", "kill", "--rank", "1", timeout=120)
    assert told.returncode == 1 and not told.stdout
    assert "refused" in told.stderr and "rerail run --allow-inject" in told.stderr, told
    assert "--allow-inject" in json.loads(run.command("inject", "nan", "--json", timeout=120).stdout)["refused"]
    run.finish()
    assert not run.reports() and not recorded(run)


def test_machine_faults_go_through_the_job_too(begin: Begin, tmp_path: Path) -> None:
    stub = tmp_path / "stub"
    run = begin(100_000, sleep=0.02, RERAIL_STUB_NVML=str(stub))
    assert "GPU 1 is lost" in run.inject("device-lost", "--rank", "1", "--for", "1")["message"]
    run.until(lambda: len(recorded(run)) == 2, "word that the GPU is back")
    assert stub.read_text() == ""
    for words, says in (
        (["disk-full", "--dir", "/"], "--max-size"),
        (["slow-disk", "--dir", "/proc"], "not on a disk"),
        (["corrupt-checkpoint", "--dir", str(tmp_path)], "no step is committed"),
        (["kill", "--rank", "2"], "this job has ranks 0 to 1"),
    ):
        told = run.command("inject", *words, timeout=120)
        assert told.returncode == 1 and says in told.stderr, told
    sources = [one.source for one in recorded(run)]
    assert sources == ["inject", "inject.over", *["inject.refused"] * 3], "an order that is given is written down"
