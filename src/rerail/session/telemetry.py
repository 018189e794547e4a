"""What a rank tells about its own steps: where their time went, and the loss.

Written to the step clock page, where the agent reads it, so that slow ranks and sick training can be seen from outside. Called by
`session.job`; costs a microsecond a step.
"""

from __future__ import annotations

import statistics
import time

from rerail.runtime.clock import METRICS, StepClock
from rerail.session.fabric import fabric
from rerail.session.waiting import idle


class Telemetry:
    """The measurements of one rank."""

    def __init__(self, clock: StepClock | None) -> None:
        self._clock = clock
        self._data = self._saving = self._waited = 0.0
        self._begun = 0.0
        left = clock.durations() if clock is not None else ()
        self.before_s = statistics.median(left) if left else 0.0
        """What a step usually took in earlier processes of this rank; 0 if there were none."""

    def fetched(self, began: float, got: float) -> None:
        """The batch took from `began` to `got`; what came after it until now went into a snapshot or checkpoint."""
        self._data, self._saving = got - began, time.monotonic() - got

    def began(self, now: float) -> None:
        """An attempt at a step begins."""
        self._waited, self._begun = idle.seconds, now
        fabric.exposed_s = 0.0

    def metric(self, name: str, value: float) -> None:
        """A number the user tells; those that say something about the health of training are kept."""
        if self._clock is not None and name in METRICS:
            self._clock.set_metric(METRICS.index(name), value)

    def committed(self, version: int, took: float, stalled: float) -> None:
        """A step is complete."""
        clock = self._clock
        if clock is None:
            return
        waited = idle.seconds - self._waited + fabric.exposed_s
        if idle.promised >= self._begun and idle.kept > idle.promised:
            # DDP waits inside of torch. It has nothing left to compute when its last collective begins
            waited += idle.kept - idle.promised
        waited = min(waited, max(0.0, took - stalled))
        clock.step_took(took, version, self._data, took - waited - stalled, waited, self._saving + stalled)
