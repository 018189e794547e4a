"""What faults and saves cost together: turns tiers, hazards and the intervals between saves into the share of time that is lost. Pure.

A tier keeps state, and outlives faults up to a scope: a snapshot in memory the end of a process, a copy on another node the
end of a node, a store beside the cluster everything. A hazard is one kind of fault with its rate. When it strikes, the job
stands still for `down_s`, loads from the tier that is cheapest of those that outlive it, and computes again what came
after that tier's last save:

    useful seconds : wall seconds  =  1 : (1 + c)(1 + sum over tiers of  rho a + rate (1 + rho a) (down + restore + rho save))

with c = sum of stall / interval, a = expm1(x)/x - 1, x = rate * interval * (1 + c), and rate, rho, down as means over the hazards
that load from the tier. For one tier and one hazard this is the exact mean for exponential faults that come while it works; for
several it adds what each loses.

Used by `planner.optimise`, by the simulator and by `rerail plan`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

from rerail.errors import ConfigError

REPLICA = "replica"
"""What is recovered from where another rank holds the same state: no tier."""
SCOPES = ("process", "node", "job")
"""What a fault takes with it, smallest first: one process with its device; a node with its memory and disks; every node."""


class Tier(msgspec.Struct, frozen=True, kw_only=True):
    """One place where state is kept."""

    name: str
    stall_s: float
    """What a save costs the training."""
    save_s: float
    """From its beginning until it can be counted on; no more than one at a time."""
    restore_s: float
    """What it takes to go on from it."""
    survives: str
    """The largest scope that it outlives."""
    of: str = ""
    """The tier that its saves are made from, so that they cannot come more often; empty: from the training itself."""
    shortest_s: float = 0.0
    """Nothing is gained by saving more often: a step, or what the user has set."""

    @property
    def floor_s(self) -> float:
        """The shortest interval that is possible."""
        return max(self.save_s, self.shortest_s, 1e-6)


class Hazard(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of fault."""

    name: str
    rate: float
    """Per second, of the whole job."""
    scope: str
    down_s: float = 0.0
    """Detection, T1, T2 and T4: whatever a repair costs besides loading and computing again."""
    rho: float = 1.0
    """Share of the work since the last save that is lost in the end: 1 where it is computed again, 0 where a replica has it."""


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be planned for."""

    tiers: tuple[Tier, ...]
    hazards: tuple[Hazard, ...]

    def check(self) -> None:
        """Refuse what has no meaning, by the name of its field."""
        if not self.tiers:
            raise ConfigError("a plan needs at least one tier to save to")
        for tier in self.tiers:
            for name in ("stall_s", "save_s", "restore_s", "shortest_s"):
                _insist(f"tier {tier.name}: {name}", getattr(tier, name), "a number of seconds, 0 or more")
            if tier.survives not in SCOPES:
                raise ConfigError(f"tier {tier.name}: survives is {tier.survives!r}; it is one of {', '.join(SCOPES)}")
            before = [other.name for other in self.tiers[: self.tiers.index(tier)]]
            if tier.of and tier.of not in before:
                raise ConfigError(
                    f"tier {tier.name}: of is {tier.of!r}; tiers before it are {', '.join(before) or 'none'}"
                )
        for hazard in self.hazards:
            _insist(f"hazard {hazard.name}: rate", hazard.rate, "a number of faults per second, 0 or more")
            _insist(f"hazard {hazard.name}: down_s", hazard.down_s, "a number of seconds, 0 or more")
            if not 0 <= hazard.rho <= 1:
                raise ConfigError(f"hazard {hazard.name}: rho is {hazard.rho}; it is a share, between 0 and 1")
            if hazard.scope not in SCOPES:
                raise ConfigError(f"hazard {hazard.name}: scope is {hazard.scope!r}; it is one of {', '.join(SCOPES)}")


class Waste(msgspec.Struct, frozen=True, kw_only=True):
    """Shares of the wall time, all of it between 0 and 1."""

    saving: float = 0.0
    again: dict[str, float] = {}
    """Work that is computed again, by hazard."""
    down: dict[str, float] = {}
    """Standing still, by hazard: until it is found, repaired and loaded."""
    source: dict[str, str] = {}
    """The tier that each hazard is recovered from, or `replica`; empty: nothing is left of what was done."""
    total: float = 0.0

    @property
    def goodput(self) -> float:
        """What is left for the training."""
        return 1.0 - self.total


def young_s(cost_s: float, mtbf_s: float) -> float:
    """Young's interval, in seconds."""
    return math.sqrt(2 * cost_s * mtbf_s)


