"""Where the time of a simulated job goes: turns waiting into seconds by stage and cause, to the last one of the run.

The one place that waits; called by `sim.job` and `sim.repair`.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import simpy

from rerail.sim.training import Losses

Waits = Generator[simpy.Event, Any, bool]


class Stopwatch:
    """Spends simulated time, and writes down on what."""

    def __init__(self, env: simpy.Environment, losses: Losses) -> None:
        self.env, self._losses = env, losses
        self.bell = env.event()
        """Rings when something happens that the job has to look at."""
        self.returned = env.event()
        """Something is back from repair; no reason to interrupt anybody."""
        self._under_way: tuple[str, str, float] | None = None

    @property
    def now(self) -> float:
        return float(self.env.now)

    def ring(self) -> None:
        """Wake whoever waits."""
        if not self.bell.triggered:
            self.bell.succeed()

    def came_back(self) -> None:
        """Tell whoever waits for places."""
        if not self.returned.triggered:
            self.returned.succeed()

    def rearm(self) -> None:
        """What has rung was heard."""
        if self.bell.triggered:
            self.bell = self.env.event()
        if self.returned.triggered:
            self.returned = self.env.event()

    def spend(self, stage: str, cause: str, seconds: float, *, deaf: bool = False) -> Waits:
        """Time passes; True if all of it has, False if the bell rang before."""
        if seconds <= 0:
            return not self.bell.triggered or deaf
        self._under_way = (stage, cause, self.now)
        until = self.env.timeout(seconds)
        yield until if deaf else until | self.bell
        self._note()
        return bool(until.processed or deaf)

    def until(self, stage: str, cause: str, event: simpy.Event) -> Waits:
        """Time passes until something has happened."""
        self._under_way = (stage, cause, self.now)
        yield event
        self._note()
        return True

    def _note(self) -> None:
        if self._under_way is not None:
            stage, cause, began = self._under_way
            self._losses.add(stage, cause, self.now - began)
            self._under_way = None

    def stop(self) -> None:
        """The run is over in the middle of it."""
        self._note()
