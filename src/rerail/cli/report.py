"""`rerail report`: what happened in an incident (`last`, its number), or what the whole time of a job went into (`job`).

Called by `cli.main`. One incident is a page of text, or JSON; a job is text, Markdown, JSON or one HTML file, and a trace.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec

from rerail.errors import UsageError
from rerail.faults.catalog import load_catalog
from rerail.flow import Recovery, Report
from rerail.report.accounts import Accounts, accounts
from rerail.report.sheet import as_markdown, as_text
from rerail.report.summary import find_run, reading, reports, seen, story
from rerail.report.text import render, seen_table
from rerail.report.trace import as_trace
from rerail.report.webpage import as_html

WHOLE = "job"
FORMATS: dict[str, Callable[[Accounts], str]] = {
    "text": as_text,
    "markdown": as_markdown,
    "json": lambda told: msgspec.json.encode(told).decode(),
    "html": as_html,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "which",
        nargs="?",
        default="",
        metavar="WHICH",
        help="last (default), the number of an incident, job for the whole job, or a job's name for its last incident",
    )
    parser.add_argument("job_after", nargs="?", default="", metavar="JOB", help="the job; the newest when not given")
    parser.add_argument("--job", default="", help="the same")
    parser.add_argument("--run-dir", default="", help="the job's run directory, if it was started with one")
    parser.add_argument("--json", action="store_true", help="the same as --format json")
    parser.add_argument(
        "--format", choices=list(FORMATS), default="", help="of a whole job; one incident is text (default) or json"
    )
    parser.add_argument("--out", default="", metavar="FILE", help="write there instead of printing")
    parser.add_argument(
        "--trace",
        default="",
        metavar="FILE",
        help="also write a whole job's time line as trace events: ui.perfetto.dev opens it",
    )


def run(args: argparse.Namespace) -> int:
    """Print one incident, or the accounts of the job."""
    job, which = args.job or args.job_after, args.which
    form = _format(args)
    whole = which == WHOLE or (not which and (form in ("markdown", "html") or bool(args.trace)))
    if not whole and which not in ("", "last") and not which.isdecimal():
        if job:
            raise UsageError(
                f"{which!r} is not the number of an incident",
                hint=f"rerail report last {job}, or rerail report job {job}",
            )
        job, which = which, "last"
    folder = find_run(job, args.run_dir)
    if whole:
        return _whole(folder, form or "text", args.out, args.trace)
    if form in ("markdown", "html") or args.trace:
        asked = "--trace" if args.trace else f"--format {form}"
        raise UsageError(
            f"{asked} is for a whole job, not for one incident",
            hint=f"rerail report job {job} {asked}".replace("  ", " "),
        )
    _tell(_one(folder, which or "last", form == "json"), args.out)
    return 0


def _format(args: argparse.Namespace) -> str:
    if args.json and args.format not in ("", "json"):
        raise UsageError(f"--json and --format {args.format} are two different things", hint="give one of them")
    return "json" if args.json else str(args.format)


def _one(folder: Path, which: str, as_json: bool) -> str:
    """The page of an incident."""
    with reading(folder) as journal:
        found = reports(journal)
        if not found and which == "last":
            also = seen(journal)
            text = "\n".join([f"no incidents in {folder.name}", *seen_table(also)])
            return msgspec.json.encode({"also_seen": also}).decode() if as_json else text
        whole = story(journal, _pick(found, which, folder.name))
    return msgspec.json.encode(whole).decode() if as_json else render(whole, load_catalog())


def _whole(folder: Path, form: str, out: str, trace: str) -> int:
    """The accounts of a job, and its trace where one is asked for."""
    with reading(folder) as journal:
        told = accounts(journal, folder.name)
        recoveries = journal.records(kind="recovery") if trace else []
    if told is None:
        raise UsageError(
            f"the journal of {folder.name} holds nothing yet", hint="the job has not begun; ask again when it has"
        )
    if trace:
        _write(trace, as_trace(told, [one for one in recoveries if isinstance(one, Recovery)]), "--trace")
        print(f"trace in {trace} (open it with https://ui.perfetto.dev)", file=sys.stderr)
    _tell(FORMATS[form](told), out)
    return 0


def _tell(text: str, out: str) -> None:
    if not out:
        print(text)
        return
    _write(out, text.rstrip("\n").encode() + b"\n", "--out")
    print(f"report in {out}", file=sys.stderr)


def _write(name: str, body: bytes, flag: str) -> None:
    """A whole file, or none: what stood there stays until the new one is complete. A pipe is written as it is."""
    path = Path(name)
    try:
        if path.is_dir():
            raise IsADirectoryError(0, "it is a folder")
        if path.exists() and not path.is_file():
            path.write_bytes(body)
            return
        draft = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            draft.write_bytes(body)
            draft.replace(path)
        finally:
            with contextlib.suppress(OSError):
                draft.unlink()
    except OSError as error:
        hint = f"{flag} names a file in a folder that is there and writable"
        raise UsageError(f"{flag} {name} cannot be written: {error.strerror}", hint=hint) from error


def _pick(found: list[Report], which: str, job: str) -> Report:
    if which == "last":
        return found[-1]
    number = int(which)
    for report in found:
        if report.incident == number:
            return report
    known = f"{found[0].incident} to {found[-1].incident}" if found else "none"
    raise UsageError(f"job {job} has no incident {number} that is over", hint=f"there are: {known} (rerail incidents)")
