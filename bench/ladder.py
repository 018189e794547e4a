"""Figures of single rungs: what a hot switch interrupts, and how recovery grows with the number of ranks.

    hot     a rank is switched to a spare device and back again, because its own is put into quarantine: steps lost, and the
            longest pause between two steps of any rank, in usual steps
    scale   one of 2, 4, ... ranks is killed: seconds until all have stepped again

Run alone: `python bench/ladder.py [--only hot|scale] [--repeats N] [--most RANKS]`. On a machine with fewer cores than ranks the
second one measures the cores: every rank needs one to take its step.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rerail.cli.watch import RerailJob, WatchedJob
from rerail.flow import Report, Rung
from scenarios import ENDLESS, HERE, SMALL, by_other_pid, kill, settled_pids

NODE = "bench"
PACE_S = 0.1


class SparedJob(RerailJob):
    """Two ranks and a spare device."""

    def __init__(self, folder: Path) -> None:
        arguments = ["--folder", str(folder), "--steps", str(ENDLESS), "--pace", str(PACE_S), *SMALL]
        command = [sys.executable, "-m", "rerail.cli.main", "run", "--nproc-per-node", "2", "--spare-devices", "1"]
        self.run_dir = folder / "run"
        command += ["--run-dir", str(self.run_dir)]
        env = {"RERAIL_NODE": NODE, "OMP_NUM_THREADS": "1"}
        WatchedJob.__init__(self, [*command, str(HERE / "workload.py"), *arguments], folder, 2, env)

    def quarantine(self, *words: str) -> None:
        command = [sys.executable, "-m", "rerail.cli.main", "quarantine", *words, "--run-dir", str(self.run_dir)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=60)


def hot(repeats: int) -> None:
    """Between the two devices that rank 1 may have, forth and back."""
    pauses, lost, usual_s = [], 0, 0.0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with SparedJob(folder) as job:
            job.wait_first_step()
            for number in range(repeats):
                for _ in range(10):
                    settled_pids(job)
                usual_s = statistics.median(_gaps(job, time.monotonic() - 3.0))
                bad, good = (1, 2) if number % 2 == 0 else (2, 1)
                began = time.monotonic()
                job.quarantine("add", f"{NODE}/{bad}", "--reason", "benchmark")
                report = _report(job, number + 1)
                job.wait_steps_after(time.monotonic())
                assert report.rung is Rung.HOT_SWITCH and report.moves[1].device == good, report
                lost += report.lost_steps
                pauses.append(max(_gaps(job, began)) / usual_s - 1.0)
                job.quarantine("release", f"{NODE}/{bad}")
    best, median = min(pauses), statistics.median(pauses)
    print(f"hot switch: {repeats} switches, {lost} steps lost; usual step {usual_s * 1e3:.0f} ms")
    print(
        f"  longest pause, beyond the step itself: best {best:.2f}, median {median:.2f}, worst {max(pauses):.2f} usual steps"
    )


def _gaps(job: WatchedJob, since: float) -> list[float]:
    """Seconds between two steps of the same rank that came after `since`."""
    job.poll()
    found = []
    for rank in range(job.world):
        own = [step.at for step in job.steps if step.rank == rank]
        found += [later - earlier for earlier, later in itertools.pairwise(own) if later > since]
    return found


def _report(job: RerailJob, count: int) -> Report:
    job.wait_for(f"report {count}", lambda _: len(job.reports()) >= count, limit_s=120.0)
    return job.reports()[count - 1]


def scale(most: int, repeats: int) -> None:
    """Kill one rank of more and more; the model is tiny, so that the ranks and not the bytes count."""
    first = 0.0
    world = 2
    print(
        f"{'ranks':>6} {'step':>9} {'best':>8} {'median':>8} {'x of 2':>7}   seconds from SIGKILL to a step of every rank"
    )
    while world <= most:
        seconds, steps = _kills(world, repeats)
        median = statistics.median(seconds)
        first = first or median
        step = f"{steps * 1e3:.0f} ms"
        print(f"{world:>6} {step:>9} {min(seconds):>8.2f} {median:>8.2f} {median / first:>7.2f}", flush=True)
        world *= 2


def _kills(world: int, repeats: int) -> tuple[list[float], float]:
    seconds = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        arguments = ["--folder", str(folder), "--steps", str(ENDLESS), "--pace", str(PACE_S), *SMALL]
        with RerailJob(HERE / "workload.py", arguments, folder, world=world) as job:
            job.wait_first_step(600.0)
            for number in range(repeats):
                job.wait_standbys(1, 300.0)
                for _ in range(3):
                    before = settled_pids(job)
                victim = number % world
                killed = kill(job, victim)
                job.wait_for("the newcomer's first step", by_other_pid(victim, before[victim], killed), limit_s=300.0)
                job.wait_steps_after(killed, 300.0)
                seconds.append(time.monotonic() - killed)
            job.wait_steps_after(time.monotonic())
            return seconds, statistics.median(_gaps(job, time.monotonic() - 5.0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("hot", "scale"))
    parser.add_argument("--repeats", type=int, default=6)
    parser.add_argument("--most", type=int, default=32)
    args = parser.parse_args()
    if args.only in (None, "hot"):
        hot(args.repeats)
    if args.only in (None, "scale"):
        scale(args.most, args.repeats)


if __name__ == "__main__":
    main()
