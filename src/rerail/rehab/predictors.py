"""Where a lost tensor would be by now: turns a few kept versions of it into a guess. Pure but for torch.

    Stale          the newest one that is kept
    Linear         goes on as between two kept ones; by the sum of learning rates, or by steps
    LeastSquares   the same, damped as its own past says

What was kept of one tensor is a window: one row for each version, oldest first. Optimizer moments are left as they were kept: a guess
of theirs is worth nothing, and they do not matter. Used by `session.restore` and `rehab.choosing`; `rehab.vitp` is another one.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple, Protocol

import torch


class Times(NamedTuple):
    """When each row of a window was kept, and the moment that is asked for."""

    kept: tuple[float, ...]
    """The sum of all learning rates up to each, or the steps: whatever the state moves by."""
    wanted: float

    @property
    def spans(self) -> tuple[float, ...]:
        """From each kept version to the next, and from the last to the wanted one."""
        every = (*self.kept, self.wanted)
        return tuple(later - sooner for sooner, later in itertools.pairwise(every))

    def first(self, count: int) -> Times:
        """As it was when `count` versions were kept and the next one was to be guessed."""
        return Times(self.kept[:count], self.kept[count])


class Window(NamedTuple):
    """What was kept of one tensor, and when."""

    rows: torch.Tensor
    times: Times


class Predictor(Protocol):
    """Guesses one tensor at a time."""

    @property
    def name(self) -> str: ...

    @property
    def needs(self) -> int:
        """Versions without which it cannot say anything."""

    def predict(self, window: torch.Tensor, times: Times) -> torch.Tensor:
        """What the flat tensor would be at `times.wanted`."""


class Stale(NamedTuple):
    """As it was."""

    name: str = "stale"
    needs: int = 1

    def predict(self, window: torch.Tensor, times: Times) -> torch.Tensor:
        return window[-1].clone()


class Linear(NamedTuple):
    """On, as over the last `reach` intervals."""

    name: str = "linear"
    reach: int = 1

    @property
    def needs(self) -> int:
        return self.reach + 1

    def predict(self, window: torch.Tensor, times: Times) -> torch.Tensor:
        return torch.lerp(window[-1 - self.reach], window[-1], 1.0 + self._ratio(times))

    def _ratio(self, times: Times) -> float:
        """Of the span to be covered to the one that was seen. Zero where the state stood still: it is not divided by."""
        seen = times.kept[-1] - times.kept[-1 - self.reach]
        return (times.wanted - times.kept[-1]) / seen if seen > 0 else 0.0


class LeastSquares(NamedTuple):
    """On by that part of the last difference that the one before it would have foretold best, for each tensor."""

    name: str = "least squares"
    needs: int = 3

    def predict(self, window: torch.Tensor, times: Times) -> torch.Tensor:
        moved = rates(window, times)
        past, then = moved[:-1].reshape(-1).double(), moved[1:].reshape(-1).double()
        norm = float(past @ past)
        share = float(past @ then) / norm if norm > 0 else 0.0
        return window[-1] + moved[-1] * (share * times.spans[-1])


def rates(window: torch.Tensor, times: Times) -> torch.Tensor:
    """By how much a tensor moved between kept versions, for each unit of time."""
    spans = torch.tensor(times.spans[:-1], dtype=window.dtype, device=window.device).clamp_min(1e-30)
    return (window[1:] - window[:-1]) / spans[:, None]
