"""`rerail report [last|N|JOB]`: what happened in an incident, why, what else was seen, and where the time went.

Called by `cli.main`.
"""

from __future__ import annotations

import argparse

import msgspec

from rerail.errors import UsageError
from rerail.faults.catalog import load_catalog
from rerail.flow import Report
from rerail.report.summary import find_run, reading, reports, seen, story
from rerail.report.text import render, seen_table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("which", nargs="?", default="last", help="last (default), the number of an incident, or a job")
    parser.add_argument("job_after", nargs="?", default="", metavar="JOB", help="the job; the newest when not given")
    parser.add_argument("--job", default="", help="the same")
    parser.add_argument("--run-dir", default="", help="the job's run directory, if it was started with one")
    parser.add_argument("--json", action="store_true", help="all records of the incident as JSON")


def run(args: argparse.Namespace) -> int:
    """Print one incident."""
    job, which = args.job or args.job_after, args.which
    if which != "last" and not which.isdecimal():
        if job:
            raise UsageError(f"{which!r} is not the number of an incident", hint=f"rerail report last {job}")
        job, which = which, "last"
    folder = find_run(job, args.run_dir)
    with reading(folder) as journal:
        found = reports(journal)
        if not found and which == "last":
            also = seen(journal)
            text = "\n".join([f"no incidents in {folder.name}", *seen_table(also)])
            print(msgspec.json.encode({"also_seen": also}).decode() if args.json else text)
            return 0
        whole = story(journal, _pick(found, which, folder.name))
    print(msgspec.json.encode(whole).decode() if args.json else render(whole, load_catalog()))
    return 0


def _pick(found: list[Report], which: str, job: str) -> Report:
    if which == "last":
        return found[-1]
    number = int(which)
    for report in found:
        if report.incident == number:
            return report
    known = f"{found[0].incident} to {found[-1].incident}" if found else "none"
    raise UsageError(f"job {job} has no incident {number} that is over", hint=f"there are: {known} (rerail incidents)")
