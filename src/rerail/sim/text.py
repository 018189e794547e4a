"""Turns results into what people read: tables, bars, and the assumptions with their sources. Pure. Called by `cli.simulate` and the bench."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from rerail.report.text import aligned, bar
from rerail.sim.kinds import titles
from rerail.sim.policies import POLICIES
from rerail.sim.run import Result
from rerail.sim.scenario import Assumption, Scenario
from rerail.sim.sweep import Sweep
from rerail.sim.training import NOBODY

STAGES = (
    ("detect", "detect"),
    ("lost work (T0)", "T0"),
    ("reschedule (T1)", "T1"),
    ("communication (T2)", "T2"),
    ("load (T3)", "T3"),
    ("compile (T4)", "T4"),
    ("waiting for nodes", "wait"),
    ("fewer ranks", "fewer"),
    ("stopped", "stop"),
    ("planned restarts", "planned"),
    ("saving", "saving"),
)
"""Where seconds go, and the head of its column."""
PUBLISHED = (
    "beside that: more than 90 % effective training time reported for the real run (Llama 3, same size and time);",
    "97 % effective training time ratio reported by ByteRobust (9,600 devices, three months)",
)
SMALL = 0.00005


def grouped(results: Sequence[Result]) -> dict[str, list[Result]]:
    """By policy, in the order in which they come."""
    found: dict[str, list[Result]] = {}
    for result in results:
        found.setdefault(result.policy, []).append(result)
    return found


def middle(results: Sequence[Result]) -> Result:
    """The run whose goodput is the median, or the lower of the two in the middle."""
    return sorted(results, key=lambda one: one.goodput)[(len(results) - 1) // 2]


def title_of(name: str) -> str:
    return next((one.title for one in POLICIES if one.name == name), name)


def heading(scenario: Scenario, seeds: int, origin: str, swept: str = "") -> str:
    """What was simulated; `swept` is the key that has several values."""
    runs = f"{seeds} seeds, medians" if seeds > 1 else "one seed"
    spare = f" and {scenario.spare_nodes:,} spare nodes" if scenario.spare_nodes else ""
    if swept:
        return f"{origin}: goodput by {swept}, {runs}"
    return f"{origin}: {scenario.gpus:,} devices{spare}, {scenario.days:g} days, {runs}"


def table(results: Sequence[Result]) -> list[str]:
    """Policy against policy: goodput, and the rest of the time by what it went into, in percent."""
    groups = grouped(results)
    used = [(stage, name) for stage, name in STAGES if any(_share(one, stage) >= SMALL for one in results)]
    several = any(len(group) > 1 for group in groups.values())
    head = ["", "goodput", *(["range"] if several else []), "interrupted", "MTTR", *(name for _, name in used)]
    rows = [head]
    for name, group in groups.items():
        one = middle(group)
        low, high = min(r.goodput for r in group), max(r.goodput for r in group)
        rows.append(
            [
                f"{name}  {title_of(name)}",
                f"{one.goodput:.2%}",
                *([f"{low:.2%} to {high:.2%}"] if several else []),
                f"{one.interruptions}",
                _seconds(statistics.median(r.mttr_s for r in group)),
                *(_percent(_share(one, stage)) for stage, _ in used),
            ]
        )
    return aligned(rows, left={0})


def spares(results: Sequence[Result]) -> list[str]:
    """What the spare nodes cost, where there are any."""
    if not results or not results[0].spare_share:
        return []
    share, best = results[0].spare_share, max(results, key=lambda one: one.goodput)
    held = middle(grouped(results)[best.policy]).goodput_held
    return [
        f"spare nodes are {share:.1%} of all that is held; counted as if they could train: {held:.2%} for {best.policy}"
    ]


def losses(result: Result) -> list[str]:
    """Where one policy's time went, by the kind of fault, with bars."""
    names = {**titles(), NOBODY: "no fault: saving, fewer ranks"}
    rows = [(names.get(cause, cause), seconds) for cause, seconds in result.by_cause.items() if seconds > 0]
    if not rows:
        return [f"{result.policy}: nothing was lost"]
    width, largest = max(len(name) for name, _ in rows), max(seconds for _, seconds in rows)
    lost = 1 - result.goodput
    lines = [f"{result.policy} loses {lost:.2%}, {_hours(result.wall_s * lost)} of the whole job; by cause"]
    lines += [
        f"  {name:<{width}}  {seconds / result.wall_s:>7.3%}  {bar(seconds, largest)}".rstrip()
        for name, seconds in rows
    ]
    rungs = ", ".join(f"{rung.replace('_', ' ')} {count}" for rung, count in result.rungs.items())
    saves = ", ".join(f"{name} {_steps(every)}" for name, every in result.every.items())
    stops = f"; {result.stops} of them ended the job, which was started again" if result.stops else ""
    return [*lines, f"  rungs   {rungs or 'none'}{stops}", f"  saves   {saves}"]


def sweep_table(found: Sweep, unit: str) -> list[str]:
    """One line for each value, one column for each policy."""
    names = list(grouped(found.points[0].results)) if found.points else []
    rows = [[f"{found.key} ({unit})", *names]]
    for point in found.points:
        groups = grouped(point.results)
        rows.append([f"{point.value:,g}", *(f"{middle(groups[name]).goodput:.2%}" for name in names)])
    return aligned(rows, left={0})


def told(assumptions: Sequence[Assumption]) -> list[str]:
    """All assumptions, those that were given by hand first."""
    rank = ["given", "measured", "published", "derived", "assumed"]
    known = sorted(assumptions, key=lambda one: _rank(one.source, rank))
    lines, before = ["assumptions (change them with --set KEY=VALUE)"], ""
    for one in known:
        sort = one.source.split()[0].strip(":;,")
        if sort != before:
            lines.append(f"  {sort}")
            before = sort
        source = one.source[len(sort) :].lstrip(":; ") if one.source.startswith(sort) else one.source
        why = f" [{source}]" if source and sort != "given" else ""
        lines.append(f"    {one.key:<18}{_value(one):>14}  {one.about}{why}")
    return lines


def _rank(source: str, order: Sequence[str]) -> int:
    first = source.split()[0].strip(":;,")
    return order.index(first) if first in order else len(order)


def _value(one: Assumption) -> str:
    if one.unit == "yes or no":
        return "yes" if one.value else "no"
    short = {"share": "", "per 1000 device-days": "/1000 d", "per day": "/d"}.get(one.unit, f" {one.unit}")
    return f"{one.value:,g}{short}"


def _share(result: Result, stage: str) -> float:
    return result.by_stage.get(stage, 0.0) / result.wall_s


def _percent(share: float) -> str:
    return f"{share * 100:.2f}" if share >= SMALL else "-"


def _seconds(value: float) -> str:
    return f"{value:.0f} s" if value >= 10 else f"{value:.1f} s"


def _hours(seconds: float) -> str:
    return f"{seconds / 3600:,.1f} h" if seconds >= 3600 else f"{seconds:,.0f} s"


def _steps(every: float) -> str:
    return "not used" if every == float("inf") else f"every {every:,.0f} steps" if every > 1 else "every step"
