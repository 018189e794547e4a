"""`rerail plan`: how often to save where, how many spares to hold, and what is left for the training. On paper, or from a job's journal.

Called by `cli.main`.
"""

from __future__ import annotations

import argparse
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec

from rerail.cli.plan_view import reference, render
from rerail.errors import ConfigError, UsageError
from rerail.flow import Rung, Signal
from rerail.planner.outlook import rate_of
from rerail.planner.paper import ASSUMED, Job, answer
from rerail.planner.rates import usual
from rerail.planner.units import quantity
from rerail.report.accounts import NO_FAULTS, accounts
from rerail.report.partition import Cause
from rerail.report.summary import find_run, reading, reports
from rerail.wording import guess

FIELDS = {
    "gpus": ("count", "devices of the job"),
    "params": ("count", "parameters of the model: 405e9, 70B"),
    "mtbf": ("duration", "time between two faults of the whole job: 3.1h"),
    "rate": ("count", "faults per 1,000 devices and day, where mtbf is not known"),
    "write": ("speed", "to the store beside the cluster, all nodes together: 2.7GB/s"),
    "read": ("speed", "the same for reading"),
    "copy": ("speed", "from a device to its host"),
    "net": ("speed", "from one node to another"),
    "per_node": ("count", "devices of a node"),
    "replicas": ("count", "ranks that hold the same state"),
    "bytes_per_param": ("count", "bytes to save for each parameter, optimizer included"),
    "step": ("duration", "of the training"),
    "length": ("duration", "of the whole job: 54d"),
    "repair": ("duration", "until a broken node is back"),
    "node_share": ("share", "of all faults: those that take a node"),
    "job_share": ("share", "of all faults: those that take everything"),
    "process_down": ("duration", "to find and repair a fault of a process, loading aside"),
    "node_down": ("duration", "the same for a node"),
    "job_down": ("duration", "the same when all are started anew"),
    "stall_share": ("share", "of a snapshot's copy that the training feels"),
    "noise_share": ("share", "of a snapshot's way to another node or the store that the training feels"),
}
MAY_BE_ZERO = ("node_share", "job_share", "process_down", "node_down", "job_down", "stall_share", "noise_share")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    for name, (_, what) in FIELDS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", default=None, metavar="X", help=what)
    parser.add_argument("--elastic", action="store_true", default=None, help="the job can go on without some nodes")
    parser.add_argument("--config", default="", metavar="FILE", help="a TOML file with the same names")
    parser.add_argument("--journal", default="", metavar="JOB", help="take rates and times from this job's journal")
    parser.add_argument("--reference", action="store_true", help="the founding reference beside the model and rerail")
    parser.add_argument("--json", action="store_true", help="everything as JSON")


def run(args: argparse.Namespace) -> int:
    """Print one plan."""
    if args.reference:
        print(reference(as_json=args.json))
        return 0
    given: dict[str, Any] = {**(_from_file(Path(args.config)) if args.config else {})}
    measured: dict[str, str] = {}
    if args.journal:
        found, measured = _from_journal(args.journal)
        given = {**found, **given}
    given |= {name: text for name in (*FIELDS, "elastic") if (text := getattr(args, name)) is not None}
    job = _job(given)
    plan = answer(job)
    if args.json:
        print(msgspec.json.encode({"job": job, "plan": _finite(plan), "assumed": _assumed(given, measured)}).decode())
    else:
        print(render(job, plan, _assumed(given, measured)))
    return 0


def _job(given: dict[str, Any]) -> Job:
    for name in ("gpus", "params"):
        if name not in given:
            raise UsageError(f"--{name} is missing", hint="rerail plan --gpus 1024 --params 70e9 --write 20GB/s")
    values: dict[str, Any] = {}
    for name, text in given.items():
        if name == "elastic":
            if not isinstance(text, bool):
                raise ConfigError(f"elastic is {text!r}; true or false is needed")
            values[name] = text
        else:
            values[name] = quantity(name, text, FIELDS[name][0], zero=name in MAY_BE_ZERO)
    return Job(**values)


def _from_file(path: Path) -> dict[str, Any]:
    try:
        given = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is no TOML file: {error}") from error
    for name in given:
        if name not in FIELDS and name != "elastic":
            raise ConfigError(f"{path}: {name} is not known{guess(name, FIELDS)}")
    return given


def _from_journal(job: str) -> tuple[dict[str, Any], dict[str, str]]:
    """What a job has measured itself: its faults, and what its repairs and saves took."""
    folder = find_run(job if "/" not in job else "", job if "/" in job else "")
    with reading(folder) as journal:
        told = [report for report in reports(journal) if report.attempts and report.code not in NO_FAULTS]
        whole = accounts(journal, folder.name)
        planned = [one for one in journal.records(kind="signal") if getattr(one, "source", "") == "checkpoint.planned"]
        nodes = Counter(str(place[0]) for place in journal.state().get("placement") or ())
    if whole is None or not whole.wall_s:
        raise UsageError(f"the journal in {folder} tells of nothing: the job has not begun to train")
    world, ran = nodes.total(), whole.wall_s - whole.parts[Cause.OFF]
    # pieces in which the job did not run at all are left out of the time in which it could have failed
    off = [piece for piece in whole.pieces if piece.cause is Cause.OFF]
    faults = [report.at - whole.begin - sum(one.seconds for one in off if one.end <= report.at) for report in told]
    rate = rate_of([max(0.0, at) for at in faults], 0.0, max(ran, *faults, 0.0), usual(max(1, world)))
    found: dict[str, Any] = {"mtbf": 1 / rate.mean}
    why = {"mtbf": f"journal of {folder.name}: {rate.why}"}
    if world:
        found |= {"gpus": world, "per_node": max(nodes.values())}
        why |= dict.fromkeys(("gpus", "per_node"), f"ranks in the journal of {folder.name}")
    for name, rungs in _RUNGS.items():
        mine = [report.cost for report in told if report.rung in rungs and report.ok]
        if mine:
            found[name] = sum(cost.detect + cost.t1 + cost.t2 + cost.t4 for cost in mine) / len(mine)
            why[name] = f"mean of {len(mine)} in the journal of {folder.name}"
    if planned and isinstance(planned[-1], Signal) and float(planned[-1].payload.get("step_s", 0.0)) > 0:
        found["step"] = float(planned[-1].payload["step_s"])
        why["step"] = f"measured by {folder.name}"
    return found, why


_RUNGS = {
    "process_down": (Rung.REPLACE_RANK, Rung.RETRY_STEP, Rung.RESET_DEVICE, Rung.SWAP_DEVICE, Rung.ROLL_BACK),
    "node_down": (Rung.SWAP_NODE,),
    "job_down": (Rung.RESTART_ALL,),
}


def _assumed(given: dict[str, Any], measured: dict[str, str]) -> dict[str, str]:
    """By field that the user has not given: where its value comes from."""
    if "mtbf" in given:
        given = {**given, "rate": ""}
    return {**{name: why for name, why in ASSUMED.items() if name not in given}, **measured}


def _finite(plan: Any) -> Any:
    """JSON knows no infinity: a tier that is not used has no interval."""
    value = msgspec.to_builtins(plan)
    intervals = value["planned"]["intervals"]
    value["planned"]["intervals"] = {name: s if s != float("inf") else None for name, s in intervals.items()}
    return value
