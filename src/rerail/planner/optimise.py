"""How far apart the saves of each tier should be: turns a Problem into the intervals that lose least, and says why. Pure.

Begins with Young's interval of each tier for the faults that only it, or it first, outlives; then one tier after the other is
moved to where the whole loses least, until nothing moves any more. A tier that is not worth its stalls is left out.
Used by `rerail plan`, by the simulator and by the checkpoint schedule of a running job.
"""

from __future__ import annotations

import math

import msgspec

from rerail.planner.model import SCOPES, Problem, Tier, Waste, effective, outlives, waste, young_s
from rerail.planner.search import least

ROUNDS = 12
LONGEST = 20.0
"""Times the mean time between faults: nobody waits longer for a save."""
SAME = 1e-5
"""A change of the loss that nobody cares for."""


class Planned(msgspec.Struct, frozen=True, kw_only=True):
    """An answer."""

    intervals: dict[str, float]
    """Seconds of training between two saves, by tier; infinite: not worth it."""
    waste: Waste
    why: dict[str, str]
    """By tier."""


def young(problem: Problem) -> dict[str, float]:
    """Each tier for itself: the root of twice the cost of a save times the time between faults that it is the first to outlive."""
    found = {}
    for tier in problem.tiers:
        rate = _rate_for(problem, tier)
        ideal = young_s(tier.stall_s, 1 / rate) if rate > 0 else _longest(problem)
        found[tier.name] = min(max(ideal, tier.floor_s), max(_longest(problem), tier.floor_s))
    return effective(problem, found)


def best(problem: Problem) -> Planned:
    """The intervals that lose least."""
    problem.check()
    start = young(problem)
    found = min((_descend(problem, one) for one in _starts(problem, start)), key=lambda one: waste(problem, one).total)
    hopeless = waste(problem, found).total >= 1
    for tier in sorted(problem.tiers, key=lambda t: -t.stall_s) if not hopeless else ():
        without = {**found, tier.name: math.inf}
        if waste(problem, without).total <= waste(problem, found).total * (1 + SAME) and len(problem.tiers) > 1:
            found = _descend(problem, without)
    found, lost = effective(problem, found), waste(problem, found)
    return Planned(intervals=found, waste=lost, why={t.name: _why(problem, t, found, lost) for t in problem.tiers})


def _starts(problem: Problem, start: dict[str, float]) -> list[dict[str, float]]:
    """Where to begin: as each tier would have it alone, all as tight as can be, and without each of them."""
    starts = [start, {tier.name: tier.floor_s for tier in problem.tiers}]
    starts += [{**start, tier.name: math.inf} for tier in problem.tiers if len(problem.tiers) > 1]
    return starts


def _descend(problem: Problem, start: dict[str, float]) -> dict[str, float]:
    found, before = dict(start), math.inf
    for _ in range(ROUNDS):
        for tier in problem.tiers:
            if math.isfinite(found[tier.name]):
                found[tier.name] = _least(problem, found, tier)
        now = waste(problem, found).total
        if before - now <= SAME * max(now, 1e-12):
            break
        before = now
    return found


def _least(problem: Problem, intervals: dict[str, float], tier: Tier) -> float:
    """The best interval of one tier, the others staying as they are."""

    def cost(seconds: float) -> float:
        return waste(problem, {**intervals, tier.name: seconds}).total

    found = least(cost, tier.floor_s, max(_longest(problem), tier.floor_s * 1.001), marks=48, closer=32)
    return min((found, intervals[tier.name]), key=cost)


def _longest(problem: Problem) -> float:
    rates = [hazard.rate for hazard in problem.hazards if hazard.rate > 0 and hazard.rho > 0]
    return LONGEST / min(rates) if rates else 1e9


def _rate_for(problem: Problem, tier: Tier) -> float:
    """Faults that this tier outlives and no smaller one does."""
    mine = SCOPES.index(tier.survives)
    smaller = [other for other in problem.tiers if SCOPES.index(other.survives) < mine]
    return sum(
        hazard.rate * hazard.rho
        for hazard in problem.hazards
        if outlives(tier, hazard) and not any(outlives(other, hazard) for other in smaller)
    )


_IDLE = "nothing is recovered from it"


def _why(problem: Problem, tier: Tier, intervals: dict[str, float], lost: Waste) -> str:
    interval = intervals[tier.name]
    if not math.isfinite(interval):
        return "not used: its saves would cost more than they are worth beside the other tiers"
    uses = [name for name, source in lost.source.items() if source == tier.name]
    if not uses:
        later = [t.name for t in problem.tiers if t.of == tier.name and math.isfinite(intervals[t.name])]
        return f"nothing is recovered from it; saves to {' and '.join(later)} are made from it" if later else _IDLE
    faults = ", ".join(uses)
    if tier.of and interval <= intervals[tier.of] * 1.01:
        return f"with every save to {tier.of}; for {faults}"
    if interval <= tier.floor_s * 1.01:
        reason = "a save takes that long" if tier.save_s >= tier.shortest_s else "that is the shortest interval"
        return f"as often as it can be: {reason}; for {faults}"
    share = 100 * tier.stall_s / interval
    return (
        f"its saves cost {share:.2g} % of the time, which more or fewer of them would not make up for after: {faults}"
    )
