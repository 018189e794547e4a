"""Holds the planner against brute force and against change: turns random settings into how far off it is.

    python bench/planner.py [--settings 1000] [--seed 1]

1. Total cost of the planned intervals against the best of a dense grid, refined twice, evaluated by a second implementation of the
   model in numpy; and against Young and Daly's intervals for each tier.
2. A failure rate or a write speed that changes tenfold in the middle of a job: how far the interval is from the new best after
   five faults or ten saves. Faults that come at exactly their mean distance show whether the rule is right; faults that come by
   chance show what five of them can tell at all.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import statistics
import time

import numpy as np

from rerail.checkpoint.schedule import Costs, Planned
from rerail.planner.model import SCOPES, Hazard, Problem, Tier, waste, young_s
from rerail.planner.optimise import LONGEST, best, young
from rerail.planner.outlook import look_ahead
from rerail.planner.rates import usual
from rerail.session.foresight import RECENT, Foresight

POINTS = 40


def setting(rng: random.Random) -> Problem:
    """One to three tiers and one to four kinds of faults, over many orders of magnitude."""

    def between(low: float, high: float) -> float:
        return math.exp(rng.uniform(math.log(low), math.log(high)))

    scopes = sorted(rng.sample(range(3), rng.randint(1, 3)) or [2])
    scopes[-1] = 2
    tiers, stall = [], between(1e-3, 1.0)
    for n, scope in enumerate(scopes):
        of = tiers[-1].name if tiers and rng.random() < 0.5 else ""
        tiers.append(
            Tier(
                name=f"t{n}",
                stall_s=stall,
                save_s=stall * between(1, 100),
                restore_s=between(0.1, 300),
                survives=SCOPES[scope],
                shortest_s=between(0.01, 10),
                of=of,
            )
        )
        stall *= between(1, 30)
    hazards = tuple(
        Hazard(
            name=f"h{n}",
            rate=between(1e-7, 1e-3),
            scope=rng.choice(SCOPES),
            down_s=between(0.1, 600),
            rho=rng.choice((1.0, 1.0, rng.random())),
        )
        for n in range(rng.randint(1, 4))
    )
    return Problem(tiers=tuple(tiers), hazards=hazards)


def wasted(problem: Problem, grid: list[np.ndarray]) -> np.ndarray:
    """The model once more, for all combinations of intervals at a time."""
    shape = np.broadcast_shapes(*(axis.shape for axis in grid))
    real: dict[str, np.ndarray] = {}
    for tier, axis in zip(problem.tiers, grid, strict=True):
        own = np.broadcast_to(axis, shape)
        real[tier.name] = np.maximum(own, real[tier.of]) if tier.of else own
    stalls = sum(tier.stall_s / real[tier.name] for tier in problem.tiers)
    choice, helpless = {}, np.zeros(shape, dtype=bool)
    for hazard in problem.hazards:
        prices = [
            np.where(
                np.isfinite(real[t.name]) & (SCOPES.index(t.survives) >= SCOPES.index(hazard.scope)),
                hazard.rho * (real[t.name] / 2 + t.save_s) + t.restore_s,
                np.inf,
            )
            for t in problem.tiers
        ]
        helpless |= np.isinf(np.min(prices, axis=0)) if hazard.rho else False
        choice[hazard.name] = np.argmin(prices, axis=0) if hazard.rho else np.full(shape, -1)
    extra = np.zeros(shape)
    with np.errstate(over="ignore", invalid="ignore"):
        for index, tier in enumerate(problem.tiers):
            mine = {h.name: choice[h.name] == index for h in problem.hazards}
            rate = sum(h.rate * mine[h.name] for h in problem.hazards)
            x = np.where(
                rate > 0, rate * np.where(np.isfinite(real[tier.name]), real[tier.name], 0.0) * (1 + stalls), 0.0
            )
            small = x < 1e-4
            lost = np.where(small, x / 2 + x * x / 6, np.expm1(x) / np.where(small, 1.0, x) - 1)
            for h in problem.hazards:
                often = h.rate * (1 + h.rho * lost)
                again = h.rho * (
                    np.where(rate > 0, h.rate / np.where(rate > 0, rate, 1.0), 0.0) * lost + often * tier.save_s
                )
                extra += np.where(mine[h.name], again + often * (h.down_s + tier.restore_s), 0.0)
    for hazard in problem.hazards:
        if not hazard.rho:
            extra += hazard.rate * hazard.down_s
    wall = (1 + stalls) * (1 + extra)
    return np.where(np.isfinite(wall) & ~helpless, 1 - 1 / wall, 1.0)


def brute_force(problem: Problem) -> float:
    """The least that any combination loses: a grid over everything, then twice around the best."""
    rates = [h.rate for h in problem.hazards if h.rho > 0]
    longest = LONGEST / min(rates) if rates else 1e9
    ranges = [(math.log(t.floor_s), math.log(max(longest, t.floor_s * 1.001))) for t in problem.tiers]
    last = len(problem.tiers) - 1
    lowest, centre = math.inf, [0.0] * (last + 1)
    for never in itertools.product(*([False, True] if n < last else [False] for n in range(last + 1))):
        limits = ranges
        for _ in range(3):
            axes = [
                np.array([math.inf]) if gone else np.exp(np.linspace(*limit, POINTS))
                for limit, gone in zip(limits, never, strict=True)
            ]
            grid = np.meshgrid(*axes, indexing="ij", sparse=True)
            found = wasted(problem, list(grid))
            place = np.unravel_index(int(np.argmin(found)), found.shape)
            lowest = min(lowest, float(found[place]))
            centre = [math.log(axis[i]) if math.isfinite(axis[i]) else 0.0 for axis, i in zip(axes, place, strict=True)]
            width = [(high - low) / (POINTS - 1) * 1.5 for low, high in limits]
            limits = [(max(r[0], c - w), min(r[1], c + w)) for c, w, r in zip(centre, width, ranges, strict=True)]
    return lowest


def against_brute_force(count: int, seed: int) -> None:
    rng = random.Random(seed)
    above, over_young, seconds, differ = [], [], [], 0.0
    for _ in range(count):
        problem = setting(rng)
        began = time.perf_counter()
        planned = best(problem)
        seconds.append(time.perf_counter() - began)
        lowest = brute_force(problem)
        axes = [np.array([planned.intervals[tier.name]]) for tier in problem.tiers]
        differ = max(differ, abs(float(wasted(problem, axes)[0]) - planned.waste.total))
        above.append(planned.waste.total / lowest - 1)
        over_young.append(planned.waste.total / waste(problem, young(problem)).total - 1)
    above.sort()
    within = sum(one <= 0.02 for one in above) / count
    print(f"{count} settings, seed {seed}; the two implementations of the model differ by {differ:.1e} at most")
    print(
        f"planned against brute force: within 2 % in {within:.1%}; median {statistics.median(above):+.3%}, worst {above[-1]:+.2%}"
    )
    print(
        f"planned against Young and Daly for each tier: worst {max(over_young):+.3%}, median {statistics.median(over_young):+.2%}"
    )
    print(f"time to plan: median {statistics.median(seconds) * 1e3:.0f} ms, longest {max(seconds) * 1e3:.0f} ms")


def after_a_change(seed: int) -> None:
    rng, prior, stall, mean = random.Random(seed), usual(8), 1.0, 2000.0
    rule = Planned(overhead=1.0)

    def interval(lost: list[float]) -> float:
        outlook = look_ahead([], lost, 0.0, lost[-1], prior)
        return rule.steps(Costs(step_s=0.001, stall_s=stall, save_s=0.1, mtbf_s=outlook.lost.between_s())) * 0.001

    def times(gaps: list[float]) -> list[float]:
        return list(itertools.accumulate(gaps))

    print("\ninterval after a tenfold change, against the best for what is true now")
    for factor, words in ((10.0, "ten times as many faults"), (0.1, "a tenth of the faults")):
        goal = young_s(stall, mean / factor)
        even = interval(times([mean] * 30 + [mean / factor] * 5)) / goal - 1
        chance = []
        for _ in range(1000):
            gaps = [rng.expovariate(1 / mean) for _ in range(30)]
            gaps += [rng.expovariate(factor / mean) for _ in range(5)]
            chance.append(interval(times(gaps)) / goal - 1)
        chance.sort()
        ideal = sorted(math.sqrt(sum(rng.expovariate(1.0) for _ in range(5)) / 5) - 1 for _ in range(1000))
        print(
            f"  {words}, after 5 of them: {even:+.1%} where they come evenly; by chance, of 1,000 runs: median "
            f"{statistics.median(chance):+.1%}, half of them between {chance[250]:+.0%} and {chance[750]:+.0%} "
            f"(knowing when it changed: {ideal[250]:+.0%} and {ideal[750]:+.0%})"
        )
    for factor, words in ((10.0, "ten times as slow a store"), (0.1, "ten times as fast a store")):
        saved = [8.0] * 30 + [8.0 * factor * rng.uniform(0.8, 1.2) for _ in range(10)]
        foresight = Foresight()
        foresight.stalled(1e-4)
        costs = foresight.costs([0.01] * 64, saved[-RECENT:])
        true = costs._replace(save_s=8.0 * factor)
        off = Planned().steps(costs) / Planned().steps(true) - 1
        print(f"  {words}, after 10 saves whose times differ by up to 20 %: {off:+.1%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    against_brute_force(args.settings, args.seed)
    after_a_change(args.seed)


if __name__ == "__main__":
    main()
