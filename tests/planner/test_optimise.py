"""The planner's intervals against brute force, and its model against a fault-by-fault simulation."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rerail.errors import ConfigError
from rerail.planner.model import SCOPES, Hazard, Problem, Tier, waste
from rerail.planner.optimise import best, young


def tier(name: str = "disk", **changes: object) -> Tier:
    return Tier(**{"name": name, "stall_s": 1.0, "save_s": 5.0, "restore_s": 3.0, "survives": "job", **changes})  # type: ignore[arg-type]


def hazard(name: str = "fault", **changes: object) -> Hazard:
    return Hazard(**{"name": name, "rate": 1e-4, "scope": "node", "down_s": 20.0, **changes})  # type: ignore[arg-type]


def seconds(low: float, high: float) -> st.SearchStrategy[float]:
    return st.floats(math.log(low), math.log(high)).map(math.exp)


problems = st.builds(
    lambda stalls, rates: Problem(
        tiers=tuple(
            tier(f"tier{n}", stall_s=stall, save_s=stall * 5, survives=scope)
            for n, (stall, scope) in enumerate(zip(sorted(stalls), SCOPES[-len(stalls) :], strict=True))
        ),
        hazards=tuple(
            hazard(f"fault{n}", rate=rate, scope=scope)
            for n, (rate, scope) in enumerate(zip(rates, SCOPES, strict=False))
        ),
    ),
    st.lists(seconds(1e-3, 30), min_size=1, max_size=3),
    st.lists(seconds(1e-7, 1e-4), min_size=1, max_size=3),
)


@settings(deadline=None, max_examples=60)
@given(problems, st.randoms(use_true_random=False))
def test_no_other_intervals_lose_less(problem: Problem, rng: random.Random) -> None:
    found = best(problem)
    assert found.waste.total <= waste(problem, young(problem)).total * (1 + 1e-9)
    for _ in range(200):
        other = {
            t.name: max(t.floor_s, found.intervals[t.name] * 10 ** rng.uniform(-1.5, 1.5))
            if math.isfinite(found.intervals[t.name])
            else math.inf
            for t in problem.tiers
        }
        assert waste(problem, other).total >= found.waste.total * (1 - 1e-3), (found, other)


def test_the_shares_add_up_to_the_whole() -> None:
    problem = Problem(tiers=(tier(),), hazards=(hazard(), hazard("other", rate=5e-5, rho=0.2)))
    lost = waste(problem, {"disk": 300.0})
    assert lost.saving + sum(lost.again.values()) + sum(lost.down.values()) == pytest.approx(lost.total)


def test_a_single_tier_gives_young_where_faults_are_rare() -> None:
    problem = Problem(tiers=(tier(save_s=0.0),), hazards=(hazard(rate=1e-6, down_s=0.0),))
    assert best(problem).intervals["disk"] == pytest.approx(math.sqrt(2 * 1.0 / 1e-6), rel=0.01)


@pytest.mark.parametrize(("rate", "interval"), [(1e-4, 200.0), (1e-3, 300.0), (2e-3, 1000.0)])
def test_the_model_is_what_comes_out_when_faults_are_thrown_one_by_one(rate: float, interval: float) -> None:
    one = tier(stall_s=2.0, save_s=0.0, restore_s=7.0)
    problem = Problem(tiers=(one,), hazards=(hazard(rate=rate, down_s=13.0),))
    rng = random.Random(5)
    wall, saves = 0.0, 20_000
    for _ in range(saves):  # an interval and its save begin anew at every fault; faults come while it works
        while (left := rng.expovariate(rate)) < interval + 2.0:
            wall += left + 20.0
        wall += interval + 2.0
    assert waste(problem, {"disk": interval}).goodput == pytest.approx(saves * interval / wall, rel=0.02)


def test_each_fault_is_recovered_from_what_outlives_it() -> None:
    memory = tier("memory", stall_s=0.01, save_s=0.1, restore_s=0.1, survives="process")
    problem = Problem(
        tiers=(memory, tier()),
        hazards=(hazard("crash", scope="process"), hazard("node"), hazard("copy", scope="node", rho=0.0)),
    )
    found = best(problem)
    assert found.waste.source == {"crash": "memory", "node": "disk", "copy": "replica"}
    assert found.intervals["memory"] < found.intervals["disk"]


def test_a_tier_that_is_not_worth_it_is_left_out_and_says_so() -> None:
    dear = tier("dear", stall_s=50.0, survives="job")
    found = best(Problem(tiers=(tier(survives="node"), dear), hazards=(hazard(),)))
    assert math.isinf(found.intervals["dear"])
    assert found.why["dear"].startswith("not used")


def test_nothing_outlives_the_fault() -> None:
    problem = Problem(tiers=(tier(survives="process"),), hazards=(hazard(),))
    assert best(problem).waste.total == 1.0


@pytest.mark.parametrize(
    ("problem", "words"),
    [
        (Problem(tiers=(), hazards=()), "at least one tier"),
        (Problem(tiers=(tier(stall_s=-1.0),), hazards=()), "tier disk: stall_s is -1.0"),
        (Problem(tiers=(tier(save_s=math.nan),), hazards=()), "tier disk: save_s is nan"),
        (Problem(tiers=(tier(survives="fire"),), hazards=()), "survives is 'fire'; it is one of process, node, job"),
        (Problem(tiers=(tier(),), hazards=(hazard(rate=-1e-3),)), "hazard fault: rate is -0.001"),
        (Problem(tiers=(tier(),), hazards=(hazard(rho=1.5),)), "rho is 1.5; it is a share"),
        (Problem(tiers=(tier(),), hazards=(hazard(scope="x"),)), "scope is 'x'"),
    ],
)
def test_what_has_no_meaning_is_refused_by_name(problem: Problem, words: str) -> None:
    with pytest.raises(ConfigError, match=words.replace("(", r"\(")):
        best(problem)
