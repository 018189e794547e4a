"""Turns values into places on a drawing: scales, round ticks, numbers as text, and thousands of points into those that show.

Called by `report.charts`. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

POINTS = 1200
"""Of one line; more cannot be told apart on a screen."""


@dataclass(frozen=True)
class Scale:
    """A straight line from values (`low` to `high`) to places (`start` to `until`)."""

    low: float
    high: float
    start: float
    until: float

    @classmethod
    def over(cls, low: float, high: float, start: float, until: float) -> Scale:
        """A single value gets room on both sides."""
        if not high > low:
            low, high = (low - 0.5, high + 0.5) if abs(low) < 1e15 else (low * 0.9, high * 1.1)
        return cls(low, high, start, until)

    @classmethod
    def rounded(cls, low: float, high: float, start: float, until: float) -> Scale:
        """The same, widened to the next tick on both sides."""
        rough = cls.over(low, high, start, until)
        step = _step(rough.high - rough.low, 5)
        floor, roof = math.floor(rough.low / step) * step, math.ceil(rough.high / step) * step
        return cls(0.0 if low == high == 0 else floor, roof, start, until)

    def at(self, value: float) -> float:
        """Its place; what lies outside is put on the edge."""
        inside = min(max(value, self.low), self.high)
        return self.start + (inside - self.low) / (self.high - self.low) * (self.until - self.start)


def ends(values: Iterable[float]) -> tuple[float, float]:
    """The lowest and the highest that is a number; 0 and 1 where there is none."""
    found = [value for value in values if math.isfinite(value)]
    return (min(found), max(found)) if found else (0.0, 1.0)


def ticks(low: float, high: float, about: int) -> list[float]:
    """Round values from low to high, about so many."""
    step = _step(high - low, about)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(place * step, 12) for place in range(first, last + 1)]


def _step(span: float, about: int) -> float:
    """1, 2 or 5 times a power of ten."""
    raw = max(span, 1e-12) / max(1, about)
    power = 10.0 ** math.floor(math.log10(raw))
    return float(next(power * times for times in (1.0, 2.0, 5.0, 10.0) if power * times >= raw * (1 - 1e-9)))


def number(value: float) -> str:
    """As a person would write it: no more digits than matter."""
    if not math.isfinite(value):
        return "not known"
    if value == 0:
        return "0"
    if abs(value) >= 1e6 or abs(value) < 1e-3:
        return f"{value:.3g}"
    decimals = max(0, 3 - math.floor(math.log10(abs(value)))) if abs(value) < 1000 else 0
    text = f"{value:,.{min(decimals, 4)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def thinned(points: Sequence[tuple[float, float]], most: int = POINTS) -> list[tuple[float, float]]:
    """At most about so many points, with every peak and every gap still there: of each stretch first, lowest, highest, last."""
    if len(points) <= most:
        return list(points)
    size = math.ceil(len(points) * 4 / most)
    found: list[tuple[float, float]] = []
    for start in range(0, len(points), size):
        part = list(enumerate(points[start : start + size]))
        numbers = [one for one in part if math.isfinite(one[1][1])]
        kept = {0, len(part) - 1, *(place for place, point in part if not math.isfinite(point[1]))}
        if numbers:
            kept |= {min(numbers, key=lambda one: one[1][1])[0], max(numbers, key=lambda one: one[1][1])[0]}
        gaps = [place for place in sorted(kept) if not math.isfinite(part[place][1][1])]
        drop = set(gaps[1:])  # one gap in a stretch is enough to break the line
        found += [part[place][1] for place in sorted(kept - drop)]
    return found
