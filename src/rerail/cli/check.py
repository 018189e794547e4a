"""`rerail check [--deep]`: whether this machine is fit for work, one line for each part of it, and what to do where it is not.

Called by `cli.main`. Exit status: 0 healthy (there may be warnings), 1 something is wrong, 2 the command is.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import textwrap
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec

from rerail.detect import deep
from rerail.detect.checkup import RECENT_S, TIMEOUT_S, Figure, Health, Problem, State, checkup, quick_areas
from rerail.detect.levels import Levels
from rerail.errors import UsageError
from rerail.wording import closest

WRONG = 1
NAME, STATE = 19, 10
TEXT_LIMIT = 400
HISTORY = (
    f"history: what the kernel said more than {RECENT_S / 60:.0f} min ago does not count, because the detectors see "
    "whether it still holds"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--deep", action="store_true", help="also put memory, arithmetic, links and disk to the test (a minute or two)"
    )
    parser.add_argument("--json", action="store_true", help="the result as JSON")
    parser.add_argument(
        "--dir", default="", metavar="PATH", help="where the disk is tested: best where checkpoints go (default: here)"
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=0.0,
        metavar="S",
        help=f"seconds after which something hangs (default: {TIMEOUT_S:g}, deep tests {deep.TIMEOUT_S:g})",
    )
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help=f"only this: {', '.join(_names())}")


def run(args: argparse.Namespace) -> int:
    """Look, then test if asked to."""
    only = _chosen(args.only, deep_too=args.deep)
    directory = _directory(args.dir) if args.deep or args.dir else ""
    if args.timeout < 0 or not math.isfinite(args.timeout):
        raise UsageError(f"--timeout {args.timeout:g}: a number of seconds above 0 is needed")
    Levels.from_environment().catalog()  # a mistake in the settings is none of the machine's
    began = time.monotonic()
    health = checkup(only, timeout_s=args.timeout or TIMEOUT_S)
    show = _lines if not args.json else _nothing
    show(health)
    if args.deep:
        health += deep.deep(directory, only, timeout_s=args.timeout or deep.TIMEOUT_S, tell=show)
    took_s = time.monotonic() - began
    print(as_json(health, took_s) if args.json else as_text(health, took_s, deep_too=args.deep))
    return 0 if health.healthy else WRONG


def as_json(health: Health, took_s: float) -> str:
    """For programs."""
    body = {"healthy": health.healthy, **msgspec.to_builtins(health), "took_s": round(took_s, 2)}
    return msgspec.json.format(msgspec.json.encode(body), indent=2).decode()


def as_text(health: Health, took_s: float, *, deep_too: bool) -> str:
    """What comes below the lines of the areas: what is wrong, what was not seen, and the verdict."""
    text: list[str] = []
    problems = sorted(health.problems, key=lambda problem: problem.area)
    for problem in [one for one in problems if not one.old]:
        text += ["", *_told(problem)]
    if old := [one for one in problems if one.old]:
        text += ["", _wrapped(HISTORY, 0)]
    for problem in old:
        text += ["", *_told(problem)]
    if health.unseen:
        text += ["", "not seen"]
        text += [_wrapped(f"  {one.what}: {one.why}", 4) for one in health.unseen]
    broken = [name for name, state in health.areas.items() if state is State.FAILED]
    warned = [name for name, state in health.areas.items() if state is State.WARNING]
    verdict = (
        f"not healthy: {', '.join(broken)} failed" if broken else "healthy" if health.areas else "nothing was looked at"
    )
    if warned:
        verdict += f", warnings from {', '.join(warned)}"
    if old:
        verdict += f", {len(old)} from the past that {'does' if len(old) == 1 else 'do'} not count"
    more = "" if deep_too or broken else "; rerail check --deep also tests memory, arithmetic, links and disk"
    return "\n".join([*text, "", f"{verdict} ({took_s:.1f} s){more}"])


def _lines(health: Health) -> None:
    """One line for each area, as soon as it is known. Areas with nothing to see are told of at the end."""
    for name, state in health.areas.items():
        if state is not State.NOT_SEEN:
            figures = (figure for figure in health.figures if figure.area == name)
            print(f"{name:<{NAME}}{state:<{STATE}}{', '.join(figures_told(figures))}".rstrip(), flush=True)


def _nothing(health: Health) -> None:
    """JSON is written at the end, at once."""


def figures_told(figures: Iterable[Figure]) -> list[str]:
    """For people; where many devices have the same figure, the lowest and the highest of them."""
    values: dict[tuple[str, str, str], list[float]] = {}
    for figure in figures:
        values.setdefault((figure.area, figure.name, figure.unit), []).append(figure.value)
    words = []
    for (area, name, unit), of_it in values.items():
        low, high = _number(min(of_it)), _number(max(of_it))
        if area == deep.DEVICES:
            words.append(f"{len(of_it)} x {name}")
        elif not unit:
            words.append(f"{high} {name}")
        else:
            words.append(f"{name} {low if low == high else f'{low} to {high}'} {unit}")
    return words


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"


def _told(problem: Problem) -> list[str]:
    where = f"{problem.area}, {problem.subject}" if problem.subject else problem.area
    text = problem.text if len(problem.text) <= TEXT_LIMIT else problem.text[: TEXT_LIMIT - 1] + "…"
    advice = problem.advice and f"{problem.action}: {problem.advice}"
    if problem.old and advice:
        advice = f"if it comes again, {advice}"
    lines = [_wrapped(f"{'past' if problem.old else problem.severity}  {where}: {problem.title} ({problem.code})", 4)]
    lines += [_wrapped(f"    {part}", 4) for part in (text, advice) if part]
    return lines


def _wrapped(text: str, indent: int) -> str:
    width = max(60, min(shutil.get_terminal_size((120, 24)).columns, 140))
    return textwrap.fill(text, width, subsequent_indent=" " * indent, break_on_hyphens=False, drop_whitespace=True)


def _names() -> list[str]:
    return [*quick_areas(), *deep.AREAS]


def _chosen(names: list[str], *, deep_too: bool) -> list[str]:
    """What `--only` names, checked."""
    for name in names:
        if name not in _names():
            close = closest(name, _names())
            hint = f"did you mean: --only {close}" if close else f"there are {', '.join(_names())}"
            raise UsageError(f"--only {name}: there is no such part", hint=hint)
        if name in deep.AREAS and not deep_too:
            raise UsageError(f"--only {name} is a deep test", hint=f"rerail check --deep --only {name}")
    return names


def _directory(given: str) -> str:
    """The directory in which the disk is tested."""
    path, named = Path(given or os.curdir).absolute(), f"--dir {given}" if given else "the current directory"
    if not path.is_dir():
        raise UsageError(f"{named}: there is no such directory")
    if not os.access(path, os.W_OK | os.X_OK):
        raise UsageError(
            f"{named}: no right to write there", hint="--dir PATH names another, best where checkpoints go"
        )
    return str(path)
