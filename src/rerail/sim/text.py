"""Turns results into what people read: tables, bars, and the assumptions with their sources. Pure. Called by `cli.simulate` and the bench."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

import msgspec

from rerail.planner.rates import DAY_S
from rerail.planner.units import duration
from rerail.report.text import aligned, bar
from rerail.sim.kinds import titles
from rerail.sim.policies import POLICIES, Plan
from rerail.sim.run import Result
from rerail.sim.scenario import Assumption, Scenario
from rerail.sim.sweep import Sweep
from rerail.sim.training import NOBODY
from rerail.wording import counted

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
SMALL, ZERO = 0.00005, 0.000005
"""Shares that are shown as a dash, and as 0.000 %."""
YES_NO = "yes or no"


def grouped(results: Sequence[Result]) -> dict[str, list[Result]]:
    """By policy, in the order in which they come."""
    found: dict[str, list[Result]] = {}
    for result in results:
        found.setdefault(result.policy, []).append(result)
    return found


def middle(results: Sequence[Result]) -> Result:
    """The run whose goodput is the median; of an even number the mean of the two in the middle, so that its parts still add up."""
    order = sorted(results, key=lambda one: one.goodput)
    low, high = order[(len(order) - 1) // 2], order[len(order) // 2]
    if low is high:
        return low
    return msgspec.structs.replace(
        low,
        productive_s=(low.productive_s + high.productive_s) / 2,
        by_stage=_mean(low.by_stage, high.by_stage),
        by_cause=_mean(low.by_cause, high.by_cause),
        rungs={name: round(count) for name, count in _mean(low.rungs, high.rungs).items()},
        interruptions=round((low.interruptions + high.interruptions) / 2),
        stops=round((low.stops + high.stops) / 2),
        mtbf_s=(low.mtbf_s + high.mtbf_s) / 2,
        mttr_s=(low.mttr_s + high.mttr_s) / 2,
        every=_mean(low.every, high.every),
    )


def _mean(one: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
    """Of each, the largest first."""
    found = {name: (one.get(name, 0.0) + other.get(name, 0.0)) / 2 for name in {**one, **other}}
    return dict(sorted(found.items(), key=lambda part: -part[1]))


def title_of(name: str) -> str:
    return next((one.title for one in POLICIES if one.name == name), name)


def heading(scenario: Scenario, seeds: int, origin: str, swept: str = "") -> str:
    """What was simulated; `swept` is the key that has several values."""
    runs = f"{seeds} seeds, medians" if seeds > 1 else "one seed"
    spare = f" and {scenario.spare_nodes:,} spare nodes" if scenario.spare_nodes else ""
    if swept:
        return f"{origin}: goodput by {swept}, {runs}"
    return f"{origin}: {scenario.gpus:,} devices{spare}, {_long(scenario.days)}, {runs}"


def _long(days: float) -> str:
    """`54 days`, and what is less than one in smaller units."""
    return f"{days:g} days" if days == round(days, 2) and days >= 1 else duration(days * DAY_S)


def left_out(plans: Sequence[Plan], made: Sequence[Scenario]) -> list[str]:
    """What is not simulated, or not with every value of a sweep, because it cannot be had with so few nodes."""
    few = {one.name: [other for other in made if not one.feasible(other)] for one in plans}
    return [
        f"{name} is left out{' there' if len(made) > 1 else ''}: it keeps copies on other nodes, and there is only "
        f"{counted(missing[0].nodes, 'node')}"
        for name, missing in few.items()
        if missing
    ]


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
        f"  {name:<{width}}  {seconds / result.wall_s:>7.3%}  {bar(seconds, largest) if seconds / result.wall_s >= ZERO else ''}".rstrip()
        for name, seconds in rows
    ]
    rungs = ", ".join(f"{rung.replace('_', ' ')} {count}" for rung, count in result.rungs.items())
    saves = ", ".join(f"{name} {_steps(every)}" for name, every in result.every.items())
    stops = f"; {result.stops} of them ended the job, which was started again" if result.stops else ""
    return [*lines, f"  rungs   {rungs or 'none'}{stops}", f"  saves   {saves}"]


def sweep_table(found: Sweep, unit: str) -> list[str]:
    """One line for each value, one column for each policy; with several seeds from the lowest to the highest, too."""
    there = {result.policy for point in found.points for result in point.results}
    names = [one.name for one in POLICIES if one.name in there]
    switch = unit == YES_NO
    rows = [[found.key if switch else f"{found.key} ({unit})", *names]]
    for point in found.points:
        groups = grouped(point.results)
        value = ("yes" if point.value else "no") if switch else f"{point.value:,g}"
        rows.append([value, *(_goodput(groups.get(name, [])) for name in names)])
    return aligned(rows, left={0})


def _goodput(group: Sequence[Result]) -> str:
    """The middle and, of several, the range; nothing where the policy cannot be had."""
    if len(group) < 2:
        return f"{group[0].goodput:.2%}" if group else "-"
    low, high = min(one.goodput for one in group), max(one.goodput for one in group)
    return f"{middle(group).goodput:.2%} ({100 * low:.2f} to {100 * high:.2f})"


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
        lines.append(f"    {one.key:<18}{value_of(one):>24}  {one.about}{why}")
    return lines


def _rank(source: str, order: Sequence[str]) -> int:
    first = source.split()[0].strip(":;,")
    return order.index(first) if first in order else len(order)


def value_of(one: Assumption) -> str:
    """With its unit, as a person would write it."""
    if one.unit == YES_NO:
        return "yes" if one.value else "no"
    short = {"share": "", "per 1000 device-days": "/1000 device-days", "per day": "/d"}.get(one.unit, f" {one.unit}")
    if one.unit == "d" and one.value < 1:
        return duration(one.value * DAY_S)
    return f"{one.value:,g}{short}"


def _share(result: Result, stage: str) -> float:
    return result.by_stage.get(stage, 0.0) / result.wall_s


def _percent(share: float) -> str:
    return f"{share * 100:.2f}" if share >= SMALL else "-"


def _seconds(value: float) -> str:
    """Seconds as long as people think in them."""
    return duration(value) if value >= 6000 else f"{value:.0f} s" if value >= 10 else f"{value:.1f} s"


def _hours(seconds: float) -> str:
    return f"{seconds / 3600:,.1f} h" if seconds >= 3600 else f"{seconds:,.0f} s"


def _steps(every: float) -> str:
    return "not used" if every == float("inf") else f"every {every:,.0f} steps" if every > 1 else "every step"
