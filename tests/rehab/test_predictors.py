"""Guesses of a lost tensor: right where the movement is known, the newest version where nothing can be said, never not a number."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rerail.errors import StateError
from rerail.rehab.choosing import choose
from rerail.rehab.denoise import bands, on_even_grid
from rerail.rehab.drift import Score, score, shared_drift
from rerail.rehab.predictors import LeastSquares, Linear, Predictor, Stale, Times, Window
from rerail.rehab.vitp import LARGEST, Vitp

SIZE = 4000
EVERYONE: list[Predictor] = [Stale(), Linear(), Linear("over 2", 2), LeastSquares(), Vitp(), Vitp(target="drift")]


def moving(kept: tuple[float, ...], wanted: float, noise: float, seed: int = 0) -> tuple[Window, torch.Tensor]:
    """A tensor that drifts steadily, each kept version with noise of its own; and where it is at the wanted moment."""
    chance = torch.Generator().manual_seed(seed)
    drift, start = torch.randn(SIZE, generator=chance), torch.randn(SIZE, generator=chance)
    rows = [start + t * drift + noise * torch.randn(SIZE, generator=chance) for t in kept]
    return Window(torch.stack(rows), Times(kept, wanted)), start + wanted * drift


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).norm())


@pytest.mark.parametrize("predictor", [Linear(), Linear("over 2", 2), LeastSquares()])
def test_what_moves_steadily_is_found_exactly_however_uneven_the_times(predictor: Predictor) -> None:
    window, true = moving((0.0, 1.0, 3.0, 3.5), 5.0, noise=0.0)
    assert distance(predictor.predict(*window), true) < 1e-3 * distance(window.rows[-1], true)


@pytest.mark.parametrize("predictor", EVERYONE, ids=lambda one: one.name)
@pytest.mark.parametrize("kept", [(0.0, 1.0), (0.0, 1.0, 2.0), (0.0, 0.0, 0.0), (1.0, 2.0, 4.0, 4.0, 9.0)])
def test_nobody_ever_guesses_a_number_that_is_none(predictor: Predictor, kept: tuple[float, ...]) -> None:
    window, _ = moving(kept, 10.0, noise=0.1)
    if len(kept) >= predictor.needs:
        assert torch.isfinite(predictor.predict(*window)).all()


def test_a_tensor_that_stood_still_is_left_where_it_is() -> None:
    rows = torch.ones(4, 10)
    for predictor in EVERYONE:
        assert torch.equal(predictor.predict(rows, Times((0.0, 1.0, 2.0, 3.0), 4.0)), rows[-1])


def test_what_is_kept_is_not_changed_by_a_guess() -> None:
    window, _ = moving((0.0, 1.0, 2.0), 3.0, noise=0.1)
    before = window.rows.clone()
    for predictor in EVERYONE:
        predictor.predict(*window).zero_()
    assert torch.equal(window.rows, before)


# --- denoising ---


@settings(deadline=None)
@given(st.integers(2, 9), st.integers(0, 100))
def test_the_bands_add_up_to_the_whole(count: int, seed: int) -> None:
    window, _ = moving(tuple(float(t) for t in range(count)), float(count), noise=1.0, seed=seed)
    found = bands(*window)
    assert torch.allclose(found.base + found.pattern + found.noise, window.rows, atol=1e-4)


def test_a_straight_line_is_all_base_and_what_flips_every_time_is_all_noise() -> None:
    times = Times(tuple(map(float, range(8))), 8.0)
    line = torch.arange(8.0)[:, None] * torch.ones(1, 3)
    assert float(bands(line, times).pattern.abs().max()) < 1e-5
    assert float(bands(line, times).noise.abs().max()) < 1e-5
    # on a line that begins and ends at the same point the fastest there is
    flips = torch.tensor([0.0, 1.0, -1.0, 1.0, -1.0, 1.0, -1.0, 0.0])[:, None]
    found = bands(flips, times)
    assert float(found.noise.norm()) > 0.9 * float(flips.norm())


def test_uneven_times_are_put_on_a_line() -> None:
    kept = (0.0, 1.0, 4.0)
    rows = torch.tensor(kept)[:, None] * torch.tensor([[1.0, -2.0]])
    assert torch.allclose(on_even_grid(rows, kept), torch.tensor([[0.0, 0.0], [2.0, -4.0], [4.0, -8.0]]))


# --- drift, and who is chosen ---


def test_the_drift_is_found_under_noise_that_is_larger() -> None:
    window, _ = moving(tuple(map(float, range(8))), 8.0, noise=2.0)
    found = shared_drift(*window)
    assert found is not None
    assert found.squared / SIZE == pytest.approx(1.0, rel=0.25), "each element drifts by a number of variance 1"


def test_too_few_versions_tell_nothing_of_a_drift() -> None:
    window, _ = moving((0.0, 1.0, 2.0), 3.0, noise=0.1)
    assert shared_drift(*window) is None
    assert score(window.rows[-2], *window) == Score()
    assert Score().cost == 1.0


def test_straight_on_is_chosen_where_all_is_drift_and_nothing_where_all_is_noise() -> None:
    kept = tuple(map(float, range(6)))
    steady, _ = moving(kept, 6.0, noise=0.05)
    assert choose([steady]).predictor.name == "linear"
    chance = torch.Generator().manual_seed(1)
    noise = Window(torch.randn(6, SIZE, generator=chance), Times(kept, 6.0))
    chosen = choose([noise])
    assert chosen.predictor.name == "stale"
    assert "stale 1.00" in chosen.why


@pytest.mark.parametrize("count", [4, 5, 6])
def test_pure_noise_is_told_apart_as_a_rule_and_four_versions_tell_nothing(count: int) -> None:
    taken = 0
    for seed in range(40):
        rows = torch.randn(count, SIZE, generator=torch.Generator().manual_seed(seed))
        found = choose([Window(rows, Times(tuple(map(float, range(count))), float(count)))])
        taken += found.predictor.name == "linear"
    assert taken <= (0 if count == 4 else 6), f"{taken} of 40"


def test_with_too_little_to_tell_what_is_kept_is_used() -> None:
    window, _ = moving((0.0, 1.0), 2.0, noise=0.0)
    assert choose([window], [Linear(), LeastSquares()]).predictor.name == "stale"
    assert choose([]).predictor.name == "stale"


def test_more_noise_over_a_longer_reach_is_less() -> None:
    window, _ = moving(tuple(map(float, range(8))), 8.0, noise=1.0)
    costs = choose([window], [Linear(), Linear("over 3", 3)]).costs
    assert costs["over 3"] < costs["linear"]


# --- the net ---


def test_a_net_learns_the_drift_that_it_is_shown() -> None:
    window, true = moving(tuple(map(float, range(7))), 7.0, noise=0.5)
    net = Vitp(seed=1)
    net.train([window], steps=120)
    assert net.loss < 0.8
    assert distance(net.predict(*window), true) < 0.8 * distance(window.rows[-1], true)
    assert net.losses == [net.loss]


def test_towards_drift_it_supplies_more_of_it_than_least_squares_do() -> None:
    window, true = moving(tuple(map(float, range(8))), 8.0, noise=1.5)
    found = {}
    for target in ("next", "drift"):
        net = Vitp(target=target, seed=1)
        net.train([window], steps=120)
        net.tune([window])
        drift = (true - window.rows[-1]).double()
        moved = (net.predict(*window) - window.rows[-1]).double()
        found[target] = float(moved @ drift)
    assert found["drift"] >= found["next"] > 0


def test_before_it_has_learnt_anything_it_leaves_things_as_they_are() -> None:
    window, _ = moving((0.0, 1.0, 2.0), 3.0, noise=0.1)
    assert torch.equal(Vitp().predict(*window), window.rows[-1])


def test_with_two_versions_there_is_nothing_to_learn_from() -> None:
    window, _ = moving((0.0, 1.0), 2.0, noise=0.1)
    with pytest.raises(StateError, match="needs 3 kept versions"):
        Vitp().train([window])


def test_a_target_that_there_is_not_is_an_error() -> None:
    with pytest.raises(StateError, match="'nxt'"):
        Vitp(target="nxt")


def test_the_net_is_small() -> None:
    net = Vitp()
    size = sum(one.numel() * 4 for one in net._net.parameters())
    assert 4 * size < LARGEST / 100, "with its gradients and moments"
    assert math.isnan(net.loss)


def test_to_learn_and_to_guess_draws_nothing_from_the_trainings_own_chance() -> None:
    window, _ = moving(tuple(map(float, range(6))), 6.0, noise=0.5)
    torch.manual_seed(7)
    before = torch.get_rng_state()
    for target in ("next", "drift"):
        net = Vitp(target=target)
        net.train([window], steps=3)
        net.tune([window])
        net.towards("drift").predict(*window)
        choose([window], [Linear(), net])
    assert torch.equal(torch.get_rng_state(), before)


def test_what_is_learnt_bit_by_bit_is_what_is_learnt_at_once() -> None:
    window, _ = moving(tuple(map(float, range(6))), 6.0, noise=0.5)
    nets = [Vitp(seed=1), Vitp(seed=1)]
    nets[0].train([window], steps=5)
    bits = sum(1 for _ in nets[1].learning([window], steps=5, part=1024))
    assert bits >= 5 * 8
    assert torch.allclose(nets[0].vector(), nets[1].vector(), atol=1e-5)


def test_what_one_has_learnt_another_can_have() -> None:
    window, _ = moving(tuple(map(float, range(6))), 6.0, noise=0.5)
    first, second = Vitp(seed=1), Vitp(seed=2)
    first.train([window], steps=20)
    second.adopt(first.vector())
    assert torch.equal(first.predict(*window), second.predict(*window))
