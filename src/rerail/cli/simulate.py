"""`rerail simulate`: runs a cluster that is not there, policy against policy, and prints goodput, its loss by cause, and what was assumed.

Called by `cli.main`. The simulation is in `sim`.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from rerail.errors import UsageError
from rerail.sim import page, sweep, text
from rerail.sim.policies import POLICIES, Plan, policy
from rerail.sim.replay import cluster_of, faults_of, is_journal, unfelt
from rerail.sim.run import Result, compare
from rerail.sim.scenario import Assumption, Preset, Scenario, assumptions, book, parsed, preset, read_file, scenario

DEFAULT, ONE_NODE = "llama3-405b", "node8"
"""Presets where none is named; the second for the journal of a job."""
SHOWN = "rerail"
"""The policy whose losses are shown by cause, where it is among them."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--preset", default="", help=f"a cluster and a job by name (default {DEFAULT})")
    parser.add_argument(
        "--seed", default="0", help="of the faults; the same seed gives the same faults to every policy"
    )
    parser.add_argument("--seeds", default="1", metavar="K", help="so many seeds, from --seed on")
    parser.add_argument("--policies", default="", metavar="A,B", help="only these")
    parser.add_argument("--gpus", default="", metavar="N", help="devices of the job; spare nodes in proportion")
    parser.add_argument("--days", default="", metavar="D", help="how long the job runs")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="another assumption")
    parser.add_argument("--config", default="", metavar="FILE", help="assumptions from a TOML file")
    parser.add_argument(
        "--trace", default="", metavar="FILE", help="faults that have happened: CSV, JSON lines, a journal"
    )
    parser.add_argument("--sweep", default="", metavar="KEY=A,B,C", help="a run for each of these values")
    parser.add_argument("--list", action="store_true", help="presets, policies and assumptions")
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.add_argument("--html", default="", metavar="FILE", help="one page with drawings")


def run(args: argparse.Namespace) -> int:
    """Simulate, and print what came of it."""
    if args.list:
        print(_listing(as_json=args.json))
        return 0
    base, given = _values(args)
    made = scenario(sweep.resized(base, given))
    first, many = _seeds(args)
    key, values = sweep.parse_sweep(args.sweep) if args.sweep else ("", [])
    each = sweep.scenarios(base, given, key, values) if key else [made]
    plans = _plans(args.policies, each)
    if args.html:
        _may_write(args.html)
    trace = faults_of(Path(args.trace), made) if args.trace else None
    seeds = list(range(first, first + many))
    found: sweep.Sweep | None = None
    results: list[Result] = []
    if key:
        with _progress(len(each) * len(plans) * len(seeds)) as tell:
            found = sweep.sweep(key, each, plans, seeds, trace, tell)
        results = [result for point in found.points for result in point.results]
    else:
        with _progress(len(plans) * len(seeds)) as tell:
            results = compare(made, plans, seeds, trace, tell)
    assumed = [one for one in assumptions(made, base, given) if found is None or one.key != found.key]
    notes = [*text.left_out(plans, each), *(unfelt(trace) if trace is not None else [])]
    origin = args.trace or base.name
    title = text.heading(made, len(seeds), origin, found.key if found is not None else "")
    if args.html:
        _write(args.html, page.results_page(title, results, found, assumed, notes))
    print(
        _as_json(results, found, assumed, notes) if args.json else _as_text(title, results, found, assumed, base, notes)
    )
    return 0


def _plans(asked: str, each: list[Scenario]) -> list[Plan]:
    """The policies that are meant; those that cannot be had are told of, unless they are all."""
    plans = [policy(name.strip()) for name in asked.split(",")] if asked else list(POLICIES)
    if not any(one.feasible(made) for one in plans for made in each):
        raise UsageError(text.left_out(plans, each)[0], hint="use --gpus for a larger cluster, or other --policies")
    return plans


def _seeds(args: argparse.Namespace) -> tuple[int, int]:
    """The first, and how many."""
    first, many = _count("--seed", args.seed, 0), _count("--seeds", args.seeds, 1)
    if args.trace and (first, many) != (0, 1):
        flag, value = ("--seeds", many) if many > 1 else ("--seed", first)
        raise UsageError(f"{flag} is {value}, but the faults of a --trace are not drawn: there is nothing to seed")
    return first, many


