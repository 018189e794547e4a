"""Turns a plan into the lines people read. Called by `cli.plan`."""

from __future__ import annotations

import math

import msgspec

from rerail.planner.model import Waste
from rerail.planner.paper import Answer, Job
from rerail.planner.reference import PUBLISHED, Times, expected, modelled, replaced
from rerail.planner.units import duration, size
from rerail.report.text import bar

WORDS = {"memory": "memory of the host", "buddy": "memory of another node", "store": "store beside the cluster"}
FOREMOST = 5


def render(job: Job, plan: Answer, assumed: dict[str, str]) -> str:
    """The plan in a few lines, then what it rests on."""
    lines = [plan.verdict + "\n"] if plan.verdict else []
    lost = plan.planned.waste
    process = 1 - job.node_share - job.job_share
    lines += [
        f"faults    one every {duration(1 / job.faults_s)}, {plan.faults_per_day:.2g} a day: {process:.0%} leave the host "
        f"alive, {job.node_share:.0%} take a node, {job.job_share:.0%} everything",
        f"state     {size(job.state)}, {size(job.device_state)} on each of {job.gpus:,.0f} devices",
        *_tiers(plan),
        f"spares    {plan.spares.count} of {job.nodes:,} nodes, and {plan.standbys} standby process a node: {plan.spares.why}",
        f"goodput   {plan.goodput:.2%}; with hourly checkpoints that hold the training up, and restarts of all: "
        f"{plan.usually:.2%}",
        "",
        *_losses(lost, plan.spares.short),
    ]
    lines += ["", "assumed, unless it is given:"]
    width = max((len(name) for name in assumed), default=0)
    lines += [f"  {name:<{width}}  {_value(job, name):<10}  {why}" for name, why in assumed.items()]
    return "\n".join([*lines, "more: rerail simulate · rerail plan --reference · rerail plan --journal JOB"])


def _tiers(plan: Answer) -> list[str]:
    lines = []
    for number, (name, seconds) in enumerate(plan.planned.intervals.items()):
        every = f"every {duration(seconds)}" if seconds != float("inf") else "never"
        lines.append(f"{'' if number else 'save':<10}{WORDS.get(name, name):<26}{every:<16}{plan.planned.why[name]}")
    return lines


def _losses(lost: Waste, short: float) -> list[str]:
    """Where the rest goes, largest first."""
    parts = {"saving": lost.saving, "waiting for nodes": short * lost.goodput}
    parts |= {f"{name}: computed again": share for name, share in lost.again.items()}
    parts |= {f"{name}: standing still": share for name, share in lost.down.items()}
    order = sorted(parts.items(), key=lambda one: -one[1])
    foremost = [*order[:FOREMOST], ("everything else", sum(share for _, share in order[FOREMOST:]))]
    largest = max(foremost[0][1], 1e-12)
    # bars of report.text show nothing below 0.005, which is meant for seconds
    return [f"  {name:<36}{share:>8.3%}  {bar(share / largest, 1.0)}".rstrip() for name, share in foremost]


def _value(job: Job, name: str) -> str:
    value = getattr(job, name)
    if name in ("write", "read") and not value:
        return f"{size(job.write_speed if name == 'write' else job.read_speed)}/s"
    if name == "per_node" and not value:
        return f"{math.ceil(job.gpus / job.nodes)}"
    if name in ("write", "read", "copy", "net"):
        return f"{size(value)}/s"
    if name in ("mtbf", "step", "length", "repair") or name.endswith("_down"):
        return duration(value)
    return f"{value:.3g}"


def reference(*, as_json: bool) -> str:
    """The founding reference, what the model makes of it, and rerail on the same server."""
    rows: dict[float, dict[str, Times]] = {
        params: {
            "published": published,
            "model of it": modelled(params),
            "rerail, all started anew": expected(params),
            "rerail, one rank replaced": replaced(params),
        }
        for params, published in PUBLISHED.items()
    }
    if as_json:
        return msgspec.json.encode({f"{params:g}": row for params, row in rows.items()}).decode()
    lines = ["one server, eight processors, a store that writes 2.7 GB/s and reads 4.8 GB/s; seconds", ""]
    head = ("", "flush", "detect", "handle", "restart", "of it load", "fault at best")
    lines.append(f"{head[0]:<28}" + "".join(f"{name:>14}" for name in head[1:]))
    for params, row in rows.items():
        lines.append(f"{params / 1e9:g} billion parameters")
        for name, times in row.items():
            # the shortest interval there is: one save after the other
            figures = (times.flush, times.detect, times.handle, times.restart, times.load, times.fault(times.flush))
            lines.append(f"  {name:<26}" + "".join(f"{value:>14.1f}" for value in figures))
    lines += [
        "",
        "The smaller one's load came out of memory; the model reads from the store.",
        "fault at best: T of one fault where saves follow each other without a pause, T0 being half of a flush.",
        "rerail's figures follow from bytes and speeds, and from times measured on one H200 and in the soak",
        "(docs/benchmarks.md); they were not measured on that server.",
    ]
    return "\n".join(lines)
