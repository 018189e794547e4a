"""Turns one fault scenario into what an observer outside of the job measured.

Called by `recovery.py`. Every job is started as a user would start it; faults are signals to process ids.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import psutil

from rerail.cli.watch import RerailJob, Step, WatchedJob

HERE = Path(__file__).resolve().parent
WORLD = 4
ENDLESS = 1_000_000
PACE_S = 0.2
STEADY = 10
"""Steps before a fault in the timed scenarios; torchrun's script has written its first checkpoint by then."""
SMALL = ["--layers", "2", "--width", "64", "--vocabulary", "256"]
"""A model whose step takes milliseconds, for scenarios that count recoveries instead of timing them."""


USUAL = ["--layers", "2", "--width", "128", "--vocabulary", "512"]
"""Half a million parameters: a step takes tens of milliseconds here, as one does on the accelerator it is made for."""
LARGE = ["--layers", "8", "--width", "256", "--vocabulary", "8192"]
"""10.5 million parameters, as in the study of the peers: here a step takes most of a second, and one is replayed."""


class Recovery(NamedTuple):
    """A cold start and one recovery in the same run."""

    cold_s: float
    recovery_s: float
    attempts: int
    """Generations (rerail) or restarts of all ranks (torchrun) that this one fault took."""
    survivors_kept: bool

    @property
    def ratio(self) -> float:
        return self.recovery_s / self.cold_s


def rerail_kill(folder: Path, victim: int, shape: list[str]) -> Recovery:
    """SIGKILL of one rank under rerail, with a warm standby: until the newcomer's first completed step."""
    arguments = ["--folder", str(folder), "--steps", str(ENDLESS), *shape]
    with RerailJob(HERE / "workload.py", arguments, folder, world=WORLD) as job:
        cold = job.wait_first_step()
        job.wait_step(STEADY)
        job.wait_standbys(1)
        before = settled_pids(job)
        killed = kill(job, victim)
        back = job.wait_for("the newcomer's first step", by_other_pid(victim, before[victim], killed))
        job.wait_steps_after(back.at)
        kept = all(job.pid(rank) == pid for rank, pid in before.items() if rank != victim)
        attempts = max((report.attempts for report in job.reports()), default=0)
        return Recovery(cold, back.at - killed, attempts, kept)


def torchrun_kill(folder: Path, victim: int, shape: list[str], *, share_store: bool) -> Recovery:
    """The same under torchrun: until the first completed step of any new process."""
    env = {} if share_store else {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(WORLD)]
    launcher += ["--log-dir", str(folder / "torchrun")]  # else it leaves a folder in /tmp
    script = [str(HERE / "workload_torchrun.py"), "--folder", str(folder), "--steps", str(ENDLESS), *shape]
    with WatchedJob([*launcher, "--max-restarts", "5", *script], folder, WORLD, env | {"OMP_NUM_THREADS": "1"}) as job:
        cold = job.wait_first_step()
        job.wait_for("the first checkpoint", lambda _: (folder / "checkpoint.pt").exists())
        before = settled_pids(job)
        old = set(before.values())
        killed = kill(job, victim)

        def new_incarnation(fresh: list[Step]) -> Step | None:
            return next((step for step in fresh if step.pid not in old and step.at > killed), None)

        back: Step = job.wait_for("a step of a new incarnation", new_incarnation, limit_s=60.0)
        attempts = int((folder / "restarts").read_text())
        return Recovery(cold, back.at - killed, attempts, False)


def many_kills(folder: Path, count: int, seed: int) -> tuple[list[int], int, list[float]]:
    """`count` kills of random ranks in one job: attempts of each, kills whose survivors kept their pids, seconds."""
    choose = random.Random(seed)
    arguments = ["--folder", str(folder), "--steps", str(ENDLESS), *SMALL]
    kept, seconds = 0, []
    with RerailJob(HERE / "workload.py", arguments, folder, world=WORLD) as job:
        job.wait_first_step()
        for _ in range(count):
            job.wait_standbys(1)
            before = settled_pids(job)
            victim = choose.randrange(WORLD)
            killed = kill(job, victim)
            back = job.wait_for("the newcomer's first step", by_other_pid(victim, before[victim], killed))
            seconds.append(back.at - killed)
            job.wait_steps_after(back.at)
            kept += all(job.pid(rank) == pid for rank, pid in before.items() if rank != victim)
        job.wait_for("the last report", lambda _: len(job.reports()) >= count, limit_s=10.0)
        return [report.attempts for report in job.reports()], kept, seconds


