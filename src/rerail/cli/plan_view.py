"""Turns a plan into the lines people read. Called by `cli.plan`."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from rerail.planner.model import REPLICA, Waste
from rerail.planner.paper import START, Answer, Job
from rerail.planner.reference import PUBLISHED, Times, expected, modelled, replaced
from rerail.planner.units import duration, size
from rerail.report.text import bar
from rerail.wording import counted

WORDS = {"memory": "memory of the host", "buddy": "memory of another node", "store": "store beside the cluster"}
FOREMOST = 5


def render(
    job: Job,
    plan: Answer,
    assumed: dict[str, str],
    between: tuple[float, float] | None = None,
    decisions: Sequence[str] = (),
) -> str:
    """The plan in a few lines, then what it rests on. `between`: where the time between faults is with 90 %, where it was measured."""
    lines = [plan.verdict + "\n"] if plan.verdict else []
    lines += [f"careful: {one}\n" for one in plan.warnings]
    process, lost, spares = 1 - job.node_share - job.job_share, plan.planned.waste, plan.spares
    sure = f" (90 %: {duration(between[0])} to {duration(between[1])})" if between is not None else ""
    held = f"{counted(spares.count, 'node')} beside {counted(job.nodes, 'node')}"
    lines += [
        f"faults    one every {duration(1 / job.faults_s)}{sure}, {_often(plan.faults_per_day)}: {process:.0%} leave the host "
        f"alive, {job.node_share:.0%} take a node, {job.job_share:.0%} everything",
        f"state     {size(job.state)}, {size(job.device_state)} on each of {job.gpus:,.0f} devices",
        *_tiers(plan),
        f"recover   {_sources(lost)}",
        f"spares    {held}: {spares.why}",
        f"standbys  {plan.standbys.count} on each node: {plan.standbys.why}",
        f"goodput   {plan.goodput:.2%}; with hourly checkpoints that hold the training up, and restarts of all: "
        f"{plan.usually:.2%}",
        "",
        *_losses(lost, spares.short),
    ]
    lines += ["", "assumed, unless it is given:"]
    width = max((len(name) for name in assumed), default=0)
    lines += [f"  {name:<{width}}  {_value(job, name):<10}  {why}" for name, why in assumed.items()]
    lines += ["", "what the job itself has planned:", *decisions] if decisions else []
    return "\n".join([*lines, "more: rerail simulate · rerail plan --reference · rerail plan --journal JOB"])


def _often(per_day: float) -> str:
    """`7.7 a day`, `470 a day`, `1.3 a year`: whatever is a number that people know."""
    for times, name in ((1.0, "day"), (7.0, "week"), (365.25, "year")):
        if per_day * times >= 1 or name == "year":
            often = per_day * times
            return (
                f"{often:,.0f} a {name}" if often >= 10 else f"{often:.2g} a {name}" if often >= 1e-3 else "hardly ever"
            )
    raise AssertionError("a year is the last")


def _sources(lost: Waste) -> str:
    """Which fault is recovered from where."""
    found: dict[str, list[str]] = {}
    for hazard, source in lost.source.items():
        found.setdefault(source, []).append(hazard)
    named = {**WORDS, REPLICA: "a replica", START: "the start: the job begins anew", "": "nothing"}
    return "; ".join(f"{', '.join(hazards)} from {named.get(one, one)}" for one, hazards in found.items())


def _tiers(plan: Answer) -> list[str]:
    lines: list[str] = []
    for name, seconds in plan.planned.intervals.items():
        if name != START:
            every = f"every {duration(seconds)}" if seconds != float("inf") else "never"
            head = "" if lines else "save"
            lines.append(f"{head:<10}{WORDS.get(name, name):<26}{every:<16}{plan.planned.why[name]}")
    return lines


def _losses(lost: Waste, short: float) -> list[str]:
    """Where the rest goes, largest first."""
    parts = {"saving": lost.saving, "waiting for nodes": short * lost.goodput}
    parts |= {f"{name}: computed again": share for name, share in lost.again.items()}
    parts |= {f"{name}: standing still": share for name, share in lost.down.items()}
    order = sorted(parts.items(), key=lambda one: -one[1])
    foremost = [*order[:FOREMOST], ("everything else", sum(share for _, share in order[FOREMOST:]))]
    largest = max(foremost[0][1], 1e-12)
    # bars of report.text show nothing below 0.005: here that is what is shown as 0.000 %
    return [f"  {name:<36}{share:>8.3%}  {bar(1000 * share, 1000 * largest)}".rstrip() for name, share in foremost]


def _value(job: Job, name: str) -> str:
    value = getattr(job, name)
    if name in ("write", "read") and not value:
        return f"{size(job.write_speed if name == 'write' else job.read_speed)}/s"
    if name == "per_node" and not value:
        return f"{math.ceil(job.gpus / job.nodes)}"
    if name in ("write", "read", "copy", "net"):
        return f"{size(value)}/s"
    if name in ("mtbf", "step", "length", "repair", "warm") or name.endswith("_down"):
        return duration(value)
    if name.endswith("_share"):
        return (
            f"{100 * value:.2g} %"
            if value >= 1e-4 or not value
            else "0.00001 %"
            if value == 1e-7
            else f"{100 * value:.0e} %"
        )
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


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
        "Flush and restart without loading are straight lines through these two sizes, and so meet them. Load is bytes over speed: the",
        "smaller one's came out of memory (3 s), the larger one's reached 3.4 GB/s of the store's 4.8 (90 s, not 63.3).",
        "fault at best: T of one fault where saves follow each other without a pause, T0 being half of a flush.",
        "rerail's figures follow from bytes and speeds, and from times measured on one H200 and in the soak",
        "(docs/benchmarks.md); they were not measured on that server.",
    ]
    return "\n".join(lines)
