"""The two numbers of a falling loss, and how sure they are."""

from __future__ import annotations

import math
import random

import pytest

from rerail.rehab.fitter import LEAST, Fitter, fit

TIMES = [float(t) for t in range(60)]


def losses(slope: float, noise: float, seed: int = 0) -> list[float]:
    chance = random.Random(seed)
    return [math.exp(1.5 - slope * t + chance.gauss(0, noise)) for t in TIMES]


def test_what_was_put_in_comes_out() -> None:
    found = fit(TIMES, losses(0.02, 0.0))
    assert found is not None
    assert (found.slope, found.offset) == (pytest.approx(0.02), pytest.approx(1.5))
    assert found.at(10.0) == pytest.approx(math.exp(1.3))
    assert found.falls


def test_the_error_holds_what_is_true_in_about_95_of_100() -> None:
    held = 0
    for seed in range(200):
        found = fit(TIMES, losses(0.01, 0.2, seed))
        assert found is not None
        held += abs(found.slope - 0.01) <= 1.96 * found.error
    assert held >= 176, "less than 88 of 100"


def test_chance_alone_does_not_count_as_falling() -> None:
    flat = [fit(TIMES, losses(0.0, 0.2, seed)) for seed in range(100)]
    assert sum(found.falls for found in flat if found is not None) <= 10


def test_numbers_that_are_none_are_left_out_and_too_few_are_no_fit() -> None:
    good = losses(0.02, 0.0)
    broken = [math.nan, math.inf, 0.0, -1.0, *good[4:]]
    found = fit(TIMES, broken)
    assert found is not None and found.points == len(good) - 4
    assert fit(TIMES[: LEAST - 1], good[: LEAST - 1]) is None
    assert fit([1.0] * 20, good[:20]) is None, "no time between them"


def test_every_phase_is_fitted_by_itself() -> None:
    fitter = Fitter(phase=20)
    for t in range(19):
        fitter.add(t, math.exp(-0.1 * t))
    assert fitter.curve is None, "the phase is not over"
    fitter.add(19, math.exp(-0.1 * 19))
    assert fitter.curve is not None and fitter.curve.slope == pytest.approx(0.1)
    for t in range(20, 40):
        fitter.add(t, math.exp(-0.01 * t))
    assert fitter.curve.slope == pytest.approx(0.01)
    for t in range(40, 60):
        fitter.add(t, math.nan)
    assert fitter.curve.slope == pytest.approx(0.01), "a phase that cannot be fitted leaves the one before"
