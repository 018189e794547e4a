"""What this rank has been told to expect, and what follows for its snapshots and checkpoints: turns an Outlook into steps.

Filled from the plan of each generation by `session.join` and `session.rejoin`; asked by `session.snapshotting` and
`session.checkpoints` when the ranks agree on their next interval. Between two plans the rates fall with the time that has passed
without a fault.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Sequence

from rerail.checkpoint.schedule import Costs, Planned, When
from rerail.planner.model import young_s
from rerail.planner.outlook import Outlook
from rerail.planner.units import duration
from rerail.wording import counted

RECENT = 8
"""Saves whose times count: a store that has become slower or faster shows after half of them."""
KNOWN_STEPS, KNOWN_STALLS = 8, 3
"""Steps, and snapshots, that a rank has to have measured before it says anything about them."""
TELL_FROM = 1.25
"""How much an interval has to change to be worth a word in the journal."""


class Foresight:
    """Of one process."""

    def __init__(self) -> None:
        self._outlook, self._at = Outlook(), time.monotonic()
        self.resumed = -1
        """The version that the newest plan goes on from: there everybody plans anew."""
        self._told = 0
        self._stalls: deque[float] = deque(maxlen=RECENT)
        self._first_stall = True
        self.agreed = 0
        """Steps between two checkpoints that all have agreed on last; 0: none yet."""

    def take(self, outlook: Outlook, version: int) -> None:
        """A plan has come."""
        self._outlook, self._at, self.resumed = outlook, time.monotonic(), version

    def snapshot_steps(self, cost_s: float, step_s: float, share: float) -> int:
        """Steps between two snapshots: what loses least, as long as they take no more than a share of the time."""
        best = young_s(cost_s, self._outlook.behind.between_s(time.monotonic() - self._at))
        return math.ceil(max(best, cost_s / share) / step_s)

    def costs(self, durations: Sequence[float], saved_s: Sequence[float], since: float = 0.0) -> Costs:
        """What a rule for checkpoints goes by. `since`: of a save that is not done yet; it takes at least as long as it has taken."""
        now = time.monotonic()
        return Costs(
            step_s=statistics.median(durations) if durations else 0.0,
            stall_s=statistics.median(self._stalls) if self._stalls else 0.0,
            save_s=max(statistics.median(saved_s) if saved_s else 0.0, now - since if since else 0.0),
            mtbf_s=self._outlook.lost.between_s(now - self._at),
        )

    def stalled(self, seconds: float) -> None:
        """A snapshot held the training up for so long."""
        if self._first_stall and self._stalls:
            self._stalls.clear()  # that of a process' first snapshot, whose memory was new, speaks for no other
            self._first_stall = False
        self._stalls.append(seconds)

    def wish(self, when: When, costs: Costs, steps_known: int, *, new_here: bool) -> int:
        """Steps that this rank would have until the next checkpoint; 0: it knows too little to say, and leaves it to the others.

        A process that took the place of another has times of its own only after some steps and snapshots.
        """
        if steps_known < KNOWN_STEPS or (new_here and len(self._stalls) < KNOWN_STALLS):
            return 0
        return self.steps(when, costs)

    def steps(self, when: When, costs: Costs) -> int:
        """Steps until the next checkpoint: what was agreed last, unless something has changed for good."""
        wish = max(1, when.steps(costs))
        return self.agreed if self.agreed and 1 / TELL_FROM < wish / self.agreed < TELL_FROM else wish

    def worth_telling(self, when: When, steps: int, costs: Costs, mine: int) -> str:
        """Why the next checkpoint is so many steps away, if that is news. `mine`: those that this rank has asked for."""
        if self._told and 1 / TELL_FROM < steps / self._told < TELL_FROM:
            return ""
        self._told = steps
        every = f"a checkpoint every {counted(steps, 'step')}"
        if not mine:
            return f"{every}, as other ranks have asked for: this one is new and has not measured enough yet"
        why = when.why(costs) if isinstance(when, Planned) else f"by the rule {type(when).__name__}"
        measured = (
            f"a step takes {duration(costs.step_s)}, a save holds the training up for {duration(costs.stall_s)} and is done "
            f"after {duration(costs.save_s)}, and a fault that loses the snapshots is expected every {duration(costs.mtbf_s)}"
        )
        if steps > mine:
            return (
                f"{every}, about {duration(steps * costs.step_s)}, as another rank has asked for; "
                f"this one's own times ask for {mine}, {why}: {measured}"
            )
        return f"{every}, about {duration(steps * costs.step_s)}, {why}: {measured}"


foresight = Foresight()
