"""`rerail inject KIND`: break something in a running job on purpose, seeded and recorded. Called by `cli.main`.

The job's controller chooses and gives the order, the node or the rank carries it out (`runtime.injections`,
`runtime.injecting`, `session.injected`). Only jobs started with `rerail run --allow-inject` let it.
"""

from __future__ import annotations

import argparse
import json
import secrets
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import msgspec

from rerail.cli.rundir import refusal, to_controller
from rerail.errors import UsageError
from rerail.report.summary import find_run
from rerail.runtime.injections import ANSWER_S, FACTOR, FLAGS, KINDS, Wanted, check
from rerail.texts import bytes_of

EXIT_REFUSED = 1
SLACK_S = 15.0
"""Seconds beyond the controller's own patience."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.usage = "%(prog)s KIND [--rank R | --node N] [--job JOB | --run-dir DIR] [--seed S] [OPTIONS]"
    parser.epilog = "kinds:\n" + "\n".join(
        f"  {name:<19} {kind.what}" + (f" [{', '.join(FLAGS[one] for one in kind.takes)}]" if kind.takes else "")
        for name, kind in KINDS.items()
    )
    parser.add_argument("kind", metavar="KIND", help="what is to go wrong, see below")
    parser.add_argument("--rank", type=int, help="where; the seed picks when neither --rank nor --node is given")
    parser.add_argument("--node", default="", metavar="N", help="a node, by name or number; the seed picks its rank")
    parser.add_argument("--job", default="", help="the job; the newest when not given")
    parser.add_argument("--run-dir", default="", metavar="DIR", help="its run directory, if it was started with one")
    parser.add_argument(
        "--seed", type=int, help="makes every choice; the same seed chooses the same (default: a new one)"
    )
    parser.add_argument("--after", type=float, default=0.0, metavar="SECONDS", help="wait this long before")
    parser.add_argument("--for", type=float, default=0.0, dest="for_s", metavar="SECONDS", help="undo it after that")
    parser.add_argument(
        "--factor", type=float, default=0.0, help=f"slow: how much longer steps take (default {FACTOR})"
    )
    parser.add_argument("--line", default="", metavar="TEXT", help="kernel-log: the line; exception: its message")
    parser.add_argument(
        "--dir", default="", help="disk-full, slow-disk: whose disk; corrupt-checkpoint: the checkpoints"
    )
    parser.add_argument(
        "--max-size", default="", metavar="SIZE", help="disk-full, oom: only where there is less room (default 1GiB)"
    )
    parser.add_argument("--loopback-port", type=int, default=0, metavar="PORT", help="network-cut: only this port")
    parser.add_argument("--json", action="store_true", help="what was done, as JSON")


def run(args: argparse.Namespace) -> int:
    """Ask for it and say what was done."""
    wanted = wanted_from(args)
    check(wanted)
    folder = find_run(args.job, args.run_dir)
    answer = ask(folder, wanted)
    if args.json:
        print(json.dumps(answer))
    if "refused" in answer:
        if not args.json:
            print(f"rerail inject: refused: {answer['refused']}", file=sys.stderr)
        return EXIT_REFUSED
    if not args.json:
        at = f" at step {answer['step']}" if answer["step"] >= 0 else ""
        where = f"node {answer['node']}" if KINDS[wanted.kind].where == "node" else f"rank {answer['rank']}"
        print(f"{answer['id']}: {answer['kind']} on {where}{at}, seed {answer['seed']}: {answer['message']}")
    return 0


def wanted_from(args: argparse.Namespace) -> Wanted:
    """The wish behind a command line."""
    if args.rank is not None and args.rank < 0:
        raise UsageError(f"there is no rank {args.rank}", hint="ranks count from 0")
    return Wanted(
        kind=args.kind,
        seed=secrets.randbelow(1 << 31) if args.seed is None else args.seed,
        rank=-1 if args.rank is None else args.rank,
        node=args.node,
        after_s=args.after,
        for_s=args.for_s,
        factor=args.factor,
        line=args.line,
        folder=str(Path(args.dir).absolute()) if args.dir else "",
        max_size=bytes_of(args.max_size, "--max-size") if args.max_size else 0,
        port=args.loopback_port,
    )


def ask(folder: Path, wanted: Wanted) -> dict[str, Any]:
    """The answer of the job's controller: what was done, or why it was not."""
    try:
        request = to_controller(folder, "/inject", msgspec.json.encode(wanted))
    except (OSError, ValueError, KeyError, TypeError):
        raise _not_running(folder) from None
    try:
        with urllib.request.urlopen(request, timeout=wanted.after_s + ANSWER_S + SLACK_S) as answer:
            found: dict[str, Any] = json.load(answer)
            return found
    except urllib.error.HTTPError as error:
        with error:
            return refusal(error)
    except urllib.error.URLError:
        raise _not_running(folder) from None
    except (OSError, ValueError):
        late = "the controller went away before it could tell what became of it; if it was done, the journal says so"
        return {"refused": late}


def _not_running(folder: Path) -> UsageError:
    return UsageError(
        f"job {folder.name} is not running: no controller answers", hint="rerail status says how it stands"
    )