def outlives(tier: Tier, hazard: Hazard) -> bool:
    """Whether what the tier keeps is still there after such a fault."""
    return SCOPES.index(tier.survives) >= SCOPES.index(hazard.scope)


def effective(problem: Problem, intervals: Mapping[str, float]) -> dict[str, float]:
    """The same, where no tier is saved to more often than the one it is made from."""
    found: dict[str, float] = {}
    for tier in problem.tiers:
        found[tier.name] = max(intervals[tier.name], found.get(tier.of, 0.0))
    return found


def source_of(problem: Problem, hazard: Hazard, intervals: Mapping[str, float]) -> Tier | None:
    """The tier that is the cheapest to go on from after such a fault; None: a replica has it, or nothing has."""
    if hazard.rho == 0:
        return None
    kept = [tier for tier in problem.tiers if outlives(tier, hazard) and math.isfinite(intervals[tier.name])]
    return min(kept, key=lambda t: hazard.rho * (intervals[t.name] / 2 + t.save_s) + t.restore_s, default=None)


def waste(problem: Problem, intervals: Mapping[str, float]) -> Waste:
    """What is lost with these seconds of training between two saves of each tier; infinite: it is never saved to."""
    intervals = effective(problem, intervals)
    stalls = sum(tier.stall_s / intervals[tier.name] for tier in problem.tiers)
    again: dict[str, float] = {}
    down: dict[str, float] = {}
    source: dict[str, str] = {}
    groups: dict[str, list[Hazard]] = {}
    for hazard in problem.hazards:
        tier = source_of(problem, hazard, intervals)
        if tier is None and hazard.rho > 0 and hazard.rate > 0:
            return Waste(total=1.0)  # it loses everything, again and again
        source[hazard.name] = tier.name if tier is not None else REPLICA if hazard.rho == 0 else ""
        groups.setdefault(source[hazard.name], []).append(hazard)
        down[hazard.name] = hazard.rate * hazard.down_s
    for tier in problem.tiers:
        mine = groups.get(tier.name, [])
        rate = sum(hazard.rate for hazard in mine)
        lost = _again(rate * intervals[tier.name] * (1 + stalls)) if rate > 0 else 0.0
        for hazard in mine:
            share = hazard.rate / rate if rate > 0 else 0.0
            often = hazard.rate * (1 + hazard.rho * lost)  # what is computed again can be hit, too
            again[hazard.name] = hazard.rho * (share * lost + often * tier.save_s)
            down[hazard.name] = often * (hazard.down_s + tier.restore_s)
    extra = sum(again.values()) + sum(down.values())
    if not math.isfinite(extra):
        return Waste(total=1.0)
    wall = (1 + stalls) * (1 + extra)
    return Waste(
        saving=stalls / wall,
        again={name: value * (1 + stalls) / wall for name, value in again.items()},
        down={name: value * (1 + stalls) / wall for name, value in down.items()},
        source=source,
        total=1 - 1 / wall,
    )


def _again(x: float) -> float:
    """expm1(x)/x - 1: how much longer a stretch takes that begins anew at every fault, x of which are expected in it."""
    if x < 1e-4:
        return x / 2 + x * x / 6
    return math.expm1(x) / x - 1 if x < 500 else math.inf


def _insist(what: str, value: float, wanted: str) -> None:
    if not (math.isfinite(value) and value >= 0):
        raise ConfigError(f"{what} is {value}; it has to be {wanted}")
