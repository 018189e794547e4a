"""What is not noise in the movement of a tensor: turns kept versions into the slow drift, and a guess into how much of that it supplies. Pure.

From one kept version to the next a tensor moves by drift and noise, and the noise is far larger. But noise of intervals that do not
touch has nothing in common, so the product of two such movements is, on average, the square of the drift alone:

    <d1, d3> = |drift|^2,    <guess, d> / |drift|^2 = the share of the drift that a guess supplies

That share, and not the distance to the true state, says what a guess is worth: noise is in steep directions, which the next few
steps repair; drift has to be walked again. `cost` is the guess's price against that of the newest kept version, from both.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from rerail.rehab.predictors import Times, rates

AHEAD = 2
"""Rows that are kept back for judging a guess."""
NOISE = 0.5
"""What a guess that is as long as the true movement costs by its length alone, against not moving. From trials."""


class Drift(NamedTuple):
    """By unit of time."""

    squared: float
    """Square of its length."""
    direction: torch.Tensor
    """A movement that has the drift in it, and noise that no guess can know: the newest one."""


def shared_drift(window: torch.Tensor, times: Times) -> Drift | None:
    """None: too few intervals."""
    moved = rates(window, times)
    products = [
        float(moved[a].double() @ moved[b].double()) for a in range(len(moved)) for b in range(a + 2, len(moved))
    ]
    if not products:
        return None
    return Drift(sum(products) / len(products), moved[-1])


class Score(NamedTuple):
    """Of guesses at one moment, over all tensors of a shard: add up, then ask."""

    supplied: float = 0.0
    squared: float = 0.0
    length: float = 0.0
    true_length: float = 0.0

    def __add__(self, other: object) -> Score:
        assert isinstance(other, Score), "scores are added to scores"
        return Score(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))

    @property
    def cost(self) -> float:
        """Against the newest kept version, which costs 1."""
        if self.squared <= 0 or self.true_length <= 0:
            return 1.0
        return abs(1.0 - self.supplied / self.squared) + NOISE * self.length / self.true_length


def score(guess: torch.Tensor, window: torch.Tensor, times: Times) -> Score:
    """`guess` is of the last row but one, made without the last `AHEAD` rows: it shares no noise with what came then."""
    # not from the movement that the guess is held against: by that alone any guess would look good
    drift = shared_drift(window[:-1], times.first(window.shape[0] - 1))
    if drift is None:
        return Score()
    span, then = times.spans[-3], rates(window, times)[-1]
    moved, true = guess - window[-3], window[-2] - window[-3]
    return Score(
        supplied=float(moved.double() @ then.double()) * span,
        squared=drift.squared * span * span,
        length=float(moved.double() @ moved.double()),
        true_length=float(true.double() @ true.double()),
    )
