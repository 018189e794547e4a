"""`rerail plan`: how often to save where, how many spares to hold, and what is left for the training. On paper, or from a job's journal.

Called by `cli.main`.
"""

from __future__ import annotations

import argparse
import math
import re
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec

from rerail.cli.plan_view import reference, render
from rerail.errors import ConfigError, UsageError
from rerail.flow import Recovery, Rung, Signal
from rerail.planner.outlook import rate_of
from rerail.planner.paper import ASSUMED, Job, answer
from rerail.planner.rates import usual
from rerail.planner.units import quantity
from rerail.report.accounts import NO_FAULTS, accounts
from rerail.report.partition import Cause
from rerail.report.summary import find_run, reading, reports
from rerail.runtime.journal import FILE_NAME
from rerail.wording import counted, guess

FIELDS = {
    "gpus": ("count", "devices of the job"),
    "params": ("count", "parameters of the model: 405e9, 70B"),
    "mtbf": ("duration", "time between two faults of the whole job: 3.1h"),
    "rate": ("rate", "faults per 1,000 devices and day, where mtbf is not known"),
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
PLANNED, DECISIONS = "checkpoint.planned", 5
SOME = 5
"""Faults from which a journal's own rate is believed, changes of it included."""
USUAL = Job(gpus=1, params=1)
MAY_BE_ZERO = ("node_share", "job_share", "process_down", "node_down", "job_down", "stall_share", "noise_share")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser._negative_number_matcher = re.compile(r"-\.?\d")  # -1GB/s is a value, and a wrong one
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
    decisions: list[str] = []
    if args.journal:
        found, measured, decisions = _from_journal(args.journal)
        given = {**found, **given}
    given |= {name: text for name in (*FIELDS, "elastic") if (text := getattr(args, name)) is not None}
    if given.get("mtbf") and "rate" in given and "mtbf" not in measured:
        raise ConfigError(f"mtbf is {given['mtbf']!r} and rate {given['rate']!r}; one of them says it all")
    job = _job(given)
    plan = answer(job)
    if args.json:
        told = {"nodes": job.nodes, "state": job.state, "write": job.write_speed, "read": job.read_speed}
        told |= {"mtbf": 1 / job.faults_s, "per_node": math.ceil(job.gpus / job.nodes)}
        whole = {"job": {**msgspec.to_builtins(job), **told}, "plan": _finite(plan)}
        whole |= {"assumed": _assumed(given, measured), "decisions": decisions}
        print(msgspec.json.encode(whole).decode())
    else:
        print(render(job, plan, _assumed(given, measured)))
        print(
            "\n".join(["", "what the job itself has planned:", *decisions]) if decisions else "",
            end="\n" * bool(decisions),
        )
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
            hint = guess(name, FIELDS) or f"; at the top of the file stand {', '.join(list(FIELDS)[:6])} and the like"
            raise ConfigError(f"{path}: {name} is not known{hint}")
    return given


def _from_journal(job: str) -> tuple[dict[str, Any], dict[str, str], list[str]]:
    """What a job has measured itself: its faults, what its repairs took, and how it has planned."""
    folder = _folder(job)
    with reading(folder) as journal:
        told = [report for report in reports(journal) if report.attempts and report.code not in NO_FAULTS]
        whole = accounts(journal, folder.name)
        planned = [s for s in journal.records(kind="signal") if isinstance(s, Signal) and s.source == PLANNED]
        repairs = [one for one in journal.records(kind="recovery") if isinstance(one, Recovery)]
        nodes = Counter(str(place[0]) for place in journal.state().get("placement") or ())
    if whole is None or not whole.wall_s:
        raise UsageError(f"the journal in {folder} tells of nothing: the job has not begun to train")
    world, ran = nodes.total(), whole.wall_s - whole.parts[Cause.OFF]
    # pieces in which the job did not run at all are left out of the time in which it could have failed
    off = [piece for piece in whole.pieces if piece.cause is Cause.OFF]
    faults = [report.at - whole.begin - sum(one.seconds for one in off if one.end <= report.at) for report in told]
    ran, prior = max(ran, *faults, 1e-3), usual(max(1, world))
    between = (ran + 1 / prior) / (len(told) + 1)
    if len(told) > 1:
        between = min(between, ran / (len(told) - 1))
    if len(told) >= SOME:
        between = 1 / rate_of([max(0.0, at) for at in faults], 0.0, ran, prior).mean
    found: dict[str, Any] = {"mtbf": between}
    why = {"mtbf": f"{counted(len(told), 'fault')} in the journal of {folder.name}, and what is usual"}
    taken = sum(report.rung is Rung.SWAP_NODE or report.code == "node.lost" for report in told)
    found["node_share"] = (taken + USUAL.node_share * prior * ran) / max(len(told), prior * ran)
    why["node_share"] = f"{taken} of {len(told)} there, and what is usual"
    if any(source.startswith("replica") for one in repairs for source in one.sources.values()):
        found["replicas"] = 2
        why["replicas"] = f"ranks of {folder.name} were restored from replicas; at least two"
    if world:
        found |= {"gpus": world, "per_node": max(nodes.values())}
        why |= dict.fromkeys(("gpus", "per_node"), f"ranks in the journal of {folder.name}")
    for name, rungs in _RUNGS.items():
        mine = [report.cost for report in told if report.rung in rungs and report.ok]
        if mine:
            found[name] = sum(cost.detect + cost.t1 + cost.t2 + cost.t4 for cost in mine) / len(mine)
            why[name] = f"mean of {len(mine)} in the journal of {folder.name}"
    if planned and float(planned[-1].payload.get("step_s", 0.0)) > 0:
        found["step"] = float(planned[-1].payload["step_s"])
        why["step"] = f"measured by {folder.name}"
    words = [f"  step {one.step}: {one.payload.get('message', '')}" for one in planned[-DECISIONS:]]
    return found, why, words


def _folder(job: str) -> Path:
    """By its name, its run directory, or the journal itself."""
    path = Path(job)
    path = path.parent if path.name == FILE_NAME else path
    return find_run("", str(path)) if path.is_dir() or "/" in job else find_run(job)


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
