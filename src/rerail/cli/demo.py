"""Turns one command into proof: four ranks train a small GPT while four real faults hit them, and the weights stay the same.

Called by `cli.main`. Faults are signals sent to real processes and one real exception; every number shown is measured.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from rerail.cli.demo_view import View, incident_table, make_view
from rerail.cli.watch import RerailJob, Step
from rerail.flow import Report

WORLD = 4
STEPS = 80
SCRIPT = Path(__file__).with_name("demo_train.py")
FAULTS = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """--steps and --keep; the defaults are for two cores and two minutes."""
    parser.add_argument("--steps", type=int, default=STEPS, metavar="N", help=f"steps of each run (default {STEPS})")
    parser.add_argument("--keep", metavar="DIR", help="keep journal and logs of the disturbed run in DIR")
    parser.add_argument("--plain", action="store_true", help="plain lines even on a terminal")


def run(args: argparse.Namespace) -> int:
    """The undisturbed run, the disturbed run, the comparison."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the job under way is ended, too
    folder = Path(tempfile.mkdtemp(prefix="rerail-demo-"))
    begin = time.monotonic()
    view = make_view(plain=args.plain or not sys.stdout.isatty())
    try:
        with view:
            wanted = _undisturbed(folder / "undisturbed", args.steps, view)
            found, reports = _disturbed(folder / "disturbed", args.steps, view)
        return _verdict(view, wanted, found, reports, time.monotonic() - begin)
    finally:
        if args.keep:
            shutil.copytree(folder / "disturbed", args.keep, dirs_exist_ok=True)
        shutil.rmtree(folder, ignore_errors=True)


def _arguments(folder: Path, steps: int) -> list[str]:
    return ["--steps", str(steps), "--folder", str(folder)]


def _undisturbed(folder: Path, steps: int, view: View) -> str:
    view.begin("undisturbed", steps)
    with RerailJob(SCRIPT, _arguments(folder, steps), folder, world=WORLD, standbys=0) as job:
        _to_the_end(job, view)
    return (folder / "sha256").read_text()


def _disturbed(folder: Path, steps: int, view: View) -> tuple[str, list[Report]]:
    view.begin("disturbed", steps)
    # Two faults need a replacement; with two warm standbys the second does not wait for a new one to warm up.
    with RerailJob(SCRIPT, _arguments(folder, steps), folder, world=WORLD, standbys=2) as job:
        job.wait_first_step()
        _follow(job, view, lambda: job.standbys() >= 2 or _progress(job) > steps // 3)
        for hurt in (_kill, _freeze, _raise, _kill_controller):
            _inflict(job, view, hurt)
        _to_the_end(job, view)
        return (folder / "sha256").read_text(), job.reports()


def _inflict(job: RerailJob, view: View, hurt: Callable[[RerailJob], None]) -> None:
    """One fault, then follow the job until its report is written and every rank has gone on."""
    seen = len(job.reports())
    hurt(job)
    moment = time.monotonic()
    _follow(job, view, lambda: len(job.reports()) > seen)
    for report in job.reports()[seen:]:
        view.incident(report)
    job.wait_steps_after(moment)
    view.steps(job.steps)


def _kill(job: RerailJob) -> None:
    os.kill(job.pid(2), signal.SIGKILL)


def _freeze(job: RerailJob) -> None:
    os.kill(job.pid(1), signal.SIGSTOP)


def _raise(job: RerailJob) -> None:
    (job.folder / "raise-3").touch()


def _kill_controller(job: RerailJob) -> None:
    os.kill(int(job.controller()["pid"]), signal.SIGKILL)


def _follow(job: RerailJob, view: View, enough: Callable[[], bool]) -> None:
    """Show progress until `enough`; it may be costly, so it is asked ten times a second at most."""
    next_look = 0.0

    def look(fresh: list[Step]) -> bool:
        nonlocal next_look
        view.steps(fresh)
        if time.monotonic() < next_look:
            return False
        next_look = time.monotonic() + 0.1
        return enough()

    job.wait_for("the job to go on", look)


def _to_the_end(job: RerailJob, view: View) -> None:
    def ended(fresh: list[Step]) -> bool:
        view.steps(fresh)
        return job.process.poll() is not None

    job.wait_for("the end of the job", ended, limit_s=300.0)
    view.steps(job.poll())


def _progress(job: RerailJob) -> int:
    return max((step.step for step in job.latest.values()), default=0)


def _verdict(view: View, wanted: str, found: str, reports: list[Report], elapsed: float) -> int:
    print()
    print(incident_table(reports))
    print()
    same = wanted == found
    missing = FAULTS - len([report for report in reports if report.ok])
    if same:
        print(f"weights equal the undisturbed run's, bit for bit (sha256 {found[:12]}…)")
    else:
        print(f"weights DIFFER from the undisturbed run's: sha256 {found[:12]}…, wanted {wanted[:12]}…")
    if missing > 0:
        print(f"{missing} of {FAULTS} faults have no recovered incident in the journal")
    # While the controller was away the ranks trained on: that took time to notice, but cost none.
    cost = sum(report.cost.total for report in reports if report.attempts)
    print(f"{len(reports)} incidents cost {cost:.1f} s of a run of {view.elapsed:.0f} s; all in all {elapsed:.0f} s")
    print("the same faults under torchrun: make bench")
    return 0 if same and missing <= 0 else 1
