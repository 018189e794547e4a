"""`rerail quarantine list|add|release`: what is out of use in a job, why, and until when. Called by `cli.main`.

A running job is asked through its controller (`runtime.quarantining`); of one that is not running the journal is read and
changed, so that the next run in the same run directory finds it.
"""

from __future__ import annotations

import argparse
import contextlib
import getpass
import json
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import msgspec

from rerail.cli.rundir import is_running, refusal, to_controller
from rerail.config import Settings
from rerail.errors import UsageError
from rerail.faults.catalog import Catalog
from rerail.report.summary import find_run
from rerail.runtime.handling import Handling
from rerail.runtime.journal import FILE_NAME, Journal
from rerail.runtime.quarantining import ADD, RELEASE, Order, carry_out, listing, members_in

WAIT_S = 15.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = parser.add_subparsers(dest="what", required=True, metavar="list|add|release")
    showing = what.add_parser("list", help="everything that is out of use, with the reason")
    adding = what.add_parser(ADD, help="take a node, device or link out of use")
    releasing = what.add_parser(RELEASE, help="let it be used again; its counts begin anew")
    for one in (adding, releasing):
        one.add_argument(
            "subject", metavar="SUBJECT", help="node:n1, device:n1/3 or link:n1/eth0; also n1, n1/3, n1/eth0"
        )
    adding.add_argument("--reason", required=True, metavar="TEXT", help="why, for whoever finds it later")
    adding.add_argument(
        "--force", action="store_true", help="even if nothing is left to train on, or the job has no such node"
    )
    releasing.add_argument("--reason", default="", metavar="TEXT", help="why, for the journal")
    for one in (showing, adding, releasing):
        one.add_argument("--job", default="", help="the job; the newest when not given")
        one.add_argument("--run-dir", default="", metavar="DIR", help="its run directory, if it was started with one")
        one.add_argument("--json", action="store_true", help="as JSON")


def run(args: argparse.Namespace) -> int:
    """One of the three."""
    folder = find_run(args.job, args.run_dir)
    if args.what == "list":
        found = _ask(folder, None)
        found = _kept(folder) if found is None else found
    else:
        order = Order(
            action=args.what,
            subject=args.subject,
            reason=args.reason,
            by=_user(),
            force=getattr(args, "force", False),
        )
        found = _ask(folder, order)
        found = _change(folder, order) if found is None else found
    if args.json:
        print(json.dumps(found))
    elif args.what == "list":
        print("\n".join(_table(found["quarantine"], time.time())))
    else:
        print(found["done"])
    return 0


def _ask(folder: Path, order: Order | None) -> dict[str, Any] | None:
    """The answer of the job's controller; None if there is none."""
    try:
        request = to_controller(folder, "/quarantine", None if order is None else msgspec.json.encode(order))
        with urllib.request.urlopen(request, timeout=WAIT_S) as answer:
            found: dict[str, Any] = json.load(answer)
            return found
    except urllib.error.HTTPError as error:
        with error:
            raise UsageError(str(refusal(error)["refused"])) from None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _kept(folder: Path) -> dict[str, Any]:
    """Of a job that is not running."""
    journal = Journal(folder / FILE_NAME, read_only=True)
    with contextlib.closing(journal):
        return listing(_handling(journal))


def _change(folder: Path, order: Order) -> dict[str, Any]:
    """Of a job that is not running: in its journal, for the next run."""
    if is_running(folder):
        raise UsageError(
            f"job {folder.name} is running, but its controller does not answer", hint="try again in a moment"
        )
    journal = Journal(folder / FILE_NAME)
    with contextlib.closing(journal):
        handling = _handling(journal)
        done = carry_out(handling, order, members_in(journal.state()), time.time())
        if not journal.append([], handling.state()):
            raise UsageError(f"the journal {journal.path} cannot be written", hint="check the disk")
        return {"done": done, **listing(handling)}


def _handling(journal: Journal) -> Handling:
    handling = Handling(Settings(), Catalog(()), "")
    handling.restore(journal.state())
    return handling


def _table(entries: list[dict[str, Any]], now: float) -> list[str]:
    if not entries:
        return ["nothing is out of use"]
    lines = []
    for entry in entries:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(entry["since"]))
        why = f"{entry['reason']}" + (f" (rule {entry['rule']})" if entry["rule"] else f" (by {entry['by']})")
        lines.append(f"{entry['subject']:<20}  since {since}  {_until(entry, now)}")
        lines.append(f"  {why}")
        lines += [f"  {line}" for line in entry["evidence"]]
    return [*lines, "more: rerail quarantine release SUBJECT, after rerail check --deep there"]


def _until(entry: dict[str, Any], now: float) -> str:
    if entry["probation"]:
        return "on probation: usable once rerail check --deep has passed there"
    if entry["ends"] is None:
        return "until it is released"
    return f"probation in {max(0.0, entry['ends'] - now) / 3600:.1f} h if no fault comes"


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return ""
