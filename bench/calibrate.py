"""Does the simulator predict a real job? Turns a short job's figures into the goodput of a longer one, and holds it against the real one.

    python bench/calibrate.py [--minutes 10] [--faults 20] [--seed 1] [--keep FOLDER]

1. A short job: two of each kind of fault, one after the other. From its journal and its steps come the time of a step, what each rung
   took and how long each kind was not noticed.
2. A longer job of the same kind, with faults at random times that the seed chooses.
3. The simulator is told the figures of the first job and the times and kinds of the faults of the second, and nothing else of it.

Goodput is what counted: completed steps times the usual step of the undisturbed training, over the wall time from the first step.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

from rerail.cli.watch import RerailJob
from rerail.flow import Cost, Report, Rung
from rerail.planner.model import Tier
from rerail.sim.kinds import shape_of
from rerail.sim.policies import policy
from rerail.sim.run import Measured, predict

HERE = Path(__file__).resolve().parent
WORLD = 4
EVERY = 20
"""Steps between two snapshots, set so that it is the same in both jobs."""
KINDS = {"kill": signal.SIGKILL, "segv": signal.SIGSEGV, "stop": signal.SIGSTOP}
CALM_S = 6.0
"""Between two faults: a second one that comes before the first is repaired is another matter."""
SHAPE = ["--layers", "2", "--width", "64", "--vocabulary", "256", "--parallel", "fsdp", "--pace", "0.1"]


class Seen(NamedTuple):
    """What one job did."""

    wall_s: float
    steps: int
    step_s: float
    reports: list[Report]
    struck: list[tuple[float, int, str]]
    """Seconds since its first step, rank and kind of each fault."""

    @property
    def goodput(self) -> float:
        return self.steps * self.step_s / self.wall_s


def train(folder: Path, faults: list[tuple[float, int, str]], seconds: float) -> Seen:
    """One job, with these faults at these times, ended after so many seconds of training."""
    arguments = ["--folder", str(folder), "--steps", "1000000", *SHAPE]
    os.environ["RERAIL_SNAPSHOT_EVERY"] = str(EVERY)
    with RerailJob(HERE / "workload.py", arguments, folder, world=WORLD) as job:
        job.wait_first_step()
        job.wait_standbys(1)
        first = max(step.step for step in job.steps)
        began, struck = time.monotonic(), []
        for at, rank, kind in faults:
            while time.monotonic() < began + at:
                job.poll()
                time.sleep(0.05)
            pid = max((step for step in job.steps if step.rank == rank), key=lambda step: step.at).pid
            os.kill(pid, KINDS[kind])
            struck.append((time.monotonic() - began, rank, kind))
        while time.monotonic() < began + seconds:
            job.poll()
            time.sleep(0.05)
        wall = time.monotonic() - began
        job.poll()
        reached = max(step.step for step in job.steps if step.at <= began + wall)
        own = sorted(step.at for step in job.steps if step.rank == 0)
        usual = statistics.median(later - earlier for earlier, later in itertools.pairwise(own))
        return Seen(wall, reached - first, usual, job.reports(), struck)


def figures(short: Seen, wall_s: float, faults: list[tuple[float, int, str]]) -> Measured:
    """What the simulator is told."""
    costs: dict[Rung, list[Cost]] = defaultdict(list)
    unseen: dict[str, list[float]] = defaultdict(list)
    codes: dict[str, str] = {}
    for report, (_, _, kind) in zip(short.reports, short.struck, strict=True):
        costs[report.rung].append(report.cost)
        unseen[shape_of(report.code).seen].append(report.cost.detect)
        codes[kind] = report.code
    # loading is part of what each rung was measured to take
    memory = Tier(name="memory", stall_s=0.0, save_s=0.0, restore_s=0.0, survives="process")
    return Measured(
        wall_s=wall_s,
        step_s=short.step_s,
        gpus=WORLD,
        per_node=WORLD,
        tiers=(memory,),
        every={"memory": EVERY},
        costs={rung: mean_cost(told) for rung, told in costs.items()},
        detect_s={how: statistics.mean(told) for how, told in unseen.items()},
        faults=tuple((at, 0, rank, codes[kind]) for at, rank, kind in faults),
    )


def mean_cost(costs: list[Cost]) -> Cost:
    """The mean of each part."""
    return Cost(**{part: statistics.mean(getattr(cost, part) for cost in costs) for part in Cost.__struct_fields__})


def show(name: str, seen: Seen) -> None:
    print(
        f"{name}: {seen.wall_s:.0f} s, {seen.steps} steps of {seen.step_s:.3f} s, {len(seen.reports)} incidents, goodput {seen.goodput:.2%}"
    )
    by: dict[tuple[str, str], list[Cost]] = defaultdict(list)
    for report in seen.reports:
        by[report.code, report.rung.value].append(report.cost)
    for (code, rung), costs in sorted(by.items()):
        mean = mean_cost(costs)
        parts = ", ".join(f"{part} {getattr(mean, part):.2f}" for part in ("detect", "t0", "t1", "t2", "t3", "t4"))
        print(f"  {len(costs):>2} x {code}, {rung}: {parts} s")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--faults", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", type=Path, default=None, help="leave the journals of both jobs here")
    args = parser.parse_args()
    rng, seconds = random.Random(args.seed), args.minutes * 60
    short_faults = [(10.0 + 12.0 * n, n % WORLD, kind) for n, kind in enumerate([*KINDS, *KINDS])]
    room = (seconds - 20.0) / args.faults
    if room < CALM_S:
        parser.error(
            f"--faults {args.faults} in --minutes {args.minutes:g} leaves {room:.1f} s each; {CALM_S:g} s are needed"
        )
    times = [10.0 + room * n + rng.uniform(0, room - CALM_S) for n in range(args.faults)]
    faults = [(at, rng.randrange(WORLD), rng.choice(list(KINDS))) for at in times]
    with tempfile.TemporaryDirectory() as temporary:
        root = args.keep or Path(temporary)
        folders = [root / name for name in ("short", "long")]
        for folder in folders:
            folder.mkdir(parents=True)
        short = train(folders[0], short_faults, short_faults[-1][0] + 15.0)
        show("short job", short)
        real = train(folders[1], faults, seconds)
        show("long job", real)
    predicted = predict(figures(short, real.wall_s, real.struck), policy("rerail"))
    off = (predicted.goodput - real.goodput) * 100
    print(f"predicted goodput {predicted.goodput:.2%}, measured {real.goodput:.2%}: {off:+.2f} points (bar: 3)")
    return int(abs(off) > 3.0)


if __name__ == "__main__":
    sys.exit(main())
