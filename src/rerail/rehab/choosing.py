"""Which predictor to trust: lets each guess a checkpoint from those before it, and takes the one that would cost least.

The newest kept version is always one of them: if nothing beats it, it is used, and the choice says so. Called when a checkpoint was
kept, one tensor at a time; used by `session.drifting`.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import NamedTuple

from rerail.rehab.drift import AHEAD, Score, score
from rerail.rehab.predictors import Linear, Predictor, Stale, Window
from rerail.runtime.plans import MARGIN


class Choice(NamedTuple):
    """Who guesses, and why."""

    predictor: Predictor
    costs: dict[str, float]
    """Of every candidate, against the newest kept version."""

    @property
    def why(self) -> str:
        listed = ", ".join(f"{name} {cost:.2f}" for name, cost in sorted(self.costs.items(), key=lambda one: one[1]))
        return f"{self.predictor.name} (expected costs: {listed})"


def choose(windows: Iterable[Window], candidates: Sequence[Predictor] = (Linear(),)) -> Choice:
    """By the newest intervals of what was kept. With too little to tell, what is kept is used as it is."""
    trying = tried(windows, candidates)
    while True:
        try:
            next(trying)
        except StopIteration as end:
            return picked(end.value, candidates)


def tried(windows: Iterable[Window], candidates: Sequence[Predictor]) -> Generator[None, None, dict[str, float]]:
    """What each would have cost, against the newest kept version; bit by bit, one guess at a time."""
    scores = {one.name: Score() for one in candidates}
    for rows, times in windows:
        known = rows.shape[0] - AHEAD
        for one in candidates:
            if known >= one.needs:
                scores[one.name] += score(one.predict(rows[:known], times.first(known)), rows, times)
                yield
    return {name: found.cost for name, found in scores.items()}


def picked(costs: Mapping[str, float], candidates: Sequence[Predictor]) -> Choice:
    """The cheapest, if it is better than what is kept."""
    costs = {Stale().name: 1.0, **costs}
    best = min(candidates, key=lambda one: costs[one.name], default=None)
    good = best is not None and costs[best.name] < MARGIN
    return Choice(best if good and best is not None else Stale(), costs)
