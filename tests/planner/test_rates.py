"""Rates of faults: what is usual, what was seen, and what has changed."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rerail.errors import ConfigError
from rerail.planner.rates import DAY_S, estimate, usual
from rerail.planner.spares import worth

HOUR = 3600.0


def test_what_is_usual_is_what_others_have_counted() -> None:
    assert 1 / usual(16_384) / HOUR == pytest.approx(3.1, rel=0.01)


def test_without_faults_a_job_is_trusted_more_and_more() -> None:
    between = [estimate([], since, usual(8)).between_s for since in (0.0, HOUR, DAY_S, 10 * DAY_S)]
    assert between == sorted(between) and between[0] < HOUR < between[-1]
    large = estimate([], 10 * DAY_S, usual(16_384)).between_s
    assert large < between[-1], "many devices are not trusted as a few are"


@pytest.mark.parametrize("times", [10.0, 0.1])
def test_a_tenfold_change_is_known_after_five_faults(times: float) -> None:
    found = estimate([1000.0] * 20 + [1000.0 / times] * 5, 0.0, 1 / 1000)
    assert found.between_s == pytest.approx(1000.0 / times, rel=0.05)
    assert "changed" in found.why and found.faults == 5


def test_faults_that_no_longer_come_are_a_change_too() -> None:
    assert estimate([100.0] * 20, 3000.0, 1 / 100).between_s > 1000


def test_chance_is_seldom_taken_for_a_change() -> None:
    rng = random.Random(7)
    found = [estimate([rng.expovariate(0.01) for _ in range(40)], 0.0, 0.01) for _ in range(300)]
    assert sum("changed" in one.why for one in found) <= 15
    within = [one.low <= 0.01 <= one.high for one in found]
    assert sum(within) >= 0.8 * len(within), "the 90 % are about 90 %"


@pytest.mark.parametrize(("shape", "words"), [(0.5, "soon followed"), (3.0, "even distances")])
def test_uneven_faults_are_found_to_be_uneven(shape: float, words: str) -> None:
    rng = random.Random(3)
    found = estimate([rng.weibullvariate(1000.0, shape) for _ in range(120)], 10.0, 1 / 1000)
    assert found.shape == pytest.approx(shape, rel=0.35) and words in found.why


def test_right_after_a_fault_the_next_is_near_where_they_come_in_crowds() -> None:
    rng = random.Random(3)
    gaps = [rng.weibullvariate(1000.0, 0.4) for _ in range(100)]
    soon, later = estimate(gaps, 1.0, 1 / 1000), estimate(gaps, 2000.0, 1 / 1000)
    assert soon.per_s > 2 * later.per_s


@settings(deadline=None)
@given(st.lists(st.floats(0, 1e9), max_size=60), st.floats(0, 1e9), st.floats(1e-12, 1e3))
def test_whatever_was_seen_there_is_a_rate(gaps: list[float], since: float, prior: float) -> None:
    found = estimate(gaps, since, prior)
    assert 0 < found.per_s < math.inf and 0 <= found.low <= found.high


def test_spares_are_held_where_nodes_are_away_for_long() -> None:
    few = worth(256, 256 * 1e-8, HOUR, elastic=True)
    many = worth(256, 256 * 1e-7, 3 * DAY_S, elastic=False)
    assert few.count == 0 and many.count >= 6
    assert many.short < 0.01 and "without spares the job waits" in many.why


@pytest.mark.parametrize("mean", [100.0, 740.0, 760.0, 3000.0])
def test_spares_of_the_largest_fleets(mean: float) -> None:
    found = worth(100_000, mean / 86_400.0, DAY_S, elastic=False)
    assert mean < found.count < mean + 6 * mean**0.5 + 6
    assert found.short < 0.01 and "loses 100.00%" in found.why


@pytest.mark.parametrize(("nodes", "rate", "repair"), [(1, 0.0, 10.0), (40, 1e-5, 0.0)])
def test_nodes_that_never_are_away_need_no_spares(nodes: int, rate: float, repair: float) -> None:
    assert worth(nodes, rate, repair, elastic=False).count == 0


@pytest.mark.parametrize(("nodes", "rate", "repair"), [(0, 1.0, 1.0), (1, -1.0, 1.0), (1, 1.0, math.nan)])
def test_spares_of_nothing_are_refused(nodes: int, rate: float, repair: float) -> None:
    with pytest.raises(ConfigError, match="nodes"):
        worth(nodes, rate, repair, elastic=False)
