"""Finds where a cost is least, over many orders of magnitude: turns a function of seconds into the seconds to choose. Pure.

Used by `planner.optimise` for each tier and by `rehab.intervals` for the founding model.
"""

from __future__ import annotations

import math
from collections.abc import Callable

_GOLDEN = (math.sqrt(5) - 1) / 2


def least(cost: Callable[[float], float], low: float, high: float, *, marks: int, closer: int) -> float:
    """A coarse look along the whole range at so many marks, then closer and closer, by the golden section."""
    a, b = math.log(low), math.log(high)
    places = [a + (b - a) * n / marks for n in range(marks + 1)]
    near = min(range(marks + 1), key=lambda n: cost(math.exp(places[n])))
    a, b = places[max(0, near - 1)], places[min(marks, near + 1)]
    for _ in range(closer):
        c, d = b - _GOLDEN * (b - a), a + _GOLDEN * (b - a)
        if cost(math.exp(c)) <= cost(math.exp(d)):
            b = d
        else:
            a = c
    # at an end of the range the mark itself may be the best there is
    return min((math.exp((a + b) / 2), math.exp(places[near])), key=cost)