def _values(args: argparse.Namespace) -> tuple[Preset, dict[str, Any]]:
    """The preset, and what was given beside it: command line before file. A journal's size and length go before the preset's."""
    rows = read_file(Path(args.config)) if args.config else {}
    journal = Path(args.trace) if args.trace and is_journal(Path(args.trace)) else None
    named = args.preset or str(rows.pop("preset", "")) or (DEFAULT if journal is None else ONE_NODE)
    rows.pop("preset", None)
    flags = {name: value for name in ("gpus", "days") if (value := getattr(args, name))}
    scenario(rows, f"--config {args.config}" if args.config else "")  # so that a mistake is told with its file
    base = preset(named)
    if journal is not None:
        found = cluster_of(journal)
        source = {**base.source, **dict.fromkeys(found, "measured: by the job of the journal")}
        base = msgspec.structs.replace(base, values=sweep.resized(base, found), source=source)
    return base, {**rows, **parsed(args.set), **flags}


def _count(flag: str, given: str, least: int) -> int:
    if not given.isdecimal() or int(given) < least:
        raise UsageError(f"{flag} is {given!r}, but has to be a whole number, {least} or more")
    return int(given)


@contextlib.contextmanager
def _progress(total: int) -> Iterator[Callable[[], None]]:
    """A bar on a terminal, nothing elsewhere."""
    if not sys.stderr.isatty() or total < 2:
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("simulating"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=total)
        yield lambda: progress.advance(task)


def _as_text(
    title: str,
    results: list[Result],
    found: sweep.Sweep | None,
    assumed: list[Assumption],
    base: Preset,
    notes: list[str],
) -> str:
    lines = [title, ""]
    if found is not None:
        lines += [*text.sweep_table(found, book().keys[found.key].unit), *notes, ""]
    else:
        groups = text.grouped(results)
        shown = text.middle(groups.get(SHOWN) or next(iter(groups.values())))
        lines += [
            *text.table(results),
            "goodput: productive share of the time of the job's devices; the rest in percent",
        ]
        lines += [*text.spares(results), *notes]
        lines += [*text.PUBLISHED] if base.name == DEFAULT else []
        lines += ["", *text.losses(shown), ""]
    return "\n".join(
        [*lines, *text.told(assumed), "more: rerail simulate --list · --sweep repair_factor=1,3,10 · docs/simulator.md"]
    )


def _as_json(results: list[Result], found: sweep.Sweep | None, assumed: list[Assumption], notes: list[str]) -> str:
    runs = [{**msgspec.to_builtins(one), "goodput": one.goodput, "goodput_held": one.goodput_held} for one in results]
    shown: dict[str, Any] = {"results": runs, "assumptions": assumed, "notes": notes}
    if found is not None:
        values = [point.value for point in found.points for _ in point.results]
        shown["sweep"] = {"key": found.key, "values": values}
    return msgspec.json.encode(shown).decode()


def _may_write(name: str) -> None:
    """Refuse at once what could only be refused when everything has run."""
    path = Path(name)
    if path.is_dir():
        raise UsageError(f"--html {name} cannot be written: it is a folder")
    if not path.parent.is_dir():
        raise UsageError(f"--html {name} cannot be written: there is no folder {path.parent}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UsageError(f"--html {name} cannot be written: not allowed")


def _write(name: str, content: str) -> None:
    try:
        Path(name).write_text(content, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--html {name} cannot be written: {error.strerror}") from error


def _listing(*, as_json: bool) -> str:
    known = book()
    if as_json:
        plans = [{"name": one.name, "title": one.title, "source": one.source} for one in POLICIES]
        return msgspec.json.encode({"presets": known.presets, "policies": plans, "assumptions": known.keys}).decode()
    lines = ["presets", *(f"  {one.name:<14}{one.about}" for one in known.presets.values()), "", "policies"]
    lines += [f"  {one.name:<14}{one.title} ({one.source})" for one in POLICIES]
    lines += ["", "assumptions"]
    return "\n".join([*lines, *(f"  {name:<18}{key.about} ({key.unit})" for name, key in known.keys.items())])
