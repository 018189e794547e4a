"""The numbers of a run: sick ones are seen in the number of steps that is promised, healthy ones never are."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from math import exp, inf, nan

import pytest

from rerail.diagnose.health import Health, HealthWatch

BEGIN = 1000
"""Where trouble begins in most of these runs."""


def losses(steps: int, noise: float, seed: int, power: float = 0.12, floor: float = 1.7) -> list[float]:
    """A power law, from 11 down to the floor, with noise."""
    rng = random.Random(seed)
    return [(floor + (11.0 - floor) * (step + 1) ** -power) * exp(rng.gauss(0.0, noise)) for step in range(steps)]


def jitter(steps: int, sigma: float, seed: int) -> list[float]:
    rng = random.Random(seed)
    return [exp(rng.gauss(0.0, sigma)) for _ in range(steps)]


def of_losses(values: Iterable[float | None]) -> list[Health]:
    watch = HealthWatch()
    return [one for step, loss in enumerate(values) for one in watch.take(step, loss, None)]


def of_norms(values: Iterable[float]) -> list[Health]:
    watch = HealthWatch()
    return [one for step, norm in enumerate(values) for one in watch.take(step, None, norm)]


def of_seconds(values: Iterable[float]) -> list[Health]:
    watch = HealthWatch()
    return [one for step, seconds in enumerate(values) for one in watch.take(step, None, None, step_s=seconds)]


def kinds(found: Sequence[Health]) -> list[tuple[str, bool]]:
    return [(one.kind, one.begins) for one in found]


# --- nothing is wrong ---


@pytest.mark.parametrize(
    ("noise", "power", "floor"), [(0.01, 0.07, 1.7), (0.05, 0.12, 1.7), (0.1, 0.5, 0.0), (0.15, 1.0, 1.7)]
)
def test_a_falling_noisy_loss_with_single_bad_batches_and_restarts_of_the_learning_rate(
    noise: float, power: float, floor: float
) -> None:
    rng, steps = random.Random(1), 20_000 if noise == 0.05 else 5_000
    values = losses(steps, noise, 2, power, floor)
    for step in range(steps):
        since = step % 2000
        if step >= 2000:  # the restart raises the loss by 15 % within some steps
            values[step] *= 1 + 0.15 * (1 - exp(-since / 20)) * exp(-since / 400)
        if rng.random() < 0.01:
            values[step] *= 3.0
    assert of_losses(values) == []


def test_heavy_tailed_gradient_norms() -> None:
    rng = random.Random(3)
    norms = [
        (1 + 5 * exp(-step / 200)) * exp(rng.gauss(0, 0.4)) * (20 if rng.random() < 0.01 else 1) for step in range(5000)
    ]
    assert of_norms(norms) == []


@pytest.mark.parametrize(("seconds", "sigma"), [(0.3, 0.2), (5.0, 0.1), (30.0, 0.2)])
def test_uneven_steps_with_a_slow_start_spikes_and_checkpoints(seconds: float, sigma: float) -> None:
    rng = random.Random(4)
    values = [seconds * one * (5 if rng.random() < 0.01 else 1) for one in jitter(5000, sigma, 5)]
    values = [value * (4 if step % 50 == 49 else 20 if step < 3 else 1) for step, value in enumerate(values)]
    assert of_seconds(values) == []


def test_a_constant_loss_is_healthy_and_so_is_no_number_at_all() -> None:
    assert of_losses([0.0] * 500) == [] and of_losses([2.5] * 500) == [] and of_losses([None] * 500) == []
    assert of_norms([0.0] * 500) == []


def test_negative_losses_fall_too() -> None:
    assert of_losses([-0.01 * step + one for step, one in enumerate(jitter(2000, 0.2, 6))]) == []


# --- not a number ---


@pytest.mark.parametrize("bad", [nan, inf, -inf])
def test_what_is_not_finite_is_seen_at_once_and_over_after_ten_finite_steps(bad: float) -> None:
    watch = HealthWatch()
    assert watch.take(0, 2.0, 1.0) == []
    (found,) = watch.take(1, bad, 1.0)
    assert (found.kind, found.step, found.begins, found.expected) == ("nan", 1, True, 2.0)
    assert found.value == bad or found.value != found.value
    assert watch.take(2, 2.0, bad) == [] and watch.take(3, None, None) == []
    ends = [one for step in range(4, 20) for one in watch.take(step, 2.0, 1.0)]
    assert [(one.kind, one.step, one.begins) for one in ends] == [("nan", 13, False)]
    assert kinds(watch.take(20, 2.0, bad)) == [("nan", True)]


def test_not_finite_in_the_very_first_step() -> None:
    assert kinds(HealthWatch().take(0, nan, None)) == [("nan", True)]


# --- the loss ---


@pytest.mark.parametrize("noise", [0.01, 0.05])
def test_a_spike_is_seen_at_its_fifth_step_and_ends_soon_after(noise: float) -> None:
    for seed in range(3):
        values = losses(2 * BEGIN, noise, seed)
        values[BEGIN : BEGIN + 60] = [2.0 * value for value in values[BEGIN : BEGIN + 60]]
        found = of_losses(values)
        assert kinds(found) == [("loss_spike", True), ("loss_spike", False)]
        assert BEGIN + 4 <= found[0].step <= BEGIN + 7 and BEGIN + 60 <= found[1].step < BEGIN + 68
        assert found[0].value > 1.5 * found[0].expected


def test_a_spike_that_takes_thirty_steps_to_rise() -> None:
    values = losses(1200, 0.05, 1)
    values[BEGIN:] = [value * (1 + min(1.0, step / 30)) for step, value in enumerate(values[BEGIN:])]
    found = of_losses(values)
    assert found[0].kind == "loss_spike" and found[0].step < BEGIN + 30


def test_a_spike_while_the_loss_still_falls_steeply() -> None:
    values = losses(400, 0.02, 1, power=0.5)
    values[100:140] = [3.0 * value for value in values[100:140]]
    found = of_losses(values)
    assert kinds(found) == [("loss_spike", True), ("loss_spike", False)] and found[0].step <= 107


def test_four_bad_batches_in_a_row_are_no_spike() -> None:
    values = losses(2 * BEGIN, 0.03, 3)
    values[BEGIN : BEGIN + 4] = [9.0] * 4
    assert of_losses(values) == []


def test_a_level_that_stays_is_a_divergence_and_no_longer_a_spike() -> None:
    values = losses(3 * BEGIN, 0.03, 3)
    values[BEGIN:] = [1.8 * value for value in values[BEGIN:]]
    found = of_losses(values)
    assert kinds(found) == [("loss_spike", True), ("loss_spike", False), ("divergence", True)]
    assert BEGIN + 250 < found[1].step < BEGIN + 270 and found[2].step < BEGIN + 600


def test_a_steady_rise_is_a_divergence_and_ends_with_it() -> None:
    for seed in range(3):
        values = losses(4 * BEGIN, 0.05, seed)
        values[BEGIN : 2 * BEGIN] = [value * (1 + step / 300) for step, value in enumerate(values[BEGIN : 2 * BEGIN])]
        found = [one for one in of_losses(values) if one.kind == "divergence"]
        assert [one.begins for one in found] == [True, False]
        far = BEGIN + 90  # where it is 30 % up
        assert far + 96 <= found[0].step <= far + 192 and 2 * BEGIN <= found[1].step < 2 * BEGIN + 64
        assert found[0].value > 1.3 * found[0].expected


def test_a_loss_on_its_way_back_is_no_divergence() -> None:
    values = losses(3 * BEGIN, 0.03, 3)
    values[BEGIN:] = [value * (1 + 2.0 * exp(-step / 500)) for step, value in enumerate(values[BEGIN:])]
    assert "divergence" not in {one.kind for one in of_losses(values)}


# --- the gradient norm ---


def test_an_explosion_is_seen_at_its_fifth_step() -> None:
    norms = jitter(2 * BEGIN, 0.4, 7)
    norms[BEGIN : BEGIN + 100] = [30.0 * norm for norm in norms[BEGIN : BEGIN + 100]]
    found = of_norms(norms)
    assert kinds(found) == [("grad_norm", True), ("grad_norm", False)] and found[0].step == BEGIN + 4
    assert 10 < found[0].value < 100 and 0.5 < found[0].expected < 2


# --- the speed ---


@pytest.mark.parametrize(("seconds", "factor", "within"), [(0.5, 1.3, 130), (10.0, 1.3, 45), (60.0, 1.5, 30)])
def test_a_decay_is_seen_after_100_steps_or_5_minutes_and_ends(seconds: float, factor: float, within: int) -> None:
    for seed in range(3):
        values = [seconds * one for one in jitter(3 * BEGIN, 0.05, seed)]
        values[BEGIN : 2 * BEGIN] = [factor * value for value in values[BEGIN : 2 * BEGIN]]
        found = of_seconds(values)
        assert kinds(found) == [("decay", True), ("decay", False)]
        assert BEGIN + 10 < found[0].step <= BEGIN + within and 2 * BEGIN < found[1].step <= 2 * BEGIN + 70
        assert found[0].value > 1.2 * found[0].expected


def test_a_short_slow_stretch_is_no_decay() -> None:
    values = jitter(2 * BEGIN, 0.05, 1)
    values[BEGIN : BEGIN + 45] = [3 * value for value in values[BEGIN : BEGIN + 45]]
    assert of_seconds(values) == []


def test_longer_samples_are_no_decay_where_tokens_are_counted() -> None:
    watch, found = HealthWatch(), []
    for step, one in enumerate(jitter(2 * BEGIN, 0.05, 1)):
        seconds = one * (2.0 if step >= BEGIN else 1.0)
        found += watch.take(step, None, None, tokens_per_s=1000.0 / one, step_s=seconds)
    assert found == []
    for step, one in enumerate(jitter(BEGIN, 0.05, 2)):
        found += watch.take(2 * BEGIN + step, None, None, tokens_per_s=700.0 / one, step_s=2.0 * one)
    assert kinds(found) == [("decay", True)]


def test_all_kinds_at_once() -> None:
    watch, found = HealthWatch(), []
    for step, one in enumerate(jitter(600, 0.03, 1)):
        bad = 4.0 if step >= 400 else 1.0
        found += watch.take(step, bad * one, nan if step == 500 else 10 * bad * one, step_s=bad * one)
    assert {one.kind for one in found if one.begins} == {"nan", "loss_spike", "decay"}


def test_a_spike_tells_when_all_was_last_well_and_going_back_makes_it_never_have_been() -> None:
    watch, values = HealthWatch(), losses(400, 0.02, 5)

    def walk(first: int, end: int, factor: float) -> list[Health]:
        return [one for step in range(first, end) for one in watch.take(step, values[step] * factor, None)]

    assert walk(0, 200, 1.0) == []
    (found,) = walk(200, 206, 3.0)
    assert (found.kind, found.since) == ("loss_spike", 199)
    watch.went_back(198)
    assert walk(199, 260, 1.0) == [], "neither over nor begun again"
    (again,) = walk(260, 266, 3.0)
    assert again.since == 259 and again.expected < 2 * values[0]


def test_a_divergence_tells_when_all_was_last_well() -> None:
    watch = HealthWatch()
    fine = [one for step in range(320) for one in watch.take(step, 2.0, None)]
    assert fine == []
    found = [one for step in range(320, 640) for one in watch.take(step, 2.0 + 0.01 * (step - 320), None)]
    (begun,) = [one for one in found if one.kind == "divergence"]
    assert 288 <= begun.since < 400, begun
    watch.went_back(begun.since)
    assert not [one for step in range(begun.since, begun.since + 400) for one in watch.take(step, 2.0, None)]
