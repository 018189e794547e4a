"""`rerail incidents [JOB]`: the incidents of a job, one line each. Called by `cli.main`."""

from __future__ import annotations

import argparse

import msgspec

from rerail.report.summary import find_run, reading, reports
from rerail.report.text import table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("job", nargs="?", default="", help="the job; the newest when not given")
    parser.add_argument("--run-dir", default="", help="the job's run directory, if it was started with one")
    parser.add_argument("--json", action="store_true", help="a JSON list of the reports")


def run(args: argparse.Namespace) -> int:
    """Print all incidents that are over."""
    folder = find_run(args.job, args.run_dir)
    with reading(folder) as journal:
        found = reports(journal)
    if args.json:
        print(msgspec.json.encode(found).decode())
        return 0
    print(table(found))
    if found:
        print(f"job {folder.name}: {len(found)} incidents, {sum(report.cost.total for report in found):.1f} s in all")
        print("more: rerail report N")
    return 0
