"""`rerail plan`: how often to save where, how many spares to hold, and what is left for the training. On paper, or from a job's journal.

Called by `cli.main`.
"""

from __future__ import annotations

import argparse
import math
import re
import tomllib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import msgspec

from rerail.cli.plan_journal import Learnt, from_journal
from rerail.cli.plan_view import reference, render
from rerail.errors import ConfigError, UsageError
from rerail.planner.paper import ASSUMED, START, Answer, Job, answer
from rerail.planner.units import quantity, shown
from rerail.wording import guess

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
    "bytes_per_param": ("bytes", "bytes to save for each parameter, optimizer included"),
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
    "warm": ("duration", "until a standby process is warm"),
    "standby_share": ("share", "of the time: what a standby on each node costs"),
}
MAY_BE_ZERO = (
    "node_share",
    "job_share",
    "process_down",
    "node_down",
    "job_down",
    "stall_share",
    "noise_share",
    "standby_share",
)


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
    given |= {name: text for name in (*FIELDS, "elastic") if (text := getattr(args, name)) is not None}
    if "mtbf" in given and "rate" in given:
        raise ConfigError(f"mtbf is {shown(given['mtbf'])} and rate {shown(given['rate'])}; one of them says it all")
    values, told = _values(given), from_journal(args.journal) if args.journal else None
    if told is not None:
        told = told.scaled(values.get("gpus", told.world))
    measured = _unsaid(told, given) if told is not None else {}
    job = _job({**{name: told.values[name] for name in measured}, **values} if told is not None else values)
    plan, assumed = answer(job), {**_assumed({*values, *measured}), **measured}
    between = (1 / told.rate.high, 1 / told.rate.low) if told is not None and "mtbf" in measured else None
    decisions = told.decisions if told is not None else []
    if args.json:
        print(_as_json(job, plan, assumed, between, decisions))
    else:
        print(render(job, plan, assumed, between, decisions))
    return 0


def _unsaid(told: Learnt, given: Mapping[str, Any]) -> dict[str, str]:
    """By field that is taken from the journal, because the user has not given it: what it rests on."""
    overruled = {*given, *(("mtbf",) if "rate" in given else ())}
    return {name: why for name, why in told.why.items() if name in told.values and name not in overruled}


def _as_json(
    job: Job, plan: Answer, assumed: dict[str, str], between: tuple[float, float] | None, decisions: list[str]
) -> str:
    told = {"nodes": job.nodes, "state": job.state, "write": job.write_speed, "read": job.read_speed}
    told |= {"mtbf": 1 / job.faults_s, "per_node": math.ceil(job.gpus / job.nodes)}
    whole = {"job": {**msgspec.to_builtins(job), **told}, "plan": _finite(plan), "assumed": assumed}
    whole |= {"mtbf_between": between, "decisions": decisions}
    return msgspec.json.encode(whole).decode()


def _values(given: Mapping[str, Any]) -> dict[str, Any]:
    """What the user has given, as numbers."""
    values: dict[str, Any] = {}
    for name, text in given.items():
        if name == "elastic":
            if not isinstance(text, bool):
                raise ConfigError(f"elastic is {shown(text)}; true or false is needed")
            values[name] = text
        else:
            values[name] = quantity(name, text, FIELDS[name][0], zero=name in MAY_BE_ZERO)
    return values


def _job(values: Mapping[str, Any]) -> Job:
    for name in ("gpus", "params"):
        if name not in values:
            raise UsageError(f"--{name} is missing", hint="rerail plan --gpus 1024 --params 70e9 --write 20GB/s")
    return Job(**values)


def _from_file(path: Path) -> dict[str, Any]:
    try:
        given = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # no TOML, no UTF-8, a number of thousands of digits
        raise UsageError(f"{path} is no TOML file: {error}") from error
    for name in given:
        if name not in FIELDS and name != "elastic":
            hint = guess(name, FIELDS) or f"; at the top of the file stand {', '.join(list(FIELDS)[:6])} and the like"
            raise ConfigError(f"{path}: {name} is not known{hint}")
    return given


def _assumed(known: Collection[str]) -> dict[str, str]:
    """By field that nobody has given: where its value comes from."""
    return {
        name: why for name, why in ASSUMED.items() if name not in known and not (name == "rate" and "mtbf" in known)
    }


def _finite(plan: Any) -> Any:
    """JSON knows no infinity: a tier that is not used has no interval."""
    value = msgspec.to_builtins(plan)
    intervals = value["planned"]["intervals"]
    value["planned"]["intervals"] = {
        name: s if s != float("inf") else None for name, s in intervals.items() if name != START
    }
    return value
