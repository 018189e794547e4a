"""`rerail faults list|show|match|check`: what is known of faults, and which of them a line shows.

Called by `cli.main`.
"""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from pathlib import Path

import msgspec

from rerail.cli.wishes import catalog_here, levels_here
from rerail.errors import UsageError
from rerail.faults.catalog import Catalog, Fault, Sample, load_catalog
from rerail.faults.catalog import parse as entries_of
from rerail.faults.check import problems
from rerail.faults.matcher import Matcher, plain
from rerail.faults.sightings import sightings
from rerail.wording import counted


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = parser.add_subparsers(dest="what", required=True, metavar="list|show|match|check")
    listing = what.add_parser("list", help="all faults, one line each")
    listing.add_argument("word", nargs="?", default="", help="only those with this in code, title, class or alias")
    either = listing.add_mutually_exclusive_group()
    either.add_argument("--hardware", action="store_true", help="only faults of hardware")
    either.add_argument("--software", action="store_true", help="only faults of software")
    showing = what.add_parser("show", help="everything about one fault")
    showing.add_argument("code", help="its code, or its id in another catalogue (GPU-XID-79)")
    matching = what.add_parser("match", help="which faults a line shows")
    matching.add_argument("line", nargs="*", help="the line; without one, lines are read from stdin")
    checking = what.add_parser("check", help="check catalogue files of your own")
    checking.add_argument("file", nargs="+")
    for one in (listing, showing, matching):
        one.add_argument("--json", action="store_true", help="as JSON")
        one.add_argument("--faults", action="append", default=[], metavar="FILE", help="a catalogue file of your own")


def run(args: argparse.Namespace) -> int:
    """One of the four."""
    if args.what == "check":
        return _check(args.file)
    return {"list": _list, "show": _show, "match": _match}[args.what](args, catalog_here("faults", args.faults))


def _list(args: argparse.Namespace, catalog: Catalog) -> int:
    word = args.word.lower()
    chosen = [
        fault
        for fault in catalog.faults
        if (not word or any(word in text.lower() for text in (fault.code, fault.title, fault.kind, *fault.aliases)))
        and (fault.hardware or not args.hardware)
        and (not fault.hardware or not args.software)
    ]
    if args.json:
        print(msgspec.json.encode(chosen).decode())
        return 0
    width = max((len(fault.code) for fault in chosen), default=0)
    for fault in sorted(chosen, key=lambda fault: fault.code):
        print(f"{fault.code:<{width}}  {fault.severity:<8}  {fault.action:<15}  {fault.title}")
    hardware = sum(fault.hardware for fault in chosen)
    print(
        f"{counted(len(chosen), 'fault')}: {hardware} of hardware, {len(chosen) - hardware} of software",
        file=sys.stderr,
    )
    return 0


def _show(args: argparse.Namespace, catalog: Catalog) -> int:
    fault = catalog.find(args.code)
    if fault is None:
        if (hidden := load_catalog().find(args.code)) is not None:
            raise UsageError(f"{hidden.code} is switched off by the setting fault_levels")
        close = difflib.get_close_matches(args.code, [one.code for one in catalog.faults], n=3)
        hint = f"did you mean: {', '.join(close)}" if close else "rerail faults list WORD searches"
        raise UsageError(f"there is no fault {args.code!r}", hint=hint)
    print(msgspec.json.encode(fault).decode() if args.json else "\n".join(described(fault)))
    return 0


def described(fault: Fault) -> list[str]:
    """Everything about one fault, for people."""
    then = f", then {fault.then}" if fault.then is not None else ""
    often = f"when seen {fault.times} times" + (f" in {fault.within_s:g} s" if fault.within_s else "")
    rows = [
        ("", f"{fault.code}: {fault.title}"),
        ("class", f"{fault.kind}, {'hardware' if fault.hardware else 'software'}, scope {fault.scope}"),
        ("severity", str(fault.severity)),
        ("role", str(fault.role)),
        ("handling", f"{fault.action}{then}"),
        ("advice", fault.advice),
        ("counts", often if fault.times > 1 else ""),
        ("seen in", ", ".join((*fault.seen, *fault.sources))),
        ("pattern", fault.pattern),
        ("unless", fault.unless),
        ("reading", msgspec.json.encode(fault.reading).decode() if fault.reading is not None else ""),
        ("caused by", ", ".join(fault.caused_by)),
        ("clears", ", ".join(fault.clears)),
        ("also called", ", ".join(fault.aliases)),
        ("references", "; ".join(fault.references)),
        *(("sample", sample) for sample in fault.samples if not isinstance(sample, Sample)),
    ]
    return [f"{name:<12}{text}".rstrip() if name else text for name, text in rows if text]


def _match(args: argparse.Namespace, catalog: Catalog) -> int:
    matcher = Matcher(catalog.faults)
    given = [os.fsencode(" ".join(args.line))] if args.line else sys.stdin.buffer
    lines = [plain(line).decode().rstrip("\r\n") for line in given]
    found = [(line, one.fault) for line in lines for one in sightings(matcher, line)]
    if args.json:
        print(msgspec.json.encode([{"line": line, "code": f.code, "aliases": f.aliases} for line, f in found]).decode())
    else:
        for line, fault in found:
            print(f"{fault.code}  {fault.role}, {fault.action}: {fault.title}" + ("" if args.line else f"\n    {line}"))
        if not found:
            print("no fault that is known", file=sys.stderr)
    return 0 if found else 1


def _check(files: list[str]) -> int:
    shipped = {fault.code for fault in load_catalog().faults}
    given = {Path(file).resolve() for file in files}
    others = [path for path in levels_here("faults").files if path.resolve() not in given]
    known = {fault.code for fault in load_catalog(others).faults}
    faults: list[Fault] = []
    for file in files:
        try:
            faults += entries_of(Path(file).read_text(encoding="utf-8"), file)
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"{file} cannot be read: {error}") from error
    found = problems(faults, known)
    for text in found:
        print(text)
    replaced = sorted({fault.code for fault in faults} & shipped)
    if replaced:
        print(f"replaces what rerail ships: {', '.join(replaced)}")
    print(f"{counted(len(faults), 'fault')}, {counted(len(found), 'problem')}")
    return 1 if found else 0
