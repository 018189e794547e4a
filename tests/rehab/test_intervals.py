"""The planner's mathematics: the closed form against a search, the founding study's own cases, and what stands outside its range."""

from __future__ import annotations

import math
import random

import pytest

from rerail.errors import ConfigError
from rerail.rehab.intervals import (
    Curves,
    Risk,
    general,
    general_power,
    pcip,
    pcip_closed,
    pcip_cost,
    young,
)

HOUR = 3600.0


def curves(alpha1: float = 1e-6, tau1: float = 0.5, c: float = 600.0) -> Curves:
    """With C as given, whatever its parts are."""
    found = Curves(alpha1=alpha1, alpha2=0.7, tau1=tau1, tau2=0.2, deviation=1.0)
    return found._replace(deviation=c / found.c)


def numeric(one: Curves, rate: float, save_s: float) -> float:
    """A search of its own: over a fine grid, by the integral itself."""
    grid = [save_s / 100 * (1e8 ** (n / 40_000)) for n in range(40_000)]
    return min(grid, key=lambda tc: pcip_cost(tc, one, rate, save_s))


@pytest.mark.parametrize(
    ("changed", "mtbf_s", "save_s", "closed", "best"),
    [
        ({}, 3 * HOUR, 30.0, 2485, 2434),
        ({"tau1": 0.1}, 3 * HOUR, 30.0, 2541, 2424),
        ({}, 3 * HOUR, 3.0, 599, 596),
        ({}, 3 * HOUR, 120.0, 9123, 8240),
        ({}, 24 * HOUR, 30.0, 19211, 19114),
    ],
)
def test_cases_worked_out_elsewhere(
    changed: dict[str, float], mtbf_s: float, save_s: float, closed: float, best: float
) -> None:
    one = curves(**changed)
    assert pcip_closed(one, 1 / mtbf_s, save_s) == pytest.approx(closed, rel=2e-3)
    assert numeric(one, 1 / mtbf_s, save_s) == pytest.approx(best, rel=2e-3)


def test_the_cost_is_the_integral_that_it_stands_for() -> None:
    """Equation (15), summed up over intervals by brute force."""
    one, rate, save_s, tc = curves(c=50.0), 1 / 500.0, 10.0, 200.0
    period, dt, total = tc + save_s, 0.05, 0.0
    for n in range(round(12 / rate / dt)):
        t = (n + 0.5) * dt
        recovery = one.c * math.exp((one.alpha1 - one.tau1 / tc) * t)
        total += (int(t / period) * save_s + recovery) * rate * math.exp(-rate * t) * dt
    assert pcip_cost(tc, one, rate, save_s) == pytest.approx(total, rel=1e-3)


def test_the_closed_form_costs_at_most_two_percent_more_than_the_best_in_a_thousand_settings() -> None:
    chance, held, worst, searched = random.Random("intervals"), 0, 0.0, 0
    while held < 1000:
        rate, save_s = 1 / 10 ** chance.uniform(2.5, 6), 10 ** chance.uniform(-1, 2.5)
        one = curves(10 ** chance.uniform(-8, -3), 10 ** chance.uniform(-3, 0.7), 10 ** chance.uniform(0, 4.5))
        answer = pcip(one, rate, save_s)
        assert answer.seconds > 0 and math.isfinite(answer.cost)
        if answer.rule == "numeric":
            assert answer.why
            searched += 1
            closed = pcip_closed(one, rate, save_s)
            assert closed is None or answer.cost <= pcip_cost(closed, one, rate, save_s) * (1 + 1e-6)
            continue
        held += 1
        best = min(pcip_cost(answer.seconds * 10 ** (n / 100), one, rate, save_s) for n in range(-300, 301))
        worst = max(worst, answer.cost / best)
    assert worst <= 1.02, worst
    assert searched, "some settings lie outside its range"


@pytest.mark.parametrize(
    ("one", "rate", "save_s", "why"),
    [
        (curves(tau1=0.005), 1 / (3 * HOUR), 30.0, "no positive denominator"),
        (curves(c=60.0), 1 / (3 * HOUR), 30.0, "shorter than the time between faults"),
        (curves(c=5000.0), 1 / 1800.0, 120.0, "more than 10 times the cost"),
    ],
)
def test_outside_its_range_the_best_is_searched_for_and_that_is_said(
    one: Curves, rate: float, save_s: float, why: str
) -> None:
    answer = pcip(one, rate, save_s)
    assert answer.rule == "numeric" and why in answer.why
    assert answer.cost <= pcip_cost(numeric(one, rate, save_s), one, rate, save_s) * 1.0001


def test_where_the_loss_falls_faster_than_faults_come_intervals_have_an_upper_end() -> None:
    one = curves(alpha1=1e-3, tau1=0.2)
    answer = pcip(one, 1e-5, 5.0)
    assert answer.seconds < one.tau1 / (one.alpha1 - 1e-5) and math.isfinite(answer.cost)
    assert pcip_cost(1000.0, one, 1e-5, 5.0) == math.inf


def test_young_and_the_general_rule() -> None:
    rate = 1 / (3 * HOUR)
    assert young(rate, 30.0).seconds == pytest.approx(805, abs=1) and young(rate, 30.0).rule == "young"
    assert general([Risk(rate, 0.58)], 30.0).seconds == pytest.approx(1057, abs=1)
    assert general([Risk(rate, 0.2)], 30.0).seconds == pytest.approx(1800, abs=1)
    both = general([Risk(rate, 1.0), Risk(5 * rate, 0.0)], 30.0)
    assert both.seconds == pytest.approx(805, abs=1), "what costs nothing does not count"
    assert general([Risk(rate, 0.0)], 30.0).seconds == math.inf
    assert general_power(rate, 30.0, 1.0, 1.0).seconds == pytest.approx(young(rate, 30.0).seconds)


@pytest.mark.parametrize("power", [0.7, 1.0, 1.3])
def test_the_general_rules_are_minima_of_their_own_costs(power: float) -> None:
    rate, save_s, scale = 1e-4, 12.0, 0.3
    answer = general_power(rate, save_s, scale, power)

    def cost(tc: float) -> float:
        return save_s / (rate * tc) + scale * tc**power / (power + 1)

    assert answer.cost == pytest.approx(cost(answer.seconds))
    assert all(cost(answer.seconds * factor) > answer.cost for factor in (0.9, 1.1))


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_numbers_that_are_none_are_refused(bad: float) -> None:
    for act in (
        lambda: young(bad, 1.0),
        lambda: young(1e-4, bad),
        lambda: pcip(curves()._replace(tau1=bad), 1e-4, 1.0),
        lambda: general_power(1e-4, 1.0, bad, 1.0),
    ):
        with pytest.raises(ConfigError, match="has to be a positive number"):
            act()
    with pytest.raises(ConfigError, match="cannot have a rate"):
        general([Risk(1e-4, -0.5)], 1.0)