def freeze(folder: Path, victim: int) -> tuple[float, float, bool]:
    """SIGSTOP of one rank: seconds until rerail acts (the stopped process is gone), median step, culprit named."""
    arguments = ["--folder", str(folder), "--steps", str(ENDLESS), *USUAL]
    with RerailJob(HERE / "workload.py", arguments, folder, world=WORLD) as job:
        job.wait_first_step()
        job.wait_standbys(1)
        for _ in range(5):
            settled_pids(job)
        own = [step.at for step in job.steps if step.rank == victim]
        usual = statistics.median(later - earlier for earlier, later in itertools.pairwise(own))
        process = psutil.Process(job.pid(victim))
        stopped = time.monotonic()
        process.suspend()
        gone = job.wait_for("the frozen rank to be ended", lambda _: ended(process) and time.monotonic(), limit_s=60.0)
        job.wait_steps_after(gone)
        job.wait_for("its report", lambda _: job.reports(), limit_s=10.0)
        report = job.reports()[0]
        return gone - stopped, usual, report.ranks == (victim,)


def disturbed_weights(folder: Path, parallel: str, steps: int, kills: int, seed: int) -> str:
    """sha256 of the final weights of a run of `steps` with `kills` random kills; stretched so that all kills fall into it."""
    choose = random.Random(seed)
    shape = ["--steps", str(steps), "--pace", str(PACE_S if kills else 0.0), "--parallel", parallel, *SMALL]
    arguments, standbys = ["--folder", str(folder), *shape], 2 if kills else 0
    with RerailJob(HERE / "workload.py", arguments, folder, world=WORLD, standbys=standbys) as job:
        job.wait_first_step()
        for _ in range(kills):
            job.wait_standbys(1)
            before = settled_pids(job)
            victim = choose.randrange(WORLD)
            killed = kill(job, victim)
            job.wait_for("the newcomer's first step", by_other_pid(victim, before[victim], killed))
        code = job.wait_exit(limit_s=600.0)
        return (folder / "sha256").read_text() if code == 0 else f"exit code {code}"


def second_fault(folder: Path, count: int, seed: int) -> int:
    """Two kills of different ranks, the second while the first is being repaired: how many of `count` pairs came back."""
    choose = random.Random(seed)
    recovered = 0
    arguments = ["--folder", str(folder), "--steps", str(ENDLESS), *SMALL]
    with RerailJob(HERE / "workload.py", arguments, folder, world=WORLD, standbys=2) as job:
        job.wait_first_step()
        for _ in range(count):
            job.wait_standbys(2)
            before = settled_pids(job)
            first, second = choose.sample(range(WORLD), 2)
            kill(job, first)
            time.sleep(choose.uniform(0.0, 0.3))  # the scenario itself: some moment within the first repair
            killed = kill(job, second)
            job.wait_for("the second newcomer's first step", by_other_pid(second, before[second], killed))
            job.wait_steps_after(killed)
            recovered += 1
    return recovered


def overhead(folder: Path, blocks: int) -> list[list[float]]:
    """Seconds a step takes with rerail, without it, and without it once more, in each round of blocks."""
    folder.mkdir(parents=True, exist_ok=True)
    out = folder / "overhead.json"
    arguments = ["--out", str(out), "--blocks", str(blocks)]
    with RerailJob(HERE / "overhead.py", arguments, folder, world=2, standbys=0) as job:
        job.wait_exit(limit_s=600.0)
    return list(json.loads(out.read_text()))


def kill(job: WatchedJob, rank: int) -> float:
    """SIGKILL to the rank's process; the moment it was sent."""
    moment = time.monotonic()
    os.kill(job.pid(rank), signal.SIGKILL)
    return moment


def settled_pids(job: WatchedJob) -> dict[int, int]:
    """The process of every rank, once each has completed a step from now on."""
    job.wait_steps_after(time.monotonic())
    return {rank: job.pid(rank) for rank in range(job.world)}


def by_other_pid(rank: int, old: int, since: float) -> Callable[[list[Step]], Step | None]:
    """A condition: the first step of `rank` by another process than `old`."""

    def found(fresh: list[Step]) -> Step | None:
        return next((step for step in fresh if step.rank == rank and step.pid != old and step.at > since), None)

    return found


def ended(process: psutil.Process) -> bool:
    """Gone, or a zombie that its parent has not yet collected."""
    try:
        return bool(process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD))
    except psutil.NoSuchProcess:
        return True
