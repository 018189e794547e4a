"""When to save: rules that turn what steps and saves cost into the number of steps until the next save. Pure.

    EverySteps(100)     EverySeconds(600)     the usual two
    YoungDaly(mtbf_s)   CheckFreq(overhead)   Concurrent(in_flight)      what others do, for comparison
    Planned()           the default

Called by `session.checkpoints` after every save; all ranks that have measured enough agree on the largest answer.
"""

from __future__ import annotations

import math
from typing import NamedTuple, Protocol

from rerail.planner.model import young_s
from rerail.planner.rates import DAY_S


class Costs(NamedTuple):
    """What has been measured so far; 0 where nothing has."""

    step_s: float
    """Median seconds of a step."""
    stall_s: float
    """Seconds for which a save kept the trainer waiting."""
    save_s: float
    """Seconds from the copy to COMMIT."""
    mtbf_s: float = DAY_S
    """Seconds between faults that lose memory snapshots."""


class When(Protocol):
    """A rule."""

    def steps(self, costs: Costs) -> int:
        """Steps until the next save, at least 1."""


class EverySteps(NamedTuple):
    """Every so many steps."""

    interval: int

    def steps(self, costs: Costs) -> int:
        return max(1, self.interval)


class EverySeconds(NamedTuple):
    """About every so many seconds."""

    seconds: float

    def steps(self, costs: Costs) -> int:
        return _steps(self.seconds, costs)


class YoungDaly(NamedTuple):
    """The square root of twice the cost of a save times the time between faults."""

    mtbf_s: float = 0.0

    def steps(self, costs: Costs) -> int:
        return _steps(young_s(costs.stall_s, self.mtbf_s or costs.mtbf_s), costs)


class CheckFreq(NamedTuple):
    """As often as a bound on the slowdown allows, and never before the last save is done."""

    overhead: float = 0.035

    def steps(self, costs: Costs) -> int:
        return _steps(max(costs.stall_s / self.overhead, costs.save_s), costs)


class Concurrent(NamedTuple):
    """As CheckFreq, with several saves under way at the same time."""

    in_flight: int = 2
    overhead: float = 0.035

    def steps(self, costs: Costs) -> int:
        return _steps(max(costs.stall_s / self.overhead, costs.save_s / self.in_flight), costs)


class Planned(NamedTuple):
    """Young and Daly's interval, as long as the disk keeps up and the slowdown stays below one percent."""

    overhead: float = 0.01

    def steps(self, costs: Costs) -> int:
        return _steps(max(self._bounds(costs).values()), costs)

    def why(self, costs: Costs) -> str:
        """What it is that makes the interval as long as it is."""
        bounds = self._bounds(costs)
        return max(bounds, key=lambda one: bounds[one])

    def _bounds(self, costs: Costs) -> dict[str, float]:
        """Seconds between two saves that each reason asks for, at least."""
        return {
            "where saves and lost work together cost least": young_s(costs.stall_s, costs.mtbf_s),
            f"so that saves hold up {self.overhead:.0%} of the time at most": costs.stall_s / self.overhead,
            "so that the store is busy half of the time at most": 2 * costs.save_s,
        }


def _steps(seconds: float, costs: Costs) -> int:
    return max(1, math.ceil(seconds / costs.step_s)) if costs.step_s > 0 else 1
