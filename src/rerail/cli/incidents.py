"""`rerail incidents [JOB]`: the incidents of a job, one line each, and what else was told of its machines and training.

Called by `cli.main`.
"""

from __future__ import annotations

import argparse

import msgspec

from rerail.report.summary import fault_times, find_run, reading, reports, seen
from rerail.report.text import seen_table, table
from rerail.wording import counted


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("job", nargs="?", default="", help="the job; the newest when not given")
    parser.add_argument("--run-dir", default="", help="the job's run directory, if it was started with one")
    parser.add_argument("--json", action="store_true", help="both as JSON: incidents, also_seen")


def run(args: argparse.Namespace) -> int:
    """Print all incidents that are over."""
    folder = find_run(args.job, args.run_dir)
    with reading(folder) as journal:
        found, also = reports(journal), seen(journal)
        faults = fault_times(journal, found)
    if args.json:
        told = [{**msgspec.to_builtins(one), "fault_at": faults[one.incident]} for one in found]
        print(msgspec.json.encode({"incidents": told, "also_seen": also}).decode())
        return 0
    print("\n".join([table(found, faults), *seen_table(also)]))
    if found:
        print(
            f"job {folder.name}: {counted(len(found), 'incident')}, {sum(report.cost.total for report in found):.1f} s in all"
        )
        print("more: rerail report N")
    return 0
