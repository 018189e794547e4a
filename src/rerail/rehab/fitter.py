"""How fast a loss falls: turns (time, loss) into the two numbers of exp(-slope t + offset), and how sure they are. Pure.

The founding system's Fitter: `alpha` of the training's loss by seconds, `tau` of the predictor's by checkpoints. Fitted anew at the end of
every phase, over that phase alone: a loss does not fall at one rate for a whole run. For the planner (`rehab.intervals`).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

LEAST = 8
"""Points without which there is no fit."""
SURE = 1.96
"""Standard errors to either side, for 95 of 100."""


class Curve(NamedTuple):
    """loss(t) = exp(-slope t + offset)."""

    slope: float
    offset: float
    error: float
    """Standard error of the slope."""
    points: int

    @property
    def falls(self) -> bool:
        """Whether the loss falls for sure: not merely by chance in these points."""
        return self.slope - SURE * self.error > 0

    def at(self, time: float) -> float:
        return math.exp(self.offset - self.slope * time)


def fit(times: Sequence[float], losses: Sequence[float]) -> Curve | None:
    """By least squares on the logarithm. None: too few points, or some that have none, or no time between them."""
    known = [(t, math.log(loss)) for t, loss in zip(times, losses, strict=True) if math.isfinite(loss) and loss > 0]
    if len(known) < LEAST:
        return None
    times, heights = zip(*known, strict=True)
    spread = len(times) * statistics.pvariance(times)
    if spread <= 0:
        return None
    slope, offset = statistics.linear_regression(times, heights)
    rest = sum((y - offset - slope * t) ** 2 for t, y in known)
    error = math.sqrt(rest / (len(known) - 2) / spread)
    return Curve(-slope, offset, error, len(known))


class Fitter:
    """Collects one phase after the other."""

    def __init__(self, phase: int = 200) -> None:
        self._phase = phase
        self._times: list[float] = []
        self._losses: list[float] = []
        self.curve: Curve | None = None
        """Of the newest phase that is over and could be fitted."""

    def add(self, time: float, loss: float) -> None:
        self._times.append(time)
        self._losses.append(loss)
        if len(self._times) >= self._phase:
            self.curve = fit(self._times, self._losses) or self.curve
            self._times.clear()
            self._losses.clear()
