"""`rerail diagnose LOG...`: the root cause in any log of any job, with its evidence and what to do.

Called by `cli.main`. Exit status: 0 nothing wrong, 1 a fault was found, 2 the logs cannot be read.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import textwrap
from typing import Any

import msgspec

from rerail.cli.wishes import catalog_here
from rerail.detect.logs import Reader, files_of
from rerail.diagnose.cascade import Group, Verdict, judge
from rerail.errors import UsageError
from rerail.faults.matcher import Matcher
from rerail.faults.sightings import Sighting
from rerail.wording import counted

FOUND = 1
LABEL = 13
MAX_ECHOES = 5
TEXT_LIMIT = 400


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "logs", nargs="+", metavar="LOG", help="files (also .gz, .bz2, .xz), directories, or - for stdin"
    )
    parser.add_argument("--json", action="store_true", help="the verdict as JSON")
    parser.add_argument("--all", action="store_true", help="list every echo")
    parser.add_argument("--faults", action="append", default=[], metavar="FILE", help="a catalogue file of your own")


def run(args: argparse.Namespace) -> int:
    """Read everything, then judge."""
    matcher = Matcher(catalog_here("diagnose", args.faults).faults)
    reader = Reader(matcher)
    found: list[Sighting] = []
    count = 0
    for name in args.logs:
        if name == "-":
            found += reader.open(sys.stdin.buffer, "stdin")
            count += 1
        else:
            for path in files_of([name]):
                found += reader.read(path)
                count += 1
    for name, why in reader.unreadable.items():
        print(f"rerail diagnose: {name} cannot be read: {why}", file=sys.stderr)
    verdict = judge(found)
    if verdict.root is None and len(reader.unreadable) == count:
        raise UsageError("none of the logs can be read")
    print(as_json(verdict, reader) if args.json else as_text(verdict, reader, everything=args.all))
    return FOUND if verdict.root is not None else 0


def as_json(verdict: Verdict, reader: Reader) -> str:
    """For programs; `root` is null when nothing is wrong."""
    body: dict[str, Any] = {
        "root": _plain(verdict.root) if verdict.root is not None else None,
        "echoes": [_plain(echo) for echo in verdict.echoes],
        "action": str(verdict.action),
        "confidence": verdict.confidence,
        "why": verdict.why,
        "hardware": verdict.hardware,
        "unread": reader.unreadable,
    }
    return msgspec.json.format(msgspec.json.encode(body), indent=2).decode()


def _plain(group: Group) -> dict[str, Any]:
    first, fault = group.first, group.fault
    return {
        "code": fault.code,
        "aliases": list(fault.aliases),
        "title": fault.title,
        "class": fault.kind,
        "scope": fault.scope,
        "severity": str(fault.severity),
        "file": first.file,
        "line": first.line,
        "text": first.text,
        "rank": first.rank if first.rank >= 0 else None,
        "ranks": list(group.ranks),
        "count": group.count,
        "advice": fault.advice,
    }


def as_text(verdict: Verdict, reader: Reader, *, everything: bool) -> str:
    """For people: root, why, handling, confidence."""
    root = verdict.root
    if root is None:
        return f"nothing wrong found in {counted(reader.lines, 'line')}"
    fault, first = root.fault, root.first
    rank = f" on rank {first.rank}" if first.rank >= 0 else ""
    lines = [
        _row("root cause", f"{fault.code}{rank}: {fault.title}"),
        _row("", f"{first.file}:{first.line}"),
        _row("", _cut(first.text)),
        _row("kind", f"{'hardware' if verdict.hardware else 'software'}, {fault.kind}; {fault.scope} is affected"),
        _row("handling", f"{verdict.action}: {fault.advice}" if fault.advice else str(verdict.action)),
        _row("confidence", f"{verdict.confidence} ({verdict.why})"),
    ]
    if verdict.storm:
        lines.append(_row("", f"seen on {len(root.devices)} devices at once: taken for software, no device is blamed"))
    shown = verdict.echoes if everything else verdict.echoes[:MAX_ECHOES]
    for index, echo in enumerate(shown):
        lines.append(_row("" if index else "also seen", _echo(echo)))
    if len(shown) < len(verdict.echoes):
        lines.append(_row("", f"and {counted(len(verdict.echoes) - len(shown), 'more kind')} (--all lists them)"))
    return "\n".join(lines)


def _echo(group: Group) -> str:
    ranks = f" on {len(group.ranks)} ranks" if len(group.ranks) > 1 else ""
    often = f", {group.count} times" if group.count > 1 else ""
    return f"{group.fault.code}{ranks}{often}: {group.fault.title} ({group.first.file}:{group.first.line})"


def _row(label: str, text: str) -> str:
    width = max(60, min(shutil.get_terminal_size((120, 24)).columns, 140))
    return textwrap.fill(
        text or " ",
        width,
        initial_indent=f"{label:<{LABEL}}",
        subsequent_indent=" " * LABEL,
        break_on_hyphens=False,
        break_long_words=False,  # a path is there to be copied
    )


def _cut(text: str) -> str:
    return text if len(text) <= TEXT_LIMIT else text[: TEXT_LIMIT - 1] + "…"
