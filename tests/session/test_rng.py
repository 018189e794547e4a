"""Every generator goes on exactly where it was, however it was drawn from before."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy
import pytest
import torch

from rerail.session import rng


def draw() -> list[float]:
    return [
        random.random(),
        random.gauss(0, 1),
        float(torch.rand(1)),
        float(numpy.random.rand()),
        float(numpy.random.randn()),
    ]


@pytest.mark.parametrize(
    "before",
    [
        lambda: None,
        lambda: numpy.random.randn(),  # keeps a number back
        lambda: numpy.random.randn(2),
        lambda: (numpy.random.randn(), rng.capture(), numpy.random.randn()),  # gives it out without a new draw
        lambda: numpy.random.seed(7),
        lambda: random.gauss(0, 1),
    ],
)
def test_draws_after_a_restore_are_those_after_the_capture(before: Callable[[], object]) -> None:
    rng.capture()
    before()
    state = rng.capture()
    wanted = draw()
    rng.restore(state)
    assert draw() == wanted
    rng.restore(state)
    assert rng.capture() == state


@pytest.mark.parametrize(
    "draw_one",
    [
        lambda: random.random(),
        lambda: [random.random() for _ in range(624)],  # the position is back where it was, the words are not
        lambda: random.seed(5),
        lambda: random.gauss(0, 1),
        lambda: torch.rand(1),
        lambda: torch.manual_seed(99),
        lambda: torch.randn(1),
        lambda: torch.rand(624),
        lambda: torch.set_rng_state(torch.Generator().manual_seed(3).get_state()),
        lambda: numpy.random.rand(),
        lambda: [numpy.random.bytes(4) for _ in range(624)],
        lambda: numpy.random.seed(8),
    ],
)
def test_a_state_is_the_same_object_until_something_is_drawn(draw_one: Callable[[], object]) -> None:
    random.seed(1)
    numpy.random.seed(1)
    first = rng.capture()
    assert rng.capture() is first
    draw_one()
    assert rng.capture() != first
    assert rng.capture() is rng.capture()


def test_torchs_generator_is_known_again_by_what_lies_in_memory() -> None:
    """Also where a normal number is given out that was kept back, and no new word is drawn."""
    assert rng._torch_view is not None, "torch keeps its generator in another way; rerail asks for all of it instead"
    torch.manual_seed(4)
    draws: list[Callable[[], object]] = [
        lambda: torch.randn(1),
        lambda: torch.rand(3),
        lambda: torch.randn(1, dtype=torch.float64),
        lambda: torch.rand(623),
        lambda: torch.randperm(10),
        lambda: None,
    ]
    for number in range(400):
        draws[number * 7 % 11 % len(draws)]()
        assert rng.capture().torch_cpu == bytes(torch.get_rng_state().numpy())


def test_pythons_state_is_read_from_memory_and_means_the_same() -> None:
    for _ in range(700):  # past the end of its words, where they are made anew
        assert rng._from_memory() == rng._by_asking()
        random.random()
    assert rng._python_words is rng._from_memory
