"""Rates of faults: what is usual, what was seen, and what has changed."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rerail.errors import ConfigError
from rerail.planner.rates import DAY_S, estimate, learnt, usual
from rerail.planner.spares import worth
from rerail.planner.standbys import standbys

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


@pytest.mark.parametrize("ran", [40.0, HOUR, DAY_S])
def test_of_a_journal_every_fault_moves_the_estimate_by_a_like_amount(ran: float) -> None:
    """What is usual is far away: a few faults tell more and more, and none of them everything."""
    found = [learnt([ran / max(n, 1)] * n, 0.0 if n else ran, usual(2)) for n in range(12)]
    between = [one.between_s for one in found]
    assert between == sorted(between, reverse=True) and between[0] == pytest.approx(1 / usual(2), rel=0.1)
    far = math.log(between[0] / ran)
    assert all(math.log(more / less) < 0.75 * far for more, less in itertools.pairwise(between))
    assert between[-1] == pytest.approx(ran / 11, rel=0.2)
    assert all(1 / one.high < one.between_s < 1 / one.low for one in found)
    assert found[1].high / found[1].low > 100 > 10 > found[11].high / found[11].low, "how sure it is shows"


def test_of_a_journal_time_without_faults_counts_and_so_does_a_change() -> None:
    assert learnt([], 1e9, usual(2)).between_s > 2 / usual(2)
    changed = learnt([1000.0] * 20 + [100.0] * 8, 0.0, 1 / 1000)
    assert changed.between_s == pytest.approx(100.0, rel=0.3) and changed.faults == 8 and "changed" in changed.why


@settings(deadline=None, max_examples=40)
@given(st.lists(st.floats(0, 1e9), max_size=40), st.floats(0, 1e9), st.floats(1e-12, 1e3))
def test_of_whatever_journal_there_is_a_rate(gaps: list[float], since: float, prior: float) -> None:
    found = learnt(gaps, since, prior)
    assert 0 < found.low <= found.per_s <= found.high < math.inf


def test_a_job_waits_for_a_node_no_longer_than_it_lasts() -> None:
    whole = worth(1, 1e-5, DAY_S, elastic=False)
    short = worth(1, 1e-5, DAY_S, elastic=False, length_s=HOUR)
    long = worth(1, 1e-5, DAY_S, elastic=False, length_s=1000 * DAY_S)
    assert short.short == pytest.approx(1e-5 * HOUR / 2, rel=0.02)
    assert long.short == pytest.approx(whole.short, rel=0.01)


def test_standbys_are_held_where_ranks_are_lost_faster_than_one_is_warm() -> None:
    seldom, usually = standbys(1, 1e-9, 10.0, 1e-7), standbys(1, 1e-5, 10.0, 1e-7)
    often, spread = standbys(1, 0.05, 10.0, 1e-7), standbys(1000, 0.05, 10.0, 1e-7)
    assert (seldom.count, usually.count) == (0, 1) and 1 <= spread.count < often.count
    assert "less than it costs" in seldom.why and "too seldom for one more" in usually.why
    assert standbys(1, 0.0, 10.0, 1e-7).count == 0


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
